"""The settings of a task: section task, and the tasks of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import Field, create_model, model_validator

from lagrpo.rewards.reward import sum_ranges
from lagrpo.settings.rewards import RewardSettings
from lagrpo.settings.section import Section
from lagrpo.tasks import option_takers, task_options


def unset(kind: Any, text: str, **bounds: Any) -> Any:
    """A field that is None where it is not given, with its help and its bounds (ge, gt, le)."""
    return kind | None, Field(default=None, description=text, **bounds)


class _OfEveryTask(Section):
    name: str = "arithmetic"
    """arithmetic, countdown, calculator, guess_number, gsm8k, math, custom, reasoning_gym:NAME, gym:NAME
    (docs/multi-turn.md), or package.module:function that returns a Task."""
    reward: str | None = None
    """Built-in reward (exact, number, math …), or package.module:function (docs/data-and-rewards.md)."""
    rewards: tuple[RewardSettings, ...] = ()
    """Several rewards in place of one, each a table [[task.rewards]]: a completion's reward is their weighted sum
    (docs/data-and-rewards.md)."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and greatest reward: the bounds are in units of this range. With several rewards, by default, the least and
    the greatest sum that their own ranges allow."""
    system_prompt: str | None = None
    """System message in front of every prompt; "" for none."""

    @model_validator(mode="before")
    @classmethod
    def _spread_options(cls, given: Any) -> Any:
        """The table `options` says the same as its entries."""
        if isinstance(given, Mapping) and isinstance(given.get("options"), Mapping):
            own = {name: value for name, value in given["options"].items() if name in cls.model_fields}
            rest = {name: value for name, value in given["options"].items() if name not in own}  # of a generator
            given = {name: value for name, value in given.items() if name != "options"} | own
            return given | ({"options": rest} if rest else {})
        return given

    @model_validator(mode="before")
    @classmethod
    def _sum_ranges(cls, given: Any) -> Any:
        rewards = given.get("rewards") if isinstance(given, Mapping) else None
        if not isinstance(rewards, list | tuple) or not rewards or given.get("reward_range") is not None:
            return given
        try:
            entries = [RewardSettings.model_validate(entry) for entry in rewards]
        except ValueError:  # it is told with its place, when the entries themselves are read
            return given
        return {**given, "reward_range": sum_ranges([(entry.weight, entry.range) for entry in entries])}

    @model_validator(mode="after")
    def _check_range(self) -> _OfEveryTask:
        if self.rewards and not any(each.weight for each in self.rewards):
            raise ValueError("rewards: all weights are 0, so that every reward would be 0")
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range goes from the least to the greatest reward, not {self.reward_range}")
        return self


def _default_of(name: str) -> str:
    """The default of an option, of each task where they differ."""
    by_task = {task: made for task, options in task_options().items() for made in fields(options) if made.name == name}
    defaults = {task: str(made.default) for task, made in by_task.items()}
    first, *others = dict.fromkeys(defaults.values())
    return ", ".join(f"{default} ({task})" for task, default in defaults.items()) if others else first


def _task_options() -> dict[str, Any]:
    """The options that the tasks' own files declare."""
    found: dict[str, Any] = {}
    for options in task_options().values():
        types = get_type_hints(options)
        for option in fields(options):
            help, least, most = (option.metadata[name] for name in ("help", "least", "most"))
            default = f"; by default {_default_of(option.name)}" if option.default is not None else ""
            text = f"{', '.join(option_takers()[option.name])}: {help}{default}."
            found[option.name] = unset(types[option.name], text, ge=least, le=most)
    return found


_WithOptions: Any = create_model("TaskOptions", __base__=_OfEveryTask, **_task_options())


class TaskSettings(_WithOptions):
    """What is asked, and how an answer is scored. An option can be given where the named task takes it."""
