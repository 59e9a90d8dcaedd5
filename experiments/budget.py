"""What a divergence budget saves: weight syncs at equal reward, against fixed v, on the embedded model.

    python experiments/budget.py             train what is missing, then the table
    python experiments/budget.py --report    the table of the finished runs

Each run repeats comparison.py with GRPO (8 prompts x 8 completions, 25 batches, two seeds), under every(v) for v = 1,
2, 4, 10 and budget(δ, v = 10) for δ = 0.1, 0.3, 1 nats per completion. Weight syncs are those after batch 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from comparison import SEEDS, command, in_parallel

ROOT = Path("runs/budget")
SCHEDULES = {
    **{f"every({v})": {"schedule.v": v} for v in (1, 2, 4, 10)},
    **{
        f"budget({delta}, 10)": {"schedule.kind": "budget", "schedule.delta": delta, "schedule.v": 10}
        for delta in (0.1, 0.3, 1.0)
    },
}


def name_of(schedule: str, seed: int) -> str:
    return "".join(c if c.isalnum() else "-" for c in schedule) + f"-seed{seed}"


def run_command(schedule: str, seed: int) -> list[str]:
    settings = {"run.directory": ROOT, "run.name": name_of(schedule, seed), **SCHEDULES[schedule]}
    return command("GRPO", 1, seed) + [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def row(schedule: str) -> str:
    """pass@1 after, mean reward over the run, weight syncs and largest lag, for both seeds."""
    cells = []
    for seed in SEEDS:
        run = ROOT / name_of(schedule, seed)
        if not (run / "evaluations" / "after.json").is_file():
            cells.append(("–",) * 4)
            continue
        after = json.loads((run / "evaluations" / "after.json").read_text())["pass_at_1"]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        reward = sum(line["reward_mean"] for line in lines) / len(lines)
        synced = sum(line["synced"] for line in lines[1:])
        cells.append((f"{after:.1%}", f"{reward:.3f}", str(synced), str(max(line["lag_max"] for line in lines))))
    return f"| {schedule} | " + " | ".join(" / ".join(column) for column in zip(*cells, strict=True)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="do not train")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="train these seeds")
    options = parser.parse_args()
    if not options.report:
        cases = [(schedule, seed) for seed in options.seeds for schedule in SCHEDULES]
        missing = [case for case in cases if not (ROOT / name_of(*case) / "evaluations" / "after.json").is_file()]
        in_parallel([run_command(*case) for case in missing])
    print("| schedule | pass@1 after | mean reward over the run | weight syncs | largest lag |\n|---|---|---|---|---|")
    print("\n".join(row(schedule) for schedule in SCHEDULES))


if __name__ == "__main__":
    main()
