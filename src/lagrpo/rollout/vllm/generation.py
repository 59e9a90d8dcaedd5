"""Groups by the servers: one queue, from which the threads of every server take.

A group is one request. Whichever server is free generates it: the seed of a completion is a function of its address, so
the server does not matter (up to the rounding of other batch shapes; docs/vllm.md). A group that a dying server did not
return goes to the front of the queue and is generated again, with the same seeds and by the same version.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lagrpo.rng import generator
from lagrpo.rollout.base import Request
from lagrpo.rollout.vllm.fleet import Fleet, Member, Served
from lagrpo.rollout.vllm.server import SamplerError, Server, UnreachableError, concerning
from lagrpo.types import Completion, Group, Outcome

NO_LOGPROB = -9000.0  # vLLM writes -9999 where a log-prob is -inf


class AbortedError(SamplerError):
    """A server broke off a group because it was told to."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion as the server returned it."""

    token_ids: list[int]
    logp: list[float]  # of each token, nats; NaN where the server gave none
    spans: list[tuple[str, int, int]]  # (label of the weights, first token, end)
    end: str  # why it ended: "stop", "length", "abort" …

    @staticmethod
    def of(choice: Mapping[str, Any]) -> Generated:
        """From vLLM's JSON."""
        tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        given = {n: entry["logprob"] for n, entry in enumerate(content) if entry["token_id"] == tokens[n]}
        logp = [math.nan if (p := given.get(n)) is None or p < NO_LOGPROB else p for n in range(len(tokens))]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
        return Generated(tokens, logp, spans, choice["finish_reason"])


@dataclass(frozen=True, slots=True)
class Generation:
    """How completions are generated."""

    seed: int  # first part of the address of every random number
    max_tokens: int  # longest completion
    tau: float  # sampling temperature
    eos_ids: Collection[int]  # token ids that end a completion
    max_num_seqs: int  # completions under way at each server
    decode: Callable[[Sequence[int]], str]  # token ids to text
    purpose: str = "sample"  # second part of the address

    def generate(
        self, server: Server, request: Request, G: int, served: Served, label: str, longest: int | None = None
    ) -> Group:
        """The group of a request, its completions of at most `longest` tokens; `label` is that of the weights that it
        is asked by. Raises AbortedError where the server was
        told to abort, UnreachableError where it does not answer or serves weights of somebody else, RefusedError where
        it says no."""
        max_tokens = min(self.max_tokens, longest or self.max_tokens)
        answers = self.ask(server, request, (), G, served, label, max_tokens)
        return Group(request.prompt, tuple(self.read(answer, served) for answer in answers), request.epoch)

    def ask(
        self, server: Server, request: Request, behind: Sequence[int], n: int, served: Served, label: str,
        max_tokens: int, turn: tuple[int, ...] = (),
    ) -> list[Generated]:  # fmt: skip
        """n answers to a request's prompt and the tokens `behind` it, by the weights of `label`; `turn` tells apart the
        seeds of a completion's turns. Raises as `generate`."""
        ids = [*request.prompt.token_ids, *behind]
        seed = int(generator(self.seed, self.purpose, *request.address, *turn).random_raw(1)[0]) >> 2
        with concerning(f"{describe(request, n)} by version {served.version_of(label)}"):
            choices = server.generate(ids, n, seed, max_tokens, self.tau, sorted(self.eos_ids), label)
        answers = [Generated.of(choice) for choice in choices]
        if any(answer.end == "abort" for answer in answers):
            raise AbortedError(f"{server} broke off a group")
        if foreign := {label for answer in answers for label, _, _ in answer.spans if served.version_of(label) < 0}:
            raise UnreachableError(
                f"{server} generated with weights that are not of this run (labeled {', '.join(sorted(foreign))}): it "
                "was restarted, or another run syncs its weights to it"
            )
        return answers

    def read(self, answer: Generated, served: Served) -> Completion:
        """The completion in a server's answer; it has failed if it cannot be used."""
        versions = torch.full((len(answer.token_ids),), -1)
        for label, start, end in answer.spans:
            versions[start:end] = served.version_of(label)
        fault = _find_fault(answer, versions)
        return Completion(
            token_ids=torch.tensor(answer.token_ids, dtype=torch.long),
            logp_alpha=torch.tensor(answer.logp, dtype=torch.float32),
            versions=versions,
            finished=bool(answer.token_ids) and answer.token_ids[-1] in self.eos_ids,
            text=self.decode(answer.token_ids),
            outcome=Outcome.failed(fault) if fault else None,
        )


