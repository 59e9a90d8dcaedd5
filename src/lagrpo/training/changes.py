"""Going on with a run: which one, and whether the settings are still its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.errors import SettingsError
from lagrpo.runs.environment import read_environment
from lagrpo.runs.files import to_json
from lagrpo.runs.reading import load_events, load_until, open_run
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings

if TYPE_CHECKING:  # it loads PyTorch
    from lagrpo.runs.checkpoints import Checkpoint, Checkpoints

FREE = (
    *("run.name", "run.directory", "run.resume", "run.allow", "run.display", "run.save_weights", "run.save_every"),
    *("run.checkpoint_minutes", "run.checkpoint_every", "run.keep_checkpoints", "run.keep_optimizer"),
    *("run.trackers", "run.tracked_completions"),
    *("model.threads", "model.dtype", "model.lora.merge", "optimizer.offload_moments"),
    *("evaluation.every", "evaluation.before_and_after"),
    *("evaluation.sampler", "evaluation.best", "evaluation.best_is"),
    *("distributed.shard", "verifier.workers", "verifier.max_without_reward"),
)
"""Settings that a resumed run may change as it likes: what it learns does not depend on them. Of model.dtype only the
spelling may change, from auto to what that chose; the run looks at what it computes in."""
FIXED = {"run.seed": "every random number of the run is a function of it"}
"""Settings that never change, and why."""
SAID_ANEW = ("run.name", "run.directory", "run.resume", "run.allow")
"""Settings that belong to where a run is and to how it was called, and not to its batches."""
FREE_OF_VLLM = ("in_flight",)
"""Settings of section vllm that it may not."""


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
    checkpoint, _ = checkpoints_of(run).newest()
    now, before = plain(settings), settings_at(run, checkpoint)
    had = {name: [before[name], *allowed] for name, allowed in allowed_since(run, checkpoint, before).items()}
    if unknown := [name for name in settings.run.allow if name not in now]:
        raise SettingsError(f"run.allow: {', '.join(unknown)} is no setting; write section.name")
    if settings.run.name not in (None, before["run.name"], run.name):
        raise SettingsError(f"run.name = {settings.run.name!r}: a resumed run keeps its directory, {run}")
    if moved := [f"{name} cannot change: {why}" for name, why in FIXED.items() if now[name] != before[name]]:
        raise SettingsError("\n".join(moved))
    changed = {n: had[n][-1] for n in now if now[n] not in had[n] and not _may_change(n, settings, before)}
    if refused := {name: old for name, old in changed.items() if name not in settings.run.allow}:
        lines = [f"{name} = {_shown(now[name])}, and the run has {_shown(old)}" for name, old in refused.items()]
        allowed = " ".join(sorted({*refused, *settings.run.allow}))
        lines[-1] += f". A resumed run keeps its settings; to change them from here on: --run.allow {allowed}"
        raise SettingsError("\n".join(lines))


def checkpoints_of(run: Path) -> Checkpoints:
    """The checkpoints of a run; those of others in its directory are none of it. Raises ValueError for a damaged
    environment.json."""
    from lagrpo.runs.checkpoints import Checkpoints

    environment = read_environment(run)
    return Checkpoints(run, environment.get("id", "") if environment else None)


def settings_at(run: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """section.name -> value, with which the batches until the checkpoint were made. Without a checkpoint, and for what
    it does not say: by config.toml."""
    own = plain(own_settings(run))
    said = checkpoint.state.get("settings", {}) if checkpoint else {}
    return own | {name: value for name, value in said.items() if name in own and name not in SAID_ANEW}


def allowed_since(run: Path, checkpoint: Checkpoint | None, before: Mapping[str, Any]) -> dict[str, list[Any]]:
    """For each setting of `before` the values that it was allowed to get after the checkpoint, by the run's events: the
    run went on with them, and may have ended before its next checkpoint. Raises ValueError for damaged events."""
    found: dict[str, list[Any]] = {name: [] for name in before}
    events, until = run / "events.jsonl", checkpoint.state["lengths"]["events.jsonl"] if checkpoint else 0
    for event in load_events(run)[len(load_until(events, until)) :]:
        changed = event.get("changed")
        for name, values in changed.items() if isinstance(changed, dict) else ():
            if name in found and isinstance(values, list):
                found[name] += values[1:]
    return found


def plain(settings: Settings) -> dict[str, Any]:
    """section.name -> value, as JSON has it: tables inside of a section, such as task.options, are values."""
    sections = json.loads(to_json(settings.model_dump()))
    return {f"{section}.{name}": value for section, own in sections.items() for name, value in own.items()}


def own_settings(run: Path) -> Settings:
    """The settings in a run's config.toml. Raises SettingsError for a file that is not whole."""
    file = run / "config.toml"
    if not file.stat().st_size:
        raise SettingsError(f"{file} is empty: the settings of the run are lost, and it cannot go on")
    return load_settings(file)


def changes(settings: Settings, run: Path, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What differs from the settings of the batches until the checkpoint, for events: name -> [before, now]."""
    now, before = plain(settings), settings_at(run, checkpoint)
    return {n: [before[n], now[n]] for n in now if before[n] != now[n] and n not in SAID_ANEW}


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
