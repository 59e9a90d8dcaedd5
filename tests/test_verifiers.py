"""Tasks `verifiers:NAME`: what comes of a program in another Python, faults included. A script stands in for it; the
package itself is in test_verifiers_package.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from running import tiny_settings
from test_resume import cut_to, go_on
from test_talking_runs import model

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.policy.chat import Chat
from lagrpo.replay import verify_run
from lagrpo.runs import load_rollouts
from lagrpo.settings.environment import EnvironmentSettings
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.base import TaskWithEnvironment
from lagrpo.tasks.bridge.conversation import look, named, plain
from lagrpo.tasks.verifiers import split
from lagrpo.training.environments import Talk
from lagrpo.types import Prompt
from lagrpo.verify import Environments

ADDRESS = (3, "sample", 1, 0, 2, 0)
__all__ = ["model"]  # a fixture
FAKE = Path(__file__).with_name("fake_bridge.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with `verifiers`, as far as anybody can see."""
    path = tmp_path_factory.mktemp("other") / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}"\n')
    path.chmod(0o755)
    return str(path)


def load(python: str, **options: Any) -> Any:
    given = {name: options.pop(name) for name in ("train_size", "test_size") if name in options}
    return load_task(TaskSettings(name="verifiers:game", python=python, options=options or None, **given), seed=3)


@pytest.fixture(scope="module")
def game(python: str):
    with Environments(load(python).environment, workers=1, deadline=1.0) as environments:
        yield environments


def begin(environments: Environments, text: str, row: int = 2) -> tuple[str, Any]:
    prompt = Prompt(row, ({"role": "user", "content": f"row {row}, game"},), {"row": row})
    return environments.result(environments.submit(None, prompt, ADDRESS, text))


def say(environments: Environments, state: bytes, text: str) -> tuple[str, Any]:
    return environments.result(environments.submit(state, None, None, text))


def test_an_episode_is_the_programs(python, game):
    task = load(python, test=4)
    assert isinstance(task, TaskWithEnvironment)
    assert (task.size("train"), task.size("test"), task.prompt("test", 1).gold) == (10, 4, {"row": 11})
    prompt = task.prompt("train", 2)
    assert game.open(prompt, (3, "opening", "train", 2)) == ({"role": "user", "content": "row 2, game"},)
    kind, (messages, worth, state) = begin(game, "a")
    assert (kind, worth, messages[0]["content"][:4]) == ("turn", 0.25, "1: a")
    kind, (messages, _, later) = say(game, state, "b")
    assert messages[0]["content"].startswith("2: b, seed ")
    assert say(game, later, "end") == ("final", (0.5, "after 3 turns; []"))
    assert say(game, state, "b") == ("turn", (messages, 0.25, later))  # the same seeds, when it is played again


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("exit", "the environment: its program ended with exit code 7"),
        ("kill", "the environment: its program was ended by signal 9"),
        ("garbage", r"the environment: its program wrote no JSON, but b'\x1b[31mno JSON'"),
        ("deep", "the environment: its program wrote no JSON, but b'[[["),
        ("strange", "the environment's program says {'turn': {'messages': 'hello'"),
        ("nan", "the environment's reward is nan (float), not a finite number"),
        ("refuse", "the environment: it raised ValueError: broken"),
        ("hang", "no reply within 1 s"),
    ],
)
def test_what_goes_wrong_leaves_the_completion_unscored_and_the_others_go_on(game, said, reason):
    _, (_, _, state) = begin(game, "a")
    kind, why = say(game, state, said)
    assert (kind, why[: len(reason)]) == ("unscored", reason)
    assert say(game, state, "end") == ("final", (0.5, "after 2 turns; []"))  # played again by a new program


def test_an_environment_that_does_not_repeat_itself_is_told(game):
    _, (_, _, state) = begin(game, "clock")
    assert say(game, state, "exit")[0] == "unscored"
    kind, why = say(game, state, "b")
    assert (kind, why[:43]) == ("unscored", "the environment does not repeat itself: ano")


def test_a_run_is_recorded_replayed_and_resumed(python, model, tmp_path):
    given = tiny_settings(
        model, tmp_path, task={"name": "verifiers:game", "python": python}, sampling={"max_tokens": 30},
        environment={"max_turns": 3, "max_tokens": 400}, evaluation={"before_and_after": False},
        run={"checkpoint_every": 1, "keep_checkpoints": 5}, schedule={"batches": 2},
    )  # fmt: skip
    whole = lagrpo.train(given).run
    rows = load_rollouts(whole)
    assert {row["outcome"] for row in rows} == {"scored"}
    assert max(len(row["turns"]) for row in rows) == 5
    assert verify_run(whole, everything=True).differences == []
    stopped = cut_to(whole, 1, tmp_path / "cut")
    assert go_on(stopped).batches == 2
    assert load_rollouts(stopped) == rows


