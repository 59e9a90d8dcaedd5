"""Task `custom`: its forms of data, its columns, its rewards, its hold-out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.custom import judge as judge_exact
from lagrpo.tasks.files import hold_out

ROWS = [{"q": f"What is {n} + 1?", "a": str(n + 1), "level": n % 3} for n in range(30)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


def write(path: Path, rows: list[dict] = ROWS) -> str:
    if path.suffix in (".jsonl", ".json"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def settings(data: str, **other: object) -> TaskSettings:
    given = {"name": "custom", "data": data, "prompt_column": "q", "answer_column": "a", "reward": "number"} | other
    return TaskSettings.model_validate(given)


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_a_file_of_each_form_with_a_tenth_held_out(tmp_path, ending, caplog):
    task = load_task(settings(write(tmp_path / f"rows.{ending}")), seed=4)
    assert (task.size("train"), task.size("test")) == (27, 3)
    assert "27 rows are for training, 3 drawn by seed 4 are held out for testing" in caplog.text
    prompts = [task.prompt(split, index) for split in ("train", "test") for index in range(task.size(split))]
    assert {(prompt.messages[0]["content"], str(prompt.gold)) for prompt in prompts} == {(r["q"], r["a"]) for r in ROWS}
    assert task.judge("It is 5.", task.prompt("train", 0).gold) in (0.0, 1.0)


def test_the_hold_out_is_a_function_of_the_seed():
    assert hold_out(100, seed=1) == hold_out(100, seed=1)
    assert hold_out(100, seed=1) != hold_out(100, seed=2)
    train, test = hold_out(20_000, seed=0)
    assert len(test) == 1000
    assert sorted(train + test) == list(range(20_000))
    assert [len(rows) for rows in hold_out(2, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match=r"too few"):
        hold_out(1, seed=0)


def test_a_directory_has_the_splits_that_its_files_are_named_after(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:20])
    write(tmp_path / "test.csv", ROWS[20:25])
    write(tmp_path / "hard.parquet", ROWS[25:])
    task = load_task(settings(str(tmp_path)), seed=0)
    assert (task.size("train"), task.size("test")) == (20, 5)
    other = load_task(settings(str(tmp_path), train_split="hard", test_split="train"), seed=0)
    assert (other.size("train"), other.size("test")) == (5, 20)
    with pytest.raises(ValueError, match=r"task.test_split: there is no split 'hart'.*Did you mean 'hard'\?"):
        load_task(settings(str(tmp_path), test_split="hart"), seed=0)


def test_without_an_answer_column_the_reward_gets_the_row(tmp_path, monkeypatch):
    (tmp_path / "row_rewards.py").write_text(
        "def reward(text, gold):\n    return gold['level'] + (gold['a'] in text)\n"
    )
    monkeypatch.chdir(tmp_path)
    task = load_task(settings(write(tmp_path / "rows.jsonl"), answer_column=None, reward="row_rewards:reward"), seed=0)
    gold = task.prompt("train", 2).gold
    assert set(gold) == {"q", "a", "level"}
    assert task.judge(f"It is {gold['a']}", gold) == gold["level"] + 1


def test_prompts_can_be_chat_messages(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    data = write(tmp_path / "rows.jsonl", [{"q": turns, "a": "2"}] * 4)
    task = load_task(settings(data), seed=0)
    assert task.prompt("train", 0).messages == tuple(turns)
    with pytest.raises(ValueError, match=r"a system turn of its own"):
        load_task(settings(data, system_prompt="Be long."), seed=0).prompt("train", 0)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"prompt_column": "question"}, "the train split has no column 'question'; its columns are q, a, level"),
        ({"answer_column": "levels"}, r"has no column 'levels'.*Did you mean 'level'\?"),
        ({"prompt_column": None}, "needs task.prompt_column; the columns of the train split are q, a, level"),
        ({"prompt_column": "level"}, "the column 'level' holds 0: a prompt is a text, or a list of messages"),
        ({"reward": None}, "needs task.reward: one of arithmetic, countdown, guess_number, number, math, exact"),
        ({"answer_column": None}, "the reward 'number' needs task.answer_column"),
        ({"test_split": "validation"}, "task.test_split: there is no split 'validation'; there are rows"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(tmp_path, other, message):
    with pytest.raises(ValueError, match=message):
        load_task(settings(write(tmp_path / "rows.jsonl"), **other), seed=0)


def test_gold_answers_that_cannot_be_recorded_are_refused(tmp_path):
    import datetime

    rows = [{"q": "When?", "a": datetime.datetime(2020, 1, 1)}] * 3
    with pytest.raises(ValueError, match=r"the gold answers \(a\) cannot be written as JSON"):
        load_task(settings(write(tmp_path / "rows.parquet", rows)), seed=0)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "rows.txt").write_text("1")
    with pytest.raises(ValueError, match=r"rows.txt is no file that ends in .jsonl, .json, .csv, .parquet"):
        load_task(settings(str(tmp_path / "rows.txt")), seed=0)
    (tmp_path / "rows.jsonl").write_text("{'q': not JSON")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: this is not JSON .*column 2"):
        load_task(settings(str(tmp_path / "rows.jsonl")), seed=0)


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [(" yes\n", "yes", 1.0), ("Yes", "yes", 0.0), ("3", 3, 1.0), ("3.0", 3, 0.0), ("", "", 1.0)],
)
def test_the_exact_reward(text, gold, reward):
    assert judge_exact(text, gold) == reward


@pytest.mark.parametrize(("name", "text"), [("blank.jsonl", "\n\n"), ("header.csv", "question,answer\n")])
def test_data_without_rows_is_named(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    options = {"data": str(path), "prompt_column": "question", "answer_column": "answer", "reward": "exact"}
    with pytest.raises(ValueError, match=f"{name} has no rows"):
        load_task(TaskSettings(name="custom", **options), 0)
