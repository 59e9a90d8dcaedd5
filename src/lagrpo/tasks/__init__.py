"""Tasks: prompts, and a reward for their completions or an environment that they talk to. Each has one file; the
keyword arguments of its function `load` are the task's options.

Worker processes import this module and the tasks, so nothing here imports torch, numpy or pydantic at the top.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_origin, runtime_checkable

from lagrpo.core.references import describe_raised
from lagrpo.errors import as_settings_error, suggest
from lagrpo.rewards.reward import OWN, REWARDS, Rewards, check_rewards, load_function, load_rewards
from lagrpo.types import Prompt

logger = logging.getLogger("lagrpo")
BUILTIN = (
    "arithmetic",
    "countdown",
    "gsm8k",
    "math",
    "custom",
    "calculator",
    "guess_number",
    "gym",
    "reasoning_gym",
)
"""The tasks of this package. The last two take a name after a colon: of an environment, of a generator."""
NOT_A_TASK = "is not a Task: a Task has name, reward, size(split) and prompt(split, index)"
Messages = Sequence[Mapping[str, Any]]
Ask = Callable[
    [Any], tuple[str | Messages, Any]
]  # a row -> its question (a text, or messages) and reference answer
Key = tuple[int | str, ...]  # of random numbers: lagrpo.rng.uniforms(count, *key)


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's reply: chat messages ({"role": "user", "content": …}, or a tool's), the reward so far, which
    counts if the episode ends here, and why it is done."""

    messages: Messages = ()
    reward: float = 0.0
    done: bool = False
    reason: str = ""


class Environment(Protocol):
    """One episode: a completion of several turns. It is pickled between turns, because another worker process may take
    the next one. If it raises or exceeds the deadline of a turn, the completion is *unscored*."""

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        """The messages that the policy sees first, such as `prompt.messages`. They may depend on the prompt alone,
        because the completions of a group share them; later messages may use random numbers of `key`."""
        ...

    def step(self, text: str) -> StepResult:
        """Answer to the policy's turn, which is given without special tokens."""
        ...


Make = Callable[
    [], Environment
]  # a class or a function at the top level of a module, or an object; pickled


@runtime_checkable
class Task(Protocol):
    """Prompts in two splits, "train" and "test", and their reward. With an attribute `environment` (what makes one, or
    None) completions are episodes."""

    @property
    def name(self) -> str: ...

    @property
    def reward(self) -> Any:
        """A reward function, or several `lagrpo.rewards.reward.Rewards`."""
        ...

    def size(self, split: str) -> int:
        """Count the prompts of the split."""
        ...

    def prompt(self, split: str, index: int) -> Prompt:
        """Prompt `index` (0 .. size - 1) of a split: its key is the index, its token_ids are empty."""
        ...


def environment_of(task: Task) -> Make | None:
    """What makes the environments of a task's completions; None if they have one turn."""
    return getattr(task, "environment", None)


@dataclass(frozen=True, slots=True)
class RowTask:
    """A task made of rows, by split.

    >>> task = RowTask("sums", {"train": [(2, 3)], "test": []}, lambda row: (f"{row[0]} + {row[1]}?", "5"), print)
    >>> task.prompt("train", 0).messages
    ({'role': 'user', 'content': '2 + 3?'},)
    """

    name: str
    rows: Mapping[str, Sequence[Any]]
    ask: Ask
    reward: Any  # a reward function, or several Rewards
    system_prompt: str | None = None
    environment: Make | None = None  # for completions of several turns

    def size(self, split: str) -> int:
        return len(self.rows[split])

    def prompt(self, split: str, index: int) -> Prompt:
        row = self.rows[split][index]
        question, answer = self.ask(row)
        columns = dict(row) | {"prompt": question} if isinstance(row, Mapping) else None
        messages = build_messages(question, self.system_prompt, is_padded(row))
        return Prompt(index, messages, answer, row=columns, place=getattr(row, "place", ""))


def select(rows: Any, chosen: Sequence[int]) -> Any:
    """These rows of a sequence, or of a hub dataset, which stays on the disk."""
    return rows.select(chosen) if hasattr(rows, "select") else [rows[n] for n in chosen]


def name_prompt(task: Task, split: str, index: int, prompt: Prompt | None = None) -> str:
    """A prompt in messages: its number, and file and line if it has them."""
    name = f"prompt {index} of the {split} split of {task.name!r}"
    return f"{name} ({prompt.place})" if prompt is not None and prompt.place else name


