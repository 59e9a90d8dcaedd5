"""The servers of a run: which weights all of them should have, and how one that dies is brought back with them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lagrpo.rollout.base import Item
from lagrpo.rollout.vllm.server import SamplerError, Server, UnreachableError
from lagrpo.rollout.vllm.wire import Parcel

logger = logging.getLogger("lagrpo")
SCORE_TOLERANCE = 0.5  # nats, mean: a revived server serves the version it had, not another
T = TypeVar("T")


class Served:
    """The weights of the last sync, and how the servers scored the tokens of the parity check with them."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(4)  # so that another run's version 3 is not taken for ours
        self.parcel: Parcel | None = None
        self.scores: list[tuple[Item, list[float]]] = []  # that a revived server has to repeat

    @property
    def label(self) -> str:
        """What the servers should report; empty before the first sync."""
        return self.parcel.label if self.parcel else ""

    @property
    def version(self) -> int:
        """The version that the servers should have; -1 before the first sync."""
        return self.version_of(self.label)

    def label_of(self, version: int) -> str:
        return f"{self.run}:{version}"

    def version_of(self, label: str) -> int:
        """The version that a label stands for; -1 for weights that are not of this run."""
        run, _, number = label.partition(":")
        return int(number) if run == self.run and number.isdigit() else -1

    def set(self, parcel: Parcel | None) -> None:
        """From now on the servers should have these weights."""
        self.parcel, self.scores = parcel, []

    def restore(self, server: Server) -> None:
        """Load the weights into a revived server and check its scores. Raises SamplerError if they differ."""
        if self.parcel is None:
            return
        if self.parcel.adapter:
            server.load_adapter(self.parcel.label, self.parcel.write())
        else:
            server.pause()
            server.reload(self.parcel.write())
            server.label(self.parcel.label)
            server.resume()
        for (prompt_ids, token_ids), before in self.scores:
            now = server.score(prompt_ids, token_ids)
            difference = sum(abs(a - b) for a, b in zip(now, before, strict=True)) / len(before)
            if not difference <= SCORE_TOLERANCE:
                raise SamplerError(
                    f"{server} came back, but scores the same tokens otherwise than before (by {difference:.3g} nats a "
                    "token)"
                )


@dataclass(eq=False, slots=True)
class Member:
    """A server and what we know about it."""

    server: Server
    up: bool = True  # whether it can be given a group
    life: int = 0  # how often it was brought back
    lock: threading.RLock = field(default_factory=threading.RLock)  # held while it is being brought back


class Fleet:
    """All servers of a run, which may be brought back `failures` times in all.

    `broken` is why nothing can be generated any more, None as long as it can. `changed` guards the state of the fleet
    and of its dispatcher; it is notified when a thread may go on: a server came back, a group ended, all is over.
    """

    def __init__(self, servers: Sequence[Server], failures: int = 3) -> None:
        self.servers, self.members = list(servers), [Member(server) for server in servers]
        self.served = Served()
        self.changed = threading.Condition()
        self.broken: SamplerError | None = None
        self.closed = False
        self.recoveries = 0
        self.turns = 1  # requests of a group, one after the other, at the most
        self._failures = failures

    @property
    def patience(self) -> float:
        """Seconds after which some group has come, or failed for good: one group, and every failure that is left."""
        d = self.servers[0].deadlines
        return self.turns * d.request + (1 + max(0, self._failures)) * (d.start + d.sync + self.turns * d.request)

    def ask(self, member: Member, action: Callable[[Server], T]) -> T:
        """What `action` returns for a server; when the server dies, it is brought back and the action repeated. Raises
        SamplerError where the server is gone for good."""
        while True:
            life = member.life
            try:
                return action(member.server)
            except UnreachableError as error:
                self.recover(member, life, error)
                if self.broken:
                    raise self.broken from error
                if self.closed:
                    raise

    def ask_all(self, action: Callable[[Server], object]) -> None:
        for member in self.members:
            self.ask(member, action)

    def mark_down(self, member: Member, life: int) -> None:
        """Give no further group to a server that died in its life number `life`, unless it has come back since."""
        with self.changed:
            member.up = member.life != life

    def recover(self, member: Member, life: int, error: UnreachableError) -> None:
        """Bring back a server that died in its life number `life`, with the weights it should have; do nothing if
        another thread has done it. When `failures` are spent the fleet is broken."""
        with member.lock:
            if member.life != life or self.broken or self.closed:
                return
            try:
                with self.changed:
                    self.recoveries += 1
                    self._failures -= 1
                if self._failures < 0:
                    raise SamplerError(f"{error}. That was one failure more than vllm.failures allows") from error
                logger.info("%s: %s. It is brought back", member.server, error)
                member.server.revive()
                self.served.restore(member.server)
            except UnreachableError as again:
                member.life += 1
                self.recover(member, member.life, again)
            except SamplerError as final:
                self.give_up(final)
            except Exception as unforeseen:  # noqa: BLE001 - a full disk, an answer that lacks something: nobody else
                # hears of it in this thread, and whoever waits for a group would wait on
                why = f"{type(unforeseen).__name__}: {unforeseen}"
                self.give_up(SamplerError(f"{member.server} failed ({error}) and could not be brought back: {why}"))
            else:
                with self.changed:
                    member.life, member.up = member.life + 1, True
                    self.changed.notify_all()

    def give_up(self, error: SamplerError) -> None:
        """Generate nothing any more; whoever waits for a group gets this error."""
        with self.changed:
            self.broken = error
            self.changed.notify_all()

    def close(self) -> None:
        """End the threads that generate, and the servers that are ours."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for server in self.servers:
            server.close()
