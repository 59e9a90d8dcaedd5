"""Runs of the embedded model on one GPU: seconds a batch, rewards and pass@1. See README.md.

python benchmarks/gpu_training.py                    # four runs, 200 seconds at most
python benchmarks/gpu_training.py --only demo --seconds 900
python benchmarks/gpu_training.py --only small --model experiments/small/model    # no conversion
python benchmarks/gpu_training.py --quick            # tiny runs, also on a CPU
python benchmarks/gpu_training.py --help

Single-digit addition (`lagrpo train demo`) and GSM8K, each with a weight sync before every batch
(v = 1) and before every tenth (v = 10), and otherwise with the same settings. Each run is a process
of its own with a time limit: the time that is left, less a share that is kept for each later run. A
run that reaches its limit stops after a batch, and what it has recorded counts. GSM8K comes from
LAGRPO_DATA.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from measure_gpu import Step, last_lines, run
from measuring import Load, Report, machine, median
from work import common_options

from lagrpo.model.embedded import resolve_model
from lagrpo.runs import RunNotFoundError, load_evaluations, load_metrics
from lagrpo.types import JsonObject, JsonView

# A run that would have less time than this is left out.
SHORTEST = 15.0
# Batches at the start whose seconds do not count: kernels are compiled, and steps are recorded. As
# many as a weight sync has at v = 10, so that the rest has whole cycles.
WARM = 10
# Batches at each end of a run whose rewards are averaged.
ENDS = 5
SYNC_EVERY = (1, 10)


@dataclass(frozen=True)
class Task:
    """A packaged file of settings, and changes of it."""

    file: str
    share: float
    """Share of the time that is kept for a run while earlier runs may take the rest."""
    settings: Mapping[str, object]


DEMO = Task("demo", 0.14, {})
GSM8K = Task(
    "gsm8k",
    0.26,
    {
        "rollout.num_generations": 8,
        "rollout.temperature": 1.0,
        "rollout.max_completion_length": 200,
        "rollout.overlong_prompts": "drop",
        # Half of what v = 10 samples together. The cache takes less than a fifth of 80 GB, so the
        # sampler keeps it and its graphs between batches.
        "rollout.max_num_seqs": 640,
        "schedule.prompts_per_batch": 16,
        "schedule.batches": 30,
        "loss.recipe": "grpo",
        "loss.beta": 0.0,
        "optimizer.learning_rate": 2e-5,
        "eval.every": 0,
        "eval.num_prompts": 200,
        "eval.num_samples": 4,
    },
)
# Sums of three digits by a model of half a megabyte, which needs no conversion.
SMALL = Task(
    "experiments/small/base.toml",
    0.4,
    {"model.dtype": "auto", "schedule.batches": 40, "eval.num_prompts": 100},
)
TASKS = {"demo": DEMO, "gsm8k": GSM8K, "small": SMALL}
ALL_RUNS: dict[str, object] = {
    # Files that nobody reads.
    "checkpoint.save_total_limit": 0,
    "checkpoint.save_minutes": 0,
}
QUICK: dict[str, object] = {
    "rollout.num_generations": 4,
    "rollout.max_completion_length": 4,
    "rollout.max_num_seqs": 16,
    "schedule.prompts_per_batch": 2,
    "schedule.batches": 2,
    "eval.num_prompts": 2,
    "eval.num_samples": 2,
}


@dataclass(frozen=True)
class Trained:
    """A run and what it has recorded."""

    task: str
    v: int
    end: str
    """done, or why it ended too early."""
    seconds: float
    """Of the whole process."""
    measured: JsonObject
    """See `summarize`; empty if the run has recorded no batch."""


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=["demo", "gsm8k"])
    parser.add_argument("--seconds", type=float, default=200, help="for all runs together")
    options = parser.parse_args()
    if options.quick:
        # On a busy CPU a run takes a minute to start.
        options.seconds = max(options.seconds, 1200)
    return options


def main() -> None:
    options = parse_options()
    load = Load()
    deadline = time.monotonic() + options.seconds
    # Converts the embedded model, so that no run spends its time on that.
    resolve_model(options.model)
    trained: list[Trained] = []
    runs = [(TASKS[name], v) for name in options.only for v in SYNC_EVERY]
    for number, (task, v) in enumerate(runs, start=1):
        kept_share = sum(later.share for later, _ in runs[number:])
        limit = int(deadline - time.monotonic() - kept_share * options.seconds)
        if limit < SHORTEST:
            trained.append(Trained(task.file, v, "left out: no time", 0.0, {}))
        else:
            trained.append(train(task, v, limit, options))
        # Written after each run: whatever ends this process, the runs so far are there.
        write(trained, options, load)
    sys.exit(any(trained_run.end != "done" for trained_run in trained))


def train(task: Task, v: int, limit: int, options: argparse.Namespace) -> Trained:
    """Makes a run, which is stopped after `limit` seconds, and reads what it has recorded."""
    print(f"\n== {task.file}, v = {v}: at most {limit} s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        settings = {
            **choose_settings(task, v, quick=options.quick),
            "model.path": options.model,
            "run.output_dir": scratch,
            "run.name": "run",
        }
        command = [sys.executable, "-m", "lagrpo", "train", task.file]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        started = time.monotonic()
        end = run(Step(task.file, limit, command), log)
        seconds = time.monotonic() - started
        print(last_lines(log), f"== {end}, {seconds:.0f} s", flush=True)
        try:
            metrics = load_metrics(Path(scratch) / "run")
            evaluations = load_evaluations(Path(scratch) / "run")
        except RunNotFoundError:
            metrics = evaluations = []
    measured = summarize(metrics, evaluations) if metrics else {}
    return Trained(task.file, v, end, seconds, measured)


def choose_settings(task: Task, v: int, *, quick: bool) -> dict[str, object]:
    """Returns the settings of a run that differ from the packaged file's."""
    settings = {**ALL_RUNS, **task.settings, "schedule.sync_every": v}
    if quick:
        settings |= QUICK
    return settings


