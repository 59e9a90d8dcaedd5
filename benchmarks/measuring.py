"""Medians, spread, the machine, and the tables that a benchmark prints and keeps."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from processes import Program

from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.runs.environment import cpu_model, git_state

_SUBREAPER = 36  # an option of prctl(2)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """ "median (smallest … largest)"."""
    shown = [f"{value:.{digits}g}" for value in (median(values), min(values), max(values))]
    return f"{shown[0]}{unit} ({shown[1]} … {shown[2]})"


def ratio(upper: Sequence[float], lower: Sequence[float]) -> str:
    """The ratio of the medians, and the smallest and largest ratio of consecutive values."""
    pairs = [u / l for u, l in zip(upper, lower, strict=True)]  # noqa: E741
    return f"**{median(upper) / median(lower):.2f}** ({min(pairs):.2f} … {max(pairs):.2f})"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


class Load:
    """How much of the machine somebody else used while a benchmark ran: CPU time that is not of its programs. What they
    leave behind, such as a server's workers, becomes this process's (Linux), so that its time is counted too."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        self.at_start = os.getloadavg()[0]
        self._started, self._busy, self._own = (
            time.monotonic(),
            _busy_seconds(),
            sum(os.times()[:2]),
        )
        self._programs = 0.0

    def add(self, *programs: Program) -> None:
        """Count what programs have used; call it before they end."""
        self._programs += sum(program.cpu_seconds() for program in programs)

    def add_ended(self) -> None:
        """Count what programs have used that have ended, with all they started; where none was counted by `add`."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        self._programs += sum(os.times()[2:4])

    def others(self) -> float:
        """The share of all CPUs since the start."""
        own = self._programs + sum(os.times()[:2]) - self._own
        available = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        return max(0.0, _busy_seconds() - self._busy - own) / available


def _busy_seconds() -> float:
    """CPU time of all processes, and time that a hypervisor took, since the machine started."""
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def machine(threads: int, load: Load, peer: Mapping[str, str] | None = None) -> dict[str, str]:
    """Where, with which versions, and how idle the machine was otherwise."""
    commit = git_state(Path(__file__).parent)
    own = {name: importlib.metadata.version(name) for name in ("lagrpo", "torch", "transformers")}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = pick_device()
    dtype, why = pick_dtype("auto", device)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores, {gigabytes(memory)}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads of each side": str(threads),
        **({"GPU": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "dtype by default": f"{dtype} ({why})",
        "CPU time taken by others meanwhile": f"{load.others():.1%} (load average at the start: {load.at_start:.2f})",
        "versions": ", ".join(f"{name} {version}" for name, version in own.items()),
        "commit": f"{commit['commit'][:12]}{' and changes' if commit['dirty'] else ''}"
        if commit
        else "unknown",
        **(
            {"peer": ", ".join(f"{name} {version}" for name, version in peer.items())}
            if peer
            else {}
        ),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; the columns are the keys of the first row."""
    head = list(rows[0])
    lines = [
        head,
        ["---"] * len(head),
        *([str(row.get(column, "")) for column in head] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(page: Path, name: str, text: str) -> None:
    """Put a text between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a page. Raises ValueError where they
    are missing."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{page} has no lines {begin!r} and {end!r}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


class Report:
    """A Markdown page and the raw measurements beside it, written under `directory` as NAME.md and NAME.json; may be
    written again when there is more."""

    def __init__(self, name: str, title: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.parts, self.raw = [f"# {title}"], {}

    def text(self, text: str) -> None:
        self.parts.append(text)
        print(f"\n{text}", flush=True)

    def table(self, heading: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.text(f"## {heading}\n\n{table(rows)}")

    def write(self, machine: Mapping[str, str]) -> None:
        own = "## Machine\n\n" + table([{"": name, " ": value} for name, value in machine.items()])
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"{self.name}.md").write_text(
            "\n\n".join([*self.parts, own]) + "\n", encoding="utf-8"
        )
        raw = {"machine": dict(machine), **self.raw}
        (self.directory / f"{self.name}.json").write_text(
            json.dumps(raw, indent=1) + "\n", encoding="utf-8"
        )
        print(f"\n{own}\n\nWritten to {self.directory / self.name}.md and .json", flush=True)
