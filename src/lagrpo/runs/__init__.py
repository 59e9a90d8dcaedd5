"""Write and read the files of a run.

docs/run-files.md describes the files, docs/metrics.md the metrics.
"""

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import (
    RunNotFoundError,
    load_evaluations,
    load_events,
    load_metrics,
    load_rollouts,
)

__all__ = [
    "Run",
    "RunNotFoundError",
    "load_evaluations",
    "load_events",
    "load_metrics",
    "load_rollouts",
]
