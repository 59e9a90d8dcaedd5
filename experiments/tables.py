"""The tables of reports/ that are made from records in experiments/.

    python experiments/tables.py            write them anew
    python experiments/tables.py --check    name the pages that would change; exit status 1 if any

A table stands between two comments. The first says what belongs there:

    <!-- table: verdicts
    lag: v = 10 costs
    objectives-small: v = 10 costs GRPO; v = 20 costs GRPO
    -->
    <!-- end of table -->

- `verdicts`: a row for each claim of a study's record (experiments/papers/results/STUDY.json). A
  line has STUDY: the first words of each claim, with semicolons between them.
- `cells STUDY`: a row for each label of the study's first axis. The lines are the columns, each
  with HEAD: MEASURE, then the labels of the other axes, with `&` between them.
- `amplification NAME`: the stages in NAME-points.json (experiments/amplification.py).
- `precision`: the cells of experiments/precision.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import amplification
import precision
import precision_report

from lagrpo.runs.files import write_atomically
from lagrpo.study.statistics import Interval
from lagrpo.terminal.text import count_of
from lagrpo.types import JsonObject, JsonView

HERE = Path(__file__).resolve().parent
REPORTS = HERE.parent / "reports"
RECORDS = HERE / "papers" / "results"
# The opening comment with its kind, argument and lines, the old table, the closing comment.
TABLE = re.compile(
    r"(<!-- table: (\w+) ?([^\n]*?)(?:\n(.*?))?\s*-->\n).*?(<!-- end of table -->)", re.DOTALL
)
MEASURES = {
    "pass@1": "pass@1, points",
    "mean reward": "mean reward over the run",
    "fall reward": "largest fall of the reward",
    "mean kl": "KL(π‖π_ref), nats a token",
    "sum weight_sync/performed": "weight syncs",
}
"""Words for the measures of claims; others are shown as they are."""


@cache
def record(study: str) -> JsonObject:
    """The record of a study: its claims, and its runs. Raises ValueError if there is none."""
    file = RECORDS / f"{study}.json"
    if not file.is_file():
        raise ValueError(f"no record of a study {study!r}: {file} is missing")
    return cast(JsonObject, json.loads(file.read_text(encoding="utf-8")))


def filled(page: str) -> str:
    """The page with every table made anew. Raises ValueError for a table that cannot be made."""
    begins = page.count("<!-- table: ")
    ends = page.count("<!-- end of table -->")
    # An unclosed table would swallow the text up to the end of the next one.
    if not begins == ends == len(TABLE.findall(page)):
        raise ValueError(
            f"{begins} tables begin and {ends} end: "
            "each `<!-- table:` needs its `<!-- end of table -->`"
        )
    return TABLE.sub(_with_table, page)


def _with_table(match: re.Match[str]) -> str:
    """The comments of TABLE with the table between them."""
    begin, kind, argument, lines, end = match.groups()
    if kind not in KINDS:
        raise ValueError(
            f"<!-- table: {kind} -->: no such kind of table; there are {', '.join(KINDS)}"
        )
    text = KINDS[kind](argument, (lines or "").splitlines())
    return f"{begin}\n{text}\n\n{end}"


def verdicts(_: str, lines: Sequence[str]) -> str:
    """A row for each claim that the lines name."""
    rows = [["study", "claim", "difference in", "difference", "verdict"]]
    for line in lines:
        study, _, starts = line.partition(": ")
        for start in starts.split("; "):
            claim = claim_of(study, start)
            measure = str(MEASURES.get(claim["measure"], claim["measure"]))
            rows.append([f"`{study}`", claim["says"], measure, difference(claim), verdict(claim)])
    return markdown(rows)


def claim_of(study: str, start: str) -> JsonObject:
    """The claim of a study's record that begins with these words.

    Raises ValueError unless exactly one does.
    """
    claims = [claim for claim in record(study)["claims"] if claim["says"].startswith(start)]
    if len(claims) != 1:
        raise ValueError(
            f"study {study}: {count_of(len(claims), 'claim')} begin with {start!r}, not one"
        )
    return claims[0]


def difference(claim: JsonView) -> str:
    """The mean over the seeds of left − right, and half the width of its interval."""
    interval = claim["difference"]
    if interval is None:
        return "–"
    is_share = claim["measure"] == "pass@1"
    scale = 100 if is_share else 1
    mean = interval["mean"] * scale
    half = interval["half_width"]
    digits = 1 if is_share or abs(mean) >= 1 else 3
    if half is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half * scale:.{digits}f}"


def verdict(claim: JsonView) -> str:
    """The verdict and the number of seeds.

    Also how many seeds would decide an inconclusive claim, if the record says so.
    """
    if claim["difference"] is None:
        return "**not run**"
    text = f"**{claim['verdict']}**, {count_of(claim['difference']['seeds'], 'seed')}"
    if claim.get("seeds_needed"):
        text += f"; about {claim['seeds_needed']} would decide"
    return text


def cells(study: str, lines: Sequence[str]) -> str:
    """A row for each label of the first axis, with means and intervals over the seeds."""
    runs = record(study)["runs"]
    columns = [_parse_column(line) for line in lines]
    # Cells keep the order of the grid in the study file.
    axis = next(iter(runs[0]["cell"]))
    seeds = len({run["seed"] for run in runs})
    all_labels = {label for run in runs for label in run["cell"].values()}
    for column in columns:
        if column.measure not in runs[0]["measures"] or not all_labels.issuperset(column.labels):
            raise ValueError(
                f"column {column.head!r}: the record of {study} has no measure "
                f"{column.measure!r}, or no such label"
            )
    rows = [[axis, *(column.head for column in columns)]]
    for label in dict.fromkeys(run["cell"][axis] for run in runs):
        row = [label]
        for column in columns:
            # Labels of different axes differ, so a set says which cell it is.
            cell_labels = {label, *column.labels}
            measured = [
                run["measures"][column.measure]
                for run in runs
                if set(run["cell"].values()) == cell_labels
            ]
            values = [value for value in measured if value is not None]
            text = _mean(values, column.measure)
            # A measure that a run lacks is left out of the mean, and the cell says so.
            if len(values) < seeds:
                text += f" ({count_of(len(values), 'seed')})"
            row.append(text)
        rows.append(row)
    return markdown(rows)


class Column(NamedTuple):
    """A column of the table `cells`."""

    head: str
    measure: str
    labels: list[str]
    """Of the axes other than the first."""


def _parse_column(line: str) -> Column:
    """The column of a line such as `pass@1, v = 10: pass@1, v = 10`."""
    head, _, definition = line.partition(": ")
    measure, _, labels = definition.partition(", ")
    return Column(head, measure, [label for label in labels.split(" & ") if label])


def _mean(values: Sequence[float], measure: str) -> str:
    """The mean with half its interval over the seeds; shares in percent."""
    if not values:
        return "–"
    interval = Interval.of(values)
    is_share = measure.startswith("pass@")
    scale = 100 if is_share else 1
    unit = " %" if is_share else ""
    # Numbers below 1, such as KL divergences, need three digits to differ.
    has_one_digit = is_share or interval.mean >= 1 or not any(values)
    digits = 1 if has_one_digit else 3
    half = "" if interval.half is None else f" ± {interval.half * scale:.{digits}f}"
    return f"{interval.mean * scale:.{digits}f}{half}{unit}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


KINDS: dict[str, Callable[[str, Sequence[str]], str]] = {
    "verdicts": verdicts,
    "cells": cells,
    "amplification": lambda name, _: amplification.table(amplification.load_points(name)),
    "precision": lambda _, __: precision_report.table(precision.read(HERE / "precision")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    changed_pages = []
    for page in sorted(REPORTS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        try:
            new_text = filled(text)
        except ValueError as error:
            parser.exit(2, f"{page}: {error}\n")
        if new_text != text:
            changed_pages.append(page.name)
            if not options.check:
                write_atomically(page, new_text)
    print("\n".join(changed_pages) or "no table changes")
    if options.check and changed_pages:
        parser.exit(1)


if __name__ == "__main__":
    main()
