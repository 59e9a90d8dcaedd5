"""The demo's batch on a machine that is idle otherwise, and beside a process that never stops computing. See README.md.

make bench-busy
python benchmarks/bench_busy.py --help
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from measuring import Load, Report, machine, median, ratio, spread
from processes import Program, Side
from sides import Measurements, start_ours, values
from work import SHORT, asked_for, common_options

OPENMPS_OWN = {
    "GOMP_SPINCOUNT": "300000"
}  # what GNU's OpenMP takes where nobody says how often to spin
HOG = [sys.executable, "-S", "-c", "while True: pass"]


def ways(threads: int, spins: list[int]) -> dict[str, tuple[int, dict[str, str]]]:
    """Threads and further environment variables by name; `spins`: further numbers of spins to try."""
    return {
        "as it is": (threads, {}),
        "OpenMP's own waiting": (threads, OPENMPS_OWN),
        "one thread": (1, {}),
        **{f"{count} spins": (threads, {"GOMP_SPINCOUNT": str(count)}) for count in spins},
    }


@dataclass
class Taken:
    """The updates of one way, without and with the other process."""

    idle: Measurements = field(default_factory=list)
    busy: Measurements = field(default_factory=list)


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="of counted updates, each without and with the process",
    )
    parser.add_argument(
        "--spins", type=int, nargs="*", default=[], help="further numbers of spins to try"
    )
    parser.add_argument(
        "--only", nargs="*", help='of the ways, such as "as it is" "one thread" (each holds 3 GB)'
    )
    return parser.parse_args()


def main() -> None:
    asked = options()
    work, load = asked_for(SHORT, asked), Load()
    chosen = {
        name: way
        for name, way in ways(asked.threads, asked.spins).items()
        if name in (asked.only or [name])
    }
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        auto = {"dtype": "auto"}
        sides = {
            name: running.enter_context(
                start_ours(f"{n}", work, Path(scratch), threads, variables=variables, model=auto)
            )
            for n, (name, (threads, variables)) in enumerate(chosen.items())
        }
        for side in sides.values():
            side.update()
        taken = measured(sides, asked.rounds, Path(scratch), load)
        load.add(*sides.values())
    report = Report("busy", "A machine that is not idle", asked.results)
    report.raw |= {name: vars(t) for name, t in taken.items()}
    report.text(
        f"{work.title}. Seconds per update: median, with the smallest and the largest, of {asked.rounds}; without "
        "another program, and beside `python -c 'while True: pass'`. A ratio is that of the medians, with the smallest "
        "and the largest of one round."
    )
    report.table("one busy process", [row(name, t) for name, t in taken.items()])
    if comparison := against_before(taken):
        report.text(comparison)
    report.write(machine(asked.threads, load))


def measured(sides: Mapping[str, Side], rounds: int, scratch: Path, load: Load) -> dict[str, Taken]:
    """In each round every way without the process, then every way with it; the order turns round by round."""
    taken = {name: Taken() for name in sides}
    for turn in range(rounds):
        for busy in (False, True):
            for name in list(sides)[:: -1 if turn % 2 else 1]:
                with Program("hog", HOG, scratch, {}) if busy else nullcontext() as hog:
                    update = sides[name].update()
                    load.add(*([hog] if hog else []))
                (taken[name].busy if busy else taken[name].idle).append(update)
                print(
                    f"  {name}, {'busy' if busy else 'idle'}: {update['seconds']:.2f} s", flush=True
                )
    return taken


def row(name: str, taken: Taken) -> dict[str, str]:
    idle, busy = (values(measurements, "seconds") for measurements in (taken.idle, taken.busy))
    return {
        "": name,
        "idle": spread(idle),
        "one busy process": spread(busy),
        "busy / idle": ratio(busy, idle),
        "threads": str(taken.idle[0]["threads"]),
    }


def against_before(taken: Mapping[str, Taken]) -> str | None:
    """The two targets: beside a busy process at most 3 times the idle time, and idle no slower than OpenMP's own."""
    ours, *others = taken
    if not others or ours != "as it is":
        return None
    best, before = values(taken[ours].idle, "seconds"), values(taken[others[0]].idle, "seconds")
    busy = median(values(taken[ours].busy, "seconds"))
    return (
        f"As it is beside {others[0]}: idle {ratio(best, before)} of its time. Beside a busy process {busy:.2f} s, "
        f"{busy / min(median(best), median(before)):.2f} of the faster idle time (target: at most 3)."
    )


if __name__ == "__main__":
    main()