def test_many_episodes_are_under_way_at_once(python):
    with Environments(load(python).environment, workers=1) as environments:
        opened = Prompt(0, ({"role": "user", "content": "row 0, game"},), {"row": 0})
        begun = [environments.result(environments.submit(None, opened, (3, n), "a")) for n in range(70)]
        ended = [say(environments, state, "end") for _, (_, _, state) in begun]
    assert set(ended) == {("final", (0.5, "after 2 turns; []"))}


def test_calls_of_tools_are_read_from_what_the_policy_says(python):
    task, chat = load(python, tools=True), SimpleNamespace()
    chat.render = lambda messages, tools=None: json.dumps(tools)
    talk = Talk.find(EnvironmentSettings(), task, cast(Chat, chat))
    assert talk is not None
    assert (talk.role, [tool["function"]["name"] for tool in talk.tools or ()]) == ("tool", ["add"])
    chat.render = lambda messages, tools=None: "no tools here"
    told = Talk.find(EnvironmentSettings(), task, cast(Chat, chat))
    assert told is not None
    assert told.tools is None
    with Environments(told.make, workers=1) as environments:
        opening = environments.open(task.prompt("train", 0), (3, "opening", "train", 0))
        assert opening[0]["content"].startswith("You can call functions:")
        prompt = Prompt(0, opening, {"row": 0})
        call = 'I add.<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
        for text, seen in ((call, "1: I add., "), ("<tool_call>add</tool_call>", "1: <tool_call>add</tool_call>, ")):
            _, (messages, _, _) = environments.result(environments.submit(None, prompt, ADDRESS, text))
            assert messages[0]["content"].startswith(seen)
            assert messages[0]["content"].endswith("[{'name': 'add', 'arguments': {'x': 1}}]" if text == call else "[]")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"first": '{"error": "it runs in sandboxes"}'}, "task.name: verifiers:game cannot be had: it runs in sandbox"),
        ({"first": "hello"}, "cannot be had: its program wrote no JSON, but b'hello'"),
        ({"first": '{"ready": {"train": "many"}}'}, "says {'train': 'many'} of its environment"),
        ({"first": ""}, None),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(python, options, problem):
    if problem is None:
        assert load(python, **options).size("train") == 8
        return
    with pytest.raises(ValueError, match=problem):
        load(python, **options)


def test_a_python_without_the_package_is_told_what_to_install(python, tmp_path):
    with pytest.raises(ImportError, match=r"needs the package verifiers, which .* does not have: .* -m pip install"):
        load(python, first='{"missing": true}')
    with pytest.raises(ValueError, match=r"task.python: there is no program .*make verifiers-env"):
        load(str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"name": "verifiers:"}, "task.name: write verifiers:NAME"),
        ({"reward": "exact"}, "task.reward: the environment verifiers:game gives the rewards"),
        ({"system_prompt": "Be brief."}, "give it as task.options.system_prompt"),
        ({"digits": 2}, "task.digits is set, but the task 'verifiers:game' does not take it"),
    ],
)
def test_settings_that_the_environment_decides_are_refused(settings, problem):
    with pytest.raises((ValueError, SettingsError), match=problem):
        load_task(TaskSettings(**{"name": "verifiers:game", "python": "/nowhere"} | settings), seed=0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((10, 4, 100, 100), (range(10), range(10, 14))),
        ((10, 4, 3, 2), (range(3), range(10, 12))),
        ((10, 0, 100, 100), (range(8), range(8, 10))),
        ((1, 0, 100, 100), (range(1), range(1, 1))),
        ((None, 0, 20, 5), (range(20), range(20, 25))),
    ],
)
def test_rows_are_for_training_or_for_testing(rows, expected):
    assert tuple(split(*rows).values()) == expected


def test_messages_of_any_kind_become_plain_ones():
    class Message:
        def model_dump(self, exclude_none: bool) -> dict[str, Any]:
            return {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c1"}

    call = {"id": "c1", "function": {"name": "add", "arguments": '{"x": 1}'}}
    said = plain({"role": "assistant", "content": None, "tool_calls": [call]})
    assert look(said) == ("assistant", "", [("add", {"x": 1})])
    assert named(plain(Message()), {"c1": "add"}) == {"role": "tool", "content": "4", "name": "add"}
    assert plain({"role": "text", "content": "hello"}) == {"role": "user", "content": "hello"}
