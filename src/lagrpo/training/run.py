"""A training run: the parts built, evaluated before and after, observed; and stopped cleanly."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lagrpo import logs
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.backends.process import restored
from lagrpo.interrupts import Interrupted, interruptible, whole
from lagrpo.runs import Run, collect_environment
from lagrpo.runs.rollouts import rollout_rows
from lagrpo.sampling.parity import ParityError
from lagrpo.sampling.prefetch import VersionError
from lagrpo.sampling.schedule import LoopState
from lagrpo.sampling.vllm.server import SamplerError
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings, to_toml
from lagrpo.tasks import NO_TASK, Task
from lagrpo.terminal.display import make_display
from lagrpo.terminal.text import count_of, formatted
from lagrpo.threads import team
from lagrpo.training.build import Parts, without_progress_bars
from lagrpo.training.checks import check_settings
from lagrpo.training.evaluate import Evaluation, change, evaluate, few_prompts, interval
from lagrpo.training.explain import meaning
from lagrpo.training.lag import completion_columns, lag_is_complete, lag_metrics
from lagrpo.training.loop import Step, iterative_grpo
from lagrpo.training.memory import NoMemoryError, Place, explained
from lagrpo.training.metrics import batch_metrics, sampler_metrics
from lagrpo.training.observers import Observer, Observers, RunFiles, Status, check_observers
from lagrpo.verify import VerifierError

STILL = 1e-4  # a weight sync that changes a smaller share of the weights is warned of
READ_OF_TASK = {"reward_range": "", "system_prompt": " (of questions in offline.data)"}
"""What is read of settings.task where the task is an object of the caller's, and for what."""
FAILURES = (
    *(VerifierError, ParityError, VersionError, SamplerError),
    *(FloatingPointError, NoMemoryError, OSError),
)
"""Errors that end a run without being the program's: what they say is for the user."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run leaves: its directory, the summaries of its evaluations, where the weights are and how many updates
    they have had, and the signal that stopped it, None for a run that came to its end."""

    run: Path
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    weights: Path | None
    version: int
    batches: int
    interrupted: signal.Signals | None


