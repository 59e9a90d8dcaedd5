"""The Sampler over vLLM servers: groups spread over them, weight syncs to all of them, and what happens when one dies.

A group is one request; as many are under way at each server as `max_num_seqs` completions make. Which server generates
a group is whoever is free: the seed of a completion is a function of its address, so it does not matter (up to the
rounding of other batch shapes; docs/vllm.md). A group that a dying server did not give back goes to the front of the
queue, and is generated again with the same seeds, by the same version: the server gets that version again before it
generates anything.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import Tensor

from lagrpo.rng import generator
from lagrpo.sampling.base import Request
from lagrpo.sampling.vllm.server import Generated, RefusedError, SamplerError, Server, UnreachableError
from lagrpo.sampling.vllm.wire import Directories, DirectoryWire, Parcel, StuckError, Wire
from lagrpo.types import Completion, Group, Outcome

InFlight = Literal["finish", "span", "regenerate"]
SCORE_TOLERANCE = 0.5  # nats, mean: a server that was brought back serves the version it had, not another


@dataclass(frozen=True, slots=True)
class Generation:
    """What is asked of the servers beside a prompt: `seed` and `purpose` of the addresses, the longest completion, the
    temperature, the ids that end one, completions under way at each server, how token ids become text."""

    seed: int
    max_tokens: int
    tau: float
    eos_ids: Sequence[int]
    max_num_seqs: int
    decode: Callable[[Sequence[int]], str]
    purpose: str = "sample"


@dataclass(eq=False, slots=True)
class _Ticket:
    """A group to be generated, and where it goes when it is."""

    request: Request
    G: int
    out: SimpleQueue[tuple[Request, Group] | BaseException]


@dataclass(eq=False, slots=True)
class _Member:
    """A server and what we know of it: whether it can be asked, how often it was brought back (`life`); `lock` is held
    while that is being done."""

    server: Server
    up: bool = True
    life: int = 0
    threads: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)


class VllmSampler:
    """Sampler over `servers`. `in_flight` says what a weight sync does with completions under way: `finish` allows
    none, `span` lets them go on with the new weights (their tokens then have several versions), `regenerate` generates
    their groups again. `failures` is how often a server may be brought back over the run. `dtype` is that of the
    weights on the wire; `say` hears what a person should know."""

    def __init__(
        self,
        servers: Sequence[Server],
        generation: Generation,
        wire: Wire,
        directories: Directories,
        *,
        in_flight: InFlight = "finish",
        failures: int = 3,
        dtype: torch.dtype = torch.bfloat16,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.generation, self.wire, self.directories = generation, wire, directories
        self.in_flight, self.failures, self.dtype, self.say = in_flight, failures, dtype, say
        self.run = secrets.token_hex(4)  # so that another run's version 3 is not taken for ours
        self._members = [_Member(server) for server in servers]
        self._queue: deque[_Ticket] = deque()
        self._ready = threading.Condition()
        self._open = 0  # groups asked for and not handed out
        self._under_way = 0  # groups that a server is generating
        self._gate = True  # whether groups may be taken from the queue
        self._broken: SamplerError | None = None
        self._closed = False
        self._parcel: Parcel | None = None
        self._parity_scores: list[tuple[Sequence[int], Sequence[int], list[float]]] = []
        self._metrics: dict[str, float] = {"recoveries": 0, "regenerated": 0}
        self._busy_since, self._busy = 0.0, 0.0

    # What the loop asks for.

    @property
    def servers(self) -> list[Server]:
        return [member.server for member in self._members]

    @property
    def spans(self) -> bool:
        """Whether a weight sync may come while completions are under way."""
        return self.in_flight != "finish"

    @property
    def version(self) -> int:
        """The version that all servers report; -1 where one reports other weights than this run's last."""
        versions = {self._number(member.server.version()) for member in self._members}
        return versions.pop() if len(versions) == 1 else -1

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
        """π_version into all servers; what it cost: bytes, seconds of writing and of having the servers paused.

        Raises:
            RuntimeError: completions of the previous version are under way, and in_flight is `finish`.
            CorruptError: what was written is not what was to be; the servers go on with the version they had.
            SamplerError: the weights are not those of the same model, or a server refused them (then, too, they go on
                with the version they had), or a server is gone for good, or the transfer is stuck: then the servers
                are left paused, and generate nothing.
        """
        if self._open and not self.spans:
            raise RuntimeError(f"version {version} was synced while {self._open} groups are open")
        started = time.perf_counter()
        parcel = self._pack(weights, version)
        if self._parcel is not None and parcel.shapes != self._parcel.shapes:
            raise SamplerError(f"version {version} has other parameters or shapes than the version before: not sent")
        if isinstance(self.wire, DirectoryWire):
            parcel.write()
        written = time.perf_counter()
        with _Stopped(self):
            paused = time.perf_counter()
            before, self._parcel, self._parity_scores = self._parcel, parcel, []
            try:
                self._load(parcel, before)
            except StuckError as error:
                self._give_up(stuck := _left_paused(version, error))  # and so they do not go on generating
                raise stuck from error
        done = time.perf_counter()
        self.directories.drop_before(version)
        return {"sync_bytes": parcel.size, "seconds_writing": written - started, "seconds_paused": done - paused}

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """One group for each request, as they end. The servers are asked at once, not when the first one is taken."""
        out: SimpleQueue[tuple[Request, Group] | BaseException] = SimpleQueue()
        with self._ready:
            if self._broken:
                raise self._broken
            if not self._pending:
                self._busy_since = time.perf_counter()
            self._queue.extend(_Ticket(request, G, out) for request in requests)
            self._open += len(requests)
            self._ready.notify_all()
        self._start_threads(max(1, self.generation.max_num_seqs // G))
        return self._handed_out(out, len(requests))

    def score(self, prompt_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        """log-probs at temperature 1 by the first server: float32 [t], nats."""
        return torch.tensor(self.scores([(prompt_ids, token_ids.tolist())])[0][0], dtype=torch.float32)

    def scores(self, items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]:
        """The same for several (prompt, tokens), by every server: [server][item][token]. They are kept: a server that
        is brought back has to give them again."""
        found = [self._scored(member, items) for member in self._members]
        self._parity_scores = [(p, t, scores) for (p, t), scores in zip(items, found[0], strict=True)]
        return found

    def generate_on_server(self, number: int, request: Request, max_tokens: int) -> Group:
        """One completion by one server, at once: for a parity check of what it generates."""
        member = self._members[number]
        return self._persistently(member, lambda: self._generate(member.server, request, 1, max_tokens))

    def rest(self) -> None:
        """The servers have memory of their own."""

    def read(self) -> dict[str, float]:
        """Since the last call: how often a server was brought back, how many groups were generated again, and for how
        many seconds there was something to generate."""
        with self._ready:
            now = time.perf_counter()
            busy = self._busy + (now - self._busy_since if self._pending else 0.0)
            self._busy, self._busy_since = 0.0, now
            metrics = {**self._metrics, "seconds_generating": busy}
            self._metrics = dict.fromkeys(self._metrics, 0)
        return metrics

    def close(self) -> None:
        """End the threads, the servers that are ours, and what lies in the shared directory."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for member in self._members:
            member.server.close()
        self.directories.close()

    # Generating: threads that take groups from the queue.

    def _start_threads(self, each: int) -> None:
        for member in self._members:
            while member.threads < each:
                member.threads += 1
                threading.Thread(target=self._work, args=(member,), daemon=True).start()

    def _handed_out(self, out: SimpleQueue[Any], count: int) -> Iterator[tuple[Request, Group]]:
        remaining = count
        try:
            while remaining:
                item = out.get()
                if isinstance(item, BaseException):
                    raise item
                remaining -= 1
                with self._ready:
                    self._open -= 1
                yield item
        finally:
            self._forget(out, remaining)

    def _forget(self, out: SimpleQueue[Any], remaining: int) -> None:
        """What nobody will take any more (the one who asked has gone) is not drawn."""
        if remaining:
            with self._ready:
                self._queue = deque(ticket for ticket in self._queue if ticket.out is not out)
                self._open -= remaining

    @property
    def _pending(self) -> int:
        """Groups that have not been drawn yet."""
        return len(self._queue) + self._under_way

    def _work(self, member: _Member) -> None:
        """One thread of a server: take a group, generate it, hand it out."""
        while (ticket := self._take(member)) is not None:
            life = member.life
            try:
                group = self._generate(member.server, ticket.request, ticket.G)
            except UnreachableError as error:
                with self._ready:
                    member.up = member.life != life
                self._put_back(ticket)
                self._recover(member, life, error)
            except BaseException as error:  # noqa: BLE001  (it belongs to whoever waits for the group)
                self._done()
                ticket.out.put(error)
            else:
                if group is None:
                    self._put_back(ticket)
                else:
                    self._done()
                    ticket.out.put((ticket.request, group))

    def _take(self, member: _Member) -> _Ticket | None:
        with self._ready:
            while not (self._queue and self._gate and member.up and not self._broken) and not self._closed:
                self._ready.wait()
            if self._closed:
                return None
            self._under_way += 1
            return self._queue.popleft()

    def _put_back(self, ticket: _Ticket) -> None:
        with self._ready:
            if self._broken:
                ticket.out.put(self._broken)
            else:
                self._queue.appendleft(ticket)
                self._metrics["regenerated"] += 1
            self._done()

    def _done(self) -> None:
        with self._ready:
            self._under_way -= 1
            if not self._pending:
                self._busy += time.perf_counter() - self._busy_since
            self._ready.notify_all()

    def _generate(self, server: Server, request: Request, G: int, max_tokens: int | None = None) -> Group | None:
        """The group of a request, None when it was broken off to be generated by the next version."""
        d, ids = self.generation, request.prompt.token_ids
        longest = min(d.max_tokens, max_tokens or d.max_tokens)
        seed = int(generator(d.seed, d.purpose, *request.address).random_raw(1)[0]) >> 2
        label = self._parcel.label if self._parcel else ""
        generated = server.generate(ids, G, seed, longest, d.tau, sorted(d.eos_ids), label)
        if any(one.end == "abort" for one in generated):
            return None
        if strange := {name for one in generated for name, _, _ in one.spans if self._number(name) < 0}:
            raise UnreachableError(
                f"{server} sampled with weights that this run did not sync (labeled {', '.join(sorted(strange))}): it "
                "was started again, or another run syncs to it"
            )
        return Group(request.prompt, tuple(self._completion(one) for one in generated), request.epoch)

    def _completion(self, generated: Generated) -> Completion:
        versions = torch.full((len(generated.token_ids),), -1)
        for label, start, end in generated.spans:
            versions[start:end] = self._number(label)
        bad = next((n for n, p in enumerate(generated.logp) if not math.isfinite(p)), None)
        outcome = Outcome.failed(f"the server gave no finite log-prob of token {bad}") if bad is not None else None
        if not generated.token_ids or generated.end not in ("stop", "length"):
            outcome = Outcome.failed(
                f"the server ended it with {generated.end!r} after {len(generated.token_ids)} tokens"
            )
        elif bool((versions < 0).any()):
            outcome = Outcome.failed("the server did not say with which weights it sampled every token")
        return Completion(
            token_ids=torch.tensor(generated.token_ids, dtype=torch.long),
            logp_alpha=torch.tensor(generated.logp, dtype=torch.float32),
            versions=versions,
            finished=bool(generated.token_ids) and generated.token_ids[-1] in self.generation.eos_ids,
            text=self.generation.decode(generated.token_ids),
            outcome=outcome,
        )

    def _number(self, label: str) -> int:
        """The version that a label stands for, -1 for one of somebody else's weights."""
        run, _, number = label.partition(":")
        return int(number) if run == self.run and number.isdigit() else -1

    # Weights.

    def _pack(self, weights: Mapping[str, Tensor], version: int) -> Parcel:
        """The weights as they go over the wire. Where they do not go through the directory, a copy is kept on the host,
        because the trainer's own will have moved on when a server needs this version again."""
        own = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in weights.items()}
        kept = own if isinstance(self.wire, DirectoryWire) else {name: t.cpu() for name, t in own.items()}
        return Parcel(f"{self.run}:{version}", own, lambda: str(self.directories.put(kept, version)))

    def _load(self, parcel: Parcel, before: Parcel | None) -> None:
        """The parcel into every paused server. A server that dies gets it when it is back. Where one refuses it, all of
        them get back what they had."""
        failures = self.wire.send(self.servers, parcel)
        for member, failure in zip(self._members, failures, strict=True):
            if failure is None:
                self._persistently(member, lambda server=member.server: server.label(parcel.label))
        refused = [
            (member, failure)
            for member, failure in zip(self._members, failures, strict=True)
            if failure is not None and not self._came_back(member, failure)
        ]
        if refused:
            self._go_back(before, refused)
            raise SamplerError(
                f"version {parcel.label.partition(':')[2]} was refused: {refused[0][1]}. "
                + ("The servers go on with the version they had" if before else "Is it the same model?")
            )

    def _came_back(self, member: _Member, failure: BaseException) -> bool:
        """Whether a server whose weight sync failed was dead and now has the version; one that is well has refused
        it."""
        if not isinstance(failure, UnreachableError) or member.server.healthy():
            return False
        self._recover(member, member.life, failure)
        if self._broken:
            raise self._broken
        return True

    def _go_back(self, before: Parcel | None, refused: Sequence[tuple[_Member, BaseException]]) -> None:
        """The version before into all servers. One that failed to load the new one is left with half of it, and cannot
        load anything any more (vLLM 0.32): it is brought back like one that died."""
        self._parcel = before
        if before is None:
            return
        failed = {member.server.url: failure for member, failure in refused}
        for member in self._members:
            if isinstance(failure := failed.get(member.server.url), UnreachableError):
                self._recover(member, member.life, failure)
            else:
                self._persistently(member, lambda server=member.server: server.reload(before.write()))
                self._persistently(member, lambda server=member.server: server.label(before.label))
        if self._broken:
            raise self._broken

    # Servers that die.

    def _persistently(self, member: _Member, action: Callable[[], Any]) -> Any:
        """The result of an action, repeated after the server was brought back. Raises SamplerError when it is gone."""
        while True:
            life = member.life
            try:
                return action()
            except UnreachableError as error:
                self._recover(member, life, error)
                if self._broken:
                    raise self._broken from error
                if self._closed:
                    raise

    def _recover(self, member: _Member, life: int, error: UnreachableError) -> None:
        """Bring a server back, with the version it should have, unless somebody did since `life`. When the failures are
        spent everybody who waits for a group hears why."""
        with member.lock:
            if member.life != life or self._broken or self._closed:
                return
            try:
                self._spend(error)
                self.say(f"{member.server}: {error}. It is brought back")
                member.server.revive()
                self._restore(member)
            except UnreachableError as again:
                member.life += 1
                self._recover(member, member.life, again)
            except SamplerError as final:
                self._give_up(final)
            else:
                with self._ready:
                    member.life, member.up = member.life + 1, True
                    self._ready.notify_all()

    def _spend(self, error: UnreachableError) -> None:
        with self._ready:
            self._metrics["recoveries"] += 1
            self.failures -= 1
        if self.failures < 0:
            raise SamplerError(f"{error}. That was one failure more than vllm.failures allows") from error

    def _restore(self, member: _Member) -> None:
        """The current version into a server that is back, and a look whether it scores as it did before."""
        if self._parcel is None:
            return
        server = member.server
        server.pause()
        server.reload(self._parcel.write())
        server.label(self._parcel.label)
        server.resume()
        for prompt_ids, token_ids, before in self._parity_scores:
            now = server.score(prompt_ids, token_ids)
            difference = sum(abs(a - b) for a, b in zip(now, before, strict=True)) / len(before)
            if not difference <= SCORE_TOLERANCE:
                raise SamplerError(
                    f"{server} came back, but scores the parity prompts otherwise than before (by {difference:.3g} "
                    "nats a token)"
                )

    def _give_up(self, error: SamplerError) -> None:
        with self._ready:
            self._broken = error
            waiting, self._queue = list(self._queue), deque()
            self._ready.notify_all()
        for ticket in waiting:
            ticket.out.put(error)

    def _scored(self, member: _Member, items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        from concurrent.futures import ThreadPoolExecutor

        def one(item: tuple[Sequence[int], Sequence[int]]) -> list[float]:
            return self._persistently(member, lambda: member.server.score(*item))

        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(one, items))


def _left_paused(version: int, error: StuckError) -> SamplerError:
    return SamplerError(
        f"version {version} did not get to the servers: {error}. They are left paused and may have half of it: start "
        "again those that are still up (the ones this run started are ended). vllm.sync_deadline says how long is "
        "waited; vllm.weight_sync = 'directory' waits for nobody else"
    )


class _Stopped:
    """The time in which no server generates: the gate shut, what is under way broken off (`regenerate`) or frozen, and
    all servers paused; afterward they go on."""

    def __init__(self, sampler: VllmSampler) -> None:
        self._s = sampler

    def __enter__(self) -> None:
        s = self._s
        with s._ready:
            s._gate = False
        if s.in_flight == "regenerate":
            self._break_off()
        for member in s._members:
            s._persistently(member, member.server.pause)

    def __exit__(self, *_: object) -> None:
        s = self._s
        try:
            if not s._broken:
                for member in s._members:
                    s._persistently(member, member.server.resume)
        finally:
            with s._ready:
                s._gate = True
                s._ready.notify_all()

    def _break_off(self) -> None:
        """Until nothing is under way: a request may reach a server after the first call to abort."""
        s = self._s
        end = time.monotonic() + s.servers[0].deadlines.sync
        while s._under_way:
            for member in s._members:
                s._persistently(member, member.server.abort)
            with s._ready:
                s._ready.wait(0.05)
            if time.monotonic() > end:
                raise SamplerError("completions under way could not be broken off before the deadline of a weight sync")


def refuse_mismatch(server: Server, tokenize: Callable[[str], list[int]], root: str | None) -> None:
    """Raises RefusedError for a server that evidently serves another model: another tokenizer, another config."""
    for text in ("Hello, world 12 + 30 = 42", "def f(x):\n    return x", "Größe, 数学, ∑"):
        try:
            theirs = server.tokenize(text)
        except RefusedError:  # a server without a tokenizer has nothing to compare
            break
        if theirs != tokenize(text):
            raise RefusedError(
                f"{server} tokenizes {text!r} otherwise than model.path does: it serves another model"
                + (f" ({root})" if root else "")
            )
