"""What `lagrpo.train` is given in Python, as settings and a task: data and reward functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lagrpo.rewards.builtin import exact
from lagrpo.rewards.load import check_rewards, load_rewards
from lagrpo.rewards.reward import Reward, Rewards
from lagrpo.settings.rewards import RewardSettings
from lagrpo.settings.schema import Settings
from lagrpo.tasks import RowTask, Task, load_task
from lagrpo.tasks.custom import ANSWER, PROMPT
from lagrpo.tasks.data import hold_out, select


def as_settings(model: Any, data: Any, rewards: Sequence[Any] | None) -> dict[str, Any]:
    """The settings of these arguments, as far as they are settings."""
    found: dict[str, Any] = {} if model is None else {"model.path": os.fspath(model)}
    if data is not None:
        found["task.name"] = "custom"
    if isinstance(data, str | os.PathLike):
        found["task.data"] = os.fspath(data)
    if rewards is not None and not any(map(callable, rewards)):
        found["task.rewards"] = [{"name": each, "reward": each} if isinstance(each, str) else each for each in rewards]
    return found


def build_task(settings: Settings, data: Any, rewards: Sequence[Any] | None) -> Task | None:
    """The task of data that is not on the disk (a list of dicts, a datasets.Dataset) and of reward functions; None if
    the settings say all. Raises ValueError for rows without the columns."""
    functions = [reward for reward in rewards or () if callable(reward)]
    named = data is None or isinstance(data, str | os.PathLike)
    if named and not functions:
        return None
    own = settings.task
    if functions:
        own = own.model_copy(update={"rewards": (RewardSettings(name="none", reward="lagrpo.rewards.builtin:exact"),)})
    task: Any = load_task(own, settings.run.seed) if named else _build_rows(settings, data)
    if not functions:
        check_rewards(own.reward, own.rewards)
        return replace(task, reward=load_rewards(own.reward, own.rewards, exact))
    made = [each if isinstance(each, Reward) else Reward(_name(each), each) for each in functions]
    return replace(task, reward=Rewards(tuple(made)))


def _name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "reward"


def _build_rows(settings: Settings, data: Any) -> RowTask:
    """The task of rows in memory; a tenth of them is held out for testing."""
    rows = data if hasattr(data, "select") else list(data)
    columns = list(rows[0]) if len(rows) else []
    prompt = settings.task.prompt_column or next((name for name in PROMPT if name in columns), PROMPT[0])
    answer = settings.task.answer_column or ANSWER
    for name in (prompt, answer):
        if name not in columns:
            raise ValueError(f"data: there is no column {name!r}; the columns are {', '.join(columns)}")
    train, test = (select(rows, chosen) for chosen in hold_out(len(rows), settings.run.seed))
    given = {"train": train, "test": test}, partial(_ask, prompt, answer)
    return RowTask("custom", *given, None, settings.task.system_prompt)


def _ask(prompt: str, answer: str, row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row[prompt], row[answer]
