"""The machine: system, processor, cores, memory, GPUs, disks. Loads no torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lagrpo.cache import cache_directory
from lagrpo.doctor.findings import Finding
from lagrpo.runs.directory import check_writable
from lagrpo.runs.environment import cpu_model
from lagrpo.threads import usable_cores

GB = 1e9
ROOM = 5.0  # GB: two checkpoints of the embedded model and its weights
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
UNLIMITED = 1 << 60  # control groups of version 1 write "no limit" as a number above this
NVIDIA = 20.0  # seconds for nvidia-smi


def look_at_system() -> Iterator[Finding]:
    yield Finding("system", f"{platform.platform()}, Python {platform.python_version()}")


def look_at_processor() -> Iterator[Finding]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    has = ", ".join(name for name in INSTRUCTIONS if name in flags)
    yield Finding("processor", cpu_model() + (f" ({has})" if has else ""))


def look_at_cores() -> Iterator[Finding]:
    yield Finding("cores", f"{usable_cores()} of {os.cpu_count()} for this process")


def look_at_memory() -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}
    total = sizes.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = f", {sizes['MemAvailable'] / GB:.1f} GB of it available" if "MemAvailable" in sizes else ""
    words = [path.read_text().strip() for path in LIMITS if path.is_file()]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < min(total, UNLIMITED)]
    limit = f"; the container allows {min(limits) / GB:.1f} GB" if limits else ""
    yield Finding("memory", f"{total / GB:.1f} GB{free}{limit}")


def look_at_gpus() -> Iterator[Finding]:
    """By the driver: what PyTorch makes of them stands in the other section."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("GPU", f"nvidia-smi does not answer ({error})", "absent", "training on a GPU", "nvidia-smi")
        return
    for line in done.stdout.splitlines():
        yield Finding("GPU", line.strip())


def look_at_disks() -> Iterator[Finding]:
    """Where runs go from here, and where converted models and compiled kernels are kept."""
    yield _look_at_disk("runs", Path("runs"), "broken", "lagrpo train … --run.directory DIRECTORY")
    yield _look_at_disk("cache", cache_directory(), "absent", "export LAGRPO_CACHE=DIRECTORY")


def _look_at_disk(name: str, folder: Path, without: str, remedy: str) -> Finding:
    state = "broken" if without == "broken" else "absent"
    purpose = "what a run leaves" if name == "runs" else "compiled kernels and the embedded model, made once"
    try:
        check_writable(folder)
    except OSError as error:
        return Finding(name, str(error), state, purpose, remedy)
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free / GB
    found = f"{folder.absolute()}: {free:.1f} GB free"
    if free < ROOM:
        return Finding(name, found, "absent", f"{purpose}: a checkpoint takes 12 bytes a parameter", remedy)
    return Finding(name, found)
