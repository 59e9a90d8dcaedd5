"""The settings of a task: those that every task takes, and the options that the tasks' own files declare."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import Field, create_model, model_validator

from lagrpo.settings.base import Section
from lagrpo.tasks import option_takers, task_options


class _OfEveryTask(Section):
    name: str = "arithmetic"
    """arithmetic, countdown, gsm8k, math, custom, or package.module:function that returns a Task."""
    reward: str | None = None
    """Built-in judge (exact, number, math …) or package.module:function, called as function(text, gold) -> float."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and greatest reward: the bounds are in units of this range."""
    system_prompt: str | None = None
    """System message in front of every prompt; "" for none."""

    @model_validator(mode="after")
    def _check_range(self) -> _OfEveryTask:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range goes from the least to the greatest reward, not {self.reward_range}")
        return self


def _declared_options() -> dict[str, Any]:
    """The options of all tasks as pydantic's fields, each None where it is not given."""
    found: dict[str, Any] = {}
    for options in task_options().values():
        types = get_type_hints(options)
        for option in fields(options):
            help, least, most = (option.metadata[name] for name in ("help", "least", "most"))
            unset = f"; by default {option.default}" if option.default is not None else ""
            text = f"{', '.join(option_takers()[option.name])}: {help}{unset}."
            found[option.name] = (types[option.name] | None, Field(default=None, description=text, ge=least, le=most))
    return found


_WithOptions: Any = create_model("TaskOptions", __base__=_OfEveryTask, **_declared_options())


class TaskSettings(_WithOptions):
    """What is asked, and how an answer is judged. An option can be given where the named task takes it."""
