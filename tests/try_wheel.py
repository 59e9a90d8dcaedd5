"""Installs the wheel as a stranger would, and uses it: python tests/try_wheel.py (make
check-wheel).

For each Python of 3.11 to 3.13 on the PATH or among the versions of pyenv, a fresh environment
outside of the checkout, the wheel with extra [demo], and from an empty directory `lagrpo
--version`, `env`, and a demo of two batches. Pythons that are not here are named. With an argument,
such as 3.12, that version alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
SHORT = (
    "--schedule.batches",
    "2",
    "--eval.num_prompts",
    "2",
    "--eval.num_samples",
    "2",
    "--run.name",
    "tried",
)
DEADLINE = 1800  # seconds for each command


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch]
        subprocess.run(build, cwd=ROOT, check=True, timeout=DEADLINE)
        (wheel,) = Path(scratch).glob("*.whl")
        pythons = {version: find_python(version) for version in sys.argv[1:] or VERSIONS}
        for version in (version for version, python in pythons.items() if python is None):
            print(f"Not tried: Python {version} (it is not here)")
        with ThreadPoolExecutor(max_workers=2) as side_by_side:  # pip computes with one thread
            tried = [
                side_by_side.submit(try_with, python, wheel, Path(scratch) / version)
                for version, python in pythons.items()
                if python is not None
            ]
        for future in tried:
            future.result()


def find_python(version: str) -> str | None:
    """A Python of that version that starts: pyenv puts shims of all its versions on the PATH."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}"))),
    ]
    for python in filter(None, candidates):
        if (
            subprocess.run(
                [python, "-c", "import venv"], capture_output=True, timeout=DEADLINE
            ).returncode
            == 0
        ):
            return python
    return None


def try_with(python: str, wheel: Path, folder: Path) -> None:
    """Everything with one Python. Raises CalledProcessError or AssertionError for what does not
    work."""
    bin, empty = folder / "environment" / "bin", folder / "empty"
    empty.mkdir(parents=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        print("$", *words, flush=True)
        done = subprocess.run(
            words,
            cwd=empty,
            env=environment,
            check=True,
            timeout=DEADLINE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        )
        return done.stdout

    run(python, "-m", "venv", folder / "environment")
    run(
        bin / "pip",
        "install",
        "-q",
        "--no-compile",
        "-c",
        ROOT / "constraints.txt",
        f"{wheel}[demo]",
    )
    print(run(bin / "lagrpo", "--version"))
    print(run(bin / "lagrpo", "env"))
    print(run(bin / "lagrpo", "train", "demo", *SHORT))
    assert (empty / "runs" / "tried" / "weights" / "final" / "adapter_model.safetensors").is_file()
    print(f"It works with {python}.", flush=True)


if __name__ == "__main__":
    main()
