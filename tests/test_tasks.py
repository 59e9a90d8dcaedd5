"""load_task, the checks of its settings, the order of prompts, functions named in the settings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.rewards.builtin import exact
from lagrpo.rewards.load import REWARDS, load_builtin, load_function
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
    """A module in the current directory, which is not on the path, under a name of its own for each test."""
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


def test_prompt_order_differs_between_epochs_and_seeds():
    orders = {tuple(order_prompts(seed, epoch, 30)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_prompt_order_is_the_same_on_every_machine_and_in_every_version():
    assert order_prompts(seed=0, epoch=0, size=8) == [5, 2, 4, 7, 0, 1, 6, 3]


def test_chat_puts_the_system_prompt_first():
    question = {"role": "user", "content": "2+3?"}
    assert build_messages("2+3?") == (question,)
    assert build_messages("2+3?", "") == (question,)
    assert build_messages("2+3?", "Be brief.") == ({"role": "system", "content": "Be brief."}, question)
    assert build_messages([question, {"role": "assistant", "content": "5"}]) == (
        question,
        {"role": "assistant", "content": "5"},
    )


def test_chat_refuses_two_system_prompts():
    with pytest.raises(ValueError, match="the prompt has a system turn"):
        build_messages([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "Be brief.")


def test_a_row_task_has_two_splits_and_bounds():
    task = RowTask("sums", {"train": ["1+1"], "test": []}, lambda row: (row, "2"), exact)
    assert isinstance(task, Task)
    assert (task.size("train"), task.size("test")) == (1, 0)
    prompt = task.prompt("train", 0)
    assert (prompt.key, prompt.answer, prompt.token_ids) == (0, "2", ())
    with pytest.raises(ValueError, match=r"no split 'validation'"):
        task.size("validation")
    with pytest.raises(IndexError):
        task.prompt("train", 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TaskSettings(name="arithmetics"), r"no task 'arithmetics'.*Did you mean 'arithmetic'\?"),
        (TaskSettings(name="poetry"), "no task 'poetry'; there are arithmetic, countdown"),
        (TaskSettings(name="gsm8k", digits=2), "task.digits is set, but the task 'gsm8k' does not take it: arithmetic"),
        (TaskSettings(name="arithmetic", data="x"), "task.data is set.*: gsm8k, math, custom do"),
        (TaskSettings(name="countdown", operations=("+",)), "task.operations is set.*'countdown'"),
        (TaskSettings(name="gsm8k", prompt_column="question"), "task.prompt_column is set.*custom do"),
        (TaskSettings(name="math", reward="maths"), r"no built-in reward 'maths'.*Did you mean 'math'\?"),
    ],
)
def test_settings_that_contradict_are_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        check_options(settings)
    with pytest.raises(ValueError, match=message):
        load_task(settings, seed=0)


def test_settings_that_agree_are_not_refused():
    check_options(TaskSettings(name="arithmetic", digits=3, system_prompt="Be brief.", reward="exact"))
    check_options(TaskSettings(name="math", data="x", train_split="aime24_test"))
    check_options(TaskSettings(name="package.module:function", digits=3, data="x", reward="package.module:reward"))


@pytest.mark.parametrize("name", ["gsm8k", "math", "custom"])
def test_missing_data_is_refused_saying_what_to_set(name, monkeypatch):
    monkeypatch.delenv("LAGRPO_DATA", raising=False)
    columns = {"reward": "exact", "prompt_column": "q", "answer_column": "a"} if name == "custom" else {}
    settings = TaskSettings.model_validate({"name": name} | columns)
    with pytest.raises(ValueError, match=r"set task.data \(or the environment variable LAGRPO_DATA\)"):
        load_task(settings, seed=0)


def test_a_path_that_is_not_there_is_named(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"task.data: there is no file or directory 'no/such/directory'"):
        load_task(TaskSettings(name="gsm8k", data="no/such/directory"), seed=0)
    monkeypatch.setenv("LAGRPO_DATA", str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"LAGRPO_DATA: there is no file or directory"):
        load_task(TaskSettings(name="gsm8k"), seed=0)


def test_every_built_in_reward_can_be_loaded():
    pytest.importorskip("math_verify", reason="needs math-verify: pip install 'lagrpo[math]'")
    for name in REWARDS:
        assert callable(load_builtin(name))


def test_a_users_own_task_and_reward_are_found_in_the_current_directory(user_module):
    task = load_task(TaskSettings(name=f"{user_module}:task", digits=3), seed=5)
    assert (task.name, task.prompt("train", 1).answer, task.prompt("test", 0).answer) == ("mine", 6, 3)
    sums = load_task(TaskSettings(name="arithmetic", reward=f"{user_module}:length"), seed=0)
    assert sums.reward("seven", "7") == 5.0


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("lenght", r"has no attribute 'lenght'. Did you mean 'length'\?"),
        ("number", "is a int, not a function"),
        ("a b", "not of the form"),
        ("", "not of the form"),
    ],
)
def test_a_function_that_is_not_there_is_named(user_module, attribute, message):
    with pytest.raises(ValueError, match=message):
        load_function(f"{user_module}:{attribute}")


def test_a_module_that_is_not_there_is_named(user_module):
    with pytest.raises(ValueError, match=r"no module 'no_such_module'"):
        load_function("no_such_module:reward")
    with pytest.raises(ValueError, match=r"no module 'lagrpo.no_such_module'"):
        load_function("lagrpo.no_such_module:reward")


def test_a_module_that_misses_a_module_of_its_own_says_which(user_module, tmp_path):
    (tmp_path / f"{user_module}_broken.py").write_text("import package_that_is_not_installed")
    with pytest.raises(ModuleNotFoundError, match=r"package_that_is_not_installed"):
        load_function(f"{user_module}_broken:reward")


def test_the_current_directory_does_not_shadow_installed_modules(user_module, tmp_path):
    (tmp_path / "fractions.py").write_text("raise RuntimeError('shadowed')")
    for name in ("fractions",):
        sys.modules.pop(name, None)
    assert load_function("fractions:Fraction")(1, 2) == 0.5


def test_a_function_that_returns_no_task_is_refused(user_module):
    with pytest.raises(TypeError, match=r"returned a str, which is not a Task"):
        load_task(TaskSettings(name=f"{user_module}:no_task"), seed=0)


def test_a_row_task_can_be_changed_in_part():
    task = load_task(TaskSettings(name="arithmetic"), seed=0)
    assert isinstance(task, RowTask)
    assert replace(task, system_prompt="Be brief.").prompt("train", 0).messages[0]["role"] == "system"
