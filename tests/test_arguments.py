"""The words of a command line, sorted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lagrpo.errors import SettingsError
from lagrpo.settings.arguments import SHORT, parse
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.toml import list_settings, validate

FLAGS = ("--dry-run", "--help")


@pytest.mark.parametrize(
    ("words", "files", "flags", "overrides"),
    [
        ("a.toml --schedule.sync_every 3", ["a.toml"], set(), {"schedule": {"sync_every": "3"}}),
        ("--schedule.sync_every 3 a.toml", ["a.toml"], set(), {"schedule": {"sync_every": "3"}}),
        ("--dry-run a.toml", ["a.toml"], {"--dry-run"}, {}),
        (
            "a --schedule.sync_every=3 --dry-run --schedule.num_iterations 2",
            ["a"],
            {"--dry-run"},
            {"schedule": {"sync_every": "3", "num_iterations": "2"}},
        ),
        (
            "--rollout.max-completion-length 9 --run.seed -1",
            [],
            set(),
            {"rollout": {"max_completion_length": "9"}, "run": {"seed": "-1"}},
        ),
        ("--task gsm8k --recipe dapo", [], set(), {"task": {"name": "gsm8k"}, "loss": {"recipe": "dapo"}}),
        ("--task.operations + - --task.digits 2", [], set(), {"task": {"operations": ["+", "-"], "digits": "2"}}),
        ("--task.operations=+,*", [], set(), {"task": {"operations": ["+", "*"]}}),
        ("--vllm.urls=", [], set(), {"vllm": {"urls": []}}),
        ("--vllm.urls http://a http://b --dry-run", [], {"--dry-run"}, {"vllm": {"urls": ["http://a", "http://b"]}}),
        ("--task.digits None", [], set(), {"task": {"digits": None}}),
        ("--schedule.sync_every 3 --schedule.sync_every 4", [], set(), {"schedule": {"sync_every": "4"}}),
        ("--task.system_prompt=--x=1", [], set(), {"task": {"system_prompt": "--x=1"}}),
        ("a b", ["a", "b"], set(), {}),
        ("--foo 1", [], set(), {"foo": "1"}),
    ],
)
def test_words_are_sorted(words, files, flags, overrides):
    given = parse(Settings, words.split(), FLAGS)
    assert (given.files, given.flags, given.overrides) == (files, flags, overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schedule.sync_every"], "--schedule.sync_every needs a value: --schedule.sync_every VALUE"),
        (["--schedule.sync_every", "--dry-run"], "--schedule.sync_every needs a value"),
        (["-v", "3"], "-v is no option; settings are given as --section.name VALUE"),
    ],
)
def test_what_is_no_option(words, message):
    with pytest.raises(SettingsError, match=f"^command line: {message}"):
        parse(Settings, words, FLAGS)


@given(st.lists(st.text("-=. a+v", max_size=12), max_size=6))
def test_any_words_are_sorted_or_refused(words):
    try:
        given_ = parse(Settings, words, FLAGS)
    except SettingsError:
        return
    assert all(word in words for word in [*given_.files, *given_.flags])


@pytest.mark.parametrize("kind", [Settings, EvalSettings])
def test_every_setting_can_be_given_as_its_text(kind):
    """The default of every setting, written as text, is read back as that default."""
    for name in list_settings(kind):
        value = kind()
        for part in name.split("."):
            value = getattr(value, part)
        if not isinstance(value, BaseModel | dict):
            words = [f"--{name}={','.join(map(str, value))}"] if isinstance(value, tuple) else [f"--{name}", str(value)]
            given = parse(kind, words)
            assert validate(kind, {}, given.overrides, "command line") == kind(), name


def test_the_short_names_are_settings():
    assert set(SHORT.values()) <= set(list_settings(Settings))
    assert not set(SHORT) & {name for name in list_settings(Settings) if "." in name}
