"""What a run leaves on disk, and how it is read again. The layout and the schemas: docs/metrics.md."""

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
