"""Tasks: prompts, and a reward for their completions or an environment that they talk to.

Each task has one file. The keyword arguments of its function `load` are the task's options.

Worker processes import this module and the tasks, so nothing here imports torch, numpy or pydantic
at the top.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, TypeVar, get_origin, runtime_checkable

from lagrpo.core.references import call_users_function
from lagrpo.errors import as_settings_error, suggest
from lagrpo.rewards.entries import (
    OWN,
    REWARDS,
    RewardEntry,
    check_rewards,
    load_function,
    load_rewards,
    load_rewards_of_environment,
)
from lagrpo.rewards.reward import RewardFunction, Rewards
from lagrpo.tasks.messages import Messages, build_messages, is_padded, read_tools
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
"""The tasks of this package.

`gym` takes the name of an environment after a colon, `reasoning_gym` the name of a generator.
"""

NOT_A_TASK = "is not a Task: a Task has name, reward, size(split) and prompt(split, index)"

Ask = Callable[[Any], tuple[str | Messages, Any]]
"""Takes a row. Returns its question (a text, or messages) and its reference answer."""

AnyTask = TypeVar("AnyTask", bound="Task")

Key = tuple[int | str, ...]
"""The key of random numbers: lagrpo.rng.uniforms(count, *key)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's reply to a turn of the policy."""

    messages: Messages = ()  # {"role": "user", "content": …}, or a tool's
    reward: float = 0.0  # so far; counts if the episode ends here
    done: bool = False
    reason: str = ""  # why it is done
    is_answer: bool = False  # it is done, and the task's reward functions score the turn


class TaskEntry(Protocol):
    """The settings of a task, as `lagrpo.settings.sections.TaskSettings` has them."""

    @property
    def name(self) -> str: ...

    @property
    def system_prompt(self) -> str | None: ...

    @property
    def options(self) -> Mapping[str, object]: ...

    @property
    def task_options(self) -> Mapping[str, object]:
        """The options, with task.data, prompt_column and answer_column if they are set."""
        ...

    @property
    def rewards(self) -> Sequence[RewardEntry]: ...

    @property
    def tools(self) -> Sequence[str]: ...


class PromptLimit(Protocol):
    """The limit of a prompt's length, as `lagrpo.settings.sections.RolloutSettings` has it."""

    @property
    def overlong_prompts(self) -> str: ...

    @property
    def max_prompt_length(self) -> int: ...


class Tokenizer(Protocol):
    """The part of `lagrpo.model.chat.Chat` that tasks need."""

    def tokenize(self, prompt: Prompt) -> Prompt: ...


class Environment(Protocol):
    """One episode: a completion of several turns.

    It is pickled between turns, because another worker process may take the next one. If it raises
    or exceeds the deadline of a turn, the completion is *unscored*.
    """

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        """Returns the messages that the policy sees first, such as `prompt.messages`.

        They may depend on the prompt alone, because the completions of a group share them. Later
        messages may use random numbers of `key`.
        """
        ...

    def step(self, text: str) -> StepResult:
        """Replies to the policy's turn: its text without special tokens.

        If it has a parameter `prefix`, it also gets the beginning of the turn that the prompt or
        the last reply ends with, such as a <think> of the chat template.
        """
        ...


Make = Callable[[], Environment]
"""Makes an environment: a class or function at the top level of a module, or an object; pickled."""


@runtime_checkable
class Task(Protocol):
    """Prompts in two splits, "train" and "test", and their reward.

    A task may have an attribute `environment` (a `Make`, or None): then completions are episodes.

    A prompt has one or more messages {"role": …, "content": …}, the last of them with a text, and
    a reference answer that JSON can hold. A reward function returns one number per completion.
    """

    @property
    def name(self) -> str:
        """The task's name in messages and records."""
        ...

    @property
    def reward(self) -> RewardFunction | Rewards:
        """A reward function, or several `lagrpo.rewards.reward.Rewards`."""
        ...

    def size(self, split: str) -> int:
        """Returns the number of prompts of the split."""
        ...

    def prompt(self, split: str, index: int) -> Prompt:
        """Returns prompt `index` (0 .. size - 1) of a split.

        Its key is the index, and its token_ids are empty.
        """
        ...


def environment_of(task: Task) -> Make | None:
    """Returns the factory of environments for a task's completions; None if they have one turn."""
    return getattr(task, "environment", None)


