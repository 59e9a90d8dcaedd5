"""Write the tables of docs/settings.md, docs/metrics.md and docs/from-trl.md from lists in code.

    python docs/website/reference.py

To change a row, edit the line under a field of settings/sections.py or settings/loss.py,
runs/metrics.toml or settings/other_trainers.toml.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lagrpo.runs.metrics import METRICS
from lagrpo.settings.other_trainers import NAMES_OF_TRAINERS, TITLES
from lagrpo.settings.schema import Settings

DOCS = Path(__file__).parents[1]


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
    yield from (f"| {TITLES[trainer]} | lagrpo |", "|---|---|")
    for heading, entries in NAMES_OF_TRAINERS[trainer].items():
        yield f"| **{heading}** | |"
        for name, text in entries.items():
            yield f"| `{name}` | {text.replace(' x ', ' × ')} |"


def fill_page(name: str, rows: Iterator[str]) -> str:
    """The page with these rows under the heading "All NAME"."""
    return fill_table((DOCS / f"{name}.md").read_text(encoding="utf-8"), name, rows)


def fill_table(text: str, name: str, rows: Iterator[str]) -> str:
    """The text with these rows between the heading "All NAME" and the next blank line."""
    before, heading, rest = text.partition(f"\n## All {name}\n\n")
    _, blank, after = rest.partition("\n\n")
    return "".join([before, heading, "\n".join(rows), blank, after])


def fill_names() -> str:
    """The page about other trainers, with the table of each."""
    text = (DOCS / "from-trl.md").read_text(encoding="utf-8")
    for trainer, title in TITLES.items():
        text = fill_table(text, f"names of {title}", name_rows(trainer))
    return text if text.endswith("\n") else text + "\n"


def fill_pages() -> dict[str, str]:
    """The text of each page by its name."""
    return {
        "settings": fill_page("settings", setting_rows()),
        "metrics": fill_page("metrics", metric_rows()),
        "from-trl": fill_names(),
    }


if __name__ == "__main__":
    for name, text in fill_pages().items():
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")
