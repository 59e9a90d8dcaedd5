"""Callbacks, which a run calls when it has written its files.

Built-in ones log to trackers, and warn of grave faults.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w

from lagrpo.diagnosis.diagnose import find_all, setting_words
from lagrpo.diagnosis.finding import GRAVE
from lagrpo.diagnosis.record import SHORTEST_WINDOW, RunRecord, shorten, window_of
from lagrpo.diagnosis.table import DETECTORS
from lagrpo.errors import one_line
from lagrpo.logs import is_debugging, redact, redact_values, visible
from lagrpo.runs.reading import load_config
from lagrpo.settings.load import flatten
from lagrpo.types import JsonObject, JsonView

logger = logging.getLogger("lagrpo")

Row = JsonView
Status = Literal["finished", "interrupted", "failed"]
# The project or experiment of the runs, unless the tracker's environment variable names one.
PROJECT = "lagrpo"
TABLE = "completion_texts"  # name of the table of completions; `completions` is a metric
COLUMNS = (
    "prompt_id",
    "sample_index",
    "prompt_text",
    "completion",
    "reward",
    "outcome",
    "reason",
    "advantage",
    "excluded_reason",
    "staleness",
    "finished",
)
"""The columns of the rollouts that trackers get."""


class Callback:
    """Base class of callbacks: override the methods that you need.

    A run calls them in its main thread, on rank 0. An exception ends the run after its batch.
    """

    def on_start(self, settings: Row, environment: Row, batch: int) -> None:
        """The run starts, or resumes after `batch` batches.

        `settings` has a mapping per section, with the name of the run's directory in
        settings["run"]["name"]; `environment` is the content of environment.json.
        """

    def measure(self, metrics: Row, rollouts: Sequence[Row]) -> Mapping[str, float | None]:
        """Returns metrics of your own for the batch's line, such as {"mine/spread": 0.2}.

        Called before the line is written. The page and trackers have them, too.
        """
        return {}

    def on_batch(self, metrics: Row, rollouts: Sequence[Row]) -> None:
        """A batch is finished: its line of metrics.jsonl, and one row per completion.

        docs/run-files.md describes both.
        """

    def on_evaluation(self, name: str, summary: Row, records: Sequence[Row]) -> None:
        """The policy was evaluated after summary["step"] batches.

        `records` has one row per prompt.
        """

    def on_end(self, status: Status, detail: str) -> None:
        """The run is over; this is the last call. `detail` is a sentence for people."""


class Trackers(Callback):
    """Logs to the named trackers, at most `completions` completions per batch.

    A tracker that raises is disabled with one warning, and training continues.
    """

    def __init__(self, names: Sequence[str], completions: int) -> None:
        self.names, self.completions, self.active = names, completions, dict[str, Any]()

    def on_start(self, settings: Row, environment: Row, batch: int) -> None:
        path = Path(settings["run"]["output_dir"], settings["run"]["name"]).absolute()
        config, run_id = redact_values({**settings, "environment": environment}), environment["id"]
        # Names first: `_call` then also drops a tracker whose start fails.
        self.active = dict.fromkeys(self.names)
        self._call(
            lambda name, _: self.active.update({name: TRACKERS[name](path, run_id, config, batch)})
        )

    def on_batch(self, metrics: Row, rollouts: Sequence[Row]) -> None:
        batch, count = metrics["step"], min(self.completions, len(rollouts))
        # `on_evaluation` has logged evaluations, at the batch after which they were made.
        values = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        self._log(batch, values)
        if count:
            # Evenly over the batch: neighbors are completions of the same prompt.
            rows = [rollouts[n * len(rollouts) // count] for n in range(count)]
            table = redact_values([{name: row.get(name) for name in COLUMNS} for row in rows])
            self._call(lambda _, tracker: tracker.log_table(batch, table))

    def on_evaluation(self, name: str, summary: Row, records: Sequence[Row]) -> None:
        """Log the numbers of the summary as eval/NAME, or eval/SET/NAME for a named set."""
        prefix = f"eval/{summary['set']}/" if summary.get("set") else "eval/"
        self._log(
            summary["step"],
            {f"{prefix}{key}": value for key, value in summary.items() if key != "step"},
        )

    def on_end(self, status: Status, detail: str) -> None:
        self._call(lambda _, tracker: tracker.finish(status))
        self.active = {}

    def _log(self, batch: int, values: Row) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._call(lambda _, tracker: tracker.log(batch, numbers))

    def _call(self, call: Callable[[str, Any], object]) -> None:
        # A list, because a tracker that raises is removed on the way.
        for name, tracker in list(self.active.items()):
            try:
                call(name, tracker)
            except (Exception, SystemExit) as error:
                del self.active[name]
                problem = one_line(redact(f"{type(error).__name__}: {error}"))
                text = "tracker %s is disabled, training continues: %s"
                logger.warning(text, name, problem, exc_info=is_debugging())


class FaultWatch(Callback):
    """Warns once of each grave finding of `lagrpo diagnose`, while the run may still be stopped.

    A resumed run warns again: the watch knows the batches of its process alone.
    """

    EVERY = 5
    """Batches from one look to the next."""

    HOPELESS = 0.9
    """Share of the signal that must be lost at the beginning, where much changes by itself."""

    def __init__(self) -> None:
        self.settings: JsonObject = {}
        self.window = SHORTEST_WINDOW
        self.metrics: list[Row] = []
        self.rollouts_by_batch: dict[int, list[JsonObject]] = {}
        self.evaluations: list[Row] = []
        self.warned = set[str]()  # names of detectors
        self.is_active = True

    def on_start(self, settings: Row, environment: Row, batch: int) -> None:
        self.settings = flatten(settings)
        self.window = window_of(self.settings)

    def on_evaluation(self, name: str, summary: Row, records: Sequence[Row]) -> None:
        self.evaluations.append({**summary, "records": [{"prompt": r["prompt"]} for r in records]})

    def on_batch(self, metrics: Row, rollouts: Sequence[Row]) -> None:
        if not self.is_active:
            return
        self.metrics.append(metrics)
        self.rollouts_by_batch[metrics["step"]] = [shorten(row) for row in rollouts]
        # Text of more batches would fill the memory of a long run.
        self.rollouts_by_batch.pop(metrics["step"] - self.window, None)
        if len(self.metrics) % self.EVERY == 0:
            # Like a tracker: no fault of the watch may end a run.
            try:
                self._look()
            except Exception as error:
                self.is_active = False
                problem = one_line(redact(f"{type(error).__name__}: {error}"))
                text = "the watch for faults is disabled, training continues: %s"
                logger.warning(text, problem, exc_info=is_debugging())

    def _look(self) -> None:
        record = RunRecord(
            settings=self.settings,
            metrics=self.metrics,
            rollouts=[row for rows in self.rollouts_by_batch.values() for row in rows],
            evaluations=self.evaluations,
            reward_range=tuple(self.settings["task.reward_range"]),
        )
        is_early = len(self.metrics) < 2 * record.window
        least = self.HOPELESS if is_early else GRAVE
        for finding in find_all(record, DETECTORS):
            if finding.cost >= least and finding.detector not in self.warned:
                self.warned.add(finding.detector)
                advice = setting_words(finding) or finding.advice
                logger.warning("%s %s (lagrpo diagnose)", finding.sentence, advice)


class TensorBoard:
    """Event files in the run's tensorboard/.

    A resumed run purges the batches that it makes again.
    """

    def __init__(self, path: Path, run_id: str, config: Row, batch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(path / "tensorboard"), purge_step=batch + 1 if batch else 0
        )
        if not batch:
            settings = tomli_w.dumps(redact_values(load_config(path)))
            self._writer.add_text("settings", f"```toml\n{settings}\n```", 0)

    def log(self, batch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, batch)
        self._writer.flush()

    def log_table(self, batch: int, rows: Sequence[Row]) -> None:
        cells = [
            ["" if cell is None else visible(str(cell)) for cell in row.values()] for row in rows
        ]
        cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in cells]
        lines = [list(rows[0]), ["---"] * len(rows[0]), *cells]
        self._writer.add_text(TABLE, "\n".join(f"| {' | '.join(line)} |" for line in lines), batch)

    def finish(self, status: Status) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, with its environment variables: WANDB_MODE, WANDB_PROJECT and others.

    Charts are over batches, because W&B's steps never go back. Code and git are not sent.
    """

    table_options: Mapping[str, object] = {"allow_mixed_types": True}

    def __init__(self, path: Path, run_id: str, config: Row, batch: int) -> None:
        hidden = dict.fromkeys(
            ("disable_code", "disable_git", "disable_job_creation", "x_disable_meta"), True
        )
        self.package: Any = importlib.import_module("wandb")
        self.run: Any = self.package.init(
            id=run_id,
            resume="allow" if batch else None,
            settings=self.package.Settings(silent=True, console="off", **hidden),
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or path.name,
            dir=os.environ.get("WANDB_DIR") or str(path),
            config=config,
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, batch: int, values: JsonView) -> None:
        self.run.log({**values, "step": batch})

    def log_table(self, batch: int, rows: Sequence[Row]) -> None:
        data = [list(row.values()) for row in rows]
        self.log(
            batch,
            {TABLE: self.package.Table(columns=list(rows[0]), data=data, **self.table_options)},
        )

    def finish(self, status: Status) -> None:
        self.run.finish(exit_code=0 if status == "finished" else 1)


class Trackio(Wandb):
    """A local database in TRACKIO_DIR, or a Space of Hugging Face, TRACKIO_SPACE_ID.

    TRACKIO_PROJECT is the project. A resumed run is found by its name.
    """

    table_options: Mapping[str, object] = {}

    def __init__(self, path: Path, run_id: str, config: Row, batch: int) -> None:
        self.package: Any = importlib.import_module("trackio")
        self.run: Any = self.package.init(
            os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=path.name,
            config=dict(config),
            resume="allow" if batch else "never",
            embed=False,
        )

    def log(self, batch: int, values: JsonView) -> None:
        self.run.log(dict(values), step=batch)

    def finish(self, status: Status) -> None:
        self.run.finish()


TRACKERS: JsonObject = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""Each tracker by the name of its package, which is also the name of its extra."""
