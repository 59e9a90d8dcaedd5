"""The runs of a study that are missing: each a process of its own, several at a time, gone on with where they were.

A run is `lagrpo train` with `run.resume = "auto"`, so whatever ended a study, the next call goes on from the runs'
checkpoints. The processes end with the study's, also where that is killed: they get SIGTERM and write a checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lagrpo.backends.hardware import pick_device
from lagrpo.errors import SettingsError, refusing
from lagrpo.guard import end_with_parent
from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.runs.files import write_atomically
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import to_toml
from lagrpo.terminal.text import count_of
from lagrpo.threads import usable_cores
from lagrpo.training.checks import check_settings

ENDING = 300.0  # seconds in which a run that is to stop writes its checkpoint
PERIOD = 0.2  # seconds between two looks at the runs
SAID = 15  # lines of a failed run's log that are shown


@dataclass(frozen=True, slots=True)
class Planned:
    """A run: its settings, and where it is."""

    name: str
    settings: Settings
    path: Path

    @property
    def batches(self) -> int:
        return self.settings.schedule.stages * self.settings.schedule.batches

    @property
    def is_finished(self) -> bool:
        """Whether it has all batches and its last evaluation. Raises SettingsError for damaged records."""
        with refusing(f"run {self.name}"):
            if not (self.path / "config.toml").is_file() or len(load_metrics(self.path)) < self.batches:
                return False
            evaluated = {summary["name"] for summary in load_evaluations(self.path)}
        return "after" in evaluated or not self.settings.evaluation.before_and_after


@dataclass(slots=True)
class Running:
    """A run under way."""

    planned: Planned
    process: subprocess.Popen[bytes]
    slot: int
    log: Path


class RunsFailedError(RuntimeError):
    """Runs of the study failed; the others are done."""


def check_runs(planned: Sequence[Planned]) -> None:
    """Raise SettingsError for settings that cannot be run, and for a run in its place that was made with others."""
    for run in planned:
        try:
            check_settings(run.settings)
        except SettingsError as error:
            raise SettingsError(f"run {run.name}: {error}") from error
        if run.is_finished and (count := len(load_metrics(run.path))) > run.batches:
            raise SettingsError(
                f"run {run.name}: {run.path} has {count} batches, more than the {run.batches} asked for"
            )


def run_missing(planned: Sequence[Planned], directory: Path, jobs: int | None) -> None:
    """Make the runs that are not finished, `jobs` at a time. Raises RunsFailedError at the end for those that failed,
    SettingsError before the first for runs that cannot be made, and more at a time than there are cores or GPUs."""
    check_runs(planned)
    missing = [run for run in planned if not run.is_finished]
    if not missing:
        return
    slots = slots_of(missing[0].settings, jobs)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{count_of(len(missing), 'run')} of {len(planned)} to make, {len(slots)} at a time; logs: {directory / 'logs'}"
    )
    done, failed, waiting, under_way = len(planned) - len(missing), list[str](), list(missing), list[Running]()
    with _progress(console, len(planned)) as show, _ending(under_way):
        while waiting or under_way:
            free = sorted({*range(len(slots))} - {run.slot for run in under_way})
            under_way += [_start(waiting.pop(0), directory, slot, slots[slot]) for slot in free[: len(waiting)]]
            show(under_way, done)
            time.sleep(PERIOD)
            for run in [run for run in under_way if run.process.poll() is not None]:
                under_way.remove(run)
                done += run.planned.is_finished
                if not run.planned.is_finished:
                    failed.append(run.planned.name)
                    console.print(f"{run.planned.name} failed; the end of {run.log}:\n{_tail(run.log)}")
    if failed:
        said = f"{count_of(len(failed), 'run')} failed: {', '.join(failed)}"
        raise RunsFailedError(f"{said}. The same command tries them again")


def slots_of(settings: Settings, jobs: int | None) -> list[dict[str, str]]:
    """The environment of each place where a run can be: on a CPU its share of the cores, on GPUs one of them. By
    default as many as there are, with vLLM servers one."""
    threads = settings.model.threads
    if pick_device(settings.model.device).type == "cuda":
        import torch

        named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
        jobs = jobs or (1 if settings.sampling.sampler == "vllm" else len(devices))
        if jobs > len(devices):
            raise SettingsError(f"jobs = {jobs}: there are {count_of(len(devices), 'GPU')}")
        return [{"CUDA_VISIBLE_DEVICES": device} for device in devices[:jobs]]
    cores = usable_cores()
    jobs = jobs or (1 if settings.sampling.sampler == "vllm" else max(1, cores // (threads or 1)))
    if jobs > cores:
        raise SettingsError(f"jobs = {jobs}: there are {count_of(cores, 'core')}")
    return [{"OMP_NUM_THREADS": str(threads or cores // jobs)} for _ in range(jobs)]


def _start(run: Planned, directory: Path, slot: int, environment: Mapping[str, str]) -> Running:
    file, log = directory / "settings" / f"{run.name}.toml", directory / "logs" / f"{run.name}.log"
    write_atomically(file, to_toml(run.settings))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lagrpo", "train", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
    return Running(run, process, slot, log)


@contextmanager
def _ending(under_way: list[Running]) -> Iterator[None]:
    """Where the block is left early, have the runs under way write their checkpoints and end."""
    try:
        yield
    except BaseException:
        for run in under_way:
            with suppress(ProcessLookupError):
                os.kill(run.process.pid, signal.SIGTERM)
        end = time.monotonic() + ENDING
        for run in under_way:
            try:
                run.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(run.process.pid, signal.SIGKILL)
        raise


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Sequence[Running], int], None]]:
    """What shows the runs under way, called with them and how many are done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=total)

        def show(under_way: Sequence[Running], done: int) -> None:
            now = (f"{run.planned.name} {_batches(run.planned)}/{run.planned.batches}" for run in under_way)
            progress.update(bar, completed=done, description=", ".join(now) or "runs")

        yield show


def _batches(run: Planned) -> int:
    with suppress(OSError):
        return (run.path / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SAID:])
