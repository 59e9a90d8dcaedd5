"""The train and test rows of a task, from files, datasets of the Hugging Face hub, or memory.

docs/data-and-rewards.md says how they are read. If task.data is unset, LAGRPO_DATA names the file
or the directory.
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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from lagrpo.errors import check_is_pulled, one_line, one_line_errors, suggest
from lagrpo.tasks import Ask, build_messages, select

logger = logging.getLogger("lagrpo")

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
MAX_HELD_OUT_PROMPTS = 1000

# "owner/name" or "owner/name:configuration".
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")

# The end of a file's name after the name of its split, as the hub's shards have it:
# "-00000-of-00002.parquet". Group 2 is the number of shards.
_ENDING = re.compile(r"(-\d{5}-of-(\d{5})(-[0-9a-f]{16})?)?\.(jsonl|json|csv|parquet)(\.gz)?$")

# The beginning of a text that holds messages, as JSON or as Python prints them.
_MESSAGES_TEXT = re.compile(r"\s*\[\s*\{\s*['\"](role|content|name|from|value)['\"]\s*:")

_NO_COLUMN = object()  # stands for the answer of a row without a column for it


# ---- Files ----


class Row(dict[str, Any]):
    """A row of a file. `place` is where it stands: "data.jsonl, line 3"."""

    def __init__(self, values: Mapping[str, Any], path: Path | str, place: str) -> None:
        super().__init__(values)
        self.path = path
        self.place = place


def format_of(path: Path) -> str | None:
    """Returns the ending of FORMATS that a file's name has, without .gz; None for another one."""
    for ending in FORMATS:
        if path.name.endswith((ending, f"{ending}.gz")):
            return ending
    return None


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file, in the format that its ending says. The values of CSV are texts.

    Raises ValueError, with the place.
    """
    check_is_pulled(path)
    ending = format_of(path)
    if ending == ".parquet":
        return _to_rows(_read_parquet(path), path, "row")
    if ending == ".csv":
        return _to_rows(_read_csv(path), path, "row")
    return _read_json_rows(path)


def _to_rows(values: Iterable[Any], path: Path, unit: str) -> list[Row]:
    """Returns the values as rows that know their place, such as "data.csv, row 3"."""
    rows: list[Row] = []
    for number, value in enumerate(values, start=1):
        if unit == "line" and not value.strip():
            continue
        place = f"{path}, {unit} {number}"
        rows.append(Row(_parse(value, place), path, place))
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    """Reads a Parquet file. Texts that are stored as binary become texts."""
    import pyarrow.parquet

    with _naming_damage(path):
        table = pyarrow.parquet.read_table(path)
        rows = table.to_pylist()
    binary_columns = [field.name for field in table.schema if "binary" in str(field.type)]
    for row in rows:
        for name in binary_columns:
            row[name] = decode(row[name])
    return rows


def _read_csv(path: Path) -> list[dict[str, str]]:
    """Reads a CSV file with a header."""
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows: list[dict[str, str]] = []
    # The csv module takes fields of at most 131,072 characters by default.
    default_limit = csv.field_size_limit(sys.maxsize)
    try:
        for row in reader:
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"{path}, row {len(rows) + 1}: this is not CSV: {error}") from error
    finally:
        csv.field_size_limit(default_limit)
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


def _read_json_rows(path: Path) -> list[Row]:
    """Reads one list, one {"data": [...]}, or lines of JSON, whatever the file's ending says."""
    text = _read_text(path)
    # Lines end at \n, \r\n and \r alone, as in files that are opened as text.
    lines = list(io.StringIO(text, newline=None))
    first_line = lines[0].strip() if lines else ""
    if format_of(path) != ".json" and not first_line.startswith("["):
        return _to_rows(lines, path, "line")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_json(first_line):
            return _to_rows(lines, path, "line")
        raise ValueError(f"{path}: {_describe_json_error(error)}") from error
    items = content.get("data") if isinstance(content, dict) else content
    if not isinstance(items, list):
        items = [content]
    return _to_rows(items, path, "item")


