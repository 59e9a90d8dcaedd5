"""Reads the directories of runs into the bytes that the page unpacks."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lagrpo.diagnosis.diagnose import diagnose, setting_words
from lagrpo.errors import as_settings_error, parse_json
from lagrpo.logs import redact_values
from lagrpo.machine import cache_directory
from lagrpo.runs import reading
from lagrpo.runs.directory import Run
from lagrpo.runs.environment import read_environment
from lagrpo.runs.files import to_json
from lagrpo.runs.metrics import describe_metrics
from lagrpo.runs.recorded import RecordedRun, group_seeds, load_runs
from lagrpo.runs.rollouts import REWARD, reward_columns, rollout_schema
from lagrpo.settings.load import flatten, list_settings, load_settings
from lagrpo.settings.schema import Settings
from lagrpo.types import JsonObject, JsonView

MOST_TOKENS = 4_000_000
"""Tokens of all completions of a page."""

LEAST = 32
"""Completions that a batch has at least, if it is on the page."""

PER_NAT = 1000
"""Log-probs and entropies are rounded to thousandths of a nat."""

UNKNOWN = -(1 << 15)
"""Stands for a log-prob that was not recorded."""

MEASURED = ("old_logprobs", "entropy")
"""Token columns that a completion may lack."""

TOKENS: JsonObject = {
    "token_ids": np.int64,
    "rollout_logprobs": np.float64,
    "policy_versions": np.int32,
    "loss_mask": np.uint8,
    "old_logprobs": np.float64,
    "entropy": np.float64,
}
"""Token columns, with the types of their arrays."""

NUMBERS = ("reward", "advantage", "group_std", "staleness")
PLAIN = ("sample_index", "finished", "policy_version")
TEXTS = ("outcome", "excluded_reason", "reason", "source")
IDENTITY = ("step", "completion", "prompt_id", "prompt_text", "answer", "epoch")
TOKENIZER = "tokenizer.json"

Rows = JsonObject


class Table(dict[Any, int]):
    """Distinct entries, each with a number from 0."""

    def number(self, entry: Any) -> int:
        """Returns the number of the entry, which is added if it is new."""
        return self.setdefault(entry, len(self))


def collect(paths: Sequence[Path | str], most: int) -> bytes:
    """Returns the packed data of the page of these runs, with `most` completions in all.

    Raises RunNotFoundError for a directory that is not a run, SettingsError for damaged files.
    """
    arrays: list[np.ndarray] = []
    entries = []
    with as_settings_error():
        # The stamp comes first: files that are written while the runs are read count as newer data.
        stamp = take_stamp(paths)
        runs = load_runs(paths)
        methods = group_seeds(runs)
        most_of_run = most // len(runs)
        most_tokens = MOST_TOKENS // len(runs)
        for recorded in runs:
            run = Run(recorded.path)
            entry: JsonObject = {"name": recorded.name}
            entry |= _read(run, recorded)
            entry["diagnosis"] = _read_diagnosis(run)
            entry["rollouts"] = read_rollouts(
                run, most_of_run, most_tokens, recorded.settings, arrays
            )
            entry["evaluations"] = read_evaluations(run, recorded.evaluations, most_of_run)
            entries.append(entry)
    indices = {run.path: index for index, run in enumerate(runs)}
    metric_names = [name for entry in entries for name in entry["metrics"]]
    header = {
        "format": 1,
        "stamp": stamp,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version("lagrpo"),
        "most": most,
        "most_tokens": MOST_TOKENS,
        "runs": entries,
        "methods": [
            [name, [indices[run.path] for run in of_method]] for name, of_method in methods.items()
        ],
        "metrics": describe_metrics(metric_names),
        "settings": _describe_settings(),
    }
    return pack(header, arrays)


def _describe_settings() -> dict[str, list[Any]]:
    """Returns the meaning and the default of each setting, by its path."""
    defaults = flatten(load_settings().model_dump(mode="json"))
    descriptions = {}
    for name, field in list_settings(Settings).items():
        # Names without a dot are sections.
        if "." in name:
            descriptions[name] = [field.description or "", defaults.get(name)]
    return descriptions


def pack(header: JsonView, arrays: Sequence[np.ndarray]) -> bytes:
    """Packs a header and arrays (uint8, (u)int16, (u)int32 or floats) in the zlib format.

    Before the compression it is, in this order:

        the length of the header, a little-endian uint32
        the header, JSON in UTF-8; its "arrays" has [type, offset from the first, length] of each
        zeros up to a multiple of 8
        the arrays, little-endian, each at a multiple of 8
    """
    array_entries = []
    array_bytes = []
    offset = 0
    for array in arrays:
        content = _pad(array.astype(array.dtype.newbyteorder("<")).tobytes())
        array_entries.append([array.dtype.name, offset, len(array)])
        array_bytes.append(content)
        offset += len(content)
    text = to_json({**header, "arrays": array_entries})
    # Lone surrogates have no UTF-8.
    encoded = re.sub("[\ud800-\udfff]", "\ufffd", text).encode()
    start = _pad(struct.pack("<I", len(encoded)) + encoded)
    return zlib.compress(b"".join([start, *array_bytes]), 6)


def _pad(content: bytes) -> bytes:
    """Appends zeros up to a multiple of 8 bytes."""
    return content + bytes(-len(content) % 8)


def take_stamp(paths: Sequence[Path | str]) -> str:
    """Returns a digest of the runs' statuses, and of the names, sizes and times of their files.

    The digest is another one when a file was written, and when the process of a run has ended: a
    killed process writes nothing. Raises RunNotFoundError, and ValueError for damaged events.
    """
    digest = hashlib.sha256()
    for path in paths:
        run = reading.open_run(path)
        status_of_run = list(reading.load_status(run))
        digest.update(os.fsencode(f"{run.path}\0{status_of_run}\n"))
        files = [
            *run.path.glob("[!.]*.[jt]*"),  # config.toml, metrics.jsonl, events.jsonl, …
            *run.path.glob("rollouts/[!.]*"),
            *run.path.glob("evaluations/[!.]*"),
        ]
        for file in sorted(files):
            status = file.stat()
            line = f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(os.fsencode(line))
    return digest.hexdigest()[:16]


def _read(run: Run, recorded: RecordedRun) -> JsonObject:
    """Returns the facts and metrics of a run. Secrets are redacted."""
    settings = flatten(recorded.settings)
    metrics = recorded.metrics
    events = reading.load_events(run)
    names = dict.fromkeys(name for line in metrics for name in line)
    notes = []
    if not metrics:
        notes.append("No metrics yet: the first batch is not finished.")
    return {
        "path": str(run.path),
        "range": list(reading.load_reward_range(run)),
        "total": settings.get("schedule.batches"),
        "recent": recorded.recent_batches,
        "status": list(reading.load_status(run)),
        "notes": notes,
        "metrics": {name: [line.get(name) for line in metrics] for name in names},
        "events": redact_values(events),
        "settings": redact_values(settings),
        "environment": redact_values(flatten(read_environment(run.path))),
    }


def _read_diagnosis(run: Run) -> JsonObject:
    """Returns where the time goes, and the findings of a run, redacted, for the tab Diagnosis."""
    diagnosis = diagnose(run)
    findings = []
    for finding in diagnosis.findings:
        words = {"words": setting_words(finding), "is_grave": finding.is_grave}
        findings.append(asdict(finding) | words)
    return redact_values({"time": diagnosis.time, "findings": findings})


# Evaluations


def read_evaluations(run: Run, summaries: Sequence[JsonView], most: int) -> JsonObject:
    """Returns the prompts and completions of a run's evaluations, which have these summaries.

    If they have more than `most` completions, only the first and the last evaluation of each set
    keep their texts; the counts of all are there.
    """
    records_of_evaluations = [
        reading.load_evaluation_records(run, summary["name"]) for summary in summaries
    ]
    completions = 0
    for records in records_of_evaluations:
        completions += sum(len(record["completions"]) for record in records)
    numbers_of_sets: dict[str, list[int]] = {}
    for number, summary in enumerate(summaries):
        numbers_of_sets.setdefault(summary.get("set") or "", []).append(number)
    first_and_last = set()
    for numbers in numbers_of_sets.values():
        first_and_last |= {numbers[0], numbers[-1]}
    prompts = Table()
    texts = Table()
    rows = []
    for number, records in enumerate(records_of_evaluations):
        has_texts = completions <= most or number in first_and_last
        rows.append(
            [_evaluation_row(record, prompts, texts, has_texts=has_texts) for record in records]
        )
    return {
        "summaries": [_summary_for_page(summary) for summary in summaries],
        "rows": rows,
        "prompts": [list(prompt) for prompt in prompts],
        "texts": list(texts),
    }


def _summary_for_page(summary: JsonView) -> JsonObject:
    """Returns the values that the page can show, and always a step."""
    values = {}
    for name, value in summary.items():
        if isinstance(value, int | float | str | list):
            values[name] = value
    values["step"] = summary.get("step") or 0
    return values


def _evaluation_row(
    record: JsonView, prompts: Table, texts: Table, *, has_texts: bool
) -> JsonObject:
    prompt = (record["prompt_id"], record["prompt"] or "", str(record.get("answer") or ""))
    row = {
        "samples": record["samples"],
        "scored": record["scored"],
        "correct": record["correct"],
        "prompt": prompts.number(prompt),
        "reward": record.get("reward"),
    }
    if has_texts:
        row["texts"] = [texts.number(text or "") for text in record["completions"]]
        row["rewards"] = record["rewards"]
        row["parts"] = reward_columns(record)
        row["decided"] = record.get("is_correct")
    return row


# Rollouts
# Columns of batches, groups and completions, and all tokens, end to end. If a run has more
# completions than fit in, whole groups are taken, evenly over the batches. The prompts of a batch
# are in random order, so its first groups are a random sample of it.


def shortest_unsigned(values: Any) -> np.ndarray:
    """Returns counts in two bytes each if all of them fit, else in four."""
    array = np.array(values, dtype=np.int64)
    fits = len(array) == 0 or array.max() < 1 << 16
    return array.astype(np.uint16 if fits else np.uint32)


def choose(batches: Sequence[int], most: int, G: int = 1) -> dict[int, int]:
    """Returns how many completions to take of each batch, in whole groups of G, `most` in all.

    If the share of a batch would be less than LEAST completions, fewer batches are taken, evenly
    spaced, the first and the last among them.
    """
    if not batches or most < 1:
        return {}
    completions = max(LEAST, G, most // len(batches))
    num_batches = min(len(batches), max(1, most // completions))
    # A single batch is the last one.
    indices = [len(batches) - 1]
    if num_batches > 1:
        spaced = np.linspace(0, len(batches) - 1, num_batches)
        indices = spaced.round().astype(int).tolist()
    whole_groups = min(completions, most) // G * G
    return {batches[index]: whole_groups or G for index in indices}


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a batch on disk."""

    completions: int
    tokens: int


