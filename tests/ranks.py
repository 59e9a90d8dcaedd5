"""Several ranks in tests: processes with the environment that torchrun gives, forked from one process that has imported
everything. `run_on_ranks` calls a function on each of them, `together` makes a run."""

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

from warm import forks

from lagrpo.training.callbacks import Callback

DEADLINE = 180.0  # seconds for all ranks on a busy machine
GRACE = 20.0  # seconds for each of the others, when one has failed
Prepare = Callable[[int], Sequence[Callback]]


class RankEndError(Exception):
    """A rank ended with an error; the text names its type first."""


def run_on_ranks(function: Callable[..., Any], *given: Any, size: int = 3) -> list[Any]:
    """What function(group, *given) returns on each rank of a group (gloo). The function is one that can be imported;
    what it gets and returns is pickled. Raises AssertionError with what each rank said if one fails."""
    found = _start(size, _call, pickle.dumps((function, given)))
    if any(one is None or isinstance(one, RankEndError) for one in found):
        raise AssertionError("\n\n".join(f"rank {rank}: {one!s:.5000}" for rank, one in enumerate(found)))
    return found


def together(size: int, settings: dict[str, Any], prepare: Prepare | None = None, resume: Any = None) -> list[Any]:
    """A run of `size` ranks: what each returns, RankEndError if it raises, None if it was killed. On every rank
    `prepare(rank)`, which must be importable, comes first, and gives its callbacks."""
    return _start(size, _train, pickle.dumps((settings, prepare, resume)))


def _start(size: int, work: Callable[[int, Any], Any], given: bytes) -> list[Any]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes, ends = [], list[Connection]()
    for rank in range(size):
        ours, theirs = forks.Pipe()
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = forks.Process(target=_be_rank, args=(theirs, {n: str(v) for n, v in place.items()}, work, given))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        found, deadline = [], DEADLINE
        for end in ends:
            found.append(_result(end, deadline))
            if isinstance(found[-1], RankEndError):
                deadline = GRACE
        return found
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _result(end: Connection, deadline: float) -> Any:
    try:
        return pickle.loads(end.recv_bytes()) if end.poll(deadline) else RankEndError("nothing: it still runs")
    except EOFError:
        return None


def _be_rank(end: Connection, environment: dict[str, str], work: Callable[[int, Any], Any], given: bytes) -> None:
    os.environ |= environment
    try:
        found = work(int(environment["RANK"]), pickle.loads(given))
    except BaseException as error:  # noqa: BLE001 - the test is told
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), traceback.format_exc()]
        found = RankEndError("\n".join(said))
    end.send_bytes(pickle.dumps(found))


def _call(rank: int, given: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return given[0](dist.group.WORLD, *given[1])


def _train(rank: int, given: Any) -> Any:
    from lagrpo.training import ranks
    from lagrpo.training.run import train

    ranks.TIMEOUT = timedelta(seconds=60)
    settings, prepare, resume = given
    return train(settings, callbacks=prepare(rank) if prepare is not None else (), resume=resume)
