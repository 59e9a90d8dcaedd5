"""The rollouts of a run, for the page: columns of batches, groups and completions, and all tokens, end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import opened_rollouts, rollout_batches
from lagrpo.runs.rollouts import REWARD
from lagrpo.view import vocabulary
from lagrpo.view.payload import Arrays, Table, shortest_unsigned
from lagrpo.view.sample import Size, choose

LISTS = ("token_ids", "logp_alpha", "versions", "sampled")
MEASURED = ("logp_k", "entropy")
"""Lists that a completion may lack."""
NUMBERS = ("reward", "advantage", "sigma", "log_ratio", "kl_alpha", "lag")
TEXTS = ("outcome", "masked", "reason", "source")
COLUMNS = [*LISTS, *NUMBERS, *TEXTS, "text", "finished", "completion", "prompt_key", "prompt_text", "gold", "epoch"]
COLUMNS += ["stage", "pi_k_version"]
PER_NAT = 1000  # log-probs and entropies are rounded to thousandths of a nat
UNKNOWN = -(1 << 15)  # in place of a log-prob that was not recorded

Rows = dict[str, Any]


def measure(run: Run) -> dict[int, Size]:
    """By batch, completions and tokens of its rollouts, from the footers of their files."""
    return {batch: _size(run, batch) for batch in rollout_batches(run)}


def _size(run: Run, batch: int) -> Size:
    with opened_rollouts(run, batch) as file:
        about, tokens = file.metadata, 0
        for group in (about.row_group(number) for number in range(about.num_row_groups)):
            columns = (group.column(number) for number in range(group.num_columns))
            tokens += sum(column.num_values for column in columns if column.path_in_schema.startswith("token_ids."))
        return Size(about.num_rows, tokens)


def read_rollouts(run: Run, sizes: Mapping[int, Size], most: int, config: Mapping[str, Any], arrays: Arrays) -> Rows:
    """Groups and completions of at most about `most` completions. Raises as `load_rollouts` does."""
    G = config.get("sampling", {}).get("G")
    chosen = choose(sizes, most, G if isinstance(G, int) else 1)
    batches = [_read_batch(run, batch, count) for batch, count in chosen.items()]
    rows = _join(batches)
    prompts, groups = _group(rows)
    codes = {name: Table() for name in TEXTS}
    coded = {name: _array([codes[name].number(value or "") for value in rows[name]]) for name in TEXTS}
    ids, places = np.unique(rows["token_ids"], return_inverse=True)
    texts, note = _texts(run, config, ids, rows)
    columns = groups | {name: shortest_unsigned(values) for name, values in coded.items()} | _columns(rows, places)
    columns |= {name: rows[name] for name in rows["further"]}
    return {
        "batches": [_about(batch, rows, sizes[number]) for number, batch in zip(chosen, batches, strict=True)],
        "batches_on_disk": len(sizes),
        "completions_on_disk": sum(size.completions for size in sizes.values()),
        "prompts": prompts,
        "codes": {name: table.entries for name, table in codes.items()},
        "texts": rows["text"],
        "vocabulary": texts,
        "ids": ids.tolist(),
        "vocabulary_note": note,
        "rewards": [name.removeprefix(REWARD) for name in rows["further"] if name.startswith(REWARD)],
        "columns": {name: arrays.add(values) for name, values in columns.items()},
    }


def _join(batches: list[Rows]) -> Rows:
    rows: Rows = {name: [value for batch in batches for value in batch[name]] for name in (*TEXTS, *IDENTITY)}
    kinds = dict.fromkeys((*NUMBERS, *PLAIN, *MEASURED), np.float64) | TOKENS | {"length": np.int64}
    for name, kind in kinds.items():
        rows[name] = np.concatenate([np.zeros(0, kind), *(batch[name] for batch in batches)]).astype(kind)
    rows["further"] = list(dict.fromkeys(name for batch in batches for name in batch["further"]))
    for name in rows["further"]:  # a run that was resumed with other rewards lacks some
        found = [batch.get(name, np.full(len(batch["text"]), np.nan)) for batch in batches]
        rows[name] = np.concatenate(found).astype(np.float32)
    return rows


def _columns(rows: Rows, places: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of completions and tokens; `places` are those of the tokens in the vocabulary."""
    return {name: rows[name].astype(np.float32) for name in NUMBERS} | {
        "reward": rows["reward"],
        "number": shortest_unsigned(rows["completion"]),
        "finished": rows["finished"].astype(np.uint8),
        "first_token": np.concatenate([[0], np.cumsum(rows["length"])]).astype(np.uint32),
        "token": shortest_unsigned(places),
        "logp": _thousandths(rows["logp_alpha"]),
        "version": rows["versions"],
        "sampled": rows["sampled"],
        **{name: _thousandths(rows[name]) for name in MEASURED if not np.isnan(rows[name]).all()},
    }


def _about(batch: Rows, rows: Rows, size: Size) -> list[int]:
    """Batch, stage, version of π_k, completions on disk and in the page."""
    first = (int(batch[name][0]) for name in ("batch", "stage", "pi_k_version"))
    return [*first, size.completions, len(batch["text"])]


