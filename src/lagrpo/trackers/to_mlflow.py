"""MLflow: the server or the database that MLFLOW_TRACKING_URI names, else ./mlflow.db. MLFLOW_EXPERIMENT_NAME is the
experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.settings.toml import flatten
from lagrpo.trackers.tracker import PROJECT, TABLE, About, Row, Status

LONGEST_VALUE = 6000  # characters of a parameter
AT_ONCE = 100  # parameters in a request
ENDS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class Mlflow:
    """Settings are parameters of the run, environment.json its tags, completions JSON tables among its artifacts."""

    def open(self, about: About, known: str | None) -> str:
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient()
        if known is not None:
            try:
                self._client.update_run(known, status="RUNNING")
                self._id = known
                return known
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        return self._begin(about)

    def place(self) -> str:
        from mlflow import get_tracking_uri  # pyright: ignore[reportMissingImports]

        return f"run {self._id} of {get_tracking_uri()}"

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(name, float(n), now, batch) for name, n in values.items()])

    def completions(self, batch: int, rows: Sequence[Row]) -> None:
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        self._client.log_dict(self._id, columns, f"{TABLE}/batch-{batch:06d}.json")

    def close(self, status: Status) -> None:
        self._client.set_terminated(self._id, ENDS[status])

    def _begin(self, about: About) -> str:
        from mlflow.entities import Param, RunTag  # pyright: ignore[reportMissingImports]

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(number, run_name=about.name).info.run_id
        settings = {name: value for name, value in flatten(about.settings).items() if value is not None}
        params = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in settings.items()]
        tags = [RunTag(f"environment.{name}", str(value)) for name, value in about.environment.items()]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + AT_ONCE], tags=tags if not first else [])
        return self._id
