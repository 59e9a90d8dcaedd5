"""TRL's side of experiments/precision.py: `GRPOTrainer` in its bfloat16 setting on the prompts that ours visits.

Driven as the benchmarks drive it (benchmarks/trl_peer.py), one update per request. The file of a curve has the updates
made so far; a curve that was ended early is begun again by the next call. TRL's setting keeps float32 weights and
computes under bfloat16 autocast, which rounds them in every forward pass.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lagrpo.model.embedded import resolve_model
from lagrpo.settings.sections import TaskSettings
from lagrpo.tasks import load_task, order_prompts

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from precision import UPDATES, Cell, name_of, result_path, write
from processes import HERE, Side, environment
from work import SHORT, trl

RATES = ("5e-6", "1e-6")


def prompts(seed: int, updates: int) -> list[dict[str, Any]]:
    """The prompts of the first updates of our run of this seed, in its order, batch by batch."""
    task = load_task(TaskSettings(**SHORT.task), seed)
    size, rows = task.size("train"), []
    for place in range(updates * SHORT.N):
        epoch, position = divmod(place, size)
        key = order_prompts(seed, epoch, size)[position]
        prompt = task.prompt("train", key)
        rows.append(
            {"key": key, "messages": [dict(m) for m in prompt.messages], "answer": prompt.answer}
        )
    return rows


def trl_cells(seeds: Sequence[int]) -> list[Cell]:
    """All curves, in the order in which they are made."""
    return [(lr, "trl", seed) for seed in seeds for lr in RATES]


def train_trl(python: Path, chosen: Sequence[Cell], results: Path, threads: int) -> None:
    """Make the chosen curves that are missing, and keep each when it ends."""
    if not python.exists():
        raise SystemExit(f"{python}: no such Python. `make check-trl` makes .venv-trl/bin/python")
    for cell in chosen:
        lr, _, seed = cell
        if updates_in(result_path(results, cell)) < UPDATES[lr]:
            print(name_of(cell), flush=True)
            with tempfile.TemporaryDirectory() as scratch:
                for metrics in curve(python, lr, seed, threads, Path(scratch)):
                    write(result_path(results, cell), metrics)


def updates_in(path: Path) -> int:
    """How many updates a curve has; 0 where there is none."""
    return json.loads(path.read_text(encoding="utf-8"))["updates"] if path.exists() else 0


def curve(
    python: Path, lr: str, seed: int, threads: int, scratch: Path
) -> Iterator[dict[str, Any]]:
    """The metrics of one run of TRL so far, after each update."""
    updates = UPDATES[lr]
    rows, request = scratch / "prompts.jsonl", scratch / "request.json"
    rows.write_text(
        "".join(json.dumps(row) + "\n" for row in prompts(seed, updates + 1)), encoding="utf-8"
    )  # TRL may look ahead
    config = trl(SHORT, per_device=32, learning_rate=float(lr), seed=seed, bf16=True)
    model = resolve_model(SHORT.model)
    request.write_text(
        json.dumps({"model": model, "config": config, "prompts": str(rows), "reward": SHORT.judge}),
        encoding="utf-8",
    )
    taken = []
    with Side(
        "trl", [python, HERE / "trl_peer.py", request], scratch, environment(threads)
    ) as side:
        for update in range(1, updates + 1):
            taken.append(side.update())
            print(
                f"  update {update}: reward {taken[-1]['reward']:.3f}, {taken[-1]['seconds']:.1f} s",
                flush=True,
            )
            yield {
                "lr": lr,
                "mode": "trl",
                "seed": seed,
                "updates": update,
                "threads": threads,
                "versions": side.facts["policy_versions"],
                "config": config,
                "rewards": [u["reward"] for u in taken],
                "seconds": [u["seconds"] for u in taken],
            }
