"""`lagrpo plan` against runs: the parts of one run predict others, predicted beside measured. See README.md.

make bench-plan
python benchmarks/bench_plan.py --help

Each case is a whole run (`python -m lagrpo train`, with torchrun where it has several ranks) that differs from the base
in one thing. In every round all cases run in turn; the plan takes its rates from the base run of the same round alone.
The table goes to docs/scaling.md, too, unless the work is tiny.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from measuring import Load, Report, fill, machine, median, table
from processes import HERE, train
from work import RESULTS, SEED, common_options

from lagrpo.planning.measured import Measured
from lagrpo.planning.plan import make_plan
from lagrpo.settings.plan import PlanSettings

PAGE = HERE.parent / "docs" / "scaling.md"
PARTS = ("sampling", "learning", "sync", "total")
BASE = {"schedule": {"v": 1, "i": 1, "prompts": 4}, "sampling": {"G": 8, "max_tokens": 16, "max_prompt_tokens": 128}}
CASES: dict[str, dict[str, dict[str, int]]] = {
    "base": {},
    "v = 5": {"schedule": {"v": 5}},
    "v = 10": {"schedule": {"v": 10}},
    "16 prompts": {"schedule": {"prompts": 16}},
    "G = 32": {"sampling": {"G": 32}},
    "48 tokens": {"sampling": {"max_tokens": 48}},
    "i = 3": {"schedule": {"i": 3}},
    "v = 5, 16 prompts, i = 2": {"schedule": {"v": 5, "prompts": 16, "i": 2}},
}
QUICK = ("base", "v = 5", "16 prompts")


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--cycles", type=int, default=4, help="weight syncs of each run, the first not counted")
    parser.add_argument("--least", type=int, default=12, help="batches of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="numbers of ranks to predict, by torchrun")
    asked = parser.parse_args()
    if asked.quick:
        asked.cycles, asked.least, asked.rounds = 2, 3, 1
    return asked


def main() -> None:
    asked = options()
    load, report = Load(), Report("plan", "lagrpo plan: predicted beside measured", asked.results)
    cases = {name: (change, 1) for name, change in CASES.items() if not asked.quick or name in QUICK}
    cases |= {f"{ranks} ranks": ({}, ranks) for ranks in asked.ranks}
    rounds = []
    for turn in range(asked.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            rounds.append(one_round(asked, cases, Path(scratch)))
        print(f"round {turn + 1} of {asked.rounds}", flush=True)
    report.raw["rounds"] = rounds
    report.text(
        "Seconds of a batch, medians over the rounds: predicted from the base run of the same round / measured, and "
        "the error in percent. The base is what the rates were fitted to."
    )
    report.table("Predicted / measured", rows := [row(name, rounds) for name in cases])
    worst = [error(rounds, name, "total") for name in cases if name != "base"]
    report.text(
        f"Error of a whole batch: {median(map(abs, worst)):.0%} in the median of the cases, at most "
        f"{max(map(abs, worst)):.0%}."
    )
    load.add_ended()
    report.write(machine(asked.threads, load))
    if asked.results == RESULTS:
        fill(PAGE, "predicted beside measured", table(rows))


def one_round(asked: argparse.Namespace, cases: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """Every case run once and predicted: case -> part -> (predicted, measured) seconds."""
    runs = {}
    for name, (change, ranks) in cases.items():
        runs[name] = run(asked, name, change, ranks, scratch)
        print(f"  {name}: {runs[name].seconds['total']:.3g} s a batch", flush=True)
    base, found = runs["base"], {}
    for name, own in runs.items():
        given = PlanSettings(gpus=own.ranks, servers=0, from_run=str(base.path))
        seconds = make_plan(own.settings, given, base).best.seconds
        predicted = {**seconds.parts(), "total": seconds.total}
        predicted["learning"] += predicted["collectives"]
        found[name] = {part: (predicted[part], own.seconds[part]) for part in PARTS}
    return found


def run(asked: argparse.Namespace, name: str, change: Mapping[str, Any], ranks: int, scratch: Path) -> Measured:
    """A run of a case, read back."""
    plain = "".join(c if c.isalnum() else "-" for c in name)
    settings = scratch / f"{plain}.toml"
    settings.write_text(tomli_w.dumps(sections(asked, plain, change, ranks, scratch)))
    train(settings, {}, ranks, max(1, asked.threads // ranks))
    return Measured.read(str(scratch / "runs" / plain))


def sections(
    asked: argparse.Namespace, name: str, change: Mapping[str, Any], ranks: int, scratch: Path
) -> dict[str, Any]:
    """Settings of a case: addition, a policy that hardly moves, so that lengths and rewards stay what they are."""
    made = {section: {**values, **change.get(section, {})} for section, values in BASE.items()}
    v = made["schedule"]["v"]
    made["schedule"]["batches"] = max(asked.least, asked.cycles * v + v - 1)
    made["sampling"]["max_num_seqs"] = 512
    return made | {
        "run": {"directory": str(scratch / "runs"), "name": name, "seed": SEED, "display": "none",
                "save_weights": False, "keep_optimizer": False, "checkpoint_minutes": 0},
        "model": {"path": asked.model, "device": "cpu", "threads": max(1, asked.threads // ranks)},
        "task": {"name": "arithmetic", "operations": ["+"], "digits": 1},
        "objective": {"recipe": "grpo", "beta": 0.0},
        "optimizer": {"lr": 1e-7},
        "evaluation": {"before_and_after": False},
    }  # fmt: skip


def error(rounds: Sequence[Mapping[str, Any]], name: str, part: str) -> float:
    """Of the median prediction, as a share of the median measurement."""
    predicted, measured = (median(found[name][part][n] for found in rounds) for n in (0, 1))
    return predicted / measured - 1


def row(name: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    cells = {"run": name}
    for part in PARTS:
        predicted, measured = (median(found[name][part][n] for found in rounds) for n in (0, 1))
        cells[part] = f"{predicted:.3g} / {measured:.3g}" + (f" ({predicted / measured - 1:+.0%})" if measured else "")
    return cells


if __name__ == "__main__":
    main()
