"""Compares our scores of answers to MATH-500 and AIME24 with lighteval's, on the same texts.

    python conformance/evaluations.py --peer .venv-lighteval/bin/python
    python conformance/evaluations.py --peer … --evaluation evaluations/smollm2-math

LAGRPO_DATA names the directory with math500_test.jsonl and aime24_test.jsonl. The answer of every
problem is written in the forms that models use, right and wrong; --evaluation adds the texts of a
model (`lagrpo eval --output`). Our score is the reward of the task `math`, in the worker processes
of a run, with their deadline. Writes the table between the markers of reports/conformance.md, and
all disagreements to conformance/lighteval-disagreements.md.
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
PAGE = HERE.parent / "reports" / "conformance.md"
DISAGREEMENTS = HERE / "lighteval-disagreements.md"
BEGIN = "<!-- lighteval: begin -->"
END = "<!-- lighteval: end -->"
FILES = {"math_500": "math500_test.jsonl", "aime24": "aime24_test.jsonl"}
FORMS = {
    "boxed": "Therefore, the final answer is: $\\boxed{{{answer}}}$. I hope it is correct.",
    "last line": "First I simplify, then I solve.\n\nANSWER: ${answer}$",
    "in a sentence": "The final answer is ${answer}$.",
    "display": "So we get\n\\[\n{answer}\n\\]\nand we are done.",
    "plain": "Answer: {answer}",
}
"""Templates of the forms in which models write answers."""
# Characters of a text in the list of disagreements.
SHOWN = 160


@dataclass(frozen=True)
class Item:
    """A text to score."""

    set: str
    form: str
    gold: str
    text: str


Score = float | None
"""1 or 0; None if an answer could not be judged."""


def written_answers(data: Path, every: int) -> Iterator[Item]:
    """The answers of every n-th problem of both sets in every form.

    Right ones: the gold answer. Wrong ones: the answer of the next problem, and the gold answer +
    1.
    """
    for name, file in FILES.items():
        lines = (data / file).read_text(encoding="utf-8").splitlines()
        golds = [str(json.loads(line)["answer"]) for line in lines]
        # The answer of another problem is wrong, but looks like an answer.
        next_golds = [*golds[1:], golds[0]]
        for gold, next_gold in list(zip(golds, next_golds, strict=True))[::every]:
            for form, template in FORMS.items():
                yield Item(name, form, gold, template.format(answer=gold))
            boxed = FORMS["boxed"]
            yield Item(name, "boxed, of another problem", gold, boxed.format(answer=next_gold))
            # A judge that looks for the gold answer inside the text would call this right.
            yield Item(name, "boxed, + 1", gold, boxed.format(answer=f"{gold} + 1"))


def model_answers(directory: Path) -> Iterator[Item]:
    """The texts that a model wrote in an evaluation of `lagrpo eval`."""
    for row in pq.read_table(directory / "records.parquet").to_pylist():
        for text in row["completions"]:
            yield Item("math_500", f"written by {directory.name}", row["answer"], text)


def our_scores(items: Sequence[Item]) -> list[Score]:
    groups = [
        Group(Prompt(number, (), item.gold), (_completion(item.text),))
        for number, item in enumerate(items)
    ]
    # Answers that cannot be judged are counted in the table, so no share of them is an error.
    with RewardPool(score, max_without_reward=1.0) as pool:
        return [group.completions[0].reward for group in pool.score(groups)]


def _completion(text: str) -> Completion:
    """A completion with this text. Its one token has no meaning: the reward reads the text."""
    token = torch.zeros(1, dtype=torch.int64)
    return Completion(token, token.float(), token, finished=True, text=text)


def lighteval_scores(items: Sequence[Item], python: str) -> list[float]:
    lines = "".join(json.dumps(asdict(item)) + "\n" for item in items)
    # lighteval is in an environment of its own.
    command = [python, str(HERE / "score_with_lighteval.py")]
    finished = subprocess.run(command, input=lines, capture_output=True, encoding="utf-8")
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-3000:]}")
    return [float(line) for line in finished.stdout.split()]


def table(items: Sequence[Item], our: Sequence[Score], peer: Sequence[float]) -> str:
    """A row for each set and form."""
    pairs_by_key: dict[tuple[str, str], list[tuple[Score, float]]] = {}
    for item, our_score, peer_score in zip(items, our, peer, strict=True):
        pairs_by_key.setdefault((item.set, item.form), []).append((our_score, peer_score))
    rows = [
        "| set | form | texts | both right | both wrong | ours alone | lighteval alone "
        "| not judged by ours |",
        "|---" * 8 + "|",
    ]
    for (name, form), pairs in pairs_by_key.items():
        counts = Counter(pairs)
        cells = [
            name,
            form,
            len(pairs),
            counts[1.0, 1.0],
            counts[0.0, 0.0],
            counts[1.0, 0.0],
            counts[0.0, 1.0],
            sum(our_score is None for our_score, _ in pairs),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def list_disagreements(items: Sequence[Item], our: Sequence[Score], peer: Sequence[float]) -> str:
    lines = [
        "# Where lagrpo's judge and lighteval's metric differ",
        "",
        "Written by `make check-lighteval`. Long texts are cut to their end.",
        "",
        "| set | form | gold | the end of the text | ours | lighteval |",
        "|---" * 6 + "|",
    ]
    for item, our_score, peer_score in zip(items, our, peer, strict=True):
        if our_score == peer_score:
            continue
        cells = [
            item.set,
            item.form,
            _code(item.gold),
            _code(item.text[-SHOWN:]),
            "not judged" if our_score is None else f"{our_score:g}",
            f"{peer_score:g}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """The text in a line, as Markdown code in a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{line}`"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="a Python that has lighteval")
    parser.add_argument(
        "--evaluation", type=Path, nargs="*", default=[], help="directories of `lagrpo eval`"
    )
    parser.add_argument("--every", type=int, default=1, help="only every n-th problem's texts")
    options = parser.parse_args()
    data = os.environ.get("LAGRPO_DATA")
    if data is None:
        sys.exit("set LAGRPO_DATA to the directory with math500_test.jsonl and aime24_test.jsonl")
    items = list(written_answers(Path(data), options.every))
    for directory in options.evaluation:
        items += model_answers(directory)
    our = our_scores(items)
    peer = lighteval_scores(items, options.peer)
    rows = table(items, our, peer)
    print(rows)
    before, _, after_begin = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = after_begin.partition(END)
    write_atomically(PAGE, f"{before}{BEGIN}\n{rows}\n{END}{after}")
    write_atomically(DISAGREEMENTS, list_disagreements(items, our, peer))


if __name__ == "__main__":
    main()