def describe(request: Request, G: int) -> str:
    return f"{G} completions of prompt {request.prompt.key}, batch {request.batch}"


def _find_fault(answer: Generated, versions: torch.Tensor) -> str | None:
    """Why a completion cannot be used; None if it can."""
    if not answer.token_ids or answer.end not in ("stop", "length"):
        return f"the server ended it with {answer.end!r} after {len(answer.token_ids)} tokens"
    if bool((versions < 0).any()):
        return "the server did not say which weights generated every token"
    bad = next((n for n, p in enumerate(answer.logp) if not math.isfinite(p)), None)
    return None if bad is None else f"the server gave no finite log-prob of token {bad}"


@dataclass(eq=False, slots=True)
class _Call:
    """One call of `submit`: the requests whose groups have not been taken yet, and the groups that are ready (or what
    went wrong)."""

    missing: list[Request]
    ready: deque[tuple[Request, Group] | BaseException] = field(default_factory=deque)


class _Ticket(NamedTuple):
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
        call = _Call(list(requests))
        with self._change():
            if self._fleet.broken:
                raise self._fleet.broken
            self._queue.extend(_Ticket(request, G, call) for request in requests)
            self.open += len(requests)
        self._start_threads(each)
        return self._hand_out(call, G)

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

    def _hand_out(self, call: _Call, G: int) -> Iterator[tuple[Request, Group]]:
        try:
            while call.missing:
                with self._fleet.changed:
                    patience = self._fleet.patience
                    self._fleet.changed.wait_for(lambda: call.ready or self._fleet.broken, patience)
                    item = call.ready.popleft() if call.ready else self._fleet.broken
                    if isinstance(item, BaseException):
                        raise item
                    if item is None:
                        raise SamplerError(self._overdue(call, G, patience))
                    call.missing = [request for request in call.missing if request is not item[0]]
                    self.open -= 1
                yield item
        finally:
            with self._change():  # nobody will take the rest: the one who asked has gone
                self._queue = deque(ticket for ticket in self._queue if ticket.call is not call)
                self.open -= len(call.missing)

    def _overdue(self, call: _Call, G: int, seconds: float) -> str:
        more = f" and {len(call.missing) - 1} more groups" if len(call.missing) > 1 else ""
        asked = f"{describe(call.missing[0], G)}{more} by version {self._fleet.served.version}"
        return (
            f"no group came from {', '.join(map(str, self._fleet.servers))} within {seconds:g} s, the time for a group "
            f"(vllm.request_deadline) and for bringing servers back: {asked} are missing"
        )

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

        def may_go_on() -> bool:
            return fleet.closed or bool(self._queue and member.up and not self._halted and not fleet.broken)

        with fleet.changed:
            fleet.changed.wait_for(may_go_on)
            if fleet.closed:
                return None
            self._active += 1
            return self._queue.popleft()

    def _end(self, ticket: _Ticket, item: tuple[Request, Group] | BaseException | None) -> None:
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
                seconds, version = self._fleet.servers[0].deadlines.sync, self._fleet.served.version
                raise SamplerError(
                    f"{self._active} groups by version {version} could not be broken off within {seconds:g} s "
                    "(vllm.sync_deadline), before a weight sync"
                )