IDENTITY = ("text", "prompt_key", "prompt_text", "gold", "epoch")
PLAIN = ("completion", "finished", "batch", "stage", "pi_k_version")
TOKENS: dict[str, Any] = {
    "token_ids": np.int64,
    "logp_alpha": np.float64,
    "versions": np.int32,
    "sampled": np.uint8,
}


def _read_batch(run: Run, batch: int, most: int) -> Rows:
    """The first whole groups of a batch: at least one, and no more than have `most` completions."""
    with opened_rollouts(run, batch) as file:
        further = [name for name in file.schema_arrow.names if name.startswith(REWARD) or name == "right"]
        table = file.read([*COLUMNS, *MEASURED, *further])
        table = table.slice(0, _whole_groups(table.column("completion").to_pylist(), most))
        found: Rows = {name: table.column(name).to_pylist() for name in (*TEXTS, *IDENTITY)}
        for name in (*NUMBERS, *further, "completion", "finished", "stage", "pi_k_version"):
            found[name] = np.array(table.column(name).to_pylist(), dtype=np.float64)
        lists = {name: table.column(name).combine_chunks() for name in LISTS}
        lengths = {name: column.value_lengths().fill_null(0).to_numpy() for name, column in lists.items()}
        for name, kind in TOKENS.items():
            values = lists[name].flatten().to_numpy(zero_copy_only=False)
            found[name] = np.array(values, dtype=np.float64 if values.dtype == object else values.dtype).astype(kind)
    if any((lengths[name] != lengths["token_ids"]).any() for name in LISTS):
        raise ValueError(f"{run.path}, rollouts of batch {batch}: the lists of a completion's tokens differ in length")
    found |= {name: _measured(table, name, lengths["token_ids"]) for name in MEASURED}
    place = {"batch": np.full(len(found["text"]), float(batch)), "further": further}
    return found | {"length": lengths["token_ids"]} | place


def _measured(table: Any, name: str, lengths: np.ndarray) -> np.ndarray:
    """A number of each token, end to end; NaN where a completion has no such list, or one of another length."""
    lists = table.column(name).to_pylist()
    of_each = (of if of is not None and len(of) == n else [None] * n for of, n in zip(lists, lengths, strict=True))
    return np.array([value for values in of_each for value in values], dtype=np.float64)


def _whole_groups(completions: list[int], most: int) -> int:
    starts = [0, *_boundaries(completions), len(completions)]
    return max([end for end in starts if end <= most and end] or starts[1:2])


def _boundaries(completions: list[int]) -> Iterator[int]:
    """Where a new group begins: the number of a completion in its group does not grow."""
    return (c for c in range(1, len(completions)) if completions[c] <= completions[c - 1])


def _group(rows: Rows) -> tuple[list[list[Any]], dict[str, np.ndarray]]:
    """The distinct prompts, and for each group its batch, its prompt, its epoch and its first completion."""
    count = len(rows["text"])
    place = list(zip(rows["batch"], rows["prompt_key"], rows["epoch"], rows["completion"], strict=True))
    starts = [c for c in range(count) if not c or place[c][:3] != place[c - 1][:3] or place[c][3] <= place[c - 1][3]]
    prompts = Table()
    asked = [prompts.number((rows["prompt_key"][c], rows["prompt_text"][c], _gold(rows["gold"][c]))) for c in starts]
    groups = {
        "group_batch": shortest_unsigned(_array([int(rows["batch"][c]) for c in starts])),
        "group_prompt": shortest_unsigned(_array(asked)),
        "group_epoch": _array([rows["epoch"][c] for c in starts]).astype(np.int32),
        "group_first": _array([*starts, count]).astype(np.uint32),
    }
    return [list(prompt) for prompt in prompts.entries], groups


def _gold(text: str | None) -> str:
    """The gold answer as it is read: JSON text, unless that is only a text in quotation marks."""
    try:
        gold = json.loads(text or "null")
    except ValueError:
        return text or ""
    return gold if isinstance(gold, str) else text or ""


def _texts(run: Run, config: Mapping[str, Any], ids: np.ndarray, rows: Rows) -> tuple[list[str] | None, str]:
    """The text of each token id and "", or None and why there are none."""
    model = config.get("model", {}).get("path", "")
    tokenizer = vocabulary.load_tokenizer(run.path, model if isinstance(model, str) else "")
    if tokenizer is None:
        return None, "the tokenizer of the run's model is not on this machine, so tokens are shown by their ids"
    lengths = rows["length"][: vocabulary.PROBED]
    probed = [rows["token_ids"][end - n : end].tolist() for end, n in zip(np.cumsum(lengths), lengths, strict=True)]
    if not vocabulary.fits(tokenizer, probed, rows["text"][: len(probed)]):
        return None, "the tokenizer found for the run's model gives other texts, so tokens are shown by their ids"
    return vocabulary.token_texts(tokenizer, ids.tolist()), ""


def _thousandths(logp: np.ndarray) -> np.ndarray:
    """Log-probs in thousandths of a nat, those below -32.767 as -32.767, unknown ones as UNKNOWN."""
    known = np.clip(np.rint(logp * PER_NAT), UNKNOWN + 1, -UNKNOWN - 1)
    return np.where(np.isnan(known), UNKNOWN, known).astype(np.int16)


def _array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
