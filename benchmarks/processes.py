"""The programs that are measured: each a process group of its own, stopped (SIGSTOP) while it is not its turn, so that
neither waiting threads nor background work of one take time from the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lagrpo.machine import WAIT_VARIABLES

DEADLINE = 3600.0  # seconds for any one reply
HERE = Path(__file__).parent
SOURCES = HERE.parent / "src"


class Program:
    """A command in a process group of its own; what it prints goes to a file in `scratch`."""

    piped = False  # whether standard output is kept apart, for replies

    def __init__(
        self, name: str, command: Sequence[Any], scratch: Path, environment: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, scratch / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.piped else log,
                stderr=log,
                env={
                    name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES
                }
                | dict(environment),
                start_new_session=True,
                preexec_fn=_die_with_parent,
                encoding="utf-8",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the whole group, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, it is this program's turn."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGSTOP)

    def members(self) -> list[Path]:
        """/proc/PID of the processes of the group."""
        return [path for path in Path("/proc").glob("[0-9]*") if _session(path) == self.process.pid]

    def peak_bytes(self) -> int:
        """The most memory that was resident, summed over the processes that are there."""
        return sum(_kilobytes(path / "status", "VmHWM") for path in self.members()) * 1024

    def cpu_seconds(self) -> float:
        """CPU time of the group, ended children included."""
        ticks = sum(sum(map(int, _stat(path)[11:15])) for path in self.members())
        return ticks / os.sysconf("SC_CLK_TCK")

    def failed(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self.name} {what}. The end of what it printed:\n{tail(self.log)}")


class Side(Program):
    """A program that answers requests (wire.py)."""

    piped = True

    def __init__(
        self, name: str, command: Sequence[Any], scratch: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(name, command, scratch, environment)
        try:
            with self.running():
                self.facts = self._reply()
        except BaseException:
            self.__exit__()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One request and its reply."""
        with self.running():
            assert self.process.stdin is not None
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
            return self._reply()

    def update(self) -> dict[str, Any]:
        """The metrics of one update, and the peak of the memory so far."""
        return {**self.ask("update"), "peak_bytes": self.peak_bytes()}

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if not waiting.select(DEADLINE):
                raise self.failed(f"did not answer within {DEADLINE:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.failed("ended")
        return json.loads(line)


def _die_with_parent() -> None:
    """A driver that was killed leaves no stopped program behind (PR_SET_PDEATHSIG, Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def train(
    file: Path,
    settings: Mapping[str, Any],
    ranks: int,
    threads: int,
    program: Sequence[str] = ("-m", "lagrpo"),
) -> None:
    """`lagrpo train FILE` with these settings, by torchrun where there are several ranks, each with so many threads.
    Ends the benchmark with what the program said where that fails."""
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in settings.items()
    }
    words = [word for name, text in texts.items() for word in (f"--{name}", text)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, *program, "train", str(file), *words]
    done = subprocess.run(
        command, env={**os.environ, **environment(threads)}, capture_output=True, encoding="utf-8"
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def environment(threads: int) -> dict[str, str]:
    """What both programs run under: the same number of threads, nothing fetched."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")]),
    }


def tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(errors="replace", encoding="utf-8").splitlines()[-lines:])


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat from the third on; none for a process that has gone."""
    try:
        return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 40


def _session(process: Path) -> int:
    return int(_stat(process)[3])


def _kilobytes(status: Path, name: str) -> int:
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
