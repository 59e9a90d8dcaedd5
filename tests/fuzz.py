"""Draw inputs for every target of hostile.py until the time is over: make fuzz [OPTIONS="--seconds 600 --only NAME"].

Prints how many inputs of each target were taken and refused, and every failure with an input that shows it. The exit
code is 1 after a failure. An input that takes longer than LIMIT seconds is a failure, too. One that stops the process
itself, or hangs in C, is found again by the target and the seed that were printed last."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
import time
from collections import Counter
from typing import Any

import hypothesis
from hostile import TARGETS, UNHURRIED, policy

LIMIT = 10  # seconds for an input
ROUND = 100  # inputs of a target before the next one has its turn


class HangError(BaseException):
    """An input took too long. No Exception, so that hypothesis does not look for a smaller input that takes as long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long (60)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the first round (the time)")
    parser.add_argument("--only", choices=TARGETS, help="one target")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _hang)
    logging.disable()
    policy()  # takes longer than an input may
    counts, failures = fuzz([options.only] if options.only else list(TARGETS), options.seconds, options.seed)
    for name in counts:
        print(f"{name:<22} {counts[name][True]:>8,} taken  {counts[name][False]:>8,} refused")
    print(f"{sum(map(Counter.total, counts.values())):,} inputs, {len(failures)} failures")
    sys.exit(1 if failures else 0)


def fuzz(names: list[str], seconds: float, seed: int) -> tuple[dict[str, Counter[bool]], dict[tuple[str, str], str]]:
    """Counts by target and outcome, and the failures: (target, kind of error) -> input."""
    counts: dict[str, Counter[bool]] = {name: Counter() for name in names}
    failures: dict[tuple[str, str], str] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name in names:
            if time.monotonic() >= end:
                break
            print(f"{name} --seed {seed}", end="\033[K\r" if sys.stdout.isatty() else "\n", flush=True)
            _round(name, seed, counts[name], failures)
        seed += 1
    return counts, failures


def _round(name: str, seed: int, counts: Counter[bool], failures: dict[tuple[str, str], str]) -> None:
    last: list[Any] = [None]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=ROUND, database=None, deadline=None, report_multiple_bugs=False,
        suppress_health_check=UNHURRIED, verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(TARGETS[name].inputs)
    def check(value: Any) -> None:
        last[0] = value
        faulthandler.dump_traceback_later(6 * LIMIT, exit=True)
        signal.alarm(LIMIT)
        try:
            counts[TARGETS[name](value)] += 1
        finally:
            signal.alarm(0)

    try:
        check()
    except (Exception, HangError) as error:  # noqa: BLE001 - whatever it is, it is what we look for
        kind = f"{type(error).__name__}: {str(error)[:200]}"
        if (name, type(error).__name__) not in failures:
            print(f"FAILURE in {name} --seed {seed}: {kind}\n  input: {last[0]!r:.4000}", flush=True)
        failures.setdefault((name, type(error).__name__), repr(last[0]))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _hang(*_: Any) -> None:
    raise HangError(f"an input took more than {LIMIT} s")


if __name__ == "__main__":
    main()
