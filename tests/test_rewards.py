"""Rewards: three signatures, built-in rewards, several rewards of a completion, and what a run
records of each."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
import sample_rewards
from rich.console import Console
from running import tiny_settings
from scoring import QUESTION, make_completion, make_group, reward_of, score

from lagrpo.errors import SettingsError
from lagrpo.lifecycle.run import train
from lagrpo.rewards.builtin import exact, format, length
from lagrpo.rewards.entries import REWARDS, load_function, load_reward
from lagrpo.rewards.reward import (
    OURS,
    PASSED,
    TRL,
    VERL,
    Reward,
    RewardFunction,
    RewardKwargs,
    Rewards,
    UnscorableError,
)
from lagrpo.rewards.texts import find_accepted, normal_form, text_after_thinking
from lagrpo.rewards.worker import to_outcome
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.settings.load import load_settings
from lagrpo.settings.sections import RewardSettings
from lagrpo.startup.checks import check_settings
from lagrpo.startup.given_rewards import as_reward
from lagrpo.tasks import RowTask, load_task
from lagrpo.terminal.show import show
from lagrpo.types import JsonObject, JsonView, Outcome, OutcomeKind, Prompt
from lagrpo.verify import verify_run

T = TypeVar("T")


def arguments(function: RewardFunction, row: JsonView | None = None) -> list[RewardKwargs]:
    completions = [make_completion("2", 3), make_completion("x")]
    return Reward(function).arguments(
        Prompt(0, QUESTION, "2", row=row, prefix="<think>"), completions
    )


# Signatures


def test_our_signature_gets_what_it_names():
    def some(
        completion: str, row: object, finished: bool, num_tokens: int, prompt: object, prefix: str
    ) -> float:
        return 0.0

    first, second = arguments(some, {"level": 3})
    expected = {"row": {"level": 3}, "finished": True, "prompt": [*QUESTION], "prefix": "<think>"}
    assert first == expected | {"completion": "2", "num_tokens": 3}
    assert (second["completion"], second["num_tokens"]) == ("x", 0)


def test_trl_signature_gets_lists_and_the_columns_in_the_form_of_the_prompt():
    (passed,) = arguments(sample_rewards.ranked, {"prompt": "1 + 1?", "level": 3})
    texts = {
        "prompts": ["1 + 1?"] * 2,
        "completions": ["2", "x"],
        "answer": ["2"] * 2,
        "level": [3] * 2,
    }
    assert passed == texts | {"completion_ids": [[0, 1, 2], []]}
    (passed,) = arguments(sample_rewards.ranked, {"prompt": [*QUESTION]})
    assert passed["completions"] == [
        [{"role": "assistant", "content": text}] for text in ("2", "x")
    ]
    assert passed["prompts"] == [[*QUESTION]] * 2
    (passed,) = arguments(
        lambda completion_ids, **kwargs: []
    )  # the first example of TRL's documentation
    assert passed["completion_ids"] == [[0, 1, 2], []]


def test_every_signature_gets_the_arguments_that_it_promises():
    functions = {
        OURS: lambda completion, **kwargs: 0.0,
        TRL: lambda completions, **kwargs: [],
        VERL: lambda solution_str, **kwargs: 0.0,
    }
    for style, function in functions.items():
        group = make_group("2")
        kwargs = Reward(function).arguments(group.prompt, group.completions)[0]
        assert set(kwargs) == set(PASSED[style])


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids"])
def test_column_of_the_data_does_not_replace_what_was_sampled(column):
    (passed,) = arguments(sample_rewards.ranked, {"prompt": "1 + 1?", column: "of the data"})
    assert passed["prompts"] == ["1 + 1?"] * 2
    assert passed["completions"] == ["2", "x"]
    assert passed["completion_ids"] == [[0, 1, 2], []]


def test_option_that_a_partial_has_bound_stays():
    (first, _) = arguments(partial(lambda completion, prefix, row: 0.0, prefix="mine"))
    assert set(first) == {"completion", "row"}


@pytest.mark.parametrize(
    "reward",
    [
        pytest.param(lambda: Reward(Reward), id="class"),
        pytest.param(lambda: Reward("exact"), id="name"),  # pyright: ignore[reportArgumentType]
        pytest.param(lambda: Reward(exact, weight=float("nan")), id="weight"),
        pytest.param(lambda: Reward(exact, range=5), id="range"),  # pyright: ignore[reportArgumentType]
        pytest.param(lambda: Reward(exact, range=(0, float("inf"))), id="endless"),
    ],
)
def test_reward_that_cannot_be_used_is_rejected_when_it_is_made(reward):
    with pytest.raises(ValueError, match=r"class|function|range"):
        reward()


def test_function_of_another_signature_is_rejected():
    for function, row, message in [
        (
            lambda text, gold: 0.0,
            None,
            r"\(text, gold\): name the parameters \(completion, answer\)",
        ),
        (lambda completion, anwser: 0.0, None, "takes 'anwser'.*Did you mean 'answer'"),
        (
            lambda completions, levl, **columns: [],
            {"level": 1},
            "takes 'levl'.*Did you mean 'level'",
        ),
        (lambda completion, /: 0.0, None, "takes 'completion'"),
        (lambda completions, log_metric: 0.0, None, "log_metric.*callback"),
        (
            lambda prompts, completions, prompt: [],
            {"prompt": "1 + 1?"},
            "takes 'prompt'.*Did you mean 'prompts'",
        ),
        (lambda completion, completions: 0.0, {"completions": "x"}, "takes 'completions'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Reward(function).check(row)


# As Python users give them


class Judge:
    """A reward whose class takes an argument."""

    def __init__(self, grade: float) -> None:
        self.grade = grade

    def __call__(self, completion: str) -> float:
        return self.grade


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        pytest.param(5, "neither a function nor a name", id="number"),
        pytest.param([exact], "neither a function nor a name", id="list in a list"),
        pytest.param(Judge, r"Judge.*'grade'.*options", id="class without its argument"),
        pytest.param({"reward": Judge, "options": {"x": 1}}, "Judge.*'x'", id="option of a class"),
        pytest.param({"reward": exact, "options": {"x": 1}}, "exact.*'x'", id="option"),
        pytest.param({"reward": exact, "weight": "x"}, "exact.*weight", id="weight"),
    ],
)
def test_reward_of_a_wrong_type_is_rejected_with_its_name(given, problem):
    with pytest.raises(ValueError, match=problem) as raised:
        as_reward(given)
    assert "\n" not in str(raised.value)


def test_class_in_a_table_becomes_an_object_with_its_options():
    reward = as_reward({"reward": Judge, "options": {"grade": 0.5}, "weight": 2})
    assert (reward.function(completion=""), reward.weight, reward.name) == (0.5, 2.0, "Judge")


# Built-in rewards


def test_length_falls_from_the_target_to_the_limit():
    """cos(pi/3) = 1/2: a third of the way from 4 to 16 the cosine is at (1 + 1/2) / 2."""
    assert [length("", tokens, limit=16, target=4) for tokens in (4, 7, 16, 99)] == [
        1.0,
        0.75,
        0.0,
        0.0,
    ]
    cosine = [length("", tokens, limit=16, target=4, shape="cosine") for tokens in (0, 8, 10, 16)]
    assert cosine == pytest.approx([1.0, 0.75, 0.5, 0.0])


def test_format_wants_every_tag_once_and_in_order_or_the_pattern():
    right = [
        "<think>so</think><answer>4</answer>",
        " <think>a < b\n</think>\n\n<answer> 4 </answer>\n",
    ]
    wrong = [
        "<think> </think><answer>4</answer>",
        "<think>so</think> it is <answer>4</answer>",
        "<answer>4</answer><think>so</think>",
        "<think>so</think><answer>4</answer><answer>5</answer>",
        "<think>" + " " * 100_000 + "</think><answer>4</answer>",
    ]
    assert ([format(text) for text in right], [format(text) for text in wrong]) == (
        [1.0] * 2,
        [0.0] * 5,
    )
    assert [format(text, pattern=r"\d+.*!") for text in ("12 a\nb!", "x12!", "12!?")] == [
        1.0,
        0.0,
        0.0,
    ]
    assert format("so</think><answer>4</answer>", "<think>\n") == 1.0


def test_exact_compares_without_outer_white_space_and_an_empty_answer_is_unscorable():
    assert [exact(text, 7) for text in (" 7\n", "7.0")] == [1.0, 0.0]
    cases = (("7", 7.0), ("7.0", 7.0), ("true", True), ("t", True))
    assert [exact(text, answer) for text, answer in cases] == [1.0, 1.0, 1.0, 0.0]
    for empty in (None, "", " \n", {"a": "7"}):
        with pytest.raises(UnscorableError):
            exact("", empty)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        pytest.param("0.00001", 1e-05, 1.0, id="small float"),
        pytest.param("1E5", 1e5, 1.0, id="exponent"),
        pytest.param("0.10", 0.1, 1.0, id="further zero"),
        pytest.param("10000000000000000000000", 1e22, 1.0, id="large float"),
        pytest.param("0.2", 0.1, 0.0, id="other float"),
        pytest.param("one", 1.0, 0.0, id="word for a float"),
        pytest.param("1.1", "1.10", 0.0, id="text with a zero"),
        pytest.param("9007199254740993", 2**53 + 1, 1.0, id="integer beyond 2^53"),
        pytest.param("caf\u00e9", "cafe\u0301", 1.0, id="NFD answer"),
        pytest.param("cafe\u0301", "caf\u00e9", 1.0, id="NFD completion"),
        pytest.param("a\nb", "a\r\nb", 1.0, id="line ends of Windows"),
        pytest.param("It's", "It\u2019s", 1.0, id="curly quote"),
        pytest.param("-18", "\uff0d18", 1.0, id="wide minus"),
        pytest.param("18", "\uff0d18", 0.0, id="wide minus counts"),
        pytest.param("x2", "x\u00b2", 0.0, id="superscript is no digit"),
        pytest.param("<think>hm</think> Paris", "Paris", 1.0, id="after thinking"),
    ],
)
def test_exact_compares_numbers_and_texts_in_normal_form(completion, answer, reward):
    assert exact(completion, answer) == reward


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        pytest.param("\uff11\uff18", "18", id="wide digits"),
        pytest.param("\u0661\u066c\u0662\u0663\u0664\u066b\u0665", "1,234.5", id="Arabic digits"),
        pytest.param("\u22127 \ufe637", "-7 -7", id="minus signs"),
        pytest.param("1\u202f234\u00a0567", "1234567", id="spaces in a number"),
        pytest.param("7\u00a0km, 12\u00a034", "7 km, 12 34", id="other no-break spaces"),
        pytest.param("\ufeff7", "7", id="mark of the file's beginning"),
        pytest.param("7\u00b2 \u00bd \u2467 1990\u20131995", None, id="kept"),
        pytest.param("\ufb01 \u00e6 \u0153", None, id="ligatures are kept"),
    ],
)
def test_normal_form_has_one_spelling_of_digits_signs_and_spaces(text, normal):
    assert normal_form(text) == (text if normal is None else normal)


@pytest.mark.parametrize(
    ("completion", "prefix", "answer"),
    [
        pytest.param("7", "<think>\n", "", id="cut"),
        pytest.param("hm</think>7", "<think>\n", "7", id="ended"),
        pytest.param("7", "<think>\n\n</think>\n\n", "7", id="thinking is off"),
        pytest.param("7", "[THINK]", "", id="Magistral"),
        pytest.param("7", "<seed:think>", "", id="Seed"),
        pytest.param("7", "<|channel|>analysis<|message|>", "", id="gpt-oss"),
        pytest.param("hm<|channel|>final<|message|>7", "", "7", id="gpt-oss ended"),
        pytest.param("7", "Sure. <think>", "", id="message of the assistant"),
        pytest.param("7", "It is ", "7", id="beginning of the answer"),
        pytest.param(" <think>7", "", "", id="opened by the completion"),
    ],
)
def test_thinking_that_the_prompt_opened_does_not_count(completion, prefix, answer):
    assert text_after_thinking(completion, prefix) == answer


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        pytest.param("['Paris', 'paris']", ["Paris", "paris"], id="Python"),
        pytest.param('["Paris", "paris"]', ["Paris", "paris"], id="JSON"),
        pytest.param("['Paris' \"paris's\"\n 'P']", ["Paris", "paris's", "P"], id="NumPy"),
        pytest.param("['Paris']", ["Paris"], id="one entry"),
        pytest.param("[['a'], ['b']]", ["a", "b"], id="nested"),
        pytest.param('{"target": ["Paris"]}', ["Paris"], id="object with a list"),
        pytest.param("{'ground_truth': 7}", [7], id="object with a number"),
        pytest.param('{"name": "Ann"}', [], id="other object"),
        pytest.param("[1, 2]", [], id="numbers"),
        pytest.param("['a', 1]", [], id="mixed"),
        pytest.param("['a'", [], id="no literal"),
        pytest.param("'a'", [], id="quoted text"),
    ],
)
def test_text_that_lists_accepted_answers_means_any_of_them(answer, accepted):
    assert find_accepted(answer) == accepted
    assert [exact(str(entry), answer) for entry in accepted] == [1.0] * len(accepted)
    assert (exact(answer, answer), exact("London", answer)) == (1.0, 0.0)


def test_list_as_the_answer_means_any_of_its_entries():
    number = load_function(REWARDS["number"])
    assert [number(text, ["no number", "7", ["8"]]) for text in ("It is 8.", "It is 9.")] == [
        1.0,
        0.0,
    ]
    for nothing in ([], ["no number"]):
        with pytest.raises(UnscorableError):
            number("7", nothing)


# Several rewards


def several(**functions_and_options: tuple[RewardFunction, dict[str, Any]]) -> Rewards:
    return Rewards(
        tuple(
            Reward(function, name=name, **other)
            for name, (function, other) in functions_and_options.items()
        )
    )


def combine(rewards: Rewards, *values: float | None) -> Outcome:
    return rewards.combine(
        [
            Outcome(OutcomeKind.UNSCORED) if value is None else Outcome.scored(value)
            for value in values
        ]
    )


def test_the_weighted_sum_and_what_is_correct():
    """1 * 1 + .5 * .2 - .25 * 2 = .6"""
    three = several(
        a=(exact, {}), b=(exact, {"weight": 0.5}), c=(exact, {"weight": -0.25, "range": (0, 4)})
    )
    combined = combine(three, 1.0, 0.2, 2.0)
    assert (combined.kind, combined.parts, combined.correct) == (
        "scored",
        {"a": 1.0, "b": 0.2, "c": 2.0},
        True,
    )
    assert combined.reward == pytest.approx(0.6)
    assert combine(three, 0.9, 1.0, 4.0).correct is False


def test_none_is_left_out_of_the_sum_and_an_error_leaves_the_completion_unscored():
    both = several(a=(exact, {}), b=(exact, {"weight": 0.5}))
    assert combine(both, None, 1.0) == Outcome(
        OutcomeKind.SCORED, 0.5, parts={"a": None, "b": 1.0}, correct=None
    )
    assert combine(both, 1.0, None).correct is True
    assert combine(both, 0.0, None).correct is False
    assert combine(both, None, None).reason == "the reward function returned None"
    combined = both.combine([Outcome.scored(1.0), Outcome.unscored("no reward within 5 s")])
    assert combined == Outcome(
        OutcomeKind.UNSCORED, None, "no reward within 5 s (reward 'b')", {"a": 1.0, "b": None}
    )


@pytest.mark.parametrize(
    ("first", "second", "values", "problems"),
    [
        pytest.param({}, {}, (1.0, 0.0), [], id="inside"),
        pytest.param({}, {}, (2.0, 0.0), ["'a'.*pass@1"], id="first, hidden in the sum"),
        pytest.param({"weight": 0.5}, {}, (2.0, 0.0), ["'a'.*pass@1"], id="first, half weight"),
        pytest.param({"weight": 0.0}, {}, (2.0, 0.0), ["'a'.*pass@1"], id="first, no weight"),
        pytest.param({"range": (0, 2)}, {}, (2.0, 0.0), [], id="range of the first"),
        pytest.param({"range": (-1, 0)}, {}, (1.0, 0.0), ["'a'.*pass@1"], id="negative range"),
        pytest.param({}, {}, (1.0, -1.0), ["'b'.*improvement"], id="second"),
        pytest.param({}, {"weight": 0.0}, (1.0, -1.0), [], id="second, no weight"),
        pytest.param({}, {}, (None, 1.0), [], id="first does not score"),
        pytest.param({}, {}, (5.0, 5.0), ["'a'.*pass@1", "'b'.*improvement"], id="both"),
    ],
)
def test_values_outside_the_range_of_their_reward_are_named(first, second, values, problems):
    rewards = several(a=(exact, first), b=(exact, second))
    warnings = rewards.describe_outside([combine(rewards, 0.0, 0.0), combine(rewards, *values)])
    assert len(warnings) == len(problems)
    for warning, problem in zip(warnings, problems, strict=True):
        assert re.search(problem, warning)


@pytest.mark.parametrize(("value", "count"), [(1.0, 0), (5.0, 1)], ids=["inside", "outside"])
def test_only_reward_without_a_name_lies_between_0_and_1(value, count):
    rewards = Rewards.from_reward(exact)
    assert len(rewards.describe_outside([Outcome.scored(value), Outcome.unscored("no")])) == count


def test_every_signature_gives_each_completion_its_reward():
    rewards = several(
        right=(exact, {}),
        letters=(sample_rewards.letters, {"weight": 2.0}),
        rank=(sample_rewards.ranked, {}),
        level=(sample_rewards.by_level, {}),
        verl=(sample_rewards.compute_score, {"range": (2.0, 3.0)}),
        together=(sample_rewards.awaited_together, {}),
        here=(lambda completion: len(completion), {}),
    )
    outcomes = score(
        rewards, [make_group("7", "seven", "77", row={"prompt": "1 + 1?", "level": 2})]
    )
    values = [(1, 0, 0, 1, 3, 1, 1), (0, 0.625, 2 / 3, 0, 2, 0, 5), (0, 0, 1 / 3, 0, 2, 0, 2)]
    assert [o.parts for o in outcomes] == [
        pytest.approx(dict(zip(rewards.names, v, strict=True))) for v in values
    ]
    assert [o.reward for o in outcomes] == pytest.approx([sum(v) + v[1] for v in values])
    assert [o.correct for o in outcomes] == [True, False, False]


def test_coroutines_run_concurrently_and_each_within_its_deadline():
    """Twelve of half a second fit into one call of at most 3.5 seconds; the one of an hour does not
    hold them up."""
    waits = several(waits=(sample_rewards.awaited, {}))
    outcomes = score(waits, [make_group(*["5"] * 12, "36000", "fail")], deadline=1.5)
    assert [o.reward for o in outcomes] == [1.0] * 12 + [None] * 2
    late, refused = (o.reason for o in outcomes[12:])
    assert late == "no reward within 1.5 s (reward 'waits')"
    assert "ConnectionError: refused" in refused


def in_a_notebook(work: Callable[[], T]) -> T:
    """Returns the result of work(), called while this thread runs an event loop."""

    async def cell() -> T:
        return work()

    return asyncio.run(cell())


def test_coroutines_of_this_process_are_awaited_while_it_runs_an_event_loop():
    """Each group is another call. A lock, as a client of a server, belongs to the loop that it was
    first used in."""
    lock = asyncio.Lock()

    async def locked(completion: str) -> float:
        async with lock:
            await asyncio.sleep(0.001)
        return float(completion)

    groups = [make_group("7", "8"), make_group("9")]
    outcomes = in_a_notebook(lambda: score(several(here=(locked, {})), groups))
    assert [o.reward for o in outcomes] == [7.0, 8.0, 9.0]


def test_coroutine_that_raises_costs_its_completion_only():
    async def strict(completion: str) -> float:
        errors = {"late": TimeoutError("mine"), "exit": SystemExit(3)}
        if completion in errors:
            raise errors[completion]
        return 1.0

    def maybe(completion: str) -> Coroutine[object, object, float]:
        if completion == "before":
            raise ValueError("no")
        return strict(completion)

    outcomes = score(several(here=(maybe, {})), [make_group("before", "late", "exit", "7")])
    assert [o.reward for o in outcomes] == [None, None, None, 1.0]
    errors = ["ValueError: no", "TimeoutError: mine", "SystemExit: 3"]
    for outcome, error in zip(outcomes[:3], errors, strict=True):
        assert f"raised {error}" in outcome.reason


@pytest.mark.parametrize("act", ["stop", "exit", "cancel"])
def test_call_after_a_coroutine_that_disturbs_the_event_loop_is_scored(act):
    async def exits() -> None:
        raise SystemExit

    async def disturb(completion: str) -> float:
        if completion == "stop":
            asyncio.get_running_loop().stop()
        if completion == "exit":
            await asyncio.create_task(exits())
        if completion == "cancel":
            for task in asyncio.all_tasks():
                task.cancel()
        return 1.0

    first, second = score(several(here=(disturb, {})), [make_group(act), make_group("7")])
    assert first.reward == (1.0 if act == "stop" else None)
    assert second.reward == 1.0


def test_generator_in_trls_signature_gives_each_completion_its_value():
    def yields(completions: list[object]) -> Iterator[float]:
        for completion in completions:
            if completion == [{"role": "assistant", "content": "fail"}]:
                raise ValueError("no")
            yield 0.5

    both = score(several(here=(yields, {})), [make_group("7", "8"), make_group("7", "fail")])
    assert [o.reward for o in both] == [0.5, 0.5, None, None]
    assert "raised ValueError: no" in both[2].reason


@pytest.mark.parametrize("kind", ["in our signature", "asynchronous"])
def test_generator_that_cannot_be_a_reward_is_named(kind):
    def ours(completion: str) -> Iterator[float]:
        yield 1.0

    async def asynchronous(completions: list[object]) -> AsyncIterator[float]:
        yield 1.0

    function = ours if kind == "in our signature" else asynchronous
    (outcome,) = score(several(here=(function, {})), [make_group("7")])
    assert outcome.reward is None
    assert "generator" in outcome.reason


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 10**400, "1.0"])
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["number", "verl"])
def test_reward_that_is_not_a_finite_number_does_not_count(value, is_wrapped):
    outcome = to_outcome({"score": value} if is_wrapped else value)
    assert (outcome.kind, outcome.reward) == (OutcomeKind.UNSCORED, None)
    assert "finite" in outcome.reason


def test_failures_cost_their_completions_and_no_other_reward():
    both = several(act=(sample_rewards.act, {}), letters=(sample_rewards.letters, {}))
    outcomes = score(both, [make_group("exit 3", "7")])
    assert (outcomes[0].kind, outcomes[0].parts) == ("unscored", {"act": None, "letters": 0.5})
    assert outcomes[1].reward == 1.0
    few = score(several(few=(sample_rewards.one_short, {})), [make_group("a", "b")])
    assert {o.reason for o in few} == {
        "the reward function returned a list of 1, not a list of 2 numbers (reward 'few')"
    }


# The settings


@pytest.mark.parametrize("name", ["Program", "Called", "Renamed"])
def test_class_without_the_signature_of_a_reward_is_rejected_before_an_object_is_made(name):
    entry = RewardSettings.model_validate({"reward": f"sample_rewards:{name}"})
    sample_rewards.made.clear()
    with pytest.raises(ValueError, match=f"{name}.*name the parameters"):
        load_reward(entry, None)
    assert sample_rewards.made == []


@pytest.mark.parametrize("name", ["Scaled", "Derived"])
def test_object_of_a_class_with_the_signature_of_a_reward_scores(name):
    options = {"scale": 2.0}
    entry = RewardSettings.model_validate({"reward": f"sample_rewards:{name}", "options": options})
    assert load_reward(entry, None).function(completion="ab", answer="") == 4.0


def test_contradictory_entries_are_rejected():
    for entry, message in [
        ({"reward": "lenght"}, "no built-in reward 'lenght'.*Did you mean 'length'"),
        ({"reward": "length", "options": {"limt": 8}}, r"'b', options: length: .*limt"),
        (
            {"reward": "x:y", "options": {"api_key": "sk-1"}},
            "options.api_key would be written to disk",
        ),
        ({"reward": "task", "name": "right"}, "two entries have the name 'right'"),
        (
            {"reward": "llm_judge", "options": {"url": "x", "model": "m"}},
            r"write http://host:port/v1",
        ),
    ]:
        rewards = [{"name": "right", "reward": "task"}, {"name": "b", **entry}]
        with pytest.raises(SettingsError, match=message):
            check_settings(load_settings({"task": {"name": "arithmetic", "rewards": rewards}}))


# What a run records

ENTRIES: list[JsonObject] = [
    {"name": "letters", "reward": "task", "range": [0, 0.5]},
    {"name": "rank", "reward": "sample_rewards:ranked", "weight": 0.5},
    {"name": "short", "reward": "length", "weight": 0.25, "options": {"limit": 7}},
    {"name": "sometimes", "reward": "sample_task:sometimes", "weight": 0},
]


@pytest.fixture(scope="module")
def settings(model, tmp_path_factory):
    """Settings of a run with several rewards."""
    root = tmp_path_factory.mktemp("several")
    task = {"name": "sample_task:load_letters", "rewards": ENTRIES}
    return tiny_settings(model, root, task=task, schedule={"batches": 2}, run={"seed": 5})


def test_each_reward_is_in_the_rollouts_the_metrics_the_evaluations_and_the_replay(settings):
    result = train(settings)
    rows, (line, _) = load_rollouts(result.run), load_metrics(result.run)
    for row in rows:
        parts = [row[f"reward_{entry['name']}"] for entry in ENTRIES]
        assert parts[2] == pytest.approx(1 - len(row["token_ids"]) / 7)
        if parts[3] is None:
            assert (row["outcome"], row["reward"], row["correct"]) == ("unscored", None, None)
            assert "RuntimeError: not today" in row["reason"]
            assert "(line " in row["reason"]
            assert row["reason"].endswith("(reward 'sometimes')")
        else:
            assert row["reward"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2])
            assert row["correct"] is (parts[0] >= 0.5)
    first = [row for row in rows if row["step"] == 1]
    assert line["rewards/letters/mean"] == pytest.approx(
        sum(row["reward_letters"] for row in first) / 8
    )
    assert line["completions/unscored"] == sum(r["outcome"] == "unscored" for r in first) > 0
    assert result.before
    records = load_evaluation_records(result.run, "before")
    means = [[value for value in record["reward_short"] if value is not None] for record in records]
    assert result.before["rewards/short/mean"] == pytest.approx(
        sum(sum(m) / len(m) for m in means) / len(means)
    )
    show(result.run, console=Console(width=200, file=(output := io.StringIO())))
    assert ", rank 0" in output.getvalue()
    assert verify_run(result.run, None, trust_run_code=True).differences == []


def test_one_entry_of_weight_one_or_a_closure_trains_as_a_single_reward(settings, tmp_path):
    single = {"name": "sample_task:load_letters"}
    loaded_task = load_task(load_settings({"task": single}).task, 0)
    assert isinstance(loaded_task, RowTask)
    closure_task = RowTask(
        loaded_task.name,
        loaded_task.rows,
        loaded_task.ask,
        lambda completion, answer: reward_of(loaded_task, completion, answer),
    )
    listed = single | {"rewards": [{"name": "only", "reward": "task"}]}
    rows_of_runs = []
    for name, (task, task_object) in {
        "a": (single, None),
        "b": (listed, None),
        "c": (single, closure_task),
    }.items():
        sections: dict[str, JsonObject] = {"eval": {"at_start": False}, "task": task}
        rows = load_rollouts(
            train(
                tiny_settings(settings["model"]["path"], tmp_path / name, **sections), task_object
            ).run
        )
        rows_of_runs.append(
            [{n: v for n, v in row.items() if n not in ("reward_only", "correct")} for row in rows]
        )
    assert rows_of_runs[0] == rows_of_runs[1] == rows_of_runs[2]
