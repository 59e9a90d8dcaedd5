"""The figures in the documentation beside the records that they are from."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import pytest
import tables

from lagrpo.study.statistics import Interval

PAGES = sorted(path.name for path in tables.DOCS.glob("*.md"))
STUDIES = sorted(path.stem for path in tables.RECORDS.glob("*.json") if not path.stem.endswith("-points"))
INTERVAL = re.compile(r"(-?\d*\.?\d+) ± (\d*\.?\d+)")
OTHERS = re.compile(r"<!-- (beside TRL) -->.*?<!-- end of \1 -->", re.DOTALL)
"""Tables of other programs, which those write and check."""


@pytest.mark.parametrize("page", PAGES)
def test_every_table_is_what_the_records_say(page):
    """Mended by `python experiments/tables.py`."""
    text = (tables.DOCS / page).read_text(encoding="utf-8")
    assert tables.filled(text) == text


def known() -> Iterator[tuple[float, float]]:
    """The mean and half the width of every interval that the records have: of claims, and of cells."""
    for study in STUDIES:
        for claim in tables.record(study)["claims"]:
            found = claim["difference"]
            if found and found["half_width"] is not None:
                yield found["mean"], found["half_width"]
        values = defaultdict(list)
        for run in tables.record(study)["runs"]:
            for measure, value in run["measures"].items():
                if value is not None:
                    values[measure, *run["cell"].values()].append(value)
        for of_cell in map(Interval.of, values.values()):
            if of_cell.half is not None:
                yield of_cell.mean, of_cell.half


def rounds_to(value: float, shown: str) -> bool:
    """Whether a value, or 100 of it (points), is written so, but for its sign, which the words may say."""
    step = 10.0 ** -len(shown.partition(".")[2])
    return any(abs(abs(value) * scale - abs(float(shown))) <= 0.5 * step + 1e-9 for scale in (1, 100))


def test_every_interval_in_the_text_is_of_a_record():
    pages = [(tables.DOCS / page).read_text(encoding="utf-8") for page in ("papers.md", "comparison.md", "choose.md")]
    text = tables.TABLE.sub("", OTHERS.sub("", "\n".join(pages)))
    intervals, of_records = INTERVAL.findall(text), list(known())
    assert intervals
    strangers = [
        f"{mean} ± {half}"
        for mean, half in intervals
        if not any(rounds_to(a, mean) and rounds_to(b, half) for a, b in of_records)
    ]
    assert strangers == []


def test_a_figure_of_no_record_would_be_found():
    assert rounds_to(0.1434, "14.3")
    assert rounds_to(-0.1434, "14.3")
    assert rounds_to(0.1434, ".143")
    assert not rounds_to(0.1434, "14.4")
    assert not any(rounds_to(a, "12.3") and rounds_to(b, "45.6") for a, b in known())


def test_a_table_asked_for_what_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no such kind"):
        tables.filled("<!-- table: verdict\nlag: v\n-->\n<!-- end of table -->")
    with pytest.raises(ValueError, match="0 claims begin with 'nothing'"):
        tables.filled("<!-- table: verdicts\nlag: nothing\n-->\n<!-- end of table -->")
    with pytest.raises(ValueError, match="2 tables begin and 1 end"):
        tables.filled("<!-- table: precision -->\nprose\n<!-- table: precision -->\n<!-- end of table -->")
    with pytest.raises(ValueError, match="2 tables begin and 2 end"):
        tables.filled("<!-- table: precision -->\n<!-- table: precision -->" + 2 * "\n<!-- end of table -->")
    with pytest.raises(ValueError, match="no measure 'pass_at_7'"):
        tables.filled("<!-- table: cells lag\nhead: pass_at_7\n-->\n<!-- end of table -->")
    with pytest.raises(ValueError, match="no such label"):
        tables.filled("<!-- table: cells objectives\nhead: pass_at_1, v = 99\n-->\n<!-- end of table -->")
    with pytest.raises(ValueError, match="no record of a study 'nobody'"):
        tables.filled("<!-- table: verdicts\nnobody: v\n-->\n<!-- end of table -->")
