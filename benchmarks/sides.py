"""The two sides of a comparison with TRL, started on the same prompts, and measured in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from processes import HERE, Side, environment
from wire import Update
from work import HASHED, SEED, Work, ours, trl, write_prompts

from lagrpo.model.embedded import resolve_model
from lagrpo.types import JsonView

Measurements = list[Update]
Number = Literal[
    "seconds",
    "sampled",
    "learned",
    "flat",
    "reward",
    "micro_batches",
    "peak_bytes",
    "gpu_peak_bytes",
]


def start_ours(
    name: str,
    work: Work,
    scratch: Path,
    threads: int,
    reward: str = HASHED,
    variables: Mapping[str, str] | None = None,
    **sections: JsonView,
) -> Side:
    """A run of lagrpo that makes one batch per request.

    `variables` adds to its environment; `sections` adds to its settings, see work.ours.
    """
    settings = ours(work, scratch / name, **sections)
    request = {
        "settings": settings,
        "prompts": _prompts(work, scratch, settings["run"]["seed"]),
        "reward": reward,
    }
    command = [sys.executable, HERE / "ours.py"]
    return _start(name, command, request, scratch, threads, variables)


def start_trl(
    name: str,
    work: Work,
    scratch: Path,
    threads: int,
    python: Path,
    config: JsonView,
    reward: str = HASHED,
) -> Side:
    """A GRPOTrainer that makes one update per request. `config`: see work.trl."""
    all_arguments = trl(work, **config)
    request = {
        "model": resolve_model(work.model),
        "config": all_arguments,
        "prompts": _prompts(work, scratch, all_arguments.get("seed", SEED)),
        "reward": reward,
    }
    return _start(name, [python, HERE / "trl_peer.py"], request, scratch, threads)


def _prompts(work: Work, scratch: Path, seed: int) -> str:
    """The file of prompts, which sides of the same work and seed share."""
    path = scratch / f"{work.name}-{work.N}-{seed}.jsonl"
    if not path.exists():
        write_prompts(work, path, seed)
    return str(path)


def _start(
    name: str,
    command: Sequence[object],
    request: Mapping[str, object],
    scratch: Path,
    threads: int,
    variables: Mapping[str, str] | None = None,
) -> Side:
    side_scratch = scratch / name
    side_scratch.mkdir()
    request_path = side_scratch / "request.json"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    side_environment = environment(threads) | dict(variables or {})
    return Side(name, [*command, request_path], side_scratch, side_environment)


def interleaved(sides: Sequence[Side], warmup: int, updates: int) -> list[Measurements]:
    """The measurements of `updates` updates of each side, after `warmup` that do not count.

    Sides take turns, first to last, then last to first, and so on: a slow change of the machine
    meets all sides alike.
    """
    measurements: list[Measurements] = [[] for _ in sides]
    pairs = list(zip(sides, measurements, strict=True))
    for turn in range(warmup + updates):
        for side, side_updates in pairs if turn % 2 == 0 else reversed(pairs):
            side_updates.append(side.update())
            seconds = side_updates[-1]["seconds"]
            print(f"  {side.name}, update {turn + 1}: {seconds:.2f} s", flush=True)
    return [side_updates[warmup:] for side_updates in measurements]


def require_same_work(ours: Measurements, peers: Measurements) -> None:
    """Raises RuntimeError unless both sides got the same prompts, in the same tokens, as often."""
    for name in ("prompts", "prompt_tokens", "completions"):
        our_values = [update[name] for update in ours]
        peer_values = [update[name] for update in peers]
        if our_values != peer_values:
            raise RuntimeError(f"the sides differ in their {name}: {our_values} and {peer_values}")


def values(measurements: Measurements, name: Number) -> list[float]:
    return [update[name] for update in measurements]


def per_token(measurements: Measurements) -> list[float]:
    """Seconds per completion token of each update."""
    return [update["seconds"] / update["sampled"] for update in measurements]


def phases(measurements: Measurements) -> str:
    """The median seconds of each phase that a side names, and of the rest."""
    from measuring import median

    names = sorted({name for update in measurements for name in update["phases"]})
    seconds = {
        name: median(update["phases"].get(name, 0.0) for update in measurements) for name in names
    }
    seconds["the rest"] = median(
        update["seconds"] - sum(update["phases"].values()) for update in measurements
    )
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
