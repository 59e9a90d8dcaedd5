"""Runs `lagrpo`, then writes what sampling took: decoding steps and CPU seconds.

python benchmarks/steps_of_run.py train SETTINGS.toml

The file is $STEPS_OF_RUN, a JSON object with the seconds of the whole process beside those of
sampling. bench_schedules.py runs it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

from lagrpo.__main__ import main
from lagrpo.rollout.continuous import ContinuousBatch
from lagrpo.rollout.decoding import DecodingState
from lagrpo.rollout.rows import Row

counts = defaultdict[str, float](float)


def count_sampling() -> None:
    """From now on, counts the steps of training's completions, and the seconds they take."""
    step = ContinuousBatch.step
    compute_again = ContinuousBatch.compute_again

    def counted_step(self: ContinuousBatch) -> list[list[Row]]:
        began = time.process_time()
        ended = step(self)
        if self.params.purpose == "sample":
            counts["steps"] += 1
            counts["sampling_seconds"] += time.process_time() - began
        return ended

    def counted_again(self: ContinuousBatch, state: DecodingState) -> int:
        began = time.process_time()
        recomputed = compute_again(self, state)
        counts["recomputed"] += recomputed
        counts["recomputing_seconds"] += time.process_time() - began
        return recomputed

    ContinuousBatch.step = counted_step
    ContinuousBatch.compute_again = counted_again


# The reward workers import this file, too, and must not train.
if __name__ == "__main__":
    sys.argv[0] = "lagrpo"
    count_sampling()
    try:
        main()
    finally:
        counts["seconds"] = time.process_time()
        Path(os.environ["STEPS_OF_RUN"]).write_text(json.dumps(counts), encoding="utf-8")
