"""Environments in worker processes, tools, and the tasks that come with them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import talkers
from scoring import reward_of
from test_tasks import task_settings

from lagrpo.rewards.pool import WorkerPool
from lagrpo.rewards.reward import Rewards
from lagrpo.tasks import StepResult, environment_of, load_task
from lagrpo.tasks.calculator import calculate
from lagrpo.tasks.environments import Tools, describe, find_calls, run_turn, system_text, take_turn
from lagrpo.tasks.guess_number import GuessNumber, read_guess
from lagrpo.types import Outcome, Prompt

QUESTION = {"role": "user", "content": "1+1"}
PROMPT = Prompt(3, (QUESTION,), "2")
KEY = (0, "sample", 1, 0, 3, 2)


@pytest.fixture(scope="module")
def wordy():
    with WorkerPool(talkers.Wordy) as pool:
        yield pool


def say(
    pool: WorkerPool,
    text: str | None,
    state: bytes | None = None,
    prompt: Prompt = PROMPT,
    deadline: float = 60.0,
) -> Any:
    opening = (prompt, KEY) if state is None else (None, None)
    return pool.result(pool.submit(take_turn, state, *opening, text, deadline=deadline))


def test_episode_goes_through_the_workers(wordy):
    assert say(wordy, None)[0].messages == PROMPT.messages
    first, state = say(wordy, "a")
    assert (first.reward, first.messages[0]["content"][:2], first.done) == (0.1, "1/", False)
    second, state = say(wordy, "b", state)
    assert (second.reward, second.messages[0]["content"][:2]) == (0.2, "2/")
    assert say(wordy, "cc", state)[0] == StepResult((), 0.4, True, "after 3 turns")
    assert say(wordy, "a")[0] == first  # seeded by the key


def test_failure_leaves_the_completion_unscored_with_the_reason(wordy):
    _, state = say(wordy, "a")
    for text, reason in [
        ("raise", "the environment raised RuntimeError: broken"),
        ("interrupt", "the environment raised KeyboardInterrupt"),
        ("hang", "no reward within 1 s"),
        ("exit", "the worker process ended with exit code 3"),
        ("nan", "the environment raised ValueError: its reward is nan"),
        ("open", "the environment raised TypeError: cannot pickle"),
    ]:
        deadline = 1.0 if text == "hang" else 60.0
        outcome = say(wordy, text, state, deadline=deadline)
        assert isinstance(outcome, Outcome)
        assert (outcome.kind, outcome.reason[: len(reason)]) == ("unscored", reason)
        assert isinstance(say(wordy, "b", state), tuple)  # the others continue


# Guess_number


def test_guess_number_is_a_task_with_an_environment():
    task = load_task(task_settings("guess_number", options={"largest": 20}), seed=1)
    assert environment_of(task) is GuessNumber
    answers = [
        task.prompt(split, n).answer for split in ("train", "test") for n in range(task.size(split))
    ]
    assert (sorted(answers), task.size("test")) == (list(range(1, 21)), 4)
    assert (
        task.prompt("train", 0)
        .messages[0]["content"]
        .startswith("I think of a whole number from 1 to 20.")
    )
    assert (reward_of(task, "7", 7), reward_of(task, "8", 7)) == (1.0, 0.0)


def test_guess_number_is_solved_by_bisection():
    game, low, high = GuessNumber(), 1, 31
    game.reset(Prompt(0, (QUESTION,), 19), ())
    assert game.step("five?").messages[0]["content"].startswith("That is no number.")
    while not (reply := game.step(f"{(guess := (low + high) // 2)}.")).done:
        low, high = (
            (guess + 1, high) if "higher" in reply.messages[0]["content"] else (low, guess - 1)
        )
    assert reply == StepResult((), 1.0, True, "found with guess 6")
    assert [read_guess(text) for text in ("It is 7.", "1/2", "", "-3", "6 or 7")] == [
        7,
        None,
        None,
        -3,
        None,
    ]


# Tools


def test_calls_are_read_in_three_formats():
    two = [("f", {"x": 1}), ("g", {})]
    for text, calls in [
        ('The set {1, 2} has "name" in it', []),
        (
            'A<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
            '<tool_call>{"name": "g"}</tool_call>',
            two,
        ),
        ('<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g"}]</tool_call>', two),
        ('{"name": "f", "parameters": {"x": "1"}}', [("f", {"x": "1"})]),
    ]:
        assert find_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        pytest.param('{"name": "Ann", "age": 5}', [], id="object"),
        pytest.param('[{"name": "Ann", "age": 5}]', [], id="list"),
        pytest.param('```json\n{"name": "Ann", "arguments": {}}\n```', [], id="code fence"),
        pytest.param('{"name": "f", "parameters": "many"}', [], id="parameters as text"),
        pytest.param('{"name": 5, "arguments": {}}', [], id="name as number"),
        pytest.param('{"a": {"name": "f", "arguments": {}}}', [], id="within an object"),
        pytest.param('{"name": "f", "arguments": {}}', [("f", {})], id="call"),
        pytest.param('<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})], id="tag"),
    ],
)
def test_turn_of_json_is_a_call_only_with_a_name_and_an_object_of_arguments(text, calls):
    assert find_calls(text) == calls
    assert Tools({"f": talkers.add}).step(text).done == (not calls)


def order(dish: str, count: int, rate: float, hot: bool, tags: list[str], note: str | None) -> str:
    return ""


TAGGED = "<tool_call>\n<function=order>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        pytest.param("dish", "5", "5", id="text of digits"),
        pytest.param("dish", "two\n lines\n", "two\n lines\n", id="lines"),
        pytest.param("count", "5", 5, id="integer"),
        pytest.param("count", "five", "five", id="no integer"),
        pytest.param("rate", "0.5", 0.5, id="number"),
        pytest.param("hot", "true", True, id="JSON's true"),
        pytest.param("hot", "False", False, id="Python's false"),
        pytest.param("tags", '["a", "b"]', ["a", "b"], id="list"),
        pytest.param("note", "null", None, id="null"),
        pytest.param("note", "none left", "none left", id="text that may be null"),
        pytest.param("unknown", "5", 5, id="unknown parameter"),
    ],
)
def test_argument_in_tags_gets_the_type_of_its_parameter(name, written, value):
    call = TAGGED.format(f"<parameter={name}>\n{written}\n</parameter>\n")
    assert find_calls(call, {"order": order}) == [("order", {name: value})]


def test_calls_in_tags_are_read_in_order_and_faulty_ones_are_errors():
    two = TAGGED.format("") + TAGGED.format("<parameter=dish>a</parameter>").replace("order", "eat")
    assert find_calls(two, {"order": order}) == [("order", {}), ("eat", {"dish": "a"})]
    for faulty in (
        TAGGED.format("<parameter=dish>a"),
        TAGGED.format("").replace("</function>", ""),
        TAGGED.format("").replace("</tool_call>", ""),
    ):
        with pytest.raises(ValueError, match="has no </"):
            find_calls(faulty)


def test_malformed_call_gets_an_error_as_its_reply():
    for text, problem in [
        ('<tool_call>{"name": "f"}', "has no </tool_call>"),
        ("<tool_call>f(1)</tool_call>", "the call is not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a call is {"name"'),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            "the arguments of 'f' are not a JSON object",
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
        ('{"name": "f", "parameters": {"x": 1', "the call is not JSON"),
    ]:
        reply = Tools({"add": talkers.add})().step(text)
        assert (reply.done, reply.messages[0]["role"]) == (False, "tool")
        assert problem in reply.messages[0]["content"]


def use(name: str, **arguments: Any) -> str:
    episode = Tools({f.__name__: f for f in (talkers.add, talkers.divide, talkers.broken)})()
    episode.reset(PROMPT, KEY)
    call = json.dumps({"name": name, "arguments": arguments})
    (message,) = pickle.loads(pickle.dumps(episode)).step(f"<tool_call>{call}</tool_call>").messages
    return message["content"]


@pytest.mark.timeout(20)
def test_unclosed_calls_are_found_in_linear_time():
    with pytest.raises(ValueError, match="has no </tool_call>"):
        find_calls("<tool_call>" * 200_000)


def test_calls_are_carried_out_and_mistakes_are_replies():
    assert (use("add", x=2, y=3), use("divide", x=1, y=4)) == ("5", "0.25")
    assert use("divide", x=1, y=0) == "Error: division by zero"
    assert use("add", x=1).startswith("Error: add() missing 1 required")
    assert use("sub") == "Error: no function 'sub'; functions: add, divide, broken"
    with pytest.raises(OSError, match="the network is down"):
        use("broken", x=1)


def test_turn_without_a_call_is_an_answer_for_the_reward_functions():
    episode = Tools({"add": talkers.add})()
    episode.reset(PROMPT, KEY)
    assert episode.step("2") == StepResult(done=True, is_answer=True)


DRAFT = '<tool_call>{"name": "add", "arguments": {"x": 1, "y": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        pytest.param(f"<think>Maybe {DRAFT} …</think>The answer is 2", 0, id="draft, then answer"),
        pytest.param(f"Maybe {DRAFT} …</think>The answer is 2", 0, id="template opened it"),
        pytest.param(f"<think>Maybe {DRAFT}</think>{DRAFT}", 1, id="draft, then call"),
        pytest.param(f"<think>I add.</think>\n{DRAFT}", 1, id="call after thinking"),
        pytest.param("<think>A <tool_call> is …</think>2", 0, id="tag alone"),
        pytest.param(f"<think>Maybe {DRAFT}", 0, id="thinking without an end"),
        pytest.param(f"[THINK]Maybe {DRAFT}[/THINK]2", 0, id="Magistral's tags"),
        pytest.param('<think>hm</think>\n{"name": "add", "parameters": {}}', 1, id="Llama's form"),
        pytest.param(DRAFT, 1, id="no thinking"),
    ],
)
def test_calls_count_after_the_thinking_ends(text, calls):
    assert len(find_calls(text)) == calls
    episode = Tools({"add": talkers.add})()
    episode.reset(PROMPT, KEY)
    assert episode.step(text).done == (calls == 0)


def test_turn_cut_in_a_thought_that_the_template_opened_neither_calls_nor_guesses():
    tools = Tools({"add": talkers.add})()
    assert tools.step(f"Maybe {DRAFT}", prefix="<think>\n").is_answer
    game = GuessNumber()
    game.reset(Prompt(0, (QUESTION,), 19), ())
    assert not game.step("19 or so: 19", prefix="<think>\n").done
    assert game.step("hm</think>19", prefix="<think>\n").done


def test_environment_gets_the_prefix_of_a_turn_if_it_takes_it():
    reply, _ = run_turn(talkers.Prefixed, None, PROMPT, KEY, "a", "<think>")
    assert reply.messages[0]["content"] == "<think>"


def test_messages_of_an_environment_are_read_as_those_of_the_data():
    reply, _ = run_turn(talkers.Parts, None, PROMPT, KEY, "a")
    assert reply.messages == ({"role": "tool", "content": "5!"},)


def test_system_message_lists_tools_for_a_template_that_does_not():
    schema = describe(talkers.add)
    assert schema["function"]["parameters"]["properties"]["x"] == {
        "type": "integer",
        "description": "The first.",
    }
    messages = Tools({"add": talkers.add}, system_text([schema]))().reset(PROMPT, KEY)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert '{"name": "add", "arguments": {"x": "...", "y": "..."}}' in messages[0]["content"]
    prompt = Prompt(3, ({"role": "system", "content": "Be brief."}, QUESTION), "2")
    messages = Tools({"add": talkers.add}, "You can add.")().reset(prompt, KEY)
    assert messages[0] == {"role": "system", "content": "Be brief.\n\nYou can add."}


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param(["exact"], id="one"),
        pytest.param(["exact", "number"], id="two"),
        pytest.param(["sample_rewards:short", "sample_rewards:compute_score"], id="TRL, verl"),
    ],
)
def test_environment_of_tools_may_give_the_first_of_all_rewards(rewards):
    settings = task_settings("arithmetic", tools=["calculator"], rewards=rewards)
    parts = Rewards.from_reward(load_task(settings, seed=0).reward).parts
    assert [part.name for part in parts] == [reward.rpartition(":")[2] for reward in rewards]
    assert [part.is_of_environment for part in parts] == [True, False][: len(rewards)]


def test_unknown_tool_is_rejected_with_a_similar_name():
    settings = task_settings("arithmetic", tools=["calculater"])
    with pytest.raises(ValueError, match=r"no tool 'calculater'.*Did you mean 'calculator'"):
        load_task(settings, seed=0)


# The task calculator and its tool


def test_calculator_computes_exactly_and_rejects_everything_else():
    results = {
        "12 * (3 + 4)": "84",
        "7/2": "3.5",
        "-7 // 2": "-4",
        "10 % 4": "2",
        "0.1 + 0.2": "0.3",
    }
    assert {expression: calculate(expression) for expression in results} == results
    for wrong in ("2 ** 9", "a + 1", "1 +", "f(1)", "1" * 201, "'a' * 3", "True + 1"):
        with pytest.raises(ValueError, match="expression"):
            calculate(wrong)
    with pytest.raises(ZeroDivisionError):
        calculate("1 / 0")


def test_examples_of_the_calculator_are_written_out_for_a_template_without_tools():
    task = load_task(task_settings("calculator", options={"examples": 1}), seed=0)
    prompt, tools = task.prompt("train", 0), environment_of(task)
    a, sign, b = prompt.messages[-1]["content"].removeprefix("What is ").removesuffix("?").split()
    assert (sign, prompt.answer) == ("*", str(int(a) * int(b)))
    assert [message["role"] for message in prompt.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert isinstance(tools, Tools)
    first_messages = replace(tools, system="Call.")().reset(prompt, KEY)
    assert find_calls(first_messages[2]["content"]) == [("calculate", {"expression": "27 * 34"})]
    assert tools().reset(prompt, KEY) == prompt.messages


# Gym:NAME


def test_gymnasium_environment_is_a_task():
    task = load_task(task_settings("gym:talkers:Countdown"), seed=0)
    prompt, make = task.prompt("test", 1), environment_of(task)
    assert (prompt.answer, make is not None) == (10_001, True)
    with WorkerPool(make) as pool:
        opened = Prompt(1, say(pool, None, prompt=prompt)[0].messages, prompt.answer)
        assert opened.messages == ({"role": "user", "content": "4 to go"},)
        reply, state = say(pool, "go", prompt=opened)
        assert (reply.messages[0]["content"], reply.reward) == ("step\n3 to go", 0.5)
        stopped, going = (say(pool, text, state)[0] for text in ("stop", "go"))
    assert stopped == StepResult((), 0.5, True, "truncated")
    assert (going.messages[0]["content"], going.reward) == ("step\n2 to go", 1.0)
