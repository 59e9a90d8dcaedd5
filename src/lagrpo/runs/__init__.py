"""What a run leaves on disk, and how it is read again. The layout and the schemas: docs/metrics.md."""

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import RunNotFoundError, load_evaluations, load_events, load_metrics, load_rollouts

__all__ = ["Run", "RunNotFoundError", "load_evaluations", "load_events", "load_metrics", "load_rollouts"]
