"""Installs the wheel as a stranger would, and uses it: python tests/try_wheel.py (make check-wheel).

For each Python of 3.11 to 3.13 on the PATH, a fresh environment outside of the checkout, the wheel with extra [demo],
and from an empty directory `lagrpo --version`, `doctor`, and a demo of two batches. Other Pythons are named.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13")
SHORT = ("--schedule.batches", "2", "--evaluation.prompts", "2", "--evaluation.samples", "2", "--run.name", "tried")
DEADLINE = 1800  # seconds for each command


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch]
        subprocess.run(build, cwd=ROOT, check=True, timeout=DEADLINE)
        (wheel,) = Path(scratch).glob("*.whl")
        for name in PYTHONS:
            if (python := shutil.which(name)) is None:
                print(f"Not tried: {name} (it is not here)")
                continue
            try_with(python, wheel, Path(scratch) / name)


def try_with(python: str, wheel: Path, folder: Path) -> None:
    """Everything with one Python. Raises CalledProcessError or AssertionError for what does not work."""
    bin, empty = folder / "environment" / "bin", folder / "empty"
    empty.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        print("$", *words, flush=True)
        done = subprocess.run(
            words, cwd=empty, env=environment, check=True, timeout=DEADLINE, stdout=subprocess.PIPE, text=True
        )
        return done.stdout

    run(python, "-m", "venv", folder / "environment")
    run(bin / "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[demo]")
    print(run(bin / "lagrpo", "--version"))
    assert json.loads(run(bin / "lagrpo", "doctor", "--json"))["can_train"]
    print(run(bin / "lagrpo", "demo", *SHORT))
    assert (empty / "runs" / "tried" / "weights" / "final" / "model.safetensors").is_file()
    print(f"It works with {python}.", flush=True)


if __name__ == "__main__":
    main()
