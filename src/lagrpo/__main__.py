"""The `lagrpo` command, also as `python -m lagrpo`. It loads next to nothing itself, so that Ctrl-C is answered in one
line while the rest is loaded."""

from __future__ import annotations

import sys

from lagrpo.interrupts import find_interruption


def main() -> None:
    """Load the command line and call it."""
    try:
        from lagrpo.cli import main as run

        run()
    except SystemExit:  # the reason is already printed, also for an interruption
        raise
    except BaseException as error:
        if (stop := find_interruption(error)) is None:
            raise
        from lagrpo.logs import print_traceback

        print_traceback(error)
        print("\nlagrpo: interrupted", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))


if __name__ == "__main__":  # not in the worker processes, which import this file
    sys.argv[0] = "lagrpo"
    main()
