"""Methods: the rows of methods.toml, as recipes of lagrpo with settings of the optimizer."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lagrpo.core.objective import Recipe
from lagrpo.core.recipes import resolve

FILE = Path(__file__).parent / "methods.toml"
FILE_WITH_TEACHER = Path(__file__).parent / "distillation.toml"
Table = Literal["published", "equal", "controlled", "distilled"]
MAY_DIFFER = {"beta"}
"""Overrides that leave a method its recipe: runs of the benchmark have no KL term."""
EQUAL: dict[str, str] = {"advantage": "normalized", "reduction": "token_mean"}
"""What all methods have in the table `equal`, where no gradient is clipped."""


@dataclass(frozen=True)
class Method:
    """A row of a table of results."""

    name: str
    recipe: Recipe
    recipe_name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    """knobs of the recipe"""
    max_grad_norm: float | None = 1.0
    scale_lr_by_ess: bool = False
    """multiply the learning rate by the root of the effective sample size of a step"""
    same_as: str | None = None
    """the method that has the same gradient at one update per batch"""
    shipped_by: str = ""
    """programs whose code computes this loss (reports/conformance.md has those that were
    compared)
    """
    note: str = ""

    @property
    def is_plain_recipe(self) -> bool:
        """True if it is its recipe without other knobs and without settings of the optimizer."""
        as_trained = (self.max_grad_norm, self.scale_lr_by_ess) == (1.0, False)
        return set(self.overrides) <= MAY_DIFFER and as_trained

    @property
    def label(self) -> str:
        """The recipe's name in code, and what differs from it."""
        changes: list[str] = []
        for path, value in self.overrides.items():
            if path not in MAY_DIFFER:
                changes.append(f"{path} = {value if isinstance(value, str) else f'{value:g}'}")
        if self.scale_lr_by_ess:
            changes.append("learning rate scaled by ESS")
        if self.max_grad_norm not in (1.0, None):
            changes.append(f"max_grad_norm = {self.max_grad_norm:g}")
        label = f"`{self.recipe_name}`"
        return f"{label} with {', '.join(changes)}" if changes else label


def load_methods(table: Table) -> dict[str, Method]:
    """The methods of a table by name, in the order of the file.

    `published` has each method with its own advantage and reduction; so has `controlled`, whose
    runs have a control (control.py). `equal` gives all the same, so that the loss alone differs;
    rows whose advantage is the method keep theirs, or are left out. `distilled` has the methods
    that learn from a teacher.
    """
    file = FILE_WITH_TEACHER if table == "distilled" else FILE
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    methods = {}
    for name, row in rows.items():
        overrides = dict(row.get("overrides", {}))
        max_grad_norm = row.get("max_grad_norm", 1.0)
        if table == "equal":
            equal_overrides = row.get("equal", {})
            if equal_overrides is False:
                continue
            overrides |= EQUAL | equal_overrides
            max_grad_norm = None
        methods[name] = Method(
            name=name,
            recipe=resolve(row["recipe"], overrides),
            recipe_name=row["recipe"],
            overrides=overrides,
            max_grad_norm=max_grad_norm,
            scale_lr_by_ess=row.get("scale_lr_by_ess", False),
            same_as=row.get("same_as"),
            shipped_by=row.get("shipped_by", ""),
            note=row.get("note", ""),
        )
    return methods