def read_rollouts(
    run: Run, most: int, most_tokens: int, config: JsonView, arrays: list[np.ndarray]
) -> Rows:
    """Returns groups and completions, at most about `most` with `most_tokens`.

    `limit` says which of the two left completions out: "completions", "tokens", or "" if none did.
    Columns are appended to `arrays`, and the result has their indices there. Raises as
    `load_rollouts` does.
    """
    sizes = {batch: _measure(run, batch) for batch in reading.rollout_batches(run)}
    completions = sum(size.completions for size in sizes.values())
    tokens = sum(size.tokens for size in sizes.values())
    # As many completions as have `most_tokens` tokens on average.
    most_by_tokens = most_tokens * completions // max(tokens, 1)
    chosen = {batch: size.completions for batch, size in sizes.items()}
    limit = ""
    if completions > min(most, most_by_tokens):
        limit = "tokens" if most_by_tokens < most else "completions"
        most = min(most, most_by_tokens)
        G = config.get("rollout", {}).get("num_generations", 1)
        chosen = choose(list(sizes), most, G)
    rows = _read_rows(run, chosen)

    prompts, groups = _group(rows)
    codes = {name: Table() for name in TEXTS}
    coded_texts = {}
    for name, table in codes.items():
        numbers = [table.number(value or "") for value in rows[name]]
        coded_texts[name] = shortest_unsigned(numbers)
    ids, token_index_T = np.unique(rows["token_ids"], return_inverse=True)
    model = str(config.get("model", {}).get("path", ""))
    vocabulary, note = texts_of(run.path, model, ids.tolist())
    reward_names = [name for name in rows if name.startswith(REWARD)]
    rewards = {
        name: rows[name].astype(np.float32)
        for name in rows
        if name in reward_names or name == "correct"
    }

    columns = groups | coded_texts | _columns(rows, token_index_T) | rewards
    first_index = len(arrays)
    arrays += columns.values()
    versions = dict(zip(rows["step"], rows["policy_version"].astype(int).tolist(), strict=True))
    batches = [
        [batch, policy_version, sizes[batch].completions, rows["step"].count(batch)]
        for batch, policy_version in versions.items()
    ]
    return {
        "batches": batches,
        "batches_on_disk": len(sizes),
        "completions_on_disk": completions,
        "limit": limit,
        "prompts": prompts,
        "codes": {name: list(table) for name, table in codes.items()},
        "texts": rows["completion"],
        "vocabulary": vocabulary,
        "ids": ids.tolist(),
        "vocabulary_note": note,
        "rewards": [name.removeprefix(REWARD) for name in reward_names],
        "columns": {name: index for index, name in enumerate(columns, start=first_index)},
    }


