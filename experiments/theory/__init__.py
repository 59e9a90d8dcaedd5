"""Figures of the theory, drawn from the functions of core. Each file here is one of them; reports/theory.md shows all.

    bernoulli      what a success probability costs in Theorem 1 (Fig. 1 of Mroueh et al., arXiv 2505.22257)
    amplification  success amplification p_n = h(p_{n-1}): paths, fixed points, stability
    bandit         where each variant ends on three arms, with and without syncs of alpha (see theory.bandit)

`python experiments/figures.py NAME [--output PATH]` writes one.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "figure"]

FIGURES = {"bernoulli": "bernoulli", "amplification": "amplification", "bandit": "bandit_curves"}
"""Name of a figure -> its module here."""


def figure(name: str, output: Path | None = None) -> Path:
    """Draws the figure `name` and returns the path of its file: `output`, whose suffix says the format (.png, .svg,
    .pdf), or NAME.png here. The same on every machine but for its fonts. `bandit` takes seconds, the others less.

    Raises ValueError for an unknown name, with the nearest one, and for a suffix that matplotlib does not know."""
    from lagrpo.errors import find_nearest
    from lagrpo.runs.files import write_atomically

    if name not in FIGURES:
        raise ValueError(
            f"unknown figure {name!r}; the nearest is {find_nearest(name, FIGURES)!r} (all: {', '.join(FIGURES)})"
        )
    target = Path(output) if output is not None else Path(f"{name}.png")
    drawn = import_module(f"theory.{FIGURES[name]}").draw()
    kind = target.suffix.lstrip(".").lower() or "png"
    known = drawn.canvas.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"cannot write {target}: {kind!r} is none of the formats {', '.join(sorted(known))}")
    return write_atomically(target, lambda path: _save(drawn, path, kind))


def _save(drawn: Figure, path: Path, kind: str) -> None:
    drawn.savefig(path, format=kind, dpi=130)
    if kind == "png":  # a few lines in a few colors: with a palette a third of the size
        from PIL import Image

        with Image.open(path) as image:
            small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        small.save(path, format="png", optimize=True)