def train(
    settings: Settings | Mapping[str, Any] | str | os.PathLike[str],
    task: Task | None = None,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run Algorithm 1. `settings` are a Settings, a mapping, or the path of a TOML file; `task` replaces settings.task
    by a Task of your own (see lagrpo.tasks.base); `observers` are told about the run after its files and its display.

    Ctrl-C and SIGTERM end the run after the update under way, with the policy as it then is. So does an error; what was
    learned and recorded until then is kept.

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded where that can be seen.
        ParityError, VersionError: the sampler does not sample from the policy that the schedule announced.
        SamplerError: the vLLM servers are gone for good.
        VerifierError: too many completions could not be scored.
        FloatingPointError: a gradient is not finite; it names the completion.
        NoMemoryError: the memory does not suffice; it says where, and which setting to lower.
        TypeError: the settings, the task or an observer are something else, before anything is loaded.
    """
    if settings is None:
        raise TypeError("settings are a Settings, a mapping or the path of a TOML file, not None; {} are the defaults")
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task: {task!r:.80} {NO_TASK}")
    settings = settings if isinstance(settings, Settings) else load_settings(settings)
    recipe = check_settings(settings, task)
    check_observers(observers)
    device = pick_device(settings.model.device)
    least = logging.WARNING if settings.run.display == "none" else logging.INFO
    with interruptible(), restored(), logs.shown_by(None, least):
        if settings.run.display != "none":
            print(f"loading {settings.model.path} on {device} …", flush=True)
        with explained(lambda: "loading"):
            parts = Parts.build(settings, recipe, task)
        try:
            return Training(parts, observers).run()
        finally:
            parts.close()


class Training:
    """One run: what it does with its parts, and whom it tells."""

    def __init__(self, parts: Parts, observers: Sequence[Observer] = ()) -> None:
        self.parts, self.settings, self.policy = parts, parts.settings, parts.learner.policy
        run = self.settings.run
        named = self.settings.model_dump() | {"task": {"name": parts.task.name}}
        self.environment = describe_environment(parts)
        self.store = Run.create(Path(run.directory), run.name, named, write_config(parts), self.environment)
        parts.keep_logs(self.store.path)
        self.display = make_display(run.display)
        self.place = Place()
        self.observers = Observers(RunFiles(self.store), self.display, self.place, *observers)
        dtype = str(self.policy.dtype).removeprefix("torch.")
        self.warnings = Warnings(self.settings, dtype, parts.task.size("train"))
        self.total = self.settings.schedule.stages * self.settings.schedule.batches
        self.evaluations: dict[str, Evaluation] = {}
        self.batches = 0

    def run(self) -> Result:
        """Evaluate, train, evaluate; whatever happens, what was learned is written."""
        interrupted, weights = None, None
        status: Status = "failed"
        with logs.shown_by(self.display.note):
            try:
                with explained(lambda: str(self.place)):
                    self.begin()
                    self.learn()
                weights, status = self.save(), "finished"
            except Interrupted as stop:
                interrupted, name = stop.signal, stop.signal.name
                self.observers.note(f"{name}: keeping the policy as it is ({self.progress()}); again: end at once")
                weights, status = self.save(), "interrupted"
            except BaseException as error:
                error.add_note(f"The run until then: {self.store.path} ({self.progress()})")
                if self.policy.version:
                    self.rescue(error)
                raise
            finally:
                stopped = f"Stopped by {interrupted.name}: {self.progress()}." if interrupted else self.progress()
                self.observers.end(status, "Finished." if status == "finished" else stopped)
        before, after = (e.summary if (e := self.evaluations.get(name)) else None for name in ("before", "after"))
        return Result(self.store.path, before, after, weights, self.policy.version, self.batches, interrupted)

    def begin(self) -> None:
        """Tell the observers what the run is."""
        parts, settings = self.parts, self.settings.model_dump()
        settings["run"]["name"] = self.store.path.name
        lines = meaning(self.settings, parts.learner.recipe, parts)
        self.observers.start(settings, self.environment)
        for line in [*lines, f"threads     {team.describe()}"]:
            self.display.note(line)

    def rescue(self, error: BaseException) -> None:
        """Write the policy after an error; if that fails too, the first error remains the one that is told."""
        try:
            self.save()
        except (OSError, MemoryError, RuntimeError) as second:
            error.add_note(f"Nor could the policy be written to {self.store.path}: {second}")

    def learn(self) -> None:
        """Algorithm 1 between its evaluations."""
        around = self.settings.evaluation.before_and_after
        if around:
            self.evaluate("before")
        for step in iterative_grpo(self.parts, LoopState(pi_ref=self.policy.version), self.observers.phase):
            self.record(step)
        if around:
            self.evaluate("after")

    def progress(self) -> str:
        """How far the run has come."""
        updates = f"the policy has had {count_of(self.policy.version, 'update')}"
        policy = updates if self.policy.version else "no update was made: it is the initial one"
        return f"{self.batches} of {self.total} batches are finished; {policy}"

    def record(self, step: Step) -> None:
        """Tell the observers of a batch; then write weights and evaluate where it is time."""
        b, metrics = step.b, self.measure(step)
        columns = completion_columns(step.batch, step.rows, self.parts.learner.recipe.composition.eps_std)
        rows = rollout_rows(step.batch.groups, columns, batch=b, stage=step.stage, pi_k_version=step.version)
        with whole():
            self.observers.batch(step, metrics, list(rows))
            self.batches = b
        for text in self.warnings.look(step, metrics):
            self.observers.note(text)
        if (every := self.settings.run.save_every) and b % every == 0:
            self.write_weights(self.policy.version)
        if (every := self.settings.evaluation.every) and b % every == 0 and b < self.total:
            self.evaluate(f"batch-{b:06d}")

    def measure(self, step: Step) -> dict[str, Any]:
        """The metrics of a batch. Metrics of the lag are null where the run leaves out completions that they need."""
        s, recipe = self.settings, self.parts.learner.recipe
        rows, after_T = (step.rows, step.after_T) if lag_is_complete(s, recipe) else ((), None)
        delta = None if s.sampling.dynamic_sampling else s.schedule.doubt
        return (
            batch_metrics(step)
            | sampler_metrics(step.sync, step.sampling)
            | lag_metrics(step.batch, rows, recipe.composition.eps_std, s.task.reward_range, after_T, delta)
            | team.metrics()
        )

    def evaluate(self, name: str) -> None:
        """pass@k of π as it is now, recorded under `name`."""
        s, parts = self.settings, self.parts
        self.observers.phase(f"evaluation ({name})")
        requests = parts.prompts.held_out(s.evaluation.prompts)
        scale = s.task.reward_range
        found = evaluate(parts.evaluator, parts.verifier, requests, s.evaluation.samples, s.run.seed, scale)
        if (before := self.evaluations.get("before")) is not None:
            found = replace(found, summary=found.summary | change(before, found))
        if not self.evaluations and (warning := few_prompts(len(requests))):
            self.observers.note(warning)
        parts.evaluator.rest()
        self.evaluations[name] = found
        summary = {"batch": self.batches, "version": self.policy.version} | found.summary
        self.observers.evaluation(name, self.batches, summary, found.records)
        mean = found.summary.get("reward_mean")
        graded = f", mean reward {mean:.3f}" if mean not in (None, found.summary.get("pass_at_1")) else ""
        self.display.note(f"evaluation ({name}): {interval(found.summary, 'pass_at_1')}{graded}")

    def save(self) -> Path | None:
        """The final policy as a Hugging Face model directory."""
        if not self.settings.run.save_weights:
            return None
        self.observers.phase("writing weights")
        return self.write_weights()

    def write_weights(self, version: int | None = None) -> Path:
        """π as it is now, as weights/final or under its version."""
        with without_progress_bars():
            return self.store.record_weights(self.policy.save, version)


def describe_environment(parts: Parts) -> dict[str, Any]:
    """What environment.json says: versions, machine, and what computes."""
    policy, dtype = parts.learner.policy, parts.settings.model.dtype
    environment = collect_environment(str(policy.device))
    environment["computation"] = policy.model.computation
    environment["decoding"] = parts.sampled.model.decoding if parts.sampled else "by vLLM"
    environment["dtype"], environment["dtype_reason"] = pick_dtype(dtype, policy.device)
    environment["parity"] = asdict(parts.parity) if parts.parity else None
    environment["offline"] = str(parts.offline) if parts.offline is not None else None
    return environment


def write_config(parts: Parts) -> str:
    """config.toml: the settings, and what they do not say where the task is an object of the caller's."""
    kind = type(parts.task)
    read = f"of [task] only {' and '.join(name + what for name, what in READ_OF_TASK.items())} were read"
    own = f"# The task was the caller's own object, a {kind.__module__}.{kind.__qualname__}; {read}.\n"
    return (own if parts.own_task else "") + to_toml(parts.settings)


class Warnings:
    """What a run warns of while it goes on, each once. `dtype` is the weights', `prompts` the size of the split."""

    def __init__(self, settings: Settings, dtype: str, prompts: int) -> None:
        self.settings, self.dtype, self.prompts = settings, dtype, prompts
        self._given: set[str] = set()
        self._pushed = False  # an update had a gradient since the last weight sync
        self._before: Mapping[str, Any] = {}

    def look(self, step: Step, metrics: Mapping[str, Any]) -> list[str]:
        """What is to be said of this batch and was not said before."""
        found = {name: text for name, text in self._find(step) if name not in self._given}
        self._given |= found.keys()
        self._before = metrics
        pushed = any(update.get("grad_norm") for update in step.updates)
        self._pushed = pushed or (self._pushed and not step.reason)
        return list(found.values())

    def _find(self, step: Step) -> Iterator[tuple[str, str]]:
        share = step.sync.get("moved_synced")
        if step.reason and self._pushed and share is not None and share < STILL:
            yield "standstill", self._standstill(step.alpha, share)
        if self.settings.schedule.kind == "certified" and step.reason == "cap":
            yield "certificate", self._no_certificate()
        keys = [group.prompt.key for group in step.batch.groups if group.source == "sampler"]
        if len(set(keys)) < len(keys):
            split = f"the {count_of(self.prompts, 'prompt')} of the split came to their end inside it (said once)"
            yield "repetition", f"batch {step.b} asks a prompt more than once: {split}"

    def _standstill(self, version: int, share: float) -> str:
        remedies = ["a larger optimizer.lr", "more updates per weight sync (schedule.v, schedule.i)"]
        if self.dtype == "bfloat16":
            plain = self.settings.optimizer.masters == "plain"
            remedies = ['optimizer.masters = "dithered"'] * plain + remedies + ['model.dtype = "float32"']
        return (
            f"the weight sync of version {version} changes {share:.4%} of the sampler's weights, less than 1 in "
            f"10,000: its steps are lost in the rounding to {self.dtype}, and the sampler generates as before. What "
            f"helps: {', '.join(remedies)}. See docs/precision.md; said once"
        )

    def _no_certificate(self) -> str:
        shown = (("lag_certified", "+.3f"), ("lag_ess", ".1f"))
        bound, ess = (formatted(self._before.get(key), form) for key, form in shown)
        return (
            f"schedule certified: {count_of(self.settings.schedule.v, 'batch', 'es')} are over and no batch certified "
            f"that pi_k is better than alpha (the last: J(pi_k) - J(alpha) >= {bound}, with an effective sample size "
            f"of {ess}). More completions in a batch (schedule.prompts, sampling.G) certify smaller gains; said once"
        )
