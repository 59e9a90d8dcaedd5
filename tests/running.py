"""Runs of a tiny model, for the tests of what runs do: settings that make one in a fraction of a
second."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import quick_workers

from lagrpo.lifecycle.callbacks import Callback
from lagrpo.rewards import processes
from lagrpo.runs import directory, environment, files, plots
from lagrpo.settings.load import flatten
from lagrpo.terminal.display import Display
from lagrpo.types import JsonObject

TIMINGS = ("time/", "tokens_per_s/")

Section = JsonObject
"""The settings of a section by their names, such as {"batches": 3}."""


def tiny_settings(model: Path, root: Path, /, **sections: Section) -> dict[str, Section]:
    """Four completions of at most six tokens for each of two prompts, three batches, two test
    prompts."""
    base: dict[str, Section] = {
        "run": {"output_dir": str(root), "seed": 3},
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"name": "sample_task:load"},
        "rollout": {"num_generations": 4, "max_completion_length": 6, "max_prompt_length": 64},
        "schedule": {"prompts_per_batch": 2, "batches": 3},
        "optimizer": {"learning_rate": 1e-2},
        "eval": {"num_prompts": 2, "num_samples": 3},
    }
    return {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}


def skip_curves_and_syncs() -> None:
    """Runs of this process draw no reward.png, do not wait for the disk, fork their reward workers,
    and ask once for git's state and for versions of packages: half of the time of a tiny run."""
    files.sync_to_disk = lambda path: None
    directory.sync_to_disk = files.sync_to_disk
    environment.git_state = cache(environment.git_state)
    environment.package_version = cache(environment.package_version)
    processes._start = quick_workers.QuickWorker  # pyright: ignore[reportAttributeAccessIssue]
    plots.reward_curve = lambda run_dir: Path(str(run_dir)) / "reward.png"


def options(settings: dict[str, JsonObject]) -> list[str]:
    """The same for the command line."""
    flat_settings = flatten(settings)
    texts = {
        name: value if isinstance(value, list | tuple) else [value]
        for name, value in flat_settings.items()
    }
    words_by_name = {
        name: [str(one).lower() if isinstance(one, bool) else str(one) for one in texts[name]]
        for name in texts
    }
    return [word for name, words in words_by_name.items() for word in (f"--{name}", *words)]


def without_timings(metrics: list[JsonObject]) -> list[JsonObject]:
    return [{k: v for k, v in line.items() if not k.startswith(TIMINGS)} for line in metrics]


_known: set[BaseProcess] = set()


def note_processes() -> None:
    """From now on `children` leaves out the processes that are there now: policies of earlier tests
    may hold some."""
    _known.clear()
    _known.update(multiprocessing.active_children())


def children() -> set[BaseProcess]:
    """Processes that this test started and that are still there."""
    return set(multiprocessing.active_children()) - _known


def leftovers(root: Path) -> list[str]:
    """Temporary files, and processes that this test started and that are still there."""
    return [str(path) for path in root.rglob("*.tmp")] + [str(p) for p in children()]


class SendSignal(Callback):
    """Sends a signal to a process in the first phase of this name after so many batches."""

    def __init__(self, phase: str, number: int, pid: Callable[[], int], after: int) -> None:
        self.wanted, self.number, self.pid, self.after, self.batches = phase, number, pid, after, 0
        Display.phase = lambda display, name: self.phase(name)  # type: ignore[method-assign]

    def phase(self, name: str) -> None:
        if name == self.wanted and self.batches >= self.after:
            self.wanted = ""
            os.kill(self.pid(), self.number)

    def on_batch(self, metrics, rollouts) -> None:
        self.batches = metrics["step"]
