"""From the directories of runs to the bytes that the page unpacks."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lagrpo.errors import as_settings_error
from lagrpo.logs import redact, redact_values
from lagrpo.machine import cache_directory
from lagrpo.runs import reading
from lagrpo.runs.directory import Run, read_holder
from lagrpo.runs.environment import read_environment
from lagrpo.runs.files import to_json
from lagrpo.runs.metrics import describe_metrics
from lagrpo.runs.rollouts import REWARD, reward_columns, rollout_schema
from lagrpo.settings.load import flatten, list_settings, load_settings, read_toml
from lagrpo.settings.schema import Settings

MOST_TOKENS = 4_000_000  # of all completions of a page
LEAST = 32  # completions of a batch
PER_NAT = 1000  # log-probs and entropies are rounded to thousandths of a nat
UNKNOWN = -(1 << 15)  # instead of a log-prob that was not recorded
MEASURED = ("old_logprobs", "entropy")  # token columns that a completion may lack
TOKENS: dict[str, Any] = {
    "token_ids": np.int64,
    "rollout_logprobs": np.float64,
    "policy_versions": np.int32,
}
TOKENS |= {"loss_mask": np.uint8} | dict.fromkeys(MEASURED, np.float64)
NUMBERS = ("reward", "advantage", "group_std", "staleness")
PLAIN = ("sample_index", "finished", "policy_version")
TEXTS = ("outcome", "excluded_reason", "reason", "source")
IDENTITY = ("step", "completion", "prompt_id", "prompt_text", "answer", "epoch")
TOKENIZER = "tokenizer.json"

Rows = dict[str, Any]


class Table(dict[Any, int]):
    """Distinct entries, each with a number."""

    def number(self, entry: Any) -> int:
        """The number of the entry, which is added if it is new."""
        return self.setdefault(entry, len(self))


def collect(paths: Sequence[Path | str], most: int) -> bytes:
    """What the page shows of these runs, with `most` completions in all, packed. Raises RunNotFoundError for a
    directory that is not a run, SettingsError for damaged files."""
    runs, arrays = [reading.open_run(path) for path in paths], list[np.ndarray]()
    share, tokens = most // len(runs), MOST_TOKENS // len(runs)
    stamp, names = (
        take_stamp(paths),
        [run.path.resolve().name for run in runs],
    )  # first: what follows counts as new
    found = []
    with as_settings_error():
        for run, name in zip(runs, names, strict=True):
            config = read_toml(run.path / "config.toml")
            facts = {
                "name": name if names.count(name) == 1 else str(run.path),
                **_read(run, flatten(config)),
            }
            facts["rollouts"] = read_rollouts(run, share, tokens, config, arrays)
            found.append(facts | {"evaluations": read_evaluations(run, share)})
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    header = {
        "format": 1,
        "stamp": stamp,
        "created": now,
        "version": version("lagrpo"),
        "most": most,
    }
    metrics = describe_metrics([name for run in found for name in run["metrics"]])
    defaults, fields = flatten(load_settings().model_dump(mode="json")), list_settings(Settings)
    meanings = {
        name: [fields[name].description or "", defaults.get(name)] for name in fields if "." in name
    }
    return pack(header | {"runs": found, "metrics": metrics, "settings": meanings}, arrays)


def pack(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """The header and all arrays (uint8, (u)int16, (u)int32 or floats), deflated (the zlib format). Before that: the
    length of the header as a little-endian uint32; the header, JSON in UTF-8; zeros up to a multiple of 8; the arrays,
    each at a multiple of 8. The header's `arrays` has [type, offset from the first, length]."""
    contents = [array.astype(array.dtype.newbyteorder("<")).tobytes() for array in arrays]
    pieces = [content + bytes(-len(content) % 8) for content in contents]
    starts = accumulate(map(len, pieces), initial=0)
    entries = [
        [array.dtype.name, start, len(array)] for array, start in zip(arrays, starts, strict=False)
    ]
    text = re.sub("[\ud800-\udfff]", "\ufffd", to_json({**header, "arrays": entries})).encode()
    start = struct.pack("<I", len(text)) + text
    return zlib.compress(b"".join([start, bytes(-len(start) % 8), *pieces]), 6)


