"""A whole update of lagrpo and of TRL: sampling, rewards, learning, and the rest. See README.md.

make bench-trl                       install TRL, compare losses and gradients, then measure
make bench-trl OPTIONS=--short       only the work short, three updates of each side: a few minutes
make bench-trl OPTIONS=--scan        find TRL's best settings on this machine first, and keep them
python benchmarks/bench_trl.py --help

On a GPU both sides compute there, and its memory is measured, too. Results are called trl-gpu.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
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
from work import (
    DTYPE,
    HASHED,
    LONG,
    MICRO_BATCH_TOKENS,
    ON_GPU,
    SHORT,
    WORKS,
    Work,
    apply_options,
    common_options,
    require_peer,
)

TrlSettings = dict[str, Any]
"""Arguments of work.trl: `per_device` and arguments of GRPOConfig."""

DEFAULT: TrlSettings = {"per_device": 32}
"""TRL's settings without a scan.

They mean bfloat16 autocast or float32 (work.DTYPE), no activation checkpointing, micro-batches of
32.
"""
DEFAULT_LONG: TrlSettings = {"per_device": 8}
"""The same for the long work.

There TRL needs 19 GB for a micro-batch of 32, more than a machine of 24 GB has free beside lagrpo.
"""
DEFAULT_GPU: TrlSettings = {"per_device": 128}
"""The same on a GPU: all completions of either work at once, which fits into 80 GB."""

SCANNED: dict[str, list[TrlSettings]] = {
    "completions in a micro-batch": [{"per_device": count} for count in (8, 16, 32, 64, 128)],
    "arithmetic": [
        {},
        {"bf16": False},
        {"bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}},
    ],
    "sampler": [{}, {"use_transformers_continuous_batching": True}],
    "activation checkpointing": [{}, {"gradient_checkpointing": True}],
}
"""The changes that a scan tries, kind by kind, each on the best settings so far.

Settings that leave TRL with weights in bfloat16 alone, without float32 masters, are shown but not
taken: they do other work. A step of 1e-5 is less than half the distance to the next bfloat16 number
for every weight above 0.004, so that most of an update is rounded away. Continuous batching with
bf16 is one of these settings, because it casts the weights.
"""


@dataclass(frozen=True)
class Comparison:
    """The updates of both sides, what computes lagrpo's forward pass, and TRL's versions."""

    ours: Measurements
    trl: Measurements
    computation: str
    versions: dict[str, str]


def parse_options() -> argparse.Namespace:
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
    parser.add_argument(
        "--short",
        action="store_true",
        help="as --work short --updates 3 --own-updates 0, unless these options say otherwise: "
        "a few minutes; writes trl-short.md and leaves trl.md",
    )
    options = parser.parse_args()
    if options.short:
        # As defaults, so that options of the command line still count.
        parser.set_defaults(work=[SHORT.name], updates=3, own_updates=0)
        options = parser.parse_args()
    return options


def main() -> None:
    options = parse_options()
    require_peer(options, "check-trl")
    works = [apply_options(WORKS[name], options) for name in options.work]
    if options.scan:
        for work in works:
            scan(options, work)
    load = Load()
    report_name = name_result("trl-short" if options.short else "trl")
    report = Report(report_name, "A whole update: ours and TRL", options.results)
    report.text(
        "Medians, with the smallest and the largest value. A ratio is that of the medians, with "
        "the smallest and the largest of consecutive updates; above 1, lagrpo is faster or smaller."
    )
    for work in works:
        settings = fit_micro_batches(work, options.trl or best_settings(options.results, work))
        report.text(
            f"# {work.title}\n\n"
            f"TRL: {describe(settings)}. Ours: {DTYPE}, micro-batches of {MICRO_BATCH_TOKENS} "
            "tokens."
        )
        rewards = (
            ("a reward that leaves no group without a signal", HASHED, options.updates),
            ("the task's own reward", work.judge, options.own_updates),
        )
        for reward_name, reward, updates in rewards:
            if updates == 0:
                continue
            compared = measure(options, work, settings, reward, updates, load)
            ours, trl = compared.ours, compared.trl
            heading = f"{work.name}, {reward_name}"
            report.raw[heading] = {
                "settings": settings,
                "ours": ours,
                "trl": trl,
                "computation of ours": compared.computation,
            }
            report.table(heading, rows(ours, trl))
            report.text(
                f"Ours: {phases(ours)}; computed by {compared.computation}.\n\nTRL: {phases(trl)}."
            )
            # Written after each comparison, so that a later one that fails loses nothing.
            report.write(machine(options.threads, load, compared.versions))


def measure(
    options: argparse.Namespace,
    work: Work,
    settings: TrlSettings,
    reward: str,
    updates: int,
    load: Load,
) -> Comparison:
    """Measures both sides in turn on the same prompts."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with (
            start_ours("ours", work, scratch, options.threads, reward=reward) as ours,
            start_trl(
                "trl",
                work,
                scratch,
                options.threads,
                python=options.peer,
                config=settings,
                reward=reward,
            ) as trl,
        ):
            our_updates, trl_updates = interleaved([ours, trl], options.warmup, updates)
            load.add(ours, trl)
    # A ratio of times means nothing if one side had shorter prompts.
    require_same_work(our_updates, trl_updates)
    return Comparison(our_updates, trl_updates, ours.facts["computation"], trl.facts["versions"])


