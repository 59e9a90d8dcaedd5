"""What a study found: report.md with the tables and verdicts, report.json with every number, curves.png."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lagrpo.runs.environment import read_environment
from lagrpo.runs.files import to_json, write_atomically
from lagrpo.study.claims import Comparison, Values
from lagrpo.study.curves import draw
from lagrpo.study.file import Cell, Claim, Study
from lagrpo.study.measures import Finished, measure
from lagrpo.study.statistics import CONFIDENCE, Interval, Verdict
from lagrpo.terminal.text import ABSENT, count_of, duration

COSTS = {
    "s sampling": "sum seconds_sampling", "s learning": "sum seconds_learning", "s weight sync": "sum seconds_sync",
    "s in all": "sum seconds_total", "weight syncs": "sum synced", "tokens sampled": "sum tokens_sampled",
}  # fmt: skip
SHARES = ("pass_at_", "accuracy")
"""How measures begin that are shown in percent."""

Found = Mapping[tuple[Cell, int], Finished]


@dataclass(frozen=True, slots=True)
class Report:
    """A study and its finished runs, by cell and seed."""

    study: Study
    found: Found
    paths: Mapping[tuple[Cell, int], Path]

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
        write_atomically(directory / "report.json", to_json(self.to_dict()) + "\n")
        return write_atomically(directory / "report.md", self.to_markdown())

    def to_dict(self) -> dict[str, Any]:
        """Every number of the report."""
        texts = dict.fromkeys([*self.study.measures, *COSTS.values(), *(claim.measure for claim in self.study.claims)])
        values = {text: self.values(text) for text in texts}
        runs = [
            {"cell": dict(zip(self.study.grid, cell, strict=True)), "seed": seed, "run": str(self.paths[cell, seed]),
             "measures": {text: values[text][cell, seed] for text in texts}}
            for cell, seed in self.found
        ]  # fmt: skip
        return {"title": self.study.title, "runs": runs, "claims": [self._claim(claim) for claim in self.study.claims]}

    def _claim(self, claim: Claim) -> dict[str, Any]:
        found = self.verdict(claim)
        difference = found.difference and {
            "mean": found.difference.mean, "half_width": found.difference.half, "seeds": found.difference.n,
        }  # fmt: skip
        said = claim.model_dump(exclude_none=True)
        return said | {"verdict": found.outcome, "difference": difference, "seeds_needed": found.needed}

    def to_markdown(self) -> str:
        study, missing = self.study, len(self.study.cells) * len(self.study.seeds) - len(self.found)
        seeds = ", ".join(map(str, study.seeds))
        parts = [f"# {study.title}", study.note.strip()]
        parts.append(
            f"{count_of(len(self.found), 'run')}, seeds {seeds}"
            + (f"; **{count_of(missing, 'run')} missing**" if missing else "")
            + f". A figure is the mean over the seeds ± half the width of its {CONFIDENCE:.0%} interval by Student's "
            f"t; a cell with one seed has none. Smoothed rewards average {count_of(study.smooth, 'batch', 'es')}."
        )
        if study.claims:
            parts += ["## Claims", self._claims(), CAUTION]
        parts += ["## Results", self._table(dict(zip(study.measures, study.measures, strict=True)))]
        parts += ["## Costs of a run", self._table(COSTS)]
        if self.found and study.curves:
            parts += ["## Curves", f"![{', '.join(study.curves)} by batch](curves.png)"]
        if self.found:
            parts += ["## Where", self._where()]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _claims(self) -> str:
        rows = [["claim", "tested as", "difference", "verdict"]]
        for claim in self.study.claims:
            found, said = self.verdict(claim), claim.says + (f" ({claim.source})" if claim.source else "")
            margin = f", margin {_shown(claim.measure, claim.margin)}" if claim.margin else ""
            difference = ABSENT if found.difference is None else _interval(claim.measure, found.difference)
            rows.append([said, f"{claim.measure}: {claim.claim}{margin}", difference, _verdict(found)])
        return _markdown(rows)

    def _table(self, columns: Mapping[str, str]) -> str:
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
        return _markdown(rows)

    def _where(self) -> str:
        """Machines and commits of the runs, and how long they took."""
        seconds = [value for value in self.values("sum seconds_total").values() if value is not None]
        environments = [read_environment(path) for key, path in self.paths.items() if key in self.found]
        where = Counter(
            f"{e.get('device_name') or e.get('cpu')}, {count_of(e.get('threads') or 1, 'thread')}, {e.get('dtype')}, "
            f"lagrpo {((e.get('git') or {}).get('commit') or 'without a commit')[:12]}"
            for e in environments
        )
        lines = [f"- {count_of(n, 'run')}: {what}" for what, n in where.most_common()]
        return "\n".join([*lines, f"- {duration(sum(seconds))} of batches in all, {duration(fmean(seconds))} a run"])


CAUTION = (
    "A claim *holds* where the whole interval of the difference between its sides, taken seed by seed, is on its side "
    "of the bound. Where the interval has both sides in it, the seeds cannot tell, and the number is how many would, "
    "if their differences went on to vary as they do. Of claims whose true difference is at the bound one in forty is "
    "said to hold."
)


def print_summary(report: Report, page: Path) -> None:
    """The verdicts, and where the rest is."""
    for claim in report.study.claims:
        found = report.verdict(claim)
        difference = "" if found.difference is None else f" ({_interval(claim.measure, found.difference)})"
        print(f"{_verdict(found)}: {claim.says}: {claim.measure}: {claim.claim}{difference}")
    print(f"report: {page}")


def _verdict(found: Verdict) -> str:
    if found.outcome != "cannot be told":
        return found.outcome
    if found.difference is None:
        return "cannot be told: no runs of both sides"
    seeds = count_of(found.difference.n, "seed")
    return f"cannot be told with {seeds}" + (f"; about {found.needed} would" if found.needed else "")


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
