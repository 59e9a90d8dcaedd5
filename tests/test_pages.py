"""The documentation is true: its Python gives what the page says, and the functions and tests that it names exist."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if ">>>" in path.read_text())
CORE = "advantages|bounds|corrections|divergences|dynamics|estimators|loss|objectives|ratios|reductions|reinforce"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page):
    found = doctest.testfile(str(DOCS / page), module_relative=False)
    assert found.attempted > 0
    assert found.failed == 0


def test_the_page_on_theory_names_functions_and_tests_that_exist():
    text = (DOCS / "theory.md").read_text()
    named = re.findall(rf"`({CORE})\.(\w+)", text)
    assert len(named) > 40
    for module, function in named:
        assert callable(getattr(import_module(f"lagrpo.core.{module}"), function)), f"{module}.{function}"
    sources = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    for test in re.findall(r"`(test_\w+)`", text):
        assert f"def {test}(" in sources


def test_the_readme_shows_the_lines_of_the_loop():
    readme = (TESTS.parent / "README.md").read_text()
    loop = (TESTS.parent / "src" / "lagrpo" / "training" / "loop.py").read_text()
    rows = re.findall(r"^\| \d+.*?\| (`.*?) \|$", readme, re.M)
    assert len(rows) == 9
    for row in rows:
        names = re.findall(r"[\w.]+(?=\()", row)
        assert names, row
        assert [name for name in names if f"{name}(" not in loop] == []
    for line in re.findall(r"`(for .*?:)`", "".join(rows)):
        assert line in loop
