"""Write the tables of settings.md, metrics.md, from-trl.md and from-verl.md from lists in code.

    python docs/website/reference.py

To change a row, edit the line under a field of settings/sections.py or settings/loss.py,
runs/metrics.toml or settings/other_trainers.toml.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lagrpo.runs.metrics import METRICS
from lagrpo.settings.other_trainers import NAMES_OF_TRAINERS, TITLES, WITH_PAGE
from lagrpo.settings.schema import Settings

DOCS = Path(__file__).parents[1]

UNAVAILABLE = "not available: "
"""Beginning of the text about a name that has no counterpart. Only the error message has it."""


def setting_rows() -> Iterator[str]:
    yield from ("| key | default | meaning |", "|---|---|---|")
    for section, values in Settings():
        for name, field in type(values).model_fields.items():
            default = getattr(values, name)
            shown = f"`{json.dumps(default)}`" if default not in (None, (), {}) else ""
            meaning = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", field.description or "")
            yield f"| `{section}.{name}` | {shown} | {meaning} |"


def metric_rows() -> Iterator[str]:
    yield from ("| metric | meaning |", "|---|---|")
    for heading, metrics in METRICS.items():
        yield f"| **{heading}** | |"
        yield from (f"| `{name}` | {meaning} |" for name, meaning in metrics.items())


def name_rows(trainer: str) -> Iterator[str]:
    """Rows of the names of a trainer, with names of the same text in one row."""
    yield from (f"| {TITLES[trainer]} | lagrpo |", "|---|---|")
    rows: dict[str, dict[str, list[str]]] = {}  # heading -> text -> names
    for heading, entries in NAMES_OF_TRAINERS[trainer].items():
        for name, text in entries.items():
            if not text.startswith(UNAVAILABLE):
                rows.setdefault(heading, {}).setdefault(text, []).append(f"`{name}`")
    for heading, names_of_texts in rows.items():
        yield f"| **{heading}** | |"
        for text, names in names_of_texts.items():
            yield f"| {', '.join(names)} | {text.replace(' x ', ' × ')} |"


def fill_page(name: str, table: str, rows: Iterator[str]) -> str:
    """The page NAME with these rows between the heading "All TABLE" and the next blank line."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    before, heading, rest = text.partition(f"\n## All {table}\n\n")
    _, blank, after = rest.partition("\n\n")
    return "".join([before, heading, "\n".join(rows), blank or "\n", after])


def fill_pages() -> dict[str, str]:
    """The text of each page by its name."""
    pages = {
        "settings": fill_page("settings", "settings", setting_rows()),
        "metrics": fill_page("metrics", "metrics", metric_rows()),
    }
    for trainer in WITH_PAGE:
        page = f"from-{trainer}"
        pages[page] = fill_page(page, f"names of {TITLES[trainer]}", name_rows(trainer))
    return pages


if __name__ == "__main__":
    for name, text in fill_pages().items():
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")
