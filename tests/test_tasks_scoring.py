"""Reading and scoring of answers: corpora of verdicts, numerals and boxes; the tasks gsm8k and
math."""

from __future__ import annotations

import importlib.util
import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import make_group, score
from test_tasks import task_settings

from lagrpo.rewards.entries import REWARDS, load_function
from lagrpo.rewards.reward import UnscorableError
from lagrpo.tasks import countdown, gsm8k, load_task
from lagrpo.tasks.numbers import (
    find_last_box,
    find_numerals,
    first_question,
    merge_fractions,
    read_number,
    simplify,
)
from lagrpo.types import JsonObject

CORPORA = Path(__file__).parent / "corpora"
needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify"
)


# ---- corpora: answers, reference answers, and the verdict of a careful reader of the reward's rule
# ----


def lines(reward: str) -> list[JsonObject]:
    with (CORPORA / f"{reward}.jsonl").open(encoding="utf-8") as corpus:
        return [json.loads(line) for line in corpus]


def verdict(reward: str, line: JsonObject) -> float | str:
    try:
        return load_function(REWARDS[reward])(line["answer"], line["gold"])
    except UnscorableError:
        return "unjudgeable"


@pytest.mark.parametrize(
    "reward", ["arithmetic", "countdown", "number", pytest.param("math", marks=needs_math)]
)
def test_reward_gives_the_verdicts_of_its_corpus(reward):
    corpus = lines(reward)
    assert {line["verdict"] for line in corpus} == {1.0, 0.0, "unjudgeable"}
    assert [
        line | {"found": judged}
        for line in corpus
        if (judged := verdict(reward, line)) != line["verdict"]
    ] == []


@pytest.mark.parametrize(
    ("reward", "thought", "answer"),
    [
        pytest.param("number", "so it is 7", "7", id="number"),
        pytest.param("arithmetic", "3 + 4 = 7", "7", id="arithmetic"),
        pytest.param("exact", "7", "7", id="exact"),
        pytest.param("exact", "7", ["8", "7"], id="exact with several answers"),
        pytest.param(
            "countdown", "(7 - 3) * 5", {"numbers": [3, 7, 5], "target": 20}, id="countdown"
        ),
        pytest.param("math", "so \\boxed{7}", "7", id="math", marks=needs_math),
    ],
)
def test_completion_cut_in_a_thought_that_the_prompt_opened_is_wrong(reward, thought, answer):
    function = load_function(REWARDS[reward])
    assert function(thought, answer) == 1.0
    assert function(thought, answer, prefix="<think>\n") == 0.0
    assert function(f"hm</think>{thought}", answer, prefix="<think>\n") == 1.0
    (outcome,) = score(function, [make_group(thought, answer=answer, prefix="<think>\n")])
    assert outcome.reward == 0.0


def test_countdown_reads_the_problem_from_a_cell_of_csv():
    assert countdown.score("(7 - 3) * 5", '{"numbers": [3, 7, 5], "target": 20}') == 1.0


@needs_math
def test_math_holds_out_a_tenth_of_data_without_a_test_split(tmp_path):
    from lagrpo.tasks import math

    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = math.load(0, data=str(file))
    assert (task.size("train"), task.size("test")) == (36, 4)


@needs_math
def test_wrong_answers_that_math_verify_takes_for_right_are_known():
    """Should a version of it score one of them as a careful reader does, the line moves to the
    corpus of `math`."""
    import math_verify

    for line in lines("math_verify"):
        boxed = f"\\boxed{{{line['gold']}}}"
        gold, answer = (
            math_verify.parse(text, parsing_timeout=0) for text in (boxed, line["answer"])
        )
        alone = float(math_verify.verify(gold, answer, timeout_seconds=None))
        assert (line["careful"], verdict("math", line), alone) == (0.0, 1.0, 1.0), line


# Numerals and boxes


def test_numerals_have_signs_scales_and_groups_or_no_value():
    for text, expected in [
        ("1,234,567.50 .5 5.", [Fraction("1234567.5"), Fraction(1, 2), 5]),
        ("0,123 and 12,34", [None, None]),
        ("-7 (-7) -$7 $-7 10-7 10 - 7", [-7, -7, -7, -7, 10, 7, 10, 7]),
        ("= - 7, minus 7, negative 8", [-7, -7, -8]),
        ("7km 7k 7 thousand 7 million", [7, 7000, 7000, 7_000_000]),
        ("1e6 1e1000 1e", [10**6, None, 1]),
        ("x7 7x7 0x1F 1_000 7.1.2 v1.5", [None] * 6),
        ("7² 7½ ７ ٧ ②", [None] * 5),
        ("9" * 100 + " " + "9" * 101, [10**100 - 1, None]),
    ]:
        assert [numeral.value for numeral in find_numerals(text)] == expected


