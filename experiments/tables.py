"""The tables of reports/ that are made from records in experiments/.

    python experiments/tables.py            write them anew
    python experiments/tables.py --check    name the pages that this would change, and fail where there are any

A table stands between two comments. The first says what belongs there:

    <!-- table: verdicts
    lag: v = 10 costs
    objectives-small: v = 10 costs GRPO; v = 20 costs GRPO
    -->
    <!-- end of table -->

- `verdicts`: a row for each claim of a study's record (experiments/papers/results/STUDY.json). STUDY: how each
  claim begins, with semicolons between them.
- `cells STUDY`: a row for each label of the study's first axis. The lines are the columns: HEAD: MEASURE, then the
  labels of the other axes, with `&` between them.
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
from typing import Any

import amplification
import precision
import precision_report
from study.statistics import Interval

from lagrpo.runs.files import write_atomically
from lagrpo.terminal.text import count_of

HERE = Path(__file__).resolve().parent
REPORTS = HERE.parent / "reports"
RECORDS = HERE / "papers" / "results"
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
def record(study: str) -> dict[str, Any]:
    """The record of a study: its claims, and its runs. Raises ValueError where there is none."""
    file = RECORDS / f"{study}.json"
    if not file.is_file():
        raise ValueError(f"no record of a study {study!r}: {file} is missing")
    return json.loads(file.read_text(encoding="utf-8"))


def filled(page: str) -> str:
    """The page with every table made anew. Raises ValueError for a comment that asks for what there is not."""

    def table(found: re.Match[str]) -> str:
        begin, kind, what, lines, end = found.groups()
        if kind not in KINDS:
            raise ValueError(
                f"<!-- table: {kind} -->: no such kind of table; there are {', '.join(KINDS)}"
            )
        return f"{begin}\n{KINDS[kind](what, (lines or '').splitlines())}\n\n{end}"

    asked, ended = page.count("<!-- table: "), page.count("<!-- end of table -->")
    if not asked == ended == len(TABLE.findall(page)):
        raise ValueError(
            f"{asked} tables begin and {ended} end: each `<!-- table:` needs its `<!-- end of table -->`"
        )
    return TABLE.sub(table, page)


def verdicts(_: str, lines: Sequence[str]) -> str:
    """A row for each claim asked for."""
    rows = [["study", "claim", "difference in", "difference", "verdict"]]
    for line in lines:
        study, _, starts = line.partition(": ")
        for start in starts.split("; "):
            claim = claim_of(study, start)
            measure = str(MEASURES.get(claim["measure"], claim["measure"]))
            rows.append([f"`{study}`", claim["says"], measure, difference(claim), verdict(claim)])
    return markdown(rows)


def claim_of(study: str, start: str) -> dict[str, Any]:
    """The one claim of a study's record that begins with these words. Raises ValueError unless it is one."""
    found = [claim for claim in record(study)["claims"] if claim["says"].startswith(start)]
    if len(found) != 1:
        raise ValueError(
            f"study {study}: {count_of(len(found), 'claim')} begin with {start!r}, not one"
        )
    return found[0]


def difference(claim: dict[str, Any]) -> str:
    """The mean over the seeds of left − right, and half the width of its interval."""
    if (found := claim["difference"]) is None:
        return "–"
    scale = 100 if claim["measure"] == "pass@1" else 1
    mean, half = found["mean"] * scale, found["half_width"]
    digits = 1 if scale == 100 or abs(mean) >= 1 else 3
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half * scale:.{digits}f}")


def verdict(claim: dict[str, Any]) -> str:
    """The verdict, the number of seeds, and how many would decide an inconclusive claim, if the record says so."""
    if claim["difference"] is None:
        return "**not run**"
    needed = f"; about {claim['seeds_needed']} would decide" if claim.get("seeds_needed") else ""
    return f"**{claim['verdict']}**, {count_of(claim['difference']['seeds'], 'seed')}{needed}"


def cells(study: str, lines: Sequence[str]) -> str:
    """A row for each label of the first axis, with means and intervals over the seeds."""
    runs, columns = record(study)["runs"], [_column(line) for line in lines]
    axis = next(iter(runs[0]["cell"]))
    most = len({run["seed"] for run in runs})
    known = {label for run in runs for label in run["cell"].values()}
    for head, measure, labels in columns:
        if measure not in runs[0]["measures"] or not known.issuperset(labels):
            raise ValueError(
                f"column {head!r}: the record of {study} has no measure {measure!r}, or no such label"
            )
    rows: list[list[str]] = [[axis, *(head for head, _, _ in columns)]]
    for label in dict.fromkeys(run["cell"][axis] for run in runs):
        row = [label]
        for _, measure, labels in columns:
            chosen = [run for run in runs if {label, *labels} == set(run["cell"].values())]
            values = [value for run in chosen if (value := run["measures"][measure]) is not None]
            row.append(
                _mean(values, measure)
                + (f" ({count_of(len(values), 'seed')})" if len(values) < most else "")
            )
        rows.append(row)
    return markdown(rows)


def _column(line: str) -> tuple[str, str, list[str]]:
    """Head, measure and labels of `pass@1, v = 10: pass@1, v = 10`."""
    head, _, what = line.partition(": ")
    measure, _, labels = what.partition(", ")
    return head, measure, [label for label in labels.split(" & ") if label]


def _mean(values: Sequence[float], measure: str) -> str:
    if not values:
        return "–"
    found = Interval.of(values)
    share = measure.startswith("pass@")
    scale, digits = (100, 1) if share else (1, 1 if found.mean >= 1 or not any(values) else 3)
    half = "" if found.half is None else f" ± {found.half * scale:.{digits}f}"
    return f"{found.mean * scale:.{digits}f}{half}{' %' if share else ''}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *rest])


KINDS: dict[str, Callable[[str, Sequence[str]], str]] = {
    "verdicts": verdicts,
    "cells": cells,
    "amplification": lambda name, _: amplification.table(amplification.kept(name)),
    "precision": lambda _, __: precision_report.table(precision.read(HERE / "precision")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    changed = []
    for page in sorted(REPORTS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        try:
            anew = filled(text)
        except ValueError as error:
            parser.exit(2, f"{page}: {error}\n")
        if anew != text:
            changed.append(page.name)
            if not check:
                write_atomically(page, anew)
    print("\n".join(changed) or "no table changes")
    if check and changed:
        parser.exit(1)


if __name__ == "__main__":
    main()
