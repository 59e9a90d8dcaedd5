"""The files with a user's code, by their names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest

from lagrpo.resume.sources import digest_file, find_changed_sources, find_files
from lagrpo.rewards.builtin import exact
from lagrpo.tasks.gym import Gym

REWARDS = """
from functools import lru_cache
from own_package.limits import LIMIT


def reward(completion, answer):
    return float(len(completion) < LIMIT)


class Judge:
    def __call__(self, completion, answer):
        return 0.0


def make(weight):
    return lambda completion, answer: weight
"""
FILES = {
    "own_package/__init__.py": "",
    "own_package/limits.py": "LIMIT = 10\n",
    "own_package/rewards.py": REWARDS,
    "own_rewards.py": "from own_helpers import reward\n\nclass Maze:\n    pass\n",
    "own_helpers.py": "def reward(completion, answer): return 1.0\n",
    "site-packages/installed_here.py": "def reward(completion, answer): return 1.0\n",
}
IN_PACKAGE = {"own_package/__init__.py", "own_package/limits.py", "own_package/rewards.py"}
BESIDE = {"own_rewards.py", "own_helpers.py"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A user's directory, on the path of Python."""
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for path in (tmp_path / "site-packages", tmp_path):
        monkeypatch.syspath_prepend(path)
    for module in [name for name in sys.modules if name.startswith(("own_", "installed_here"))]:
        monkeypatch.delitem(sys.modules, module)
    return tmp_path


def load(module: str) -> Any:
    return importlib.import_module(module)


OF_PACKAGE: dict[str, Callable[[Any], object]] = {
    "function": lambda module: module.reward,
    "cached function": lambda module: lru_cache(module.reward),
    "partial": lambda module: partial(module.reward, answer=""),
    "class": lambda module: module.Judge,
    "object": lambda module: module.Judge(),
    "method": lambda module: module.Judge().__call__,
    "lambda": lambda module: module.make(1.0),
    "name": lambda module: "own_package.rewards:reward",
}


@pytest.mark.parametrize("code", OF_PACKAGE.values(), ids=OF_PACKAGE)
def test_code_of_a_package_has_the_files_of_its_package(folder, code):
    files = find_files(code(load("own_package.rewards")))
    assert files == {name: folder / name for name in IN_PACKAGE}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(lambda module: module.Maze, id="class"),
        pytest.param(lambda module: partial(Gym, "own_rewards:Maze"), id="environment of gym"),
    ],
)
def test_code_of_a_module_has_the_loaded_modules_beside_it_that_are_not_installed(folder, code):
    load("installed_here")
    assert find_files(code(load("own_rewards"))).keys() == BESIDE
    load("own_package.rewards")
    assert find_files(code(load("own_rewards"))).keys() == BESIDE | IN_PACKAGE


def test_installed_code_has_the_files_of_its_own_package(folder):
    load("own_rewards")
    assert find_files(load("installed_here").reward).keys() == {"installed_here.py"}


def test_script_counts_only_if_code_is_in_it(folder, monkeypatch):
    script = load("own_rewards")
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert find_files(load("own_helpers").reward).keys() == BESIDE  # loaded as own_rewards, too
    monkeypatch.delitem(sys.modules, "own_rewards")
    assert find_files(load("own_helpers").reward).keys() == {"own_helpers.py"}
    monkeypatch.setattr(script, "__name__", "__main__")
    monkeypatch.setattr(script.Maze, "__module__", "__main__")
    assert find_files(script.Maze).keys() == BESIDE


@pytest.mark.parametrize(
    "code",
    [exact, len, None, "own_missing:reward", 1.0],
    ids=["reward of lagrpo", "builtin", "nothing", "missing module", "number"],
)
def test_code_that_is_not_a_users_has_no_file(code):
    assert find_files(code) == {}


def test_digest_of_a_file_changes_with_its_text(folder):
    file = folder / "own_helpers.py"
    before = digest_file(file)
    assert digest_file(folder / "site-packages/installed_here.py") == before  # another name
    file.write_text("def reward(completion, answer): return 2.0\n", encoding="utf-8")
    assert digest_file(file) != before


def test_changes_are_those_of_what_both_have():
    before = {"a.py": "1", "chat template": None, "c.py": "3"}
    assert find_changed_sources(before, {"a.py": "2", "chat template": None, "new.py": "4"}) == [
        "a.py"
    ]
