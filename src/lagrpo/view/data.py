"""From the directories of runs to the bytes that the page unpacks."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lagrpo.errors import refusing
from lagrpo.logs import HIDDEN, is_secret, redact
from lagrpo.runs import reading
from lagrpo.runs.directory import Run, read_holder
from lagrpo.runs.environment import FILE as ENVIRONMENT
from lagrpo.runs.environment import read_environment
from lagrpo.runs.metrics import describe_metrics
from lagrpo.runs.rollouts import reward_columns
from lagrpo.settings.load import flatten, list_settings, load_settings, read_toml
from lagrpo.settings.schema import Settings
from lagrpo.view.page import Arrays
from lagrpo.view.rollouts import Table, read_rollouts

TOKENS = 4_000_000  # of all completions of a page


def collect(paths: Sequence[Path | str], most: int) -> bytes:
    """What the page shows of these runs, with `most` completions in all, packed. Raises RunNotFoundError for a
    directory that is not a run, SettingsError for damaged files."""
    runs, arrays = [reading.open_run(path) for path in paths], Arrays()
    share, tokens = most // len(runs), TOKENS // len(runs)
    stamp, names = take_stamp(paths), [run.path.resolve().name for run in runs]  # first: what follows counts as new
    found = []
    with refusing():
        for run, name in zip(runs, names, strict=True):
            config = read_toml(run.path / "config.toml")
            facts = {"name": name if names.count(name) == 1 else str(run.path), **_read(run, flatten(config))}
            facts["rollouts"] = read_rollouts(run, share, tokens, config, arrays)
            found.append(facts | {"evaluations": read_evaluations(run, share)})
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    header = {"format": 1, "stamp": stamp, "created": now, "version": version("lagrpo"), "most": most}
    metrics = describe_metrics([name for run in found for name in run["metrics"]])
    defaults, fields = flatten(load_settings().model_dump(mode="json")), list_settings(Settings)
    meanings = {name: [fields[name].description or "", defaults.get(name)] for name in fields if "." in name}
    return arrays.pack(header | {"runs": found, "metrics": metrics, "settings": meanings})


def take_stamp(paths: Sequence[Path | str]) -> str:
    """A digest of names, sizes and times of the files of these runs: another one when any was written."""
    digest = hashlib.sha256()
    for run in (Path(path).expanduser() for path in paths):
        for file in sorted((*run.glob("[!.]*.[jt]*"), *run.glob("rollouts/[!.]*"), *run.glob("evaluations/[!.]*"))):
            about = file.stat()
            digest.update(os.fsencode(f"{file}\0{about.st_size}\0{about.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]


def _read(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    metrics, events = reading.load_metrics(run), reading.load_events(run)
    notes = [] if metrics else ["No metrics yet: the first batch is not finished."]
    notes += [] if (run.path / ENVIRONMENT).is_file() else [f"There is no {ENVIRONMENT}."]
    names = dict.fromkeys(name for line in metrics for name in line)
    return {
        "path": str(run.path),
        "range": list(reading.load_reward_range(run)),
        "total": settings.get("schedule.batches"),
        "status": _status(run, events),
        "notes": notes,
        "metrics": {name: [line.get(name) for line in metrics] for name in names},
        "events": _redacted("", events),
        "settings": _redacted("", settings),
        "environment": _redacted("", flatten(read_environment(run.path))),
    }


def _redacted(name: str, value: Any) -> Any:
    """The value without secrets; what JSON cannot hold, such as a date, as text."""
    if isinstance(value, str):
        return HIDDEN if value and is_secret(name) else redact(value)
    if isinstance(value, list):
        return [_redacted(name, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _redacted(str(key), item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _status(run: Run, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """One word, and what else is known: finished, interrupted, failed, killed, running or unknown."""
    if holder := read_holder(run.path):
        writer = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        if holder["host"] != platform.node():
            return ["unknown", f"running or killed: {writer}"]
        return ["running", writer] if Path(f"/proc/{holder['pid']}").exists() else ["killed", f"it was {writer}"]
    marks = [event for event in events if event.get("event") in ("end", "resumed")]
    if marks and marks[-1]["event"] == "end":
        return [str(marks[-1].get("status")), redact(str(marks[-1].get("detail")))]
    return ["unknown", "no end recorded: the run was killed, or is just starting"]


def read_evaluations(run: Run, most: int) -> dict[str, Any]:
    """Summaries, prompts and completions of a run's evaluations. If they have more than `most` completions, only the
    first and the last evaluation keep their texts; the counts of all are there."""
    summaries, prompts, texts = reading.load_evaluations(run), Table(), Table()
    records = [reading.load_evaluation_records(run, summary["name"]) for summary in summaries]
    fits = sum(len(record["completions"]) for of_one in records for record in of_one) <= most
    rows = [
        [_evaluation_row(record, prompts, texts, fits or n in (0, len(records) - 1)) for record in of_one]
        for n, of_one in enumerate(records)
    ]
    kept = (int, float, str, list)
    facts = [{k: v for k, v in s.items() if isinstance(v, kept)} | {"step": s.get("step") or 0} for s in summaries]
    return {"summaries": facts, "rows": rows, "prompts": [list(prompt) for prompt in prompts], "texts": list(texts)}


def _evaluation_row(record: Mapping[str, Any], prompts: Table, texts: Table, keeps: bool) -> dict[str, Any]:
    prompt = record["prompt_id"], record["prompt"] or "", str(record.get("answer") or "")
    row = {name: record[name] for name in ("samples", "scored", "correct")}
    row |= {"prompt": prompts.number(prompt), "reward": record.get("reward")}
    if keeps:
        row |= {"texts": [texts.number(text or "") for text in record["completions"]], "rewards": record["rewards"]}
        row |= {"parts": reward_columns(record), "decided": record.get("is_correct")}
    return row
