"""What a run leaves on disk, and how it is read again. The layout and the schemas: docs/metrics.md.

files.py     atomic writes, JSON without NaN               environment.py  versions, machine, git commit, command line
directory.py Run: the directory and what is put into it    reading.py      metrics, rollouts and evaluations of a run
rollouts.py  one row per completion, as Parquet            plots.py        the reward curve
checkpoints.py  state.py  what a run goes on from          lock.py         one process writes into a run
"""

from __future__ import annotations

from lagrpo.runs.directory import Run, RunExistsError
from lagrpo.runs.environment import collect_environment
from lagrpo.runs.reading import RunNotFoundError, load_evaluations, load_events, load_metrics, load_rollouts

__all__ = [
    "Run",
    "RunExistsError",
    "RunNotFoundError",
    "collect_environment",
    "load_evaluations",
    "load_events",
    "load_metrics",
    "load_rollouts",
]
