"""The demo's batch on an idle machine, and beside a process that never stops computing.

See README.md.

make bench-busy
python benchmarks/bench_busy.py --help
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from measuring import Load, Report, machine, median, ratio, spread
from processes import Program, Side
from sides import Measurements, start_ours, values
from work import SHORT, apply_options, common_options

# The default of GNU's OpenMP.
OPENMPS_OWN = {"GOMP_SPINCOUNT": "300000"}
HOG = [sys.executable, "-S", "-c", "while True: pass"]


def ways(threads: int, spins: list[int]) -> dict[str, tuple[int, dict[str, str]]]:
    """The ways to wait, by name: number of threads, and environment variables.

    `spins`: further numbers of spins to try.
    """
    by_name: dict[str, tuple[int, dict[str, str]]] = {
        "as it is": (threads, {}),
        "OpenMP's own waiting": (threads, OPENMPS_OWN),
        "one thread": (1, {}),
    }
    for count in spins:
        by_name[f"{count} spins"] = (threads, {"GOMP_SPINCOUNT": str(count)})
    return by_name


@dataclass
class Updates:
    """The updates of one way, without and with the other process."""

    idle: Measurements = field(default_factory=list)
    busy: Measurements = field(default_factory=list)


def parse_options() -> argparse.Namespace:
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
    options = parse_options()
    work = apply_options(SHORT, options)
    load = Load()
    all_ways = ways(options.threads, options.spins)
    names = [name for name in all_ways if not options.only or name in options.only]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        sides: dict[str, Side] = {}
        for number, name in enumerate(names):
            threads, variables = all_ways[name]
            side = start_ours(
                f"{number}",
                work,
                Path(scratch),
                threads,
                variables=variables,
                model={"dtype": "auto"},
            )
            sides[name] = running.enter_context(side)
        for side in sides.values():
            side.update()  # a warm-up
        updates = measure(sides, options.rounds, Path(scratch), load)
        load.add(*sides.values())
    report = Report("busy", "A machine that is not idle", options.results)
    report.raw |= {name: vars(way_updates) for name, way_updates in updates.items()}
    report.text(
        f"{work.title}. Seconds per update: median, with the smallest and the largest, of "
        f"{options.rounds}; without another program, and beside `python -c 'while True: pass'`. "
        "A ratio is that of the medians, with the smallest and the largest of one round."
    )
    rows = [row(name, way_updates) for name, way_updates in updates.items()]
    report.table("one busy process", rows)
    comparison = compare_with_next_way(updates)
    if comparison is not None:
        report.text(comparison)
    report.write(machine(options.threads, load))


def measure(
    sides: Mapping[str, Side], rounds: int, scratch: Path, load: Load
) -> dict[str, Updates]:
    """Makes each round's updates of every way without the process, then of every way with it.

    The order of the ways alternates, so that a slow change of the machine meets all alike.
    """
    updates = {name: Updates() for name in sides}
    for turn in range(rounds):
        names = list(sides)
        if turn % 2:
            names.reverse()
        for name in names:
            update = sides[name].update()
            updates[name].idle.append(update)
            print(f"  {name}, idle: {update['seconds']:.2f} s", flush=True)
        for name in names:
            with Program("hog", HOG, scratch, {}) as hog:
                update = sides[name].update()
                load.add(hog)
            updates[name].busy.append(update)
            print(f"  {name}, busy: {update['seconds']:.2f} s", flush=True)
    return updates


def row(name: str, updates: Updates) -> dict[str, str]:
    idle = values(updates.idle, "seconds")
    busy = values(updates.busy, "seconds")
    return {
        "": name,
        "idle": spread(idle),
        "one busy process": spread(busy),
        "busy / idle": ratio(busy, idle),
        "threads": str(updates.idle[0]["threads"]),
    }


def compare_with_next_way(updates: Mapping[str, Updates]) -> str | None:
    """The two targets, or None if there is no way to compare with.

    Beside a busy process an update takes at most 3 times the idle time, and idle it is no slower
    than with OpenMP's own waiting, the second way.
    """
    first, *others = updates
    if first != "as it is" or not others:
        return None
    idle = values(updates[first].idle, "seconds")
    idle_of_other = values(updates[others[0]].idle, "seconds")
    busy = median(values(updates[first].busy, "seconds"))
    faster_idle = min(median(idle), median(idle_of_other))
    return (
        f"As it is beside {others[0]}: idle {ratio(idle, idle_of_other)} of its time. "
        f"Beside a busy process {busy:.2f} s, "
        f"{busy / faster_idle:.2f} of the faster idle time (target: at most 3)."
    )


if __name__ == "__main__":
    main()
