"""Single-digit addition through a real vLLM server: what v, prefetching and a second server buy.

    python experiments/vllm.py             train what is missing (5 runs of 12 batches), then the table and the figure
    python experiments/vllm.py --report    the table and the figure of the finished runs

The embedded model in bfloat16, 8 prompts x 16 completions of at most 16 tokens, GRPO, learning rate 2e-5, beta 0, one
after the other, because they are timed: on an otherwise idle machine. Runs go to runs/vllm; a run that is there is not
repeated. The table is printed (docs/vllm.md has it), the figure goes to docs/images/vllm.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from comparison import DOCS

ROOT = Path("runs/vllm")
BASE = Path(__file__).parent / "addition" / "base.toml"
RUNS = {
    "v = 1": {"v": 1},
    "v = 1, two servers": {"v": 1, "servers": 2},
    "v = 4": {"v": 4},
    "v = 10": {"v": 10},
    "v = 10, no prefetch": {"v": 10, "prefetch": False},
}
SECONDS = {
    "generating": "seconds_generating",
    "waiting": "seconds_sampling",
    "weight sync": "seconds_sync",
    "learning": "seconds_learning",
    "in all": "seconds_total",
}


def name_of(run: str) -> str:
    return "".join(c for c in run.replace(" ", "-") if c.isalnum() or c == "-")


def command(run: str, python: str) -> list[str]:
    knobs = RUNS[run]
    settings = {
        "run.directory": ROOT,
        "run.name": name_of(run),
        "run.save-weights": False,
        "run.display": "plain",
        "evaluation.samples": 8,
        "schedule.v": knobs["v"],
        "schedule.batches": 12,
        "sampling.sampler": "vllm",
        "sampling.prefetch": knobs.get("prefetch", True),
        "vllm.python": python,
        "vllm.servers": knobs.get("servers", 1),
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return [str(Path(sys.executable).parent / "lagrpo"), "train", str(BASE), *flags]


def lines_of(run: str) -> list[dict]:
    """The metrics of a finished run; none of one that is not there."""
    directory = ROOT / name_of(run)
    if not (directory / "evaluations" / "after.json").is_file():
        return []
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def row(run: str) -> str:
    lines = lines_of(run)
    if not lines:
        return f"| {run} |" + " – |" * (len(SECONDS) + 4)
    after = json.loads((ROOT / name_of(run) / "evaluations" / "after.json").read_text())
    per_batch = {label: sum(line[key] for line in lines) / len(lines) for label, key in SECONDS.items()}
    syncs = [line for line in lines if line["synced"]]
    cells = [
        f"{after['pass_at_1']:.1%}",
        *(f"{seconds:.2f}" for seconds in per_batch.values()),
        f"{len(syncs)} x {median(line['seconds_sync'] for line in syncs):.2f} s, "
        f"paused {median(line['seconds_paused'] for line in syncs):.2f} s",
        f"{median(line['parity_mean'] for line in syncs):.3f}",
        f"{median(line['parity_telling'] for line in syncs[1:]):.0f}" if syncs[1:] else "–",
    ]
    return f"| {run} | " + " | ".join(cells) + " |"


def table() -> str:
    """One row per run; seconds are means per batch."""
    head = ["run", "pass@1 after", *(f"{label}, s" for label in SECONDS)]
    head += ["weight syncs", "parity, nats a token", "tokens that tell, median"]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(row(run) for run in RUNS)])


def figure(path: Path) -> None:
    """Reward by batch, and by wall time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(drawing)
    by_batch, by_time = drawing.subplots(1, 2, sharey=True)
    for number, run in enumerate(run for run in RUNS if lines_of(run)):
        lines, clock, times = lines_of(run), 0.0, []
        for line in lines:
            clock += line["seconds_total"]
            times.append(clock)
        rewards = [line["reward_mean"] for line in lines]
        by_batch.plot(range(1, len(lines) + 1), rewards, color=f"C{number}", lw=1.8, label=run)
        by_time.plot(times, rewards, color=f"C{number}", lw=1.8)
    by_batch.set_xlabel("batch k")
    by_time.set_xlabel("seconds")
    by_batch.set_ylabel("mean reward of the batch")
    by_batch.legend(loc="upper left", fontsize=8, frameon=False)
    for axes in (by_batch, by_time):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="do not train")
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="Python of the environment that has vLLM")
    options = parser.parse_args()
    for run in () if options.report else [run for run in RUNS if not lines_of(run)]:
        print(run, flush=True)
        subprocess.run(command(run, options.python), check=True, stdout=subprocess.DEVNULL)
    print(table())
    figure(DOCS / "images" / "vllm.png")


if __name__ == "__main__":
    main()
