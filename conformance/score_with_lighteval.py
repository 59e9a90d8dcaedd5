"""Scores texts by lighteval's own metrics. Runs in the environment of `make check-lighteval`:

    python conformance/score_with_lighteval.py < items.jsonl > scores.jsonl

An item is {"set": "math_500" or "aime24", "gold": …, "text": …}, a score is a number. The metric is
that of lighteval's task of this name, and the gold text is made as the task makes it. Our file of
MATH-500 has no worked solutions, so the gold text is the answer in a box, as solutions end.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from lighteval.models.model_output import ModelResponse
from lighteval.utils.utils import as_list

TASKS = {
    "math_500": ("lighteval.tasks.tasks.math_500", "math_500"),
    "aime24": ("lighteval.tasks.tasks.aime", "aime24"),
}


def load(name: str) -> Any:
    """lighteval's task of a set."""
    module, variable = TASKS[name]
    return getattr(import_module(module), variable)


def score(task: Any, gold: str, text: str) -> float:
    """pass@1 of one sample."""
    line = {"problem": "", "answer": gold, "solution": f"The answer is $\\boxed{{{gold}}}$."}
    doc = task.prompt_function(line, task.name)
    metric = as_list(task.metrics)[0].sample_level_fn
    metric.n = 1
    return float(metric.compute(doc=doc, model_response=ModelResponse(text=[text])))


def main() -> None:
    tasks = {name: load(name) for name in TASKS}
    for line in sys.stdin:
        item = json.loads(line)
        print(score(tasks[item["set"]], item["gold"], item["text"]), flush=True)


if __name__ == "__main__":
    main()
