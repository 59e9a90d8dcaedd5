"""The Python code of pages in docs/, for tests that run it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def python_blocks(page: str) -> list[str]:
    """The blocks of Python code of a page, in their order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def named_files(page: str) -> dict[str, str]:
    """The blocks of a page that begin with the name of their file (`# my_rewards.py`), by name."""
    files = {}
    for block in python_blocks(page):
        first_line = block.partition("\n")[0]
        match = re.fullmatch(r"# (\w+)\.py", first_line)
        if match:
            files[match[1]] = block
    return files


@contextmanager
def current_directory_with(
    modules: dict[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Writes modules into a directory and makes it the current one, where lagrpo finds modules.

    At the end, Python forgets the modules and the directory.
    """
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(directory)
    yield
    for name in modules:
        sys.modules.pop(name, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(directory)]
