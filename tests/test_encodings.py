"""Text files are UTF-8 on every machine: the package reads and writes none in the encoding of the
locale."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src"


def by_locale(source: str) -> Iterator[int]:
    """The lines of calls that read or write text, and leave its encoding to the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if options.keys() & {"encoding", None}:
            continue
        match node.func:
            case ast.Attribute(attr="read_text"):
                depends = not node.args
            case ast.Attribute(attr="write_text"):
                depends = len(node.args) == 1
            case ast.Name(id="open"):
                depends = is_text(node.args[1:2], options)
            case ast.Attribute(attr="open"):  # of a path; other objects have methods of that name
                depends = bool(node.args[:1]) and is_mode(node.args[0]) and is_text(node.args, {})
            case _:
                depends = any(is_true(options.get(name)) for name in ("text", "universal_newlines"))
        if depends:
            yield node.lineno


def is_text(mode: list[ast.expr], options: dict[str | None, ast.expr]) -> bool:
    mode_of_call = mode[0] if mode else options.get("mode")
    return not (isinstance(mode_of_call, ast.Constant) and "b" in str(mode_of_call.value))


def is_mode(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and set(str(argument.value)) <= set("rwax+bt")


def is_true(argument: ast.expr | None) -> bool:
    return isinstance(argument, ast.Constant) and argument.value is True


def test_text_is_read_and_written_with_an_encoding():
    calls_without_encoding = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line in by_locale(path.read_text(encoding="utf-8"))
    ]
    assert calls_without_encoding == []


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("open(name)", True),
        ("open(name, 'rb')", False),
        ("open(name, mode='rb')", False),
        ("path.open('a')", True),
        ("path.open('ab')", False),
        ("episodes.open(prompt, key)", False),
        ("run(words, text=True)", True),
        ("run(words, encoding='utf-8')", False),
        ("event(text=text)", False),
    ],
)
def test_call_that_leaves_the_encoding_to_the_locale_is_found(call, is_found):
    assert bool(list(by_locale(call))) is is_found
