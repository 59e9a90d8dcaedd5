"""The queue: which runs there are, and in which order they are made.

Runs that share table, task, method and schedule are a pass: they are stacked (train.py) and land
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from lagrpo.settings.lag_table import FRESH_RATE

from .ages import Kind, Schedule
from .control import Control
from .methods import Method, Table
from .records import Record, RunKey
from .tasks import TASKS

Methods = Mapping[Table, Mapping[str, Method]]
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
MAIN_TASKS = ("chain", "gamble")
VARIANTS = tuple(name for name in TASKS if name not in MAIN_TASKS)
LARGE = ("chain-large", "gamble-large")
"""The main tasks with a larger model."""
OTHER_INSTANCES = ("chain-other", "gamble-other")
"""The main tasks with other random tables and starts."""
VARIANT_RATES = (3e-4, 1e-3)
LARGE_RATES = (1e-4, *VARIANT_RATES)
"""A larger model needs a lower learning rate."""
FIRST_SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4)
SEEDS_WHERE_SOME_DIE = (5, 6, 7, 8, 9)
SAME_AT_LAG_0 = ("stale_reinforce", "asymre", "positive_only")
"""With equal advantage and reduction all methods but the last two are REINFORCE at lag 0."""
REFERENCE_METHODS = (
    *SAME_AT_LAG_0,
    "topr",
    "rec_one_side_nois_wide",
    "cispo",
    "dppo_tv",
    "oapl_tuned",
    "red_drop",
)
"""One method for each pair of advantage and reduction.

At lag 0 all ratios are 1, so methods with the same pair have the same gradient. Two do not: asymre
shifts the baseline, so it is here beside rec_one_side_nois_wide, and tba has a KL penalty. The best
of these at lag 0 makes the area with which all methods are compared: they come first, and a
percentage does not change when more methods have run at lag 0.
"""
MAIN_METHODS = (
    "stale_reinforce",
    "grpo",
    "positive_only",
    "topr",
    "dppo_tv",
    "vespo",
    "m2po",
    "rec_one_side_nois_wide",
    "seq_tis",
    "sapo",
    "cispo",
    "prime_rl",
)
"""The methods that people ask about most.

The variants of the tasks are made for these alone: twelve rows are enough to see which property of
a task turns the order around.
"""
LENGTH_TASKS = ("gamble", "journey")
"""The tasks whose completions differ in length."""
LENGTH_KINDS: tuple[Kind, ...] = ("in_order", "by_length", "mixed")
"""Long completions fresher than short ones, as stale as they are long, and neither."""
LENGTH_LAGS = (64, 16, 4)
LENGTH_RATES = (FRESH_RATE,)
LENGTH_METHODS = (
    "grpo",
    "prime_rl",
    "rec_one_side_nois_wide",
    "dppo_tv",
    "topr",
    "m2po",
    "sapo",
    "positive_only",
)
CONTROL_RATES = (1e-3, 3e-3)
"""The best rate with fresh samples on both main tasks, f, and three times that."""
CONTROL_SCHEDULES: tuple[tuple[Kind, int], ...] = (
    ("constant", 64),
    ("sawtooth", 15),
    ("constant", 16),
    ("constant", 256),
)
CONTROLS_OF_KIND: tuple[dict[Kind, tuple[Control, ...]], ...] = (
    {"constant": ("kl_feedback", "ess_root"), "sawtooth": ("kl_feedback", "sync_at_kl")},
    {"constant": ("kl_root",), "sawtooth": ("kl_root", "ess_root")},
)
"""What a user can set, then the rest. `kl_linear` has some runs and gets no more."""
CONTROL_SEEDS = ((0, 1), (2, 3, 4))
DECIDING_METHODS = ("grpo", "sapo", "rec_one_side_nois_wide")
"""What is usual, what collapses at f, and what does not. `prime_rl` was run before."""
CONTROL_METHODS = (
    DECIDING_METHODS,
    tuple(name for name in MAIN_METHODS if name not in DECIDING_METHODS),
)
DISTILLATION_LAGS = (64, 0, 16, 256)
DISTILLATION_METHODS = (
    ("opd_recomputed", "opd_stale"),
    ("opd_forward", "opd_stale_clipped", "opd"),
    ("grpo_opd", "iw_opd"),
)
"""What is compared, then what is usual beside it, then the rest."""
FIGURE_METHODS = (
    "stale_reinforce",
    "grpo",
    "positive_only",
    "topr",
    "rec_one_side_nois_wide",
    "prime_rl",
)
METHODS_AT_LAG_0 = (*FIGURE_METHODS, "m2po")
"""Those of the figure, and one whose loss takes statistics of the step."""
QUICK_METHODS = ("stale_reinforce", "grpo", "positive_only", "prime_rl")
"""No correction, the usual clip, no negative advantages, and what docs/off-policy.md recommends."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Runs that are trained together: every control with every learning rate and seed."""

    table: Table
    task: str
    method: str
    schedule: Schedule
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    updates: int
    controls: tuple[Control, ...] = ("fixed",)

    @property
    def keys(self) -> list[RunKey]:
        return [
            RunKey(
                self.table,
                self.task,
                self.method,
                self.schedule.kind,
                self.schedule.lag,
                rate,
                seed,
                control,
            )
            for control in self.controls
            for rate in self.learning_rates
            for seed in self.seeds
        ]


