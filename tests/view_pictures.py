"""Screenshots of the page of `lagrpo view`, to look at: python tests/view_pictures.py DIRECTORY RUN …"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from browser import Browser

from lagrpo.view.command import view

TABS = ("trend", "rollouts", "evaluations", "settings")


def main(target: Path, runs: list[Path]) -> None:
    """Every tab in light and dark, a completion with the numbers of a token, and a narrow window."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = view(runs, target / "view.html").absolute()
        browser = Browser(Path(scratch))
        try:
            for dark in (False, True):
                for tab in TABS:
                    take(browser, file, target / f"{tab}-{'dark' if dark else 'light'}.png", f"#tab={tab}", dark=dark)
            page_of_token(browser, file, target / "completion.png")
            take(browser, file, target / "narrow.png", "#tab=rollouts", width=640)
        finally:
            browser.close()


def take(browser: Browser, file: Path, target: Path, address: str, width: int = 1280, dark: bool = False) -> None:
    page = browser.open(file.as_uri() + address, width=width, dark=dark)
    time.sleep(0.2)  # for the fonts
    page.screenshot(target)
    page.close()


def page_of_token(browser: Browser, file: Path, target: Path) -> None:
    page = browser.open(file.as_uri() + "#tab=rollouts&completion=0")
    page.hover(".opened .token", 2)
    page.screenshot(target)
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
