"""What a run evaluates its policy on: one set of prompts, or several sets, each with a task and a manner of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.model import Policy
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import Request, SamplingParams
from lagrpo.settings.evaluation import EvaluationSet
from lagrpo.settings.schema import Settings
from lagrpo.tasks import Task, reward_names
from lagrpo.training.environments import OF_RUN
from lagrpo.training.evaluate import Evaluation, Generates, evaluate
from lagrpo.types import Range

PURPOSE = "evaluate"


class Evaluator(Generates, Protocol):
    """What samples the evaluations of a run."""

    def set_sampling_params(self, params: SamplingParams) -> None: ...
    def free_cache(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Exam:
    """One evaluation, made again and again."""

    name: str
    """of the set; "" where the run has no sets"""
    every: int
    """batches between two of them; 0: only before and after"""
    manner: SamplingParams
    samples: int
    seed: int
    requests: Callable[[], Sequence[Request]]
    judged: tuple[RewardPool, Range, Sequence[str]]
    """who judges, the range of rewards, and the names of several rewards"""

    def place(self, moment: str) -> str:
        """The name of its files: before, after, batch-000010, each with the set behind it."""
        return f"{moment}.{self.name}" if self.name else moment

    def run(self, evaluator: Evaluator) -> Evaluation:
        """The evaluation of the policy that the evaluator samples from."""
        evaluator.set_sampling_params(self.manner)
        return evaluate(evaluator, self.judged[0], self.requests(), self.samples, self.seed, *self.judged[1:])


def build_exams(
    settings: Settings,
    policy: Policy,
    prompts: PromptSource,
    verifier: RewardPool,
    others: Mapping[str, tuple[Task, RewardPool]],
    talking: Mapping[str, Mapping[str, Any]],
) -> tuple[Exam, ...]:
    """The evaluations of the settings. `prompts` and `verifier` are the run's, `others` by its name what a set has of
    its own; `talking` what the prompts of several turns need, by the name of their environment. Raises SettingsError
    for a set that cannot be asked, unless the run never evaluates."""
    e = settings.evaluation
    own = verifier, settings.task.reward_range, reward_names(prompts.task.reward)
    of_run = OF_RUN if OF_RUN in talking else None
    if not e.sets:
        return (_exam(settings, None, partial(prompts.held_out, e.prompts), own, of_run),)
    exams = []
    for each in e.sets if e.takes_place else ():
        source, judged, environment = prompts, own, of_run
        with concerning_set(each.name):
            if each.task is not None:
                (task, judges), environment = others[each.name], each.name if each.name in talking else None
                given = settings.run.seed, 1, settings.sampling.max_prompt_tokens
                source = PromptSource(task, policy, *given, **talking.get(each.name, {}))
                judged = judges, each.task.reward_range, reward_names(task.reward)
            requests = cache(partial(source.held_out, each.prompts or e.prompts))
            exams.append(_exam(settings, each, requests, judged, environment))
            requests()
    return tuple(exams)


@contextmanager
def concerning_set(name: str) -> Iterator[None]:
    """Inside, errors of settings and data name the evaluation set."""
    try:
        with refusing():
            yield
    except SettingsError as error:
        raise SettingsError(f"evaluation.sets, {name!r}: {error}") from error


def _exam(settings: Settings, each: EvaluationSet | None, requests: Any, judged: Any, environment: str | None) -> Exam:
    """The evaluation of a set, or the only one."""
    e, s = settings.evaluation, settings.sampling
    tau = (each.temperature if each is not None else None) or e.temperature or s.temperature
    common: Any = {"seed": settings.run.seed, "requests": requests, "judged": judged}
    if each is None:
        return Exam("", e.every, SamplingParams(PURPOSE, tau, s.max_tokens, environment), e.samples, **common)
    manner = SamplingParams(f"{PURPOSE} {each.name}", tau, each.max_tokens or s.max_tokens, environment)
    every = e.every if each.every is None else each.every
    return Exam(each.name, every, manner, each.samples or e.samples, **common)