@cache
def updates_of(task: str, schedule: Schedule) -> int:
    """The length of a run in updates.

    At lag 256 it is doubled, and at lag 0, with which longer runs are compared.
    """
    return TASKS[task]().updates * (2 if schedule.lag in (0, 256) else 1)


def full_plan(methods: Methods) -> list[Pass]:
    """The passes of the benchmark, most informative first.

    Lag 0 is run for REFERENCE_METHODS and METHODS_AT_LAG_0: the others, except tba, have the
    gradient of one of these there. The passes with more seeds, where some die, come from
    `passes_where_some_die`.
    """
    plan = _Plan(methods)
    for seeds in FIRST_SEEDS, MORE_SEEDS:
        plan.add("published", MAIN_TASKS, "constant", (0,), seeds, only=REFERENCE_METHODS)
        plan.add("published", MAIN_TASKS, "constant", (16, 64), seeds)
        if seeds == FIRST_SEEDS:
            small = [task for task in VARIANTS if task not in LARGE]
            plan.add("published", VARIANTS, "constant", (0,), seeds, VARIANT_RATES, SAME_AT_LAG_0)
            plan.add("published", small, "constant", (64,), seeds, VARIANT_RATES, MAIN_METHODS)
            plan.add("published", LARGE, "constant", (64,), seeds, LARGE_RATES, MAIN_METHODS)
            plan.add(
                "published", OTHER_INSTANCES, "constant", (16,), seeds, VARIANT_RATES, MAIN_METHODS
            )
        plan.add("published", MAIN_TASKS, "constant", (256,), seeds)
        plan.add("equal", MAIN_TASKS, "constant", (0,), seeds, only=SAME_AT_LAG_0)
        plan.add("equal", MAIN_TASKS, "constant", (64,), seeds)
        plan.add("published", MAIN_TASKS, "mixed", (64,), seeds)
        plan.add("published", MAIN_TASKS, "sawtooth", (64,), seeds)
        plan.add("published", MAIN_TASKS, "constant", (4, 0), seeds, only=METHODS_AT_LAG_0)
    # All seeds at once: a run takes a fifth less time in a stack of 20 than in one of 8.
    seeds = FIRST_SEEDS + MORE_SEEDS
    others = [name for name in methods["published"] if name not in METHODS_AT_LAG_0]
    plan.add("published", MAIN_TASKS, "constant", (4,), seeds, only=others)
    plan.add("published", MAIN_TASKS, "constant", (1,), seeds)
    plan.add("equal", MAIN_TASKS, "constant", (16, 256), seeds)
    others = [name for name in methods["published"] if name not in MAIN_METHODS]
    for seeds in CONTROL_SEEDS:
        plan.add("published", MAIN_TASKS, "sawtooth", (15,), seeds, VARIANT_RATES, only=others)
    return [
        *plan.passes,
        *control_plan(methods),
        *length_plan(methods),
        *distillation_plan(methods),
    ]


