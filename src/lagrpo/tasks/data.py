"""The train and test rows of a task, from files, datasets of the Hugging Face hub, or memory.

docs/data-and-rewards.md says how they are read. If task.data is unset, LAGRPO_DATA names the file or the directory.
"""

from __future__ import annotations

import ast
import csv
import glob
import gzip
import hashlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lagrpo.errors import check_is_pulled, one_line, one_line_errors, suggest
from lagrpo.tasks import Ask, build_messages, select

logger = logging.getLogger("lagrpo")
FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")
_ENDING = re.compile(r"(-\d{5}-of-(\d{5})(-[0-9a-f]{16})?)?\.(jsonl|json|csv|parquet)(\.gz)?$")
_NO_COLUMN = object()  # stands for the answer of a row without a column for it


# ---- files ----


class Row(dict[str, Any]):
    """A row of a file, and where it stands: "data.jsonl, line 3"."""

    def __init__(self, values: Mapping[str, Any], path: Path | str, place: str) -> None:
        super().__init__(values)
        self.path, self.place = path, place


def format_of(path: Path) -> str | None:
    """The ending of FORMATS that a file's name has, without .gz; None for another one."""
    return next(
        (ending for ending in FORMATS if path.name.endswith((ending, f"{ending}.gz"))), None
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file by its ending; the values of CSV are texts. Raises ValueError, with the place."""
    check_is_pulled(path)
    ending = format_of(path)
    values: list[Any]
    if ending == ".parquet":
        values, unit = _read_parquet(path), "row"
    elif ending == ".csv":
        values, unit = _read_csv(path), "row"
    else:
        values, unit = _read_json(path)
    rows = list[Row]()
    for number, value in enumerate(values, start=1):
        if unit == "line" and not value.strip():
            continue
        place = f"{path}, {unit} {number}"
        rows.append(Row(_parse(value, place), path, place))
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file. Texts that are stored as binary are texts."""
    import pyarrow.parquet

    with _naming_damage(path):
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    binary_columns = [field.name for field in table.schema if "binary" in str(field.type)]
    for row in rows:
        row |= {name: decode(row[name]) for name in binary_columns}
    return rows


def _read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header."""
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows = list[dict[str, str]]()
    longest = csv.field_size_limit(sys.maxsize)  # the limit of the csv module is 131,072 characters
    try:
        for row in reader:
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{path}, row {len(rows) + 1}: this is not CSV: {error}") from error
    finally:
        csv.field_size_limit(longest)
    names = reader.fieldnames or ()
    if len(set(names)) < len(names):
        raise ValueError(
            f"{path} cannot be read: its header names a column twice: {', '.join(names)}"
        )
    for number, row in enumerate(rows, start=1):
        # DictReader puts further fields under None, and None into columns without a field.
        if None in row or None in row.values():
            raise ValueError(f"{path}, row {number}: its number of fields is not the header's")
    return rows


def _read_json(path: Path) -> tuple[list[Any], str]:
    """The values of a JSON file and their unit: the items of one list or of {"data": [...]}, else lines of JSON."""
    text = _read_text(path)
    lines = list(io.StringIO(text, newline=None))  # ends at \n, \r\n and \r alone, as files do
    first_line = "".join(lines[:1]).strip()
    if format_of(path) != ".json" and not first_line.startswith("["):
        return lines, "line"
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_json(first_line):
            return lines, "line"
        raise ValueError(f"{path}: {_describe_json_error(error)}") from error
    items = whole.get("data") if isinstance(whole, dict) else whole
    return (items if isinstance(items, list) else [whole]), "item"


def _read_text(path: Path) -> str:
    """The text of a file, which may be compressed. Raises ValueError if it is not UTF-8."""
    with _naming_damage(path):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = f"line {line} is not UTF-8 (byte 0x{content[error.start]:02x})"
        raise ValueError(f"{path}: {problem}: save the file as UTF-8") from error


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Turn an error of the library that reads a file into a ValueError with the file and what to do."""
    try:
        yield
    except Exception as error:
        system_error = error.strerror if isinstance(error, OSError) else None
        if system_error is not None:  # the content may be fine
            raise ValueError(f"{path} cannot be read: {system_error}") from error
        problem = one_line(str(error)).rstrip(".") or type(error).__name__
        raise ValueError(f"{path} cannot be read: {problem}. Write or download it again") from error


def _parse(value: Any, place: str) -> dict[str, Any]:
    """A row, which may be a line of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value.strip())
        except (ValueError, RecursionError) as error:
            problem = _describe_json_error(error)
            raise ValueError(f"{place}: {problem}. A row is one line of JSON") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{place}: this is a {type(value).__name__}, not an object with columns")
    return dict(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _describe_json_error(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f"this is not JSON: {one_line(str(error))}"
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    near = error.doc[max(0, error.pos - 20) : error.pos + 20]
    return f"this is not JSON: {error.msg} ({line}character {error.colno}) near {near!r}"


# ---- splits ----


def load_rows(
    named: Any,
    train_split: str,
    test_split: str,
    *,
    hub: str,
    ask: Ask,
    answers: Sequence[str] = ("answer",),
    answer_may_be_row: bool = False,
    seed: int | None = None,
) -> dict[str, Any]:
    """The rows for training and testing, each with a question that can be asked. Raises ValueError for unfit data.

    named: task.data or the data; hub: the dataset to suggest without it.
    train_split, test_split: "a|b" names the split a, or b if there is no a.
    answers: columns; the first in which a row has a value holds its answer. Rows without an answer are left out.
    answer_may_be_row: if no row has any of these columns, no row is left out.
    seed: if set, a tenth of the prompts of an only split is held out for testing."""
    splits = find_splits(named, hub)
    source = named or os.environ.get("LAGRPO_DATA") if isinstance(named, str | None) else "data"
    if seed is not None and train_split == "train" and len(splits) == 1:
        train_split = next(iter(splits))
    chosen = {"train": _choose_split(splits, "train", train_split)}
    if seed is None or test_split != "test" or "test" in splits:
        chosen["test"] = _choose_split(splits, "test", test_split)
    places = {side: f"the {side} split of {source}" for side in chosen}
    rows = {side: _read_split(splits[name], places[side]) for side, name in chosen.items()}
    rows = _leave_out_unanswered(rows, places, answers, answer_may_be_row)
    if seed is None or "test" in chosen:
        for side, where in places.items():
            # The columns of a dataset have types, so its first row stands for all of them.
            checked = rows[side] if isinstance(rows[side], list) else rows[side].select([0])
            _identify_prompts(checked, where, ask)
        return rows
    prompts = _identify_prompts(rows["train"], places["train"], ask)
    if len(set(prompts)) < 2:
        raise ValueError(
            f"{source} has no test split, and none of its rows can be held out because all have the same prompt."
            f" Add a test split, or set task.options.test_split = {chosen['train']!r} to test on the training rows"
        )
    kept, held_out = hold_out(prompts, seed)
    _log_hold_out(source, prompts, held_out, seed)
    return {"train": select(rows["train"], kept), "test": select(rows["train"], held_out)}


def _choose_split(splits: Mapping[str, Any], side: str, names: str) -> str:
    """The first of the names "a|b" that is a split."""
    wanted = names.split("|")
    for name in wanted:
        if name in splits:
            return name
    known = f"there are {', '.join(splits)}.{suggest(wanted[-1], splits)}"
    raise ValueError(f"task.options.{side}_split: no {' or '.join(map(repr, wanted))}; {known}")


def _read_split(data: Any, where: str) -> Any:
    """The rows of files or in memory, as a list; a dataset stays a dataset."""
    is_dataset = hasattr(data, "with_transform")
    if is_dataset and data.format["type"] != "custom":  # else its user's function makes the rows
        rows: Any = read_dataset(data)
    else:
        rows = list[Row]()
        for number, value in enumerate(_to_records(data), start=1):
            if isinstance(value, Path):
                rows += read_rows(value)
            else:
                place = f"{where}, row {number}"
                rows.append(Row(decode(_parse(value, place)), where, place))
    if not len(rows):
        raise ValueError(f"{where} has no rows")
    return rows


def _to_records(data: Any) -> Any:
    """The rows of a data frame, with None for missing values; other data as they are."""
    if not hasattr(data, "iloc"):
        return data
    return data.astype(object).where(data.notna(), None).to_dict("records")


def read_dataset(rows: Any) -> Any:
    """A dataset with the values that a file has: class labels are their names; -1, "no label", is None."""
    labels = {
        name: [*feature.names, None]
        for name, feature in rows.features.items()
        if hasattr(feature, "int2str")
    }

    def read(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        values = {name: decode(column) for name, column in columns.items()}
        for name in labels.keys() & columns.keys():
            values[name] = [labels[name][label] for label in columns[name]]
        return values

    return rows.with_transform(read)


def _leave_out_unanswered(
    splits: Mapping[str, Any],
    places: Mapping[str, str],
    answers: Sequence[str],
    answer_may_be_row: bool,
) -> dict[str, Any]:
    """The rows that have an answer. Raises ValueError for a split in which none has."""
    found = {side: _find_answers(rows, places[side], answers) for side, rows in splits.items()}
    if answer_may_be_row and all(
        answer is _NO_COLUMN for answers_of_split in found.values() for answer in answers_of_split
    ):
        return dict(splits)
    answered = dict[str, Any]()
    for side, rows in splits.items():
        kept = [n for n, answer in enumerate(found[side]) if not _is_missing(answer)]
        left_out = len(rows) - len(kept)
        if not kept:
            with one_line_errors(_place_of(rows[0], places[side], 1)):
                get_value(rows[0], answers[0])
            raise ValueError(
                f"{places[side]}: none of its {len(rows)} rows has an answer (column {answers[0]!r})"
            )
        if left_out:
            text = "%d of the %d rows of %s have no answer and are left out"
            logger.warning(text, left_out, len(rows), places[side])
        answered[side] = select(rows, kept) if left_out else rows
    return answered


def _find_answers(rows: Any, where: str, columns: Sequence[str]) -> list[Any]:
    """The answer of each row, _NO_COLUMN for a row that has none of the columns."""
    if not isinstance(rows, list):
        near = [
            name
            for name in rows.column_names
            if any(f"{column}.".startswith(f"{name}.") for column in columns)
        ]
        if not near:
            return [_NO_COLUMN] * len(rows)
        rows = rows.select_columns(near)
    answers = list[Any]()
    for number, row in enumerate(rows, start=1):
        column = find_column(row, columns)
        with one_line_errors(_place_of(row, where, number)):
            answers.append(_NO_COLUMN if column is None else plain(get_value(row, column)))
    return answers


def _is_missing(answer: Any) -> bool:
    """True for null, white space, and lists of nothing else."""
    if isinstance(answer, list):
        return all(map(_is_missing, answer))
    return answer is None or answer is _NO_COLUMN or not str(answer).strip()


def _identify_prompts(rows: Any, where: str, ask: Ask) -> list[bytes]:
    """Bytes for the prompt of each row, equal if the messages are. Raises ValueError for what cannot be asked."""
    digests = list[bytes]()
    for number, row in enumerate(rows, start=1):
        with one_line_errors(_place_of(row, where, number)):
            messages = build_messages(ask(row)[0])
        text = json.dumps(messages, sort_keys=True)
        digests.append(hashlib.blake2b(text.encode(), digest_size=16).digest())
    return digests


def _place_of(row: Any, where: str, number: int) -> str:
    return getattr(row, "place", f"{where}, row {number}")


def _log_hold_out(
    source: Any, prompts: Sequence[bytes], held_out: Sequence[int], seed: int
) -> None:
    total, different = len(prompts), len(set(prompts))
    chosen = f"chosen by seed {seed}"
    if different < total:
        chosen = (
            f"{len({prompts[row] for row in held_out})} of {different} different prompts, {chosen}"
        )
    message = "%s has no test split: training on %d of its %d rows, testing on the other %d (%s)"
    logger.warning(message, source, total - len(held_out), total, len(held_out), chosen)


def hold_out(prompts: Sequence[Hashable], seed: int) -> tuple[list[int], list[int]]:
    """Places of rows for training and for testing, in order, from the prompt of each row.

    The seed chooses a tenth of the different prompts (1 to 1,000), in the order in which they first occur. All rows
    with such a prompt are for testing.

    >>> hold_out(["a", "b", "a", "b"], seed=0)
    ([0, 2], [1, 3])
    """
    from lagrpo.rng import permutation

    rows_with = dict[Hashable, list[int]]()
    for row, prompt in enumerate(prompts):
        rows_with.setdefault(prompt, []).append(row)
    groups = list(rows_with.values())
    order = permutation(len(groups), seed, "hold-out").tolist()
    count = max(1, min(1000, len(groups) // 10))
    held_out = sorted(row for group in order[:count] for row in groups[group])
    kept = sorted(row for group in order[count:] for row in groups[group])
    return kept, held_out


def find_splits(named: Any, hub: str) -> dict[str, Any]:
    """The existing splits by name: files, a `datasets.Dataset`, or rows. Raises ValueError for missing data."""
    if not isinstance(named, str | None):
        is_split = isinstance(named, Mapping)
        return dict(named) if is_split else {"train": named}
    endings = ", ".join(FORMATS)
    setting = "task.data" if named else "LAGRPO_DATA"
    data = named or os.environ.get("LAGRPO_DATA")
    if not data:
        files = f"a file ending in {endings}, a directory of such files, or a hub dataset such as {hub!r}"
        raise ValueError(
            f"this task needs data: set task.data, or the environment variable LAGRPO_DATA, to {files}"
        )
    path = Path(data).expanduser()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        with one_line_errors(f"{setting}: {path}, which save_to_disk wrote, cannot be read"):
            return _as_splits(datasets.load_from_disk(path))
    files = _match_files(path)
    if files or path.is_dir():
        return _group_by_split(files, path, setting)
    is_hub_id = bool(named and _HUB_ID.fullmatch(data))
    if not is_hub_id or format_of(path) is not None or path.parent.is_dir():
        raise ValueError(
            f"{setting}: no file or directory {data!r} (current directory: {os.getcwd()})"
        )
    import datasets

    repository, _, config = (hub if data == hub.partition(":")[0] else data).partition(":")
    with one_line_errors(
        f"{data!r} is not a file or directory here, and could not be loaded from the hub"
    ):
        return _as_splits(datasets.load_dataset(repository, config or None))


def _as_splits(saved: Any) -> dict[str, Any]:
    return dict(saved) if isinstance(saved, dict) else {"train": saved}


def _match_files(path: Path) -> list[Path]:
    """The files of a directory, the file of this name, or else the files that match the pattern."""
    if path.is_dir():
        return sorted(path.iterdir())
    if path.exists():
        return [path]
    folder = str(path.parent)
    if path.parent.is_dir():
        folder = glob.escape(folder)
    return sorted(map(Path, glob.glob(os.path.join(folder, path.name))))


def _group_by_split(files: Sequence[Path], path: Path, setting: str) -> dict[str, list[Path]]:
    """The files, or all shards, of each split. Raises ValueError for files that are neither."""
    splits = dict[str, list[Path]]()
    for file in filter(format_of, files):
        splits.setdefault(_ENDING.sub("", file.name), []).append(file)
    # What the names say: the number of shards of their split, 1 for a file that is no shard.
    shards = {
        name: {int(_ENDING.findall(file.name)[0][1] or 1) for file in members}
        for name, members in splits.items()
    }

    def is_complete(name: str) -> bool:
        chosen_by_pattern = not path.is_dir() and len(shards[name]) == 1 and shards[name] != {1}
        return chosen_by_pattern or shards[name] == {len(splits[name])}

    if not splits or not all(map(is_complete, splits)):
        endings = ", ".join(FORMATS)
        raise ValueError(
            f"{setting}: {path}: name files that end in {endings}: one for each split, or all its shards"
        )
    return splits


# ---- columns ----


def has_column(row: Mapping[str, Any], column: str) -> bool:
    """True if the row has the column, or the field in a column."""
    first, _, rest = column.partition(".")
    if column in row:
        return True
    return bool(rest) and isinstance(row.get(first), Mapping) and has_column(row[first], rest)


def find_column(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The first of these columns with a value in the row, or else the first that the row has; None without any."""
    present = [column for column in columns if has_column(row, column)]
    for column in present:
        if get_value(row, column) is not None:
            return column
    return present[0] if present else None


def get_value(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a field in a column ("reward_model.answer"). Raises ValueError if there is none."""
    first, _, rest = column.partition(".")
    if column not in row and rest and isinstance(row.get(first), Mapping):
        return get_value(row[first], rest)
    if column not in row:
        raise ValueError(
            f"no column {column!r}.{suggest(column, row)} The columns are {', '.join(row)}"
        )
    return row[column]


def decode(value: Any) -> Any:
    """A value with texts for bytes in UTF-8, and with Python's lists and numbers for those of NumPy, also within lists
    and tables. Other bytes, such as images, stay bytes."""
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, Mapping):
        return {name: decode(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(decode(entry) for entry in value)
    return decode(value.tolist()) if hasattr(value, "tolist") else value


def plain(value: Any) -> Any:
    """A value as JSON has it: dates and decimals as texts, sets as lists, NaN as None. Raises ValueError for bytes that
    are not text."""

    def convert(other: Any) -> Any:
        if isinstance(other, bytes | bytearray):
            bytes_shown = f"{bytes(other)!r:.40}"
            raise ValueError(
                f"its answer has bytes that are not text ({bytes_shown}): set task.answer_column to a column of texts"
            )
        return sorted(other, key=str) if isinstance(other, set | frozenset) else str(other)

    text = json.dumps(decode(value), default=convert)
    return json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))


def parse_messages(text: Any) -> Any:
    """The messages of a text that holds some, as JSON or as Python prints them; anything else as it is. Raises
    ValueError for messages that cannot be read."""
    if not isinstance(text, str) or not re.match(
        r"\s*\[\s*\{\s*['\"](role|content|name|from|value)['\"]\s*:", text
    ):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(text)
    raise ValueError(f"it has messages that are not JSON: {text!r:.80}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text in a column. Raises ValueError for something else, and for white space."""
    value = get_value(row, column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its {column} is {value!r:.80}, not a text")
    return value
