"""The evaluations of a run: made where they are due, told to its observers, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.vllm.engine import VllmEvaluator
from lagrpo.settings.evaluation import OF_A_SET
from lagrpo.training.build import Parts
from lagrpo.training.checkpoint import alpha_is_needed
from lagrpo.training.evaluate import Evaluation, change, few_prompts, interval
from lagrpo.training.exams import Exam
from lagrpo.training.observers import Observer
from lagrpo.training.ranks import FirstRankEvaluator


class Evaluations:
    """What the policy of a run was found to do. `note` shows a line to whoever looks at the run."""

    def __init__(self, parts: Parts, observers: Observer, note: Callable[[str], None]) -> None:
        self.parts, self.observers, self.note = parts, observers, note
        self.made: dict[str, Evaluation] = {}
        """by the name of their files"""

    def make(
        self, moment: str, batch: int, state: LoopState, due: Callable[[Exam], object] = lambda exam: True
    ) -> None:
        """Evaluate π as it is now, after `batch` batches, on every set that is due and has not been evaluated."""
        exams = [exam for exam in self.parts.exams if due(exam) and exam.place(moment) not in self.made]
        if exams:
            with sampling_from_policy(self.parts, state):
                for exam in exams:
                    self._make(exam, moment, batch)
                    self.parts.evaluator.free_cache()

    def _make(self, exam: Exam, moment: str, batch: int) -> None:
        name, policy = exam.place(moment), self.parts.learner.policy
        shown = f"{moment}, {exam.name}" if exam.name else moment
        self.observers.phase(f"evaluation ({shown})")
        found = exam.run(self.parts.evaluator)
        if (before := self.made.get(exam.place("before"))) is not None:
            found = replace(found, summary=found.summary | change(before, found))
        first = not any(exam.place(moment) in self.made for moment in self._moments())
        if first and (warning := few_prompts(len(found.records))):
            self.observers.note(f"evaluation of {exam.name}: {warning}" if exam.name else warning)
        self.made[name] = found
        of_set = {"set": exam.name, "reward_range": list(exam.judged[1])} if exam.name else {}
        summary = {"batch": batch, "version": policy.version} | of_set | found.summary
        self.observers.evaluation(name, batch, summary, found.records)
        self.note(f"evaluation ({shown}): {describe(found.summary)}")

    def _moments(self) -> set[str]:
        return {name.partition(".")[0] for name in self.made}

    def after(self, batch: int) -> dict[str, float | None]:
        """What metrics.jsonl has of the policy after so many batches, in the line of the batch that follows: of every
        set its metrics, None where it was not evaluated then. Nothing where the run has no sets."""
        moment, found = moment_of(batch), dict[str, float | None]()
        for exam in (exam for exam in self.parts.exams if exam.name):
            made = self.made.get(exam.place(moment))
            found |= {f"eval_{exam.name}_{name}": made.summary.get(name) if made else None for name in OF_A_SET}
        return found

    def value(self, moment: str) -> float | None:
        """The result that makes the best policy, greater where it is better: pass@1 of the first set unless
        evaluation.best names another. None where it was not evaluated then."""
        settings = self.parts.settings.evaluation
        of, _, metric = (settings.best or "pass_at_1").rpartition(".")
        exam = next((exam for exam in self.parts.exams if not of or exam.name == of), None)
        made = self.made.get(exam.place(moment)) if exam is not None else None
        value = made.summary.get(metric) if made is not None else None
        return -value if value is not None and settings.best_is == "least" else value

    def summary(self, moment: str) -> dict[str, Any] | None:
        """The summary of the first set at a moment."""
        made = (self.made.get(exam.place(moment)) for exam in self.parts.exams)
        return next((found.summary for found in made if found is not None), None)


def moment_of(batch: int) -> str:
    """How the evaluation after a batch is called while others follow.

    >>> moment_of(0), moment_of(12)
    ('before', 'batch-000012')
    """
    return f"batch-{batch:06d}" if batch else "before"


def describe(summary: Mapping[str, Any]) -> str:
    """An evaluation in a line."""
    mean = summary.get("reward_mean")
    graded = f", mean reward {mean:.3f}" if mean not in (None, summary.get("pass_at_1")) else ""
    return f"{interval(summary, 'pass_at_1')}{graded}"


@contextmanager
def sampling_from_policy(parts: Parts, state: LoopState) -> Iterator[None]:
    """Inside, the evaluator samples from π as it is now. vLLM servers have α: all that was asked of them is finished,
    they get π under its own version, checked as after any weight sync, and afterwards α again where it is still to
    sample. No record of the run depends on it."""
    evaluator, policy = parts.evaluator, parts.learner.policy
    if not isinstance(evaluator, VllmEvaluator | FirstRankEvaluator):
        yield
        return
    parts.prefetcher.finish()
    with evaluator.sampler.lent(policy.weights, policy.version, back=alpha_is_needed(parts, state)):
        if parts.check_evaluated is not None:
            parts.check_evaluated(policy, evaluator.sampler)
        yield
