"""The `lagrpo` command, also as `python -m lagrpo`.

This file loads next to nothing itself: Ctrl-C is answered in one line while the rest is loaded.
"""

from __future__ import annotations

import sys

from lagrpo.interrupts import find_interruption


def main() -> None:
    """Loads the command line and calls it."""
    try:
        from lagrpo.cli import main as run_command_line

        sys.exit(run_command_line())
    except SystemExit:
        # The reason is already printed, also for an interruption.
        raise
    except BaseException as error:
        interruption = find_interruption(error)
        if interruption is None:
            raise
        from lagrpo.logs import print_text, print_traceback

        print_traceback(error)
        print_text("\nlagrpo: interrupted", file=sys.stderr)
        # A KeyboardInterrupt has no signal: it is SIGINT, 2.
        sys.exit(128 + getattr(interruption, "signal", 2))


# Worker processes import this file under another name.
if __name__ == "__main__":
    sys.argv[0] = "lagrpo"
    main()
