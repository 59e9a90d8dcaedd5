"""Groups spread over the servers: one queue, from which the threads of every server take.

A group is one request. Whichever server is free generates it: the seed of a completion is a function of its address, so
the server does not matter (up to the rounding of other batch shapes; docs/vllm.md). A group that a dying server did not
return goes to the front of the queue and is generated again, with the same seeds and by the same version.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lagrpo.sampling.base import Request
from lagrpo.sampling.vllm.fleet import Fleet, Member
from lagrpo.sampling.vllm.generation import AbortedError
from lagrpo.sampling.vllm.server import SamplerError, Server, UnreachableError
from lagrpo.types import Group

_Result = tuple[Request, Group] | BaseException


@dataclass(eq=False, slots=True)
class _Call:
    """One call of `submit`: how many groups have not been taken yet, and those that are ready."""

    remaining: int
    ready: deque[_Result] = field(default_factory=deque)


@dataclass(eq=False, slots=True)
class _Ticket:
    """A group to be generated, and who asked for it."""

    request: Request
    G: int
    call: _Call


class Dispatcher:
    """The queue of a fleet. `generate(server, request, G)` returns a group or raises AbortedError. `open` counts the
    groups that were asked for and not handed out yet."""

    def __init__(self, fleet: Fleet, generate: Callable[[Server, Request, int], Group]) -> None:
        self._fleet, self._generate = fleet, generate
        self._queue: deque[_Ticket] = deque()
        self._active = 0  # groups that a server is generating
        self._halted = False
        self._threads = 0  # of each server
        self._regenerated = 0
        self._busy, self._since = 0.0, 0.0  # seconds with something to generate, up to the last change
        self.open = 0

    def submit(self, requests: Sequence[Request], G: int, each: int) -> Iterator[tuple[Request, Group]]:
        """One group for each request, as they end, with `each` groups at a time at each server. The servers are asked
        at once, not when the first group is taken."""
        call = _Call(len(requests))
        with self._change():
            if self._fleet.broken:
                raise self._fleet.broken
            self._queue.extend(_Ticket(request, G, call) for request in requests)
            self.open += len(requests)
        self._start_threads(each)
        return self._hand_out(call)

    @contextmanager
    def halt(self, abort: bool) -> Iterator[None]:
        """Inside, no server generates: all are paused, and completions under way are frozen, or with `abort` broken off
        and put back into the queue. If the fleet breaks inside, the servers stay paused."""
        with self._change():
            self._halted = True
        try:
            if abort:
                self._abort()
            self._fleet.ask_all(lambda server: server.pause())
            yield
        finally:
            try:
                if not self._fleet.broken:
                    self._fleet.ask_all(lambda server: server.resume())
            finally:
                with self._change():
                    self._halted = False

    def read(self) -> dict[str, float]:
        """Since the last call: groups that were generated again, and seconds with something to generate."""
        with self._change():
            metrics = {"regenerated": self._regenerated, "seconds_generating": self._busy}
            self._regenerated, self._busy = 0, 0.0
        return metrics

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the state, and wake up whoever waits for that."""
        with self._fleet.changed:
            now = time.perf_counter()
            if self._queue or self._active:
                self._busy += now - self._since
            self._since = now
            yield
            self._fleet.changed.notify_all()

    # The side that asked.

    def _hand_out(self, call: _Call) -> Iterator[tuple[Request, Group]]:
        try:
            while call.remaining:
                yield self._next(call)
        finally:
            self._forget(call)

    def _next(self, call: _Call) -> tuple[Request, Group]:
        with self._fleet.changed:
            self._fleet.changed.wait_for(lambda: call.ready or self._fleet.broken)
            item = call.ready.popleft() if call.ready else self._fleet.broken
            assert item is not None
            if isinstance(item, BaseException):
                raise item
            call.remaining -= 1
            self.open -= 1
            return item

    def _forget(self, call: _Call) -> None:
        """Drop what nobody will take any more, because the one who asked has gone."""
        with self._change():
            self._queue = deque(ticket for ticket in self._queue if ticket.call is not call)
            self.open -= call.remaining

    # The side that generates.

    def _start_threads(self, each: int) -> None:
        for _ in range(self._threads, each):
            for member in self._fleet.members:
                threading.Thread(target=self._work, args=(member,), daemon=True).start()
        self._threads = max(self._threads, each)

    def _work(self, member: Member) -> None:
        """One thread of a server: take a group, generate it, hand it over."""
        while (ticket := self._take(member)) is not None:
            life = member.life
            try:
                group = self._generate(member.server, ticket.request, ticket.G)
            except AbortedError:
                self._end(ticket, None)
            except UnreachableError as error:
                self._fleet.mark_down(member, life)
                self._end(ticket, None)
                self._fleet.recover(member, life, error)
            except BaseException as error:  # noqa: BLE001  (it belongs to whoever waits for the group)
                self._end(ticket, error)
            else:
                self._end(ticket, (ticket.request, group))

    def _take(self, member: Member) -> _Ticket | None:
        """The next group for a server, once there is one that may start; None at the end."""
        fleet = self._fleet
        with fleet.changed:
            fleet.changed.wait_for(lambda: fleet.closed or self._may_start(member))
            if fleet.closed:
                return None
            self._active += 1
            return self._queue.popleft()

    def _may_start(self, member: Member) -> bool:
        return bool(self._queue) and member.up and not self._halted and not self._fleet.broken

    def _end(self, ticket: _Ticket, item: _Result | None) -> None:
        """Hand over what became of a group; None puts it back into the queue, to the front."""
        with self._change():
            self._active -= 1
            if item is None:
                self._regenerated += 1
                self._queue.appendleft(ticket)
            else:
                ticket.call.ready.append(item)

    def _abort(self) -> None:
        """Break off what is under way, until nothing is: a request may reach a server after the first call to abort."""
        end = time.monotonic() + self._fleet.servers[0].deadlines.sync
        while self._active:
            self._fleet.ask_all(lambda server: server.abort())
            with self._fleet.changed:
                self._fleet.changed.wait(0.05)
            if time.monotonic() > end:
                raise SamplerError("completions under way could not be broken off before the deadline of a weight sync")