def _measure(run: Run, batch: int) -> BatchSize:
    """Returns the size of a batch, from the footer of its file."""
    with reading.opened_rollouts(run, batch) as file:
        tokens = 0
        for group_number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(group_number)
            for column_number in range(group.num_columns):
                column = group.column(column_number)
                if column.path_in_schema.startswith("token_ids."):
                    tokens += column.num_values
        return BatchSize(file.metadata.num_rows, tokens)


def _read_rows(run: Run, chosen: Mapping[int, int]) -> Rows:
    """Returns the columns of the first completions of each batch; `chosen` has how many."""
    import pyarrow as pa

    tables = [rollout_schema().empty_table()]
    for batch, completions in chosen.items():
        with reading.opened_rollouts(run, batch) as file:
            tables.append(file.read().slice(0, completions))
    columns = pa.concat_tables(tables, promote_options="default").to_pydict()
    reward_names = [name for name in columns if name.startswith(REWARD) or name == "correct"]
    rows: Rows = {name: columns[name] for name in (*TEXTS, *IDENTITY)}
    for name in (*NUMBERS, *PLAIN, *reward_names):
        rows[name] = np.array(columns[name], dtype=np.float64)
    lengths = [len(token_ids or ()) for token_ids in columns["token_ids"]]
    for name, dtype in TOKENS.items():
        values_T: list[Any] = []
        for values, length in zip(columns[name], lengths, strict=True):
            values_T += values or [None] * length
        # None becomes NaN in float64.
        rows[name] = np.array(values_T, dtype=np.float64).astype(dtype)
    rows["length"] = np.array(lengths, np.int64)
    return rows


