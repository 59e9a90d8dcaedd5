"""Medians, spread, the machine, and the tables that a benchmark prints and writes."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from processes import Program

from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.runs.environment import cpu_model, git_state, package_version
from lagrpo.types import JsonObject, JsonView

# prctl(2): children that lose their parent become children of this process.
PR_SET_CHILD_SUBREAPER = 36


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], unit: str = "", digits: int = 3) -> str:
    """The median with the smallest and the largest value: "median (smallest … largest)"."""
    middle = f"{median(values):.{digits}g}"
    smallest = f"{min(values):.{digits}g}"
    largest = f"{max(values):.{digits}g}"
    return f"{middle}{unit} ({smallest} … {largest})"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> str:
    """The ratio of the medians, and the smallest and largest ratio of consecutive values."""
    pairs = zip(numerators, denominators, strict=True)
    ratios = [numerator / denominator for numerator, denominator in pairs]
    medians_ratio = median(numerators) / median(denominators)
    return f"**{medians_ratio:.2f}** ({min(ratios):.2f} … {max(ratios):.2f})"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


class Load:
    """The share of the machine that other programs used while a benchmark ran.

    It is the CPU time of all processes less that of the benchmark and the programs it starts. Linux
    gives this process what those leave behind, such as a server's workers, so that their time is
    counted as the benchmark's.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.at_start = os.getloadavg()[0]
        self._start_time = time.monotonic()
        self._start_all_seconds = _busy_seconds()
        self._start_own_seconds = sum(os.times()[:2])
        self._program_seconds = 0.0

    def add(self, *programs: Program) -> None:
        """Counts what programs have used. Call it before they end."""
        self._program_seconds += sum(program.cpu_seconds() for program in programs)

    def add_ended(self) -> None:
        """Counts what programs have used that have ended, with all they started.

        May be called again when more have ended. For benchmarks that do not call `add`: together
        the two would count a program twice.
        """
        # The kernel adds the time of an ended child to ours only when it is waited for.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        self._program_seconds = sum(os.times()[2:4])

    def others(self) -> float:
        """The share of all CPUs that other programs used since the start."""
        own = self._program_seconds + sum(os.times()[:2]) - self._start_own_seconds
        available = (time.monotonic() - self._start_time) * (os.cpu_count() or 1)
        # Clocks tick in hundredths of a second, so that the difference may come out below 0.
        return max(0.0, _busy_seconds() - self._start_all_seconds - own) / available


def _busy_seconds() -> float:
    """CPU time of all processes, and time that a hypervisor took, since the machine started."""
    total_line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    ticks = [int(word) for word in total_line.split()[1:]]
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def machine(threads: int, load: Load, peer: Mapping[str, str] | None = None) -> dict[str, str]:
    """The machine, how idle it was otherwise, and versions. `peer`: those of the other side."""
    packages = ("lagrpo", "torch", "transformers")
    versions = {name: package_version(name) or "not installed" for name in packages}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = pick_device()
    dtype, dtype_reason = pick_dtype("auto", device)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores, {gigabytes(memory)}",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "threads of each side": str(threads),
    }
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
    facts["dtype by default"] = f"{dtype} ({dtype_reason})"
    facts["CPU time taken by others meanwhile"] = (
        f"{load.others():.1%} (load average at the start: {load.at_start:.2f})"
    )
    facts["versions"] = _name_versions(versions)
    facts["commit"] = _commit()
    if peer:
        facts["peer"] = _name_versions(peer)
    return facts


def _name_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _commit() -> str:
    state = git_state(Path(__file__).parent)
    if not state:
        return "unknown"
    suffix = " and changes" if state["dirty"] else ""
    return state["commit"][:12] + suffix


def table(rows: Sequence[JsonView]) -> str:
    """A Markdown table; the columns are the keys of the first row."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(page: Path, name: str, text: str) -> None:
    """Puts a text between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a page.

    Raises ValueError if the page does not have them.
    """
    begin = f"<!-- {name} -->"
    end = f"<!-- end of {name} -->"
    before, begin_line, remainder = page.read_text(encoding="utf-8").partition(begin)
    _, end_line, after = remainder.partition(end)
    if not (begin_line and end_line):
        raise ValueError(f"{page} has no lines {begin!r} and {end!r}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


class Report:
    """A Markdown page, and the raw measurements beside it.

    `write` writes NAME.md and NAME.json to `directory`; it may be called again when there is more.
    """

    def __init__(self, name: str, title: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.parts = [f"# {title}"]
        self.raw: JsonObject = {}

    def text(self, text: str) -> None:
        """Adds a paragraph and prints it."""
        self.parts.append(text)
        print(f"\n{text}", flush=True)

    def table(self, heading: str, rows: Sequence[JsonView]) -> None:
        self.text(f"## {heading}\n\n{table(rows)}")

    def write(self, machine: Mapping[str, str]) -> None:
        facts = [{"": name, " ": value} for name, value in machine.items()]
        machine_section = "## Machine\n\n" + table(facts)
        page = "\n\n".join([*self.parts, machine_section])
        raw = {"machine": dict(machine), **self.raw}
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / f"{self.name}.md").write_text(page + "\n", encoding="utf-8")
        raw_text = json.dumps(raw, indent=1)
        (self.directory / f"{self.name}.json").write_text(raw_text + "\n", encoding="utf-8")
        stem = self.directory / self.name
        print(f"\n{machine_section}\n\nWritten to {stem}.md and .json", flush=True)
