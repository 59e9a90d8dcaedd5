"""Digests of the data of a run, which checkpoints hold: a run whose data has changed cannot resume.

Every row counts with every column: answers, and columns that only a reward function reads. The
order of columns does not count. The prompts that the run visits count as the model sees them, in
tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.tasks import RowTask, Task
from lagrpo.tasks.columns import as_stored
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.tasks.splits import iterate_rows
from lagrpo.types import JsonObject, JsonView, Prompt

Digests = JsonObject

ROWS = "rows"
"""Key of the number of rows; all other keys are columns, with their digests."""

VISITED = ("tokens", "answers")
"""Keys of the digests of a prompt that the run visits."""


def digest_places(
    tasks: Mapping[str, Task],
    records: Sequence[JsonView] = (),
    *,
    evaluates: bool = True,
) -> Digests:
    """Returns the digests of all rows of a run, by place, such as "train split".

    tasks: the run's task (MAIN_TASK) and the tasks of evaluation sets, by name. Test splits count
        if the run `evaluates`. A task that is not made of rows has no digests here.
    records: the rows of offline data.
    """
    places: Digests = {}
    if records:
        places["offline data"] = digest_rows(records)
    for name, task in tasks.items():
        if not isinstance(task, RowTask):
            continue
        is_main_task = name == MAIN_TASK
        suffix = "" if is_main_task else f" of evaluation set {name}"
        if is_main_task:
            places[f"train split{suffix}"] = digest_rows(task.rows["train"])
        if evaluates:
            places[f"test split{suffix}"] = digest_rows(task.rows["test"])
    return places


def digest_rows(rows: Any) -> Digests:
    """Returns the number of rows and a digest of each column.

    Rows without columns have a single digest, as of a column "values".
    """
    column_hashes: JsonObject = {}
    for number, row in enumerate(iterate_rows(rows)):
        columns = row if isinstance(row, Mapping) else {"values": row}
        for name, value in columns.items():
            column_hash = column_hashes.setdefault(str(name), hashlib.blake2b(digest_size=8))
            # The number tells which rows have the column: some rows may lack it.
            column_hash.update(f"{number} {value_text(value)}\n".encode())
    return {
        ROWS: len(rows),
        "columns": {name: column_hashes[name].hexdigest() for name in sorted(column_hashes)},
    }


def digest_prompt(prompt: Prompt) -> dict[str, str]:
    """Returns the digests of a prompt's tokens and of its reference answer.

    If the reference sees other tokens, these count, too.
    """
    tokens = repr(prompt.token_ids)
    if prompt.reference_token_ids:
        tokens += repr(prompt.reference_token_ids)
    return {"tokens": digest(tokens), "answers": digest(value_text(prompt.answer))}


def digest_visited(visited: Sequence[Mapping[str, str]]) -> Digests:
    """Returns the number of visited prompts, a digest of all tokens, and one of all answers.

    visited: the digests of each prompt, from `digest_prompt`.
    """
    digests: Digests = {"prompts": len(visited)}
    for name in VISITED:
        digests[name] = digest(" ".join(prompt_digests[name] for prompt_digests in visited))
    return digests


def digest(text: str) -> str:
    """Returns 16 hex digits that tell texts apart."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def value_text(value: Any) -> str:
    """Returns a value as JSON with the keys of tables in order, the same in every process.

    Numbers of float32 and float16 are as they are stored.
    """
    try:
        return json.dumps(as_stored(value), sort_keys=True, default=object_text)
    except (TypeError, ValueError):  # keys that JSON does not have
        return object_text(value)


def object_text(value: Any) -> Any:
    """Returns a value that JSON does not have: as a list for NumPy and sets, else as a text.

    The text is without the object's address, which differs between processes.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        # The order of a set differs between processes.
        return sorted(value_text(member) for member in value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


# Changes


def check_places(before: JsonView, now: JsonView) -> None:
    """Raises ValueError if the rows of a place have changed.

    A place that is in only one of `before` and `now` does not count.
    """
    changes: list[str] = []
    for place in before.keys() & now.keys():
        changes += compare_rows(place, before[place], now[place])
    if changes:
        raise ValueError(
            f"the data has changed since the run started: {'; '.join(sorted(changes))}. "
            "Restore it, or start a new run"
        )


def check_visited(
    before: Digests, visited: Sequence[Mapping[str, str]], changed_code: Sequence[str] = ()
) -> None:
    """Raises ValueError if the prompts that a run visits have changed.

    The message names `changed_code`, which may be the reason. A run that got more batches visits
    more prompts than `before`: these do not count.
    """
    now = digest_visited(visited[: before["prompts"]])
    changes = [name for name in VISITED if now[name] != before[name]]
    if changes:
        code = f" ({', '.join(changed_code)} changed, too)" if changed_code else ""
        raise ValueError(
            f"the prompts of the run have other {' and '.join(changes)} than when it "
            f"started{code}. Restore them, or start a new run"
        )


def compare_rows(place: str, before: JsonView, now: JsonView) -> list[str]:
    """Returns what differs between the digests of one place's rows; nothing if they are equal."""
    if before[ROWS] != now[ROWS]:
        return [f"the {place} has {now[ROWS]:,} rows, not {before[ROWS]:,}"]
    old_columns = before["columns"]
    new_columns = now["columns"]
    all_names = {**old_columns, **new_columns}  # a dict, which keeps their order
    changed = [name for name in all_names if old_columns.get(name) != new_columns.get(name)]
    if not changed:
        return []
    return [f"the {place} has other values of {', '.join(changed)}"]