def _read_text(path: Path) -> str:
    """Reads the text of a file, which may be compressed. Raises ValueError if it is not UTF-8."""
    with _naming_damage(path):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}: line {line} is not UTF-8 (byte 0x{content[error.start]:02x}): "
            "save the file as UTF-8"
        ) from error


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Turns any error of a library that reads a file into a ValueError with the file's name."""
    try:
        yield
    except Exception as error:
        # An error of the system, such as a missing permission: the content may be fine.
        if isinstance(error, OSError) and error.strerror is not None:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        problem = one_line(str(error)).rstrip(".") or type(error).__name__
        raise ValueError(f"{path} cannot be read: {problem}. Write or download it again") from error


def _parse(value: Any, place: str) -> dict[str, Any]:
    """Returns the columns of a row, which may be a line of JSON. Raises ValueError."""
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


# ---- Splits ----


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
    """Loads the rows for training and testing, each with a question that can be asked.

    named: task.data, or the data itself.
    train_split, test_split: "a|b" names the split a, or b if there is no a.
    hub: the dataset that is suggested if no data is named.
    answers: columns; the first in which a row has a value holds its answer. Rows without an answer
        are left out.
    answer_may_be_row: if no row has any of these columns, no row is left out.
    seed: if it is set and there is no test split, it chooses a tenth of the prompts for testing.

    Raises ValueError for unfit data.
    """
    splits = find_splits(named, hub)
    source = "data"
    if isinstance(named, str | None):
        source = named or os.environ.get("LAGRPO_DATA")
    has_test_split = seed is None or test_split != "test" or "test" in splits

    # The only split is for training, whatever its name is.
    if seed is not None and train_split == "train" and len(splits) == 1:
        train_split = next(iter(splits))
    split_names = {"train": _choose_split(splits, "train", train_split)}
    if has_test_split:
        split_names["test"] = _choose_split(splits, "test", test_split)

    places = {side: f"the {side} split of {source}" for side in split_names}
    rows = {side: _read_split(splits[name], places[side]) for side, name in split_names.items()}
    rows = _leave_out_unanswered(rows, places, answers, answer_may_be_row)

    if seed is None or has_test_split:
        for side, place in places.items():
            _check_prompts(rows[side], place, ask)
        return rows

    prompts = _digest_prompts(rows["train"], places["train"], ask)
    if len(set(prompts)) < 2:
        raise ValueError(
            f"{source} has no test split, and none of its rows can be held out because all have "
            "the same prompt. Add a test split, or set "
            f"task.options.test_split = {split_names['train']!r} to test on the training rows"
        )
    train_indices, test_indices = hold_out(prompts, seed)
    _log_hold_out(source, prompts, test_indices, seed)
    return {
        "train": select(rows["train"], train_indices),
        "test": select(rows["train"], test_indices),
    }


def _choose_split(splits: Mapping[str, Any], side: str, names: str) -> str:
    """Returns the first of the names "a|b" that is a split. Raises ValueError if none is."""
    wanted = names.split("|")
    for name in wanted:
        if name in splits:
            return name
    raise ValueError(
        f"task.options.{side}_split: no {' or '.join(map(repr, wanted))}; "
        f"there are {', '.join(splits)}.{suggest(wanted[-1], splits)}"
    )


def _read_split(data: Any, split_place: str) -> Any:
    """Returns a split's rows: a list for files and data in memory, a dataset for a dataset.

    Raises ValueError if there are none.
    """
    is_dataset = hasattr(data, "with_transform")
    # In the format "custom" a function of the user makes the rows. with_transform would drop it.
    if is_dataset and data.format["type"] != "custom":
        rows: Any = read_dataset(data)
    else:
        rows = []
        for number, value in enumerate(_to_records(data), start=1):
            if isinstance(value, Path):
                rows += read_rows(value)
            else:
                place = f"{split_place}, row {number}"
                rows.append(Row(decode(_parse(value, place)), split_place, place))
    if not len(rows):
        raise ValueError(f"{split_place} has no rows")
    return rows


def _to_records(data: Any) -> Any:
    """Returns the rows of a data frame, with None for missing values; other data as it is."""
    if not hasattr(data, "iloc"):
        return data
    return data.astype(object).where(data.notna(), None).to_dict("records")


