"""The settings of a run's evaluations: section eval, and its sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from lagrpo.settings.rewards import NAME
from lagrpo.settings.section import Section
from lagrpo.settings.task import TaskSettings

OF_A_SET = ("pass@1", "reward")
"""What metrics.jsonl has of a set."""


class EvaluationSet(Section):
    name: str
    """What it is called in files and metrics: letters, digits and _."""
    task: TaskSettings | None = None
    """What is asked, as in section task; by default the run's task. Its test split is asked."""
    every: int | None = Field(default=None, ge=0)
    """Batches between evaluations; by default eval.every."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Test prompts; by default eval.num_prompts."""
    num_samples: int | None = Field(default=None, ge=1)
    """Completions per prompt; by default eval.num_samples."""
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature; by default eval.temperature."""
    max_completion_length: int | None = Field(default=None, ge=1)
    """Longest completion; by default rollout.max_completion_length."""

    @model_validator(mode="after")
    def _check(self) -> EvaluationSet:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name: a name has letters, digits and _, and begins with a letter")
        return self


class EvaluationSettings(Section):
    at_start: bool = True
    """Evaluate on the test split before the first and after the last update."""
    every: int = Field(default=0, ge=0)
    """Also evaluate every so many batches; 0: never."""
    num_prompts: int = Field(default=64, ge=1)
    """Test prompts (all if there are fewer)."""
    num_samples: int = Field(default=8, ge=1)
    """Completions per prompt."""
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature of the evaluation; by default training's."""
    sets: tuple[EvaluationSet, ...] = ()
    """Several evaluations in place of one, each a table [[eval.sets]] (docs/evaluation.md)."""
    best_metric: str | None = None
    """Which result makes the best policy, such as pass@1, or SET.pass@1 with sets: the policy with the greatest
    one is kept in weights/best. Unset: no weights are kept for that."""

    @model_validator(mode="after")
    def _check_sets(self) -> EvaluationSettings:
        names = [each.name for each in self.sets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"sets: the name {twice[0]!r} is there twice")
        if self.best_metric is None:
            return self
        of, dot, metric = self.best_metric.rpartition(".")
        chosen = next((each for each in self.sets if each.name == of), None)
        if bool(self.sets) != bool(dot) or (dot and chosen is None):
            form = f"SET.METRIC with SET one of {', '.join(names)}" if names else "a metric alone, as there are no sets"
            raise ValueError(f"best_metric = {self.best_metric!r}: write {form}")
        samples = (chosen.num_samples if chosen is not None else None) or self.num_samples
        passes = [f"pass@{k}" for k in sorted({samples, *(1 << n for n in range(samples.bit_length()))})]
        known = ("reward", *passes)
        if metric not in known and not re.fullmatch(r"rewards/\w+/mean", metric):
            raise ValueError(
                f"best_metric = {self.best_metric!r}: there is no metric {metric!r}; there are {', '.join(known)}"
            )
        return self

    @property
    def takes_place(self) -> bool:
        """Whether anything is ever evaluated."""
        return self.at_start or bool(self.every or any(each.every for each in self.sets))

    def values(self, name: str) -> Iterator[Any]:
        """What a setting is in each set, or in the one evaluation; None: as in section rollout."""
        if not self.sets:
            yield getattr(self, name, None)
        for each in self.sets:
            yield getattr(each, name) if getattr(each, name) is not None else getattr(self, name, None)
