"""A whole update of ours and of TRL: sampling, rewards, learning, and the rest. See README.md.

make bench-trl                       install TRL, compare losses and gradients, then measure
make bench-trl OPTIONS=--scan        look for TRL's best settings on this machine first, and keep them
python benchmarks/bench_trl.py --help
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from measuring import Load, Report, gigabytes, machine, median, ratio, spread
from sides import (
    Measurements,
    interleaved,
    per_token,
    phases,
    require_same_work,
    start_ours,
    start_trl,
    values,
)
from work import DTYPE, HASHED, LONG, WORKS, Work, asked_for, common_options, require_peer

DEFAULT: dict[str, Any] = {"per_device": 32}
"""TRL's settings without a scan: bfloat16 autocast or float32 (work.DTYPE), no activation checkpointing, micro-batches
of 32."""
DEFAULT_LONG: dict[str, Any] = {"per_device": 8}
"""The same for the long work, of which TRL wants 19 GB for a micro-batch of 32, more than 24 GB leave beside ours."""

SCANNED: dict[str, list[dict[str, Any]]] = {
    "completions in a micro-batch": [{"per_device": count} for count in (8, 16, 32, 64, 128)],
    "arithmetic": [
        {},
        {"bf16": False},
        {"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}},
    ],
    "sampler": [{}, {"use_transformers_continuous_batching": True}],
    "activation checkpointing": [{}, {"gradient_checkpointing": True}],
}
"""What a scan varies, one after the other, each at the best of those before it.

Settings that leave TRL with weights in bfloat16 alone, without float32 masters, are shown but not taken: they are other
work. A step of 1e-5 is less than half the distance to the next bfloat16 number for every weight above 0.004, so that
most of an update is rounded away. Continuous batching is among them when it goes with bf16: it casts the weights."""


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--peer", type=Path, default=Path(".venv-trl/bin/python"), help="a Python that has TRL"
    )
    parser.add_argument("--work", nargs="*", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--updates", type=int, default=5, help="of each side, with the reward of the headline"
    )
    parser.add_argument(
        "--own-updates", type=int, default=3, help="of each side, with the task's own reward"
    )
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--trl",
        type=json.loads,
        help='settings of TRL, such as {"per_device": 64}; else the scan\'s',
    )
    parser.add_argument("--scan", action="store_true", help="look for TRL's best settings first")
    parser.add_argument("--scan-updates", type=int, default=2, help="with each of the settings")
    return parser.parse_args()


def main() -> None:
    asked = options()
    require_peer(asked, "check-trl")
    works = [asked_for(WORKS[name], asked) for name in asked.work]
    for work in works if asked.scan else ():
        scan(asked, work)
    load, versions = Load(), {}
    report = Report("trl", "A whole update: ours and TRL", asked.results)
    report.text(
        "Medians, with the smallest and the largest value. A ratio is that of the medians, with the smallest and the "
        "largest of consecutive updates; above 1, lagrpo is faster or smaller."
    )
    for work in works:
        settings = fitting(work, asked.trl or best_settings(asked.results, work))
        report.text(
            f"# {work.title}\n\nTRL: {described(settings)}. Ours: {DTYPE}, micro-batches of 4096 tokens."
        )
        for name, reward, updates in (
            ("a reward that leaves no group without a signal", HASHED, asked.updates),
            ("the task's own reward", work.judge, asked.own_updates),
        ):
            if updates:
                ours, trl, versions = compared(asked, work, settings, reward, updates, load)
                report.raw[f"{work.name}, {name}"] = {
                    "settings": settings,
                    "ours": ours,
                    "trl": trl,
                }
                report.table(f"{work.name}, {name}", rows(ours, trl))
                report.text(f"Ours: {phases(ours)}.\n\nTRL: {phases(trl)}.")
                report.write(
                    machine(asked.threads, load, versions)
                )  # kept, whatever the next one does


def compared(
    asked: argparse.Namespace,
    work: Work,
    settings: dict[str, Any],
    reward: str,
    updates: int,
    load: Load,
) -> tuple[Measurements, Measurements, dict[str, str]]:
    """Both sides in turn on the same prompts; and TRL's versions."""
    with tempfile.TemporaryDirectory() as scratch:
        place = (work, Path(scratch), asked.threads)
        with (
            start_ours("ours", *place, reward=reward) as ours,
            start_trl("trl", *place, python=asked.peer, config=settings, reward=reward) as trl,
        ):
            own, theirs = interleaved([ours, trl], asked.warmup, updates)
            load.add(ours, trl)
    require_same_work(own, theirs)
    return own, theirs, trl.facts["versions"]


