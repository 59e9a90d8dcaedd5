"""Runs of several ranks for tests: processes with the environment that torchrun gives, forked from one process that has
imported everything."""

from __future__ import annotations

import os
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

DEADLINE = 180.0  # seconds for a run of several ranks on a busy machine
GRACE = 20.0  # seconds for each of the others, when one has failed
Prepare = Callable[[int], Sequence[Callback]]


class RankEndError(Exception):
    """A rank ended with an error; the text names its type first."""


def together(size: int, settings: dict[str, Any], prepare: Prepare | None = None, restarts: int = 0) -> list[Any]:
    """A run of `size` ranks: what each returns, RankEndError if it raises, None if it was killed. On every rank
    `prepare(rank)`, which must be importable, comes first, and gives its callbacks."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes, ends = [], list[Connection]()
    for rank in range(size):
        ours, theirs = forks.Pipe()
        environment = {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": restarts,
        }  # fmt: skip
        given = theirs, {name: str(value) for name, value in environment.items()}, settings, prepare
        process = forks.Process(target=_be_rank, args=given)
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
        return end.recv() if end.poll(deadline) else RankEndError("nothing: it still runs")
    except EOFError:
        return None


def _be_rank(end: Connection, environment: dict[str, str], settings: dict[str, Any], prepare: Prepare | None) -> None:
    os.environ |= environment
    from lagrpo.training import ranks
    from lagrpo.training.run import train

    ranks.TIMEOUT = timedelta(seconds=60)
    try:
        callbacks = prepare(int(environment["RANK"])) if prepare is not None else ()
        end.send(train(settings, callbacks=callbacks))
    except BaseException as error:  # noqa: BLE001 - the test is told
        said = f"{type(error).__name__}: {error}"
        end.send(RankEndError("\n".join([said, *getattr(error, "__notes__", ()), traceback.format_exc()])))