def read_dataset(rows: Any) -> Any:
    """Returns a dataset with the values that a file would have.

    Class labels become their names; the label -1, which means no label, becomes None.
    """
    # Label -1 is the last entry of its list.
    label_names = {
        name: [*feature.names, None]
        for name, feature in rows.features.items()
        if hasattr(feature, "int2str")
    }

    def read(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        values = {name: decode(column) for name, column in columns.items()}
        for name in label_names.keys() & columns.keys():
            values[name] = [label_names[name][label] for label in columns[name]]
        return values

    return rows.with_transform(read)


def _leave_out_unanswered(
    splits: Mapping[str, Any],
    places: Mapping[str, str],
    columns: Sequence[str],
    answer_may_be_row: bool,
) -> dict[str, Any]:
    """Returns the rows that have an answer in one of the columns.

    Raises ValueError for a split in which none has. If answers may be rows and no row has any of
    the columns, all rows are returned.
    """
    answers = {side: _find_answers(rows, places[side], columns) for side, rows in splits.items()}
    has_column = any(answer is not _NO_COLUMN for answer in chain.from_iterable(answers.values()))
    if answer_may_be_row and not has_column:
        return dict(splits)
    return {
        side: _select_answered(rows, places[side], answers[side], columns[0])
        for side, rows in splits.items()
    }


def _select_answered(rows: Any, split_place: str, answers: Sequence[Any], column: str) -> Any:
    """Returns the rows of a split that have an answer. Raises ValueError if none has."""
    answered = [index for index, answer in enumerate(answers) if not _is_missing(answer)]
    if not answered:
        # If the column does not exist, this error names the columns that do.
        with one_line_errors(_place_of(rows[0], split_place, 1)):
            get_value(rows[0], column)
        raise ValueError(
            f"{split_place}: none of its {len(rows)} rows has an answer (column {column!r})"
        )
    if len(answered) == len(rows):
        return rows
    logger.warning(
        "%d of the %d rows of %s have no answer and are left out",
        len(rows) - len(answered),
        len(rows),
        split_place,
    )
    return select(rows, answered)


def _find_answers(rows: Any, split_place: str, columns: Sequence[str]) -> list[Any]:
    """Returns the answer of each row, _NO_COLUMN for a row that has none of the columns."""
    if not isinstance(rows, list):
        # Only the columns of a dataset that may hold an answer are read: others may hold images.
        answer_columns = [name for name in rows.column_names if _may_hold(name, columns)]
        if not answer_columns:
            return [_NO_COLUMN] * len(rows)
        rows = rows.select_columns(answer_columns)
    answers: list[Any] = []
    for number, row in enumerate(rows, start=1):
        column = find_column(row, columns)
        with one_line_errors(_place_of(row, split_place, number)):
            answers.append(_NO_COLUMN if column is None else plain(get_value(row, column)))
    return answers


def _may_hold(name: str, columns: Sequence[str]) -> bool:
    """True if a column of this name is one of `columns`, or has a field that is one of them."""
    return any(f"{column}.".startswith(f"{name}.") for column in columns)


def _is_missing(answer: Any) -> bool:
    """True for null, white space, and lists of nothing else."""
    if isinstance(answer, list):
        return all(map(_is_missing, answer))
    return answer is None or answer is _NO_COLUMN or not str(answer).strip()


def _check_prompts(rows: Any, split_place: str, ask: Ask) -> None:
    """Raises ValueError if the prompts of a split cannot be asked."""
    # The columns of a dataset have types, so its first row stands for all of them.
    checked_rows = rows if isinstance(rows, list) else rows.select([0])
    _digest_prompts(checked_rows, split_place, ask)


def _digest_prompts(rows: Any, split_place: str, ask: Ask) -> list[bytes]:
    """Returns a digest of each row's prompt: equal for equal messages.

    Raises ValueError for a prompt that cannot be asked.
    """
    digests: list[bytes] = []
    for number, row in enumerate(rows, start=1):
        with one_line_errors(_place_of(row, split_place, number)):
            question, _ = ask(row)
            messages = build_messages(question)
        text = json.dumps(messages, sort_keys=True)
        digests.append(hashlib.blake2b(text.encode(), digest_size=16).digest())
    return digests


def _place_of(row: Any, split_place: str, number: int) -> str:
    return getattr(row, "place", f"{split_place}, row {number}")


def _log_hold_out(
    source: Any, prompts: Sequence[bytes], test_indices: Sequence[int], seed: int
) -> None:
    num_rows = len(prompts)
    num_prompts = len(set(prompts))
    choice = f"chosen by seed {seed}"
    if num_prompts < num_rows:
        num_test_prompts = len({prompts[index] for index in test_indices})
        choice = f"{num_test_prompts} of {num_prompts} different prompts, {choice}"
    logger.warning(
        "%s has no test split: training on %d of its %d rows, testing on the other %d (%s)",
        source,
        num_rows - len(test_indices),
        num_rows,
        len(test_indices),
        choice,
    )


def hold_out(prompts: Sequence[Hashable], seed: int) -> tuple[list[int], list[int]]:
    """Chooses rows for testing. Returns the indices of the training and the test rows, in order.

    prompts: the prompt of each row. The seed chooses a tenth of the different prompts (1 to 1,000)
    in the order in which they first occur. All rows with such a prompt are for testing.

    >>> hold_out(["a", "b", "a", "b"], seed=0)
    ([0, 2], [1, 3])
    """
    from lagrpo.rng import permutation

    rows_by_prompt: dict[Hashable, list[int]] = {}
    for index, prompt in enumerate(prompts):
        rows_by_prompt.setdefault(prompt, []).append(index)
    row_groups = list(rows_by_prompt.values())
    order = permutation(len(row_groups), seed, "hold-out").tolist()
    num_test_prompts = max(1, min(MAX_HELD_OUT_PROMPTS, len(row_groups) // 10))
    test_indices = sorted(chain.from_iterable(row_groups[n] for n in order[:num_test_prompts]))
    train_indices = sorted(chain.from_iterable(row_groups[n] for n in order[num_test_prompts:]))
    return train_indices, test_indices


def find_splits(named: Any, hub: str) -> dict[str, Any]:
    """Returns the existing splits by name: files, a `datasets.Dataset`, or rows in memory.

    named: task.data, or the data itself; hub: the dataset that is suggested if no data is named.
    Raises ValueError for missing data.
    """
    if isinstance(named, Mapping):
        return dict(named)
    if not isinstance(named, str | None):
        return {"train": named}

    setting = "task.data" if named else "LAGRPO_DATA"
    data = named or os.environ.get("LAGRPO_DATA")
    if not data:
        raise ValueError(
            "this task needs data: set task.data, or the environment variable LAGRPO_DATA, to a "
            f"file ending in {', '.join(FORMATS)}, a directory of such files, "
            f"or a hub dataset such as {hub!r}"
        )

    path = Path(data).expanduser()
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        import datasets

        with one_line_errors(f"{setting}: {path}, which save_to_disk wrote, cannot be read"):
            return _as_splits(datasets.load_from_disk(path))

    files = _match_files(path)
    if files or path.is_dir():
        return _group_by_split(files, path, setting)

    # A name whose directory exists is meant as a file. LAGRPO_DATA never names a hub dataset.
    is_hub_id = bool(named and _HUB_ID.fullmatch(data))
    if not is_hub_id or format_of(path) is not None or path.parent.is_dir():
        raise ValueError(
            f"{setting}: no file or directory {data!r} (current directory: {os.getcwd()})"
        )
    return _load_from_hub(data, hub)


def _load_from_hub(name: str, suggested: str) -> dict[str, Any]:
    """Loads a dataset "owner/name" or "owner/name:configuration" of the hub.

    The name of the `suggested` dataset alone stands for its suggested configuration.
    """
    import datasets

    suggested_repository, _, _ = suggested.partition(":")
    full_name = suggested if name == suggested_repository else name
    repository, _, configuration = full_name.partition(":")
    with one_line_errors(
        f"{name!r} is not a file or directory here, and could not be loaded from the hub"
    ):
        return _as_splits(datasets.load_dataset(repository, configuration or None))


def _as_splits(dataset: Any) -> dict[str, Any]:
    """Returns a `DatasetDict` as a dict, and a single dataset as the split "train"."""
    if isinstance(dataset, dict):
        return dict(dataset)
    return {"train": dataset}


def _match_files(path: Path) -> list[Path]:
    """Returns the files of a directory, the file of this name, or the files of this pattern."""
    if path.is_dir():
        return sorted(path.iterdir())
    if path.exists():
        return [path]
    folder = str(path.parent)
    if path.parent.is_dir():
        folder = glob.escape(folder)
    return sorted(Path(name) for name in glob.glob(os.path.join(folder, path.name)))


def _group_by_split(files: Sequence[Path], path: Path, setting: str) -> dict[str, list[Path]]:
    """Groups files by the split that they are named after: one file, or all shards of a split.

    A pattern may choose some of the shards. Raises ValueError for other files.
    """
    splits: dict[str, list[Path]] = {}
    for file in files:
        if format_of(file) is not None:
            splits.setdefault(_ENDING.sub("", file.name), []).append(file)
    is_pattern = not path.is_dir()
    if not splits or not all(_is_complete(members, is_pattern) for members in splits.values()):
        raise ValueError(
            f"{setting}: {path}: name files that end in {', '.join(FORMATS)}: "
            "one for each split, or all its shards"
        )
    return splits


def _is_complete(files: Sequence[Path], is_pattern: bool) -> bool:
    """True for one file, for all shards of a split, and for any shards that a pattern chooses."""
    shard_counts = {_num_shards(file) for file in files}
    if len(shard_counts) > 1:
        return False
    (shard_count,) = shard_counts
    if is_pattern and shard_count != 1:
        return True
    return shard_count == len(files)


def _num_shards(file: Path) -> int:
    """Returns the number of shards that the name of a file says; 1 for a file that is no shard."""
    match = _ENDING.search(file.name)
    assert match is not None  # the file has one of FORMATS
    return int(match[2] or 1)


# ---- Columns ----


def has_column(row: Mapping[str, Any], column: str) -> bool:
    """True if the row has the column, or the field in a column."""
    if column in row:
        return True
    outer, _, field = column.partition(".")
    return bool(field) and isinstance(row.get(outer), Mapping) and has_column(row[outer], field)


def find_column(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """Returns the first of these columns with a value in the row.

    Returns the first that the row has if none has a value, and None if it has none.
    """
    present = [column for column in columns if has_column(row, column)]
    for column in present:
        if get_value(row, column) is not None:
            return column
    return present[0] if present else None


def get_value(row: Mapping[str, Any], column: str) -> Any:
    """Returns the value of a column, or of a field in a column ("reward_model.answer").

    Raises ValueError if the row has no such column.
    """
    if column in row:
        return row[column]
    outer, _, field = column.partition(".")
    if field and isinstance(row.get(outer), Mapping):
        return get_value(row[outer], field)
    raise ValueError(
        f"no column {column!r}.{suggest(column, row)} The columns are {', '.join(row)}"
    )


def decode(value: Any) -> Any:
    """Returns a value with texts for bytes in UTF-8, and Python's lists and numbers for NumPy's.

    Values within lists and tables are decoded too. Other bytes, such as images, stay bytes.
    """
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
    if hasattr(value, "tolist"):
        return decode(value.tolist())
    return value


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: dates and decimals as texts, sets as lists, NaN as None.

    Raises ValueError for bytes that are not text.
    """
    text = json.dumps(decode(value), default=_to_json_type)
    return json.loads(text, parse_constant=_parse_constant)


def _to_json_type(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        raise ValueError(
            f"its answer has bytes that are not text ({bytes(value)!r:.40}): "
            "set task.answer_column to a column of texts"
        )
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


def _parse_constant(name: str) -> float | None:
    """Returns the value of a constant that Python's JSON has: NaN, Infinity or -Infinity."""
    return None if name == "NaN" else float(name)


def parse_messages(text: Any) -> Any:
    """Returns the messages of a text that holds some, as JSON or as Python prints them.

    Anything else is returned as it is. Raises ValueError for messages that cannot be read.
    """
    if not isinstance(text, str) or not _MESSAGES_TEXT.match(text):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(text)
    raise ValueError(f"it has messages that are not JSON: {text!r:.80}")


def text_of(row: Mapping[str, Any], column: str) -> str:
    """Returns the text in a column. Raises ValueError for something else, and for white space."""
    value = get_value(row, column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its {column} is {value!r:.80}, not a text")
    return value
