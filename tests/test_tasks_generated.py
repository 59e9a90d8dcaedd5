"""The problems of tasks that generate them, arithmetic and countdown: which, how many, and disjoint splits."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import arithmetic, countdown, load_task

# ---- arithmetic ----


def test_single_digit_addition_is_all_of_it_80_to_20():
    train, test = arithmetic.split(("+",), digits=1, seed=0)
    assert (len(train), len(test)) == (80, 20)
    assert {(a, b) for _, a, b in train + test} == {(a, b) for a in range(10) for b in range(10)}


@settings(max_examples=10, deadline=None)
@given(
    st.sets(st.sampled_from("+-*"), min_size=1).map(lambda operations: tuple(sorted(operations))),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_arithmetic_train_and_test_are_disjoint_even_with_the_numbers_exchanged(operations, digits, seed):
    train, test = arithmetic.split(operations, digits, seed)
    total = len(operations) * 10 ** (2 * digits)
    assert min(1000, total // 5) - len(test) in (0, 1)  # pairs come together: an odd one may not fit
    assert len(train) == len(set(train)) == min(10_000, total - len(test))
    assert not set(train) & {problem for o, a, b in test for problem in ((o, a, b), (o, b, a))}
    assert all(0 <= number < 10**digits for _, a, b in train + test for number in (a, b))
    assert arithmetic.split(operations, digits, seed) == (train, test)


def test_arithmetic_questions_and_answers():
    task = load_task(TaskSettings(name="arithmetic", operations=("+", "-", "*"), digits=2), seed=0)
    for index in range(100):
        prompt = task.prompt("train", index)
        problem = prompt.messages[0]["content"].removeprefix("What is ").partition("?")[0]
        a, operation, b = problem.split()
        assert int(prompt.answer) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
        assert task.reward(f"{problem} = {prompt.answer}", prompt.answer) == 1.0
        assert task.reward(prompt.messages[0]["content"], prompt.answer) == 0.0


# ---- countdown ----


def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """An expression in all of the numbers that equals the target, by trying everything."""
    todo, seen = [tuple((Fraction(number), str(number)) for number in numbers)], set()
    while todo:
        terms = todo.pop()
        if len(terms) == 1 and terms[0][0] == target:
            return terms[0][1]
        for i, (a, shown_a) in enumerate(terms):
            for j, (b, shown_b) in enumerate(terms):
                rest = tuple(term for k, term in enumerate(terms) if k not in (i, j))
                results = [(a + b, "+"), (a - b, "-"), (a * b, "*"), *([(a / b, "/")] if b else [])]
                for value, sign in results if i != j else ():
                    state = tuple(sorted([value, *(term[0] for term in rest)]))
                    if state not in seen:
                        seen.add(state)
                        todo.append(((value, f"({shown_a} {sign} {shown_b})"), *rest))
    return None


def test_every_countdown_problem_can_be_solved_and_its_solution_is_right():
    for index in range(60):
        problem = countdown.make_problem(4, 3, "train", index)
        assert len(problem["numbers"]) == 4
        assert all(1 <= number <= 99 for number in problem["numbers"])
        assert 10 <= problem["target"] <= 999
        solution = solve(tuple(problem["numbers"]), problem["target"])
        assert countdown.score(f"The answer is {solution} = {problem['target']}.", problem) == 1.0
        assert countdown.score(str(problem["target"]), problem) == 0.0


def test_countdown_train_and_test_are_disjoint_whatever_the_seed():
    def keys(split: str) -> set[tuple[tuple[int, ...], int]]:
        problems = (countdown.make_problem(3, seed, split, index) for seed in (0, 1) for index in range(200))
        return {(tuple(sorted(problem["numbers"])), problem["target"]) for problem in problems}

    assert not keys("train") & keys("test")
    task = load_task(TaskSettings(name="countdown", numbers=3), seed=0)
    assert (task.size("train"), task.size("test")) == (10_000, 500)
    prompt = task.prompt("train", 7)
    assert prompt.answer == countdown.make_problem(3, 0, "train", 7)
    assert f"equals {prompt.answer['target']}." in prompt.messages[0]["content"]


def test_which_expression_counts():
    for answer, expression in [
        ("3 + 4, or 5 * 6", "5 * 6"),
        ("<answer>3 + 4</answer> 5 * 6", "3 + 4"),
        (r"\(3 \times \left(4 + 5\right)\)", "3 * (4 + 5)"),
        ("**3 + 4**", "3 + 4"),
        ("3 ** 4", "3 ** 4"),
        ("20", None),
    ]:
        assert countdown.find_expression(answer) == expression


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, list[int], Fraction | None]:
    """An expression, the numbers it uses, and its value (None if it divides by zero)."""
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
    assert countdown.score(f"{expression} = {reached}", gold) == float(reached == value)
    assert countdown.score(expression, gold | {"target": int(reached) + 1}) == 0.0
    assert countdown.score(expression, gold | {"numbers": numbers[1:]}) == 0.0