def summarize(metrics: Sequence[JsonView], evaluations: Sequence[JsonView]) -> JsonObject:
    """Returns what a run with at least one batch shows.

    Seconds are means over the batches after the first WARM, if there are more: at v = 10 one batch
    of ten waits for the completions of all, which a median would leave out. `reward_start` and
    `reward_end` are means over ENDS batches, fewer in a run of less than twice as many.
    """
    settled = metrics[WARM:] or metrics
    ends = max(1, min(ENDS, len(metrics) // 2))
    rewards = [line["reward"] for line in metrics if line["reward"] is not None]
    tokens = sum(line["num_tokens"] for line in settled)
    return {
        "batches": len(metrics),
        "seconds": fmean(line["time/step"] for line in settled),
        "seconds_median": median(line["time/step"] for line in settled),
        "sampling": fmean(line["time/generate"] for line in settled),
        "learning": fmean(line["time/train"] for line in settled),
        "tokens_s": tokens / sum(line["time/step"] for line in settled),
        "staleness": fmean(line["staleness/mean"] or 0.0 for line in settled),
        "reward_start": fmean(rewards[:ends]) if rewards else None,
        "reward_end": fmean(rewards[-ends:]) if rewards else None,
        "evaluations": [dict(evaluation) for evaluation in evaluations],
    }


def write(trained: Sequence[Trained], options: argparse.Namespace, load: Load) -> None:
    """Prints and writes the results of the runs so far."""
    report = Report("training", "Runs of the embedded model", options.results)
    report.text(
        f"v: batches per weight sync. Seconds and tokens: means over the batches after the first "
        f"{WARM}, of the whole batch, waiting for completions, and updates; the median beside "
        f"them. Reward: means over {ENDS} batches. pass@1 with its 95 % interval; change: over the "
        "same prompts."
    )
    if os.environ.get("LAGRPO_KERNELS"):
        report.text(f"LAGRPO_KERNELS = {os.environ['LAGRPO_KERNELS']}.")
    report.table("Runs", [row(trained_run) for trained_run in trained])
    tasks = {task.file: task for task in TASKS.values()}
    for name in dict.fromkeys(trained_run.task for trained_run in trained):
        settings = choose_settings(tasks[name], SYNC_EVERY[0], quick=options.quick)
        del settings["schedule.sync_every"]
        words = ", ".join(f"{setting} = {value}" for setting, value in settings.items())
        report.text(f"`lagrpo train {name}` with {words}.")
    report.raw["runs"] = [asdict(trained_run) for trained_run in trained]
    load.add_ended()
    report.write(machine(options.threads, load))


def row(trained_run: Trained) -> JsonObject:
    """Returns the line of a run in the table."""
    measured = trained_run.measured
    cells: JsonObject = {
        "task": trained_run.task,
        "v": trained_run.v,
        "batches": measured.get("batches", 0),
        "s a batch": "",
        "median": "",
        "sampling": "",
        "learning": "",
        "tokens/s": "",
        "staleness": "",
        "reward": "",
        "pass@1 before": "",
        "pass@1 after": "",
        "change": "",
        "s in all": f"{trained_run.seconds:.0f}",
        "end": trained_run.end,
    }
    if not measured:
        return cells
    cells["s a batch"] = f"{measured['seconds']:.3f}"
    cells["median"] = f"{measured['seconds_median']:.3f}"
    cells["sampling"] = f"{measured['sampling']:.3f}"
    cells["learning"] = f"{measured['learning']:.3f}"
    cells["tokens/s"] = f"{measured['tokens_s']:,.0f}"
    cells["staleness"] = f"{measured['staleness']:.1f}"
    if measured["reward_start"] is not None:
        cells["reward"] = f"{measured['reward_start']:.3f} → {measured['reward_end']:.3f}"
    by_name = {evaluation["name"]: evaluation for evaluation in measured["evaluations"]}
    cells["pass@1 before"] = share(by_name.get("before"), "pass@1")
    cells["pass@1 after"] = share(by_name.get("after"), "pass@1")
    cells["change"] = share(by_name.get("after"), "pass@1_change")
    return cells


def share(evaluation: JsonView | None, name: str) -> str:
    """Returns a result of an evaluation in percent, with its interval; nothing without it."""
    if evaluation is None or evaluation.get(name) is None:
        return ""
    value = evaluation[name]
    low = evaluation[f"{name}_low"]
    high = evaluation[f"{name}_high"]
    return f"{value:.1%} ({low:.1%} … {high:.1%})"


if __name__ == "__main__":
    main()
