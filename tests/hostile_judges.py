"""A judge that does to its process what no judge should, as the completion says. The gold answer is a directory: what
starts a process leaves its id there."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from lagrpo.tasks.base import Unjudgeable

FOREVER = 1e6
HOME = os.getcwd()
kept: list[Any] = []


class Mute(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class MuteUnjudgeable(Unjudgeable):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Slow:
    def __float__(self) -> float:
        time.sleep(FOREVER)
        return 1.0


def print_secret(place: Path, rest: str) -> float:
    """In one piece, in two writes, in the middle of an endless line, and at the end of one without a newline."""
    secret = os.environ["HF_TOKEN"]
    os.write(1, f"it is {secret}\n".encode() + secret[:5].encode())
    os.write(1, f"{secret[5:]}\n{'x' * 65_531}{secret}{'y' * 70_000}\n".encode())
    os.write(2, f"http://me:{secret}@host --api-key {secret}".encode())
    return 1.0


def return_secret(place: Path, rest: str) -> Any:
    secret = os.environ["HF_TOKEN"]
    return {"text": secret, "list": [1, {"deep": secret}], "long": "x" * 4090 + secret, "bytes": secret.encode()}[rest]


def raise_secrets(place: Path, rest: str) -> float:
    """So many that what is left of the text once they are hidden is short."""
    raise ValueError(os.environ["HF_TOKEN"] * 10_000)


def judge(text: str, gold: Any) -> Any:
    action, _, rest = text.partition(" ")
    return ACTIONS[action](Path(gold), rest) if action in ACTIONS else float(text == "7")


def end_by(place: Path, name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(FOREVER)


def end_group(place: Path, rest: str) -> None:
    os.killpg(0, signal.SIGKILL)


def ignore_signals(place: Path, rest: str) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(FOREVER)


def fork(place: Path, then: str) -> Any:
    """A child that keeps every file open; then returns, or ends as told."""
    before = count_ids(place)
    if os.fork() == 0:
        leave_id(place)
        time.sleep(FOREVER)
    wait_for_ids(place, before + 1)
    return ACTIONS[then](place, "1") if then else 1.0


def return_twice(place: Path, rest: str) -> float:
    before = count_ids(place)
    if os.fork() == 0:
        leave_id(place)
    else:
        wait_for_ids(place, before + 1)
    return 1.0


def daemonize(place: Path, then: str) -> Any:
    """A grandchild in a session of its own, with no file open and no directory; then as `fork`."""
    before = count_ids(place)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            leave_id(place)
            os.chdir("/")
            os.closerange(0, 1000)
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(FOREVER)
        os._exit(0)
    wait_for_ids(place, before + 1)
    return ACTIONS[then](place, "1") if then else 1.0


def start_program(place: Path, then: str) -> Any:
    """Another program without our environment."""
    program = subprocess.Popen(["/bin/sleep", "1000000"], env={}, start_new_session=True)
    (place / str(program.pid)).touch()
    return ACTIONS[then](place, "1") if then else 1.0


def flood(place: Path, pieces: str) -> float:
    """So many pieces of 60,000 bytes to each output; without a number, without an end."""
    piece = b"flood " * 10_000
    for _ in range(int(pieces)) if pieces else itertools.count():
        os.write(1, piece)
        os.write(2, piece)
    return 1.0


def write_file(place: Path, mebibytes: str) -> float:
    with open(place / "large", "wb") as file:
        for _ in range(int(mebibytes)):
            file.write(bytes(2**20))
    return 1.0


def fill(place: Path, mebibytes: str) -> float:
    kept.append(b"x" * (int(mebibytes) << 20))
    return 1.0


def fill_slowly(place: Path, rest: str) -> None:
    while True:
        kept.append(b"x" * 2**20)
        time.sleep(0.001)


def fill_shared(place: Path, rest: str) -> None:
    kept.append(mmap.mmap(-1, 2**30))
    for start in range(0, 2**30, 2**20):
        kept[-1][start : start + 2**20] = b"x" * 2**20
    time.sleep(FOREVER)


def fill_below(place: Path, rest: str) -> None:
    """Two children that take together what neither takes alone."""
    for _ in range(2):
        if os.fork() == 0:
            leave_id(place)
            kept.append(b"x" * (200 << 20))
            time.sleep(FOREVER)
    time.sleep(FOREVER)


def start_threads(place: Path, rest: str) -> float:
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(FOREVER,), daemon=True).start()
    return 1.0


def change_everything(place: Path, rest: str) -> float:
    os.chdir("/")
    os.environ.clear()
    os.environ["LAGRPO_HOSTILE"] = "1"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, end_at_once)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
        resource.setrlimit(limit, (0, resource.getrlimit(limit)[1]))
    return 1.0


def end_at_once(number: int, frame: Any) -> None:
    os._exit(1)


def look(place: Path, rest: str) -> float:
    """Whether the process is as it was."""
    time.sleep(0.4)
    (place / "look").write_text("7")
    kept.append(bytes(2**20))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)]
    same = os.getcwd() == HOME and "LAGRPO_HOSTILE" not in os.environ and "PATH" in os.environ
    return float(same and handlers == [signal.SIG_DFL] * 3)


def lower_limit(place: Path, rest: str) -> float:
    resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
    return 1.0


def close_files(place: Path, numbers: str) -> float:
    os.closerange(*map(int, numbers.split()))
    return 1.0


def leave_id(place: Path) -> None:
    (place / str(os.getpid())).touch()


def count_ids(place: Path) -> int:
    return sum(path.name.isdecimal() for path in place.iterdir())


def wait_for_ids(place: Path, count: int) -> None:
    """Until so many processes have left their ids."""
    while count_ids(place) < count:
        time.sleep(0.01)


def _raise(error: BaseException) -> None:
    raise error


ACTIONS: dict[str, Any] = {
    "print-secret": print_secret,
    "return-secret": return_secret,
    "raise-secrets": raise_secrets,
    "exit": lambda place, code: os._exit(int(code)),
    "hang": lambda place, rest: time.sleep(FOREVER),
    "spin": lambda place, rest: 7 ** (7**9),
    "signal": end_by,
    "killpg": end_group,
    "deaf": ignore_signals,
    "fork": fork,
    "return-twice": return_twice,
    "daemon": daemonize,
    "program": start_program,
    "flood": flood,
    "file": write_file,
    "fill": fill,
    "fill-slowly": fill_slowly,
    "fill-shared": fill_shared,
    "fill-below": fill_below,
    "threads": start_threads,
    "change": change_everything,
    "look": look,
    "lower": lower_limit,
    "close": close_files,
    "mute": lambda place, rest: _raise(Mute()),
    "mute-unjudgeable": lambda place, rest: _raise(MuteUnjudgeable()),
    "slow": lambda place, rest: Slow(),
}
