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