def _group(rows: Rows) -> tuple[list[list[Any]], dict[str, np.ndarray]]:
    """Returns the distinct prompts, and columns of the groups.

    A group has its batch, its prompt, its epoch and its first completion.
    """
    count = len(rows["completion"])
    starts = [c for c in range(count) if c == 0 or _starts_group(rows, c)]
    prompts = Table()
    prompt_numbers = []
    for c in starts:
        answer = _answer(rows["answer"][c])
        prompt = (rows["prompt_id"][c], rows["prompt_text"][c], answer)
        prompt_numbers.append(prompts.number(prompt))
    groups = {
        "group_batch": shortest_unsigned([rows["step"][c] for c in starts]),
        "group_prompt": shortest_unsigned(prompt_numbers),
        "group_epoch": np.array([rows["epoch"][c] for c in starts], dtype=np.int32),
        "group_first": np.array([*starts, count], dtype=np.uint32),
    }
    return [list(prompt) for prompt in prompts], groups


def _starts_group(rows: Rows, c: int) -> bool:
    """Returns True if completion c is of another group than completion c - 1."""
    for name in ("step", "prompt_id", "epoch"):
        if rows[name][c] != rows[name][c - 1]:
            return True
    return bool(rows["sample_index"][c] <= rows["sample_index"][c - 1])


