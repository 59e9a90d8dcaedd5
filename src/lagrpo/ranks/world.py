"""The ranks of a run. Rank 0 leads: it announces a command, every rank does its part, the results go back to rank 0.

A rank that computes lets nobody wait in a collective: waits are on the store of torch.distributed, where every rank
leaves a sign of life each second (signs.py). So rank 0 finds out which rank has failed, ended or fallen silent, and in
what phase. Objects travel by gloo, on CPUs; the learner's collectives have a group of their own.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from lagrpo.interrupts import is_waiting, whole
from lagrpo.ranks.rank import Rank
from lagrpo.ranks.signs import EVERY, RankError, Seen, Signs

LOST = 5 * EVERY  # seconds of silence after which a rank is taken for gone when a connection has just broken
SHORTEST, LONGEST = 0.0005, 0.02  # seconds between two looks for a key
CLOSE, STOP = "close", "stop"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds: `deadline` for one command, `collective` for one collective in
    which all ranks are, `silence` without a sign of life."""

    deadline: float
    collective: float
    silence: float


@dataclass(frozen=True, slots=True)
class Failed:
    """What a command left on a rank that raised."""

    error: BaseException


class World:
    """This process among the others. `ranks` is the process group of the learner's collectives, and `mesh` the same
    ranks as layers are sharded over them, by `shards` neighbors each; None where they are not."""

    def __init__(self, own: Rank, store: Any, device: str, patience: Patience, shards: int | None = None) -> None:
        self.own, self.patience = own, patience
        self.rank, self.size = own.number, own.size
        self.broken: RankError | None = None
        self._store, self._count, self._next_look = store, 0, 0.0
        self._seen = {rank: Seen() for rank in range(self.size) if rank != self.rank}
        self._signs = Signs(store, self.rank)
        limit = timedelta(seconds=patience.collective)
        groups, backend = PrefixStore("groups", store), "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=groups, rank=self.rank, world_size=self.size, timeout=limit)
        self.ranks = dist.group.WORLD
        self._control: Any = dist.new_group(backend="gloo", timeout=limit)
        self.mesh: DeviceMesh | None = None
        if shards is not None and self.ranks is not None:
            self.mesh = mesh_of(self.ranks, device, self._agree_on(shards), patience.collective)

    @staticmethod
    def join(own: Rank, device: str, patience: Patience, shards: int | None = None) -> World:
        """Meet the other ranks. Raises RankError where they do not come within the deadline of a collective."""
        if device == "cuda":
            torch.cuda.set_device(own.local_number)
        try:
            shared = PrefixStore(f"lagrpo/{own.restarts}", own.store(patience.collective))
            return World(own, shared, device, patience, shards)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"{own}: the {own.size} ranks did not meet at {own.address}:{own.port} within "
                f"{patience.collective:g} s (distributed.collective): {str(error).splitlines()[0]}"
            ) from error

    def _agree_on(self, shards: int) -> int:
        """What all ranks say, or all ranks where some say otherwise, as on hosts with other numbers of them."""
        found: list[int] = [0] * self.size
        dist.all_gather_object(found, shards, group=self._control)
        return shards if len(set(found)) == 1 else self.size

    def tell(self, phase: str) -> None:
        """What this rank is doing, for the others' messages."""
        self._on_store(lambda: self._signs.tell(phase, self._store))

    def lead(self, name: str, own: Callable[[], Any], payload: Any = None) -> list[Any]:
        """Rank 0: have every rank do command `name` with `payload`; rank 0 does `own`. Returns what it gave on each
        rank. An interruption of `own` lets the others stop early, and is raised when they have.

        Raises what a rank raised, with a note that says which; RankError for a rank that ended, fell silent, or was not
        ready within the deadline."""
        if self.broken is not None:
            raise RankError(f"the ranks are no longer together: {self.broken}")
        before = self._count
        try:
            with whole():
                self._announce(name, payload)
            result = self._attempt(own)
        except KeyboardInterrupt:
            if self._count > before:
                with whole():
                    self._set(f"{STOP}/{self._count}")
                    self._collect(None, LOST)
            raise
        with whole():
            return self._raise_failures(self._collect(result))

    def follow(self, commands: Mapping[str, Callable[[Any], Any]]) -> Any:
        """Every other rank: do what rank 0 announces until it closes; returns what it closes with. Raises RankError
        where rank 0 is gone."""
        while True:
            self._count += 1
            self.tell("waiting for rank 0")
            self._wait(f"command/{self._count}", [0], float("inf"))
            name, payload = self._receive()
            if name == CLOSE:
                return payload
            self.tell(name)
            result = self._attempt(lambda name=name, payload=payload: commands[name](payload))
            self._set(f"done/{self._count}/{self.rank}")
            self._translating(lambda result=result: dist.gather_object(result, None, 0, self._control))

    def in_step(self, call: Callable[[], T]) -> T:
        """What the call gives, which has the other ranks in collectives all along: no interruption cuts it, and an
        error that they do not have ends the run, since they cannot go on without this rank."""
        try:
            with whole():
                return self._translating(call)
        except (RankError, FloatingPointError):
            raise
        except Exception as error:
            self.fail(error)
            self._break(RankError(f"{self.own} could not go on: {type(error).__name__}: {error}"))
            raise

    def wants_no_more(self) -> bool:
        """Whether rank 0 wants no more of the present command; looks every half second."""
        if self.rank == 0 or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + 0.5
        return self._store.check([f"{STOP}/{self._count}"])

    def report(self, name: str, value: str) -> None:
        """Leave a text for rank 0, from any thread: see `await_reports`."""
        self._store.clone().set(f"report/{name}/{self.rank}", value)

    def await_reports(self, name: str, seconds: float) -> dict[int, str]:
        """Rank 0: what every other rank reports under this name, from any thread. Raises TimeoutError for one that does
        not within so many seconds, RankError where the ranks have lost each other."""
        store, found, end = self._store.clone(), dict[int, str](), time.monotonic() + seconds
        while len(found) < self.size - 1:
            for rank in self._seen.keys() - found.keys():
                if store.check([key := f"report/{name}/{rank}"]):
                    found[rank] = store.get(key).decode()
            if self.broken is not None:
                raise RankError(f"the ranks are no longer together: {self.broken}")
            if time.monotonic() > end:
                missing = min(self._seen.keys() - found.keys())
                raise TimeoutError(f"{self._seen[missing].describe(missing)} has not reported within {seconds:g} s")
            time.sleep(LONGEST)
        return found

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        with suppress(RuntimeError):  # the store may be gone, and why with it
            self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")

    def close(self, result: Any = None) -> None:
        """End: rank 0 sends the others home, with `result`. What cannot be told any more is not."""
        if self.rank == 0 and self.broken is None:
            with whole(), suppress(RuntimeError):
                self._announce(CLOSE, result)
        self._signs.close()
        if self.broken is None:
            dist.destroy_process_group()

    def _announce(self, name: str, payload: Any) -> None:
        self._count += 1
        self.tell(name)
        self._set(f"command/{self._count}")
        self._translating(lambda: dist.broadcast_object_list([(name, payload)], 0, self._control))

    def _receive(self) -> tuple[str, Any]:
        box: list[Any] = [None]
        self._translating(lambda: dist.broadcast_object_list(box, 0, self._control))
        return box[0]

    def _attempt(self, part: Callable[[], Any]) -> Any:
        """What it gives, or Failed. A connection that broke under it is a rank that ended."""
        try:
            return self._translating(part)
        except RankError:
            raise
        except Exception as error:
            if self.broken is not None:
                raise
            if self.rank:
                error.add_note(f"This was on {self.own}.")
                error = error if _travels(error) else RuntimeError(f"{type(error).__name__} on {self.own}: {error}")
            return Failed(error)

    def _collect(self, result: Any, silence: float | None = None) -> list[Any]:
        for rank in self._seen:
            self._wait(f"done/{self._count}/{rank}", self._seen, self.patience.deadline, silence)
        found: list[Any] = [None] * self.size
        self._translating(lambda: dist.gather_object(None, found, 0, self._control))
        return [result, *found[1:]]  # rank 0's own may be a whole model: it does not travel

    def _raise_failures(self, results: list[Any]) -> list[Any]:
        for result in results:
            if isinstance(result, Failed):
                raise result.error
        return results

    def _wait(
        self, key: str, others: Sequence[int] | Mapping[int, Seen], seconds: float, silence: float | None = None
    ) -> None:
        """Until the key is there. Raises RankError where one of the `others` is in trouble, or time is over. A run that
        is being stopped, as torchrun does when a rank has ended, has less patience with silence."""
        start = looked = time.monotonic()
        pause = SHORTEST
        while not self._on_store(lambda: self._store.check([key])):
            time.sleep(pause)
            pause, now = min(2 * pause, LONGEST), time.monotonic()
            if now - looked > EVERY:
                looked, least = now, silence or (LOST if is_waiting() else self.patience.silence)
                self._on_store(lambda least=least: self._look(others, least))
            if now - start > seconds:
                slow = int(key.rpartition("/")[2])
                limit = f"{seconds:g} s (distributed.deadline)"
                raise self._break(RankError(f"{self._seen[slow].describe(slow)} was not ready within {limit}"))

    def _set(self, key: str) -> None:
        self._on_store(lambda: self._store.set(key, ""))

    def _on_store(self, call: Callable[[], T]) -> T:
        """What the call gives. Raises RankError where the store is gone."""
        try:
            return call()
        except RankError:
            raise
        except RuntimeError as error:
            host = "torchrun" if self.own.hosted else "rank 0"
            gone = f"the store in which the ranks meet is gone, and {host} with it: {_first_line(error)}"
            raise self._break(RankError(gone)) from error

    def _look(self, others: Sequence[int] | Mapping[int, Seen], silence: float) -> None:
        """Raise RankError for a rank that said why it ended, or has left no sign of life for so many seconds."""
        for rank in others:
            seconds, seen = self._seen[rank].look(self._store, rank), self._seen[rank]
            if self._store.check([f"failed/{rank}"]):
                why = self._store.get(f"failed/{rank}").decode(errors="replace")
                raise self._break(RankError(f"{seen.describe(rank)} has failed: {why}"))
            if seconds > silence:
                raise self._break(RankError(
                    f"{seen.describe(rank)} has given no sign of life for {seconds:.0f} s: it was killed, hangs, or "
                    "has lost its network"
                ))  # fmt: skip

    def _translating(self, call: Callable[[], T]) -> T:
        """What the call gives. Raises RankError, which names the rank, where a collective fails."""
        try:
            return call()
        except RuntimeError as error:
            if isinstance(error, RankError) or not _of_a_collective(error):
                raise
            raise self._find_culprit(error) from error

    def _find_culprit(self, error: Exception) -> RankError:
        end = time.monotonic() + 2 * LOST
        while time.monotonic() < end:
            try:
                self._on_store(lambda: self._look(self._seen, LOST))
            except RankError as found:
                return found
            time.sleep(EVERY / 4)
        doing = self._signs.phase
        return self._break(RankError(f"the ranks lost each other during {doing}: {_first_line(error)}"))

    def _break(self, error: RankError) -> RankError:
        self.broken = error
        return error


