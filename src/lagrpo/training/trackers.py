"""Trackers: a callback that logs a run to TensorBoard, W&B, trackio or MLflow.

Each package has a class, which alone imports it. It opens a new run, or the same run if the run was resumed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import SettingsError, one_line, visible
from lagrpo.redaction import redact
from lagrpo.settings.toml import flatten
from lagrpo.training.callbacks import Callback, Row, Status

logger = logging.getLogger("lagrpo")

PROJECT = "lagrpo"  # project or experiment of the runs, unless the tracker's environment variable names one
TABLE = "completion_texts"  # name of the table of completions; `completions` is a metric
COLUMNS = ("prompt_id", "sample_index", "prompt_text", "completion", "reward", "outcome", "reason")
COLUMNS += ("advantage", "excluded_reason", "staleness", "finished")  # the columns of the rollouts that trackers get


def check_installed(names: Iterable[str]) -> None:
    """Raise SettingsError for a tracker whose package is missing. Nothing is imported."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin: a directory of that name, such as W&B makes
            raise SettingsError(f"run.report_to names {name}, which is not installed: pip install 'lagrpo[{name}]'")


class Trackers(Callback):
    """A callback that logs to the named trackers, at most `completions` completions per batch. If a tracker's package
    raises, the tracker is disabled with one warning and training continues."""

    def __init__(self, names: Sequence[str], completions: int) -> None:
        self.names, self.completions = names, completions
        self.active: dict[str, Any] = {}

    def on_start(self, settings: Row, environment: Row, batch: int) -> None:
        path = Path(settings["run"]["output_dir"], settings["run"]["name"]).absolute()
        info = RunInfo(path, environment["id"], without_secrets({**settings, "environment": environment}), batch)
        for name in self.names:
            self._call(name, lambda name=name: self.active.update({name: TRACKERS[name](info)}))

    def on_batch(self, metrics: Row, rollouts: Sequence[Row]) -> None:
        """Log the metrics of a batch, and some of its completions as a table."""
        batch, count = metrics["step"], min(self.completions, len(rollouts))
        values = {name: value for name, value in only_numbers(metrics).items() if not name.startswith("eval/")}
        self._log(lambda tracker: tracker.log(batch, values))
        if count and self.active:
            rows = [rollouts[n * len(rollouts) // count] for n in range(count)]
            table = without_secrets([{name: row.get(name) for name in COLUMNS} for row in rows])
            self._log(lambda tracker: tracker.log_table(batch, table))

    def on_evaluation(self, name: str, summary: Row, records: Sequence[Row]) -> None:
        """Log the numbers of an evaluation's summary as eval/NAME, or eval/SET/NAME for a named set."""
        prefix = f"eval/{summary['set']}/" if summary.get("set") else "eval/"
        values = {f"{prefix}{key}": value for key, value in only_numbers(summary).items() if key != "step"}
        self._log(lambda tracker: tracker.log(summary["step"], values))

    def on_end(self, status: Status, detail: str) -> None:
        """Finish the trackers' runs. A package may wait here until everything is uploaded."""
        self._log(lambda tracker: tracker.finish(status))
        self.active = {}

    def _log(self, log: Callable[[Any], object]) -> None:
        for name, tracker in list(self.active.items()):
            self._call(name, lambda tracker=tracker: log(tracker))

    def _call(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a package can raise anything
            self.active.pop(name, None)
            problem = one_line(redact(f"{type(error).__name__}: {error}"))
            logger.warning("tracker %s is disabled, training continues: %s", name, problem)


def only_numbers(values: Row) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def without_secrets(value: Any) -> Any:
    """The value with *** instead of secrets, as JSON would have it: maps, lists and paths become plain."""
    if isinstance(value, Mapping):
        return {str(key): without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return redact(str(value)) if isinstance(value, str | Path) else value


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker opens: the run's directory, its id, settings and environment without secrets, and the batch after
    which it resumes (0: a new run)."""

    path: Path
    id: str
    config: dict[str, Any]
    batch: int


def _make_id(info: RunInfo) -> str:
    """The run's id at a tracker. A copy of a run under another name gets another id."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in info.path.name)[:64] + "-" + info.id


def _make_table(package: Any, rows: Sequence[Row], **options: Any) -> Any:
    return package.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows], **options)


class TensorBoard:
    """Event files in the run's tensorboard/. A resumed run adds a file, and purges the batches that it makes again."""

    def __init__(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, batch = info.path / "tensorboard", info.batch
        has_settings = batch and folder.is_dir()
        self._writer: Any = SummaryWriter(str(folder), purge_step=batch + 1 if batch else 0)
        if not has_settings:
            config = redact((info.path / "config.toml").read_text(encoding="utf-8"))
            self._writer.add_text("settings", f"```toml\n{config}\n```", 0)

    def log(self, batch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, batch)
        self._writer.flush()

    def log_table(self, batch: int, rows: Sequence[Row]) -> None:
        """Log a Markdown table: TensorBoard has no other."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(cell) for cell in row.values()] for row in rows)]
        self._writer.add_text(TABLE, "\n".join(f"| {' | '.join(line)} |" for line in lines), batch)

    def finish(self, status: Status) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    """A value in one cell of a Markdown table."""
    return "" if value is None else visible(str(value)).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


class Wandb:
    """Weights & Biases, with its environment variables: WANDB_MODE, WANDB_PROJECT, WANDB_DIR and others. Charts are
    over batches, because W&B's steps never go back. Code and git are not sent."""

    def __init__(self, info: RunInfo) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        hidden = dict.fromkeys(("disable_code", "disable_git", "disable_job_creation", "x_disable_meta"), True)
        self._package: Any = wandb
        self._run: Any = wandb.init(
            id=_make_id(info),
            resume="allow" if info.batch else None,
            settings=wandb.Settings(silent=True, console="off", **hidden),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or info.path.name,
            dir=os.environ.get("WANDB_DIR") or str(info.path),
            config=info.config,
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, batch: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": batch})

    def log_table(self, batch: int, rows: Sequence[Row]) -> None:
        self._run.log({TABLE: _make_table(self._package, rows, allow_mixed_types=True), "step": batch})

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


class Trackio:
    """A local database in TRACKIO_DIR, or a Space of Hugging Face, TRACKIO_SPACE_ID. TRACKIO_PROJECT is the project. A
    resumed run is found by its name."""

    def __init__(self, info: RunInfo) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._package, project = trackio, os.environ.get("TRACKIO_PROJECT") or PROJECT
        own: dict[str, Any] = {"name": info.path.name, "config": info.config, "embed": False}
        self._run: Any = trackio.init(project, resume="allow" if info.batch else "never", **own)

    def log(self, batch: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=batch)

    def log_table(self, batch: int, rows: Sequence[Row]) -> None:
        self._run.log({TABLE: _make_table(self._package, rows)}, step=batch)

    def finish(self, status: Status) -> None:
        self._run.finish()


class Mlflow:
    """The server or database MLFLOW_TRACKING_URI, else ./mlflow.db; experiment MLFLOW_EXPERIMENT_NAME. Settings are
    parameters, completions JSON artifacts. A resumed run is found by its tag lagrpo.id."""

    LONGEST_VALUE = 6000  # characters of a parameter
    ENDS: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}

    def __init__(self, info: RunInfo) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._package, self._client = mlflow, mlflow.MlflowClient()
        name, own = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT, _make_id(info)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        if runs := info.batch and self._client.search_runs([experiment], f"tags.`lagrpo.id` = '{own}'"):
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, tags={"lagrpo.id": own}, run_name=info.path.name).info.run_id
        params = {name: str(value)[: self.LONGEST_VALUE] for name, value in flatten(info.config).items()}
        mlflow.log_params(params, run_id=self._id)

    def log(self, batch: int, values: Mapping[str, float]) -> None:
        allowed = {name.replace("@", "_at_"): value for name, value in values.items()}  # MLflow forbids @
        self._package.log_metrics(allowed, step=batch, run_id=self._id)

    def log_table(self, batch: int, rows: Sequence[Row]) -> None:
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._client.log_dict(self._id, columns, f"{TABLE}/batch-{batch:06d}.json")

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, self.ENDS[status])


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
"""Each tracker by the name of its package, which is also the name of its extra."""