def take_stamp(paths: Sequence[Path | str]) -> str:
    """A digest of names, sizes and times of the files of these runs: another one when any was written."""
    digest = hashlib.sha256()
    for run in (Path(path).expanduser() for path in paths):
        for file in sorted(
            (*run.glob("[!.]*.[jt]*"), *run.glob("rollouts/[!.]*"), *run.glob("evaluations/[!.]*"))
        ):
            about = file.stat()
            digest.update(os.fsencode(f"{file}\0{about.st_size}\0{about.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]


def _read(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    metrics, events = reading.load_metrics(run), reading.load_events(run)
    names = dict.fromkeys(name for line in metrics for name in line)
    return {
        "path": str(run.path),
        "range": list(reading.load_reward_range(run)),
        "total": settings.get("schedule.batches"),
        "status": _status(run, events),
        "notes": [] if metrics else ["No metrics yet: the first batch is not finished."],
        "metrics": {name: [line.get(name) for line in metrics] for name in names},
        "events": redact_values(events),
        "settings": redact_values(settings),
        "environment": redact_values(flatten(read_environment(run.path))),
    }


def _status(run: Run, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """One word, and what else is known: finished, interrupted, failed, killed, running or unknown."""
    if holder := read_holder(run.path):
        writer = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        if holder["host"] != platform.node():
            return ["unknown", f"running or killed: {writer}"]
        return (
            ["running", writer]
            if Path(f"/proc/{holder['pid']}").exists()
            else ["killed", f"it was {writer}"]
        )
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
        [
            _evaluation_row(record, prompts, texts, fits or n in (0, len(records) - 1))
            for record in of_one
        ]
        for n, of_one in enumerate(records)
    ]
    kept = (int, float, str, list)
    facts = [
        {k: v for k, v in s.items() if isinstance(v, kept)} | {"step": s.get("step") or 0}
        for s in summaries
    ]
    return {
        "summaries": facts,
        "rows": rows,
        "prompts": [list(prompt) for prompt in prompts],
        "texts": list(texts),
    }


def _evaluation_row(
    record: Mapping[str, Any], prompts: Table, texts: Table, keeps: bool
) -> dict[str, Any]:
    prompt = record["prompt_id"], record["prompt"] or "", str(record.get("answer") or "")
    row = {name: record[name] for name in ("samples", "scored", "correct")}
    row |= {"prompt": prompts.number(prompt), "reward": record.get("reward")}
    if keeps:
        row |= {
            "texts": [texts.number(text or "") for text in record["completions"]],
            "rewards": record["rewards"],
        }
        row |= {"parts": reward_columns(record), "decided": record.get("is_correct")}
    return row


# Rollouts: columns of batches, groups and completions, and all tokens, end to end. A run may have more completions than
# fit in. Then whole groups are taken, evenly over the batches: the prompts of a batch are in random order, so its first
# groups are a random sample of it.


def shortest_unsigned(values: Any) -> np.ndarray:
    """The same counts, in two bytes each if these hold them, else in four."""
    array = np.array(values, dtype=np.int64)
    return array.astype(np.uint16 if not len(array) or array.max() < 1 << 16 else np.uint32)


def choose(batches: Sequence[int], most: int, G: int = 1) -> dict[int, int]:
    """How many completions to take of each batch, in whole groups of G, `most` in all. If the share of a batch would be
    less than LEAST completions, fewer batches are taken, evenly spaced, the first and the last among them."""
    if not batches or most < 1:
        return {}
    each = max(LEAST, G, most // len(batches))
    kept = min(len(batches), max(1, most // each))
    places = np.linspace(0, len(batches) - 1, kept).round().astype(int) if kept > 1 else [-1]
    return {batches[place]: min(each, most) // G * G or G for place in places}


def read_rollouts(
    run: Run, most: int, most_tokens: int, config: Mapping[str, Any], arrays: list[np.ndarray]
) -> Rows:
    """Groups and completions, at most about so many completions and tokens; columns are added to the arrays. Raises as
    `load_rollouts` does."""
    sizes = {batch: _measure(run, batch) for batch in reading.rollout_batches(run)}
    completions, tokens = (sum(size[n] for size in sizes.values()) for n in (0, 1))
    most = min(most, most_tokens * completions // max(tokens, 1))
    chosen = choose([*sizes], most, config.get("rollout", {}).get("num_generations", 1))
    rows = _read_rows(
        run, chosen if completions > most else {batch: size[0] for batch, size in sizes.items()}
    )
    prompts, groups = _group(rows)
    codes = {name: Table() for name in TEXTS}
    coded = {
        name: shortest_unsigned([codes[name].number(value or "") for value in rows[name]])
        for name in TEXTS
    }
    ids, places = np.unique(rows["token_ids"], return_inverse=True)
    texts, note = texts_of(run.path, str(config.get("model", {}).get("path", "")), ids.tolist())
    several = {
        name: rows[name].astype(np.float32)
        for name in rows
        if name.startswith(REWARD) or name == "correct"
    }
    columns = groups | coded | _columns(rows, places) | several
    numbers = range(len(arrays), len(arrays) + len(columns))
    arrays += columns.values()
    versions = dict(zip(rows["step"], rows["policy_version"].astype(int).tolist(), strict=True))
    return {
        "batches": [
            [b, version, sizes[b][0], rows["step"].count(b)] for b, version in versions.items()
        ],
        "batches_on_disk": len(sizes),
        "completions_on_disk": completions,
        "prompts": prompts,
        "codes": {name: list(table) for name, table in codes.items()},
        "texts": rows["completion"],
        "vocabulary": texts,
        "ids": ids.tolist(),
        "vocabulary_note": note,
        "rewards": [name.removeprefix(REWARD) for name in several if name.startswith(REWARD)],
        "columns": dict(zip(columns, numbers, strict=True)),
    }


def _measure(run: Run, batch: int) -> tuple[int, int]:
    """Completions and tokens of a batch, from the footer of its file."""
    with reading.opened_rollouts(run, batch) as file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        columns = [group.column(n) for group in groups for n in range(group.num_columns)]
        tokens = sum(c.num_values for c in columns if c.path_in_schema.startswith("token_ids."))
        return file.metadata.num_rows, tokens


def _read_rows(run: Run, chosen: Mapping[int, int]) -> Rows:
    """Columns of the first completions of each of these batches, so many of each."""
    import pyarrow as pa

    tables = [rollout_schema().empty_table()]
    for batch, most in chosen.items():
        with reading.opened_rollouts(run, batch) as file:
            tables.append(file.read().slice(0, most))
    found = pa.concat_tables(tables, promote_options="default").to_pydict()
    several = [name for name in found if name.startswith(REWARD) or name == "correct"]
    rows: Rows = {name: found[name] for name in (*TEXTS, *IDENTITY)}
    rows |= {name: np.array(found[name], dtype=np.float64) for name in (*NUMBERS, *PLAIN, *several)}
    lengths = [len(ids or ()) for ids in found["token_ids"]]
    for name, kind in TOKENS.items():
        lists = [values or [None] * n for values, n in zip(found[name], lengths, strict=True)]
        rows[name] = np.array(
            [value for values in lists for value in values], dtype=np.float64
        ).astype(kind)
    return rows | {"length": np.array(lengths, np.int64)}


def _group(rows: Rows) -> tuple[list[list[Any]], dict[str, np.ndarray]]:
    """The distinct prompts, and for each group its batch, its prompt, its epoch and its first completion."""
    count = len(rows["completion"])
    place = list(
        zip(rows["step"], rows["prompt_id"], rows["epoch"], rows["sample_index"], strict=True)
    )
    starts = [
        c
        for c in range(count)
        if not c or place[c][:3] != place[c - 1][:3] or place[c][3] <= place[c - 1][3]
    ]
    prompts = Table()
    asked = [
        prompts.number((rows["prompt_id"][c], rows["prompt_text"][c], _answer(rows["answer"][c])))
        for c in starts
    ]
    groups = {
        "group_batch": shortest_unsigned([rows["step"][c] for c in starts]),
        "group_prompt": shortest_unsigned(asked),
        "group_epoch": np.array([rows["epoch"][c] for c in starts], dtype=np.int32),
        "group_first": np.array([*starts, count], dtype=np.uint32),
    }
    return [list(prompt) for prompt in prompts], groups


def _answer(text: str) -> str:
    """The reference answer as it is read: JSON text, unless that is only a text in quotation marks."""
    answer = json.loads(text)
    return answer if isinstance(answer, str) else text


def _columns(rows: Rows, places: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of completions and tokens; `places` are the tokens' places in the vocabulary."""
    own_T = np.where(rows["loss_mask"] == 1, rows["old_logprobs"] - rows["rollout_logprobs"], 0.0)
    log_ratios = [
        part.sum() for part in np.split(own_T, np.cumsum(rows["length"])[:-1])
    ]  # NaN if one is unknown
    return {name: rows[name].astype(np.float32) for name in NUMBERS} | {
        "reward": rows["reward"],
        "sample_index": shortest_unsigned(rows["sample_index"]),
        "finished": rows["finished"].astype(np.uint8),
        "first_token": np.concatenate([[0], np.cumsum(rows["length"])]).astype(np.uint32),
        "token": shortest_unsigned(places),
        "rollout_logprobs": _thousandths(rows["rollout_logprobs"]),
        "log_ratio": np.array(log_ratios, dtype=np.float32),
        "version": rows["policy_versions"],
        "sampled": rows["loss_mask"],
        **{name: _thousandths(rows[name]) for name in MEASURED if not np.isnan(rows[name]).all()},
    }


def _thousandths(logp: np.ndarray) -> np.ndarray:
    """Log-probs in thousandths of a nat, those below -32.767 as -32.767, unknown ones as UNKNOWN."""
    known = np.clip(np.rint(logp * PER_NAT), UNKNOWN + 1, -UNKNOWN - 1)
    return np.where(np.isnan(known), UNKNOWN, known).astype(np.int16)


def texts_of(run: Path, model: str, ids: Sequence[int]) -> tuple[list[str] | None, str]:
    """The text of each token id and "", or None and why there are none."""
    from tokenizers import Tokenizer

    for path in _places(run, model):
        with suppress(Exception):  # the package raises Exception itself
            return token_texts(Tokenizer.from_str(path.read_text("utf-8")), ids), ""
    return (
        None,
        "the tokenizer of the run's model is not on this machine, so tokens are shown by their ids",
    )


def _places(run: Path, model: str) -> Iterator[Path]:
    """Beside weights that the run wrote, in the model's directory or among the models of lagrpo, in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    from lagrpo.model.embedded import ALIASES, DIRECTORY

    yield from sorted((run / "weights").glob(f"*/{TOKENIZER}"))
    yield (
        cache_directory() / DIRECTORY if model in ALIASES else Path(model).expanduser()
    ) / TOKENIZER
    if model.count("/") == 1 and not model.startswith("."):
        yield Path(str(try_to_load_from_cache(model, TOKENIZER)))


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each id inside of a text, decoded behind another token, since decoders drop the space before the
    first. A part of a character is shown as its name in the vocabulary."""
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    found = []
    for number in ids:
        text = tokenizer.decode([*anchor, number], skip_special_tokens=False)
        own = text[len(before) :] if text.startswith(before) else ""
        own = own or tokenizer.decode([number], skip_special_tokens=False)
        found.append(
            own if own and "\ufffd" not in own else f"<{tokenizer.id_to_token(number) or number}>"
        )
    return found
