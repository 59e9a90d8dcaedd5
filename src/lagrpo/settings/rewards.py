"""The settings of one of several rewards: an entry of task.rewards."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from lagrpo.settings.section import Section

LONGEST_DEADLINE = 1e6
"""Seconds."""
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


class RewardSettings(Section):
    name: str
    """What it is called in metrics and records: letters, digits and _."""
    reward: str
    """What computes it: "task" (the task's own reward), a built-in one (exact, number, math, length, format, llm_judge
    …), or package.module:function."""
    weight: float = 1.0
    """The reward of a completion is the sum of weight x value; with 0 the reward is only measured."""
    range: tuple[float, float] = (0.0, 1.0)
    """Its least and greatest value, before the weight."""
    right: bool = False
    """A completion is right where the rewards that say this have their greatest value; where none says it, the first
    of the rewards."""
    deadline: float | None = Field(default=None, gt=0, le=LONGEST_DEADLINE)
    """Seconds for a call; by default verifier.deadline."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the reward function."""

    @model_validator(mode="after")
    def _check(self) -> RewardSettings:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r}: a name has letters, digits and _, and begins with a letter")
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range goes from the least to the greatest value, not {self.range}")
        return self
