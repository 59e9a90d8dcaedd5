"""Several ranks in tests: three processes that stay, with the environment that torchrun gives and
the store that it serves. `run_on_ranks` calls a function on each of them in a group,
`call_on_ranks` without one; `together` makes a run. If one fails, all are ended, and the next call
starts others."""

from __future__ import annotations

import atexit
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from running import skip_curves_and_syncs
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from warm import forks

from lagrpo.lifecycle.callbacks import Callback
from lagrpo.types import JsonView

if TYPE_CHECKING:
    from lagrpo.lifecycle.run import Result

T = TypeVar("T")
Prepare = Callable[[int], Sequence[Callback]]

DEADLINE = 180.0
"""Seconds for all ranks, many times what they take: the machine may be busy."""

GRACE = 20.0
"""Seconds for each other rank once one has failed: it may wait for the failed one until TIMEOUT."""

TIMEOUT = timedelta(seconds=60)
"""Of collectives, shorter than DEADLINE: one that hangs raises on its rank, with a traceback."""

_staying: list[tuple[BaseProcess, Connection]] = []
"""The processes, and the connections to them. They stay, because a start takes seconds."""


class RankEndError(Exception):
    """A rank ended with an error; the text names its type first."""


def run_on_ranks(function: Callable[..., T], *arguments: object, size: int = 3) -> list[T]:
    """Returns the result of function(group, *arguments) on each rank of a gloo group, at most 3.

    The function must be importable; its arguments and results are pickled. If a rank fails, raises
    AssertionError with the errors of all ranks.
    """
    results = call_on_ranks(size, _call_in_group, function, *arguments)
    if any(map(_has_failed, results)):
        raise AssertionError(
            "\n\n".join(f"rank {rank}: {result!s:.5000}" for rank, result in enumerate(results))
        )
    return results


def together(
    size: int,
    settings: JsonView,
    prepare: Prepare | None = None,
    resume: Path | None = None,
) -> list[Any]:
    """A run of `size` ranks: what each returns, RankEndError if it raises, None if it was killed.
    On every rank `prepare(rank)`, which must be importable, comes first, and gives its callbacks.
    """
    return call_on_ranks(size, _train, settings, prepare, resume)


def call_on_ranks(size: int, work: Callable[..., object], *arguments: object) -> list[Any]:
    """What work(*arguments) returns on each rank with the environment of torchrun, or as for
    `together` if it raises."""
    while len(_staying) < 3:
        ours, theirs = forks.Pipe()
        process = forks.Process(target=_stay, args=(theirs,))
        process.start()
        theirs.close()
        _staying.append((process, ours))
    # A store of its own for every call, so that no key of an earlier group is left.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank, (_, end) in enumerate(_staying[:size]):
        variables = torchrun_environment(rank, size, store.port)
        end.send_bytes(pickle.dumps((variables, work, arguments)))
    results = []
    deadline = DEADLINE
    for _, end in _staying[:size]:
        results.append(_result(end, deadline))
        if _has_failed(results[-1]):
            deadline = GRACE
    # A rank that failed has left its group, and the others may wait in it.
    if any(map(_has_failed, results)):
        _end_all()
    return results


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank of one host, whose store listens on `port`."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}


@atexit.register
def _end_all() -> None:
    for process, _ in _staying:
        process.kill()
        process.join()
    _staying.clear()


def _has_failed(result: object) -> bool:
    return result is None or isinstance(result, RankEndError)


def _result(end: Connection, deadline: float) -> Any:
    """What a rank returned; None if it was killed."""
    try:
        if end.poll(deadline):
            return pickle.loads(end.recv_bytes())
    except EOFError:
        return None
    return RankEndError("nothing: it still runs")


def _stay(end: Connection) -> None:
    import torch

    from lagrpo.lifecycle import run

    torch.set_num_threads(1)
    run.SECONDS_FOR_TORCHRUN = 0.0
    skip_curves_and_syncs()
    with suppress(EOFError):  # the tests have ended
        while request := end.recv_bytes():
            try:
                variables, work, arguments = pickle.loads(request)
                os.environ |= variables
                result = work(*arguments)
            except BaseException as error:  # noqa: BLE001 - the test is told
                lines = [
                    f"{type(error).__name__}: {error}",
                    *getattr(error, "__notes__", ()),
                    traceback.format_exc(),
                ]
                result = RankEndError("\n".join(lines))
            end.send_bytes(pickle.dumps(result))


def _call_in_group(function: Callable[..., T], *arguments: object) -> T:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=TIMEOUT)
    result = function(dist.group.WORLD, *arguments)
    dist.destroy_process_group()
    return result


def _train(settings: JsonView, prepare: Prepare | None, resume: Path | None) -> Result:
    from lagrpo.lifecycle.run import train

    callbacks = prepare(int(os.environ["RANK"])) if prepare else ()
    timeout = {"distributed.timeout": TIMEOUT.total_seconds()}
    return train(
        settings, callbacks=callbacks, settings=timeout, resume=resume, trust_run_code=True
    )
