"""The servers of a run: what they are asked is asked again after a failure, and the dead are brought back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lagrpo.sampling.vllm.served import Served
from lagrpo.sampling.vllm.server import SamplerError, Server, UnreachableError

log = logging.getLogger("lagrpo.vllm")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Member:
    """A server and what we know about it."""

    server: Server
    up: bool = True
    """Whether it can be given a group."""
    life: int = 0
    """How often it was brought back."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while it is being brought back."""


class Fleet:
    """All servers of a run, which may be brought back `failures` times in all.

    `broken` is why nothing can be generated any more, None as long as it can. `changed` guards the state of the fleet
    and of its dispatcher; it is notified when a thread may go on: a server came back, a group ended, all is over.
    """

    def __init__(self, servers: Sequence[Server], failures: int = 3) -> None:
        self.members = [Member(server) for server in servers]
        self.served = Served()
        self.changed = threading.Condition()
        self.broken: SamplerError | None = None
        self.closed = False
        self.recoveries = 0
        self._failures = failures

    @property
    def servers(self) -> list[Server]:
        """In the order of the settings."""
        return [member.server for member in self.members]

    def ask(self, member: Member, action: Callable[[Server], T]) -> T:
        """What `action` returns for a server; when the server dies, it is brought back and the action repeated.

        Raises:
            SamplerError: the server is gone for good.
        """
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
        """Do something with every server, one after the other."""
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
                self._spend(error)
                log.info("%s: %s. It is brought back", member.server, error)
                member.server.revive()
                self.served.restore(member.server)
            except UnreachableError as again:
                member.life += 1
                self.recover(member, member.life, again)
            except SamplerError as final:
                self.give_up(final)
            else:
                with self.changed:
                    member.life, member.up = member.life + 1, True
                    self.changed.notify_all()

    def _spend(self, error: UnreachableError) -> None:
        with self.changed:
            self.recoveries += 1
            self._failures -= 1
        if self._failures < 0:
            raise SamplerError(f"{error}. That was one failure more than vllm.failures allows") from error

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
