"""Where the files lie that are made once per machine: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$LAGRPO_CACHE, else $XDG_CACHE_HOME/lagrpo, else ~/.cache/lagrpo; read at every call."""
    if own := os.environ.get("LAGRPO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lagrpo"
