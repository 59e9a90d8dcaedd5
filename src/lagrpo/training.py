"""A training run: the parts built, evaluated before and after, recorded, shown; and stopped cleanly.

import lagrpo
result = lagrpo.train({"task": {"name": "arithmetic"}, "schedule": {"batches": 20}})
result.after["pass_at_1"], result.weights
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.build import Parts, advantage_of, check_settings, pick_device
from lagrpo.config import Settings, load_settings, to_toml
from lagrpo.display import Display, make_display, summary
from lagrpo.evaluate import Evaluation, evaluate
from lagrpo.interrupts import interruptible
from lagrpo.live import lag_figures
from lagrpo.loop import Algorithm, Used, iterative_grpo
from lagrpo.meaning import meaning
from lagrpo.metrics import batch_metrics
from lagrpo.policy.batch import Batch
from lagrpo.runs import Run, collect_environment
from lagrpo.sampling.draws import Draws
from lagrpo.sampling.proof import Probe
from lagrpo.tasks import Task
from lagrpo.verify import Verifier

SHOWN = 3  # completions shown before and after


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves: its directory, the summaries of its evaluations, where the weights are, and how it ended."""

    run: Path
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    weights: Path | None
    batches: int
    interrupted: bool


def train(settings: Settings | Mapping[str, Any] | str | os.PathLike[str], task: Task | None = None) -> Result:
    """Run Algorithm 1. `settings` are a Settings, a mapping, or the path of a TOML file; `task` replaces settings.task
    by a Task of your own (see lagrpo.tasks.base).

    Ctrl-C and SIGTERM end the run after the update under way, with the policy as it then is.

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded.
        DeliveryError, VersionError: the sampler does not draw from the policy that the schedule announced.
        VerifierError: too many completions could not be judged.
    """
    settings = settings if isinstance(settings, Settings) else load_settings(settings)
    check_settings(settings, task)
    with interruptible():
        parts = Parts.build(settings, task)
        return Training(settings, parts).run()


