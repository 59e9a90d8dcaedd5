"""trackio: a database on this machine, or with TRACKIO_SPACE_ID a Space of Hugging Face. TRACKIO_DIR says where the
database is, TRACKIO_PROJECT is the project."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.trackers.tracker import PROJECT, About, Row, Status


class Trackio:
    """A run is known by its name."""

    def open(self, about: About, known: str | None) -> str:
        import trackio

        self._project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = known or about.name
        config = {**about.settings, "environment": about.environment}
        self._run: Any = trackio.init(self._project, name=name, config=config, resume="allow", embed=False)
        return name

    def place(self) -> str:
        return f'trackio show --project "{self._project}"'

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=batch)

    def completions(self, batch: int, rows: Sequence[Row]) -> None:
        import pandas
        import trackio

        self._run.log({"completions": trackio.Table(dataframe=pandas.DataFrame(rows))}, step=batch)

    def close(self, status: Status) -> None:
        self._run.finish()