def rows(ours: Measurements, trl: Measurements) -> list[dict[str, Any]]:
    """The lines of a comparison."""
    lines: list[tuple[str, ...]] = [
        (
            "seconds per update",
            spread(values(ours, "seconds")),
            spread(values(trl, "seconds")),
            ratio(values(trl, "seconds"), values(ours, "seconds")),
        ),
        (
            "milliseconds per completion token",
            *(spread([1000 * x for x in per_token(side)]) for side in (ours, trl)),
            ratio(per_token(trl), per_token(ours)),
        ),
        (
            "completion tokens sampled",
            *(spread(values(side, "sampled"), digits=4) for side in (ours, trl)),
            "",
        ),
        (
            "completion tokens learned from",
            *(spread(values(side, "learned"), digits=4) for side in (ours, trl)),
            "",
        ),
        (
            "groups with equal rewards",
            *(f"{sum(values(s, 'flat')) / len(s):.0%}" for s in (ours, trl)),
            "",
        ),
        (
            "most memory resident",
            *(gigabytes(max(values(side, "peak_bytes"))) for side in (ours, trl)),
            f"{max(values(trl, 'peak_bytes')) / max(values(ours, 'peak_bytes')):.2f}",
        ),
        ("updates measured", str(len(ours)), str(len(trl)), ""),
    ]
    return [dict(zip(("", "ours", "TRL", "TRL / ours"), line, strict=True)) for line in lines]


def scan(asked: argparse.Namespace, work: Work) -> None:
    """TRL alone: what its update costs under other settings, and the best of them, kept for this and later runs."""
    load, versions = Load(), {}
    report = Report(f"trl-scan-{work.name}", "TRL's settings: seconds per update", asked.results)
    best, tried = fitting(work, DEFAULT), {}
    for variants in SCANNED.values():
        for settings in (best | variant for variant in variants):
            if described(settings) not in tried and work.completions % settings["per_device"] == 0:
                measurements, versions = alone(asked, work, settings, load)
                tried[described(settings)] = settings, measurements
        masters = [t for t in tried.values() if t[1][-1]["weights"] == "torch.float32"]
        best, _ = min(masters, key=lambda t: median(values(t[1], "seconds")))
    report.raw["best"] = best
    report.raw["tried"] = list(tried.values())
    report.table(
        work.title,
        [
            {
                "TRL's settings": name,
                "seconds per update": spread(values(measurements, "seconds")),
                "weights": measurements[-1]["weights"].removeprefix("torch."),
                "most memory resident": gigabytes(max(values(measurements, "peak_bytes"))),
            }
            for name, (_, measurements) in tried.items()
        ],
    )
    report.text(f"Taken: {described(best)}.")
    report.write(machine(asked.threads, load, versions))


def alone(
    asked: argparse.Namespace, work: Work, settings: dict[str, Any], load: Load
) -> tuple[Measurements, dict[str, str]]:
    """Updates of TRL; and its versions."""
    print(f"  {described(settings)}", flush=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_trl("trl", work, Path(scratch), asked.threads, asked.peer, settings) as trl,
    ):
        measurements = interleaved([trl], asked.warmup, asked.scan_updates)[0]
        load.add(trl)
        return measurements, trl.facts["versions"]


def fitting(work: Work, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, in micro-batches that the work is not too small for."""
    return {**settings, "per_device": min(settings["per_device"], work.completions)}


def best_settings(results: Path, work: Work) -> dict[str, Any]:
    """Those that the last scan on this work found, else the default."""
    path = results / f"trl-scan-{work.name}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["best"]
    return DEFAULT_LONG if work.name == LONG.name else DEFAULT


def described(settings: dict[str, Any]) -> str:
    """TRL's settings in words."""
    throughout = settings.get("model_init_kwargs", {}).get("dtype") == "bfloat16"
    autocast = settings.get("bf16", DTYPE == "bfloat16")
    words = [
        f"micro-batches of {settings['per_device']} completions",
        "bfloat16 throughout" if throughout else "bfloat16 autocast" if autocast else "float32",
        "continuous batching"
        if settings.get("use_transformers_continuous_batching")
        else "transformers' generate",
        f"activation checkpointing {'on' if settings.get('gradient_checkpointing') else 'off'}",
    ]
    return ", ".join(words)


if __name__ == "__main__":
    main()
