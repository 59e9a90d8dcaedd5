"""Task `gsm8k` on its real files where LAGRPO_DATA has them, else on files of the same form; and the files' errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import RowTask, load_task
from lagrpo.tasks.gsm8k import judge

MADE_UP = [
    {"question": f"Ann has {n} boxes of {n + 2} pens. How many pens?",
     "answer": f"There are {n} * {n + 2} = <<{n}*{n + 2}={n * (n + 2)}>>{n * (n + 2)} pens.\n#### {n * (n + 2):,}"}
    for n in range(5, 60)
]  # fmt: skip


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path: Path) -> str:
    real = Path(os.environ.get("LAGRPO_DATA", "nowhere"))
    if (real / "gsm8k_train.jsonl").is_file():
        return str(real)
    write_rows(tmp_path / "gsm8k_train.jsonl", MADE_UP)
    write_rows(tmp_path / "gsm8k_test.jsonl", MADE_UP[:20])
    return str(tmp_path)


def test_every_worked_solution_is_judged_right_by_each_way_of_giving_a_number(data):
    task = load_task(TaskSettings(name="gsm8k", data=data), seed=0)
    assert isinstance(task, RowTask)
    for split in ("train", "test"):
        for index, row in enumerate(task.rows[split]):
            gold = task.prompt(split, index).gold
            solution, _, number = row["answer"].rpartition("####")
            for answer in (
                row["answer"],
                f"{solution}\nThe answer is ${number.strip()}.00.",
                f"{solution}\\boxed{{{number.strip()} \\text{{ things}}}}",
                f"{solution} In all {number.strip()} things.",
            ):
                assert judge(answer, gold) == 1.0, (answer, gold)
            assert judge(f"{solution}\n#### {number.strip()}1", gold) == 0.0


def test_the_prompt_is_the_question_with_the_wording(data):
    task = load_task(TaskSettings(name="gsm8k", data=data, system_prompt="Be brief."), seed=0)
    prompt = task.prompt("test", 3)
    assert isinstance(task, RowTask)
    assert prompt.key == 3
    assert [turn["role"] for turn in prompt.messages] == ["system", "user"]
    assert prompt.messages[1]["content"].startswith(task.rows["test"][3]["question"])
    assert task.rows["test"][3]["answer"].endswith(f"#### {prompt.gold}")


def test_the_data_is_found_through_the_environment(tmp_path, monkeypatch):
    write_rows(tmp_path / "gsm8k_train.jsonl", MADE_UP)
    write_rows(tmp_path / "gsm8k_test.jsonl", MADE_UP[:3])
    monkeypatch.setenv("LAGRPO_DATA", str(tmp_path))
    assert load_task(TaskSettings(name="gsm8k"), seed=0).size("test") == 3


def test_splits_can_be_named(tmp_path):
    write_rows(tmp_path / "gsm8k_train.jsonl", MADE_UP)
    write_rows(tmp_path / "mine.jsonl", MADE_UP[:7])
    task = load_task(TaskSettings(name="gsm8k", data=str(tmp_path), train_split="mine", test_split="train"), seed=0)
    assert (task.size("train"), task.size("test")) == (7, 55)


def test_rows_without_an_answer_are_left_out_and_that_is_said(tmp_path, caplog):
    write_rows(tmp_path / "gsm8k_train.jsonl", [*MADE_UP, {"question": "?", "answer": None}])
    write_rows(tmp_path / "gsm8k_test.jsonl", MADE_UP)
    assert load_task(TaskSettings(name="gsm8k", data=str(tmp_path)), seed=0).size("train") == 55
    assert "1 of the 56 rows of the train split have no answer" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no gsm8k_train.jsonl or train.jsonl in .*; no .jsonl file is there"),
        ({"gsm8k_train.jsonl": '{"question": "?", "answer": "1"}\n', "gsm8k_tset.jsonl": ""},
         "no gsm8k_test.jsonl or test.jsonl.*there are gsm8k_train.jsonl, gsm8k_tset.jsonl. Did you mean 'gsm8k_tset"),
        ({"gsm8k_train.jsonl": '{"question": "?"\n'}, "gsm8k_train.jsonl, line 1: this is not JSON"),
        ({"gsm8k_train.jsonl": "\n[1]\n"}, "gsm8k_train.jsonl, line 2: this is a list, not an object"),
        ({"gsm8k_train.jsonl": ""}, "gsm8k_train.jsonl has no rows"),
        ({"gsm8k_train.jsonl": '{"questions": "?", "answer": "1"}\n'},
         "the train split has no column 'question'; its columns are questions, answer. Did you mean 'questions'?"),
    ],
)  # fmt: skip
def test_data_that_is_not_as_it_should_be_is_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_task(TaskSettings(name="gsm8k", data=str(tmp_path)), seed=0)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", MADE_UP)
    with pytest.raises(ValueError, match=r"rows.jsonl is a file; this task wants the directory that holds gsm8k_train"):
        load_task(TaskSettings(name="gsm8k", data=str(path)), seed=0)


@given(st.text(max_size=200))
def test_any_answer_gets_a_verdict(answer):
    assert judge(answer, "72") in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc =,.\n", max_size=30))
def test_the_gold_number_after_a_marker_is_right_whatever_stands_before(number, before):
    for answer in (f"{before}\n#### {number:,}", f"{before} \\boxed{{{number}}}", f"{before}. The answer is {number}."):
        assert judge(answer, f"work\n#### {number:,}") == 1.0
        assert judge(answer, number) == 1.0