@dataclass(frozen=True, slots=True)
class RowTask:
    """A task made of rows, by split.

    >>> rows = {"train": [(2, 3)], "test": []}
    >>> task = RowTask("sums", rows, lambda row: (f"{row[0]} + {row[1]}?", "5"), print)
    >>> task.prompt("train", 0).messages
    ({'role': 'user', 'content': '2 + 3?'},)
    """

    name: str
    rows: Mapping[str, Sequence[Any]]
    ask: Ask
    reward: RewardFunction | Rewards
    system_prompt: str | None = None
    environment: Make | None = None  # for completions of several turns

    def size(self, split: str) -> int:
        return len(self.rows[split])

    def prompt(self, split: str, index: int) -> Prompt:
        row = self.rows[split][index]
        question, answer = self.ask(row)
        padded = is_padded(row)
        columns = None
        tools = ()
        if isinstance(row, Mapping):
            columns = {**row, "prompt": question}
            tools = read_tools(row, padded=padded)
        messages = build_messages(question, self.system_prompt, padded=padded)
        place = getattr(row, "place", "")
        return Prompt(index, messages, answer, row=columns, place=place, tools=tools)


def select(rows: Any, indices: Sequence[int]) -> Any:
    """Returns these rows of a sequence, or of a hub dataset, which stays on the disk."""
    if hasattr(rows, "select"):
        return rows.select(indices)
    return [rows[index] for index in indices]


def name_prompt(task: Task, split: str, index: int, prompt: Prompt | None = None) -> str:
    """Returns the name of a prompt in messages: its number, and file and line if it has them."""
    name = f"prompt {index} of the {split} split of {task.name!r}"
    if prompt is not None and prompt.place:
        return f"{name} ({prompt.place})"
    return name


def drop_overlong(task: Task, rollout: PromptLimit, chat: Tokenizer) -> Task:
    """Returns the task without rows whose prompt is too long, if the settings say so.

    rollout: the settings of the section rollout. Raises ValueError as `drops_overlong`.
    """
    if not drops_overlong(task, rollout):
        return task
    max_tokens = rollout.max_prompt_length
    rows_left: dict[str, Any] = {}
    for split, rows in task.rows.items():
        kept_indices = find_fitting(task, split, max_tokens, chat)
        num_dropped = len(rows) - len(kept_indices)
        if num_dropped:
            logger.warning(
                "%d of the %d prompts of the %s split are dropped: they have more than %d tokens",
                num_dropped,
                len(rows),
                split,
                max_tokens,
            )
        rows_left[split] = select(rows, kept_indices)
    return replace(task, rows=rows_left)


def drops_overlong(task: Task, rollout: PromptLimit) -> TypeGuard[RowTask]:
    """True if prompts of the task that are too long are dropped.

    A task with an environment keeps them: the environment decides how its prompts begin. Raises
    ValueError for a task without rows.
    """
    if rollout.overlong_prompts != "drop" or environment_of(task) is not None:
        return False
    if not isinstance(task, RowTask):
        raise ValueError(
            f"rollout.overlong_prompts = 'drop' needs a RowTask, not a {type(task).__name__}"
        )
    return True


def find_fitting(task: RowTask, split: str, max_tokens: int, chat: Tokenizer) -> list[int]:
    """Returns the indices of a split's prompts that have at most `max_tokens` tokens.

    Raises SettingsError for a prompt that cannot be rendered.
    """
    indices: list[int] = []
    for index in range(task.size(split)):
        prompt = task.prompt(split, index)
        with as_settings_error(name_prompt(task, split, index, prompt)):
            if len(chat.tokenize(prompt).token_ids) <= max_tokens:
                indices.append(index)
    return indices


# Order


def order_prompts(seed: int, epoch: int, size: int) -> list[int]:
    """Returns the order in which an epoch visits the `size` prompts of a split.

    It is a permutation of 0 .. size - 1, a function of the arguments alone.
    """
    from lagrpo.rng import permutation

    return permutation(size, seed, "prompt order", epoch).tolist()


# From the settings


def is_multi_turn(name: str) -> bool:
    """True if completions of the task of this name talk to an environment of the task."""
    return name in ("calculator", "guess_number") or name.startswith("gym:")


def check_options(settings: TaskEntry) -> None:
    """Raises ValueError for an unknown task or reward, and for options that the task does not take.

    Loads the function of a user's task, but no data.
    """
    check_rewards(settings.rewards)
    kind = settings.name.partition(":")[0]
    if kind in BUILTIN:
        read_options(settings)
    elif ":" not in settings.name:
        raise ValueError(
            f"task.name: no task {kind!r}; there are {', '.join(BUILTIN)} and "
            f"'package.module:function'.{suggest(kind, BUILTIN)}"
        )
    else:
        with as_settings_error("task.name"):
            load_function(settings.name)
    # The task `custom` brings no reward function.
    has_own_rewards = settings.rewards and all(entry.reward != OWN for entry in settings.rewards)
    if kind == "custom" and not has_own_rewards:
        raise ValueError(
            f"the task 'custom' needs task.rewards: {', '.join(REWARDS)}, or "
            "'package.module:function'"
        )


