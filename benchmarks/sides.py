"""The two sides of a comparison with TRL, started on the same prompts, and measured in turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import HERE, Side, environment
from work import HASHED, SEED, Work, ours, trl, write_prompts

from lagrpo.model.embedded import resolve_model

Measurements = list[dict[str, Any]]


def start_ours(
    name: str,
    work: Work,
    scratch: Path,
    threads: int,
    reward: str = HASHED,
    variables: Mapping[str, str] | None = None,
    **sections: Mapping[str, Any],
) -> Side:
    """A run of ours that makes one batch per request, under further environment `variables`."""
    settings = ours(work, scratch / name, **sections)
    request = {
        "settings": settings,
        "prompts": _prompts(work, scratch, settings["run"]["seed"]),
        "reward": reward,
    }
    return _start(name, [sys.executable, HERE / "ours.py"], request, scratch, threads, variables)


def start_trl(
    name: str,
    work: Work,
    scratch: Path,
    threads: int,
    python: Path,
    config: Mapping[str, Any],
    reward: str = HASHED,
) -> Side:
    """A GRPOTrainer that makes one update per request. `config`: see work.trl."""
    full = trl(work, **config)
    model = resolve_model(work.model)
    request = {
        "model": model,
        "config": full,
        "prompts": _prompts(work, scratch, full.get("seed", SEED)),
        "reward": reward,
    }
    return _start(name, [python, HERE / "trl_peer.py"], request, scratch, threads)


def _prompts(work: Work, scratch: Path, seed: int) -> str:
    path = scratch / f"{work.name}-{work.N}-{seed}.jsonl"
    return str(path if path.exists() else write_prompts(work, path, seed))


def _start(
    name: str,
    command: Sequence[Any],
    request: Mapping[str, Any],
    scratch: Path,
    threads: int,
    variables: Mapping[str, str] | None = None,
) -> Side:
    place = scratch / name
    place.mkdir()
    path = place / "request.json"
    path.write_text(json.dumps(request), encoding="utf-8")
    return Side(name, [*command, path], place, environment(threads) | dict(variables or {}))


def interleaved(sides: Sequence[Side], warmup: int, updates: int) -> list[Measurements]:
    """The metrics of `updates` updates of each side, after `warmup` that are not counted. They are taken in turn, first
    to last, then last to first, and so on: a slow change of the machine meets all sides alike."""
    taken: list[Measurements] = [[] for _ in sides]
    for turn in range(warmup + updates):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for n in order:
            taken[n].append(sides[n].update())
            print(
                f"  {sides[n].name}, update {turn + 1}: {taken[n][-1]['seconds']:.2f} s", flush=True
            )
    return [measurements[warmup:] for measurements in taken]


def require_same_work(ours: Measurements, peers: Measurements) -> None:
    """Raises RuntimeError unless both sides were asked the same prompts, in the same tokens, as often."""
    for name in ("prompts", "prompt_tokens", "completions"):
        one, other = ([measurements[name] for measurements in side] for side in (ours, peers))
        if one != other:
            raise RuntimeError(f"the sides differ in their {name}: {one} and {other}")


def values(measurements: Measurements, name: str) -> list[float]:
    return [update[name] for update in measurements]


def per_token(measurements: Measurements) -> list[float]:
    """Seconds per completion token of each update."""
    return [update["seconds"] / update["sampled"] for update in measurements]


def phases(measurements: Measurements) -> str:
    """The median seconds of each phase that a side names, and of the rest."""
    from measuring import median

    names = sorted({name for update in measurements for name in update["phases"]})
    named = {
        name: median(update["phases"].get(name, 0.0) for update in measurements) for name in names
    }
    rest = median(update["seconds"] - sum(update["phases"].values()) for update in measurements)
    return ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in {**named, "the rest": rest}.items()
    )
