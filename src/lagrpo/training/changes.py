"""Going on with a run: which one, and whether the settings are still its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lagrpo.errors import SettingsError
from lagrpo.ranks.rank import Rank
from lagrpo.runs.reading import open_run
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import flatten, load_settings

FREE = (
    *("run.name", "run.directory", "run.resume", "run.allow", "run.display", "run.save_weights", "run.save_every"),
    *("run.checkpoint_minutes", "run.checkpoint_every", "run.keep_checkpoints", "run.keep_optimizer"),
    *("model.threads", "model.dtype", "evaluation.every", "evaluation.before_and_after"),
    *("distributed.deadline", "distributed.collective", "distributed.silence"),
    *("verifier.workers", "verifier.max_without_reward", "verifier.max_without_reward_run"),
)
"""Settings that a resumed run may change as it likes: what it learns does not depend on them. Of model.dtype only the
spelling may change, from auto to what that chose; the run looks at what it computes in."""
FIXED = {"run.seed": "every random number of the run is a function of it"}
"""Settings that never change, and why."""
RUN = "run"
"""Under which torchrun's store keeps the directory of the run."""
FREE_OF_VLLM = ("in_flight",)
"""Settings of section vllm that it may not."""


def after_restart(settings: Settings, rank: Rank | None) -> Settings:
    """Settings that go on with the run, where torchrun has started its processes again."""
    if rank is None or not rank.restarts or settings.run.resume is not None:
        return settings
    resume = "auto" if settings.run.name else rank.recall(RUN)
    return settings.model_copy(update={"run": settings.run.model_copy(update={"resume": resume})})


def find_run(settings: Settings) -> Path | None:
    """The directory of the run to go on with; None for a new one. Raises FileNotFoundError where none is there."""
    run = settings.run
    if run.resume is None:
        return None
    path = Path(run.directory) / str(run.name) if run.resume == "auto" else Path(run.resume).expanduser()
    if run.resume == "auto" and not (path / "config.toml").is_file():
        return None
    return open_run(path).path


def check_changes(settings: Settings, run: Path) -> None:
    """Raise SettingsError for settings that differ from the run's and may not, and for names in run.allow that are no
    settings."""
    now, before = (flatten(s.model_dump()) for s in (settings, own_settings(run)))
    if unknown := [name for name in settings.run.allow if name not in now]:
        raise SettingsError(f"run.allow: {', '.join(unknown)} is no setting; write section.name")
    if settings.run.name not in (None, before["run.name"], run.name):
        raise SettingsError(f"run.name = {settings.run.name!r}: a resumed run keeps its directory, {run}")
    if moved := [f"{name} cannot change: {why}" for name, why in FIXED.items() if now[name] != before[name]]:
        raise SettingsError("\n".join(moved))
    changed = {n: (before[n], now[n]) for n in now if before[n] != now[n] and not _may_change(n, settings, before)}
    if refused := {name: values for name, values in changed.items() if name not in settings.run.allow}:
        lines = [f"{name} = {_shown(new)}, and the run has {_shown(old)}" for name, (old, new) in refused.items()]
        allowed = " ".join(sorted({*refused, *settings.run.allow}))
        lines[-1] += f". A resumed run keeps its settings; to change them from here on: --run.allow {allowed}"
        raise SettingsError("\n".join(lines))


def own_settings(run: Path) -> Settings:
    """The settings in a run's config.toml. Raises SettingsError for a file that is not whole."""
    file = run / "config.toml"
    if not file.stat().st_size:
        raise SettingsError(f"{file} is empty: the settings of the run are lost, and it cannot go on")
    return load_settings(file)


def changes(settings: Settings, run: Path) -> dict[str, Any]:
    """What differs from the settings of the run, for its events: name -> [before, now]."""
    now, before = (flatten(s.model_dump()) for s in (settings, own_settings(run)))
    own = {"run.name", "run.directory", "run.resume", "run.allow"}
    return {name: [before[name], now[name]] for name in now if before[name] != now[name] and name not in own}


def _may_change(name: str, settings: Settings, before: Mapping[str, Any]) -> bool:
    """More batches or stages do not change what was learned so far, where the learning rate does not depend on them."""
    schedule = settings.schedule
    if name in ("schedule.batches", "schedule.stages"):
        more = schedule.batches >= before["schedule.batches"] and schedule.stages >= before["schedule.stages"]
        same_stages = name == "schedule.stages" or before["schedule.stages"] == 1
        return more and same_stages and settings.optimizer.schedule == "constant"
    section, _, leaf = name.partition(".")
    return name in FREE or (section == "vllm" and leaf not in FREE_OF_VLLM)


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, default=str)
