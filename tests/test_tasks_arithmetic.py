"""The problems of task `arithmetic`: how many, which, and that train and test do not share any."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.arithmetic import score as judge
from lagrpo.tasks.arithmetic import split


def test_single_digit_addition_is_all_of_it_80_to_20():
    train, test = split(("+",), digits=1, seed=0)
    assert (len(train), len(test)) == (80, 20)
    assert {(a, b) for _, a, b in train + test} == {(a, b) for a in range(10) for b in range(10)}


@settings(max_examples=15, deadline=None)
@given(
    st.sets(st.sampled_from("+-*"), min_size=1).map(lambda operations: tuple(sorted(operations))),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_train_and_test_are_disjoint_even_with_the_numbers_exchanged(operations, digits, seed):
    train, test = split(operations, digits, seed)
    total = len(operations) * 10 ** (2 * digits)
    wanted = min(1000, total // 5)
    assert len(test) == wanted or (
        digits > 2 and len(test) == wanted - 1
    )  # pairs come together: an odd one may not fit
    assert len(train) == min(10_000, total - len(test))
    assert len(set(train)) == len(train)
    assert len(set(test)) == len(test)
    assert not set(train) & {problem for o, a, b in test for problem in ((o, a, b), (o, b, a))}
    assert all(0 <= number < 10**digits for _, a, b in train + test for number in (a, b))
    assert {operation for operation, _, _ in train} == set(operations)


def test_the_problems_are_a_function_of_the_seed():
    assert split(("+",), 3, seed=1) == split(("+",), 3, seed=1)
    assert split(("+",), 1, seed=1) != split(("+",), 1, seed=2)


def test_questions_and_gold_answers():
    task = load_task(TaskSettings(name="arithmetic", operations=("+", "-", "*"), digits=2), seed=0)
    for index in range(200):
        prompt = task.prompt("train", index)
        problem = prompt.messages[0]["content"].removeprefix("What is ").partition("?")[0]
        a, operation, b = problem.split()
        assert int(prompt.answer) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        assert judge(f"{problem} = {prompt.answer}", prompt.answer) == 1.0
        assert judge(prompt.messages[0]["content"], prompt.answer) == 0.0