def rows(ours: Measurements, trl: Measurements) -> list[dict[str, str]]:
    """The lines of a comparison."""
    our_peak = max(values(ours, "peak_bytes"))
    trl_peak = max(values(trl, "peak_bytes"))
    # 0 without a GPU.
    our_gpu_peak = max(values(ours, "gpu_peak_bytes"))
    trl_gpu_peak = max(values(trl, "gpu_peak_bytes"))
    gpu_rows = []
    if our_gpu_peak and trl_gpu_peak:
        gpu_rows.append(
            row(
                "most GPU memory allocated",
                gigabytes(our_gpu_peak),
                gigabytes(trl_gpu_peak),
                f"{trl_gpu_peak / our_gpu_peak:.2f}",
            )
        )
    return [
        row(
            "seconds per update",
            spread(values(ours, "seconds")),
            spread(values(trl, "seconds")),
            ratio(values(trl, "seconds"), values(ours, "seconds")),
        ),
        row(
            "milliseconds per completion token",
            spread([1000 * seconds for seconds in per_token(ours)]),
            spread([1000 * seconds for seconds in per_token(trl)]),
            ratio(per_token(trl), per_token(ours)),
        ),
        row(
            "completion tokens sampled",
            spread(values(ours, "sampled"), digits=4),
            spread(values(trl, "sampled"), digits=4),
        ),
        row(
            "completion tokens learned from",
            spread(values(ours, "learned"), digits=4),
            spread(values(trl, "learned"), digits=4),
        ),
        row(
            "groups with equal rewards",
            f"{fmean(values(ours, 'flat')):.0%}",
            f"{fmean(values(trl, 'flat')):.0%}",
        ),
        row(
            "most memory resident",
            gigabytes(our_peak),
            gigabytes(trl_peak),
            f"{trl_peak / our_peak:.2f}",
        ),
        *gpu_rows,
        row("updates measured", str(len(ours)), str(len(trl))),
    ]


def row(name: str, ours: str, trl: str, trl_by_ours: str = "") -> dict[str, str]:
    return {"": name, "ours": ours, "TRL": trl, "TRL / ours": trl_by_ours}


def scan(options: argparse.Namespace, work: Work) -> None:
    """Measures updates of TRL alone under other settings.

    The report keeps the best settings for this and later runs, see best_settings.
    """
    load = Load()
    versions = {}
    report = Report(name_scan(work), "TRL's settings: seconds per update", options.results)
    best = fit_micro_batches(work, DEFAULT_GPU if ON_GPU else DEFAULT)
    tried: dict[str, tuple[TrlSettings, Measurements]] = {}
    for variants in SCANNED.values():
        for settings in [best | variant for variant in variants]:
            is_new = describe(settings) not in tried
            # work.trl rejects micro-batches of different sizes.
            if is_new and work.completions % settings["per_device"] == 0:
                measurements, versions = measure_trl(options, work, settings, load)
                tried[describe(settings)] = (settings, measurements)
        # The next kind of change starts from the fastest settings so far.
        best = fastest_with_masters(tried.values())
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
                "most GPU memory allocated": gigabytes(max(values(measurements, "gpu_peak_bytes"))),
            }
            for name, (_, measurements) in tried.items()
        ],
    )
    report.text(f"Taken: {describe(best)}.")
    report.write(machine(options.threads, load, versions))


def fastest_with_masters(tried: Iterable[tuple[TrlSettings, Measurements]]) -> TrlSettings:
    """The fastest settings among those that leave TRL with float32 weights."""
    seconds_and_settings = [
        (median(values(measurements, "seconds")), settings)
        for settings, measurements in tried
        if measurements[-1]["weights"] == "torch.float32"
    ]
    _, best = min(seconds_and_settings, key=lambda pair: pair[0])
    return best


def measure_trl(
    options: argparse.Namespace, work: Work, settings: TrlSettings, load: Load
) -> tuple[Measurements, dict[str, str]]:
    """Measures updates of TRL alone. Also returns its versions."""
    print(f"  {describe(settings)}", flush=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_trl("trl", work, Path(scratch), options.threads, options.peer, settings) as trl,
    ):
        measurements = interleaved([trl], options.warmup, options.scan_updates)[0]
        load.add(trl)
        return measurements, trl.facts["versions"]


def fit_micro_batches(work: Work, settings: TrlSettings) -> TrlSettings:
    """The settings with micro-batches no larger than the batch."""
    return {**settings, "per_device": min(settings["per_device"], work.completions)}


def best_settings(results: Path, work: Work) -> TrlSettings:
    """The best settings of the last scan on this work, or the default."""
    path = results / f"{name_scan(work)}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["best"]
    if ON_GPU:
        return DEFAULT_GPU
    return DEFAULT_LONG if work.name == LONG.name else DEFAULT


def name_scan(work: Work) -> str:
    """Returns the name of a scan's result."""
    return name_result(f"trl-scan-{work.name}")


def name_result(name: str) -> str:
    """Returns the name under which a result is written: a GPU's stands beside a CPU's."""
    return f"{name}-gpu" if ON_GPU else name


def describe(settings: TrlSettings) -> str:
    """TRL's settings in words."""
    if settings.get("model_init_kwargs", {}).get("dtype") == "bfloat16":
        arithmetic = "bfloat16 throughout"
    elif settings.get("bf16", DTYPE == "bfloat16"):
        arithmetic = "bfloat16 autocast"
    else:
        arithmetic = "float32"
    if settings.get("use_transformers_continuous_batching"):
        sampler = "continuous batching"
    else:
        sampler = "transformers' generate"
    checkpointing = "on" if settings.get("gradient_checkpointing") else "off"
    return (
        f"micro-batches of {settings['per_device']} completions, {arithmetic}, {sampler}, "
        f"activation checkpointing {checkpointing}"
    )


if __name__ == "__main__":
    main()
