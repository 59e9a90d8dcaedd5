"""Task `gsm8k` on its real files where LAGRPO_DATA has them, else on files of the same form."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import RowTask, load_task
from lagrpo.tasks.gsm8k import score as judge

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
            gold = task.prompt(split, index).answer
            solution, _, number = row["answer"].rpartition("####")
            for answer in (
                row["answer"],
                f"{solution}\nThe answer is ${number.strip()}.00.",
                f"{solution}\\boxed{{{number.strip()} \\text{{ things}}}}",
                f"{solution} In all {number.strip()} things.",
            ):
                assert judge(answer, gold) == 1.0, (answer, gold)
            assert judge(f"{solution}\n#### {number.strip()}1", gold) == 0.0


@given(st.text(max_size=200))
def test_any_answer_gets_a_verdict(answer):
    assert judge(answer, "72") in (0.0, 1.0)


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc =,.\n", max_size=30))
def test_the_gold_number_after_a_marker_is_right_whatever_stands_before(number, before):
    for answer in (f"{before}\n#### {number:,}", f"{before} \\boxed{{{number}}}", f"{before}. The answer is {number}."):
        assert judge(answer, f"work\n#### {number:,}") == 1.0
        assert judge(answer, number) == 1.0
