"""A training run: the parts built, evaluated before and after, recorded, shown; and stopped cleanly.

import lagrpo
result = lagrpo.train({"task": {"name": "arithmetic"}, "schedule": {"batches": 20}})
result.after["pass_at_1"], result.weights
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.backends.process import restored
from lagrpo.errors import refusing
from lagrpo.interrupts import Interrupted, interruptible, whole
from lagrpo.policy.batch import Batch, MicroBatch
from lagrpo.runs import Run, collect_environment
from lagrpo.sampling.local import LocalSampler
from lagrpo.sampling.parity import ParityError
from lagrpo.sampling.prefetch import Prefetcher, VersionError
from lagrpo.sampling.vllm.server import SamplerError
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings, to_toml
from lagrpo.tasks import Task
from lagrpo.terminal.display import Display, make_display, summary
from lagrpo.threads import team
from lagrpo.training.build import Parts, advantage_of, without_progress_bars
from lagrpo.training.checks import check_settings
from lagrpo.training.evaluate import Evaluation, change, evaluate, few_prompts, interval
from lagrpo.training.explain import count_of, meaning, no_certificate, standstill
from lagrpo.training.lag import certified, completion_columns, lag_metrics, spent
from lagrpo.training.loop import Algorithm, Used, iterative_grpo
from lagrpo.training.metrics import batch_metrics, sampler_metrics
from lagrpo.types import is_right
from lagrpo.verify import Verifier, VerifierError

SHOWN = 3  # completions shown before and after
READ_OF_TASK = {"reward_range": "", "system_prompt": " (of questions in offline.data)"}
"""What is read of settings.task where the task is an object of the caller's, and for what."""
STILL = 1e-4  # a weight sync that changes a smaller share of the weights is warned of
FAILURES = (
    *(VerifierError, ParityError, VersionError, SamplerError),
    *(FloatingPointError, torch.OutOfMemoryError, OSError),
)
"""Errors that end a run without being the program's: what they say is for the user."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves: its directory, the summaries of its evaluations, where the weights are and how many updates
    they have had, and how it ended: `interrupted` is the signal that stopped it, None for a run that came to its end.
    """

    run: Path
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    weights: Path | None
    version: int
    batches: int
    interrupted: signal.Signals | None


def train(settings: Settings | Mapping[str, Any] | str | os.PathLike[str], task: Task | None = None) -> Result:
    """Run Algorithm 1. `settings` are a Settings, a mapping, or the path of a TOML file; `task` replaces settings.task
    by a Task of your own (see lagrpo.tasks.base).

    Ctrl-C and SIGTERM end the run after the update under way, with the policy as it then is. So does an error; what was
    learned and recorded until then is kept.

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded where that can be seen.
        ParityError, VersionError: the sampler does not sample from the policy that the schedule announced.
        SamplerError: the vLLM servers are gone for good.
        VerifierError: too many completions could not be scored.
        FloatingPointError: a gradient is not finite.
    """
    settings = settings if isinstance(settings, Settings) else load_settings(settings)
    recipe = check_settings(settings, task)
    device = pick_device(settings.model.device)
    with interruptible(), restored():
        if settings.run.display != "none":
            print(f"loading {settings.model.path} on {device} …", flush=True)
        parts = Parts.build(settings, recipe, task)
        try:
            return Training(settings, parts).run()
        finally:
            parts.close()


