"""The problems of task `countdown`, and what its judge takes for the expression."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.tasks.countdown import Problems, find_expression
from lagrpo.tasks.countdown import score as judge


def reachable(numbers: tuple[int, ...], target: int) -> str | None:
    """An expression in all of the numbers that equals the target, by trying everything."""
    todo = [tuple((Fraction(number), str(number)) for number in numbers)]
    seen = set()
    while todo:
        terms = todo.pop()
        if len(terms) == 1:
            if terms[0][0] == target:
                return terms[0][1]
            continue
        for i, (a, shown_a) in enumerate(terms):
            for j, (b, shown_b) in enumerate(terms):
                if i == j:
                    continue
                rest = tuple(term for k, term in enumerate(terms) if k not in (i, j))
                results = [(a + b, "+"), (a - b, "-"), (a * b, "*")] + ([(a / b, "/")] if b else [])
                for value, sign in results:
                    state = tuple(sorted([value, *(term[0] for term in rest)]))
                    if state not in seen:
                        seen.add(state)
                        todo.append(((value, f"({shown_a} {sign} {shown_b})"), *rest))
    return None


@pytest.mark.parametrize("count", [3, 4])
def test_every_problem_can_be_solved_and_the_solution_is_judged_right(count):
    for problem in (Problems("train", count, seed=3)[index] for index in range(60)):
        solution = reachable(tuple(problem["numbers"]), problem["target"])
        assert solution is not None, problem
        assert judge(f"The answer is {solution} = {problem['target']}.", problem) == 1.0
        assert judge(str(problem["target"]), problem) == 0.0


def test_problems_are_within_bounds():
    for split in ("train", "test"):
        for problem in (Problems(split, 6, seed=0)[index] for index in range(200)):
            assert len(problem["numbers"]) == 6
            assert all(1 <= number <= 99 for number in problem["numbers"])
            assert 10 <= problem["target"] <= 999
            assert problem["target"] not in problem["numbers"]


def test_train_and_test_are_disjoint_whatever_the_seed():
    def keys(split: str, seed: int) -> set[tuple[tuple[int, ...], int]]:
        problems = (Problems(split, 3, seed)[index] for index in range(500))
        return {(tuple(sorted(problem["numbers"])), problem["target"]) for problem in problems}

    train, test = keys("train", 0) | keys("train", 1), keys("test", 0) | keys("test", 1)
    assert not train & test
    assert len(test) > 950


def test_a_problem_is_a_function_of_seed_split_and_index():
    assert Problems("train", 4, 0)[7] == Problems("train", 4, 0)[7]
    assert Problems("train", 4, 0)[7] != Problems("train", 4, 1)[7]
    with pytest.raises(IndexError, match=r"there is no 10000"):
        Problems("train", 4, 0)[10_000]


def test_the_task():
    task = load_task(TaskSettings(name="countdown", numbers=3), seed=0)
    assert (task.size("train"), task.size("test")) == (10_000, 500)
    prompt = task.prompt("train", 0)
    assert f"equals {prompt.answer['target']}." in prompt.messages[0]["content"]
    assert ", ".join(map(str, prompt.answer["numbers"])) in prompt.messages[0]["content"]


@pytest.mark.parametrize(
    ("answer", "expression"),
    [
        ("(7 - 3) * 5 = 20", "(7 - 3) * 5"),
        ("3 + 4, or 5 * 6", "5 * 6"),
        ("<answer>3 + 4</answer> 5 * 6", "3 + 4"),
        (r"\(3 \times \left(4 + 5\right)\)", "3 * (4 + 5)"),
        ("**3 + 4**", "3 + 4"),
        ("3 ** 4", "3 ** 4"),
        ("20", None),
        ("three plus four", None),
    ],
)
def test_which_expression_counts(answer, expression):
    assert find_expression(answer) == expression


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, list[int], Fraction | None]:
    """An expression, the numbers it uses, and its value (None where it divides by zero)."""
    numbers = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    terms: list[tuple[str, Fraction | None]] = [(str(number), Fraction(number)) for number in numbers]
    while len(terms) > 1:
        (left, a), (right, b) = terms.pop(), terms.pop(draw(st.integers(0, len(terms) - 1)))
        sign = draw(st.sampled_from("+-*/"))
        if a is None or b is None or (sign == "/" and b == 0):
            value = None
        else:
            value = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[sign]
        terms.append((f"({left} {sign} {right})", value))
    return *terms[0][:1], numbers, terms[0][1]


@given(expressions(), st.data())
def test_a_right_expression_is_right_and_no_other(made, data):
    expression, numbers, value = made
    spare = data.draw(st.lists(st.integers(1, 12), max_size=2))
    reached = value if value is not None and value.denominator == 1 else Fraction(10**6)
    gold = {"numbers": numbers + spare, "target": int(reached)}
    assert judge(f"{expression} = {reached}", gold) == float(reached == value)
    assert judge(expression, gold | {"target": int(reached) + 1}) == 0.0
    assert judge(expression, gold | {"numbers": numbers[1:]}) == 0.0


@given(st.text(max_size=200))
def test_any_answer_gets_a_verdict(answer):
    assert judge(answer, {"numbers": [3, 7, 5], "target": 20}) in (0.0, 1.0)
