"""Every judge against its corpus: answers, gold answers, and the verdict of a careful reader of the judge's rule.

A line is {"answer": ..., "gold": ..., "verdict": 1.0, 0.0 or "unjudgeable"}. The verdicts are not the program's: where
the two differ, either the judge is wrong or its rule is badly stated.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from lagrpo.rewards.load import REWARDS, load_function
from lagrpo.rewards.reward import UnscorableError

CORPORA = Path(__file__).parent / "corpora"


def lines(judge: str) -> list[dict[str, Any]]:
    with (CORPORA / f"{judge}.jsonl").open(encoding="utf-8") as corpus:
        return [json.loads(line) for line in corpus]


def verdict(judge: str, line: dict[str, Any]) -> float | str:
    try:
        return load_function(REWARDS[judge])(line["answer"], line["gold"])
    except UnscorableError:
        return "unjudgeable"


@pytest.mark.parametrize("judge", ["arithmetic", "countdown", "number", "math"])
def test_the_judge_gives_the_verdicts_of_its_corpus(judge):
    if judge == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify: pip install 'lagrpo[math]'")
    corpus = lines(judge)
    assert len(corpus) >= 100
    assert {line["verdict"] for line in corpus} == {1.0, 0.0, "unjudgeable"}
    wrong = [line | {"judge": given} for line in corpus if (given := verdict(judge, line)) != line["verdict"]]
    assert wrong == []


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs math-verify")
def test_the_wrong_answers_that_math_verify_takes_for_right_are_known():
    """A line is a false positive, with what math-verify does there: it, by itself, says the same. Should a version of
    it judge one of them as a careful reader does, the line moves to the corpus of `math`."""
    import math_verify

    for line in lines("math_verify"):
        gold, answer = (
            math_verify.parse(text, parsing_timeout=0) for text in (f"\\boxed{{{line['gold']}}}", line["answer"])
        )
        alone = float(math_verify.verify(gold, answer, timeout_seconds=None))
        assert (line["careful"], line["verdict"]) == (0.0, 1.0)
        assert (verdict("math", line), alone) == (1.0, 1.0), line
