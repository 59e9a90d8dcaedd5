"""Runs `lagrpo` on a rank, then writes the most memory that this process ever had, in bytes.

torchrun --nproc-per-node 2 benchmarks/peak_of_rank.py train SETTINGS.toml

The file is $PEAK_OF_RANKS/RANK. bench_memory.py and bench_lora.py run it.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from lagrpo.__main__ import main

# The reward workers import this file, too, and must not train.
if __name__ == "__main__":
    sys.argv[0] = "lagrpo"
    try:
        main()
    finally:
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        path = Path(os.environ["PEAK_OF_RANKS"]) / os.environ.get("RANK", "0")
        path.write_text(str(kilobytes * 1024), encoding="utf-8")