def mesh_of(ranks: dist.ProcessGroup, device: str, shards: int, seconds: float) -> DeviceMesh:
    """All ranks as a mesh over which layers are sharded: one dimension, or (replicas, shards) where fewer than all
    ranks have a copy between them, neighbors each. Collective. Waits of its groups end after so many seconds."""
    size, rank, limit = ranks.size(), ranks.rank(), timedelta(seconds=seconds)
    if shards == size:
        return DeviceMesh.from_group(ranks, device, mesh_dim_names=("shards",))
    grid = torch.arange(size).view(-1, shards)
    rows = [dist.new_group(row, timeout=limit) for row in grid.tolist()]
    columns = [dist.new_group(column, timeout=limit) for column in grid.T.tolist()]
    own = [columns[rank % shards], rows[rank // shards]]
    return DeviceMesh.from_group(own, device, mesh=grid, mesh_dim_names=("replicas", "shards"))  # pyright: ignore[reportArgumentType]


def _travels(error: Exception) -> bool:
    """Whether rank 0 can be sent it: some exceptions cannot be made again from what they were pickled to."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does
        return False
    return True


def _of_a_collective(error: Exception) -> bool:
    kinds = (dist.DistBackendError, dist.DistNetworkError)
    return isinstance(error, kinds) or "gloo" in str(error).lower()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
