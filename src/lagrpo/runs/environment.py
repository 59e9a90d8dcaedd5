"""The environment of a run: what is needed to repeat it, or to explain why a repetition differs."""

from __future__ import annotations

import datetime
import glob
import logging
import os
import platform
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lagrpo.errors import SettingsError, parse_json_object
from lagrpo.logs import HIDDEN, redact_values
from lagrpo.machine import VLLM_PYTHON, usable_cores
from lagrpo.runs.files import to_json, write_atomically
from lagrpo.types import JsonObject, JsonView

logger = logging.getLogger("lagrpo")

FILE = "environment.json"
PACKAGES = ("lagrpo", "torch", "transformers", "numpy", "datasets", "math-verify")


def collect_environment(device: str = "cpu") -> JsonObject:
    """Returns versions, machine, device, command line without secrets, and the time of the start.

    `cores` counts all cores, `cores_at_hand` those that this process can use. `git` describes the
    working directory. The time is in UTC.
    """
    import torch

    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
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


def command_line() -> str:
    """Returns the command of this process, without secrets."""
    words = redact_values([Path(sys.argv[0]).name, *sys.argv[1:]])
    return shlex.join(words).replace(shlex.quote(HIDDEN), HIDDEN)


def write_environment(run: Path, environment: JsonView) -> None:
    """Writes environment.json of a run."""
    write_atomically(run / FILE, to_json(environment, indent=2) + "\n")


def read_environment(run: Path) -> JsonObject:
    """Returns environment.json of a run; empty if there is none.

    Raises ValueError for a damaged one.
    """
    file = run / FILE
    if not file.exists():
        return {}
    try:
        return parse_json_object(file.read_bytes())
    except ValueError as error:
        advice = "remove it to resume as on another machine"
        raise ValueError(f"{file} is damaged ({error}): {advice}") from error


@contextmanager
def naming_start(run: Path | None) -> Iterator[None]:
    """Names the directory in which a run started if what the body looks for may lie there.

    Relative paths and modules in config.toml meant that directory. A SettingsError about one that
    is not here gets a sentence on it; a file of the same name here gets a warning. Without a run,
    nothing is named.
    """
    start = None
    if run is not None:
        start = read_environment(run).get("directory")
    if run is None or start is None or Path(start) == Path.cwd():
        yield
        return
    names = list(_relative_names(run))
    for _, file in names:
        there = os.path.join(start, file)
        if os.path.isfile(file) and os.path.isfile(there) and not os.path.samefile(file, there):
            logger.warning("%s: this directory's is read; the run used another, in %s", file, start)
    try:
        yield
    except SettingsError as error:
        for text, file in names:
            is_missing = text in str(error) and not os.path.exists(file)
            if is_missing and glob.glob(os.path.join(glob.escape(start), file)):
                problem = str(error).rstrip(".")
                raise SettingsError(
                    f"{problem}. The run started in {start}, which has {file}: go there first"
                ) from error
        raise


def _relative_names(run: Path) -> Iterator[tuple[str, str]]:
    """Yields the texts of config.toml that may name relative paths or modules, with the file."""
    config = (run / "config.toml").read_text(encoding="utf-8")
    values: list[object] = [tomllib.loads(config), VLLM_PYTHON]
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str) and value and not os.path.isabs(os.path.expanduser(value)):
            yield value, value
            # "package.module:name", or "gym:package.module:name"
            module = value.rpartition(":")[0].rpartition(":")[2].replace(".", "/")
            if module:
                yield value, f"{module}.py"
                yield value, f"{module}/__init__.py"


def git_state(directory: Path) -> JsonObject | None:
    """Returns {"commit": …, "dirty": …} of the repository around `directory`.

    Untracked files count as dirty, too. None without git, outside a repository, and before its
    first commit. A change inside a submodule is not seen.
    """
    try:
        filters_off = _turn_filters_off(directory)
        commit = _run_git(directory, "rev-parse", "HEAD")
        status = ("status", "--porcelain", "--ignore-submodules=dirty")
        changes = _run_git(directory, *status, variables=filters_off)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(changes)}


def _run_git(directory: Path, *words: str, variables: Mapping[str, str] | None = None) -> str:
    """Returns what git prints, with these environment variables.

    The config of a repository can name programs that git runs. Of these, only filters of file
    contents are left to `_turn_filters_off`.
    """
    # By default, status locks the index, and a killed run would leave the lock behind.
    command = ["git", "--no-optional-locks", "-C", str(directory)]
    command += ["-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words]
    # Missing objects would be fetched by ssh.
    no_fetch = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    completed = subprocess.run(
        command,
        env={**os.environ, **no_fetch, **(variables or {})},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=True,
        timeout=10,
    )
    return completed.stdout


def _turn_filters_off(directory: Path) -> dict[str, str]:
    """Returns variables by which git runs no filter that the repository's own config names.

    Filters of the user's config, such as Git LFS, stay.
    """
    query = ("config", "--show-scope", "--null", "--name-only", "--get-regexp", r"^filter\.")
    try:
        words = _run_git(directory, *query).split("\0")
    except subprocess.CalledProcessError:  # there is no filter
        return {}
    count = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
    variables: dict[str, str] = {}
    for scope, name in zip(words[0::2], words[1::2], strict=False):
        if scope not in ("local", "worktree"):
            continue
        # "required" decides if git fails without the filter; the others are programs.
        variables[f"GIT_CONFIG_KEY_{count}"] = name
        variables[f"GIT_CONFIG_VALUE_{count}"] = "false" if name.endswith(".required") else ""
        count += 1
    return variables | {"GIT_CONFIG_COUNT": str(count)}


def cpu_model() -> str:
    """Returns the name of the CPU as the system gives it.

    On x86 it has family and model: "AMD EPYC", which clouds show, names no model.
    """
    information = Path("/proc/cpuinfo")
    fields = {}
    if information.is_file():
        first_core = information.read_text(encoding="utf-8").partition("\n\n")[0]
        for line in first_core.splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    model_name = fields.get("model name")
    if not model_name:
        return platform.processor() or platform.machine()
    if "cpu family" in fields:
        return f"{model_name} (family {fields['cpu family']}, model {fields['model']})"
    return model_name


def package_version(package: str) -> str | None:
    """Returns the version of an installed package; None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
