"""The display of a run in a Jupyter notebook: a table that is updated in place."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lagrpo.logs import visible
from lagrpo.terminal.display import COLUMNS, LEGEND, Metrics, PlainDisplay

SHOWN_ROWS = 12
"""Batches in the table. More would push the rest of the notebook away."""


class NotebookDisplay(PlainDisplay):
    """The display of a notebook: a table of the last batches, in one output of the cell.

    Notes and the summary at the end are printed below it.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._phase = ""
        self._handle: Any = None  # IPython's handle of the output; None before the start

    def show_start(self) -> None:
        from IPython.display import (  # pyright: ignore[reportMissingImports]
            HTML,
            display,
        )

        self._handle = display(HTML(self.render()), display_id=True)
        super().show_start()

    def phase(self, name: str) -> None:
        self._phase = name
        self._update()

    def on_batch(self, metrics: Metrics, rollouts: Sequence[Metrics]) -> None:
        self.add_row(metrics)
        self._update()

    def on_end(self, status: str, detail: str) -> None:
        self.phase("")
        super().on_end(status, detail)

    def render(self) -> str:
        """Returns the table as HTML."""
        headings = "".join(f"<th>{_escaped(column.heading)}</th>" for column in COLUMNS)
        lines = [f"<tr>{headings}</tr>"]
        for row in self.rows[-SHOWN_ROWS:]:
            cells = "".join(f"<td>{_escaped(column.text(row))}</td>" for column in COLUMNS)
            lines.append(f"<tr>{cells}</tr>")
        progress = f"{self.done()} of {self.total} batches, {self.time_left()} left"
        if self._phase:
            progress += f" · {self._phase}"
        return (
            f"<b>{_escaped(self.title)}</b><table>{''.join(lines)}</table>"
            f"<small>{_escaped(LEGEND)}<br>{_escaped(progress)}</small>"
        )

    def _update(self) -> None:
        if self._handle is not None:
            from IPython.display import HTML  # pyright: ignore[reportMissingImports]

            self._handle.update(HTML(self.render()))


def _escaped(text: str) -> str:
    """Returns a text for HTML, as `visible` shows it."""
    return html.escape(visible(text))
