"""Runs `lagrpo` on a rank, then writes the most memory that this process ever had, in bytes.

torchrun --nproc-per-node 2 benchmarks/peak_of_rank.py train SETTINGS.toml

The file is $PEAK_OF_RANKS/RANK. bench_memory.py, bench_dry_run.py and bench_lora.py run it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lagrpo.__main__ import main
from lagrpo.machine import process_peak

# The reward workers import this file, too, and must not train.
if __name__ == "__main__":
    sys.argv[0] = "lagrpo"
    try:
        main()
    finally:
        # Not ru_maxrss, which begins with the memory of the process that started this one.
        peak = process_peak()
        path = Path(os.environ["PEAK_OF_RANKS"]) / os.environ.get("RANK", "0")
        path.write_text(str(peak), encoding="utf-8")
