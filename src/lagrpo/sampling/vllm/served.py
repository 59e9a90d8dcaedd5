"""Which weights all servers of a run should have, and how one that died gets them back."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from lagrpo.sampling.base import Item
from lagrpo.sampling.vllm.server import SamplerError, Server
from lagrpo.sampling.vllm.wire import Parcel

SCORE_TOLERANCE = 0.5  # nats, mean: a revived server serves the version it had, not another


class Served:
    """The weights of the last sync, and how the servers scored the tokens of the parity check with them."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(4)  # so that another run's version 3 is not taken for ours
        self.parcel: Parcel | None = None
        self._scores: list[tuple[Item, list[float]]] = []

    @property
    def label(self) -> str:
        """What the servers should report; empty before the first sync."""
        return self.parcel.label if self.parcel else ""

    def label_of(self, version: int) -> str:
        """What the servers report for a version of this run."""
        return f"{self.run}:{version}"

    def version_of(self, label: str) -> int:
        """The version that a label stands for; -1 for weights that are not of this run."""
        run, _, number = label.partition(":")
        return int(number) if run == self.run and number.isdigit() else -1

    def set(self, parcel: Parcel | None) -> None:
        """From now on the servers should have these weights."""
        self.parcel, self._scores = parcel, []

    def remember(self, items: Sequence[Item], scores: Sequence[list[float]]) -> None:
        """Keep the scores that a revived server has to repeat."""
        self._scores = list(zip(items, scores, strict=True))

    def restore(self, server: Server) -> None:
        """Load the weights into a revived server and check its scores. Raises SamplerError if they differ."""
        if self.parcel is None:
            return
        server.pause()
        server.reload(self.parcel.write())
        server.label(self.parcel.label)
        server.resume()
        for (prompt_ids, token_ids), before in self._scores:
            now = server.score(prompt_ids, token_ids)
            difference = sum(abs(a - b) for a, b in zip(now, before, strict=True)) / len(before)
            if not difference <= SCORE_TOLERANCE:
                raise SamplerError(
                    f"{server} came back, but scores the same tokens otherwise than before (by {difference:.3g} nats a "
                    "token)"
                )
