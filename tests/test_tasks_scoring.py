"""How answers are read and scored: corpora of verdicts, numerals and boxes, and the tasks gsm8k and math."""

from __future__ import annotations

import importlib.util
import json
import os
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.rewards.load import REWARDS, load_function
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import UnscorableError
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import countdown, gsm8k, load_task
from lagrpo.tasks.numbers import (
    find_first_numeral,
    find_last_box,
    find_last_numeral,
    find_numerals,
    merge_fractions,
    simplify,
)
from lagrpo.types import Completion, Group, Prompt

CORPORA = Path(__file__).parent / "corpora"
needs_math = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")


# ---- corpora: answers, reference answers, and the verdict of a careful reader of the reward's rule ----


def lines(reward: str) -> list[dict[str, Any]]:
    with (CORPORA / f"{reward}.jsonl").open(encoding="utf-8") as corpus:
        return [json.loads(line) for line in corpus]


def verdict(reward: str, line: dict[str, Any]) -> float | str:
    try:
        return load_function(REWARDS[reward])(line["answer"], line["gold"])
    except UnscorableError:
        return "unjudgeable"


@pytest.mark.parametrize("reward", ["arithmetic", "countdown", "number", pytest.param("math", marks=needs_math)])
def test_reward_gives_the_verdicts_of_its_corpus(reward):
    corpus = lines(reward)
    assert {line["verdict"] for line in corpus} == {1.0, 0.0, "unjudgeable"}
    assert [line | {"found": found} for line in corpus if (found := verdict(reward, line)) != line["verdict"]] == []


@needs_math
def test_wrong_answers_that_math_verify_takes_for_right_are_known():
    """Should a version of it score one of them as a careful reader does, the line moves to the corpus of `math`."""
    import math_verify

    for line in lines("math_verify"):
        boxed = f"\\boxed{{{line['gold']}}}"
        gold, answer = (math_verify.parse(text, parsing_timeout=0) for text in (boxed, line["answer"]))
        alone = float(math_verify.verify(gold, answer, timeout_seconds=None))
        assert (line["careful"], verdict("math", line), alone) == (0.0, 1.0, 1.0), line


# ---- numerals and boxes ----


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


def named(text: str) -> tuple[Fraction | None, Fraction | None]:
    """The last and the first number that a text names."""
    found = find_numerals(text)
    last, first = find_last_numeral(text, found), find_first_numeral(text, found)
    return last.value if last else None, first.value if first else None