def _answer(text: str) -> str:
    """Returns the reference answer for readers: its JSON text, or the text that this quotes.

    It is "" for a prompt without an answer.
    """
    answer = parse_json(text)
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else text


def _columns(rows: Rows, token_index_T: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays of completions and tokens.

    `token_index_T` are indices of the vocabulary.
    """
    ends = np.cumsum(rows["length"])
    log_ratio_T = rows["old_logprobs"] - rows["rollout_logprobs"]
    log_ratio_T = np.where(rows["loss_mask"] == 1, log_ratio_T, 0.0)
    # The sum of a completion is NaN if one of its log-probs is unknown.
    log_ratios = [part.sum() for part in np.split(log_ratio_T, ends[:-1])]
    columns = {name: rows[name].astype(np.float32) for name in NUMBERS}
    columns |= {
        "reward": rows["reward"],
        "sample_index": shortest_unsigned(rows["sample_index"]),
        "finished": rows["finished"].astype(np.uint8),
        "first_token": np.concatenate([[0], ends]).astype(np.uint32),
        "token": shortest_unsigned(token_index_T),
        "rollout_logprobs": _thousandths(rows["rollout_logprobs"]),
        "log_ratio": np.array(log_ratios, dtype=np.float32),
        "version": rows["policy_versions"],
        "sampled": rows["loss_mask"],
    }
    for name in MEASURED:
        if not np.isnan(rows[name]).all():
            columns[name] = _thousandths(rows[name])
    return columns


def _thousandths(logp: np.ndarray) -> np.ndarray:
    """Returns log-probs in thousandths of a nat: at least -32.767, unknown ones as UNKNOWN."""
    rounded = np.clip(np.rint(logp * PER_NAT), UNKNOWN + 1, -UNKNOWN - 1)
    return np.where(np.isnan(rounded), UNKNOWN, rounded).astype(np.int16)


# Texts of tokens


def texts_of(run: Path, model: str, ids: Sequence[int]) -> tuple[list[str] | None, str]:
    """Returns the text of each token id and "", or, without a tokenizer, None and the reason."""
    from tokenizers import Tokenizer

    for path in _tokenizer_paths(run, model):
        # The package raises Exception itself.
        with suppress(Exception):
            tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
            return token_texts(tokenizer, ids), ""
    problem = "the tokenizer of the run's model is not on this machine"
    return None, f"{problem}, so tokens are shown by their ids"


def _tokenizer_paths(run: Path, model: str) -> Iterator[Path]:
    """Yields places of the tokenizer: next to the run's weights, the model, the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from lagrpo.model.embedded import ALIASES, DIRECTORY

    yield from sorted((run / "weights").glob(f"*/{TOKENIZER}"))
    if model in ALIASES:
        yield cache_directory() / DIRECTORY / TOKENIZER
    else:
        yield Path(model).expanduser() / TOKENIZER
    is_hub_name = model.count("/") == 1 and not model.startswith(".")
    if is_hub_name:
        cached_file = None
        # The path of a directory that is not on this machine may not be a valid name.
        with suppress(HFValidationError):
            cached_file = try_to_load_from_cache(model, TOKENIZER)
        # The cache may also know, by an object, that the model has no such file.
        if isinstance(cached_file, str):
            yield Path(cached_file)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token has inside of a text.

    It is decoded behind another token, since decoders drop the space before the first. A part of a
    character is shown as its name in the vocabulary.
    """
    # Any token with a text does; the last one, if the tokenizer makes several.
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
    anchor_text = tokenizer.decode(anchor, skip_special_tokens=False)
    texts = []
    for token_id in ids:
        text = ""
        with_anchor = tokenizer.decode([*anchor, token_id], skip_special_tokens=False)
        if with_anchor.startswith(anchor_text):
            text = with_anchor[len(anchor_text) :]
        if not text:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
        is_part_of_character = "\ufffd" in text
        if not text or is_part_of_character:
            text = f"<{tokenizer.id_to_token(token_id) or token_id}>"
        texts.append(text)
    return texts
