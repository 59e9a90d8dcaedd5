"""load_task, the checks of its settings, the order of prompts, functions named in the settings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lagrpo.rewards.entries import load_function
from lagrpo.rewards.reward import Rewards
from lagrpo.settings.load import load_settings
from lagrpo.tasks import drop_overlong, load_task, order_prompts
from lagrpo.tasks.messages import build_messages

USER_MODULE = """
from lagrpo.tasks import RowTask

def length(completion, answer):
    return float(len(completion))

def task(settings, seed):
    rows = {"train": [seed, seed + 1], "test": [settings.options["digits"]]}
    return RowTask("mine", rows, lambda row: (str(row), row), length)

def no_task(settings, seed):
    return "a task"

number = 3
"""


def task_settings(name: str, **section: Any) -> Any:
    return load_settings({"task": {"name": name, **section}}).task


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, which is not on the path, under another name for each
    test."""
    name = f"rewards_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_prompt_order_is_the_same_on_every_machine_and_differs_between_epochs_and_seeds():
    assert order_prompts(seed=0, epoch=0, size=8) == [5, 2, 4, 7, 0, 1, 6, 3]
    assert (
        len({tuple(order_prompts(seed, epoch, 30)) for seed in range(3) for epoch in range(-1, 2)})
        == 9
    )


def test_system_prompt_comes_first_and_only_once():
    question = {"role": "user", "content": "2+3?"}
    assert build_messages("2+3?", "") == build_messages([question]) == (question,)
    system = {"role": "system", "content": "Be brief."}
    assert build_messages("2+3?", "Be brief.") == (system, question)
    with pytest.raises(ValueError, match="system message"):
        build_messages([system, question], "Be brief.")


def test_task_without_overlong_prompts_numbers_the_others_anew(caplog):
    task: Any = load_task(task_settings("guess_number", options={"largest": 20}), seed=1)
    rollout: Any = SimpleNamespace(overlong_prompts="drop", max_prompt_length=11)
    chat: Any = SimpleNamespace(
        tokenize=lambda prompt: replace(prompt, token_ids=(1,) * prompt.answer)
    )
    short = drop_overlong(replace(task, environment=None), rollout, chat)
    answers = [short.prompt("train", n).answer for n in range(short.size("train"))]
    assert answers == [n for n in (task.prompt("train", k).answer for k in range(16)) if n <= 11]
    assert [short.prompt("train", n).key for n in range(len(answers))] == list(range(len(answers)))
    assert f"{16 - len(answers)} of the 16 prompts of the train split are dropped" in caplog.text


def test_missing_data_is_rejected_with_what_to_set(monkeypatch):
    settings = task_settings("gsm8k")
    monkeypatch.delenv("LAGRPO_DATA", raising=False)
    with pytest.raises(ValueError, match=r"set task.data, or the environment variable LAGRPO_DATA"):
        load_task(settings, seed=0)
    monkeypatch.setenv("LAGRPO_DATA", "no/such/directory")
    with pytest.raises(ValueError, match=r"LAGRPO_DATA: no file or directory"):
        load_task(settings, seed=0)


def test_own_task_and_reward_are_found_in_the_current_directory(user_module):
    task = load_task(task_settings(f"{user_module}:task", options={"digits": 3}), seed=5)
    assert (task.name, task.prompt("train", 1).answer, task.prompt("test", 0).answer) == (
        "mine",
        6,
        3,
    )
    sums = load_task(task_settings("arithmetic", rewards=[f"{user_module}:length"]), seed=0)
    assert isinstance(sums.reward, Rewards)
    assert sums.reward.parts[0].function("seven", "7") == 5.0
    with pytest.raises(TypeError, match="not a Task"):
        load_task(task_settings(f"{user_module}:no_task"), seed=0)


def test_missing_function_or_module_is_named(user_module, tmp_path):
    (tmp_path / f"{user_module}_broken.py").write_text(
        "import package_that_is_not_installed", encoding="utf-8"
    )
    for reference, message in [
        (f"{user_module}:lenght", r"has no 'lenght'; did you mean 'length'\?"),
        (f"{user_module}:number", "number' is not a function"),
        (f"{user_module}:a b", "not of the form"),
        ("no_such_module:reward", "no module 'no_such_module'"),
        (
            f"{user_module}_broken:reward",
            "_broken:reward': No module named 'package_that_is_not_installed'",
        ),
    ]:
        with pytest.raises((ValueError, ImportError), match=message):
            load_function(reference)


RAISING = {
    "syntax": (
        "def reward(completion, answer)\n",
        r"SyntaxError: expected ':' \(.*raising.py, line 1\)",
    ),
    "error": (
        "\nraise RuntimeError('no\\nlicense')\n",
        r"RuntimeError: no license \(.*raising.py, line 2\)",
    ),
    "error of a library": (
        "import json\njson.loads('')\n",
        r"JSONDecodeError: .* \(.*raising.py, line 2\)",
    ),
    "exit": ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(.*raising.py, line 2\)"),
}


@pytest.mark.parametrize(("source", "message"), RAISING.values(), ids=RAISING)
def test_module_that_raises_is_named_with_the_line(tmp_path, monkeypatch, source, message):
    (tmp_path / "raising.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "raising", raising=False)
    with pytest.raises(ValueError, match=message) as error:
        load_function("raising:reward")
    assert "\n" not in str(error.value)


def test_function_of_a_task_and_class_of_a_reward_that_raise_are_named_with_the_line(
    tmp_path, monkeypatch
):
    (tmp_path / "raising_parts.py").write_text(
        "def task(settings, seed):\n    return {}['a']\n"
        "class Reward:\n    def __init__(self, k):\n        1 / k\n"
        "    def __call__(self, completion, answer):\n        return 1.0\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ValueError, match=r"task.name: .*KeyError: 'a' \(.*parts.py, line 2\)"):
        load_task(task_settings("raising_parts:task"), seed=0)
    reward = {"name": "r", "reward": "raising_parts:Reward", "options": {"k": 0}}
    with pytest.raises(ValueError, match=r"'r': .*ZeroDivisionError: .*parts.py, line 5\)"):
        load_task(task_settings("arithmetic", rewards=[reward]), seed=0)
