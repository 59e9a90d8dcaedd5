"""`lagrpo` on a rank, and at its end the most memory that this process ever had: a file PEAK_OF_RANKS/RANK.

torchrun --nproc-per-node 2 benchmarks/peak_of_rank.py train SETTINGS.toml

bench_memory.py runs it.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from lagrpo.__main__ import main

if __name__ == "__main__":  # not in the worker processes, which import this file
    sys.argv[0] = "lagrpo"
    try:
        main()
    finally:
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (Path(os.environ["PEAK_OF_RANKS"]) / os.environ.get("RANK", "0")).write_text(
            str(kilobytes * 1024), encoding="utf-8"
        )