def test_number_is_read_from_each_form_of_answer():
    for text, *expected in [
        ("3 + 4 = 7", 7, 7),
        ("7 = 3 + 4", None, 7),
        ("6 or 7", None, None),
        ("7 or 7", 7, 7),
        ("6\n7", 7, 6),
        ("2 * 3 * 10 = 60 dollars", 60, 60),
        ("7, because 3 + 4 = 8", 8, 7),
        ("3:30", None, None),
        ("Step 1: 7", 7, 1),
    ]:
        numbers = read_number(text), read_number(text, first=True)
        assert [number and number.value for number in numbers] == expected, text


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc =,.\n", max_size=30))
def test_the_number_after_a_marker_is_right_whatever_stands_before(number, before):
    for answer in (
        f"{before}\n#### {number:,}",
        f"{before} \\boxed{{{number}}}",
        f"{before}. The answer is {number}.",
    ):
        assert gsm8k.score(answer, f"work\n#### {number:,}") == gsm8k.score(answer, number) == 1.0


def test_fractions_are_merged_and_latex_is_spelled_out():
    for text, expected in {
        "3 / 4": [Fraction(3, 4)],
        "3/0": [3, 0],
        "1/2/3": [Fraction(1, 2), 3],
    }.items():
        assert [numeral.value for numeral in merge_fractions(text, find_numerals(text))] == expected
    latex = r"\frac{3}{4} \dfrac12 \$1{,}080 10\,000\% 3 \times 4 \cdot 5 \div 6 \sqrt[3]{8}"
    assert " ".join(simplify(latex).split()) == "3/4 1/2 $1,080 10000% 3 * 4 * 5 / 6 root"


@given(st.text(alphabet="{}\\boxed 7", max_size=60))
def test_last_box_is_the_one_that_begins_last(text):
    assert find_last_box(text + r" \boxed{42}") == "42"
    assert find_last_box(r"\boxed{\boxed{\{3\}}} \boxed{5") == r"\{3\}"


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["", "The answer is ", "3 + 4 = ", "**", "$", "("]),
)
def test_an_integer_is_read_however_it_is_grouped(number, before):
    for written in (str(number), f"{number:,}", f"{number}.0", f"{number} apples."):
        assert (last := read_number(before + written)) is not None
        assert last.value == number


@settings(max_examples=40)  # a text takes milliseconds
@given(st.text(max_size=80))
def test_any_text_can_be_read_and_scored(text):
    numerals = find_numerals(simplify(text))
    assert all(0 <= a.start < a.end <= b.start for a, b in pairwise(numerals))
    assert gsm8k.score(text, "72") in (0.0, 1.0)
    assert countdown.score(text, {"numbers": [3, 7, 5], "target": 20}) in (0.0, 1.0)


# Gsm8k and math


@needs_math
def test_math_splits_are_files_and_a_box_with_the_reference_answer_is_right(tmp_path):
    test = [r"\left( 3, \frac{\pi}{2} \right)", "025"]
    for name, answers in {"deepscaler_part_math_train": ["5", None], "math500_test": test}.items():
        rows = [json.dumps({"problem": "?", "answer": answer}) + "\n" for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    task: Any = load_task(task_settings("math", data=str(tmp_path)), seed=0)
    assert (task.size("train"), task.size("test")) == (1, 2)
    assert (
        task.prompt("train", 0)
        .messages[0]["content"]
        .endswith("put the final answer in \\boxed{}.")
    )
    for answer in test:
        assert task.reward(f"So it is $\\boxed{{ {answer} }}$.", answer) == 1.0
        assert task.reward("So it is $\\boxed{123456789}$.", answer) == 0.0


@needs_math
def test_answers_that_take_forever_are_unscored():
    answers = {"\\boxed{72}": 1.0, "\\boxed{9^{9^{9^{9}}}}": None, "\\boxed{71}": 0.0}
    outcomes = score(
        load_function(REWARDS["math"]), [make_group(*answers, answer="72")], deadline=2.0
    )
    assert [outcome.reward for outcome in outcomes] == list(answers.values())
    assert {outcome.reason for outcome in outcomes} == {"", "no reward within 2 s"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    ["\nQ:" * 300_000, "1" + "." * 300_000 + "x\nQ: 1"],
    ids=["questions", "dots"],
)
def test_further_questions_are_looked_for_in_linear_time(text):
    assert first_question(text) == text


@pytest.mark.timeout(20)
def test_fractions_are_read_in_linear_time():
    text = "1/" * 30_000
    assert len(merge_fractions(text, find_numerals(text))) == 15_000


@pytest.mark.timeout(20)
def test_expression_is_looked_for_in_linear_time():
    assert countdown.find_expression("\n" * 300_000 + "3 + 5") == "3 + 5"
