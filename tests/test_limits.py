"""Limits on the size of the sources: functions that one sees whole, files that one knows, calls that one can read.

The length of a function is the number of its lines from `def` to the end, decorators and docstring left out; the lines
of functions inside it count. Its parameters are all that a caller can give: no `self` or `cls`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 20  # of nine functions in ten
LINES_OF_A_LONG_FUNCTION = 30
LONG_FUNCTIONS = 5
PARAMETERS = 8
# Signatures that are not ours to choose: transformers', and the options of a command.
IMPOSED = {"model/attention.py:shared_prefix_attention", "cli.py:vllm_serve"}


@dataclass(frozen=True)
class Function:
    place: str
    lines: int
    parameters: int


def functions(source: str, file: str) -> list[Function]:
    """Every function of a Python file, methods and inner functions too."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [Function(f"{file}:{node.name}", _lines(node), _parameters(node)) for node in found]


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    documented = ast.get_docstring(node, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    a = node.args
    named = [parameter.arg for parameter in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len(named) + (a.vararg is not None) + (a.kwarg is not None) - (named[:1] in (["self"], ["cls"]))


def shown(path: Path) -> str:
    return path.relative_to(SOURCES / "lagrpo").as_posix()


def everything() -> list[Function]:
    return [f for path in SOURCES.rglob("*.py") for f in functions(path.read_text(encoding="utf-8"), shown(path))]


def test_nine_functions_in_ten_fit_on_half_a_screen_and_long_ones_are_few():
    found = everything()
    lengths = sorted(function.lines for function in found)
    assert lengths[int(0.9 * len(lengths))] <= LINES_OF_A_FUNCTION
    long = {f.place: f.lines for f in found if f.lines > LINES_OF_A_LONG_FUNCTION}
    assert len(long) <= LONG_FUNCTIONS, f"functions of more than {LINES_OF_A_LONG_FUNCTION} lines: {long}"


def test_files_are_short():
    sources = [path for path in SOURCES.rglob("*") if path.suffix in (".py", ".c", ".h")]
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: n for name, n in lengths.items() if n > LINES_OF_A_FILE} == {}


def test_functions_have_few_parameters():
    assert {f.place: f.parameters for f in everything() if f.parameters > PARAMETERS}.keys() <= IMPOSED


def test_lines_and_parameters_are_counted_without_docstring_decorators_and_self():
    source = '@decorated\ndef f(self, a, *c, d=1, **e):\n    """Doc,\n    of two lines."""\n    # why\n\n    return a'
    assert functions(source, "a.py") == [Function("a.py:f", 4, 4)]
    source = "class A:\n    def f(self):\n        def g(x):\n            return x\n        return g"
    assert functions(source, "a.py") == [Function("a.py:f", 4, 0), Function("a.py:g", 2, 1)]
