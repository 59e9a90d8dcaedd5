"""From settings to the environment of multi-turn completions: which one, its processes, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from lagrpo.errors import refusing
from lagrpo.model.chat import OPENING, Chat, Replies, TemplateError
from lagrpo.rollout.episodes import Episodes, Limits
from lagrpo.settings.environment import EnvironmentSettings
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.task import TaskSettings
from lagrpo.tasks import Task
from lagrpo.tasks.base import Make, TaskWithEnvironment
from lagrpo.tasks.environments import EnvironmentPool, load_environment
from lagrpo.tasks.tools import Tools, system_text

OF_RUN = ""
"""Name of the environment of the run's task; an evaluation set's environment has the set's name."""


@dataclass(frozen=True, slots=True)
class EnvironmentSetup:
    """What completions talk to: `make` makes an environment for each, `role` replies, and `tools` are JSON schemas for
    the chat template, None without tools or if it does not take them."""

    make: Make
    role: str = "user"
    tools: list[dict[str, Any]] | None = None

    @staticmethod
    def find(settings: EnvironmentSettings, task: Task, chat: Chat) -> EnvironmentSetup | None:
        """The environment that the settings or the task name; None for completions of one turn. Raises SettingsError
        for functions that do not exist or do not say how they are called."""
        with refusing("environment", TemplateError):
            make = load_environment(settings, task)
            schemas = make.schemas() if isinstance(make, Tools) else []
            if not isinstance(make, Tools) or not schemas:
                return EnvironmentSetup(make) if make is not None else None
            said = chat.render(OPENING, schemas)
            if all(f'"{schema["function"]["name"]}"' in said for schema in schemas):
                return EnvironmentSetup(make, "tool", schemas)
            return EnvironmentSetup(replace(make, system=system_text(schemas)), "tool")

    def start(self, settings: Settings | EvalSettings, chat: Chat, undo: ExitStack) -> Episodes:
        """Start the processes. Raises SettingsError for an environment that cannot be sent to them, and a chat template
        that changes earlier turns."""
        replies, limits = Replies(chat), settings.environment
        sampled = settings.rollout.max_completion_length if isinstance(settings, Settings) else settings.max_tokens
        with refusing("environment", TypeError, TemplateError):
            replies.check([{"role": self.role, "content": "5"}])
            environments = undo.enter_context(EnvironmentPool(self.make, **settings.verifier.of_an_environment))
        return Episodes(environments, replies, Limits(limits.max_turns, sampled, limits.max_tokens))

    def asking(self, episodes: Episodes) -> dict[str, Any]:
        """What a `PromptSource` needs for these episodes."""
        return {"tools": self.tools, "opening": episodes.environments.open}


def find_environment_setups(
    settings: Settings, task: Task, of_sets: Mapping[str, Task], chat: Chat
) -> dict[str, EnvironmentSetup]:
    """The environments of the run and of evaluation sets with their own tasks, by name. Raises as `find`."""
    alone = settings.environment.model_copy(update={"name": None, "tools": ()})
    found = {OF_RUN: EnvironmentSetup.find(settings.environment, task, chat)}
    found |= {name: EnvironmentSetup.find(alone, other, chat) for name, other in of_sets.items()}
    return {name: talk for name, talk in found.items() if talk is not None}


def check_environment(settings: Settings, make: Make | None, task: TaskSettings) -> None:
    """Raise ValueError for settings that multi-turn completions of `task` exclude."""
    if make is None:
        return
    if task.rewards:
        raise ValueError("the environment gives the rewards of its completions: leave out task.rewards")
    if settings.eval.sampler == "vllm":
        raise ValueError("eval.sampler = 'vllm' evaluates completions of one turn: take 'local'")


def replied(settings: Settings | EvalSettings, *tasks: Task) -> int:
    """The most tokens that an environment says in a completion of these tasks; 0 without one."""
    talking = any(isinstance(task, TaskWithEnvironment) for task in tasks)
    return settings.environment.max_tokens if talking else settings.replied
