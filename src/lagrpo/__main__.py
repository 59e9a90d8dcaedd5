"""`python -m lagrpo` is the `lagrpo` command."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # not in the worker processes, which import this file
    sys.argv[0] = "lagrpo"
    try:
        from lagrpo.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
