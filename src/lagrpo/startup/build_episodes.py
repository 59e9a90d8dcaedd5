"""From settings to the episodes of a task: the environment and the limits of its turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lagrpo.errors import as_settings_error, one_line
from lagrpo.model.chat import OPENING, Chat, TemplateError
from lagrpo.model.replies import Replies
from lagrpo.rewards.pool import WorkerPool
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import TaskSettings
from lagrpo.tasks import Task, environment_of, is_multi_turn
from lagrpo.tasks.environments import Tools, find_calls, system_text
from lagrpo.tasks.episodes import Episodes
from lagrpo.types import JsonObject, JsonView


def build_episodes(
    settings: Settings,
    task_settings: TaskSettings,
    task: Task,
    chat: Chat,
    workers: int | None = None,
) -> Episodes | None:
    """Starts the task's environment in worker processes. Returns None for completions of one turn.

    `task_settings` are the settings of this task, which may belong to an evaluation set. Raises
    SettingsError for tools that do not say how they are called, for an environment that cannot be
    sent to processes, and for a chat template that changes earlier turns, or writes calls in an
    unknown format.
    """
    make = environment_of(task)
    if make is None:
        return None
    with as_settings_error("task", TypeError, TemplateError):
        tools = None
        reply_role = "user"
        if isinstance(make, Tools):
            reply_role = "tool"
            tools = make.schemas()
            opening = chat.render(OPENING)
            opening_with_tools = chat.render(OPENING, tools)
            shows_tools = all(
                opening_with_tools.count(name) > opening.count(name) for name in make.functions
            )
            if shows_tools:
                check_call_format(chat, make, tools)
            else:
                # The template ignores tools: describe them in a system message instead.
                make = replace(make, system=system_text(tools))
                tools = None
        replies = Replies(chat)
        replies.check([{"role": reply_role, "content": "5"}])
        return Episodes(
            pool=WorkerPool(make, workers),
            replies=replies,
            turns=task_settings.max_turns,
            sampled=settings.rollout.max_completion_length,
            replied=settings.reply_limit,
            tools=tools,
            deadline=task_settings.reward_timeout,
        )


def check_call_format(chat: Chat, make: Tools, schemas: list[JsonObject]) -> None:
    """Raises ValueError if the chat template writes calls in a format that `find_calls` lacks."""
    function = schemas[0]["function"]
    properties = function["parameters"]["properties"]
    arguments = {name: example_argument(schema) for name, schema in properties.items()}
    try:
        turn = chat.render_call(function["name"], arguments, schemas)
    except TemplateError:
        return  # it cannot render calls
    if function["name"] not in turn:
        return  # it leaves out calls
    try:
        calls = find_calls(turn, make.functions)
    except ValueError:
        calls = []
    if calls != [(function["name"], arguments)]:
        raise ValueError(
            f"the chat template writes a call as {one_line(turn, 160)!r}, which lagrpo does not "
            "read. Set model.chat_template to a file with calls as Qwen3, Qwen3-Coder or Llama 3 "
            "writes them"
        )


def example_argument(schema: JsonView) -> Any:
    """Returns a value that a JSON schema of a parameter allows."""
    if "enum" in schema:
        return schema["enum"][0]
    kinds = schema.get("type", "string")  # a type, or a list of them
    examples = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "object": {}}
    for kind, example in examples.items():
        if kind in kinds:
            return example
    return []


def max_reply_tokens(settings: Settings, *tasks: Task) -> int:
    """Returns the most tokens that replies add to a completion of these tasks.

    It is 0 without tools and environments, of `tasks` and of the run's task by its name.
    """
    has_replies = (
        any(environment_of(task) is not None for task in tasks)
        or len(settings.task.tools) > 0
        or is_multi_turn(settings.task.name)
    )
    return settings.reply_limit if has_replies else 0
