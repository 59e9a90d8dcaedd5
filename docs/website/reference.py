"""The reference that the code gives: settings, recipes, commands. Each function returns a page of Markdown."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from typing import Any, get_args, get_origin
from unittest.mock import patch

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from website.markdown import escape

from lagrpo.cli import COMMANDS, main
from lagrpo.core.recipes import RECIPES
from lagrpo.settings.schema import Settings
from lagrpo.terminal.show import source_code

WIDTH = "100"
ABOUT_SETTINGS = """\
A setting is given in a TOML file, in the table of its section, or on the command line: `--section.name VALUE`.
`lagrpo train --help` lists the same."""
ABOUT_RECIPES = """\
`loss.recipe` names one; the other settings of [loss](settings.md#loss) replace knobs of it.
[theory.md](../reports/theory.md) derives them, [off-policy.md](../docs/off-policy.md) says when to use which.
`rho` is π/α of a token, `s` of a sequence; A normalized is (r - mu)/sigma, centered r - mu."""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "min_length": "of length at least"}


def settings() -> str:
    """Every setting of a run with its type, default and description."""
    lines = ["# Settings", "", ABOUT_SETTINGS, ""]
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if not _is_section(section):
            raise TypeError(f"{name} is no section of settings")
        lines += _section(name, section)
    return "\n".join(lines)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _section(name: str, section: Any) -> list[str]:
    """A section: its own settings, then the sections in it."""
    lines = [f"## {name}", ""]
    if "__doc__" in vars(section) and section.__doc__:
        lines += [link_pages(escape(" ".join(section.__doc__.split()))), ""]
    inner = {leaf: field for leaf, field in section.model_fields.items() if _is_section(field.annotation)}
    for leaf, setting in section.model_fields.items():
        lines += [] if leaf in inner else _setting(f"{name}.{leaf}", setting)
        if entry := next(filter(_is_section, get_args(setting.annotation)), None):
            for each, of in entry.model_fields.items():
                lines += _setting(f"{name}.{leaf}.{each}", of)
    for leaf, field in inner.items():
        lines += _section(f"{name}.{leaf}", field.annotation)
    return lines


def _setting(name: str, field: FieldInfo) -> list[str]:
    if field.is_required():
        default = "none, it has to be set"
    else:
        default = "unset" if field.default is None else f"`{_say(field.default)}`"
    text = link_pages(escape(" ".join((field.description or "").split())))
    return [f"```{{confval}} {name}", f":type: {describe(field)}", f":default: {default}", "", text, "```", ""]


def _say(value: Any) -> str:
    """A value as a settings file says it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_say, value))}]"
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def describe(field: FieldInfo) -> str:
    """The type of a setting and its bounds, in words."""
    bounds = [f"{words} {getattr(each, name)}" for each in field.metadata for name, words in BOUNDS.items()
              if getattr(each, name, None) is not None]  # fmt: skip
    return ", ".join([" or ".join(_name_types(field.annotation)), *bounds])


def _name_types(kind: Any) -> Iterator[str]:
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    arguments = get_args(kind)
    if kind in names:
        yield names[kind]
    elif get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        yield "a table"
    elif get_origin(kind) is tuple:
        inside = " or ".join(dict.fromkeys(name for each in arguments if each is not ... for name in _name_types(each)))
        yield f"a list of {inside.replace('a table', 'tables')}" + (
            "" if ... in arguments else f", of length {len(arguments)}"
        )
    elif all(isinstance(each, str) for each in arguments):
        yield from (f"`{_say(each)}`" for each in arguments)
    else:
        yield from (name for each in arguments if each is not type(None) for name in _name_types(each))


def recipes() -> str:
    """Every recipe: what it maximizes, its source, the settings that make it, and its code."""
    lines = ["# Recipes", "", ABOUT_RECIPES]
    for name, recipe in RECIPES.items():
        made = [f"`{knob} = {_say(value)}`" for knob, value in recipe.settings.items()]
        lines += ["", f"## {name}", "", "```text", recipe.formula, "```", "", link_papers(escape(recipe.source)), ""]
        lines += [f"Settings: {', '.join(made)}.", "", "<details><summary>Source code</summary>", ""]
        lines += ["```python", source_code(recipe).rstrip(), "```", "", "</details>"]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """What `lagrpo --help` and the `--help` of every command print."""
    lines = ["# Command line", "", "```text", help_of(), "```", ""]
    for name in COMMANDS:
        lines += [f"## lagrpo {name}", "", "```text", help_of(name), "```", ""]
    return "\n".join(lines)


@cache
def help_of(*command: str) -> str:
    """What `lagrpo COMMAND --help` prints."""
    output = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": WIDTH, "NO_COLOR": "1"}), redirect_stdout(output):
        try:
            main([*command, "--help"])
        except SystemExit as stop:
            if stop.code:
                raise
    return "\n".join(line.rstrip() for line in output.getvalue().strip().splitlines())


def link_papers(text: str) -> str:
    """Numbers of arXiv as links."""
    return re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def link_pages(text: str, up: str = "..") -> str:
    """Pages of docs/ that a text names as links from a page that lies in `up`."""
    return re.sub(r"docs/([\w-]+)\.md", rf"[\1.md]({up}/docs/\1.md)", text)
