"""Draws: the completions of each batch, asked for when the schedule says, handed out batch by batch.

With v > 1 all batches until the next delivery come from the same α. They are asked for together, so that rows freed by
one batch are filled by the next, and a sampler that works by itself goes on while the policy learns; what comes early
waits here. Asking batch by batch leaves the same records, because the random numbers of every token have an address.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lagrpo.sampling.base import Request, Sampler
from lagrpo.types import Group


class VersionError(RuntimeError):
    """A token was drawn by another version than the schedule announced."""


class Draws:
    """`requests(b)` gives the requests of batch b, G the completions of each."""

    def __init__(self, sampler: Sampler, requests: Callable[[int], Sequence[Request]], G: int) -> None:
        self._sampler, self._requests, self._G = sampler, requests, G
        self._coming: deque[Iterator[tuple[Request, Group]]] = deque()
        self._here: dict[int, list[Group]] = {}
        self._asked: dict[int, Sequence[Request]] = {}  # by batch, until its groups are in order
        self._announced: dict[int, set[int]] = {}
        self._seconds, self._tokens = 0.0, 0

    def ask(self, batches: range, version: int) -> None:
        """Ask for batches, which are to be drawn by π_version. Whatever was asked for before is finished first, unless
        the sampler allows otherwise."""
        if not batches:
            return
        if not self._sampler.spans:
            self.finish()
        self._announced.update({batch: {version} for batch in batches})
        asked = {batch: self._requests(batch) for batch in batches}
        self._asked |= asked
        self._coming.append(self._sampler.sample([r for requests in asked.values() for r in requests], self._G))

    def finish(self) -> None:
        """Complete everything that was asked for."""
        while self._receive():
            pass

    def before_delivery(self) -> None:
        """What must be done before the sampler gets other weights: everything that was asked for is completed, unless
        the sampler allows a delivery in the middle of it."""
        if not self._sampler.spans:
            self.finish()

    def delivered(self, version: int) -> None:
        """From now on tokens may also be sampled by π_version, in batches that were asked for before too."""
        for versions in self._announced.values():
            versions.add(version)

    def more(self, requests: Sequence[Request], version: int) -> Iterator[Group]:
        """Groups of further requests, in their order, drawn now by π_version."""
        self.finish()
        self._coming.append(self._sampler.sample(requests, self._G))
        self.finish()
        for batch in {request.batch for request in requests}:
            for group in _ordered(requests, self._here.pop(batch, [])):
                _check_versions(group, {version}, batch)
                yield group

    def take(self, batch: int) -> Iterator[Group]:
        """The groups of a batch as they end. Raises VersionError for a token that α did not draw."""
        expected, versions = len(self._asked[batch]), self._announced.pop(batch)
        for _ in range(expected):
            while not self._here.get(batch):
                if not self._receive():
                    raise RuntimeError(f"the sampler ended without all {expected} groups of batch {batch}")
            group = self._here[batch].pop(0)
            _check_versions(group, versions, batch)
            yield group
        self._here.pop(batch, None)

    def in_order(self, batch: int, groups: Sequence[Group]) -> list[Group]:
        """All groups of a batch in the order of its requests, whichever ended first; groups of a file stay in front."""
        return _ordered(self._asked.pop(batch), groups)

    def read(self) -> tuple[float, int]:
        """Seconds spent waiting for the sampler since the last call, and the sampled tokens of the groups that came."""
        seconds, tokens = self._seconds, self._tokens
        self._seconds, self._tokens = 0.0, 0
        return seconds, tokens

    def _receive(self) -> bool:
        started = time.perf_counter()
        item = None
        while self._coming and (item := next(self._coming[0], None)) is None:
            self._coming.popleft()
        self._seconds += time.perf_counter() - started
        if item is None:
            return False
        request, group = item
        self._tokens += sum(completion.length for completion in group.completions)
        self._here.setdefault(request.batch, []).append(group)
        return True


def _ordered(requests: Sequence[Request], groups: Sequence[Group]) -> list[Group]:
    places = {("sampler", r.epoch, r.prompt.key): place for place, r in enumerate(requests)}
    return sorted(groups, key=lambda group: places.get((group.source, group.epoch, group.prompt.key), -1))


def _check_versions(group: Group, versions: set[int], batch: int) -> None:
    for completion in group.completions:
        strange = set(completion.versions[completion.sampled].tolist()) - versions
        if strange and (completion.outcome is None or completion.outcome.kind != "failed"):
            raise VersionError(
                f"batch {batch}, prompt {group.prompt.key}: a token was drawn by version {min(strange)}, but the "
                f"schedule announced version {' or '.join(map(str, sorted(versions)))}; the sampler did not take the "
                "delivery"
            )
