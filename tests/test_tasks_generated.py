"""The problems of tasks that generate them, arithmetic and countdown: which, how many, and disjoint
splits."""

from __future__ import annotations

import pytest
from scoring import reward_of
from test_tasks import task_settings

from lagrpo.tasks import arithmetic, countdown, load_task

# Arithmetic


def test_single_digit_addition_is_all_of_it_80_to_20():
    train, test = arithmetic.split(("+",), digits=1, seed=0)
    assert (len(train), len(test)) == (80, 20)
    assert {(a, b) for _, a, b in train + test} == {(a, b) for a in range(10) for b in range(10)}


@pytest.mark.parametrize(
    ("operations", "digits", "seed"),
    [
        pytest.param(("+",), 2, 0, id="sums of two digits"),
        pytest.param(("*", "+", "-"), 1, 7, id="three operations on one digit"),
        pytest.param(("-",), 4, 2**32, id="differences of four digits, seed of 33 bits"),
    ],
)
def test_arithmetic_train_and_test_are_disjoint_even_with_the_numbers_exchanged(
    operations, digits, seed
):
    train, test = arithmetic.split(operations, digits, seed)
    total = len(operations) * 10 ** (2 * digits)
    assert min(1000, total // 5) - len(test) in (
        0,
        1,
    )  # pairs come together: an odd one may not fit
    assert len(train) == len(set(train)) == min(10_000, total - len(test))
    assert not set(train) & {problem for o, a, b in test for problem in ((o, a, b), (o, b, a))}
    assert all(0 <= number < 10**digits for _, a, b in train + test for number in (a, b))
    assert arithmetic.split(operations, digits, seed) == (train, test)


def test_split_seed_keeps_arithmetic_problems_when_the_seed_changes():
    first, second = (arithmetic.load(seed, split_seed=3) for seed in (0, 1))
    assert first.rows == second.rows
    assert arithmetic.load(0).rows != arithmetic.load(1).rows


def test_arithmetic_questions_and_answers():
    task = load_task(
        task_settings("arithmetic", options={"operations": ["+", "-", "*"], "digits": 2}), seed=0
    )
    for index in range(100):
        prompt = task.prompt("train", index)
        problem = prompt.messages[0]["content"].removeprefix("What is ").partition("?")[0]
        a, operation, b = problem.split()
        assert (
            int(prompt.answer)
            == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        )
        assert reward_of(task, f"{problem} = {prompt.answer}", prompt.answer) == 1.0
        assert reward_of(task, prompt.messages[0]["content"], prompt.answer) == 0.0


# Countdown


def test_countdown_problems_are_in_range_and_their_target_alone_scores_0():
    for index in range(60):
        problem = countdown.make_problem(4, 3, "train", index)
        assert all(1 <= number <= 99 for number in problem["numbers"])
        assert 10 <= problem["target"] <= 999
        assert countdown.score(str(problem["target"]), problem) == 0.0


def test_countdown_train_and_test_are_disjoint_whatever_the_seed():
    def keys(split: str) -> set[tuple[tuple[int, ...], int]]:
        problems = (
            countdown.make_problem(3, seed, split, index) for seed in (0, 1) for index in range(200)
        )
        return {(tuple(sorted(problem["numbers"])), problem["target"]) for problem in problems}

    assert not keys("train") & keys("test")
    task = load_task(task_settings("countdown", options={"numbers": 3}), seed=0)
    assert (task.size("train"), task.size("test")) == (10_000, 500)
    prompt = task.prompt("train", 7)
    assert prompt.answer == countdown.make_problem(3, 0, "train", 7)
    assert f"equals {prompt.answer['target']}." in prompt.messages[0]["content"]
