"""What `lagrpo recipes` prints: the table, and one recipe with the source code of its functions."""

from __future__ import annotations

import inspect

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lagrpo.core.objective import Recipe
from lagrpo.core.recipes import RECIPES, resolve
from lagrpo.errors import refusing
from lagrpo.settings.objective import name_setting


def show_recipes(console: Console | None = None) -> None:
    """Every recipe: its name, what it maximizes, and its source."""
    console = console or Console()
    table = Table("name", "formula", "source", box=SIMPLE, header_style="dim", padding=(0, 1, 1, 0))
    table.columns[0].no_wrap = True
    for name, recipe in RECIPES.items():
        table.add_row(Text(name, "bold"), Text(recipe.formula), Text(recipe.source, "dim"))
    console.print(table)
    console.print(Text("rho = pi/alpha of a token, s of a sequence; A normalized = (r - mu)/sigma, centered = r - mu"))
    console.print(Text("lagrpo recipes NAME: one with its code     lagrpo train --recipe NAME: train with it"))


def show_recipe(name: str, console: Console | None = None) -> None:
    """One recipe: formula, source, settings, code. Raises SettingsError for an unknown one."""
    with refusing():
        recipe = resolve(name)
    console, head = console or Console(), Table.grid(padding=(0, 2, 0, 0))
    settings = "\n".join(f"{name_setting(knob)} = {_say(value)}" for knob, value in recipe.settings.items())
    for label, text in (
        ("recipe", name),
        ("formula", recipe.formula),
        ("source", recipe.source),
        ("made of", settings),
    ):
        head.add_row(Text(label, "dim"), Text(text, "bold" if text == name else ""))
    console.print(head)
    console.print(Text("--loss.NAME VALUE replaces one of them.\n"))
    console.print(Text(source_code(recipe)), soft_wrap=True)


def source_code(recipe: Recipe) -> str:
    """The source of the functions that a recipe is made of."""
    return "\n\n".join(inspect.getsource(function) for function in recipe.functions)


def _say(value: object) -> str:
    """A value as a settings file says it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
