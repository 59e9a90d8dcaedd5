"""Write the sources of the site: the repository's pages and the reference that the code gives.

python docs/website/generate.py DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from website import interface, reference  # noqa: E402
from website.pages import write_pages  # noqa: E402


def generate(site: Path) -> None:
    """Write everything into `site`, which is emptied before."""
    shutil.rmtree(site, ignore_errors=True)
    write_pages(ROOT, site)
    pages = {
        "settings": reference.settings(),
        "recipes": reference.recipes(),
        "commands": reference.commands(),
        **interface.pages(ROOT / "src"),
    }
    for name, text in pages.items():
        (site / "reference" / f"{name}.md").parent.mkdir(parents=True, exist_ok=True)
        (site / "reference" / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
