"""The time and the memory that the runs of a study should take, by the model of `lagrpo plan`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lagrpo.backends.hardware import pick_device
from lagrpo.errors import SettingsError
from lagrpo.planning.hardware import find_device
from lagrpo.planning.plan import make_plan
from lagrpo.settings.plan import PlanSettings
from lagrpo.study.running import Planned
from lagrpo.terminal.text import duration


def expect(runs: Sequence[Planned], gpu: str | None) -> list[str]:
    """Lines for a person: the time of all runs one after the other, each with the whole GPU or CPU and completions as
    long as they may be, and the memory of the largest. Where the model is not there to be looked at, why. Raises
    SettingsError for a GPU that is not known."""
    if not runs:
        return []
    device = find_device(gpu or _own(runs[0])).name
    try:
        plans = [make_plan(run.settings, PlanSettings(gpu=device)) for run in runs]
    except SettingsError as error:
        return [f"time and memory: not known ({error})"]
    seconds = sum(plan.best.seconds.total * run.batches for plan, run in zip(plans, runs, strict=True))
    largest = max(plan.best.learner for plan in plans)
    return [
        f"expected at most, by the model of lagrpo plan on one {device}: {duration(seconds)} of batches in all, "
        f"{duration(seconds / len(runs))} a run; {largest / 2**30:.1f} GiB a run"
    ]


def _own(run: Planned) -> str:
    device = pick_device(run.settings.model.device)
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
