"""Draws: the completions of each batch, asked for when the schedule says, handed out batch by batch.

With v > 1 all batches until the next delivery come from the same α. They are asked for together, so that rows freed by
one batch are filled by the next; what comes early waits here. The records are those of asking batch by batch, because
every draw has an address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from lagrpo.sampling.base import Request, Sampler
from lagrpo.types import Group


class VersionError(RuntimeError):
    """A token was drawn by another version than the schedule announced."""


class Draws:
    """`requests(b)` gives the requests of batch b, G the completions of each."""

    def __init__(self, sampler: Sampler, requests: Callable[[int], Sequence[Request]], G: int) -> None:
        self._sampler, self._requests, self._G = sampler, requests, G
        self._coming: Iterator[tuple[Request, Group]] = iter(())
        self._here: dict[int, list[Group]] = {}
        self._announced: dict[int, int] = {}
        self._seconds, self._tokens = 0.0, 0

    def ask(self, batches: range, version: int) -> None:
        """Ask for batches, which are to be drawn by π_version. Whatever was asked for before is finished first."""
        if not batches:
            return
        self.finish()
        self._announced.update(dict.fromkeys(batches, version))
        self._coming = self._sampler.sample([r for b in batches for r in self._requests(b)], self._G)

    def finish(self) -> None:
        """Complete everything that was asked for, as must be before the sampler gets other weights."""
        while self._receive():
            pass

    def more(self, requests: Sequence[Request], version: int) -> Iterator[Group]:
        """Groups of further requests, drawn now by π_version."""
        self.finish()
        self._coming = self._sampler.sample(requests, self._G)
        while self._receive():
            pass
        for batch in {request.batch for request in requests}:
            for group in self._here.pop(batch, []):
                _check_versions(group, version, batch)
                yield group

    def take(self, batch: int) -> Iterator[Group]:
        """The groups of a batch as they end. Raises VersionError for a token that α did not draw."""
        expected, version = len(self._requests(batch)), self._announced.pop(batch)
        for _ in range(expected):
            while not self._here.get(batch):
                if not self._receive():
                    raise RuntimeError(f"the sampler ended without all {expected} groups of batch {batch}")
            group = self._here[batch].pop(0)
            _check_versions(group, version, batch)
            yield group
        self._here.pop(batch, None)

    def in_order(self, batch: int, groups: Sequence[Group]) -> list[Group]:
        """Groups of a batch in the order of its requests, whichever ended first; those of a file stay in front."""
        places = {("sampler", r.epoch, r.prompt.key): place for place, r in enumerate(self._requests(batch))}
        return sorted(groups, key=lambda group: places.get((group.source, group.epoch, group.prompt.key), -1))

    def read(self) -> tuple[float, int]:
        """Seconds spent waiting for the sampler since the last call, and the tokens of the groups that came."""
        seconds, tokens = self._seconds, self._tokens
        self._seconds, self._tokens = 0.0, 0
        return seconds, tokens

    def _receive(self) -> bool:
        started = time.perf_counter()
        item = next(self._coming, None)
        self._seconds += time.perf_counter() - started
        if item is None:
            return False
        request, group = item
        self._tokens += sum(len(completion.token_ids) for completion in group.completions)
        self._here.setdefault(request.batch, []).append(group)
        return True


def _check_versions(group: Group, version: int, batch: int) -> None:
    for completion in group.completions:
        strange = completion.versions[completion.versions != version]
        if len(strange):
            raise VersionError(
                f"batch {batch}, prompt {group.prompt.key}: a token was drawn by version {int(strange[0])}, but the "
                f"schedule announced version {version}; the sampler did not take the delivery"
            )
