"""Nine objectives on the embedded model and single-digit addition, on-policy (v = 1) and off-policy (v = 10).

    python experiments/comparison.py            train what is missing (36 runs), then the table and the figure
    python experiments/comparison.py --report   the table and the figure of the finished runs

Each run: 8 prompts x 8 completions of at most 16 tokens, 25 batches, learning rate 2e-5, beta 0, two seeds. pass@1 is
measured on the 20 held-out sums, 16 samples each, after the last update. Runs go to runs/comparison; a run that is
there is not repeated. The table is printed (docs/comparison.md has it), the figure goes to docs/images/comparison.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

METHODS = {
    "REINFORCE": {"recipe": "reinforce"},
    "GRPO": {"recipe": "grpo", "beta": 0.0},
    "GRPO, masked": {"recipe": "grpo_masked", "beta": 0.0},
    "REC one-side, .2": {"recipe": "rec_one_side_nois"},
    "REC one-side, (.6, 2)": {"recipe": "rec_one_side_nois_wide"},
    "RED-Drop": {"recipe": "red_drop"},
    "RED-Weight": {"recipe": "red_weight"},
    "OPMD": {"recipe": "opmd"},
    "AsymRE": {"recipe": "asymre"},
}
LAGS = (1, 10)
SEEDS = (0, 1)
ROOT = Path("runs/comparison")
DOCS = Path(__file__).parent.parent / "docs"


def name_of(method: str, v: int, seed: int) -> str:
    plain = "".join(c if c.isalnum() else "-" for c in method.lower())
    return f"{plain}-v{v}-seed{seed}"


def command(method: str, v: int, seed: int) -> list[str]:
    """The command line of one run."""
    settings = {
        "run.directory": str(ROOT),
        "run.name": name_of(method, v, seed),
        "run.seed": seed,
        "run.save-weights": False,
        "run.display": "plain",
        "schedule.v": v,
        "sampling.G": 8,
        **{f"objective.{key.replace('_', '-')}": value for key, value in METHODS[method].items()},
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    base = Path(__file__).parent / "addition" / "base.toml"
    return [str(Path(sys.executable).parent / "lagrpo"), "train", str(base), *flags]


def evaluated(method: str, v: int, seed: int) -> dict | None:
    """The evaluation after a finished run, with its reward curve; None where there is none."""
    run = ROOT / name_of(method, v, seed)
    summary = run / "evaluations" / "after.json"
    if not summary.is_file():
        return None
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads(summary.read_text()) | {"rewards": [line["reward_mean"] for line in lines], "lines": lines}


def train_missing(seeds: Sequence[int]) -> None:
    """One run per core at a time, each with one thread: that wastes nothing on threads that wait for each other."""
    cases = [(method, v, seed) for seed in seeds for v in LAGS for method in METHODS]
    in_parallel([command(*case) for case in cases if evaluated(*case) is None])


def in_parallel(commands: list[list[str]]) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, _ in enumerate(pool.map(_run, commands), start=1):
            print(f"{number} of {len(commands)} runs", flush=True)


def _run(words: list[str]) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    subprocess.run([*words, "--model.threads", "1"], check=True, **quiet)


def table() -> str:
    """One row per method: pass@1 of each seed at v = 1 and v = 10, and the mean reward over the run."""
    head = "| method | " + " | ".join(f"pass@1, v = {v} (seeds {', '.join(map(str, SEEDS))})" for v in LAGS)
    head += " | " + " | ".join(f"mean reward over the run, v = {v}" for v in LAGS) + " |"
    rows = [head, "|---" * (1 + 2 * len(LAGS)) + "|"]
    for method in METHODS:
        cells = []
        found = {v: [e for seed in SEEDS if (e := evaluated(method, v, seed))] for v in LAGS}
        cells += [" / ".join(f"{e['pass_at_1']:.1%}" for e in found[v]) or "–" for v in LAGS]
        means = {v: [sum(e["rewards"]) / len(e["rewards"]) for e in found[v]] for v in LAGS}
        cells += [f"{sum(means[v]) / len(means[v]):.3f}" if means[v] else "–" for v in LAGS]
        rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def figure(path: Path) -> None:
    """Reward per batch, the mean of the seeds: one panel for each v."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(drawing)
    panels = drawing.subplots(1, len(LAGS), sharey=True)
    for axes, v in zip(panels, LAGS, strict=True):
        for number, method in enumerate(METHODS):
            runs = [e["rewards"] for seed in SEEDS if (e := evaluated(method, v, seed))]
            if runs:
                mean = [sum(values) / len(values) for values in zip(*runs, strict=False)]
                axes.plot(range(1, len(mean) + 1), mean, color=f"C{number}", lw=1.8, label=method)
        axes.set_title("on-policy, v = 1" if v == 1 else f"off-policy, v = {v}")
        axes.set_xlabel("batch k")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("mean reward of the batch")
    panels[-1].legend(loc="upper left", fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="do not train")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="train these seeds")
    options = parser.parse_args()
    if not options.report:
        train_missing(options.seeds)
    print(table())
    figure(DOCS / "images" / "comparison.png")


if __name__ == "__main__":
    main()
