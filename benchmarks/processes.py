"""The programs that are measured.

Each is a process group of its own. It is stopped (SIGSTOP) while it is not its turn, so that
neither waiting threads nor background work of one program take time from another.
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
from typing import Self, cast

from wire import Update

from lagrpo.machine import WAIT_VARIABLES
from lagrpo.types import JsonObject

DEADLINE = 3600.0  # seconds for any one reply
HERE = Path(__file__).parent
CHECKOUT = HERE.parent
PR_SET_PDEATHSIG = 1  # prctl(2)


class Program:
    """A command in a process group of its own; what it prints goes to a file in `scratch`."""

    # Keeps standard output apart, for replies.
    piped = False

    def __init__(
        self, name: str, command: Sequence[object], scratch: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = scratch / f"{name}.log"
        # The driver has imported lagrpo, which sets how its own threads wait. A program must choose
        # for itself, as on the command line.
        inherited = {
            name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.piped else log,
                stderr=log,
                env=inherited | dict(environment),
                start_new_session=True,
                preexec_fn=_die_with_parent,
                encoding="utf-8",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the whole group, stopped or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets the program run inside the `with` block, and stops it after."""
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
        """The most memory that was resident, summed over the processes that exist now."""
        return sum(_kilobytes(path / "status", "VmHWM") for path in self.members()) * 1024

    def cpu_seconds(self) -> float:
        """CPU time of the group, ended children included."""
        # Fields 14 to 17 of proc(5): user and system time, then those of children waited for.
        ticks = sum(sum(map(int, _stat(path)[11:15])) for path in self.members())
        return ticks / os.sysconf("SC_CLK_TCK")

    def failed(self, event: str) -> RuntimeError:
        """An error that says what happened and shows the end of the log."""
        return RuntimeError(f"{self.name} {event}. The end of what it printed:\n{tail(self.log)}")


class Side(Program):
    """A program that answers requests (wire.py)."""

    piped = True

    def __init__(
        self, name: str, command: Sequence[object], scratch: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(name, command, scratch, environment)
        try:
            with self.running():
                # The program's first reply comes unasked, once it has loaded.
                self.facts = self._reply()
        except BaseException:
            # `with` calls __exit__ only if the constructor has returned.
            self.__exit__()
            raise

    def ask(self, do: str, **arguments: object) -> JsonObject:
        """Sends one request and returns its reply."""
        with self.running():
            assert self.process.stdin is not None
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
            return self._reply()

    def update(self) -> Update:
        """Makes one update and returns its measurements, with the peak of the memory so far."""
        measurements = self.ask("update")
        measurements["peak_bytes"] = self.peak_bytes()
        return cast(Update, measurements)

    def _reply(self) -> JsonObject:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if not waiting.select(DEADLINE):
                raise self.failed(f"did not answer within {DEADLINE:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.failed("ended")
        return cast(JsonObject, json.loads(line))


def _die_with_parent() -> None:
    """Makes Linux kill this process with its driver, which would leave it stopped forever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def train(
    file: Path,
    settings: Mapping[str, object],
    ranks: int,
    threads: int,
    program: Sequence[str] = ("-m", "lagrpo"),
    checkout: Path = CHECKOUT,
) -> None:
    """Runs `lagrpo train FILE` with these settings, under torchrun if there are several ranks.

    Each rank has `threads` threads. `program`: Python's arguments that start lagrpo, from the
    sources of `checkout`. Raises SystemExit with the end of the run's messages if it fails.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += [*program, "train", str(file)]
    for name, value in settings.items():
        # The command line takes booleans in lower case.
        text = str(value).lower() if isinstance(value, bool) else str(value)
        command += [f"--{name}", text]
    variables = {**os.environ, **environment(threads, checkout)}
    finished = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8")
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-2000:]}")


def train_with_peaks(
    file: Path, settings: Mapping[str, object], ranks: int, threads: int, scratch: Path
) -> list[int]:
    """Runs `train`. Returns the most memory that each rank ever had, in bytes."""
    peaks = scratch / "peaks"
    peaks.mkdir()
    os.environ["PEAK_OF_RANKS"] = str(peaks)  # peak_of_rank.py writes a file per rank there
    train(file, settings, ranks, threads, program=[str(HERE / "peak_of_rank.py")])
    return [int((peaks / str(rank)).read_text(encoding="utf-8")) for rank in range(ranks)]


def environment(threads: int, checkout: Path = CHECKOUT) -> dict[str, str]:
    """Environment variables of both programs: the same number of threads, nothing downloaded.

    They import lagrpo from `checkout`, whatever the user's PYTHONPATH has.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(checkout / "src"), os.environ.get("PYTHONPATH", "")]),
    }


def tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(errors="replace", encoding="utf-8").splitlines()[-lines:])


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat from the third on; zeros for a process that has ended."""
    try:
        # The second field, the name in parentheses, may contain spaces and parentheses.
        return (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 40


def _session(process: Path) -> int:
    # Field 6 of proc(5). Its number is the PID of the program that started the session.
    return int(_stat(process)[3])


def _kilobytes(status: Path, name: str) -> int:
    """An entry of /proc/PID/status; 0 if the process has ended."""
    try:
        lines = status.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
