"""The files of a run in memory, and the report: differences, counts, and what was not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lagrpo.core.objective import Recipe
from lagrpo.errors import as_settings_error, one_line
from lagrpo.runs import reading
from lagrpo.runs.environment import FILE, read_environment
from lagrpo.runs.rollouts import rollout_schema
from lagrpo.settings.load import load_settings
from lagrpo.settings.run_code import ARGUMENTS, TRUST_ARGUMENT, TRUST_OPTION, check_run_code
from lagrpo.settings.schema import Settings
from lagrpo.settings.user_loss import load_recipe_of_run
from lagrpo.tasks import Task
from lagrpo.types import JsonObject, JsonView, OutcomeKind

TASK_OBJECT_NOTE = "# The task was the caller's own object"
"""A line of config.toml in runs that were given a Task."""

Row = JsonObject
"""A completion as recorded, with two more keys.

    where    its file and row, for messages
    group    its step, and the number of its group in the step
"""


class Difference(NamedTuple):
    """A value in a run's files that its replay contradicts."""

    check: str
    name: str
    where: str
    expected: Any
    recorded: Any

    def __str__(self) -> str:
        recorded = one_line(repr(self.recorded), 120)
        expected = one_line(repr(self.expected), 120)
        return f"{self.where}: {self.name} is {recorded}, the replay gives {expected}"


@dataclass(slots=True)
class Report:
    """The differences of a run, and how much was compared."""

    run: str
    differences: list[Difference] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    """values compared, by check"""
    undecided: Counter[str] = field(default_factory=Counter)
    """compared values that noise leaves undecided, by check"""
    skipped: Counter[str] = field(default_factory=Counter)
    """how much could not be checked, by reason"""

    def compare(
        self,
        check: str,
        where: str,
        expected: JsonView,
        recorded: JsonView,
        tolerance: float = 0.0,
    ) -> None:
        """Compares the expected values with the recorded ones of the same names.

        Numbers may differ by `tolerance`; everything else must be equal.
        """
        for name, expected_value in expected.items():
            recorded_value = recorded.get(name)
            self.compared[check] += 1
            if not _agree(expected_value, recorded_value, tolerance):
                difference = Difference(check, name, where, expected_value, recorded_value)
                self.differences.append(difference)

    def skip(self, reason: str, count: int = 1) -> None:
        """Notes what could not be checked, and why; a count of 0 leaves no note."""
        # += of Counters drops reasons whose count is 0.
        self.skipped += Counter({reason: count})


def _agree(expected: object, recorded: object, tolerance: float) -> bool:
    if expected == recorded:
        return True
    if isinstance(expected, int | float) and isinstance(recorded, int | float):
        return abs(expected - recorded) <= tolerance
    return False


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """A line of metrics.jsonl, with its number in the file from 1."""

    number: int
    values: JsonObject


