"""Weights & Biases. Its own variables decide where runs go: WANDB_MODE (online, offline, disabled), WANDB_PROJECT,
WANDB_ENTITY, WANDB_NAME, WANDB_DIR, WANDB_API_KEY, WANDB_BASE_URL and the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.trackers.tracker import PROJECT, TABLE, About, Row, Status


class Wandb:
    """Every chart is over batches: what a resumed run sends has steps of W&B's own, which never go back. Source code,
    git and the command line stay here; the settings and environment.json, without secrets, are its config."""

    def open(self, about: About, known: str | None) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
        )
        self._run: Any = wandb.init(
            id=known, resume="allow" if known else None, settings=quiet,
            project=os.environ.get("WANDB_PROJECT") or PROJECT, name=os.environ.get("WANDB_NAME") or about.name,
            dir=os.environ.get("WANDB_DIR") or str(about.run),
            config={**about.settings, "environment": about.environment},
        )  # fmt: skip
        self._run.define_metric("*", step_metric="batch")
        return self._run.id

    def place(self) -> str:
        settings = self._run.settings
        if settings.mode == "online":
            return self._run.url
        return f"wandb sync {settings.sync_dir}" if settings.mode == "offline" else f"WANDB_MODE={settings.mode}"

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "batch": batch})

    def completions(self, batch: int, rows: Sequence[Row]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        if rows:
            table = wandb.Table(
                columns=list(rows[0]), data=[list(row.values()) for row in rows], allow_mixed_types=True
            )
            self._run.log({TABLE: table, "batch": batch})

    def close(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
