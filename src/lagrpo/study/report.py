"""What a study found: report.html to look at, report.md with the same tables and verdicts, report.json with every
number, curves.png."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.runs.files import to_json, write_atomically
from lagrpo.settings.schema import Settings
from lagrpo.study.claims import Comparison, Values
from lagrpo.study.curves import draw
from lagrpo.study.file import Cell, Claim, Study
from lagrpo.study.measures import Finished, measure, metrics_of
from lagrpo.study.records import to_record
from lagrpo.study.statistics import CONFIDENCE, Interval, Verdict
from lagrpo.terminal.text import ABSENT, count_of, duration
from lagrpo.view.page import STUDY, build_page

COSTS = {
    "s sampling": "sum seconds_sampling", "s learning": "sum seconds_learning", "s weight sync": "sum seconds_sync",
    "s in all": "sum seconds_total", "weight syncs": "sum synced", "tokens sampled": "sum tokens_sampled",
}  # fmt: skip
SHARES = ("pass_at_", "accuracy")
"""How measures begin that are shown in percent."""

Rows = list[list[str]]
Found = Mapping[tuple[Cell, int], Finished]


@dataclass(frozen=True, slots=True)
class Report:
    """A study, its finished runs, and the settings of all, by cell and seed."""

    study: Study
    found: Found
    settings: Mapping[tuple[Cell, int], Settings]

    def values(self, text: str) -> Values:
        """A measure of every finished run."""
        return {key: measure(text, run, self.study.smooth) for key, run in self.found.items()}

    def verdict(self, claim: Claim) -> Verdict:
        comparison = Comparison.parse(claim.claim, self.study.grid)
        return comparison.verdict(self.values(claim.measure), list(self.study.grid), claim.margin)

    def write(self, directory: Path) -> Path:
        """Write the report's files into the directory; returns report.md."""
        if self.found and self.study.curves:
            figure = draw(self.study, self.found)
            write_atomically(directory / "curves.png", lambda path: figure.savefig(path, format="png", dpi=110))
        write_atomically(directory / "report.json", self.to_json())
        write_atomically(directory / "report.html", self.to_html())
        return write_atomically(directory / "report.md", self.to_markdown())

    def print_summary(self, page: Path) -> None:
        """The verdicts, and where the rest is."""
        for claim, (_, tested, difference, outcome) in zip(self.study.claims, self._claims()[1:], strict=True):
            print(f"{outcome}: {claim.says}: {tested}{'' if difference == ABSENT else f': {difference}'}")
        print(f"report: {page}, and {page.with_suffix('.html')} for a browser")

    def to_json(self) -> str:
        """Every number of the report, and a record of each run, on a line of its own."""
        texts = dict.fromkeys([*self.study.measures, *COSTS.values(), *(claim.measure for claim in self.study.claims)])
        values = {text: self.values(text) for text in texts}
        named = dict.fromkeys([*self.study.curves, *(name for text in texts for name in metrics_of(text))])
        runs = [
            {"cell": dict(zip(self.study.grid, cell, strict=True)), "seed": seed,
             "measures": {text: values[text][cell, seed] for text in texts},
             **to_record(run, self.settings[cell, seed], named)}
            for (cell, seed), run in self.found.items()
        ]  # fmt: skip
        head = to_json({"title": self.study.title, "claims": [self._claim(claim) for claim in self.study.claims]})
        return f'{head[:-1]}, "runs": [\n' + ",\n".join(to_json(run) for run in runs) + "\n]}\n"

    def to_html(self) -> str:
        """The page: the same for a browser, with curves to choose from."""
        study = self.study
        claims = [
            {"says": claim.says, "source": claim.source or "", "tested": tested, "difference": difference,
             "verdict": verdict, "outcome": self.verdict(claim).outcome}
            for claim, (_, tested, difference, verdict) in zip(study.claims, self._claims()[1:], strict=True)
        ]  # fmt: skip
        runs = [
            {"cell": cell, "seed": seed, "curves": {name: run.curve(name) for name in study.curves}}
            for (cell, seed), run in self.found.items()
        ]
        data = {
            "title": study.title, "note": study.note.strip(), "about": self._about().replace("**", ""),
            "missing": self.missing, "claims": claims, "caution": CAUTION.replace("*", ""), "cells": study.cells,
            "metrics": study.curves, "smooth": study.smooth, "runs": runs, "where": self._where(),
            "tables": [{"name": name, "rows": rows} for name, rows in self._tables().items()],
        }  # fmt: skip
        return build_page(f"{study.title} · lagrpo study", to_json(data).encode(), STUDY)

    def _claim(self, claim: Claim) -> dict[str, Any]:
        found = self.verdict(claim)
        difference = found.difference and {
            "mean": found.difference.mean, "half_width": found.difference.half, "seeds": found.difference.n,
        }  # fmt: skip
        said = claim.model_dump(exclude_none=True)
        return said | {"verdict": found.outcome, "difference": difference, "seeds_needed": found.needed}

    def to_markdown(self) -> str:
        study = self.study
        parts = [f"# {study.title}", study.note.strip(), self._about()]
        if study.claims:
            parts += ["## Claims", _markdown(self._claims()), CAUTION]
        for name, rows in self._tables().items():
            parts += [f"## {name}", _markdown(rows)]
        if self.found and study.curves:
            parts += ["## Curves", f"![{', '.join(study.curves)} by batch](curves.png)"]
        if self.found:
            parts += ["## Where", "\n".join(f"- {line}" for line in self._where())]
        return "\n\n".join(part for part in parts if part) + "\n"

    @property
    def missing(self) -> int:
        """Runs that are not finished."""
        return len(self.study.cells) * len(self.study.seeds) - len(self.found)

    def _about(self) -> str:
        study, seeds = self.study, ", ".join(map(str, self.study.seeds))
        missing = f"; **{count_of(self.missing, 'run')} missing**" if self.missing else ""
        return (
            f"{count_of(len(self.found), 'run')}, seeds {seeds}{missing}. A figure is the mean over the seeds ± half "
            f"the width of its {CONFIDENCE:.0%} interval by Student's t; a cell with one seed has none. Smoothed "
            f"rewards average {count_of(study.smooth, 'batch', 'es')}."
        )

    def _tables(self) -> dict[str, Rows]:
        measures = dict(zip(self.study.measures, self.study.measures, strict=True))
        return {"Results": self._table(measures), "Costs of a run": self._table(COSTS)}

    def _claims(self) -> Rows:
        rows = [["claim", "tested as", "difference", "verdict"]]
        for claim in self.study.claims:
            found, said = self.verdict(claim), claim.says + (f" ({claim.source})" if claim.source else "")
            margin = f", margin {_shown(claim.measure, claim.margin)}" if claim.margin else ""
            tested = f"{claim.measure}: {claim.claim}{margin}"
            rows.append([said, tested, self._difference(claim, found), self._outcome(claim, found)])
        return rows

    def _difference(self, claim: Claim, found: Verdict) -> str:
        """With the value itself, where it is compared with a number other than 0."""
        if found.difference is None:
            return ABSENT
        shown, number = _interval(claim.measure, found.difference), Comparison.parse(claim.claim, self.study.grid).right
        if isinstance(number, float) and number:
            return f"{shown} (of {_shown(claim.measure, found.difference.mean + number)})"
        return shown

    def _outcome(self, claim: Claim, found: Verdict) -> str:
        if found.outcome != "cannot be told":
            return found.outcome
        if found.difference is None:
            measured = any(value is not None for value in self.values(claim.measure).values())
            lacking = "no seed has runs of both sides" if measured or not self.found else "no run has this measure"
            return f"cannot be told: {lacking}"
        seeds = count_of(found.difference.n, "seed")
        return f"cannot be told with {seeds}" + (f"; about {found.needed} would" if found.needed else "")

    def _table(self, columns: Mapping[str, str]) -> Rows:
        axes, found = list(self.study.grid), {text: self.values(text) for text in columns.values()}
        rows = [[*axes, "seeds", *columns]]
        for cell in self.study.cells:
            seeds = [seed for seed in self.study.seeds if (cell, seed) in self.found]
            cells = []
            for text in columns.values():
                values = [value for seed in seeds if (value := found[text][cell, seed]) is not None]
                partly = f" ({len(values)} of {len(seeds)})" if 0 < len(values) < len(seeds) else ""
                cells.append(_interval(text, Interval.of(values)) + partly if values else ABSENT)
            rows.append([*cell, str(len(seeds)), *cells])
        return rows

    def _where(self) -> list[str]:
        """Machines and commits of the runs, and how long they took; a warning where they computed in several dtypes."""
        seconds = [value for value in self.values("sum seconds_total").values() if value is not None]
        where = Counter(
            f"{e.get('device_name') or e.get('cpu')}, {count_of(e.get('threads') or 1, 'thread')}, {e.get('dtype')}, "
            f"lagrpo {(e.get('commit') or 'without a commit')[:12]}"
            for e in (run.where for run in self.found.values())
        )
        lines = [f"{count_of(n, 'run')}: {what}" for what, n in where.most_common()]
        took = [f"{duration(sum(seconds))} of batches in all, {duration(fmean(seconds))} a run"] if seconds else []
        dtypes = sorted({str(run.where.get("dtype")) for run in self.found.values()})
        mixed = [f"Computed in {' and '.join(dtypes)}: {MIXED}"] if len(dtypes) > 1 else []
        return [*lines, *took, *mixed]


CAUTION = (
    "A claim *holds* where the whole interval of the difference between its sides, taken seed by seed, is on its side "
    "of the bound. Where the interval has both sides in it, the seeds cannot tell, and the number is how many would, "
    "if their differences went on to vary as they do. Of claims whose true difference is at the bound one in forty is "
    "said to hold."
)

MIXED = "a difference between two runs may be one of rounding; `model.dtype` in the study's settings fixes one for all"


def _interval(text: str, found: Interval) -> str:
    half = "" if found.half is None else f" ± {_shown(text, found.half, found.mean)}"
    return f"{_shown(text, found.mean)}{half}"


def _shown(text: str, value: float, beside: float | None = None) -> str:
    """A value of a measure; `beside`: with as many digits as this one has."""
    if text.rpartition(".")[2].startswith(SHARES):
        return f"{value:.1%}"
    size = abs(value if beside is None else beside)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    head, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rest])
