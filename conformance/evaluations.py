"""Our scores of answers to MATH-500 and AIME24 beside lighteval's, on the same texts, and every disagreement.

    python conformance/evaluations.py --peer .venv-lighteval/bin/python [--evaluation evaluations/smollm2-math …]

LAGRPO_DATA names the directory with math500_test.jsonl and aime24_test.jsonl. Of every problem the gold answer is
written in the forms that models use, right and wrong; --evaluation adds what a model wrote (`lagrpo eval --output`).
Ours is the reward of the task `math`, in the worker processes of a run, with their deadline. Writes the table between
the markers of reports/conformance.md, and all disagreements to conformance/lighteval-disagreements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch

from lagrpo.rewards.pool import RewardPool
from lagrpo.runs.files import write_atomically
from lagrpo.tasks.math import score
from lagrpo.types import Completion, Group, Prompt

HERE = Path(__file__).parent
PAGE, LISTED = HERE.parent / "reports" / "conformance.md", HERE / "lighteval-disagreements.md"
BEGIN, END = "<!-- lighteval: begin -->", "<!-- lighteval: end -->"
FILES = {"math_500": "math500_test.jsonl", "aime24": "aime24_test.jsonl"}
FORMS = {
    "boxed": "Therefore, the final answer is: $\\boxed{{{answer}}}$. I hope it is correct.",
    "last line": "First I simplify, then I solve.\n\nANSWER: ${answer}$",
    "in a sentence": "The final answer is ${answer}$.",
    "display": "So we get\n\\[\n{answer}\n\\]\nand we are done.",
    "plain": "Answer: {answer}",
}
"""How an answer is written."""
SHOWN = 160  # characters of a text in the list


@dataclass(frozen=True)
class Item:
    """A text that is scored."""

    set: str
    form: str
    gold: str
    text: str


def written(data: Path) -> Iterator[Item]:
    """The answers of both sets in every form: the gold answer, that of the next problem, and the gold answer + 1."""
    for name, file in FILES.items():
        golds = [
            str(json.loads(line)["answer"])
            for line in (data / file).read_text(encoding="utf-8").splitlines()
        ]
        for gold, other in zip(golds, [*golds[1:], golds[0]], strict=True):
            for form, template in FORMS.items():
                yield Item(name, form, gold, template.format(answer=gold))
            yield Item(name, "boxed, of another problem", gold, FORMS["boxed"].format(answer=other))
            yield Item(name, "boxed, + 1", gold, FORMS["boxed"].format(answer=f"{gold} + 1"))


def recorded(directory: Path) -> Iterator[Item]:
    """What a model wrote, of an evaluation of `lagrpo eval`."""
    for row in pq.read_table(directory / "records.parquet").to_pylist():
        for text in row["completions"]:
            yield Item("math_500", f"written by {directory.name}", row["answer"], text)


def ours(items: Sequence[Item]) -> list[float | None]:
    """Our scores; None where an answer could not be judged."""
    groups = [
        Group(Prompt(n, (), item.gold), (_completion(item.text),)) for n, item in enumerate(items)
    ]
    with RewardPool(score, max_without_reward=1.0) as pool:
        return [group.completions[0].reward for group in pool.score(groups)]


def _completion(text: str) -> Completion:
    one = torch.zeros(1, dtype=torch.int64)
    return Completion(one, one.float(), one, True, text)


def theirs(items: Sequence[Item], python: str) -> list[float]:
    lines = "".join(json.dumps(asdict(item)) + "\n" for item in items)
    command = [python, str(HERE / "score_with_lighteval.py")]
    done = subprocess.run(command, input=lines, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return [float(line) for line in done.stdout.split()]


def table(items: Sequence[Item], own: Sequence[float | None], peer: Sequence[float]) -> str:
    """A row for each set and form."""
    rows = [
        "| set | form | texts | both right | both wrong | ours alone | lighteval alone | not judged by ours |"
    ]
    rows.append("|---" * 8 + "|")
    for key in dict.fromkeys((item.set, item.form) for item in items):
        pairs = [
            (a, b)
            for item, a, b in zip(items, own, peer, strict=True)
            if (item.set, item.form) == key
        ]
        found = Counter(pairs)
        unjudged = sum(a is None for a, _ in pairs)
        counts = [
            len(pairs),
            found[1.0, 1.0],
            found[0.0, 0.0],
            found[1.0, 0.0],
            found[0.0, 1.0],
            unjudged,
        ]
        rows.append(f"| {' | '.join([*key, *map(str, counts)])} |")
    return "\n".join(rows)


def listed(items: Sequence[Item], own: Sequence[float | None], peer: Sequence[float]) -> str:
    """Every disagreement."""
    lines = ["# Where lagrpo's judge and lighteval's metric differ", ""]
    lines += ["Written by `make check-lighteval`. Long texts are cut to their end.", ""]
    lines += ["| set | form | gold | the end of the text | ours | lighteval |", "|---" * 6 + "|"]
    for item, a, b in zip(items, own, peer, strict=True):
        if a != b:
            cells = [item.set, item.form, _code(item.gold), _code(item.text[-SHOWN:])]
            lines.append(
                f"| {' | '.join([*cells, 'not judged' if a is None else f'{a:g}', f'{b:g}'])} |"
            )
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    shown = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{shown}`"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="a Python that has lighteval")
    parser.add_argument(
        "--evaluation", type=Path, nargs="*", default=[], help="directories of `lagrpo eval`"
    )
    parser.add_argument("--every", type=int, default=1, help="only every n-th problem's texts")
    asked = parser.parse_args()
    if (data := os.environ.get("LAGRPO_DATA")) is None:
        sys.exit("set LAGRPO_DATA to the directory with math500_test.jsonl and aime24_test.jsonl")
    items = [*written(Path(data))][:: asked.every] + [
        item for path in asked.evaluation for item in recorded(path)
    ]
    own, peer = ours(items), theirs(items, asked.peer)
    print(found := table(items, own, peer))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    write_atomically(PAGE, f"{before}{BEGIN}\n{found}\n{END}{rest.partition(END)[2]}")
    write_atomically(LISTED, listed(items, own, peer))


if __name__ == "__main__":
    main()