def drop_overlong(task: Task, rollout: Any, chat: Any) -> Task:
    """The task without rows whose prompt is too long, if the settings (section rollout) say so. Raises ValueError for a
    task without rows."""
    if rollout.overlong_prompts != "drop" or environment_of(task) is not None:
        return task
    if not isinstance(task, RowTask):
        raise ValueError(
            f"rollout.overlong_prompts = 'drop' needs a RowTask, not a {type(task).__name__}"
        )
    left = dict[str, Any]()
    limit = rollout.max_prompt_length
    for split, rows in task.rows.items():
        kept = []
        for index in range(len(rows)):
            prompt = task.prompt(split, index)
            with as_settings_error(name_prompt(task, split, index, prompt)):
                if len(chat.tokenize(prompt).token_ids) <= limit:
                    kept.append(index)
        if dropped := len(rows) - len(kept):
            text = "%d of the %d prompts of the %s split are dropped: they have more than %d tokens"
            logger.warning(text, dropped, len(rows), split, limit)
        left[split] = select(rows, kept)
    return replace(task, rows=left)


def is_padded(row: Any) -> bool:
    """True for a row of Parquet or of a dataset: there all objects of a column have the same keys, with None for those
    that an object lacks."""
    path = getattr(row, "path", None)  # rows of datasets have none
    return path is None or str(path).endswith((".parquet", ".parquet.gz"))


def build_messages(
    question: str | Messages, system_prompt: str | None = None, padded: bool = False
) -> tuple[Mapping[str, Any], ...]:
    """The messages for the chat template: the system prompt, if any, then the question as the user's turn, or the given
    messages, as `plain_message` gives them. Raises ValueError for what cannot be asked so."""
    has_text = isinstance(question, str) and question.strip()
    given: Any = [{"role": "user", "content": question}] if has_text else question
    listed = given if isinstance(given, list | tuple) else ()
    has_roles = all(
        isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in listed
    )
    turns = [plain_message(turn, padded) for turn in listed] if has_roles else []
    if not turns or not isinstance(turns[-1].get("content"), str):
        form = "a prompt is a text, or a list of messages with role and content, the last of which has a text"
        raise ValueError(f"its prompt is {question!r:.80}: {form}")
    if strange := {turn["role"] for turn in turns} & {"human", "gpt", "bot", "ai"}:
        raise ValueError(
            f"its prompt has the role {min(strange)!r}: chat templates know user, assistant and system"
        )
    if system_prompt and turns[0]["role"] == "system":
        raise ValueError(
            "the prompt already has a system message: leave task.system_prompt unset for this data"
        )
    return (*([{"role": "system", "content": system_prompt}] if system_prompt else []), *turns)


def plain_message(message: Mapping[str, Any], padded: bool = False) -> dict[str, Any]:
    """The message as chat templates take it: without keys that are None, with its text parts as one text, and with the
    arguments of its calls as objects, in which None stays unless they are `padded` (see `is_padded`). Raises ValueError
    for a part that is not a text."""
    message = without_none(json.loads(json.dumps(message)))
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [plain_call(call, padded) for call in calls]
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                f"a message has the part {part!r:.80}: only parts of type text are supported"
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def plain_call(call: Any, padded: bool) -> dict[str, Any]:
    """The call of a function in a message. Arguments as JSON text, as OpenAI's API has them, become an object; a text
    that is no object stays as it is. Raises ValueError for a call without a name."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        form = '{"function": {"name": ..., "arguments": {...}}}'
        raise ValueError(f"a message has the call {call!r:.80}: a call is {form}")
    function = without_none(function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            read = json.loads(arguments or "{}")
            function["arguments"] = read if isinstance(read, dict) else arguments
    elif padded and arguments is not None:
        function["arguments"] = without_none_anywhere(arguments)
    if "function" not in call:  # name and arguments alone, as Hermes has them
        return {"type": "function", "function": function}
    return without_none({**call, "function": function})


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without keys that are None."""
    return {key: value for key, value in table.items() if value is not None}


def without_none_anywhere(value: Any) -> Any:
    """The value without keys that are None in its objects."""
    return json.loads(json.dumps(value), object_hook=without_none)


def order_prompts(seed: int, epoch: int, size: int) -> list[int]:
    """The order in which an epoch visits the `size` prompts of a split: a permutation, a function of its arguments."""
    from lagrpo.rng import permutation

    return permutation(size, seed, "prompt order", epoch).tolist()


