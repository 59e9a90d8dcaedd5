"""A run's files as a replay reads them: settings, recipe, environment, rows, metrics, evaluations."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import groupby, product
from pathlib import Path
from typing import Any

from lagrpo.objective.recipes import resolve
from lagrpo.replay.findings import UnreadableError
from lagrpo.runs import RunNotFoundError, load_evaluations, load_events, load_metrics, load_rollouts
from lagrpo.runs.reading import open_run, rollout_batches
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings
from lagrpo.untrusted import parse_json, read_text

OWN_TASK = "# The task was the caller's own object"
DTYPES = ("bfloat16", "float32")
SAMPLED_BY = (
    "sampling.",
    "task.",
    "environment.",
    "offline.",
    "vllm.",
    "schedule.prompts",
    "schedule.v",
    "schedule.kind",
)
"""Settings, or how their names begin, on which it depends what is sampled for a batch."""
ARITHMETIC = ("model.kernels", "model.device")
"""Settings on which it depends whether learner and sampler agree to the bit."""
UNCLEAR = "the run had asked for them when its settings were changed: some of it was made with either"


@dataclass(frozen=True, slots=True)
class Row:
    """One completion as recorded: its columns, and where they stand. `group` numbers the groups of its batch."""

    columns: dict[str, Any]
    file: str
    number: int
    group: int

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]

    @property
    def length(self) -> int:
        """How many of its tokens were sampled."""
        return sum(self["sampled"])

    def sampled(self, column: str) -> list[Any]:
        """The entries of a column of the tokens that were sampled."""
        return [value for value, own in zip(self[column], self["sampled"], strict=True) if own]

    @property
    def generated(self) -> bool:
        """Whether the sampler generated it: it is not from a file and did not fail."""
        return self["source"] == "sampler" and self["outcome"] != "failed"

    @property
    def scored(self) -> bool:
        return self["outcome"] == "scored"

    @property
    def knows_alpha(self) -> bool:
        """Whether the log α of every sampled token is known."""
        return not any(logp is None or math.isnan(logp) for logp in self.sampled("logp_alpha"))

    @property
    def place(self) -> str:
        return f"row {self.number} (prompt {self['prompt_key']}, completion {self['completion']})"

    @property
    def address(self) -> tuple[int, int, int, int]:
        """Where its random numbers come from, within the run's seed and the purpose "sample"."""
        return self["batch"], self["epoch"], self["prompt_key"], self["completion"]


@dataclass(frozen=True, slots=True)
class Resumption:
    """The settings of a run changed after a batch: name -> [before, now]. It had asked for `ahead` further batches."""

    batch: int
    changed: Mapping[str, tuple[Any, Any]]
    ahead: int

    def touches(self, *names: str) -> bool:
        """Whether it changed a setting whose name begins like one of these."""
        return any(name.startswith(names) for name in self.changed)


