"""A batch that is measured before a run: `lagrpo train FILE --dry-run --measure`.

The batch after one that warms up is counted. Both are made from the run's own components, in a
temporary directory, so a later run starts as if nothing had been measured.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lagrpo.core.objective import Recipe
from lagrpo.distributed.ranks import Ranks
from lagrpo.machine import process_peak
from lagrpo.rollout.schedule import LoopState
from lagrpo.settings.schema import Settings
from lagrpo.startup.build import build_run
from lagrpo.startup.memory_words import in_words
from lagrpo.tasks import Task
from lagrpo.terminal.text import count_of, duration
from lagrpo.training.loop import train_loop
from lagrpo.training.step import Phase

WARM_UP = 1
"""Batches before the one that counts: the first makes the optimizer state, a GPU compiles."""
INTERVALS = (1, 4, 10)
"""The values of v, batches per weight sync, that a measurement is extended to."""


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The seconds of a batch with a weight sync, by phase and in all, and the memory at its end.

    `overlaps`: engine and trainer compute at the same time, with v > 1. `peak`: the most bytes that
    this rank's process, or its GPU, ever had; None if the system does not say.
    """

    phases: Mapping[Phase, float]
    total: float
    overlaps: bool
    peak: int | None

    def seconds_at(self, v: int) -> float:
        """Returns the seconds of a batch if weights are synced every v batches.

        Each cycle has one sync. Its v batches are sampled together, which is counted as v times the
        sampling that was measured. An engine that overlaps samples the next batch of the cycle
        while the policy learns.
        """
        sync = self.phases.get(Phase.SYNC, 0.0)
        sampling = self.phases.get(Phase.SAMPLING, 0.0)
        others = self.total - sync - sampling
        if not self.overlaps:
            return sync / v + sampling + others
        return (sync + sampling + others + (v - 1) * max(sampling, others)) / v


def measure_batch(settings: Settings, recipe: Recipe, task: Task | None, ranks: Ranks) -> BatchCost:
    """Makes WARM_UP batches and one that counts. Returns its cost on this rank. Collective.

    Raises the errors of a run.
    """
    with TemporaryDirectory(prefix="lagrpo-measure-") as directory:
        measured = shortened(settings, Path(directory))
        # What this prints would stand between the comments of the settings.
        with redirect_stdout(sys.stderr):
            built = build_run(measured, recipe, task, ranks)
        with closing(built):
            device = built.trainer.policy.device
            tokens = measured.optimizer.tokens_in_micro_batch(on_gpu=device.type == "cuda")
            state = LoopState(pi_ref=built.trainer.policy.version)
            *_, last = train_loop(
                built.sampling,
                built.trainer,
                measured.schedule,
                state,
                micro_batch_tokens=tokens,
            )
    overlaps = settings.rollout.uses_vllm and not settings.vllm.sleep
    return BatchCost(last.times.seconds, last.times.total, overlaps, peak_of(device))


def shortened(settings: Settings, directory: Path) -> Settings:
    """Returns settings of the batches to measure, each with a weight sync before it."""
    schedule = settings.schedule.model_copy(
        update={
            "batches": WARM_UP + 1,
            "sync_every": 1,
            "constant_lag": None,
            "max_staleness": None,
            "sync_at_kl": None,
            "ref_sync_every": None,
        }
    )
    run = settings.run.model_copy(update={"output_dir": str(directory), "name": None})
    return settings.model_copy(update={"schedule": schedule, "run": run})


def peak_of(device: torch.device) -> int | None:
    """Returns the most bytes that PyTorch took on a GPU, or that this process took of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak()


def describe_cost(cost: BatchCost, settings: Settings) -> list[str]:
    """Returns the lines of a table: seconds by phase, of a batch and of the run, and by v."""
    schedule = settings.schedule
    # With constant_lag and max_staleness, weights are synced before every batch.
    v = schedule.sync_every
    lines = ["measured    one batch, after one that warms up; in seconds"]
    for phase in Phase:
        lines.append(f"  {phase:<12}{cost.phases.get(phase, 0.0):>9.2f}")
    rest = cost.total - sum(cost.phases.values())
    lines.append(f"  {'other':<12}{rest:>9.2f}")
    lines.append(f"  {'batch':<12}{cost.total:>9.2f}")
    batches = count_of(schedule.batches, "batch", "es")
    lines.append(
        f"run         {batches} at v = {v}: {_run_time(cost, v, schedule.batches)}, "
        "without evaluations and checkpoints"
    )
    lines.append("  v    s per batch   run")
    for interval in INTERVALS:
        lines.append(
            f"  {interval:<4}{cost.seconds_at(interval):>12.2f}   "
            f"{_run_time(cost, interval, schedule.batches)}"
        )
    if cost.overlaps:
        formula = "(sync + sampling + other + (v - 1) max(sampling, other)) / v"
    else:
        formula = "sync / v + sampling + other"
    lines.append(
        f"  from the phases above: {formula}; sampling v batches together counts as v times one"
    )
    if cost.peak is not None:
        lines.append(f"memory      {in_words(cost.peak)} at most in the measured batches")
    return lines


def _run_time(cost: BatchCost, v: int, batches: int) -> str:
    """Returns the time of a run at v: minutes and seconds, or hours, too."""
    return duration(batches * cost.seconds_at(v))
