"""Digests of the data of a run, so that a run whose data has changed does not resume as if nothing had happened.

Every row counts with every column: answers, and what only a reward function reads. The order of columns does not. The
prompts that the run visits count as the model sees them, in tokens. Checkpoints hold these digests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lagrpo.rollout.episodes import MAIN_TASK
from lagrpo.tasks import RowTask, Task
from lagrpo.types import Prompt

Digests = dict[str, Any]
ROWS = "rows"  # key of the number of rows, beside the digests of the columns
CHUNK = 1000  # rows of a dataset that are read at a time
VISITED = ("tokens", "answers")  # what counts of a prompt that the run visits


def digest_places(
    tasks: Mapping[str, Task],
    records: Sequence[Mapping[str, Any]] = (),
    evaluates: bool = True,
) -> Digests:
    """The digests of all rows of a run, by place: "train split", say.

    tasks: the run's task (MAIN_TASK), and those of evaluation sets, by name; their test splits count if the run
    `evaluates`. A task that is not made of rows has none: only its prompts count. records: the rows of offline data.
    """
    places = {"offline data": digest_rows(records)} if records else {}
    for name, task in tasks.items():
        if not isinstance(task, RowTask):
            continue
        of_set = "" if name == MAIN_TASK else f" of evaluation set {name}"
        splits = ["train"] if name == MAIN_TASK else []
        splits += ["test"] if evaluates else []
        places |= {f"{split} split{of_set}": digest_rows(task.rows[split]) for split in splits}
    return places


def digest_rows(rows: Any) -> Digests:
    """The number of rows, and a digest for each column; for rows without columns a single one."""
    columns: dict[str, Any] = {}
    for number, row in enumerate(iterate_rows(rows)):
        values = row if isinstance(row, Mapping) else {"values": row}
        for name, value in values.items():
            column = columns.setdefault(str(name), hashlib.blake2b(digest_size=8))
            column.update(f"{number} {value_text(value)}\n".encode())
    return {
        ROWS: len(rows),
        "columns": {name: columns[name].hexdigest() for name in sorted(columns)},
    }


def iterate_rows(rows: Any) -> Iterator[Any]:
    """The rows of a sequence, or of a dataset, by chunks: row by row, a dataset takes ten times as long."""
    if not hasattr(rows, "select"):
        yield from rows
        return
    for first in range(0, len(rows), CHUNK):
        chunk = rows[first : first + CHUNK]  # a list for each column
        for values in zip(*chunk.values(), strict=True):
            yield dict(zip(chunk, values, strict=True))


def digest_prompt(prompt: Prompt) -> dict[str, str]:
    """The digests of a prompt's tokens and of its reference answer."""
    return {"tokens": digest(repr(prompt.token_ids)), "answers": digest(value_text(prompt.answer))}


def digest_visited(visited: Sequence[Mapping[str, str]]) -> Digests:
    """The digests of several prompts as one."""
    together = {name: digest(" ".join(each[name] for each in visited)) for name in VISITED}
    return {"prompts": len(visited), **together}


def digest(text: str) -> str:
    """16 hex digits that tell texts apart."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def value_text(value: Any) -> str:
    """A value as JSON with the keys of tables in order, the same in every process."""
    try:
        return json.dumps(value, sort_keys=True, default=object_text)
    except (TypeError, ValueError):  # keys that JSON does not have
        return object_text(value)


def object_text(value: Any) -> Any:
    """A value that JSON does not have: lists for NumPy, else its text without the address of the object."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


# ---- what has changed ----


def check_places(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if the rows of a place have changed; a place that only one of them has does not count."""
    changes = list[str]()
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
    """Raise ValueError if the prompts that a run visits have changed; code that has changed, too, may be the reason. A
    run that got more batches visits more than before."""
    now = digest_visited(visited[: before["prompts"]])
    changes = [name for name in VISITED if now[name] != before[name]]
    if changes:
        code = f" ({', '.join(changed_code)} changed, too)" if changed_code else ""
        raise ValueError(
            f"the prompts of the run have other {' and '.join(changes)} than when it started{code}. "
            "Restore them, or start a new run"
        )


def compare_rows(place: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between the digests of the rows of one place."""
    if before[ROWS] != now[ROWS]:
        return [f"the {place} has {now[ROWS]:,} rows, not {before[ROWS]:,}"]
    old, new = before["columns"], now["columns"]
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"the {place} has other values of {', '.join(names)}"] if names else []
