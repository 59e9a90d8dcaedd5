"""The meaning of a row of any source: texts, answer, file, and the choice of held-out rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tasks import task_settings

from lagrpo.runs.reading import completion_files
from lagrpo.settings.load import load_settings
from lagrpo.settings.of_run import config_of_weights, settings_for_eval
from lagrpo.startup.arguments import build_task
from lagrpo.tasks import RowTask, load_task
from lagrpo.tasks.columns import plain
from lagrpo.tasks.data import hold_out
from lagrpo.types import JsonObject

Rows = list[JsonObject]


def write_lines(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: Rows) -> Path:
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


SOURCES: dict[str, Callable[[Path, Rows], Any]] = {
    "jsonl": lambda folder, rows: write_lines(folder / "rows.jsonl", rows),
    "csv": lambda folder, rows: write_csv(folder / "rows.csv", rows),
    "parquet": lambda folder, rows: write_parquet(folder / "rows.parquet", rows),
    "list": lambda folder, rows: rows,
    "frame": lambda folder, rows: pd.DataFrame(rows),
    "dataset": lambda folder, rows: datasets.Dataset.from_list(rows),
}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def load(data: Any, seed: int = 0, **options: Any) -> RowTask:
    """The task `custom` with this data, as `lagrpo.train` and the command line load it."""
    table: JsonObject = {"name": "custom", "rewards": ["exact"], **options}
    task: Any
    if isinstance(data, Path):
        task = load_task(task_settings(**table, data=str(data)), seed)
    else:
        task = build_task(load_settings({"task": table, "run": {"seed": seed}}), data, None)
    return task


def questions(task: RowTask, split: str) -> list[str]:
    return [task.prompt(split, n).messages[-1]["content"] for n in range(task.size(split))]


def answers(task: RowTask) -> set[object]:
    prompts = [
        task.prompt(split, n) for split in ("train", "test") for n in range(task.size(split))
    ]
    return {json.dumps(prompt.answer) for prompt in prompts}


# Texts and lists


BINARY: dict[str, pa.DataType] = {
    "binary": pa.binary(),
    "large binary": pa.large_binary(),
    "fixed size": pa.binary(1),
    "dictionary": pa.dictionary(pa.int32(), pa.binary()),
}


@pytest.mark.parametrize("kind", BINARY.values(), ids=BINARY)
def test_text_that_parquet_stores_as_binary_is_decoded(tmp_path, kind):
    digits = [str(n).encode() for n in range(10)]
    table = pa.table({"prompt": [f"{n}?" for n in range(10)], "answer": pa.array(digits, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert answers(load(tmp_path / "a.parquet")) == {f'"{n}"' for n in range(10)}


@pytest.mark.parametrize("name", ["parquet", "list", "frame", "dataset"])
def test_binary_text_within_messages_and_fields_is_decoded(tmp_path, name):
    rows = [
        {
            "prompt": [{"role": b"user", "content": f"Größe {n}?".encode()}],
            "reward_model": {"ground_truth": b"5"},
            "extra": [b"a"],
        }
        for n in range(10)
    ]
    task = load(SOURCES[name](tmp_path, rows))
    prompt = task.prompt("train", 0)
    assert prompt.messages == ({"role": "user", "content": "Größe 0?"},)
    assert prompt.answer == "5"
    assert prompt.row is not None
    assert prompt.row["extra"] == ["a"]


@pytest.mark.parametrize("name", ["parquet", "list", "frame", "dataset"])
def test_bytes_that_are_no_text_are_rejected_as_an_answer_and_stay_bytes_elsewhere(tmp_path, name):
    rows: Rows = [{"prompt": f"{n}?", "answer": "5", "image": b"\x89PNG"} for n in range(10)]
    row = load(SOURCES[name](tmp_path, rows)).prompt("train", 0).row
    assert row is not None
    assert row["image"] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"row 1: .*bytes"):
        load(SOURCES[name](tmp_path, rows), answer_column="image")


def test_frame_of_a_file_of_verl_has_the_rows_of_the_file(tmp_path):
    rows: Rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"index": n, "tests": [[n], [1]]},
        }
        for n in range(10)
    ]
    file = write_parquet(tmp_path / "verl.parquet", rows)
    tasks = [load(file), load(pd.read_parquet(file)), load(datasets.Dataset.from_list(rows))]
    for index in range(9):
        first, *others = [task.prompt("train", index) for task in tasks]
        for other in others:
            assert (other.messages, other.answer, other.row) == (
                first.messages,
                first.answer,
                first.row,
            )


ARRAYS: dict[str, tuple[Any, Any]] = {
    "array": (np.array(["5", "five"]), ["5", "five"]),
    "array of arrays": (np.array([np.array([1]), np.array([2, 3])], dtype=object), [[1], [2, 3]]),
    "array in a table": ({"a": np.array([1.5])}, {"a": [1.5]}),
    "number": (np.float32(0.5), 0.5),
    "text": (np.str_("5"), "5"),
    "set": ({"b", "a"}, ["a", "b"]),
    "NaN in a list": ([1.0, float("nan")], [1.0, None]),
    "bytes in a list": ([b"5"], ["5"]),
}


@pytest.mark.parametrize(("value", "expected"), ARRAYS.values(), ids=ARRAYS)
def test_value_of_another_library_is_a_value_of_json(value, expected):
    assert plain(value) == expected


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_dataset_with_another_format_has_the_same_rows(kind):
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(10)]
    task = load(datasets.Dataset.from_list(rows).with_format(kind))
    assert [task.prompt("train", n).row for n in range(9)] == [
        row for row in rows if row["prompt"] in questions(task, "train")
    ]


def test_dataset_with_a_function_for_its_rows_has_the_rows_of_the_function():
    raw = datasets.Dataset.from_list([{"number": n} for n in range(10)])
    rows = raw.with_transform(
        lambda columns: {
            "prompt": [f"{n} + 1?" for n in columns["number"]],
            "answer": [str(n + 1) for n in columns["number"]],
        }
    )
    task = load(rows)
    assert (task.size("train"), task.size("test")) == (9, 1)
    assert answers(task) == {f'"{n}"' for n in range(1, 11)}


def test_each_frame_of_a_dict_is_a_split():
    train = pd.DataFrame({"prompt": ["1?", "2?"], "answer": [1, 2]})
    task = load({"train": train, "test": train.head(1)})
    assert (task.size("train"), task.size("test")) == (2, 1)


# Answers


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("position", [0, 4], ids=["first", "fifth"])
def test_row_without_an_answer_is_left_out_wherever_it_stands(tmp_path, caplog, name, position):
    rows: Rows = [{"prompt": f"{n}?", "answer": f"a{n}"} for n in range(10)]
    has_types = name in ("parquet", "dataset")  # there every row has every column
    rows.insert(position, {"prompt": "none?"} | ({"answer": None} if has_types else {}))
    source = SOURCES[name]
    for answer_column in (None, "answer"):
        caplog.clear()
        task = load(source(tmp_path, rows), answer_column=answer_column)
        assert answers(task) == {f'"a{n}"' for n in range(10)}
        assert "1 of the 11 rows of the train split of" in caplog.text


VERL_WITHOUT: dict[str, JsonObject] = {
    "no column": {},
    "null column": {"reward_model": None},
    "no field": {"reward_model": {}},
    "null field": {"reward_model": {"ground_truth": None}},
}


@pytest.mark.parametrize("without", VERL_WITHOUT.values(), ids=VERL_WITHOUT)
def test_row_without_an_answer_in_verls_column_is_left_out(tmp_path, without):
    rows: Rows = [{"prompt": f"{n}?", "reward_model": {"ground_truth": "5"}} for n in range(10)]
    task = load(write_lines(tmp_path / "rows.jsonl", [{"prompt": "none?", **without}, *rows]))
    assert answers(task) == {'"5"'}


def test_answer_of_verl_counts_where_the_column_answer_is_null(tmp_path):
    rows = [
        {"prompt": f"{n}?", "answer": None, "reward_model": {"ground_truth": "5"}}
        for n in range(10)
    ]
    assert answers(load(write_parquet(tmp_path / "rows.parquet", rows))) == {'"5"'}


MISSING: JsonObject = {
    "NaN": [float("nan"), 1.5],
    "NA": pd.array([pd.NA, 1], dtype="Int64"),
    "NaT": [pd.NaT, pd.Timestamp("2020-01-02")],
    "list of nothing": [[None, " "], ["1"]],
}


@pytest.mark.parametrize("pair", MISSING.values(), ids=MISSING)
def test_missing_value_of_a_frame_is_no_answer(pair):
    frame = pd.DataFrame({"prompt": ["none?", "some?"], "answer": pair})
    task = load(frame, options={"test_split": "train"})
    assert questions(task, "train") == ["some?"]


def test_answer_is_the_row_only_if_no_row_of_any_split_has_a_column_for_it():
    rows = [{"prompt": f"{n}?", "level": n} for n in range(3)]
    assert load({"train": rows, "test": rows}).prompt("test", 1).answer == rows[1]
    with pytest.raises(ValueError, match=r"the test split of data, row 1: no column 'answer'"):
        load({"train": [{"prompt": "1?", "answer": "1"}], "test": rows})


def test_row_of_gsm8k_without_an_answer_is_left_out(tmp_path):
    rows = [{"question": "none?"}, {"question": "1?", "answer": "#### 1"}]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "test.jsonl", rows[::-1])
    task = load_task(task_settings("gsm8k", data=str(tmp_path)), seed=0)
    assert [(task.size(split), task.prompt(split, 0).answer) for split in ("train", "test")] == [
        (1, "1"),
        (1, "1"),
    ]


# Files


@pytest.mark.parametrize("name", ["d[1].jsonl", "d?.jsonl", "d*.jsonl", "[d]1.jsonl"])
def test_existing_file_is_the_file_even_if_its_name_is_a_pattern(tmp_path, name):
    for other in (name, "d1.jsonl", "d12.jsonl"):
        rows = [{"prompt": f"{other} {n}", "answer": "1"} for n in range(4)]
        write_lines(tmp_path / other, rows)
    assert {question[:-2] for question in questions(load(tmp_path / name), "train")} == {name}


def test_pattern_in_an_existing_directory_with_brackets_is_of_this_directory(tmp_path):
    for folder in ("v[1]", "v1"):
        (tmp_path / folder).mkdir()
        rows = [{"prompt": f"{folder} {n}", "answer": "1"} for n in range(4)]
        write_lines(tmp_path / folder / "rows.jsonl", rows)
    task = load(tmp_path / "v[1]" / "*.jsonl")
    assert {question[:-2] for question in questions(task, "train")} == {"v[1]"}
    assert completion_files([tmp_path / "v[1]" / "*.jsonl"]) == [tmp_path / "v[1]" / "rows.jsonl"]


@pytest.mark.parametrize("column", ["prompt", "answer", "proof"])
def test_csv_field_of_any_length_is_read(tmp_path, column):
    rows = [{"prompt": f"{n}?", "answer": f"{n}", "proof": "x"} for n in range(2)]
    rows[1][column] = "y" * 200_000
    limit = csv.field_size_limit()
    task = load(write_csv(tmp_path / "rows.csv", rows), options={"test_split": "rows"})
    row = task.prompt("train", 1).row
    assert row is not None
    assert row[column] == "y" * 200_000
    assert csv.field_size_limit() == limit


DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "quote is not closed": (
        "a.csv",
        b'prompt,answer\n1?,1\n2?,"2\n',
        "a.csv, row 2: this is not CSV",
    ),
    "text after a quote": ("a.csv", b'prompt,answer\n"1"?,1\n', "a.csv, row 1: this is not CSV"),
    "Latin-1": ("a.csv", "prompt,answer\nZoë?,1\n".encode("latin-1"), "a.csv: line 2 is not UTF-8"),
    "UTF-16": ("a.jsonl", '{"prompt": 1}'.encode("utf-16"), "a.jsonl: line 1 is not UTF-8"),
    "not gzip": ("a.jsonl.gz", b"{}", "a.jsonl.gz cannot be read: .* download it again"),
    "not Parquet": ("a.parquet", b"{}", "a.parquet cannot be read: .* download it again"),
    "list that ends early": (
        "a.json",
        b'[{"prompt": "1?"},\n',
        "a.json: this is not JSON: .*line 2",
    ),
    "single quotes": (
        "a.jsonl",
        b"{'prompt': '1?'}\n",
        "a.jsonl, line 1: this is not JSON: .* near",
    ),
    "several lines": ("a.jsonl", b'{\n"prompt": "1?"}\n', "a.jsonl, line 1: .* one line of JSON"),
}


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_rejected_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


# Rows that are held out


def test_hold_out_keeps_rows_with_equal_prompts_together():
    prompts = [n % 30 for n in range(90)]
    training, held_out = hold_out(prompts, seed=5)
    assert sorted(training + held_out) == list(range(90))
    assert len(held_out) == 9  # 3 of 30 prompts, 3 rows each
    assert not {prompts[row] for row in training} & {prompts[row] for row in held_out}


def test_hold_out_of_different_prompts_chooses_a_tenth_of_the_rows_at_most_1000():
    assert [len(hold_out(range(count), seed=0)[1]) for count in (2, 19, 20, 20_000)] == [
        1,
        1,
        2,
        1000,
    ]


def test_hold_out_depends_on_the_seed_and_on_the_order_of_first_occurrence_alone():
    once, repeated = list("abcdefghijklmnopqrst"), list("abcdefghijklmnopqrstsrqa")
    held_out_prompts = {seed: {once[row] for row in hold_out(once, seed)[1]} for seed in range(5)}
    assert len({frozenset(prompts) for prompts in held_out_prompts.values()}) > 1
    for seed, prompts in held_out_prompts.items():
        assert {repeated[row] for row in hold_out(repeated, seed)[1]} == prompts


@every_source
def test_no_prompt_is_both_trained_on_and_tested(tmp_path, caplog, source):
    rows: Rows = [{"prompt": "x", "q": f"{n % 4}?", "answer": f"a{n}"} for n in range(40)]
    task = load(source(tmp_path, rows), prompt_column="q", system_prompt="Be brief.")
    train, test = questions(task, "train"), questions(task, "test")
    assert (len(train), len(test)) == (30, 10)
    assert len({*train}) == 3
    assert len({*test}) == 1
    assert not {*train} & {*test}
    assert "1 of 4 different prompts, chosen by seed 0" in caplog.text


def test_spellings_of_one_prompt_are_equal(tmp_path):
    message = {"role": "user", "content": "2 + 3?"}
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    spellings: list[Any] = [
        "2 + 3?",
        [message],
        json.dumps([message]),
        [{"content": "2 + 3?", "role": "user", "name": None}],
        [{"role": "user", "content": parts}],
    ]
    rows = [{"prompt": prompt, "answer": "5"} for prompt in [*spellings, "other?"]]
    for seed in range(4):
        task = load(write_lines(tmp_path / "rows.jsonl", rows), seed=seed)
        assert {task.size("train"), task.size("test")} == {1, 5}


def test_rows_with_one_prompt_are_for_training_and_for_testing(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", [{"prompt": "1?", "answer": "1"}] * 4)
    task = load(file)
    assert (task.size("train"), task.size("test")) == (4, 4)


def test_evaluation_of_weights_drops_the_prompts_that_the_run_dropped(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[run]\nseed = 3\n[rollout]\noverlong_prompts = "drop"\nmax_prompt_length = 20\n',
        encoding="utf-8",
    )
    config = config_of_weights(str(tmp_path / "weights" / "final"))
    assert config is not None
    settings = settings_for_eval(config)
    assert settings["rollout.overlong_prompts"] == "drop"
    assert (settings["rollout.max_prompt_length"], settings["run.seed"]) == (20, 3)
