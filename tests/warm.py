"""Processes for tests, forked from one that has `preloaded`: a run imports most of it only on its
way, which takes five seconds of each process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

PATH = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, PATH)
)  # where the process that forks looks for it
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["preloaded"])
