"""The run to resume, and the settings that may change when it resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from lagrpo.distributed.torchrun import world_size
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.rewards.entries import load_reward
from lagrpo.runs.environment import read_environment
from lagrpo.runs.reading import open_run
from lagrpo.settings.load import flatten, load_settings
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import RewardSettings

FREE = (
    "run.report_to",
    "run.log_completions",
    "task.reward_workers",
    "model.dtype",
    "schedule.stop_at",
    "optimizer.offload_optimizer",
    "eval.every",
    "eval.at_start",
    "eval.best_metric",
    "checkpoint.",
    "distributed.",
    "vllm.",
)
"""Settings, and sections, that a resumed run may change: they cannot alter its past batches."""
NOT_COMPARED = ("run.name", "run.output_dir")
"""Settings of the run's location, which each call gives anew."""


def find_run(settings: Settings, resume: str | None) -> Path | None:
    """The directory of the run to resume; None for a new one.

    Raises FileNotFoundError or ValueError.
    """
    if resume is None:
        return None
    if resume != "auto":
        return open_run(Path(resume).expanduser()).path
    if settings.run.name is None:
        raise ValueError("auto finds a run by its name: set run.name")
    path = Path(settings.run.output_dir, settings.run.name)
    return path if (path / "config.toml").is_file() else None


def recorded_threads(settings: Settings, resume: str | None) -> int | None:
    """The number of threads that the run to resume began with.

    None for a new run or another number of ranks.
    """
    with as_settings_error():
        run = find_run(settings, resume)
        before = read_environment(run) if run is not None else {}
    return before.get("threads") if before.get("ranks") == world_size() else None


def find_changes(settings: Settings, run: Path) -> dict[str, tuple[object, object]]:
    """Settings that differ from the run's: name -> (before, now).

    Raises SettingsError if they could alter its past.
    """
    saved = load_settings(run / "config.toml")
    before = flatten(saved.model_dump())
    now = flatten(settings.model_dump())
    names = [
        name
        for name in now | before
        if name not in NOT_COMPARED and before.get(name) != now.get(name)
    ]
    wrong = [name for name in names if not _may_change(name, settings, saved, run)]
    if wrong:
        lines = [
            f"{name} = {json.dumps(now.get(name))}, but the run has {json.dumps(before.get(name))}"
            for name in wrong
        ]
        message = "\n".join(lines) + ": a resumed run cannot change this"
        rate_depends_on_length = settings.optimizer.lr_scheduler_type != "constant"
        if "schedule.batches" in wrong and rate_depends_on_length:
            message += " (more batches need a run with lr_scheduler_type = 'constant')"
        raise SettingsError(message)
    return {name: (before.get(name), now.get(name)) for name in names}


def _may_change(name: str, settings: Settings, saved: Settings, run: Path) -> bool:
    """True if this setting may differ in a resumed run.

    More batches change nothing if the learning rate does not depend on their number, and neither
    does a reward function whose file was renamed.
    """
    if name == "schedule.batches":
        is_longer = settings.schedule.batches >= saved.schedule.batches
        return is_longer and settings.optimizer.lr_scheduler_type == "constant"
    if name == "task.rewards":
        sources = read_environment(run).get("sources", {})
        pairs = zip_longest(settings.task.rewards, saved.task.rewards)
        return all(now and before and _is_moved(now, before, sources) for now, before in pairs)
    return name in FREE or f"{name.partition('.')[0]}." in FREE


def _is_moved(
    now: RewardSettings, before: RewardSettings, sources: Mapping[str, str | None]
) -> bool:
    """True if two entries differ at most in the file of a function, which has a new name."""
    if now == before:
        return True
    same = now.model_copy(update={"reward": before.reward}) == before
    if not same or ":" not in now.reward:
        return False
    with suppress(ValueError, ImportError):
        from lagrpo.resume.sources import digest_file, find_file, find_module  # loads torch

        file = find_file(find_module(load_reward(now, None).function))
        return file is not None and digest_file(file) in sources.values()
    return False
