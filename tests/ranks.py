"""Several ranks in tests: processes with the environment that torchrun gives, forked from one process that has imported
everything. `run_on_ranks` calls a function on processes that stay for later calls, `together` makes a run."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from running import skip_curves_and_syncs
from warm import forks

from lagrpo.training.callbacks import Callback

DEADLINE = 180.0  # seconds for all ranks on a busy machine
GRACE = 20.0  # seconds for each of the others, when one has failed
LARGEST = 3  # ranks in a group
_staying: tuple[list[Any], list[Connection]] | None = None  # processes, and the connections to them
Prepare = Callable[[int], Sequence[Callback]]


class RankEndError(Exception):
    """A rank ended with an error; the text names its type first."""


def run_on_ranks(function: Callable[..., Any], *given: Any, size: int = 3) -> list[Any]:
    """What function(group, *given) returns on each rank of a group (gloo) of at most LARGEST. The function is one that
    can be imported; what it gets and returns is pickled. Raises AssertionError with what each said if one fails."""
    global _staying
    processes, ends = _staying = _staying or _start(LARGEST, _stay, b"")
    for end in ends[:size]:
        end.send_bytes(pickle.dumps((function, given, size)))
    found = _results(ends[:size])
    if any(one is None or isinstance(one, RankEndError) for one in found):
        _staying = None
        _kill(processes)
        raise AssertionError("\n\n".join(f"rank {rank}: {one!s:.5000}" for rank, one in enumerate(found)))
    return found


def together(size: int, settings: dict[str, Any], prepare: Prepare | None = None, resume: Any = None) -> list[Any]:
    """A run of `size` ranks: what each returns, RankEndError if it raises, None if it was killed. On every rank
    `prepare(rank)`, which must be importable, comes first, and gives its callbacks."""
    processes, ends = _start(size, _train, pickle.dumps((settings, prepare, resume)))
    try:
        return _results(ends)
    finally:
        _kill(processes)


def _start(size: int, work: Callable[..., Any], given: bytes) -> tuple[list[Any], list[Connection]]:
    """The processes, and what each of them sends its results by."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes, ends = [], list[Connection]()
    for rank in range(size):
        ours, theirs = forks.Pipe()
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {n: str(v) for n, v in place.items()}
        process = forks.Process(target=_be_rank, args=(theirs, environment, work, given), daemon=work is _stay)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    return processes, ends


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def _results(ends: Sequence[Connection]) -> list[Any]:
    found, deadline = [], DEADLINE
    for end in ends:
        found.append(_result(end, deadline))
        if isinstance(found[-1], RankEndError):
            deadline = GRACE
    return found


def _result(end: Connection, deadline: float) -> Any:
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(deadline) else RankEndError("nothing: it still runs")
    except EOFError:
        return None


def _be_rank(end: Connection, environment: dict[str, str], work: Callable[..., Any], given: bytes) -> None:
    os.environ |= environment
    work(end, given)


def _answer(end: Connection, call: Callable[[], Any]) -> None:
    """Send what the call returns or raises."""
    try:
        found = call()
    except BaseException as error:  # noqa: BLE001 - the test is told
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), traceback.format_exc()]
        found = RankEndError("\n".join(said))
    end.send_bytes(pickle.dumps(found))


def _stay(end: Connection, given: bytes) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = {size: dist.new_group(range(size)) for size in range(1, LARGEST + 1)}

    def call() -> Any:
        function, more, size = pickle.loads(asked)
        return function(groups[size], *more)

    with suppress(EOFError):  # the test process has ended
        while asked := end.recv_bytes():
            _answer(end, call)


def _train(end: Connection, given: bytes) -> None:
    from lagrpo.training import ranks
    from lagrpo.training.run import train

    def call() -> Any:
        settings, prepare, resume = pickle.loads(given)
        return train(settings, callbacks=prepare(int(os.environ["RANK"])) if prepare else (), resume=resume)

    skip_curves_and_syncs()
    ranks.TIMEOUT = timedelta(seconds=60)
    _answer(end, call)
