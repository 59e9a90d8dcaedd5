"""Trackers: TensorBoard, W&B, trackio and MLflow, told of a run by a process that follows its files.

tracker.py   what a tracker is asked to do    to_wandb.py and so on     one each
standing.py  what a tracker has of a run      following.py   what it lacks, read from the run's files
serving.py   the process of a tracker         observer.py    starts the processes, hears what they say, ends them
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from lagrpo.errors import SettingsError

TRACKERS = {
    "tensorboard": "lagrpo.trackers.to_tensorboard:TensorBoard",
    "wandb": "lagrpo.trackers.to_wandb:Wandb",
    "trackio": "lagrpo.trackers.to_trackio:Trackio",
    "mlflow": "lagrpo.trackers.to_mlflow:Mlflow",
}
"""Each tracker by the name of its package, which is also the name of its extra."""


def check_installed(names: Iterable[str]) -> None:
    """Raise SettingsError for a tracker whose package is not there. Nothing is imported."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin: a directory of that name, such as W&B makes
            raise SettingsError(f"run.trackers names {name}, which is not installed: pip install 'lagrpo[{name}]'")
