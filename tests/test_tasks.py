"""load_task, the checks of its settings, the order of prompts, functions named in the settings."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.rewards.builtin import exact
from lagrpo.rewards.load import load_function
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import RowTask, Task, build_messages, check_options, load_task, order_prompts

USER_MODULE = """
from lagrpo.tasks import RowTask

def length(completion, answer):
    return float(len(completion))

def task(settings, seed):
    return RowTask("mine", {"train": [seed, seed + 1], "test": [settings.digits]}, lambda row: (str(row), row), length)

def no_task(settings, seed):
    return "a task"

number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, which is not on the path, under another name for each test."""
    name = f"rewards_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@given(st.integers(0, 2**63), st.integers(-1, 100), st.integers(0, 50))
def test_prompt_order_is_a_permutation_and_a_function_of_its_arguments(seed, epoch, size):
    order = order_prompts(seed, epoch, size)
    assert sorted(order) == list(range(size))
    assert order == order_prompts(seed, epoch, size)


def test_prompt_order_is_the_same_on_every_machine_and_differs_between_epochs_and_seeds():
    assert order_prompts(seed=0, epoch=0, size=8) == [5, 2, 4, 7, 0, 1, 6, 3]
    assert len({tuple(order_prompts(seed, epoch, 30)) for seed in range(3) for epoch in range(3)}) == 9


def test_system_prompt_comes_first_and_only_once():
    question = {"role": "user", "content": "2+3?"}
    assert build_messages("2+3?", "") == build_messages([question]) == (question,)
    system = {"role": "system", "content": "Be brief."}
    assert build_messages("2+3?", "Be brief.") == (system, question)
    with pytest.raises(ValueError, match="the prompt has a system turn"):
        build_messages([system, question], "Be brief.")


def test_row_task_has_two_splits_and_bounds():
    task = RowTask("sums", {"train": ["1+1"], "test": []}, lambda row: (row, "2"), exact)
    assert isinstance(task, Task)
    assert (task.size("train"), task.size("test")) == (1, 0)
    prompt = task.prompt("train", 0)
    assert (prompt.key, prompt.answer, prompt.token_ids) == (0, "2", ())


def test_contradictory_settings_are_rejected_before_anything_is_loaded():
    for settings, message in [
        (TaskSettings(name="arithmetics"), r"no task 'arithmetics'.*Did you mean 'arithmetic'\?"),
        (TaskSettings(name="gsm8k", digits=2), "task.digits is set, but the task 'gsm8k' does not take it: arithmetic"),
        (TaskSettings(name="arithmetic", data="x"), "task.data is set.*: gsm8k, math, custom do"),
        (TaskSettings(name="math", reward="maths"), r"no built-in reward 'maths'.*Did you mean 'math'\?"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_options(settings)


def test_settings_that_agree_are_accepted():
    check_options(TaskSettings(name="arithmetic", digits=3, system_prompt="Be brief.", reward="exact"))
    check_options(TaskSettings(name="package.module:function", digits=3, data="x", reward="package.module:reward"))


@pytest.mark.parametrize("name", ["gsm8k", "custom"])
def test_missing_data_is_rejected_with_what_to_set(name, monkeypatch):
    monkeypatch.delenv("LAGRPO_DATA", raising=False)
    columns = {"reward": "exact", "prompt_column": "q", "answer_column": "a"} if name == "custom" else {}
    settings = TaskSettings.model_validate({"name": name} | columns)
    with pytest.raises(ValueError, match=r"set task.data \(or the environment variable LAGRPO_DATA\)"):
        load_task(settings, seed=0)
    monkeypatch.setenv("LAGRPO_DATA", "no/such/directory")
    with pytest.raises(ValueError, match=r"LAGRPO_DATA: there is no file or directory"):
        load_task(settings, seed=0)


def test_without_a_package_loading_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for settings in (TaskSettings(name="math", data="x"), TaskSettings(name="arithmetic", reward="math")):
        with pytest.raises(ImportError, match=r"pip install 'lagrpo\[math\]'"):
            load_task(settings, seed=0)


def test_own_task_and_reward_are_found_in_the_current_directory(user_module):
    task = load_task(TaskSettings(name=f"{user_module}:task", digits=3), seed=5)
    assert (task.name, task.prompt("train", 1).answer, task.prompt("test", 0).answer) == ("mine", 6, 3)
    sums = load_task(TaskSettings(name="arithmetic", reward=f"{user_module}:length"), seed=0)
    assert sums.reward("seven", "7") == 5.0
    with pytest.raises(TypeError, match=r"returned a str, which is not a Task"):
        load_task(TaskSettings(name=f"{user_module}:no_task"), seed=0)


def test_missing_function_or_module_is_named(user_module, tmp_path):
    (tmp_path / f"{user_module}_broken.py").write_text("import package_that_is_not_installed")
    for reference, message in [
        (f"{user_module}:lenght", r"has no attribute 'lenght'. Did you mean 'length'\?"),
        (f"{user_module}:number", "is a int, not a function"),
        (f"{user_module}:a b", "not of the form"),
        ("no_such_module:reward", "no module 'no_such_module'"),
        (f"{user_module}_broken:reward", "package_that_is_not_installed"),
    ]:
        with pytest.raises((ValueError, ModuleNotFoundError), match=message):
            load_function(reference)
