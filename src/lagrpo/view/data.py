"""From the directories of runs to the bytes that the page unpacks."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lagrpo.errors import refusing
from lagrpo.redaction import HIDDEN, is_secret, redact
from lagrpo.runs.directory import Run
from lagrpo.runs.environment import FILE as ENVIRONMENT
from lagrpo.runs.environment import read_environment
from lagrpo.runs.lock import HOLDER, read_holder
from lagrpo.runs.reading import load_events, load_metrics, load_reward_range, open_run
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import flatten, list_settings, load_settings, read_toml
from lagrpo.view import meanings
from lagrpo.view.evaluations import read_evaluations
from lagrpo.view.payload import Arrays
from lagrpo.view.rollouts import measure, read_rollouts
from lagrpo.view.sample import Size, share, within_tokens

FORMAT = 1


def collect(paths: Sequence[Path | str], most: int) -> bytes:
    """What the page shows of these runs, with `most` completions in all, packed. Raises RunNotFoundError where one is
    no run or has a damaged file of rollouts, SettingsError where another file of it is damaged."""
    runs = [open_run(path) for path in paths]
    stamp = take_stamp(paths)  # before anything is read: what is written meanwhile counts as new
    arrays = Arrays()
    with refusing():
        sizes = [measure(run) for run in runs]
        totals = [Size(*map(sum, zip(Size(0, 0), *found.values(), strict=True))) for found in sizes]
        whole = Size(*map(sum, zip(*totals, strict=True)))
        quota = share([total.completions for total in totals], within_tokens(whole, most))
        labels = _labels(runs)
        found = [
            {"name": label, **_read(run), "rollouts": read_rollouts(run, size, part, _config(run), arrays)}
            | {"evaluations": read_evaluations(run, most // len(runs))}
            for run, label, size, part in zip(runs, labels, sizes, quota, strict=True)
        ]
    header = {"format": FORMAT, "stamp": stamp, "created": _now(), "version": version("lagrpo"), "most": most}
    names = [name for run in found for name in run["metrics"]]
    return arrays.pack(header | {"runs": found, "metrics": meanings.of_names(names), "settings": _meanings()})


def take_stamp(paths: Sequence[Path | str]) -> str:
    """A digest of names, sizes and times of the files of these runs: another one when any was written."""
    digest = hashlib.sha256()
    for path in paths:
        for file in _files(Path(path).expanduser()):
            try:
                about = os.stat(file)
            except FileNotFoundError:
                continue
            digest.update(os.fsencode(f"{file}\0{about.st_size}\0{about.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]


def _files(run: Path) -> Iterator[Path]:
    yield from (run / name for name in ("config.toml", ENVIRONMENT, "metrics.jsonl", "events.jsonl", HOLDER))
    for folder in ("rollouts", "evaluations"):
        yield from sorted(path for path in (run / folder).glob("*") if not path.name.startswith("."))


def _labels(runs: Sequence[Run]) -> list[str]:
    """The names of the runs, or their paths where two have one name."""
    names = [run.path.resolve().name for run in runs]
    return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, runs, strict=True)]


def _read(run: Run) -> dict[str, Any]:
    metrics, events, settings = load_metrics(run), load_events(run), _settings(run)
    return {
        "path": str(run.path),
        "range": list(load_reward_range(run)),
        "total": _total_batches(settings),
        "status": _status(run, events),
        "notes": list(_notes(run, metrics)),
        "metrics": _by_column(metrics),
        "events": [{name: _redacted(name, value) for name, value in event.items()} for event in events],
        "settings": settings,
        "environment": {name: _redacted(name, value) for name, value in flatten(read_environment(run.path)).items()},
    }


def _config(run: Run) -> dict[str, Any]:
    """The sections of config.toml."""
    found = read_toml(run.path / "config.toml")
    return {name: section for name, section in found.items() if isinstance(section, dict)}


def _settings(run: Run) -> dict[str, Any]:
    return {name: _redacted(name, value) for name, value in flatten(_config(run)).items()}


def _redacted(name: str, value: Any) -> Any:
    """The value without secrets; what JSON cannot hold, such as a date, as text."""
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else redact(value)
    if isinstance(value, list):
        return [_redacted(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _redacted(str(key), item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _by_column(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The numbers of metrics.jsonl by metric."""
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_number(line.get(name)) for line in lines] for name in names}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _total_batches(settings: Mapping[str, Any]) -> int | None:
    counts = [settings.get(f"schedule.{name}", 1) for name in ("batches", "stages")]
    return counts[0] * counts[1] if all(isinstance(count, int) for count in counts) else None


def _status(run: Run, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """One word, and what else is known: finished, interrupted, failed, going or unknown."""
    if holder := read_holder(run.path):
        return _status_by_holder(holder)
    marks = [event for event in events if event.get("event") in ("end", "resumed")]
    if marks and marks[-1]["event"] == "end":
        return [str(marks[-1].get("status", "unknown")), redact(str(marks[-1].get("detail", "")))]
    return ["unknown", "no end is on record: the run was killed, or it has only begun"]


def _status_by_holder(holder: Mapping[str, Any]) -> list[str]:
    writer = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    if holder["host"] != platform.node() or os.name != "posix" or not isinstance(holder["pid"], int):
        return ["unknown", f"it is going on, or was killed: {writer}"]
    try:
        os.kill(holder["pid"], 0)
    except PermissionError:
        return ["going", writer]
    except (OSError, OverflowError):
        return ["killed", f"no such process any more: {writer}"]
    return ["going", writer]


def _notes(run: Run, metrics: Sequence[Any]) -> Iterator[str]:
    """What is missing."""
    if not metrics:
        yield "There are no metrics yet: the first batch is not finished."
    for file in (run.metrics, run.events):
        if file.is_file() and file.stat().st_size and not _ends_whole(file):
            yield f"The last line of {file.name} is torn (the run was killed, or is writing it) and left out."
    if not (run.path / ENVIRONMENT).is_file():
        yield f"There is no {ENVIRONMENT}."


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        return opened.read() == b"\n"


def _meanings() -> dict[str, list[Any]]:
    """Of every setting what it means, and its default."""
    defaults = flatten(load_settings().model_dump(mode="json"))
    fields = list_settings(Settings)
    return {name: [fields[name].description or "", defaults.get(name)] for name in fields if "." in name}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
