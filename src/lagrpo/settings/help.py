"""--help of the commands that take settings: every setting with its description and its present value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tyro
from pydantic import BaseModel

from lagrpo.settings.arguments import TABLES
from lagrpo.settings.toml import entry_of, list_settings


def show_help(settings: BaseModel, prog: str, function: Callable[..., Any]) -> None:
    """Print every setting with its description and its present value."""
    kind = type(settings)
    text = "\n\n".join([inspect.getdoc(function) or "", *describe_tables(kind)])
    config = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
    tyro.cli(kind, args=["--help"], default=settings, prog=prog, description=text, config=config, use_underscores=True)


def describe_tables(kind: type[BaseModel]) -> list[str]:
    """Settings that are tables, or lists of them, which have no option of their own: what they are, and their
    entries."""
    found = []
    for name, field in list_settings(kind).items():
        said = " ".join((field.description or "").split())
        if entry := entry_of(field.annotation):
            found.append(f"In a settings file [[{name}]], with {', '.join(entry.model_fields)}: {said}")
        elif name in TABLES:
            found.append(f"In a settings file [{name}], or here --{name}.NAME VALUE: {said}")
    return found
