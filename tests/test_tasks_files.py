"""Data of the Hugging Face hub as far as it goes without a network: what is asked for, what is said when it fails."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.files import find_source

ROWS = [{"question": "1 + 1?", "problem": "1 + 1?", "answer": "#### 2"}] * 3


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of the hub, which has every dataset, each with the splits train and hard."""
    requests: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str | None = None) -> Any:
        requests.append((name, config, split))
        if split == "test":
            raise ValueError('Unknown split "test". Should be one of ["train", "hard"].')
        return {"train": datasets.Dataset.from_list(ROWS * 10), "hard": ROWS} if split is None else ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return requests


def test_gsm8k_asks_for_its_configuration(asked):
    load_task(TaskSettings(name="gsm8k", data="openai/gsm8k", test_split="hard"), seed=0)
    load_task(TaskSettings(name="gsm8k", data="openai/gsm8k:socratic", test_split="hard"), seed=0)
    assert asked == [("openai/gsm8k", c, s) for c in ("main", "socratic") for s in ("train", "hard")]


def test_a_split_with_a_slash_is_a_dataset_of_its_own(asked):
    pytest.importorskip("math_verify")
    load_task(TaskSettings(name="math", data="owner/maths", test_split="HuggingFaceH4/MATH-500:hard"), seed=0)
    assert asked == [("owner/maths", None, "train"), ("HuggingFaceH4/MATH-500", None, "hard")]


def test_a_split_that_the_dataset_does_not_have_is_named(asked):
    with pytest.raises(
        ValueError, match=r"the split 'test' of a dataset of that name could not be loaded.*Unknown split"
    ):
        load_task(TaskSettings(name="gsm8k", data="openai/gsm8k"), seed=0)


def test_custom_holds_out_a_tenth_where_the_dataset_has_no_test_split(asked):
    settings = TaskSettings(
        name="custom", data="a/b", prompt_column="question", answer_column="answer", reward="number"
    )
    task = load_task(settings, seed=0)
    assert (task.size("train"), task.size("test")) == (27, 3)
    assert asked == [("a/b", None, None)]


@pytest.mark.parametrize("name", ["here/rows", "data/rows.jsonl", "./data/rows", "../rows", "rows"])
def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"task.data: there is no file or directory"):
        find_source(name, "", "")


def test_what_looks_like_a_dataset_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_source("openai/gsm8k:main", "", "") == "openai/gsm8k:main"
    assert find_source("agentica-org/DeepScaleR-Preview-Dataset", "", "") == "agentica-org/DeepScaleR-Preview-Dataset"
