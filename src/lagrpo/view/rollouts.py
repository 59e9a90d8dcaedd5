"""The rollouts of a run, for the page: columns of batches, groups and completions, and all tokens, end to end.

A run may have more completions than fit in. Then whole groups are taken, evenly over the batches: a batch's prompts are
in random order, so its first groups are a random sample of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lagrpo.machine import cache_directory
from lagrpo.runs.directory import Run
from lagrpo.runs.reading import opened_rollouts, rollout_batches
from lagrpo.runs.rollouts import REWARD, rollout_schema

LEAST = 32  # completions of a batch
PER_NAT = 1000  # log-probs and entropies are rounded to thousandths of a nat
UNKNOWN = -(1 << 15)  # instead of a log-prob that was not recorded
MEASURED = ("old_logprobs", "entropy")  # token columns that a completion may lack
TOKENS: dict[str, Any] = {"token_ids": np.int64, "rollout_logprobs": np.float64, "policy_versions": np.int32}
TOKENS |= {"loss_mask": np.uint8} | dict.fromkeys(MEASURED, np.float64)
NUMBERS = ("reward", "advantage", "group_std", "staleness")
PLAIN = ("sample_index", "finished", "policy_version")
TEXTS = ("outcome", "excluded_reason", "reason", "source")
IDENTITY = ("step", "completion", "prompt_id", "prompt_text", "answer", "epoch")
TOKENIZER = "tokenizer.json"
PROBED = 50  # completions whose text is compared

Rows = dict[str, Any]


class Table(dict[Any, int]):
    """Distinct entries, each with a number."""

    def number(self, entry: Any) -> int:
        """The number of the entry, which is added if it is new."""
        return self.setdefault(entry, len(self))


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


def read_rollouts(run: Run, most: int, most_tokens: int, config: Mapping[str, Any], arrays: Any) -> Rows:
    """Groups and completions, at most about so many completions and tokens. Raises as `load_rollouts` does."""
    sizes = {batch: _measure(run, batch) for batch in rollout_batches(run)}
    completions, tokens = (sum(size[n] for size in sizes.values()) for n in (0, 1))
    most = min(most, most_tokens * completions // max(tokens, 1))
    chosen = choose([*sizes], most, config.get("rollout", {}).get("num_generations", 1))
    rows = _read_rows(run, chosen if completions > most else {batch: size[0] for batch, size in sizes.items()})
    prompts, groups = _group(rows)
    codes = {name: Table() for name in TEXTS}
    coded = {name: shortest_unsigned([codes[name].number(value or "") for value in rows[name]]) for name in TEXTS}
    ids, places = np.unique(rows["token_ids"], return_inverse=True)
    texts, note = texts_of(run.path, str(config.get("model", {}).get("path", "")), ids, rows)
    several = {name: rows[name].astype(np.float32) for name in rows if name.startswith(REWARD) or name == "correct"}
    columns = groups | coded | _columns(rows, places) | several
    versions = dict(zip(rows["step"], rows["policy_version"].astype(int).tolist(), strict=True))
    return {
        "batches": [[b, version, sizes[b][0], rows["step"].count(b)] for b, version in versions.items()],
        "batches_on_disk": len(sizes),
        "completions_on_disk": completions,
        "prompts": prompts,
        "codes": {name: list(table) for name, table in codes.items()},
        "texts": rows["completion"],
        "vocabulary": texts,
        "ids": ids.tolist(),
        "vocabulary_note": note,
        "rewards": [name.removeprefix(REWARD) for name in several if name.startswith(REWARD)],
        "columns": {name: arrays.add(values) for name, values in columns.items()},
    }


def _measure(run: Run, batch: int) -> tuple[int, int]:
    """Completions and tokens of a batch, from the footer of its file."""
    with opened_rollouts(run, batch) as file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        columns = [group.column(n) for group in groups for n in range(group.num_columns)]
        tokens = sum(c.num_values for c in columns if c.path_in_schema.startswith("token_ids."))
        return file.metadata.num_rows, tokens


def _read_rows(run: Run, chosen: Mapping[int, int]) -> Rows:
    """Columns of the first completions of each of these batches, so many of each."""
    import pyarrow as pa

    tables = [rollout_schema().empty_table()]
    for batch, most in chosen.items():
        with opened_rollouts(run, batch) as file:
            tables.append(file.read().slice(0, most))
    found = pa.concat_tables(tables, promote_options="default").to_pydict()
    several = [name for name in found if name.startswith(REWARD) or name == "correct"]
    rows: Rows = {name: found[name] for name in (*TEXTS, *IDENTITY)}
    rows |= {name: np.array(found[name], dtype=np.float64) for name in (*NUMBERS, *PLAIN, *several)}
    lengths = [len(ids or ()) for ids in found["token_ids"]]
    for name, kind in TOKENS.items():
        lists = [values or [None] * n for values, n in zip(found[name], lengths, strict=True)]
        if [len(values) for values in lists] != lengths:
            raise ValueError(f"{run.path}: the lists of a completion's tokens differ in length in its rollouts")
        rows[name] = np.array([value for values in lists for value in values], dtype=np.float64).astype(kind)
    return rows | {"length": np.array(lengths, np.int64)}


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


def _answer(text: str) -> str:
    """The reference answer as it is read: JSON text, unless that is only a text in quotation marks."""
    answer = json.loads(text)
    return answer if isinstance(answer, str) else text


def _columns(rows: Rows, places: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of completions and tokens; `places` are the tokens' places in the vocabulary."""
    own_T = np.where(rows["loss_mask"] == 1, rows["old_logprobs"] - rows["rollout_logprobs"], 0.0)
    log_ratios = [part.sum() for part in np.split(own_T, np.cumsum(rows["length"])[:-1])]  # NaN if one is unknown
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


def texts_of(run: Path, model: str, ids: np.ndarray, rows: Mapping[str, Any]) -> tuple[list[str] | None, str]:
    """The text of each token id and "", or None and why there are none."""
    from tokenizers import Tokenizer

    ends = np.cumsum(rows["length"])[:PROBED]
    probed = [rows["token_ids"][end - n : end].tolist() for end, n in zip(ends, rows["length"], strict=False)]
    for path in _places(run, model):
        try:
            tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
        except Exception:  # noqa: BLE001 - the package raises Exception itself
            continue
        if fits(tokenizer, probed, rows["completion"][: len(probed)]):
            return token_texts(tokenizer, ids.tolist()), ""
        return None, "the tokenizer found for the run's model gives other texts, so tokens are shown by their ids"
    return None, "the tokenizer of the run's model is not on this machine, so tokens are shown by their ids"


def _places(run: Path, model: str) -> Iterator[Path]:
    """Beside weights that the run wrote, in the model's directory or among the models of lagrpo, in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    from lagrpo.model.embedded import ALIASES, DIRECTORY

    yield from sorted((run / "weights").glob(f"*/{TOKENIZER}"))
    yield (cache_directory() / DIRECTORY if model in ALIASES else Path(model).expanduser()) / TOKENIZER
    if model.count("/") == 1 and not model.startswith("."):
        yield Path(str(try_to_load_from_cache(model, TOKENIZER)))


def fits(tokenizer: Any, ids: Sequence[Sequence[int]], texts: Sequence[str]) -> bool:
    """Whether the tokenizer gives the texts of completions, up to white space, from their ids."""
    pairs = zip(ids, texts, strict=True)
    return all("".join(tokenizer.decode(list(row)).split()) == "".join(text.split()) for row, text in pairs)


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
        found.append(own if own and "\ufffd" not in own else f"<{tokenizer.id_to_token(number) or number}>")
    return found
