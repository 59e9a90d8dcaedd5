"""A callback: logs a run to MLflow.

    pip install mlflow
    python examples/mlflow_callback.py    # a few minutes on two cores, from the root of a checkout
    mlflow ui

MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where the run goes. A resumed run is another run
of MLflow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlflow  # pyright: ignore[reportMissingImports]

import lagrpo
from lagrpo.logs import redact_values


class MlflowCallback(lagrpo.Callback):
    """Logs settings, metrics and evaluations."""

    def on_start(
        self, settings: Mapping[str, Any], environment: Mapping[str, Any], batch: int
    ) -> None:
        mlflow.start_run(run_name=settings["run"]["name"])
        for section, values in redact_values(settings).items():
            mlflow.log_params({f"{section}.{name}": value for name, value in values.items()})

    def on_batch(self, metrics: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]) -> None:
        self.log(metrics, metrics["step"])

    def on_evaluation(self, name: str, summary: Mapping[str, Any], records: Sequence[Any]) -> None:
        prefix = f"eval/{summary['set']}" if summary.get("set") else "eval"
        self.log({f"{prefix}/{key}": value for key, value in summary.items()}, summary["step"])

    def on_end(self, status: str, detail: str) -> None:
        mlflow.end_run({"finished": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # MLflow allows no @ in names: pass@1 is pass_at_1.
        numbers = {
            name.replace("@", "_at_"): value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        mlflow.log_metrics(numbers, step=step)


if __name__ == "__main__":
    lagrpo.train("demo", callbacks=[MlflowCallback()])
