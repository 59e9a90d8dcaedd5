"""Write the tables of docs/settings.md and docs/metrics.md from the lists in the code.

    python docs/website/reference.py

To change a row, edit the line under a field of settings/sections.py, or runs/metrics.toml."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lagrpo.runs.metrics import METRICS
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


def fill_page(name: str, rows: Iterator[str]) -> str:
    """The page with these rows between the heading "All NAME" and the next blank line."""
    before, heading, rest = (
        (DOCS / f"{name}.md").read_text(encoding="utf-8").partition(f"\n## All {name}\n\n")
    )
    _, blank, after = rest.partition("\n\n")
    return "".join([before, heading, "\n".join(rows), blank, after])


def fill_pages() -> dict[str, str]:
    """The text of each page by its name."""
    return {
        "settings": fill_page("settings", setting_rows()),
        "metrics": fill_page("metrics", metric_rows()),
    }


if __name__ == "__main__":
    for name, text in fill_pages().items():
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")