def test_which_number_a_text_names():
    for text, last, first in [
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
        assert named(text) == (last, first)


def test_fractions_are_merged_and_latex_is_spelled_out():
    for text, expected in {"3 / 4": [Fraction(3, 4)], "3/0": [3, 0], "1/2/3": [Fraction(1, 2), 3]}.items():
        assert [numeral.value for numeral in merge_fractions(text, find_numerals(text))] == expected
    latex = r"\frac{3}{4} \dfrac12 \$1{,}080 10\,000\% 3 \times 4 \cdot 5 \div 6 \sqrt[3]{8}"
    assert " ".join(simplify(latex).split()) == "3/4 1/2 $1,080 10000% 3 * 4 * 5 / 6 root"


@given(st.text(alphabet="{}\\boxed 7", max_size=60))
def test_last_box_is_the_one_that_begins_last(text):
    assert find_last_box(text + r" \boxed{42}") == "42"
    assert find_last_box(r"\boxed{\boxed{\{3\}}} \boxed{5") == r"\{3\}"


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", "The answer is ", "3 + 4 = ", "**", "$", "("]))
def test_an_integer_is_read_however_it_is_grouped(number, before):
    for written in (str(number), f"{number:,}", f"{number}.0", f"{number} apples."):
        assert named(before + written)[0] == number


@given(st.text(max_size=80))
def test_any_text_can_be_read_and_scored(text):
    found = find_numerals(simplify(text))
    assert all(0 <= a.start < a.end <= b.start for a, b in pairwise(found))
    assert gsm8k.score(text, "72") in (0.0, 1.0)
    assert countdown.score(text, {"numbers": [3, 7, 5], "target": 20}) in (0.0, 1.0)


@pytest.mark.parametrize("junk", ["7 ", r"\boxed{", "7,", "answer is ", r"\sqrt{", " or"])
def test_long_junk_is_read_in_linear_time(junk):
    """A hundred thousand characters: a reader that is quadratic takes minutes."""
    text = junk * (100_000 // len(junk))
    named(simplify(text))
    find_last_box(text)


# ---- gsm8k and math: their real files if LAGRPO_DATA has them, else files of the same form ----

MADE_UP: dict[str, list[dict[str, Any]]] = {
    "gsm8k_train": [
        {"question": f"Ann has {n} boxes of {n + 2} pens. How many pens?",
         "answer": f"There are {n} * {n + 2} = <<{n}*{n + 2}={n * (n + 2)}>>{n * (n + 2)} pens.\n#### {n * (n + 2):,}"}
        for n in range(5, 60)
    ],
    "gsm8k_test": [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}],
    "deepscaler_part_math_train": [{"problem": "1/2?", "answer": "\\frac{1}{2}"}, {"problem": "?", "answer": None}],
    "deepscaler_part_aime_train": [{"problem": "Find $\\log_z w$.", "answer": "60", "year": 1983}],
    "math500_test": [{"problem": "Polar?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "unique_id": "a/1"}],
    "aime24_test": [{"problem": "Find $xy$.", "answer": "025", "number": 2, "contest": 1}],
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> str:
    real = Path(os.environ.get("LAGRPO_DATA", "nowhere"))
    if all((real / f"{name}.jsonl").is_file() for name in MADE_UP):
        return str(real)
    for name, rows in MADE_UP.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_every_worked_solution_of_gsm8k_is_right_by_each_way_of_giving_a_number(data):
    task: Any = load_task(TaskSettings(name="gsm8k", data=data), seed=0)
    for split in ("train", "test"):
        for index, row in enumerate(task.rows[split]):
            gold, (solution, _, number) = task.prompt(split, index).answer, row["answer"].rpartition("####")
            for answer in (
                row["answer"],
                f"{solution}\nThe answer is ${number.strip()}.00.",
                f"{solution}\\boxed{{{number.strip()} \\text{{ things}}}}",
                f"{solution} In all {number.strip()} things.",
            ):
                assert gsm8k.score(answer, gold) == 1.0, (answer, gold)
            assert gsm8k.score(f"{solution}\n#### {number.strip()}1", gold) == 0.0


@given(st.integers(-(10**9), 10**9), st.text(alphabet="abc =,.\n", max_size=30))
def test_the_number_after_a_marker_is_right_whatever_stands_before(number, before):
    for answer in (f"{before}\n#### {number:,}", f"{before} \\boxed{{{number}}}", f"{before}. The answer is {number}."):
        assert gsm8k.score(answer, f"work\n#### {number:,}") == gsm8k.score(answer, number) == 1.0


@needs_math
def test_math_splits_are_files_and_every_reference_answer_is_right(data):
    splits = {"train_split": "deepscaler_part_aime_train", "test_split": "aime24_test"}
    for given_splits in ({}, splits):
        task: Any = load_task(TaskSettings.model_validate({"name": "math", "data": data} | given_splits), seed=0)
        assert ("year" in task.rows["train"][0]) == bool(given_splits)
        assert all(row["answer"] for row in task.rows["train"])
        assert task.prompt("train", 0).messages[0]["content"].endswith("put the final answer in \\boxed{}.")
        for index in range(task.size("test")):
            gold = task.prompt("test", index).answer
            assert task.reward(f"So it is $\\boxed{{ {gold} }}$.", gold) == 1.0, gold
            assert task.reward("So it is $\\boxed{123456789}$.", gold) == 0.0, gold


@needs_math
def test_answers_that_take_forever_are_unscored():
    answers = {"\\boxed{72}": 1.0, "\\boxed{9^{9^{9^{9}}}}": None, "the answer is 9**9**9**9": None, "\\boxed{71}": 0.0}
    empty = torch.empty(0)
    group = Group(Prompt(0, (), "72"), tuple(Completion(empty, empty, empty, True, text) for text in answers))
    with RewardPool(load_function(REWARDS["math"]), workers=2, deadline=2.0, max_without_reward=1.0) as pool:
        (scored,) = pool.score([group])
    assert [completion.reward for completion in scored.completions] == list(answers.values())
    assert {c.outcome.reason for c in scored.completions if c.outcome} == {"", "no reward within 2 s"}
