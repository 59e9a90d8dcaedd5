"""Write and read the files of a run. docs/metrics.md describes metrics, events and rollouts."""

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import RunNotFoundError, load_evaluations, load_events, load_metrics, load_rollouts

__all__ = ["Run", "RunNotFoundError", "load_evaluations", "load_events", "load_metrics", "load_rollouts"]