class RecordedRun:
    """A finished or interrupted run, read from its directory.

    `task` replaces the task of the settings. Raises RunNotFoundError if the directory is not a run,
    SettingsError for a broken file, and for code that its settings name unless `trust_run_code`.
    """

    recipe: Recipe | None
    """None if the loss was passed in Python, so that no setting names it"""
    lines: list[MetricsLine]
    """all lines of metrics.jsonl, in their order in the file"""
    metrics: dict[int, MetricsLine]
    """by step; of several lines of a step, the last"""
    evaluations: list[JsonObject]
    """the summaries"""
    records: dict[str, list[JsonObject]]
    """the prompts of each evaluation, by its name"""
    steps: dict[int, list[Row]]
    """the rows of each step"""
    generated: list[Row]
    """the rows that the run's own engine sampled, without failed ones"""
    fresh_prompts: int
    """prompts of a batch that the run's own engine samples for; the others are offline data"""

    def __init__(
        self, run: Path | str, task: Task | None = None, *, trust_run_code: bool = False
    ) -> None:
        self.path = reading.open_run(run).path
        with as_settings_error(f"{self.path} cannot be replayed", KeyError, TypeError):
            config = self.path / "config.toml"
            self.settings = load_settings(config)
            self.environment = read_environment(self.path)
            self.used_task_object = TASK_OBJECT_NOTE in config.read_text(encoding="utf-8")
            if not trust_run_code:
                check_run_code(
                    self.settings,
                    config,
                    named=(),
                    advice=f"add {TRUST_OPTION}, in Python {TRUST_ARGUMENT}",
                    unused=self._list_unused_code(task),
                )
            self.recipe = self._load_recipe()
            self._check_environment()
            self.lines = [
                MetricsLine(number, values)
                for number, values in enumerate(reading.load_metrics(self.path), start=1)
            ]
            self.metrics = {line.values["step"]: line for line in self.lines}
            self.events = reading.load_events(self.path)
            self.evaluations = reading.load_evaluations(self.path)
            self.records = {
                summary["name"]: reading.load_evaluation_records(self.path, summary["name"])
                for summary in self.evaluations
            }
            self.steps = {
                step: list(_read_rows(self.path, step))
                for step in reading.rollout_batches(self.path)
            }
            if not self.steps:
                raise ValueError("it has no rollouts yet: its first batch is not finished")
        self.rows = [row for rows in self.steps.values() for row in rows]
        self.generated = [
            row
            for row in self.rows
            if row["source"] == "sampler" and row["outcome"] != OutcomeKind.FAILED
        ]
        self.fresh_prompts = _count_fresh_prompts(self.settings)
        self.report = Report(str(self.path))

    def version_after(self, step: int) -> int | None:
        """Returns the policy version after the updates of a step; None if no line has it."""
        next_line = self.metrics.get(step + 1)
        return None if next_line is None else next_line.values["policy_version"]

    def _list_unused_code(self, task: Task | None) -> list[str]:
        """Returns the beginnings of settings whose code the replay does not run."""
        unused = ["rollout.", "vllm."]
        if self._was_given_a_loss:
            unused.append("loss.")
        if task is not None:
            unused += ARGUMENTS["task"]
        elif self.used_task_object:
            unused += ["task.", "eval."]
        return unused

    @property
    def _was_given_a_loss(self) -> bool:
        return "loss" in self.environment.get("arguments", [])

    def _load_recipe(self) -> Recipe | None:
        if self._was_given_a_loss:
            return None
        return load_recipe_of_run(self.settings, self.path)

    def _check_environment(self) -> None:
        for name in ("started", "dtype"):
            if name not in self.environment:
                file = self.path / FILE
                raise ValueError(f"{file} is missing or has no {name!r}: restore it")


def _count_fresh_prompts(settings: Settings) -> int:
    prompts = settings.schedule.prompts_per_batch
    if not settings.offline.data:
        return prompts
    # As the run does: at least one prompt is offline, however small the fraction, and at least one
    # is fresh, if there is another one and the fraction is below 1.
    fraction = settings.offline.fraction
    fresh_prompts = prompts - max(1, round(fraction * prompts))
    return max(1, fresh_prompts) if fraction < 1 and prompts > 1 else fresh_prompts


def _read_rows(path: Path, step: int) -> Iterator[Row]:
    """Yields the rows of a step.

    A group begins where completions start at 0 again, or where the prompt changes.
    """
    file_name = f"rollouts/step-{step:06d}.parquet"
    columns = rollout_schema().names
    group = -1
    prompt_before = None
    for number, row in enumerate(reading.load_rollouts(path, [step])):
        prompt = (row["source"], row["epoch"], row["prompt_id"])
        if prompt != prompt_before or row["sample_index"] == 0:
            group += 1
        for column in columns:
            if column not in row:
                file = path / file_name
                raise ValueError(f"{file} has no column {column!r}: restore the file")
        completion = f"prompt {row['prompt_id']}, completion {row['sample_index']}"
        where = f"{file_name}, row {number} ({completion})"
        yield {**row, "where": where, "group": (step, group)}
        prompt_before = prompt


def groups_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Returns the rows of each group. Rows of a group stand next to each other."""
    return [list(members) for _, members in groupby(rows, key=lambda row: row["group"])]


def sampled(row: Row, column: str) -> list[Any]:
    """Returns the values of a token column at the tokens that a policy sampled."""
    values = []
    for value, is_sampled in zip(row[column], row["loss_mask"], strict=True):
        if is_sampled:
            values.append(value)
    return values
