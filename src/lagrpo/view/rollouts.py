"""The rollouts of a run, for the page: columns of batches, groups and completions, and all tokens, end to end.

A run may have more completions than fit in. Then whole groups are taken, evenly over the batches: a batch's prompts are
in random order, so its first groups are a random sample of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import opened_rollouts, rollout_batches
from lagrpo.runs.rollouts import REWARD, rollout_schema
from lagrpo.view import vocabulary
from lagrpo.view.payload import Arrays, Table, shortest_unsigned

LEAST = 32  # completions of a batch
PER_NAT = 1000  # log-probs and entropies are rounded to thousandths of a nat
UNKNOWN = -(1 << 15)  # instead of a log-prob that was not recorded
MEASURED = ("old_logprobs", "entropy")  # token columns that a completion may lack
TOKENS: dict[str, Any] = {"token_ids": np.int64, "rollout_logprobs": np.float64, "policy_versions": np.int32}
TOKENS["loss_mask"] = np.uint8
TOKENS |= dict.fromkeys(MEASURED, np.float64)
NUMBERS = ("reward", "advantage", "group_std", "staleness")
PLAIN = ("sample_index", "finished", "policy_version")
TEXTS = ("outcome", "excluded_reason", "reason", "source")
IDENTITY = ("completion", "prompt_id", "prompt_text", "answer", "epoch")

Rows = dict[str, Any]


class Size(NamedTuple):
    """How much a batch, or a run, has on disk."""

    completions: int
    tokens: int


def measure(run: Run) -> dict[int, Size]:
    """Completions and tokens of each batch, from the footers of their files."""
    found = {}
    for batch in rollout_batches(run):
        with opened_rollouts(run, batch) as file:
            groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
            columns = [group.column(n) for group in groups for n in range(group.num_columns)]
            tokens = sum(c.num_values for c in columns if c.path_in_schema.startswith("token_ids."))
            found[batch] = Size(file.metadata.num_rows, tokens)
    return found


def share(wanted: Sequence[int], most: int) -> list[int]:
    """How much each gets of `most`: what it wants, or an even share of what the smaller ones leave: of [10, 500, 900]
    with 610 to give, [10, 300, 300]."""
    given, left = [0] * len(wanted), most
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, index in enumerate(order):
        given[index] = min(wanted[index], left // (len(wanted) - place))
        left -= given[index]
    return given


def choose(sizes: Mapping[int, Size], most: int, G: int = 1) -> dict[int, int]:
    """How many completions to take of each batch, `most` in all. If the share of a batch would be less than LEAST
    completions, fewer batches are taken, evenly spaced, the first and the last among them."""
    batches = [batch for batch, size in sizes.items() if size.completions]
    if not batches or most < 1:
        return {}
    total = sum(sizes[batch].completions for batch in batches)
    least = max(min(LEAST, -(-total // len(batches))), G)
    kept = len(batches) if total <= most else min(len(batches), max(1, most // least))
    step = (len(batches) - 1) / (kept - 1) if kept > 1 else 0
    chosen = [batches[round(n * step)] for n in range(kept)] if kept > 1 else batches[-1:]
    return dict(zip(chosen, share([sizes[batch].completions for batch in chosen], most), strict=True))


def read_rollouts(run: Run, sizes: Mapping[int, Size], most: int, config: Mapping[str, Any], arrays: Arrays) -> Rows:
    """Groups and completions of at most about `most` completions. Raises as `load_rollouts` does."""
    G = config.get("rollout", {}).get("num_generations")
    chosen = choose(sizes, most, G if isinstance(G, int) else 1)
    rows = _read_rows(run, chosen)
    prompts, groups = _group(rows)
    codes = {name: Table() for name in TEXTS}
    coded = {name: shortest_unsigned([codes[name].number(value or "") for value in rows[name]]) for name in TEXTS}
    ids, places = np.unique(rows["token_ids"], return_inverse=True)
    texts, note = vocabulary.texts_of(run.path, config, ids, rows)
    further = [name for name in rows if name.startswith(REWARD) or name == "correct"]
    columns = groups | coded | _columns(rows, places) | {name: rows[name].astype(np.float32) for name in further}
    return {
        "batches": [_about(rows, batch, sizes[batch].completions) for batch in chosen],
        "batches_on_disk": len(sizes),
        "completions_on_disk": sum(size.completions for size in sizes.values()),
        "prompts": prompts,
        "codes": {name: list(table) for name, table in codes.items()},
        "texts": rows["completion"],
        "vocabulary": texts,
        "ids": ids.tolist(),
        "vocabulary_note": note,
        "rewards": [name.removeprefix(REWARD) for name in further if name.startswith(REWARD)],
        "columns": {name: arrays.add(values) for name, values in columns.items()},
    }


def _about(rows: Rows, batch: int, on_disk: int) -> list[int]:
    """Step, version of π_k, completions on disk and in the page."""
    first = rows["step"].index(batch)
    return [batch, int(rows["policy_version"][first]), on_disk, rows["step"].count(batch)]


def _read_rows(run: Run, chosen: Mapping[int, int]) -> Rows:
    """Columns of the first whole groups of each of these batches, at most so many completions of each."""
    import pyarrow as pa

    tables, batches = [rollout_schema().empty_table()], list[int]()
    for batch, most in chosen.items():
        with opened_rollouts(run, batch) as file:
            table = file.read()
            tables.append(table.slice(0, _whole_groups(table.column("sample_index").to_pylist(), most)))
            batches += [batch] * len(tables[-1])
    found = pa.concat_tables(tables, promote_options="default").to_pydict()
    rows: Rows = {name: found[name] for name in (*TEXTS, *IDENTITY)} | {"step": batches}
    further = [name for name in found if name.startswith(REWARD) or name == "correct"]
    rows |= {name: np.array(found[name], dtype=np.float64) for name in (*NUMBERS, *PLAIN, *further)}
    lengths = [len(ids or ()) for ids in found["token_ids"]]
    for name, kind in TOKENS.items():
        lists = (
            found[name]
            if name not in MEASURED
            else [v or [None] * n for v, n in zip(found[name], lengths, strict=True)]
        )
        if [len(values or ()) for values in lists] != lengths:
            raise ValueError(f"{run.path}: the lists of a completion's tokens differ in length in its rollouts")
        rows[name] = np.array([value for values in lists for value in values or ()], dtype=np.float64).astype(kind)
    return rows | {"length": np.array(lengths, np.int64)}


def _whole_groups(completions: list[int], most: int) -> int:
    """Where to cut a batch: a new group begins where the number of a completion does not grow."""
    starts = [c for c in range(1, len(completions)) if completions[c] <= completions[c - 1]]
    ends = [*starts, len(completions)]
    return max([end for end in ends if end <= most] or ends[:1])


def _group(rows: Rows) -> tuple[list[list[Any]], dict[str, np.ndarray]]:
    """The distinct prompts, and for each group its batch, its prompt, its epoch and its first completion."""
    count = len(rows["completion"])
    place = list(zip(rows["step"], rows["prompt_id"], rows["epoch"], rows["sample_index"], strict=True))
    starts = [c for c in range(count) if not c or place[c][:3] != place[c - 1][:3] or place[c][3] <= place[c - 1][3]]
    prompts = Table()
    asked = [prompts.number((rows["prompt_id"][c], rows["prompt_text"][c], _answer(rows["answer"][c]))) for c in starts]
    groups = {
        "group_batch": shortest_unsigned([rows["step"][c] for c in starts]),
        "group_prompt": shortest_unsigned(asked),
        "group_epoch": np.array([rows["epoch"][c] for c in starts], dtype=np.int32),
        "group_first": np.array([*starts, count], dtype=np.uint32),
    }
    return [list(prompt) for prompt in prompts], groups


def _answer(text: str | None) -> str:
    """The reference answer as it is read: JSON text, unless that is only a text in quotation marks."""
    try:
        answer = json.loads(text or "null")
    except ValueError:
        return text or ""
    return answer if isinstance(answer, str) else text or ""


def _columns(rows: Rows, places: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of completions and tokens; `places` are the tokens' places in the vocabulary."""
    return {name: rows[name].astype(np.float32) for name in NUMBERS} | {
        "reward": rows["reward"],
        "sample_index": shortest_unsigned(rows["sample_index"]),
        "finished": rows["finished"].astype(np.uint8),
        "first_token": np.concatenate([[0], np.cumsum(rows["length"])]).astype(np.uint32),
        "token": shortest_unsigned(places),
        "rollout_logprobs": _thousandths(rows["rollout_logprobs"]),
        "log_ratio": _log_ratios(rows),
        "version": rows["policy_versions"],
        "sampled": rows["loss_mask"],
        **{name: _thousandths(rows[name]) for name in MEASURED if not np.isnan(rows[name]).all()},
    }


def _log_ratios(rows: Rows) -> np.ndarray:
    """log π_k - log α of each completion, nats; NaN if a sampled token lacks one of them."""
    own_T = np.where(rows["loss_mask"] == 1, rows["old_logprobs"] - rows["rollout_logprobs"], 0.0)
    return np.array([part.sum() for part in np.split(own_T, np.cumsum(rows["length"])[:-1])], dtype=np.float32)


def _thousandths(logp: np.ndarray) -> np.ndarray:
    """Log-probs in thousandths of a nat, those below -32.767 as -32.767, unknown ones as UNKNOWN."""
    known = np.clip(np.rint(logp * PER_NAT), UNKNOWN + 1, -UNKNOWN - 1)
    return np.where(np.isnan(known), UNKNOWN, known).astype(np.int16)