class Training:
    """One run and what listens to it."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.settings, self.parts = settings, parts
        run, device = settings.run, str(pick_device(settings.model.device))
        environment = collect_environment(device)
        name = f"{parts.task.name}-{parts.recipe.name}"
        self.store = Run.create(Path(run.directory), run.name, settings.model_dump(), to_toml(settings), environment)
        self.total = settings.schedule.stages * settings.schedule.batches
        self.display: Display = make_display(self.total, self.store.path.name or name, run.display)
        self.verifier = Verifier(
            parts.task.judge,
            workers=settings.verifier.workers,
            deadline=settings.verifier.deadline,
            max_unscored_share=settings.verifier.max_unscored,
        )
        self.batches = 0

    def run(self) -> Result:
        """Evaluate, train, evaluate; whatever happens, what was learned is written."""
        evaluations: dict[str, Evaluation] = {}
        interrupted = False
        with self.verifier, self.display:
            for line in meaning(self.settings, self.parts.recipe, self.parts.policy):
                self.display.note(line)
            try:
                if self.settings.evaluation.before_and_after:
                    evaluations["before"] = self.evaluate("before")
                iterative_grpo(self.algorithm())
                if self.settings.evaluation.before_and_after:
                    evaluations["after"] = self.evaluate("after")
            except KeyboardInterrupt:
                interrupted = True
                self.display.note(f"interrupted after batch {self.batches}; writing the policy as it is")
            finally:
                weights = self.save()
                self.parts.sampler.close()
        self.summarise(evaluations, interrupted)
        before, after = (e.summary if (e := evaluations.get(n)) else None for n in ("before", "after"))
        return Result(self.store.path, before, after, weights, self.batches, interrupted)

    def algorithm(self) -> Algorithm:
        """The parts in the form that the loop takes."""
        p, s = self.parts, self.settings
        max_tokens = s.sampling.max_tokens
        first = p.prompts.batch(1)[0].prompt
        return Algorithm(
            learner=p.learner,
            sampler=p.sampler,
            draws=Draws(p.sampler, p.prompts.batch, s.sampling.G),
            verifier=self.verifier,
            schedule=p.schedule,
            probe=Probe.after(first, p.policy.head.weight.shape[0], s.run.seed),
            listener=self,
            advantage=advantage_of(p.recipe, s.run.seed, max_tokens),
            weights=lambda lengths_C, zero_variance_C: p.recipe.weights(lengths_C, zero_variance_C, max_tokens),
            S=s.schedule.stages,
            M=s.schedule.batches,
            i=s.schedule.i,
            ahead=s.sampling.ahead,
            tokens=s.optimizer.tokens,
            recorded=lambda b: (),
            extra=p.prompts.extra,
            resample=0,
            reset_optimizer=s.schedule.reset_optimizer,
        )

    def phase(self, name: str) -> None:
        self.display.phase(name)

    def batch(self, used: Used) -> None:
        """Record a batch: rollouts, then its line of metrics, then the display."""
        stage, b, version, batch = used.stage, used.b, used.version, used.batch
        metrics = batch_metrics(stage, b, version, batch, used.updates, used.clock, delivered=bool(used.reason))
        metrics |= {"delivery": used.reason, **lag_figures(batch, used.rows, self.parts.recipe.composition.eps_std)}
        advantages, masked = per_group(batch)
        self.store.record_rollouts(batch.groups, advantages, masked, batch=b, stage=stage, pi_k_version=version)
        self.store.record(metrics)
        self.display.batch(metrics)
        self.batches = b
        every = self.settings.evaluation.every
        if every and b % every == 0 and b < self.total:
            self.evaluate(f"batch-{b:06d}")

    def evaluate(self, name: str) -> Evaluation:
        """pass@k of π as it is now, recorded under `name`."""
        s = self.settings.evaluation
        self.phase(f"evaluation ({name})")
        requests = self.parts.prompts.held_out(s.prompts)
        evaluation = evaluate(self.parts.evaluator, self.verifier, requests, s.samples, self.settings.run.seed)
        facts = {"batch": self.batches, "version": self.parts.policy.version}
        self.store.record_evaluation(name, facts | evaluation.summary, evaluation.records)
        return evaluation

    def save(self) -> Path | None:
        """The final policy as a Hugging Face model directory."""
        if not self.settings.run.save_weights:
            return None
        self.phase("writing weights")
        return self.store.record_weights(self.parts.policy.save)

    def summarise(self, evaluations: dict[str, Evaluation], interrupted: bool) -> None:
        """The end of the run as a person sees it."""
        if self.settings.run.display == "none":
            return
        from lagrpo.runs.plots import reward_curve

        png = reward_curve(self.store) if self.batches else None
        before, after = evaluations.get("before"), evaluations.get("after")
        summary(
            before.summary if before else None,
            after.summary if after else None,
            self.store.path,
            png,
            _samples(before),
            _samples(after),
            f"lagrpo show {self.store.path}",
            headline=f"Stopped after batch {self.batches} of {self.total}." if interrupted else "Finished.",
        )


def per_group(batch: Batch) -> tuple[list[list[float | None]], list[bool]]:
    """For the rollouts: each group's advantages (None where a completion was not scored), and whether it was masked."""
    advantages: list[list[float | None]] = [[None] * len(group.completions) for group in batch.groups]
    masked = [False] * len(batch.groups)
    for c, (g, j) in enumerate(batch.member_C):
        advantages[g][j] = float(batch.advantage_C[c])
        masked[g] = bool(batch.weight_C[c] == 0)
    return advantages, masked


def _samples(evaluation: Evaluation | None) -> list[dict[str, Any]]:
    if evaluation is None:
        return []
    groups = evaluation.groups[:SHOWN]
    return [
        {"prompt": g.prompt.messages[-1]["content"], "text": g.completions[0].text, "reward": g.completions[0].reward}
        for g in groups
    ]
