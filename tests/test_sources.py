"""The digest of a function's source: what changes it, and what does not."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import pytest

from lagrpo.rewards.builtin import exact
from lagrpo.tasks.gym import Gym
from lagrpo.training.sources import find_changed_sources, find_own_environment, source_digest

MODULE = """
import re
from dataclasses import dataclass

from user_helpers import normalize
import user_helpers

LIMIT = 10
PATTERN = re.compile(r"[0-9]+")
UNUSED = 1


def shorten(text):
    return text[:LIMIT]


def reward(completion, answer):
    return float(PATTERN.findall(shorten(normalize(completion))) == user_helpers.digits(answer))


def other(completion, answer):
    return 0.0


def make(weight):
    def weighted(completion, answer):
        return weight * len(completion)

    return weighted


half = lambda completion, answer: 0.5


@dataclass
class Judge:
    threshold: float = 0.5

    def __call__(self, completion, answer):
        return float(len(shorten(completion)) > self.threshold)


class Base:
    def reset(self, prompt, key):
        return [{"role": "user", "content": "go"}]


class Maze(Base):
    def step(self, text):
        return shorten(text)
"""
HELPERS = """
def normalize(text):
    return text.strip()


def digits(text):
    return list(text)
"""


@pytest.fixture
def load(tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Loads a module of this text, with these helpers, as a new process would."""
    monkeypatch.syspath_prepend(tmp_path)
    # Two versions within a second and of one length would share a .pyc file.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(text: str = MODULE, helpers: str = HELPERS, name: str = "user_rewards") -> Any:
        for module, content in {"user_helpers": helpers, name: text}.items():
            (tmp_path / f"{module}.py").write_text(content, encoding="utf-8")
            sys.modules.pop(module, None)
            importlib.invalidate_caches()
        # inspect reads sources through linecache, which would return the text before the change.
        linecache.clearcache()
        return importlib.import_module(name)

    yield load
    for module in ("user_helpers", "user_rewards", "moved"):
        sys.modules.pop(module, None)


CHANGES = {
    "its own text": ("float(PATTERN", "1 - float(PATTERN", "reward"),
    "its name": ("def reward(", "def reward2(", "reward2"),
    "a helper function": ("text[:LIMIT]", "text[:LIMIT + 1]", "reward"),
    "a constant that a helper uses": ("LIMIT = 10", "LIMIT = 11", "reward"),
    "a pattern": ("[0-9]+", "[0-9]", "reward"),
    "a lambda": ("answer: 0.5", "answer: 0.25", "half"),
    "a default of a class": ("threshold: float = 0.5", "threshold: float = 0.7", "Judge"),
    "a helper of a method": ("text[:LIMIT]", "text[1:LIMIT]", "Maze"),
    "a base class": ('"content": "go"', '"content": "run"', "Maze"),
}
NO_CHANGES = {
    "another function": ("return 0.0", "return 1.0"),
    "a constant that it does not use": ("UNUSED = 1", "UNUSED = 2"),
    "a comment": ("    return text[:LIMIT]", "    # short\n    return text[:LIMIT]"),
    "white space": ("LIMIT = 10\n", "\n\nLIMIT  =  10\n"),
    "its place": ("def shorten", "def new():\n    pass\n\n\ndef shorten"),
}


@pytest.mark.parametrize(("old", "new", "name"), CHANGES.values(), ids=CHANGES)
def test_digest_changes_with(load, old, new, name):
    before = source_digest(getattr(load(), name.removesuffix("2")))
    assert source_digest(getattr(load(MODULE.replace(old, new)), name)) != before


@pytest.mark.parametrize(("old", "new"), NO_CHANGES.values(), ids=NO_CHANGES)
def test_digest_does_not_change_with(load, old, new):
    before = source_digest(load().reward)
    assert source_digest(load(MODULE.replace(old, new)).reward) == before


@pytest.mark.parametrize("function", ["normalize", "digits"])
def test_digest_changes_with_a_helper_of_another_module(load, function):
    before = source_digest(load().reward)
    changed = HELPERS.replace(
        f"def {function}(text):\n", f"def {function}(text):\n    text += ' '\n"
    )
    assert source_digest(load(helpers=changed).reward) != before


def test_digest_is_the_same_in_another_module_and_by_name(load):
    before = source_digest(load().reward)
    assert source_digest("user_rewards:reward") == before
    assert source_digest(load(name="moved").reward) == before


def test_values_of_closures_partials_and_objects_count(load):
    module = load()
    kinds: list[Callable[[float], Any]] = [
        module.make,
        module.Judge,
        lambda value: partial(module.other, weight=value),
        lambda value: module.Judge(value).__call__,
        lambda value: lambda completion, answer, w=value: w,
    ]
    for kind in kinds:
        digests = [source_digest(kind(value)) for value in (0.5, 0.5, 0.7)]
        assert digests[0] == digests[1] != digests[2]


def test_code_without_a_source_counts_by_its_bytecode():
    digests = []
    for number in (1, 1, 2):
        names: dict[str, Any] = {}
        exec(f"def f(completion, answer): return {number} * (completion in {{'a', 'b'}})", names)
        digests.append(source_digest(names["f"]))
    assert digests[0] is not None
    assert digests[0] == digests[1] != digests[2]


def test_function_that_is_written_in_c_has_no_digest():
    assert source_digest(len) is None


def test_decorated_functions_count_by_what_they_wrap(load):
    module = load()
    assert source_digest(lru_cache(module.reward)) == source_digest(module.reward)
    assert source_digest(exact) != source_digest("lagrpo.tasks.gsm8k:score")


def test_lambdas_of_one_call_do_not_count_the_rest_of_the_call(load):
    text = "given = dict(rewards=[lambda completion, answer: 1.0], resume={})\n"
    digests = [source_digest(load(text.format(n)).given["rewards"][0]) for n in (None, "'runs/a'")]
    assert digests[0] == digests[1]


def test_environment_of_gym_counts_by_the_users_function():
    assert find_own_environment(partial(Gym, "user_rewards:Maze")) == "user_rewards:Maze"
    package_environment = partial(Gym, "game:Wordle-v0")
    assert find_own_environment(package_environment) is package_environment


def test_changes_are_those_of_what_both_have():
    before = {"reward a": "1", "reward b": None, "tool c": "3"}
    assert find_changed_sources(before, {"reward a": "2", "reward b": None, "new": "4"}) == [
        "reward a"
    ]
