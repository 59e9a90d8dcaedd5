"""What `lagrpo recipes` prints: the table of the presets, and one of them in full. Loads no torch."""

from __future__ import annotations

from dataclasses import fields

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lagrpo.errors import refusing
from lagrpo.objective.code import write_code
from lagrpo.objective.composition import Composition, check_known
from lagrpo.objective.recipes import PRESETS, Preset


def show_recipes(console: Console | None = None) -> None:
    """Every preset: its name, what is maximized, and who says so."""
    console = console or Console()
    table = Table("name", "formula", "source", box=SIMPLE, header_style="dim", padding=(0, 1, 1, 0))
    table.columns[0].no_wrap = True
    for name, preset in PRESETS.items():
        table.add_row(Text(name, "bold"), Text(preset.formula), Text(preset.source, "dim"))
    console.print(table)
    console.print(Text("rho = pi/alpha of a token, s of a sequence; A normalized = (r - mu)/sigma, centered = r - mu"))
    console.print(Text("lagrpo recipes NAME [--code]: one in full     lagrpo train --recipe NAME: train with it"))


def show_recipe(name: str, console: Console | None = None) -> None:
    """One preset with every setting that makes it; those that differ from the default are marked. Raises SettingsError
    for an unknown one."""
    console, preset = console or Console(), _find(name)
    head = Table.grid(padding=(0, 2, 0, 0))
    for label, text in (("recipe", name), ("formula", preset.formula), ("source", preset.source)):
        head.add_row(Text(label, "dim"), Text(text, "bold" if text == name else ""))
    console.print(head)
    table = Table("", "setting", "value", "default", box=SIMPLE, header_style="dim")
    for field in fields(Composition):
        value = getattr(preset.composition, field.name)
        differs = value != field.default
        style = "bold" if differs else "dim"
        cells = ("*" if differs else "", f"objective.{field.name}", _say(value), _say(field.default))
        table.add_row(*(Text(cell, style if n < 3 else "dim") for n, cell in enumerate(cells)))
    console.print(table)
    hint = "* differs from the default. A piece or number is replaced by --objective.SETTING VALUE; one that"
    console.print(Text(f"{hint}\n  nothing in the composition would read is refused."))


def print_code(name: str) -> None:
    """One preset as a function to read and to paste. Raises SettingsError for an unknown one."""
    preset = _find(name)
    print(write_code(name, preset.formula, preset.composition), end="")


def _find(name: str) -> Preset:
    with refusing():
        return PRESETS[check_known("recipe", name, PRESETS)]


def _say(value: object) -> str:
    """A value as a settings file says it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
