"""The queue from which all vLLM servers take groups. It survives the loss of a server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TypeVar

from lagrpo.interrupts import raise_if_asked
from lagrpo.rollout.vllm.client import NoAnswerError, SamplerError, VllmClient
from lagrpo.threads import Threads, run_together

T = TypeVar("T")
Key = TypeVar("Key")
# Room for a group at a server. The number orders the queue, so that servers take turns.
Turn = tuple[int, VllmClient]

# A run restarts a server this many times.
RESTARTS = 5
# Seconds between two looks for servers that answer again.
POLL_SECONDS = 10.0
# Seconds after which a run that waits for groups looks for a signal.
SIGNAL_SECONDS = 0.2
logger = logging.getLogger("lagrpo")


class _SetAsideError(Exception):
    """A server gets no groups any more until it answers again."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Threads that sample groups of one size, and the turns that no group has.

    The number of turns, and of threads, is the number of groups that fit into all servers.
    """

    threads: Threads
    free_turns: list[Turn]


class GroupQueue:
    """A queue of groups for the next free server, at most `rows` completions at a time at each.

    A crashed server that the run started is started again. One that the run attached to is set
    aside: the others go on, and `take_back` looks whether it answers again. `load` gives such
    servers the current weights. Their groups are sampled again, with the same seeds. Any other
    failure ends the run, and so does the last server that is set aside.

    `starts` counts how often each server began to sample again.
    """

    def __init__(
        self, servers: Sequence[VllmClient], load: Callable[[VllmClient], None], rows: int
    ) -> None:
        self._all_servers = list(servers)
        self.starts = dict.fromkeys(self._all_servers, 0)
        self._load = load
        self._rows = rows
        self._pools: dict[int, _Pool] = {}  # by the size of groups
        self._restarting = {server: threading.RLock() for server in self._all_servers}
        self._set_aside: set[VllmClient] = set()
        self._end = "the run has ended"  # why nothing is sampled any more, once that is so
        self._num_reported = 0  # starts that `pop_metrics` has returned
        self._next_poll = 0.0  # in seconds of time.monotonic()
        self._is_closed = False
        self._may_start = threading.Event()
        self._may_start.set()
        # For free turns, and for `_set_aside`: turns of these servers stay free.
        self._turns_changed = threading.Condition()

    @property
    def servers(self) -> list[VllmClient]:
        """The servers that sample: those that are not set aside."""
        return [server for server in self._all_servers if server not in self._set_aside]

    def submit(self, sample: Callable[[VllmClient], T], G: int) -> Future[T]:
        """Submits a group of G to some server. The result is what `sample` returns for it."""
        if G not in self._pools:
            groups_per_server = max(1, self._rows // G)
            free_turns = list(enumerate(self._all_servers * groups_per_server))
            self._pools[G] = _Pool(Threads(len(free_turns)), free_turns)
        pool = self._pools[G]
        return pool.threads.submit(partial(self._sample, sample, pool.free_turns))

    def as_they_end(self, keys: Mapping[Future[T], Key]) -> Iterator[tuple[Key, T]]:
        """Yields the results of submitted groups as they end, each with its key.

        Takes servers back meanwhile. If the caller stops early, groups that have not begun never
        do. Raises Interrupted.
        """
        pending = set(keys)
        try:
            while pending:
                done, pending = wait(pending, SIGNAL_SECONDS, FIRST_COMPLETED)
                # A completion may take minutes, and a scheduler waits for seconds.
                raise_if_asked()
                for future in done:
                    group = future.result()
                    self.take_back()
                    yield keys[future], group
        finally:
            for future in keys:
                future.cancel()

    def ask_all(self, action: Callable[[VllmClient], T]) -> dict[VllmClient, T]:
        """Returns what `action` returns for each server, without servers that are set aside.

        Repeats it for a server that had to be restarted.
        """
        servers = self.servers
        results: dict[VllmClient, T] = {}

        def ask(server: VllmClient) -> None:
            # The lock keeps other threads from loading older weights meanwhile.
            with self._restarting[server], suppress(_SetAsideError):
                results[server] = self._repeat(server, action)

        run_together([partial(ask, server) for server in servers])
        if not results:
            raise SamplerError(self._end)
        return {server: results[server] for server in servers if server in results}

    def take_back(self) -> None:
        """Loads the current weights into servers that answer again. They then get groups.

        Call it from the thread that syncs weights. It looks every POLL_SECONDS.
        """
        servers = list(self._set_aside)
        if not servers or time.monotonic() < self._next_poll:
            return
        are_healthy = run_together([server.is_healthy for server in servers])
        for server, answers in zip(servers, are_healthy, strict=True):
            if not answers:
                continue
            try:
                self._load(server)
            except SamplerError as error:
                logger.warning("%s answers, but takes no weights: %s", server, error)
                continue
            logger.info("%s answers again: it has the current weights, and gets groups", server)
            with self._turns_changed:
                self.starts[server] += 1
                self._set_aside.remove(server)
                self._turns_changed.notify_all()
        self._next_poll = time.monotonic() + POLL_SECONDS

    def wait_until_released(self) -> None:
        """Waits while groups are held. Raises SamplerError if the run has ended."""
        self._may_start.wait()
        if self._is_closed:
            raise SamplerError(self._end)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets no group start during the block."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def pop_metrics(self) -> dict[str, float]:
        """Returns how often servers began to sample again since the last call."""
        num_starts = sum(self.starts.values())
        num_new = num_starts - self._num_reported
        self._num_reported = num_starts
        return {"recoveries": num_new}

    def close(self) -> None:
        """Ends the threads, and the servers that the run started."""
        self._is_closed = True
        self._may_start.set()
        with self._turns_changed:
            self._turns_changed.notify_all()
        for pool in self._pools.values():
            pool.threads.close()
        run_together([server.close for server in self.servers])

    def _sample(self, sample: Callable[[VllmClient], T], free_turns: list[Turn]) -> T:
        while True:
            self._may_start.wait()
            turn = self._take_turn(free_turns)
            _, server = turn
            try:
                return self._repeat(server, sample)
            except _SetAsideError:
                # Another server samples the group.
                continue
            finally:
                with self._turns_changed:
                    free_turns.append(turn)
                    self._turns_changed.notify_all()

    def _take_turn(self, free_turns: list[Turn]) -> Turn:
        """Waits for a free turn of a server that samples. Servers take turns.

        Raises SamplerError if the run has ended, or no server is left.
        """
        with self._turns_changed:
            while self.servers and not self._is_closed:
                usable_turns = [turn for turn in free_turns if turn[1] not in self._set_aside]
                if usable_turns:
                    turn = min(usable_turns, key=itemgetter(0))
                    free_turns.remove(turn)
                    return turn
                self._turns_changed.wait()
        raise SamplerError(self._end)

    def _repeat(self, server: VllmClient, action: Callable[[VllmClient], T]) -> T:
        """Returns what `action` returns for a server, restarting it if necessary.

        Raises _SetAsideError for a server that is set aside.
        """
        while not self._is_closed:
            if server in self._set_aside:
                raise _SetAsideError
            start = self.starts[server]
            try:
                return action(server)
            except SamplerError as error:
                self._recover(server, start, error)
        raise SamplerError(self._end)

    def _recover(self, server: VllmClient, start: int, error: SamplerError) -> None:
        """Starts a server again that crashed after start number `start`, or sets it aside.

        Does nothing if another thread has done it. Raises the error if the server is not dead, or
        has crashed too often. Until the server has the current weights, it may sample with others.
        """
        with self._restarting[server]:
            if self.starts[server] != start or server in self._set_aside:
                return
            is_dead = isinstance(error, NoAnswerError) and not server.is_healthy()
            has_given_up = server.can_restart and self.starts[server] == RESTARTS
            if self._is_closed or not is_dead or has_given_up:
                # A server that this run started has a log.
                log = getattr(server, "log", None)
                if log:
                    error.add_note(f"The server's log: {log}")
                raise error
            # A batch system ends a job by a signal to each of its processes. The signal that ended
            # the server also stops the run.
            raise_if_asked()
            if not server.can_restart:
                self._go_on_without(server, error)
                return
            logger.info("%s. Restarting the server", error)
            server.restart()
            self._load(server)
            self.starts[server] += 1

    def _go_on_without(self, server: VllmClient, error: SamplerError) -> None:
        """Sets a server aside. Raises SamplerError if no other is left."""
        with self._turns_changed:
            self._set_aside.add(server)
            num_left = len(self.servers)
            if not num_left:
                self._end = f"{error}. No server is left: start them again, then resume the run"
            self._turns_changed.notify_all()
        if not num_left:
            raise SamplerError(self._end) from error
        logger.warning(
            "%s. This run did not start the server, so it cannot restart it. It continues with %d "
            "of %d servers, and gives groups to this one when it answers again",
            error,
            num_left,
            len(self._all_servers),
        )
