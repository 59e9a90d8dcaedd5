"""Limits on the size of the sources: functions that one sees whole, files that one knows, calls that one can read.

The length of a function is the number of its lines from `def` to the end, decorators and docstring left out; the lines
of functions inside it count. Its parameters are all that a caller can give: no `self` or `cls`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src"
SUFFIXES = (".py", ".c", ".h")
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 20  # of nine functions in ten
LINES_OF_A_LONG_FUNCTION = 30
LONG_FUNCTIONS = 5
PARAMETERS = 8

# Signatures that are not ours to choose.
IMPOSED = {
    "model/attention.py:shared_prefix_attention": "transformers calls it: the attention function of its registry",
}


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


DEFINITION_IN_C = re.compile(r"^(?!static inline\b.*;)\w[\w\s*]*?\b(\w+)\(([^;{}()]*)\)\s*\{", re.MULTILINE)


def functions_in_c(source: str, file: str) -> list[Function]:
    """Every function that a C file defines, with the number of its parameters; its lines are not counted."""
    return [
        Function(f"{file}:{name}", 0, 0 if parameters.strip() in ("", "void") else parameters.count(",") + 1)
        for name, parameters in DEFINITION_IN_C.findall(source)
    ]


def everything() -> list[Function]:
    return [f for path in files(".py") for f in functions(path.read_text(encoding="utf-8"), shown(path))]


def files(*suffixes: str) -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in suffixes)


def shown(path: Path) -> str:
    return path.relative_to(SOURCES / "lagrpo").as_posix()


def test_nine_functions_in_ten_fit_on_half_a_screen():
    lengths = sorted(function.lines for function in everything())
    assert len(lengths) > 1000
    assert lengths[int(0.9 * len(lengths))] <= LINES_OF_A_FUNCTION


def test_long_functions_are_few():
    long = {f.place: f.lines for f in everything() if f.lines > LINES_OF_A_LONG_FUNCTION}
    assert len(long) <= LONG_FUNCTIONS, f"functions of more than {LINES_OF_A_LONG_FUNCTION} lines: {long}"


def test_files_are_short():
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files(*SUFFIXES)}
    assert {name: n for name, n in lengths.items() if n > LINES_OF_A_FILE} == {}


def test_functions_have_few_parameters():
    in_c = [f for path in files(".c", ".h") for f in functions_in_c(path.read_text(encoding="utf-8"), shown(path))]
    many = {f.place: f.parameters for f in [*everything(), *in_c] if f.parameters > PARAMETERS}
    assert {place: n for place, n in many.items() if place not in IMPOSED} == {}
    assert set(IMPOSED) <= set(many), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    ("source", "lines", "parameters"),
    [
        ("def f(): pass", 1, 0),
        ("@decorated\ndef f(a, /, b, *c, d=1, **e):\n    return a", 2, 5),
        ('def f(self, a):\n    """Doc,\n    of two lines."""\n    # why\n\n    return a', 4, 1),
        ('async def f(cls):\n    """Doc."""', 1, 0),
        ("def f(\n    a,\n    itself,\n):\n    return 'a'", 5, 2),
    ],
)
def test_what_is_counted(source, lines, parameters):
    assert functions(source, "a.py") == [Function("a.py:f", lines, parameters)]


def test_inner_functions_and_methods_count_too():
    source = "class A:\n    def f(self):\n        def g(x):\n            return x\n        return g"
    assert functions(source, "a.py") == [Function("a.py:f", 4, 0), Function("a.py:g", 2, 1)]


def test_what_is_counted_in_c():
    source = (
        "static i64 one(const float *x,\n    i64 n) {\n    if (n) { return two(n, 1, 2); }\n}\n"
        "void two(void) {\n}\nEXPORT void three(i64 a, i64 b, i64 c)\n{\n}\nint declared(int a, int b);\n"
    )
    assert [(f.place, f.parameters) for f in functions_in_c(source, "a.c")] == [
        ("a.c:one", 2), ("a.c:two", 0), ("a.c:three", 3),
    ]  # fmt: skip