def read_options(settings: TaskEntry) -> dict[str, object]:
    """Returns the options of a built-in task: keyword arguments of its `load`.

    Raises ValueError for wrong options.
    """
    kind = settings.name.partition(":")[0]
    load = importlib.import_module(f"lagrpo.tasks.{kind}").load
    parameters = inspect.signature(load, eval_str=True).parameters.values()
    types = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if parameter.kind == parameter.KEYWORD_ONLY
    }
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    options: dict[str, object] = {}
    for name, value in settings.task_options.items():
        if name not in types and not takes_all:
            # A name that is not in task.options comes from a setting such as task.data.
            setting = "options" if name in settings.options else name
            raise ValueError(
                f"task.{setting}: the task {kind!r} has no option {name!r}: "
                f"it takes {', '.join(types) or 'none'}.{suggest(name, types)}"
            )
        options[name] = _convert_option(name, value, types.get(name, Any))
    return options


def _convert_option(name: str, value: object, option_type: Any) -> object:
    """Returns the value as this type, in which a single value stands for a list of one."""
    from pydantic import TypeAdapter, ValidationError

    try:
        is_sequence_type = get_origin(option_type) in (tuple, list)
        adapter = TypeAdapter(option_type)
        if is_sequence_type and not isinstance(value, list | tuple):
            return adapter.validate_python([value])
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(
            f"task.options.{name} = {value!r:.80}: {error.errors()[0]['msg']}"
        ) from error


def load_task(settings: TaskEntry, seed: int) -> Task:
    """Loads the task that the settings name. Problems that it generates are a function of the seed.

    "package.module:function" names a function(settings, seed) that returns the task. Raises
    ValueError, ImportError, and TypeError if the function's result is not a Task.
    """
    check_options(settings)
    if settings.name.partition(":")[0] in BUILTIN:
        task = _load_builtin_task(settings, seed)
    else:
        task = _load_users_task(settings, seed)
    if settings.rewards:
        load = load_rewards
        if environment_of(task) is not None:
            load = load_rewards_of_environment
        task = copy_with(task, reward=load(settings.rewards, task.reward))
    return complete_task(task, settings.tools)


def _load_builtin_task(settings: TaskEntry, seed: int) -> Task:
    kind, _, variant = settings.name.partition(":")
    load = importlib.import_module(f"lagrpo.tasks.{kind}").load
    options = read_options(settings)
    task = load(seed, variant, **options) if variant else load(seed, **options)
    return copy_with(task, name=settings.name, system_prompt=settings.system_prompt)


def _load_users_task(settings: TaskEntry, seed: int) -> Task:
    name = settings.name
    task = call_users_function(load_function(name), f"task.name: {name!r}", settings, seed)
    if not isinstance(task, Task):
        raise TypeError(f"task.name: {name!r} returned a {type(task).__name__}, which {NOT_A_TASK}")
    return task


def complete_task(task: Task, tools: Sequence[str]) -> Task:
    """Returns the task, with an environment in which the policy may call these functions.

    Raises ValueError for unfit tools, and for reward functions that need an argument that neither
    lagrpo nor the data passes.
    """
    first, *others = Rewards.from_reward(task.reward).parts
    split = next((split for split in ("train", "test") if task.size(split)), None)
    if split is not None:
        prompt = task.prompt(split, 0)
        for reward in (first, *others):
            reward.check(prompt.row)
        if prompt.tools and (tools or environment_of(task) is not None):
            logger.warning(
                "the model does not see the column 'tools': its environment says what it may call"
            )
    if not tools:
        return task
    from lagrpo.tasks.environments import make_tools

    # An episode that a limit ends before the answer has the environment's first reward, 0.
    rewards = Rewards((replace(first, is_of_environment=True), *others))
    return copy_with(task, environment=make_tools(tools, task), reward=rewards)


def copy_with(task: AnyTask, **attributes: object) -> AnyTask:
    """Returns a copy of the task with other attributes, even if it is a frozen dataclass."""
    task = copy(task)
    for name, value in attributes.items():
        object.__setattr__(task, name, value)
    return task
