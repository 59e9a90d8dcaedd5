"""Rows of tasks from files and hub datasets: formats, splits, and errors that name the place."""

from __future__ import annotations

import csv
import gzip
import json
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_tasks import task_settings

from lagrpo.data.fingerprint import value_text
from lagrpo.rewards.reward import Rewards
from lagrpo.tasks import RowTask, custom, load_task
from lagrpo.tasks.files import read_rows
from lagrpo.tasks.splits import find_splits
from lagrpo.types import JsonObject

ROWS: list[JsonObject] = [{"q": f"{n} + 1?", "a": str(n + 1), "level": n % 3} for n in range(30)]


def write(path: Path, rows: list[JsonObject] = ROWS) -> str:
    """A file of these rows, in the format of its ending."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    path.parent.mkdir(exist_ok=True)
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        if ".csv" in path.suffixes:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.write(
                json.dumps(rows)
                if ".json" in path.suffixes
                else "".join(json.dumps(r) + "\n" for r in rows)
            )
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(data: Path | str, **other: Any) -> RowTask:
    base = {"data": str(data), "prompt_column": "q", "answer_column": "a", "rewards": ["number"]}
    task = load_task(task_settings("custom", **base | other), seed=4)
    assert isinstance(task, RowTask)
    return task


def test_json_object_with_data_is_its_rows(tmp_path):
    (tmp_path / "rows.json").write_text(
        json.dumps({"version": "1.1", "data": ROWS}), encoding="utf-8"
    )
    assert load(tmp_path / "rows.json").size("train") == 27


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
def test_file_of_each_format_is_read_and_a_tenth_held_out(tmp_path, ending, caplog):
    task = load(write(tmp_path / f"rows.{ending}"))
    assert (task.size("train"), task.size("test")) == (27, 3)
    assert "training on 27 of its 30 rows, testing on the other 3 (chosen by seed 4)" in caplog.text
    prompts = [
        task.prompt(split, index)
        for split in ("train", "test")
        for index in range(task.size(split))
    ]
    assert {(p.messages[0]["content"], p.answer) for p in prompts} == {
        (row["q"], row["a"]) for row in ROWS
    }
    assert prompts[0].row is not None
    assert int(prompts[0].row["level"]) in (0, 1, 2)
    unit = {"json": "item", "csv": "row", "parquet": "row"}.get(ending, "line")
    number = int(prompts[5].answer) - 1
    assert prompts[5].place == f"{tmp_path}/rows.{ending}, {unit} {number + 1}"


def test_directory_has_the_splits_that_its_files_are_named_after(tmp_path, monkeypatch):
    write(tmp_path / "train.jsonl", ROWS[:20])
    write(tmp_path / "test.csv", ROWS[20:25])
    write(tmp_path / "hard.parquet", ROWS[25:])
    assert [load(tmp_path).size(split) for split in ("train", "test")] == [20, 5]
    assert load(tmp_path, options={"train_split": "hard", "test_split": "train"}).size("test") == 20
    with pytest.raises(
        ValueError, match=r"task.options.test_split: no 'hart'.*Did you mean 'hard'\?"
    ):
        load(tmp_path, options={"test_split": "hart"})
    write(
        tmp_path / "gsm8k_train.jsonl",
        [{"question": "999 + 1?", "answer": "It is 1000.\n#### 1,000"}],
    )
    write(tmp_path / "gsm8k_test.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    monkeypatch.setenv("LAGRPO_DATA", str(tmp_path))
    prompt = load_task(task_settings("gsm8k"), seed=0).prompt("train", 0)
    assert (prompt.answer, prompt.messages[0]["content"][:16]) == ("1,000", "999 + 1?\n\nReason")
    write(tmp_path / "train.csv")
    with pytest.raises(ValueError, match="one for each split"):
        load(tmp_path)


def test_rows_without_an_answer_are_left_out_and_logged(tmp_path, caplog):
    without = [{"q": "?", "a": nothing} for nothing in (None, float("nan"), " ", [])]
    assert load(write(tmp_path / "rows.jsonl", [*ROWS, *without])).size("train") == 27
    assert "4 of the 34 rows of" in caplog.text
    rows = [{"q": f"{n}?", "answer": ("1", None)[n % 2]} for n in range(10)]
    assert load(write(tmp_path / "rows.jsonl", rows), answer_column=None).size("train") == 4
    with pytest.raises(ValueError, match="has an answer"):
        load(write(tmp_path / "rows.jsonl", [{"q": "?", "a": ""}]))


def test_without_an_answer_column_the_answer_is_the_row(tmp_path, monkeypatch):
    (tmp_path / "row_rewards.py").write_text(
        "def reward(completion, answer):\n    return answer['level']\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    task = load(write(tmp_path / "rows.jsonl"), answer_column=None, rewards=["row_rewards:reward"])
    answer = task.prompt("train", 2).answer
    assert set(answer) == {"q", "a", "level"}
    assert isinstance(task.reward, Rewards)
    assert task.reward.parts[0].function("", answer) == answer["level"]


def test_shards_and_patterns_are_splits_and_a_saved_dataset_loads(tmp_path):
    for n in range(3):
        write(tmp_path / "shards" / f"train-0000{n}-of-00003.parquet", ROWS[10 * n : 10 * n + 10])
    write(tmp_path / "shards" / "test-00000-of-00001.parquet", ROWS[:5])
    assert [load(tmp_path / "shards").size(split) for split in ("train", "test")] == [30, 5]
    assert load(tmp_path / "shards" / "train-*.parquet").size("train") == 27
    write(tmp_path / "shards" / "test-00000-of-00001.parquet", [{"q": "?"}])
    with pytest.raises(ValueError, match=r"test-00000-of-00001.parquet, row 1: no column 'a'"):
        load(tmp_path / "shards")
    for name in ("train.jsonl", "test-00001-of-00003.jsonl"):  # neither a shard nor all of them
        write(tmp_path / "shards" / name)
        with pytest.raises(ValueError, match="shards"):
            load(tmp_path / "shards")
        (tmp_path / "shards" / name).unlink()
    write(
        tmp_path / "old" / "train[1]-00000-of-00001-0123456789abcdef.jsonl"
    )  # as the hub named shards before
    assert load(next((tmp_path / "old").iterdir())).size("train") == 27
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "test": saved.select(range(4))}).save_to_disk(
        tmp_path / "both"
    )
    assert [load(tmp_path / "saved").size("train"), load(tmp_path / "both").size("test")] == [27, 4]


def test_answer_column_can_be_a_path_into_a_struct(tmp_path):
    rows = [{"q": f"{n}?", "reward_model": {"ground_truth": str(n)}} for n in range(20)]
    rows.append({"q": "1?", "reward_model": {"ground_truth": None}})  # type: ignore[dict-item]
    for data in (write(tmp_path / "a.parquet", rows), write(tmp_path / "a.jsonl", rows)):
        task = load(data, answer_column="reward_model.ground_truth")
        answers = {
            task.prompt(split, n).answer
            for split in ("train", "test")
            for n in range(task.size(split))
        }
        assert answers == {str(n) for n in range(20)}
        assert isinstance(
            load(data, answer_column=None).prompt("train", 0).answer, str
        )  # verl's column
    with pytest.raises(ValueError, match=r"no column 'ground_trut'.*Did you mean 'ground_truth'"):
        load(tmp_path / "a.jsonl", answer_column="reward_model.ground_trut")


def test_messages_can_be_json_or_have_parts_of_text(tmp_path):
    parts: Any = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    plain = [messages[0], {"role": "user", "content": "1 + 1?", "name": None}]
    forms = (messages, plain, json.dumps(messages), str(messages))  # the last as pandas writes it
    for name, prompt in zip(("a.jsonl", "a.parquet", "b.jsonl", "b.csv"), forms, strict=True):
        data = write(tmp_path / name, [{"q": prompt, "a": "2"}])
        task = load(data, options={"test_split": name[0]})
        assert task.prompt("train", 0).messages == (
            messages[0],
            {"role": "user", "content": "1 + 1?"},
        )
    with pytest.raises(ValueError, match=r"line 1: .*not JSON"):
        load(write(tmp_path / "rows.jsonl", [{"q": str(messages)[:-1], "a": "2"}]))
    for parts[1] in ({"type": "image_url", "image_url": "x"}, {"type": "text"}):
        with pytest.raises(ValueError, match=r"line 1: .*parts of type text"):
            load(write(tmp_path / "rows.jsonl", [{"q": messages, "a": "2"}] * 4))


ADD = {"type": "function", "function": {"name": "add", "parameters": {"x": None}}}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        pytest.param([ADD], (ADD,), id="functions"),
        pytest.param(json.dumps([ADD]), (ADD,), id="JSON text"),
        pytest.param([json.dumps(ADD)], (ADD,), id="list of JSON texts"),
        pytest.param(ADD, (ADD,), id="one function"),
        pytest.param([ADD["function"]], (ADD["function"],), id="without type"),
        pytest.param([], (), id="empty list"),
        pytest.param(None, (), id="null"),
        pytest.param("", (), id="empty text"),
        pytest.param("[]", (), id="empty list as text"),
    ],
)
def test_column_tools_has_the_functions_of_a_prompt(tmp_path, tools, expected):
    data = write(tmp_path / "a.jsonl", [{**row, "tools": tools} for row in ROWS])
    assert load(data).prompt("train", 0).tools == expected


def test_functions_in_parquet_have_no_nulls_of_other_rows(tmp_path):
    rows = [
        {**row, "tools": [{"name": name, "parameters": {name: "number"}}]}
        for row, name in zip(ROWS, "xy" * 15, strict=True)
    ]
    prompt = load(write(tmp_path / "a.parquet", rows), options={"test_split": "a"}).prompt(
        "train", 0
    )
    assert prompt.tools == ({"name": "x", "parameters": {"x": "number"}},)


@pytest.mark.parametrize("tools", ["hammer, saw", [1], [{"type": "function"}]], ids=repr)
def test_column_tools_without_functions_is_rejected(tmp_path, tools):
    data = write(tmp_path / "a.jsonl", [{**row, "tools": tools} for row in ROWS])
    with pytest.raises(ValueError, match=r"a\.jsonl, \w+ 1: its column 'tools'"):
        load(data)


@pytest.mark.parametrize(
    ("column", "value", "warned"),
    [
        pytest.param("images", ["a.png"], True, id="images"),
        pytest.param("audio", "a.wav", True, id="audio"),
        pytest.param("functions", [ADD], True, id="functions"),
        pytest.param("images", [], False, id="no images"),
        pytest.param("video", None, False, id="null"),
    ],
)
def test_column_that_the_model_does_not_see_gives_a_warning(
    tmp_path, caplog, column, value, warned
):
    load(write(tmp_path / "a.jsonl", [{**row, column: value} for row in ROWS]))
    assert (f"column {column!r}" in caplog.text) == warned


def ending_with(texts: list[str], answer: object = "7") -> list[JsonObject]:
    """Rows with prompts that end with these messages of the assistant."""
    return [
        {
            "q": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": text}],
            "a": answer,
        }
        for n, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        pytest.param(["The answer is 7."] * 9, "7", id="sentence"),
        pytest.param(["7"] * 9, 7, id="number"),
        pytest.param(["#### 7"] * 9, "3 + 4 = 7 #### 7", id="answer of GSM8K"),
        pytest.param(["It is seven."] * 9, ["7", "seven"], id="one of several answers"),
        pytest.param(["It is 7.", "It is 7.", "It is "], "7", id="most prompts"),
    ],
)
def test_prompts_that_end_with_their_answer_are_rejected(tmp_path, texts, answer):
    data = write(tmp_path / "a.jsonl", ending_with(texts, answer))
    with pytest.raises(ValueError, match=r"a\.jsonl, \w+ 1: .*end the prompt before it"):
        load(data)


def test_prompt_that_ends_with_a_call_is_rejected(tmp_path):
    (row,) = ending_with([""])
    row["q"][-1]["tool_calls"] = [{"function": {"name": "add", "arguments": {}}}]
    with pytest.raises(ValueError, match="ends with a call"):
        load(write(tmp_path / "a.jsonl", [row] * 9))


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(["It is "] * 9, id="beginning of an answer"),
        pytest.param(["<think>\n"] * 9, id="tag"),
        pytest.param(["Step 7:", *["Let me see."] * 8], id="answer by chance"),
        pytest.param(["It is 17."] * 9, id="answer within a number"),
    ],
)
def test_prompts_that_begin_the_answer_give_a_warning(tmp_path, caplog, texts):
    load(write(tmp_path / "a.jsonl", ending_with(texts)))
    assert "end with a message of the assistant" in caplog.text


COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pa.Table.from_pylist(ROWS), id="table of pyarrow"),
        pytest.param(pa.Table.from_pylist(ROWS).to_batches()[0], id="batch of pyarrow"),
        pytest.param(COLUMNS, id="columns"),
        pytest.param({name: np.array(values) for name, values in COLUMNS.items()}, id="arrays"),
        pytest.param({"train": COLUMNS}, id="columns of a split"),
        pytest.param({"train": pa.Table.from_pylist(ROWS)}, id="table of a split"),
        pytest.param(datasets.Dataset.from_list(ROWS), id="dataset"),
    ],
)
def test_table_in_memory_has_the_rows_of_a_list(data):
    options = {"prompt_column": "q", "answer_column": "a"}
    expected = custom.load(0, data=ROWS, **options)
    task = custom.load(0, data=data, **options)
    assert task.size("train") == expected.size("train") == 27
    for index in range(27):
        prompt = task.prompt("train", index)
        assert prompt.messages == expected.prompt("train", index).messages
        assert prompt.answer == expected.prompt("train", index).answer


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param({"q": ["1", "2"], "a": ["1"]}, "different lengths: q 2, a 1", id="lengths"),
        pytest.param(5, "int, not rows", id="number"),
    ],
)
def test_data_that_are_not_rows_are_rejected(data, problem):
    with pytest.raises(ValueError, match=problem):
        custom.load(0, data=data)


def test_arguments_of_tool_calls_lose_the_nulls_of_parquet(tmp_path):
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("f", "g")]
    messages = [
        {"role": "assistant", "tool_calls": calls, "content": None},
        {"role": "tool", "content": "1"},
    ]
    data = write(tmp_path / "a.parquet", [{"q": messages, "a": "2"}])
    task = load(data, options={"test_split": "a"})
    assert task.prompt("train", 0).messages[0] == {"role": "assistant", "tool_calls": calls}


def test_arguments_as_json_text_become_an_object_and_keep_their_nulls(tmp_path):
    """OpenAI's API writes text; Hermes' data have name and arguments alone. The third text is no
    object."""
    read = {"x": "2+3", "y": None, "z": {"w": None}}
    arguments = [json.dumps(read), "", "2 +", read]
    calls = [
        *({"id": None, "function": {"name": "f", "arguments": text}} for text in arguments),
        {"name": "f", "arguments": json.dumps(read)},
    ]
    messages: list[Any] = [
        {"role": "assistant", "tool_calls": calls, "content": None},
        {"role": "tool", "content": "5"},
    ]
    expected = [read, {}, "2 +", read, read]
    for name in ("a.jsonl", "a.parquet"):
        rows = [{"q": json.dumps(messages), "a": "5"}] * 4 + [{"q": "another", "a": "5"}] * 4
        message: Any = load(write(tmp_path / name, rows)).prompt("train", 0).messages[0]
        if name == "a.parquet":  # the object of a Parquet column may have nulls of other rows
            expected[3] = {"x": "2+3", "z": {}}
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == expected
        assert all("id" not in call for call in message["tool_calls"])
    messages[0]["tool_calls"] = [{"function": "f"}]
    rows = [{"q": messages, "a": "2"}] * 4 + [{"q": "another", "a": "2"}]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=r"line 1: a message has the call \{'function': 'f'\}"):
        load(path)


def test_dates_and_decimals_as_answers_are_their_texts(tmp_path):
    for answer, text in (
        (date(2020, 1, 2), "2020-01-02"),
        (Decimal("1.50"), "1.50"),
        (["a", None], ["a", None]),
    ):
        pq.write_table(pa.Table.from_pylist([{"q": "?", "a": answer}]), tmp_path / "a.parquet")
        task = load(tmp_path / "a.parquet", options={"test_split": "a"})
        assert task.prompt("train", 0).answer == text


@pytest.mark.parametrize("kind", ["parquet", "data frame", "dataset"])
@pytest.mark.parametrize(
    ("values", "answers"),
    [
        pytest.param(pa.array([0.1, 1e-5, 16777216.0], pa.float32()), [0.1, 1e-5, 16777216.0]),
        pytest.param(pa.array(np.array([0.1, 65504], np.float16)), [0.1, 65504.0]),
        pytest.param(pa.array([0.1, 1e22, -0.0]), [0.1, 1e22, -0.0]),
        pytest.param(pa.array([[0.1, 0.2]], pa.list_(pa.float32())), [[0.1, 0.2]]),
        pytest.param(pa.array([2**53 + 1]), [2**53 + 1]),
        pytest.param(pa.array([Decimal("0.00000010")]), ["0.00000010"]),
        pytest.param(pa.array([True, False]), [True, False]),
    ],
    ids=["float32", "float16", "float64", "list of float32", "int64", "decimal", "bool"],
)
def test_number_as_the_answer_is_the_one_that_was_written(tmp_path, values, answers, kind):
    table = pa.table({"prompt": [f"{n}?" for n in range(len(values))], "answer": values})
    data: Any = {"data frame": table.to_pandas, "dataset": lambda: datasets.Dataset(table)}.get(
        kind, lambda: str(tmp_path / "train.parquet")
    )()
    if kind == "parquet":
        pq.write_table(table, data)
    task = custom.load(0, data=data, test_split="train")
    assert [task.prompt("train", n).answer for n in range(task.size("train"))] == answers


def test_rewards_get_the_written_number_and_digests_have_the_stored_one():
    rows = [{"prompt": "?", "answer": np.float32(0.1), "levels": np.array([0.1], np.float32)}]
    row = custom.load(0, data=rows * 2, train_split="train", test_split="train").rows["train"][0]
    assert (row["answer"], row["levels"]) == (0.1, [0.1])
    stored = float(np.float32(0.1))
    assert value_text(dict(row)) == value_text(rows[0] | {"answer": stored, "levels": [stored]})


def test_numpy_scalars_as_answers_are_the_numbers_that_were_written():
    values = [np.float32(0.1), np.float16(0.1), np.int64(5), np.bool_(True), np.float32(7)]
    rows = [{"prompt": f"{n}?", "answer": value} for n, value in enumerate(values)]
    task = custom.load(0, data=rows, test_split="train")
    assert [task.prompt("train", n).answer for n in range(5)] == [0.1, 0.1, 5, True, 7.0]


def test_class_labels_are_read_as_their_names(tmp_path):
    features = datasets.Features(
        {"q": datasets.Value("string"), "a": datasets.ClassLabel(names=["bad", "good"])}
    )
    rows = [{"q": f"{n}?", "a": n % 3 - 1} for n in range(30)]
    datasets.Dataset.from_list(rows, features).save_to_disk(tmp_path / "saved")
    task = load(tmp_path / "saved")
    assert {task.prompt("train", n).answer for n in range(task.size("train"))} == {"bad", "good"}


def test_wrong_settings_are_rejected(tmp_path):
    for other, message in [
        (
            {"prompt_column": "question"},
            "line 1: no column 'question'. The columns are q, a, level",
        ),
        ({"answer_column": "levels"}, r"no column 'levels'.*Did you mean 'level'\?"),
        ({"prompt_column": None}, "set task.prompt_column; the columns are q, a, level"),
        (
            {"prompt_column": "level"},
            "line 1: its prompt is 0: a prompt is a text, or a list of messages",
        ),
        ({"rewards": []}, "needs task.rewards: exact, length"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(write(tmp_path / "rows.jsonl"), **other)


GOOD = json.dumps(ROWS[0]).encode() + b"\n"


def test_file_loads_or_is_rejected_in_one_line_with_the_place(tmp_path):
    for file, content, rows in [
        ("a.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r\n \n" + GOOD[:-1], 2),
        ("a.jsonl", json.dumps({"q": "1\u2028?", "a": "2\x85"}, ensure_ascii=False).encode(), 1),
        ("a.csv", b'q,a\r\n"1\n+ 1?",2\r\n', 1),
        ("a.csv", b"q,a\n1 + 1?\n", r"a.csv, row 1: its number of fields is not the header's"),
        (
            "a.csv",
            b"q,a,a\n1 + 1?,2,3\n",
            r"a.csv cannot be read: its header names a column twice: q, a, a",
        ),
        ("a.csv", b"q,a\n ,2\n", r"a.csv, row 1: its prompt is ' '"),
        ("a.jsonl", b"[" + GOOD + b",\n" + GOOD + b"]", 2),
        ("a.json", b'{"train":\n[]}', r"a.json, item 1: no column 'a'. The columns are train"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", GOOD + b"\n" + GOOD[:20] + b"\n", r"a.jsonl, line 3: this is not JSON"),
        ("a.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-20], "cannot be read"),
        (
            "a.jsonl",
            b"version https://git-lfs.github.com/spec/v1\nsize 9",
            "a.jsonl is a Git LFS pointer",
        ),
        (
            "a.parquet",
            b"version https://git-lfs.github.com/spec/v1\n",
            "a.parquet is a Git LFS pointer",
        ),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
        ("a.txt", GOOD, "name files that end in .jsonl, .json, .csv, .parquet"),
    ]:
        (path := tmp_path / file).write_bytes(content)
        if isinstance(rows, int):
            assert len(read_rows(path)) == rows
        else:
            with pytest.raises(ValueError, match=rows) as error:
                load(path)
            assert str(tmp_path) in str(error.value)
            assert "\n" not in str(error.value)
        path.unlink()


def test_hub_datasets_are_asked_for_their_configuration_and_splits(monkeypatch):
    requests: list[tuple[Any, ...]] = []
    rows = datasets.Dataset.from_list(
        [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(30)]
    )

    def load_dataset(name: str, config: str | None) -> Any:
        requests.append((name, config))
        return {"train": rows, "hard": rows}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for data in ("openai/gsm8k", "openai/gsm8k:socratic"):
        load_task(task_settings("gsm8k", data=data, options={"test_split": "hard"}), seed=0)
    assert requests == [("openai/gsm8k", "main"), ("openai/gsm8k", "socratic")]
    with pytest.raises(
        ValueError,
        match=r"task.options.test_split: no 'gsm8k_test' or 'test'; there are train, hard",
    ):
        load_task(task_settings("gsm8k", data="openai/gsm8k"), seed=0)
    task = load("a/b", prompt_column="question", answer_column="answer")
    assert (task.size("train"), task.size("test")) == (27, 3)


@pytest.mark.parametrize("file", ["data/train.parquet", "main/data/test.jsonl"])
def test_root_of_a_clone_with_data_in_folders_names_them(tmp_path, file):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    (tmp_path / "README.md").touch()
    with pytest.raises(ValueError, match=re.escape(str((tmp_path / file).parent))):
        find_splits(str(tmp_path), hub="owner/name")


def test_split_is_a_list_of_files(tmp_path):
    files = [write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:5])]
    assert find_splits({"train": files}, "owner/name") == {"train": list(map(Path, files))}
