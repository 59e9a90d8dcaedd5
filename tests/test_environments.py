"""Environments in worker processes, tools, and the tasks that come with them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import talkers

from lagrpo.rewards.pool import RewardError
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.base import StepResult, Task, TaskWithEnvironment
from lagrpo.tasks.calculator import calculate
from lagrpo.tasks.environments import EnvironmentPool
from lagrpo.tasks.guess_number import GuessNumber, read_guess
from lagrpo.tasks.tools import Call, MalformedError, Tools, describe, find_calls, system_text
from lagrpo.types import Prompt

PROMPT = Prompt(3, ({"role": "user", "content": "1+1"},), "2")
ADDRESS = (0, "sample", 1, 0, 3, 2)


@pytest.fixture(scope="module")
def wordy():
    with EnvironmentPool(talkers.Wordy, workers=1, deadline=1.0) as environments:
        yield environments


def say(environments: EnvironmentPool, text: str, state: bytes | None = None) -> tuple[str, Any]:
    given = (PROMPT, ADDRESS) if state is None else (None, None)
    return environments.result(environments.submit(state, *given, text))


def test_an_episode_goes_through_the_workers(wordy):
    assert wordy.open(PROMPT, ADDRESS) == PROMPT.messages
    kind, (messages, worth, state) = say(wordy, "a")
    assert (kind, worth) == ("turn", 0.1)
    assert messages[0]["content"].startswith("1/")
    kind, (messages, worth, state) = say(wordy, "b", state)
    assert (messages[0]["content"][:2], worth) == ("2/", 0.2)
    assert say(wordy, "cc", state) == ("final", (0.4, "after 3 turns"))
    assert say(wordy, "a") == say(wordy, "a")  # seeded by the address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "the environment raised RuntimeError: broken"),
        ("hang", "no reward within 1 s"),
        ("exit", "the worker process ended with exit code 3"),
        ("unscorable", "nobody knows"),
        ("nan", "the environment raised ValueError: its reward is nan"),
        ("nothing", "the environment raised TypeError: step returned a NoneType"),
        ("text", "the environment raised ValueError: dictionary update"),
        ("open", "the environment raised TypeError: cannot pickle"),
    ],
)
def test_what_goes_wrong_leaves_the_completion_unscored_with_the_reason(wordy, text, reason):
    _, (_, _, state) = say(wordy, "a")
    kind, said = say(wordy, text, state)
    assert kind == "unscored"
    assert said.startswith(reason)
    assert say(wordy, "b", state)[0] == "turn"  # the others go on


def test_why_an_episode_ended_can_be_written_to_any_file(wordy):
    _, (_, _, state) = say(wordy, "a")
    assert say(wordy, "half", state) == ("final", (0.5, "\\ud800"))


def test_an_environment_that_begins_otherwise_for_each_completion_is_told():
    with EnvironmentPool(talkers.Moody, workers=1) as environments:
        prompt = Prompt(3, environments.open(PROMPT, ADDRESS), "2")
        kind, said = environments.result(environments.submit(None, prompt, (*ADDRESS, 9), "a"))
    assert (kind, "other messages than its group" in said) == ("unscored", True)


def test_an_environment_that_does_not_start_is_told():
    with EnvironmentPool(talkers.Refusing, workers=1) as environments, pytest.raises(ValueError, match="no game today"):
        environments.open(PROMPT, ADDRESS)


def test_what_cannot_be_sent_to_workers_is_refused():
    with pytest.raises(TypeError, match=r"cannot be sent to worker processes"):
        EnvironmentPool(lambda: talkers.Counting())


def test_a_closed_one_says_so(wordy):
    environments = EnvironmentPool(talkers.Counting, workers=1)
    environments.close()
    with pytest.raises(RewardError, match="closed"):
        environments.submit(None, PROMPT, ADDRESS, "a")


# ---- guess_number ----


def task(**options: Any) -> Task:
    return load_task(TaskSettings(name="guess_number", **options), seed=1)


def test_guess_number_is_a_task_with_an_environment():
    found = task(largest=20)
    assert isinstance(found, TaskWithEnvironment)
    golds = [found.prompt(split, n).answer for split in ("train", "test") for n in range(found.size(split))]
    assert sorted(golds) == list(range(1, 21))
    assert found.size("test") == 4
    assert found.prompt("train", 0).messages[0]["content"].startswith("I think of a whole number from 1 to 20.")
    assert (found.reward("7", 7), found.reward("8", 7)) == (1.0, 0.0)


def test_a_game_is_won_by_halving():
    for number in range(1, 32):
        game, low, high = GuessNumber(), 1, 31
        game.reset(Prompt(0, ({"role": "user", "content": "?"},), number), ())
        said: Any = None
        for guess in range(1, 6):
            tried = (low + high) // 2
            said = game.step(f"{tried}.")
            if said.done:
                assert said == StepResult((), 1.0, True, f"found with guess {guess}")
                break
            low, high = (tried + 1, high) if "higher" in said.messages[0]["content"] else (low, tried - 1)
        assert said.done


def test_a_guess_that_is_none_is_told():
    game = GuessNumber()
    game.reset(Prompt(0, ({"role": "user", "content": "?"},), 5), ())
    assert game.step("five?") == StepResult(
        [{"role": "user", "content": "That is no number. Answer with just a number."}]
    )
    assert [read_guess(text) for text in ("It is 7.", "1/2", "", "-3", "6 or 7")] == [7, None, None, -3, None]


# ---- tools ----


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("4", []),
        ('The set {1, 2} has "name" in it', []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [Call("f", {"x": 1})]),
        (
            'Both.<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g"}</tool_call>',
            [Call("f", {}), Call("g", {})],
        ),
        (
            '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</tool_call>',
            [Call("f", {"x": 1}), Call("g", {})],
        ),
        ('{"name": "f", "parameters": {"x": "1"}}', [Call("f", {"x": "1"})]),
        ("<tool_call>[]</tool_call>", []),
    ],
)
def test_calls_are_read_in_three_formats(text, calls):
    assert find_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "f"}', "has no </tool_call>"),
        ("<tool_call>f(1)</tool_call>", "the call is not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a call is {"name"'),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "the arguments of 'f' are not a JSON object"),
        ('{"name": "f", ', "the call is not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
    ],
)
def test_a_malformed_call_is_told(text, problem):
    with pytest.raises(MalformedError, match=problem):
        find_calls(text)
    said = Tools({"add": talkers.add}, judge)().step(text)
    assert not said.done
    assert said.messages[0]["role"] == "tool"
    assert said.messages[0]["content"].startswith("Error: ")


def judge(completion: str, answer: Any) -> float:
    return float(completion == answer)


def use(*calls: dict[str, Any]) -> list[str]:
    episode = Tools({f.__name__: f for f in (talkers.add, talkers.divide, talkers.broken)}, judge)()
    episode.reset(PROMPT, ADDRESS)
    said = pickle.loads(pickle.dumps(episode)).step(f"<tool_call>{json.dumps(list(calls))}</tool_call>")
    assert not said.done
    return [message["content"] for message in said.messages]


def test_calls_are_carried_out_and_mistakes_are_told():
    assert use({"name": "add", "arguments": {"x": 2, "y": 3}}, {"name": "divide", "arguments": {"x": 1, "y": 4}}) == [
        "5",
        "0.25",
    ]
    assert use({"name": "divide", "arguments": {"x": 1, "y": 0}}) == ["Error: division by zero"]
    assert use({"name": "add", "arguments": {"x": 1}}) == ["Error: missing a required argument: 'y'"]
    assert use({"name": "sub", "arguments": {}}) == ["Error: there is no function 'sub', but add, divide, broken"]
    with pytest.raises(OSError, match="the network is down"):
        use({"name": "broken", "arguments": {"x": 1}})


def test_an_answer_without_a_call_is_judged():
    episode = Tools({"add": talkers.add}, judge)()
    episode.reset(PROMPT, ADDRESS)
    assert (episode.step("2"), episode.step("3")) == (StepResult((), 1.0, True), StepResult((), 0.0, True))


def test_a_policy_whose_template_takes_no_tools_is_told_of_them():
    schema = describe(talkers.add, "add")
    assert schema["function"]["parameters"]["properties"]["x"] == {"type": "integer", "description": "The first."}
    said = Tools({"add": talkers.add}, judge, system_text([schema]))().reset(PROMPT, ADDRESS)
    assert [message["role"] for message in said] == ["system", "user"]
    assert '{"name": "add", "arguments": {"x": "...", "y": "..."}}' in said[0]["content"]
    own = Prompt(3, ({"role": "system", "content": "Be brief."}, *PROMPT.messages), "2")
    said = Tools({"add": talkers.add}, judge, "You can add.")().reset(own, ADDRESS)
    assert said[0] == {"role": "system", "content": "Be brief.\n\nYou can add."}
    with pytest.raises(ValueError, match="tool 'undescribed' does not say how it is called"):
        describe(talkers.undescribed, "undescribed")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * (3 + 4)", "84"),
        ("4837*2915", "14099855"),
        ("7/2", "3.5"),
        ("-7 // 2", "-4"),
        ("10 % 4", "2"),
        ("0.1 + 0.2", "0.3"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["2 ** 9", "a + 1", "1 +", "f(1)", "1" * 201, "'a' * 3", "True + 1", "9" * 150 + "*9"]
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression):
    with pytest.raises(ValueError, match=r"expression|too large"):
        calculate(expression)


def test_division_by_zero_is_an_arithmetic_error():
    with pytest.raises(ZeroDivisionError):
        calculate("1 / 0")


# ---- environments in the style of Gymnasium ----


def test_a_gymnasium_environment_is_a_task():
    found = load_task(TaskSettings(name="gym:talkers:Countdown"), seed=0)
    assert isinstance(found, TaskWithEnvironment)
    prompt = found.prompt("test", 1)
    assert prompt.answer == 10_001
    with EnvironmentPool(found.environment, workers=1) as environments:
        opened = Prompt(1, environments.open(prompt, ("opening",)), prompt.answer)
        assert opened.messages == ({"role": "user", "content": "4 to go"},)
        kind, (said, worth, state) = environments.result(environments.submit(None, opened, ADDRESS, "go"))
        assert (kind, said[0]["content"], worth) == ("turn", "step\n3 to go", 0.5)
        ends = [environments.result(environments.submit(state, None, None, text)) for text in ("stop", "go", "stop")]
    assert ends[0] == ends[2] == ("final", (0.5, "truncated by the environment"))
    assert ends[1][1][:2] == (
        ({"role": "user", "content": "step\n2 to go"},),
        1.0,
    )  # a process that lacks its steps takes them


def test_a_gymnasium_environment_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no attribute 'Countup'"):
        load_task(TaskSettings(name="gym:talkers:Countup"), seed=0)


# ---- the task calculator ----


def test_the_calculators_examples_are_written_out_for_a_template_without_tools():
    found = load_task(TaskSettings(name="calculator", examples=1), seed=0)
    assert isinstance(found, TaskWithEnvironment)
    prompt = found.prompt("train", 0)
    a, sign, b = prompt.messages[-1]["content"].removeprefix("What is ").removesuffix("?").split()
    assert (sign, prompt.answer) == ("*", str(int(a) * int(b)))
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool", "assistant", "user"]
    made = found.environment
    assert isinstance(made, Tools)
    said = replace(made, system="Call.")().reset(prompt, ADDRESS)
    call = '<tool_call>[{"name": "calculate", "arguments": {"expression": "27 * 34"}}]</tool_call>'
    assert said[2] == {"role": "assistant", "content": call}
    assert find_calls(call) == [Call("calculate", {"expression": "27 * 34"})]
    assert made().reset(prompt, ADDRESS) == prompt.messages
