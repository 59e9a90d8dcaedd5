"""trackio: a database on this machine, or with TRACKIO_SPACE_ID a Space of Hugging Face. TRACKIO_DIR says where the
database is, TRACKIO_PROJECT is the project."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.trackers.tracker import PROJECT, TABLE, About, Row, Status


class Trackio:
    """A resumed run is found by its name, and known by trackio's own id."""

    def open(self, about: About, known: str | None) -> str:
        import trackio  # pyright: ignore[reportMissingImports]

        self._project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        config, resume = {**about.settings, "environment": about.environment}, "allow" if known else "never"
        self._run: Any = trackio.init(self._project, name=about.name, config=config, resume=resume, embed=False)
        return self._run.id

    def place(self) -> str:
        return f'trackio show --project "{self._project}"'

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=batch)

    def completions(self, batch: int, rows: Sequence[Row]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        if rows:
            table = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._run.log({TABLE: table}, step=batch)

    def close(self, status: Status) -> None:
        self._run.finish()
