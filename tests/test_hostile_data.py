"""Files of data that are not what they should be: each loads, or is one line that says where, before a model is loaded.

Every file has the columns of all its readers: of the tasks gsm8k and custom, and of offline completions."""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import tiny_settings

from lagrpo.data.offline import read_records
from lagrpo.errors import SettingsError, refusing
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.tables import format_of, read_table
from lagrpo.training.run import train

ROW = {"question": "1 + 1?", "answer": "2", "prompt": "1 + 1?", "completion": "2"}
HEADER = ",".join(ROW) + "\n"
LINE = ",".join(ROW.values()) + "\n"
GOOD = json.dumps(ROW).encode() + b"\n"

Make = bytes | str | Callable[[Path], object]
Expected = int | str  # so many rows, or what the error says


def row(**changes: Any) -> bytes:
    """A line with other columns; `...` removes one."""
    return json.dumps({name: value for name, value in (ROW | changes).items() if value is not ...}).encode() + b"\n"


def nested(levels: int) -> bytes:
    return GOOD[:-2] + b', "extra": ' + b"[" * levels + b"]" * levels + b"}\n"


def sparse(path: Path) -> None:
    """A line of 100 MB, which takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(100 * 2**20)


def parquet(rows: list[Mapping[str, Any]] | pa.Table, cut: slice = slice(None)) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path)
        path.write_bytes(path.read_bytes()[cut])

    return make


def wrong_footer(path: Path) -> None:
    """Parquet whose last bytes announce metadata of four gigabytes."""
    parquet([ROW])(path)
    path.write_bytes(path.read_bytes()[:-8] + struct.pack("<I", 2**32 - 1) + b"PAR1")


def flipped(path: Path) -> None:
    parquet([ROW] * 50)(path)
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 2, len(content) - 8, 7):
        content[at] ^= 0x55
    path.write_bytes(content)


def unreadable(path: Path) -> None:
    path.write_bytes(GOOD)
    path.chmod(0)


LINES: dict[str, tuple[Make, Expected]] = {
    "sound": (GOOD, 1),
    "blank lines": (b"\n\n" + GOOD + b"  \n" + GOOD, 2),
    "byte-order mark": (b"\xef\xbb\xbf" + GOOD, 1),
    "CRLF": (GOOD.replace(b"\n", b"\r\n") * 2, 2),
    "CR": (GOOD.replace(b"\n", b"\r") * 2, 2),
    "a truncated line between CRs": (GOOD.replace(b"\n", b"\r") + b'{"answer": \r', "line 2: this is not JSON"),
    "no newline": (GOOD[:-1], 1),
    "other line ends": (row(answer="2\u2028\x85\x0c"), 1),
    "NaN": (row(extra=float("nan")), 1),
    "Infinity": (row(extra=float("inf")), 1),
    "gzip by content": (gzip.compress(GOOD * 3), 3),
    "two gzips": (gzip.compress(GOOD) + gzip.compress(GOOD), 2),
    "escaped NUL": (row(answer="2\0"), 1),
    "pair": (b'{"question": "\\ud83d\\ude00?", "answer": "2", "prompt": "?", "completion": "2"}\n', 1),
    "nested": (nested(90), 1),
    "empty": (b"", "has no rows|no completions"),
    "only blank": (b"\n \n\r\n", "has no rows|no completions"),
    "truncated": (GOOD + GOOD[:30] + b"\n", r"line 2: this is not JSON \([^,]*, column \d+\)"),
    "truncated number": (GOOD + b'{"answer": -\n', "line 2: this is not JSON"),
    "single quotes": (b"{'question': 1}", r"line 1: this is not JSON \(Expecting property name.*column 2\)"),
    "no commas": (GOOD[:-1] + GOOD, "line 1: this is not JSON .Extra data"),
    "pretty": (json.dumps(ROW, indent=2).encode(), "line 1: this is not JSON"),
    "HTML": (b"<!DOCTYPE html>\n<html>", "line 1: this is not JSON"),
    "a pointer to a file": (b"version https://git-lfs.github.com/spec/v1\n", "line 1: this is not JSON"),
    "a number": (b"1\n", "line 1: this is a int, not an object"),
    "a text": (b'"x"\n', "line 1: this is a str, not an object"),
    "null": (GOOD + b"null\n", "line 2: this is a NoneType, not an object"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "line 1: this is UTF-16, not UTF-8"),
    "UTF-16 without mark": (GOOD.decode().encode("utf-16-le"), "line 1, column 2: there is a NUL"),
    "UTF-32": (GOOD.decode().encode("utf-32"), "line 1: this is UTF-16, not UTF-8"),
    "latin-1": (GOOD + '{"answer": "é"}\n'.encode("latin-1"), r"line 2, byte 13: this is not UTF-8"),
    "overlong UTF-8": (b'{"answer": "\xc0\x80"}\n', "line 1, byte 13: this is not UTF-8"),
    "raw surrogate": (b'{"answer": "\xed\xa0\x80"}\n', "line 1, byte 13: this is not UTF-8"),
    "NUL": (GOOD + b"\0" * 9, "line 2, column 1: there is a NUL"),
    "control": (b'{"answer": "\x01"}\n', "line 1: this is not JSON .Invalid control character"),
    "key twice": (b'{"answer": "2", "answer": "3"}\n', "line 1: the key 'answer' is there twice"),
    "key twice within": (b'{"a": {"b": 1, "b": 1}}\n', "line 1: the key 'b' is there twice"),
    "lone surrogate": (row(answer="\ud800"), "line 1: its text has '.ud800', half of a surrogate pair"),
    "lone surrogate as key": (row(**{"\udfff": 1}), "line 1: its text has '.udfff', half of a surrogate pair"),
    "nested deeper": (nested(200), "line 1: this is nested deeper than 100 levels"),
    "nested deepest": (nested(100_000), "line 1: this is nested deeper than 100 levels"),
    "nested objects": (b'{"a":' * 100_000, "line 1: this is nested deeper than 100 levels"),
    "huge integer": (GOOD[:-2] + b', "n": 1' + b"0" * 5000 + b"}\n", "line 1: this has an integer of"),
    "100 MB": (sparse, "line 1: the line is longer than 67,108,864 bytes"),
    "truncated gzip": (gzip.compress(GOOD * 99)[:-20], "cannot be unpacked by gzip"),
    "broken gzip": (gzip.compress(GOOD * 99)[:15] + b"\xff" * 50, "cannot be unpacked by gzip"),
    "gzip with a wrong sum": (gzip.compress(GOOD)[:-8] + b"\0" * 8, "cannot be unpacked by gzip"),
    "gzip of nothing": (gzip.compress(b""), "has no rows|no completions"),
    "gzip bomb": (gzip.compress(bytes(2**27), 1), "line 1: the line is longer than"),
    "gzip twice": (gzip.compress(gzip.compress(GOOD)), "line 1.*: "),
    "question is lacking": (GOOD + row(question=..., prompt=...), "line 2: it has (no column|neither prompt)"),
    "answer is lacking": (GOOD + row(answer=..., completion=...), "line 2: it has (no column|neither completion)"),
    "question is null": (GOOD + row(question=None, prompt=None), "line 2: (its question|it has neither|the column)"),
    "question is a number": (row(question=7, prompt=7), "line 1: .*7"),
    "question is an object": (row(question={"a": 1}, prompt={"a": 1}), r"line 1: .*\{'a': 1\}"),
    "messages without a text": (row(question=[{"role": "user"}], prompt=[{"role": "user"}]), "line 1: .*'user'"),
    "a directory": (Path.mkdir, "Is a directory|without rollouts|no whole|is a directory"),
    "a pipe": (os.mkfifo, "is a pipe or a device|no such file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device|no such file"),
    "a broken link": (lambda path: path.symlink_to("nowhere"), "No such file|no such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "symbolic links|[Nn]o such file"),
    "a link": (lambda path: [path.with_name("other").write_bytes(GOOD), path.symlink_to("other")], 1),
}  # fmt: skip
IN_JSON: dict[str, tuple[Make, Expected]] = {
    "an array": (json.dumps([ROW, ROW]).encode(), 2),
    "a pretty array": (b"\n" + json.dumps([ROW], indent=2).encode(), 1),
    "an empty array": (b"[]", "has no rows|no completions"),
    "an array of others": (b'[{"answer": 1}, 2]', "item 2: this is a int"),
    "a truncated array": (json.dumps([ROW], indent=2).encode()[:-9], r"this is not JSON .*line \d"),
    "an array without end": (b"[" * 10**6, "nested deeper"),
}
IN_CSV: dict[str, tuple[Make, Expected]] = {
    "sound": (HEADER + LINE, 1),
    "CRLF, mark and gzip": (gzip.compress(("\ufeff" + HEADER + LINE * 2).replace("\n", "\r\n").encode()), 2),
    "lines within a field": (HEADER + '"1\n+ 1?",2,x,y\n' * 2, 2),
    "blank lines": (HEADER + "\n" + LINE + "\n", 1),
    "empty": ("", "has no rows"),
    "only a header": (HEADER, "has no rows"),
    "no header": (LINE * 2, "twice|no column"),
    "a field too many": (HEADER + LINE + LINE[:-1] + ",3\n", "line 3: this is not CSV: 5 fields, but 4 columns"),
    "a field too few": (HEADER + "a,b,c\n", "line 2: this is not CSV: 3 fields, but 4 columns"),
    "an open quote": (HEADER + LINE + '"a,b\n' + LINE, "line 4: this is not CSV: unexpected end of data"),
    "text behind a quote": (HEADER + '"a"b,2,3,4\n', "line 2: this is not CSV: ',' expected"),
    "a column twice": ("question,question\n1,2\n", "has the column 'question' twice"),
    "another separator": (HEADER.replace(",", ";") + LINE.replace(",", ";"), "its columns are separated by ';'"),
    "NUL": ((HEADER + LINE).encode() + b"\0", "line 3, column 1: there is a NUL"),
    "latin-1": ((HEADER + LINE.replace("2", "é")).encode("latin-1"), "line 2, byte 8: this is not UTF-8"),
    "no answers": (HEADER + "1 + 1?,,x,y\n", "no row has an answer"),
    "no question": (HEADER + LINE + ",2,x,y\n", "line 3: the column 'question' holds None"),
    "a pipe": (os.mkfifo, "is a pipe or a device"),
}
IN_PARQUET: dict[str, tuple[Make, Expected]] = {
    "sound": (parquet([ROW] * 3), 3),
    "empty": (b"", "cannot be read as Parquet"),
    "a text": (GOOD, "cannot be read as Parquet"),
    "truncated": (parquet([ROW], slice(0, -20)), "cannot be read as Parquet"),
    "only an end": (parquet([ROW], slice(-60, None)), "cannot be read as Parquet"),
    "a wrong footer": (wrong_footer, "cannot be read as Parquet"),
    "flipped bits": (flipped, "cannot be read as Parquet"),
    "no rows": (parquet(pa.table({name: pa.array([], pa.string()) for name in ROW})), "has no rows|no completions"),
    "no columns": (parquet(pa.table({})), "has no rows|no completions"),
    "other columns": (parquet([{"x": 1}]), "no column|neither prompt"),
    "numbers": (parquet([dict.fromkeys(ROW, 7.5)]), "row 1: .*7.5"),
    "bytes": (parquet([dict.fromkeys(ROW, b"\xff")]), r"row 1: .*xff"),
    "no text": (
        parquet(pa.table({name: pa.array([b"\xff"], pa.binary()).view(pa.string()) for name in ROW})),
        "cannot be read as Parquet",
    ),
    "one null": (parquet([ROW, ROW | {"question": None, "prompt": None}]), "row 2: "),
    "a column twice": (parquet(pa.table([pa.array(["a"])] * 2, names=["question"] * 2)), "'question' twice"),
    "a pipe": (os.mkfifo, "is a pipe or a device|no such file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device|no such file"),
}  # fmt: skip
CORPUS = [
    *[("data.jsonl", name, *case) for name, case in LINES.items()],
    *[("data.json", name, *case) for name, case in IN_JSON.items()],
    *[("data.csv", name, *case) for name, case in IN_CSV.items()],
    *[("data.parquet", name, *case) for name, case in IN_PARQUET.items()],
]
READERS: dict[str, Callable[[Path], int]] = {}


def reader(function: Callable[[Path], int]) -> Callable[[Path], int]:
    READERS[function.__name__] = function
    return function


@reader
def custom(path: Path) -> int:
    options = {"prompt_column": "question", "answer_column": "answer", "reward": "exact", "train_split": path.stem}
    return load_task(TaskSettings(name="custom", data=str(path.parent), **options), 0).size("train")


@reader
def gsm8k(path: Path) -> int:
    path.rename(path.with_name("train.jsonl"))
    return load_task(TaskSettings(name="gsm8k", data=str(path.parent)), 0).size("train")


@reader
def offline(path: Path) -> int:
    records = read_records(path).records
    if not records:
        raise ValueError(f"{path}: no completions in it")
    return len(records)


def takes(kind: str, file: str) -> bool:
    endings = {"custom": (".jsonl", ".json", ".csv", ".parquet"), "gsm8k": (".jsonl",)}
    return format_of(Path(file)) in endings.get(kind, (".jsonl", ".json", ".parquet"))


CASES = [
    pytest.param(kind, *case, id=f"{kind}-{case[0]}-{case[1]}")
    for case in CORPUS
    for kind in READERS
    if takes(kind, case[0])
]


def test_the_corpus_is_large():
    assert len(CORPUS) >= 60
    assert sum(isinstance(expected, str) for *_, expected in CORPUS) >= 60


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("kind", "file", "name", "make", "expected"), CASES)
def test_a_file_loads_or_is_refused_in_one_line(tmp_path, kind, file, name, make, expected):
    path = tmp_path / "here" / file
    path.parent.mkdir()
    (path.parent / "test.jsonl").write_bytes(GOOD * 2)
    make(path) if callable(make) else path.write_bytes(make.encode() if isinstance(make, str) else make)
    if isinstance(expected, int):
        assert READERS[kind](path) == expected
        return
    with pytest.raises(SettingsError, match=expected) as refused, refusing("offline.data" if kind == "offline" else ""):
        READERS[kind](path)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600
    if "split has" not in str(refused.value):
        assert str(path.parent) in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_may_not_be_read_is_named(tmp_path, kind):
    unreadable(tmp_path / "data.jsonl")
    (tmp_path / "test.jsonl").write_bytes(GOOD * 2)
    with pytest.raises(SettingsError, match="Permission denied"), refusing():
        READERS[kind](tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": "12"}, "token_ids is '12', not a list"),
        ({"token_ids": [1, True]}, "not a list of whole numbers"),
        ({"token_ids": [5], "logp_alpha": [-(10**400)]}, r"logp_alpha\[0\] is -10{30}"),
        ({"token_ids": [5], "logp_alpha": {"a": 1}}, "logp_alpha is {'a': 1}, not a list"),
        ({"token_ids": [5], "logp_alpha": [[-1.0]]}, r"logp_alpha\[0\] is \[-1.0\]"),
        ({"token_ids": [5], "sampled": [2]}, "sampled is"),
        ({"reward": 10**4000}, "its reward is 10"),
        ({"reward": [1]}, r"its reward is \[1\]"),
        ({"outcome": ["scored"]}, "its outcome is"),
        ({"finished": []}, "finished is"),
        ({"epoch": [1]}, "its epoch is"),
        ({"completion": ["2"]}, "its completion is"),
        ({"prompt_token_ids": {"a": 1}}, "prompt_token_ids is"),
        ({"prompt_text": "1", "text": "2", "gold": "{"}, "this is not JSON"),
        ({"prompt_text": "1", "text": "2", "gold": 7}, "line 1: "),
        ({"prompt_text": "1", "text": "2", "gold": "[" * 5000}, "nested deeper"),
        ({"prompt_text": "1", "text": "2", "gold": '"\\ud800"'}, "half of a surrogate pair"),
    ],
)
def test_a_column_of_offline_data_is_refused_without_a_model(tmp_path, changes, message):
    (tmp_path / "data.jsonl").write_bytes(row(**changes))
    with pytest.raises(ValueError, match=f"line 1: .*{message}|{message}"):
        read_records(tmp_path / "data.jsonl")


@pytest.mark.parametrize("offline_data", [True, False])
def test_malformed_data_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, offline_data):
    monkeypatch.setattr("lagrpo.training.build.build_policy", lambda *_: pytest.fail("a model was loaded"))
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD * 2 + b"{\n")
    columns = {"prompt_column": "question", "answer_column": "answer", "reward": "exact"}
    task = {"name": "custom", "data": str(path), **columns}
    sections = {"offline": {"data": str(path)}} if offline_data else {"task": task}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"data\.jsonl, line 3: this is not JSON"):
        train(tiny_settings(tmp_path / "model", tmp_path / "runs", **sections))
    assert not (tmp_path / "runs").exists()


def test_limits_hold_for_what_unpacks_by_and_by(tmp_path):
    """Short lines, each of which is sound; and few bytes of Parquet that stand for many."""
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * 2**18))
    with pytest.raises(ValueError, match=r"unpacks to more than \d\d,\d{3} bytes"):
        read_table(bomb, unpacked=10_000)
    assert read_table(bomb).rows == []
    table = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"question": pa.array(["x" * 10**4] * 1000)}), table)
    assert table.stat().st_size < 50_000
    with pytest.raises(ValueError, match="unpacks to more than"):
        read_table(table, unpacked=10**6)


def test_an_array_is_one_line(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps([ROW] * 100, indent=2))
    with pytest.raises(ValueError, match="JSON array of more than 1,000 characters: write an object per line"):
        read_table(tmp_path / "data.json", longest=1000)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (["1", ""], [1, None]),
        ([".5", "1e3"], [0.5, 1000.0]),
        (["true", "false"], [True, False]),
        (["1", "b"], ["1", "b"]),
        (["a", "NA"], ["a", "NA"]),
        (["12345678901234567890", "1"], ["12345678901234567890", "1"]),
        (["12:30", "1:2"], ["12:30", "1:2"]),
        (["2020-01-01", "x"], ["2020-01-01", "x"]),
    ],
)
def test_fields_of_csv_get_the_type_of_their_column(tmp_path, fields, values):
    (tmp_path / "a.csv").write_text("other,n\n" + "".join(f"x,{field}\n" for field in fields))
    assert [row["n"] for row in read_table(tmp_path / "a.csv").rows] == values


def load_custom(data: Path) -> Any:
    columns = {"prompt_column": "question", "answer_column": "answer", "reward": "exact"}
    return load_task(TaskSettings(name="custom", data=str(data), **columns), 0)


@pytest.mark.parametrize(("mark", "shown"), [(";", "';'"), ("\t", r"'\\t'"), ("|", r"'\|'")])
def test_another_separator_than_a_comma_is_named(tmp_path, mark, shown):
    path = tmp_path / "data.csv"
    path.write_text(f"question{mark}answer\n1{mark}2\n3{mark}4\n")
    with pytest.raises(ValueError, match=f"line 1: its columns are separated by {shown}, and CSV is read with commas"):
        load_custom(path)


def test_csv_of_carriage_returns_alone_is_read(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b'question,answer\r"a,\rb",2\rc,3\r')
    assert load_custom(path).size("train") == 1


@pytest.mark.parametrize("answer", ["NaN", "1e999", '{"value": [-Infinity]}'])
def test_a_gold_answer_that_json_lacks_is_refused(tmp_path, answer):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"question": "?", "answer": 1}}\n{{"question": "?", "answer": {answer}}}\n')
    with pytest.raises(ValueError, match=r"data.jsonl, line 2: the gold answer .* has a number that is not finite"):
        load_custom(path)


def test_an_unknown_time_zone_is_named(tmp_path):
    path = tmp_path / "data.parquet"
    moments = pa.array([5, 6], pa.timestamp("us", tz="Mars/Base"))
    pq.write_table(pa.table({"question": ["a", "b"], "answer": moments}), path)
    with pytest.raises(ValueError, match=r"data.parquet: the column 'answer' has an unknown time zone, Mars/Base"):
        load_custom(path)


def test_two_files_of_one_split_are_refused(tmp_path):
    for name in ("train.jsonl", "train.csv", "test.jsonl"):
        (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(
        ValueError, match=r"task.data: .* has train.csv and train.jsonl for one split: keep one of them"
    ):
        load_custom(tmp_path)


def test_a_split_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    (tmp_path / "test.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"task.data: .*test.jsonl cannot be read: No such file"):
        load_custom(tmp_path)