def length_plan(methods: Methods) -> list[Pass]:
    """The passes whose ages go with the length of completions, and those to compare them with."""
    plan = _Plan(methods)
    for task, lag, kind in product(LENGTH_TASKS, LENGTH_LAGS, LENGTH_KINDS):
        if task in MAIN_TASKS and (kind, lag) == ("mixed", 64):
            continue  # full_plan has these, with more rates
        plan.add("published", (task,), kind, (lag,), FIRST_SEEDS, LENGTH_RATES, LENGTH_METHODS)
    return plan.passes


def control_plan(methods: Methods) -> list[Pass]:
    """The passes that compare controls of the learning rate, most informative first.

    The runs with a fixed rate are in the table `published`: those of ages 0 to 15 are made here.
    """
    plan = _Plan(methods)
    for methods_of_part, seeds, controls_of_kind in product(
        CONTROL_METHODS, CONTROL_SEEDS, CONTROLS_OF_KIND
    ):
        for (kind, lag), method in product(CONTROL_SCHEDULES, methods_of_part):
            if kind == "sawtooth":
                plan.add("published", MAIN_TASKS, kind, (lag,), seeds, only=(method,))
            plan.add(
                "controlled",
                MAIN_TASKS,
                kind,
                (lag,),
                seeds,
                CONTROL_RATES,
                (method,),
                controls=controls_of_kind[kind],
            )
    return plan.passes


def distillation_plan(methods: Methods) -> list[Pass]:
    """The passes that learn from a teacher, most informative first.

    It teaches faster than rewards, so runs have a quarter of the updates of others; at lag 256
    half.
    """
    plan = _Plan(methods)
    for only, task, lag in product(DISTILLATION_METHODS, MAIN_TASKS, DISTILLATION_LAGS):
        updates = TASKS[task]().updates // (2 if lag == 256 else 4)
        plan.add(
            "distilled", (task,), "constant", (lag,), FIRST_SEEDS, VARIANT_RATES, only, updates
        )
    return plan.passes


def quick_plan(methods: Methods, only: Sequence[str] = QUICK_METHODS) -> list[Pass]:
    """A small table of short runs."""
    plan = _Plan(methods)
    for task in MAIN_TASKS:
        updates = TASKS[task]().updates // 4
        plan.add(
            "published",
            (task,),
            "constant",
            (16, 64, 0),
            (0,),
            (3e-4, 1e-3),
            only,
            updates,
        )
    return plan.passes


class _Plan:
    """A list of passes that grows."""

    def __init__(self, methods: Methods):
        self._methods = methods
        self._passes: dict[Pass, None] = {}  # a set that keeps the order

    @property
    def passes(self) -> list[Pass]:
        return list(self._passes)

    def add(
        self,
        table: Table,
        tasks: Sequence[str],
        kind: Kind,
        lags: Sequence[int],
        seeds: tuple[int, ...],
        rates: tuple[float, ...] = LEARNING_RATES,
        only: Sequence[str] = (),
        updates: int | None = None,
        controls: tuple[Control, ...] = ("fixed",),
    ) -> None:
        """Append a pass for each lag, task and method of the table (or those named).

        A pass that is there already is not appended again.
        """
        for lag in lags:
            # A method's tasks follow each other, so that a table of both fills up row by row.
            for method in self._methods[table].values():
                if method.same_as or (only and method.name not in only):
                    continue
                for task in tasks:
                    schedule = Schedule(kind, lag)
                    length = updates or updates_of(task, schedule)
                    item = Pass(table, task, method.name, schedule, rates, seeds, length, controls)
                    self._passes[item] = None


def passes_where_some_die(records: Mapping[RunKey, Record]) -> Iterator[Pass]:
    """More seeds where some of the seeds die, but not all.

    That is for each method, schedule and learning rate of the main tasks.
    """
    fates = defaultdict(list)
    for key, record in records.items():
        has_more_seeds = key.table != "distilled" and key.task in MAIN_TASKS
        if has_more_seeds and key.seed in FIRST_SEEDS + MORE_SEEDS:
            fates[key._replace(seed=0)].append(record.dies(record.updates))
    for key, dies in fates.items():
        if any(dies) and not all(dies):
            schedule = Schedule(key.schedule, key.lag)  # type: ignore[arg-type]
            yield Pass(
                table=key.table,
                task=key.task,
                method=key.method,
                schedule=schedule,
                learning_rates=(key.learning_rate,),
                seeds=SEEDS_WHERE_SOME_DIE,
                updates=updates_of(key.task, schedule),
            )
