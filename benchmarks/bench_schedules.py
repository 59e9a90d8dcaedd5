"""What sampling across weight syncs saves: schedule.max_staleness beside sync_every. See README.md.

make bench-schedules
python benchmarks/bench_schedules.py --work long --schedules sync_every=1 max_staleness=4
LAGRPO_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/bench_schedules.py --engine vllm

Runs of the work take turns, one for each schedule, in order, then in reverse order. All have room
for the completions of eight batches at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import tomli_w
from measuring import Load, Report, machine, ratio, spread
from processes import HERE, train
from work import LONG, SHORT, Work, apply_options, common_options, ours

from lagrpo.runs import load_metrics
from lagrpo.types import JsonObject

WORKS = {"short": SHORT, "long": replace(LONG, max_tokens=256)}
LEARNING_RATE = {"short": 2e-5, "long": 1e-5}
LARGEST = 8
"""Batches that the longest schedule samples at a time."""
SCHEDULES = (
    "sync_every=1",
    "sync_every=4",
    "sync_every=8",
    "max_staleness=2",
    "max_staleness=4",
    "max_staleness=8",
)


LAST = 4
"""Batches whose mean reward is the reward at a time."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run took, and what came of it."""

    counts: dict[str, float]
    """Of steps_of_run.py; empty with vLLM, except for the seconds."""
    metrics: list[JsonObject]

    @property
    def updates(self) -> int:
        return len(self.metrics)

    @property
    def tokens(self) -> int:
        return sum(line["num_tokens"] for line in self.metrics)

    @property
    def age(self) -> float:
        """The mean staleness of a token, in updates."""
        ages = [line["staleness/mean"] * line["num_tokens"] for line in self.metrics]
        return sum(ages) / self.tokens

    @property
    def oldest(self) -> int:
        return max(line["staleness/max"] for line in self.metrics)

    @property
    def recomputed(self) -> float:
        """Tokens that were computed again, by tokens that were sampled."""
        return self.counts.get("recomputed", 0.0) / self.tokens

    @property
    def seconds(self) -> float:
        return sum(line["time/step"] for line in self.metrics)

    @property
    def reward(self) -> float:
        """The mean over the run."""
        return fmean(line["reward"] for line in self.metrics)

    def reward_at(self, seconds: float) -> float:
        """The mean reward of the last batches that ended until then."""
        ends = accumulate(line["time/step"] for line in self.metrics)
        done = [line for line, end in zip(self.metrics, ends, strict=True) if end <= seconds]
        return fmean(line["reward"] for line in (done or self.metrics)[-LAST:])


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--work", choices=WORKS, default="short")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), metavar="NAME=VALUE")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each schedule, a seed each")
    parser.add_argument("--batches", type=int, default=24, help="of each run")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
        options.batches = 3
        options.schedules = ["sync_every=2", "max_staleness=2"]
    return options


def main() -> None:
    options = parse_options()
    work = apply_options(WORKS[options.work], options)
    load = Load()
    engine = "-vllm" if options.engine == "vllm" else ""
    title = "Weight syncs between completions, and while they go on"
    report = Report(f"schedules-{options.work}{engine}", title, options.results)
    runs: dict[str, list[Run]] = {schedule: [] for schedule in options.schedules}
    for turn in range(options.rounds):
        for schedule in options.schedules if turn % 2 == 0 else reversed(options.schedules):
            made = run(schedule, work, turn, options)
            runs[schedule].append(made)
            print(f"{schedule}: {made.seconds / made.updates:.2f} s an update", flush=True)
    report.raw["counts"] = {name: [made.counts for made in side] for name, side in runs.items()}
    report.raw["metrics"] = {name: [made.metrics for made in side] for name, side in runs.items()}
    report.text(
        f"{work.title}, {options.engine} engine: medians of {options.rounds} runs of "
        f"{options.batches} batches (smallest … largest)."
    )
    report.table("Ages, steps and seconds", [cost(name, runs) for name in runs])
    shortest = min(made.seconds for side in runs.values() for made in side)
    report.text(
        f"The last column is the mean reward of the {LAST} batches before {shortest:.0f} s."
    )
    report.table("Rewards", [rewards(name, side, shortest) for name, side in runs.items()])
    load.add_ended()
    report.write(machine(options.threads, load))


def run(schedule: str, work: Work, seed: int, options: argparse.Namespace) -> Run:
    """Trains with this schedule, "NAME=VALUE" of the settings."""
    name, _, value = schedule.partition("=")
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        settings = ours(
            work,
            scratch,
            run={"name": "run", "seed": seed},
            task=work.task,
            rollout={"engine": options.engine, "max_num_seqs": LARGEST * work.completions},
            schedule={"batches": options.batches, name: int(value)},
            optimizer={"learning_rate": LEARNING_RATE[options.work]},
            checkpoint={"save_total_limit": 0, "save_minutes": 0.0},
        )
        file = scratch / "settings.toml"
        file.write_text(tomli_w.dumps(settings), encoding="utf-8")
        os.environ["STEPS_OF_RUN"] = str(scratch / "steps.json")
        train(file, {}, 1, options.threads, program=[str(HERE / "steps_of_run.py")])
        counts = json.loads((scratch / "steps.json").read_text(encoding="utf-8"))
        return Run(counts, load_metrics(scratch / "runs" / "run"))


def cost(schedule: str, runs: dict[str, list[Run]]) -> dict[str, str]:
    """A row: what an update takes. The ratio is to the first schedule."""
    side = runs[schedule]
    first = next(iter(runs.values()))
    row = {
        "": schedule.replace("=", " = "),
        "mean age": spread([made.age for made in side]),
        "oldest": str(max(made.oldest for made in side)),
        "s per update": spread([made.seconds / made.updates for made in side]),
        "to the first": ratio([made.seconds for made in side], [made.seconds for made in first]),
    }
    if "steps" in side[0].counts:
        steps = [made.counts["steps"] / made.updates for made in side]
        sampling = [made.counts["sampling_seconds"] / made.updates for made in side]
        row["steps per update"] = spread(steps)
        row["CPU s to sample"] = spread(sampling)
        row["computed again"] = f"{fmean(made.recomputed for made in side):.0%}"
    return row


def rewards(schedule: str, side: list[Run], seconds: float) -> dict[str, str]:
    """A row: reward by updates and by seconds."""
    return {
        "": schedule.replace("=", " = "),
        "mean reward": spread([made.reward for made in side]),
        "end": spread([made.reward_at(made.seconds) for made in side]),
        "at equal seconds": spread([made.reward_at(seconds) for made in side]),
    }


if __name__ == "__main__":
    main()
