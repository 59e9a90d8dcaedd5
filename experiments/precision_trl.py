"""TRL's side of experiments/precision.py:

`GRPOTrainer` in its bfloat16 setting on lagrpo's prompts.

The driver makes one update per request, as the benchmarks do (benchmarks/trl_peer.py). The file of
a curve has the updates made so far; the next call begins an unfinished curve again. TRL's setting
keeps float32 weights and computes under bfloat16 autocast, which rounds them in every forward pass.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lagrpo.model.embedded import resolve_model
from lagrpo.settings.sections import TaskSettings
from lagrpo.tasks import load_task, order_prompts
from lagrpo.types import JsonObject

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from precision import UPDATES, Cell, name_of, result_path, write
from processes import HERE, Side, environment
from work import SHORT, trl

# The two rates of the figure.
RATES = ("5e-6", "1e-6")


def prompts(seed: int, updates: int) -> list[JsonObject]:
    """The prompts of the first updates of lagrpo's run of this seed, in its order."""
    task = load_task(TaskSettings(**SHORT.task), seed)
    size = task.size("train")
    rows = []
    for number in range(updates * SHORT.N):
        # A run shuffles the prompts anew in every epoch.
        epoch, position = divmod(number, size)
        key = order_prompts(seed, epoch, size)[position]
        prompt = task.prompt("train", key)
        messages = [dict(message) for message in prompt.messages]
        rows.append({"key": key, "messages": messages, "answer": prompt.answer})
    return rows


def trl_cells(seeds: Sequence[int]) -> list[Cell]:
    """All curves, in the order in which they are made."""
    return [(lr, "trl", seed) for seed in seeds for lr in RATES]


def train_trl(python: Path, selected: Sequence[Cell], results: Path, threads: int) -> None:
    """Makes the selected curves that are missing, and writes each after every update."""
    if not python.exists():
        raise SystemExit(f"{python}: no such Python. `make check-trl` makes .venv-trl/bin/python")
    for cell in selected:
        lr, _, seed = cell
        path = result_path(results, cell)
        if updates_in(path) >= UPDATES[lr]:
            continue
        print(name_of(cell), flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            for metrics in curve(python, lr, seed, threads, Path(scratch)):
                write(path, metrics)


def updates_in(path: Path) -> int:
    """The number of updates of a curve; 0 if there is none."""
    if not path.exists():
        return 0
    return json.loads(path.read_text(encoding="utf-8"))["updates"]


def curve(python: Path, lr: str, seed: int, threads: int, scratch: Path) -> Iterator[JsonObject]:
    """The metrics of one run of TRL so far, after each update."""
    updates = UPDATES[lr]
    # TRL may look ahead, so there are prompts of one more update.
    rows = prompts(seed, updates + 1)
    prompts_path = scratch / "prompts.jsonl"
    prompts_path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # Four micro-batches of 32 for the 128 completions of an update.
    config = trl(SHORT, per_device=32, learning_rate=float(lr), seed=seed, bf16=True)
    request = {
        "model": resolve_model(SHORT.model),
        "config": config,
        "prompts": str(prompts_path),
        "reward": SHORT.judge,
    }
    request_path = scratch / "request.json"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    command = [python, HERE / "trl_peer.py", request_path]
    measurements = []
    with Side("trl", command, scratch, environment(threads)) as side:
        for number in range(1, updates + 1):
            update = side.update()
            measurements.append(update)
            print(
                f"  update {number}: reward {update['reward']:.3f}, {update['seconds']:.1f} s",
                flush=True,
            )
            yield {
                "lr": lr,
                "mode": "trl",
                "seed": seed,
                "updates": number,
                "threads": threads,
                "versions": side.facts["versions"],
                "config": config,
                "rewards": [measured["reward"] for measured in measurements],
                "seconds": [measured["seconds"] for measured in measurements],
            }