# ---- from the settings ----


def is_multi_turn(name: str) -> bool:
    """Whether the completions of the task of this name talk to an environment of the task."""
    return name in ("calculator", "guess_number") or name.startswith("gym:")


def check_options(settings: Any) -> None:
    """Raise ValueError for an unknown task or reward, and options that the task does not take. Loads no data."""
    check_rewards(settings.rewards)
    kind = settings.name.partition(":")[0]
    if kind in BUILTIN:
        read_options(settings)
    elif ":" not in settings.name:
        known = (
            f"there are {', '.join(BUILTIN)} and 'package.module:function'.{suggest(kind, BUILTIN)}"
        )
        raise ValueError(f"task.name: no task {kind!r}; {known}")
    if kind == "custom" and (
        not settings.rewards or any(each.reward == OWN for each in settings.rewards)
    ):
        raise ValueError(
            f"the task 'custom' needs task.rewards: {', '.join(REWARDS)}, or 'package.module:function'"
        )


def read_options(settings: Any) -> dict[str, Any]:
    """The options of a built-in task, keyword arguments of its `load`. Raises ValueError for wrong ones."""
    from pydantic import TypeAdapter, ValidationError

    kind, read = settings.name.partition(":")[0], dict[str, Any]()
    load = importlib.import_module(f"lagrpo.tasks.{kind}").load
    parameters = inspect.signature(load, eval_str=True).parameters.values()
    known = {each.name: each.annotation for each in parameters if each.kind == each.KEYWORD_ONLY}
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters)
    for name, value in settings.given_options.items():
        if name not in known and not takes_all:
            takes = f"it takes {', '.join(known) or 'none'}.{suggest(name, known)}"
            where = (
                "options" if name in settings.options else name
            )  # the others are settings, such as task.data
            raise ValueError(f"task.{where}: the task {kind!r} has no option {name!r}: {takes}")
        try:
            wanted = known.get(name, Any)
            alone = get_origin(wanted) in (tuple, list) and not isinstance(value, list | tuple)
            read[name] = TypeAdapter(wanted).validate_python([value] if alone else value)
        except ValidationError as error:
            raise ValueError(
                f"task.options.{name} = {value!r:.80}: {error.errors()[0]['msg']}"
            ) from error
    return read


def load_task(settings: Any, seed: int) -> Task:
    """The task that the settings name; what it generates is a function of the seed. For "package.module:function" it is
    what function(settings, seed) returns. Raises ValueError, TypeError if that is not a Task, and ImportError."""
    check_options(settings)
    kind, _, variant = settings.name.partition(":")
    if kind in BUILTIN:
        load = importlib.import_module(f"lagrpo.tasks.{kind}").load
        task = load(seed, *[variant] if variant else [], **read_options(settings))
        task = copy_with(task, name=settings.name, system_prompt=settings.system_prompt)
    else:
        make_task = load_function(settings.name)
        try:
            task = make_task(settings, seed)
        except (ValueError, ImportError):  # their messages are for the user
            raise
        except Exception as error:
            raise ValueError(
                f"task.name: {settings.name!r} raised {describe_raised(error)}"
            ) from error
        if not isinstance(task, Task):
            raise TypeError(
                f"task.name: {settings.name!r} returned a {type(task).__name__}, which {NOT_A_TASK}"
            )
    if settings.rewards:
        if environment_of(task) is not None:
            raise ValueError(
                f"task.rewards: the environment of {settings.name!r} gives the rewards; unset them"
            )
        task = copy_with(task, reward=load_rewards(settings.rewards, task.reward))
    return complete_task(task, settings.tools)


def complete_task(task: Task, tools: Sequence[str]) -> Task:
    """The task, with an environment in which the policy may call these functions. Raises ValueError for unfit tools,
    and reward functions that need what neither lagrpo nor the data passes."""
    if task.size("train"):
        row = task.prompt("train", 0).row
        for reward in Rewards.from_reward(task.reward).parts:
            reward.check(row)
    if not tools:
        return task
    from lagrpo.tasks.environments import make_tools

    environment = make_tools(tools, task)
    return copy_with(task, environment=environment, reward=environment.reward)


def copy_with(task: Any, **attributes: Any) -> Any:
    """A copy of the task with other attributes, also if it is a frozen dataclass."""
    task = copy(task)
    for name, value in attributes.items():
        object.__setattr__(task, name, value)
    return task
