"""Where a run ran: what one needs to repeat it, or to explain why a repetition differs."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lagrpo.logs import redact
from lagrpo.machine import usable_cores
from lagrpo.runs.files import to_json, write_atomically

FILE = "environment.json"
PACKAGES = ("lagrpo", "torch", "transformers", "numpy", "datasets", "math-verify")


def collect_environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, machine, cores (all, and those that this process can use), threads, device, git commit of the working
    directory (None outside a repository), command line without secrets, and the time of the start (UTC)."""
    import torch

    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": redact(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "directory": os.getcwd(),
        "git": git_state(Path.cwd()),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "cores_at_hand": usable_cores(),
        "threads": torch.get_num_threads(),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "cuda": torch.version.cuda,
    }


def write_environment(run: Path, environment: Mapping[str, Any]) -> None:
    """Write environment.json of a run."""
    write_atomically(run / FILE, to_json(environment, indent=2) + "\n")


def read_environment(run: Path) -> dict[str, Any]:
    """environment.json of a run; empty if there is none. Raises ValueError for a damaged one."""
    if not (run / FILE).exists():
        return {}
    try:
        return dict(json.loads((run / FILE).read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{run / FILE} is damaged ({error}): remove it to resume as on another machine"
        ) from error


def git_state(directory: Path) -> dict[str, Any] | None:
    """`{"commit": …, "dirty": …}` of the repository around `directory`; dirty also counts untracked files."""

    def git(
        *words: str,
    ) -> str:  # by default status locks the index, and a killed run would leave the lock behind
        command = ["git", "--no-optional-locks", "-C", str(directory), *words]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=10
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (
        OSError,
        subprocess.SubprocessError,
    ):  # no git, no repository, or a repository without a commit
        return None


def cpu_model() -> str:
    """The CPU's name as the system gives it. On x86 with family and model: a cloud's "AMD EPYC" names no model."""
    if (information := Path("/proc/cpuinfo")).is_file():
        lines = (
            line.partition(":")
            for line in information.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        )
        first = {field.strip(): value.strip() for field, _, value in lines}
        if name := first.get("model name"):
            return (
                f"{name} (family {first['cpu family']}, model {first['model']})"
                if "cpu family" in first
                else name
            )
    return platform.processor() or platform.machine()


def package_version(package: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