class Training:
    """One run and what listens to it."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self.settings, self.parts = settings, parts
        run, v = settings.run, settings.verifier
        named = settings.model_dump() | {"task": {"name": parts.task.name}}
        environment = collect_environment(str(parts.policy.device))
        environment["computation"] = parts.policy.computation
        self.sampled = parts.sampler.policy if isinstance(parts.sampler, LocalSampler) else None
        environment["decoding"] = self.sampled.decoding if self.sampled else "by vLLM"
        environment["dtype"], environment["dtype_reason"] = pick_dtype(settings.model.dtype, parts.policy.device)
        environment["parity"] = asdict(parts.parity) if parts.parity else None
        environment["offline"] = parts.offline
        with refusing("task", TypeError):
            self.verifier = Verifier(
                parts.task.judge, workers=v.workers, deadline=v.deadline, max_without_reward=v.max_without_reward
            )
        try:
            self.store = Run.create(Path(run.directory), run.name, named, self.config(), environment)
        except BaseException:
            self.verifier.close()
            raise
        parts.keep_logs(self.store.path)
        self.total = settings.schedule.stages * settings.schedule.batches
        self.display: Display = make_display(self.total, self.store.path.name, run.display)
        self.evaluations: dict[str, Evaluation] = {}
        self.batches = 0
        self.pushed, self.warned = False, False  # an update had a gradient since the weight sync; it was said that …
        self.before: Mapping[str, float | None] = {}  # the metrics of the batch before
        self.uncertified = False  # it was said that nothing is certified
        self.repeated = False  # and that a batch had a prompt twice

    def run(self) -> Result:
        """Evaluate, train, evaluate; whatever happens, what was learned is written."""
        interrupted, weights = None, None
        for line in meaning(self.settings, self.parts.recipe, self.parts.policy, self.sampled, self.parts.parity):
            self.display.note(line)
        if self.parts.offline:
            self.display.note(f"offline     {self.parts.offline}")
        self.display.note(f"threads     {team.describe()}")
        team.tell(self.display.note)
        with self.verifier, self.display:
            try:
                self.learn()
                weights = self.save()
            except Interrupted as stop:
                interrupted = stop.signal
                self.display.note(
                    f"{stop.signal.name}: keeping the policy as it is ({self.progress()}); again: end at once"
                )
                weights = self.save()
            except BaseException as error:
                error.add_note(f"The run until then: {self.store.path} ({self.progress()})")
                if self.parts.policy.version:
                    self.rescue(error)
                raise
        self.summarize(interrupted)
        before, after = (e.summary if (e := self.evaluations.get(name)) else None for name in ("before", "after"))
        version = self.parts.policy.version
        return Result(self.store.path, before, after, weights, version, self.batches, interrupted)

    def rescue(self, error: BaseException) -> None:
        """Write the policy after an error; if that fails too, the first error remains the one that is told."""
        try:
            self.save()
        except OSError as second:
            error.add_note(f"Nor could the policy be written to {self.store.path}: {second}")

    def learn(self) -> None:
        """Algorithm 1 between its evaluations."""
        around = self.settings.evaluation.before_and_after
        if around:
            self.evaluate("before")
        iterative_grpo(self.algorithm())
        if around:
            self.evaluate("after")

    def config(self) -> str:
        """config.toml: the settings, and what they do not say where the task is an object of the caller's."""
        kind = type(self.parts.task)
        read = " and ".join(name + what for name, what in READ_OF_TASK.items())
        own = (
            f"# The task was the caller's own object, a {kind.__module__}.{kind.__qualname__}; "
            f"of [task] only {read} were read.\n"
        )
        return (own if self.parts.own_task else "") + to_toml(self.settings)

    def progress(self) -> str:
        """How far the run has come."""
        version = self.parts.policy.version
        policy = (
            f"the policy has had {count_of(version, 'update')}"
            if version
            else "no update was made: it is the initial one"
        )
        return f"{self.batches} of {self.total} batches are finished; {policy}"

    def algorithm(self) -> Algorithm:
        """The parts in the form that the loop takes."""
        p, s = self.parts, self.settings
        max_tokens = s.sampling.max_tokens
        return Algorithm(
            learner=p.learner,
            sampler=p.sampler,
            prefetcher=Prefetcher(p.sampler, p.prompts.batch, s.sampling.G),
            verifier=self.verifier,
            schedule=p.schedule,
            check_parity=p.check_parity,
            listener=self,
            advantage=advantage_of(p.recipe, s.run.seed, max_tokens),
            weights=lambda lengths_C, zero_variance_C: p.recipe.weights(lengths_C, zero_variance_C, max_tokens),
            S=s.schedule.stages,
            M=s.schedule.batches,
            i=s.schedule.i,
            prefetch=s.sampling.prefetch,
            tokens=s.optimizer.micro_batch_tokens,
            offline_groups=p.offline_groups,
            extra=p.prompts.extra,
            dynamic_sampling=s.sampling.dynamic_sampling,
            score_lag=s.run.score_lag,
            one_program=self.sampled is not None,
            score_update=s.run.score_update and self.lag_is_complete,
            spends=self.spends,
            reset_optimizer=s.schedule.reset_optimizer,
        )

    def spends(self, batch: Batch, rows: Sequence[MicroBatch]) -> float | None:
        """What the schedule decides by; nothing is computed for one that does not look."""
        s = self.settings
        if s.schedule.kind == "certified":
            return certified(batch, rows, s.task.reward_range, s.schedule.doubt)
        return spent(batch, rows) if s.schedule.kind == "budget" else None

    def phase(self, name: str) -> None:
        self.display.phase(name)

    def batch(self, used: Used) -> None:
        """Record a batch: rollouts, then its line of metrics, then the display; then evaluate where it is time."""
        stage, b, version, batch = used.stage, used.b, used.version, used.batch
        metrics = batch_metrics(stage, b, version, batch, used.updates, used.clock, synced=bool(used.reason))
        metrics |= sampler_metrics(used.weight_sync, used.sampling) | self.lag_metrics(used) | team.metrics()
        columns = completion_columns(batch, used.rows, self.parts.recipe.composition.eps_std)
        with whole():
            self.store.record_rollouts(batch.groups, columns, batch=b, stage=stage, pi_k_version=version)
            if used.reason:
                self.store.record_event("weight_sync", b, reason=used.reason, version=used.alpha)
            self.store.record(metrics)
            self.batches = b
        self.display.batch(metrics)
        self.warn_of_standstill(used)
        self.warn_of_no_certificate(used, metrics)
        self.warn_of_repetition(used)
        if self.settings.run.save_every and b % self.settings.run.save_every == 0:
            self.write_weights(self.parts.policy.version)
        every = self.settings.evaluation.every
        if every and b % every == 0 and b < self.total:
            self.evaluate(f"batch-{b:06d}")

    def lag_metrics(self, used: Used) -> dict[str, float | None]:
        """The lag metrics; null where the run leaves out completions that they would need."""
        s, eps_std = self.settings, self.parts.recipe.composition.eps_std
        rows, after_T = (used.rows, used.after_T) if self.lag_is_complete else ((), None)
        delta = None if s.sampling.dynamic_sampling else s.schedule.doubt
        return lag_metrics(used.batch, rows, eps_std, s.task.reward_range, after_T, delta)

    @property
    def lag_is_complete(self) -> bool:
        """Whether every scored completion is computed, so that lag metrics are those of all of them."""
        recipe = self.parts.recipe
        return self.settings.run.score_lag or not (recipe.silent or recipe.mask_zero_variance)

    def warn(self, b: int, text: str) -> None:
        """A line that stays, on the display and in events.jsonl."""
        self.store.record_event("warning", b, text=text)
        self.display.note(text)

    def warn_of_no_certificate(self, used: Used, metrics: Mapping[str, float | None]) -> None:
        """Say it, once, when schedule certified syncs weights only because its v batches are over."""
        if self.settings.schedule.kind == "certified" and used.reason == "cap" and not self.uncertified:
            self.warn(used.b, no_certificate(self.settings, self.before))
            self.uncertified = True
        self.before = metrics

    def warn_of_standstill(self, used: Used) -> None:
        """Say it, once, when updates that had a gradient leave the sampler's weights as they were."""
        share = used.weight_sync.get("moved_synced")
        if used.reason and self.pushed and not self.warned and share is not None and share < STILL:
            dtype = str(self.parts.policy.dtype).removeprefix("torch.")
            self.warn(used.b, standstill(self.settings, dtype, used.alpha, share))
            self.warned = True
        pushed = any(update.get("grad_norm") for update in used.updates)
        self.pushed = pushed or (self.pushed and not used.reason)

    def warn_of_repetition(self, used: Used) -> None:
        """Say it, once, when a batch has two groups of one prompt."""
        keys = [group.prompt.key for group in used.batch.groups if group.source == "sampler"]
        if len(set(keys)) < len(keys) and not self.repeated:
            split = count_of(self.parts.task.size("train"), "prompt")
            self.display.note(
                f"batch {used.b} asks a prompt more than once: the {split} of the split came to their end inside it "
                "(said once)"
            )
            self.repeated = True

    def evaluate(self, name: str) -> None:
        """pass@k of π as it is now, recorded under `name`."""
        s = self.settings.evaluation
        self.phase(f"evaluation ({name})")
        requests = self.parts.prompts.held_out(s.prompts)
        scale = self.settings.task.reward_range
        evaluation = evaluate(self.parts.evaluator, self.verifier, requests, s.samples, self.settings.run.seed, scale)
        if (before := self.evaluations.get("before")) is not None:
            evaluation = replace(evaluation, summary=evaluation.summary | change(before, evaluation))
        if not self.evaluations and (warning := few_prompts(len(requests))):
            self.warn(self.batches, warning)
        self.parts.evaluator.rest()
        facts = {"batch": self.batches, "version": self.parts.policy.version}
        self.store.record_evaluation(name, facts | evaluation.summary, evaluation.records)
        self.evaluations[name] = evaluation
        mean = evaluation.summary.get("reward_mean")
        graded = f", mean reward {mean:.3f}" if mean not in (None, evaluation.summary.get("pass_at_1")) else ""
        self.display.note(f"evaluation ({name}): {interval(evaluation.summary, 'pass_at_1')}{graded}")

    def save(self) -> Path | None:
        """The final policy as a Hugging Face model directory."""
        if not self.settings.run.save_weights:
            return None
        self.phase("writing weights")
        return self.write_weights()

    def write_weights(self, version: int | None = None) -> Path:
        """π as it is now, as weights/final or under its version."""
        with without_progress_bars():
            return self.store.record_weights(self.parts.policy.save, version)

    def summarize(self, interrupted: signal.Signals | None) -> None:
        """The end of the run as a person sees it."""
        if self.settings.run.display == "none":
            return
        from lagrpo.runs.plots import reward_curve

        before, after = self.evaluations.get("before"), self.evaluations.get("after")
        summary(
            before.summary if before else None,
            after.summary if after else None,
            self.store.path,
            reward_curve(self.store) if self.batches else None,
            self.samples(before),
            self.samples(after),
            f"lagrpo show {self.store.path}",
            headline=f"Stopped by {interrupted.name}: {self.progress()}." if interrupted else "Finished.",
        )

    def samples(self, evaluation: Evaluation | None) -> list[dict[str, Any]]:
        """The first completions of the first prompts of an evaluation, for people."""
        if evaluation is None:
            return []
        first = [(group.prompt.messages[-1]["content"], group.completions[0]) for group in evaluation.groups[:SHOWN]]
        scale = self.settings.task.reward_range
        return [
            {"prompt": prompt, "text": c.text, "right": None if c.reward is None else is_right(c.reward, scale)}
            for prompt, c in first
        ]
