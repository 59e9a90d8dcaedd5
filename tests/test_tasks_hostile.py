"""Completions are data: none is run as a program, and none holds up or breaks more than its own judging."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lagrpo.tasks import JUDGES, load_function
from lagrpo.types import Completion, Group, Prompt
from lagrpo.verify import Verifier

PROGRAMS = (
    "__import__('os').system('touch marker')",
    "exec(\"open('marker', 'w')\")",
    "[open('marker', 'w') for _ in (1,)]",
    "lambda: open('marker', 'w')",
    "(3).__class__.__base__.__subclasses__()",
    "\\write18{touch marker}",
    "\\input{|'touch marker'}",
    "{{ open('marker', 'w') }}",
    "$(touch marker)",
)
AROUND = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "3 + 5 + {}", "#### {}")
LARGE = (
    "10**10**10",
    "3**5**7**9**9",
    "(" * 90 + "3 + 5" + ")" * 90,
    "-" * 190 + "3",
    "(" * 100_000 + "3 + 5" + ")" * 100_000,
    "1e999",
    "9" * 1_000_000,
    "{" * 1_000_000,
    "\\sqrt[" * 50_000,
    "\\boxed{" * 50_000,
    "<answer>" * 50_000,
)
CHEAP = {"arithmetic": "72", "countdown": {"numbers": [3, 5, 7], "target": 20}, "number": "72", "exact": "72"}
LATEX = (
    "\\frac{1}{" * 50 + "1" + "}" * 50,
    "\\frac{1}{" * 3000 + "1" + "}" * 3000,
    "{" * 500_000 + "}" * 500_000,
    "9^{9^{9^{9}}}",
    "(10^{9})!",
    "\\sum_{i=1}^{10^9} i^i",
    "\\begin{matrix}" + "1 & " * 2000 + "1 \\\\" * 2000 + "\\end{matrix}",
    "\\begin{pmatrix}" + ("x & " * 60 + "x \\\\") * 60 + "\\end{pmatrix}",
    "9" * 5000 + "^{99999}",
    "\u0667" * 100_000,
    "$" * 500_000,
)
EMPTY = torch.empty(0)


@pytest.mark.parametrize("judge", CHEAP)
def test_a_judge_runs_no_program_and_reads_what_is_long_or_deep(judge, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    give, gold = load_function(JUDGES[judge]), CHEAP[judge]
    texts = (*(around.format(program) for program in PROGRAMS for around in AROUND), *LARGE)
    assert [text[:80] for text in texts if give(text, gold) != 0.0] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
def test_formulas_are_judged_within_the_deadline_or_unscored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the workers run here, too
    formulas = [f"\\boxed{{{latex}}}" for latex in LATEX]
    texts = (*(f"\\boxed{{{program}}}" for program in PROGRAMS), *formulas, *["\\boxed{72.0}"] * 5)
    group = Group(Prompt(0, (), "72"), tuple(Completion(EMPTY, EMPTY, EMPTY, True, text) for text in texts))
    with Verifier(
        load_function(JUDGES["math"]), workers=2, deadline=0.5, memory=1.0, max_without_reward=1.0
    ) as verifier:
        (judged,) = verifier.judge([group])
    outcomes = [(c.outcome.reward, c.outcome.reason) for c in judged.completions if c.outcome is not None]
    assert set(outcomes[:-5]) <= {(0.0, ""), (None, "no verdict within 0.5 s")}
    assert (0.0, "") in outcomes
    assert (1.0, "") in outcomes[-5:]
    assert not list(tmp_path.iterdir())