class Source:
    """A run on disk: its settings, recipe and environment, the rows of its `batches`, the `lines` of metrics.jsonl and
    the same by batch, each with its number (`metrics`), events, evaluations, and whether the task was the caller's own.
    Raises RunNotFoundError for no run or no finished batch, UnreadableError for a broken file."""

    def __init__(self, run: Path | str) -> None:
        self.path = open_run(run).path
        config, numbers = self.path / "config.toml", self.path / "metrics.jsonl"
        try:
            self.settings = load_settings(config)
            self.own_task = config.read_text(encoding="utf-8").startswith(OWN_TASK)
            self.recipe = resolve(self.settings.objective.recipe, self.settings.objective.overrides)
            self.environment = _environment(self.path / "environment.json")
            self.lines, self.events = load_metrics(self.path), load_events(self.path)
            self.evaluations = load_evaluations(self.path)
            self.resumptions = [_resumption(event) for event in self.events if event.get("event") == "resumed"]
            self.metrics = {line["batch"]: (n, line) for n, line in enumerate(self.lines, start=1)}
            for (n, line), name in product(enumerate(self.lines, start=1), ("version", "synced")):
                if not isinstance(line.get(name), int):
                    raise ValueError(f"{numbers}, line {n}: {name} is {line.get(name)!r}, not a number")
            self.batches = {batch: _rows(self.path, batch) for batch in rollout_batches(self.path)}
            self.eras: list[Source] = []
            self.eras += [self._era(number) for number in range(len(self.resumptions) + 1)]
        except RunNotFoundError:
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UnreadableError(f"{self.path} cannot be replayed: {error}") from error
        if not self.batches:
            raise RunNotFoundError(f"{self.path} has no rollouts yet: its first batch is not finished")

    def at(self, batch: int) -> Source:
        """The run as it was when it made this batch: with the settings and the recipe of then."""
        return self.eras[sum(resumption.batch < batch for resumption in self.resumptions)]

    def _era(self, number: int) -> Source:
        """The run with its settings after so many resumptions: those of config.toml, without what came later."""
        era, settings = copy.copy(self), self.settings.model_dump()
        for resumption in reversed(self.resumptions[number:]):
            for name, (before, _) in resumption.changed.items():
                *sections, leaf = name.split(".")
                below = reduce(lambda of, section: of.get(section, {}), sections, settings)
                if leaf in below:
                    below[leaf] = before
        era.settings = Settings.model_validate(settings)
        era.recipe = resolve(era.settings.objective.recipe, era.settings.objective.overrides)
        return era

    @property
    def unclear(self) -> set[int]:
        """Batches that were not made with the settings of one time: they were asked for before a change of what is
        sampled, and used after it. With another chat template, all batches before the change: the tokenizer has that
        of config.toml."""
        found: set[int] = set()
        for resumption in self.resumptions:
            last = resumption.batch + resumption.ahead
            if resumption.touches("model.chat_template"):
                found |= {*range(1, last + 1)}
            elif resumption.touches(*SAMPLED_BY):
                found |= {*range(resumption.batch + 1, last + 1)}
        return found

    @property
    def dtype(self) -> str:
        """The dtype in which the run sampled and learned."""
        return self.environment["dtype"]

    @property
    def exact(self) -> bool:
        """Whether learner and sampler were found to agree to the bit, and the run stayed where that was found."""
        moved = any(event.get("moved") for event in self.events) or any(
            r.touches(*ARITHMETIC) for r in self.resumptions
        )
        return (self.environment.get("parity") or {}).get("grade") == "exact" and not moved

    @property
    def fresh(self) -> int:
        """How many prompts of a batch are not from a file."""
        offline, count = self.settings.offline, self.settings.schedule.prompts
        return count if offline.data is None else count - max(1, round(offline.share * count))

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches.values() for row in rows]


def groups_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows of each group."""
    for _, members in groupby(rows, key=lambda row: (row["batch"], row.group)):
        yield list(members)


def scored_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The scored rows of each group that has some."""
    return groups_of(row for row in rows if row.scored)


def _resumption(event: Mapping[str, Any]) -> Resumption:
    """Raises ValueError for an event that no run records."""
    batch, changed, ahead = event.get("batch"), event.get("changed", {}), event.get("ahead", 0)
    if not isinstance(changed, dict) or not isinstance(batch, int) or not isinstance(ahead, int):
        raise ValueError(f"events.jsonl: {event!r:.120} is no resumption")
    if ill := [name for name, values in changed.items() if not isinstance(values, list) or len(values) != 2]:
        raise ValueError(f"events.jsonl: the resumption after batch {batch} does not say what {ill[0]:.80} was and is")
    return Resumption(batch, {name: (before, now) for name, (before, now) in changed.items()}, ahead)


def _environment(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; it says in which dtype the run computed")
    environment = parse_json(read_text(path))
    if not isinstance(environment, dict) or environment.get("dtype") not in DTYPES:
        raise ValueError(f"{path} does not say in which dtype the run computed ({' or '.join(DTYPES)})")
    return environment


def _rows(run: Path, batch: int) -> list[Row]:
    """The rows of a batch. A group begins where the completions start at 0 again, or another prompt comes."""
    rows: list[Row] = []
    group, before = -1, None
    for number, columns in enumerate(load_rollouts(run, [batch])):
        key = (columns["source"], columns["epoch"], columns["prompt_key"])
        group += key != before or columns["completion"] == 0
        rows.append(Row(columns, f"rollouts/step-{batch:06d}.parquet", number, group))
        before = key
    return rows
