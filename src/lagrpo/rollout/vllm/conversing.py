"""Episodes by a server: each turn of the policy is a request of its own, with everything so far as its prompt.

The server finds the keys and values of what it has generated in its cache of prefixes, if that is on. The first turns
of a group are one request, as without an environment; after it each completion goes on by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from lagrpo.rollout.base import Request
from lagrpo.rollout.episodes import Episode, Episodes
from lagrpo.rollout.vllm.fleet import Served
from lagrpo.rollout.vllm.generation import Generated, Generation
from lagrpo.rollout.vllm.server import Server
from lagrpo.types import Completion, Group


def converse(
    generation: Generation, episodes: Episodes, server: Server, request: Request, G: int, served: Served,
    using: Callable[[], AbstractContextManager[str]],
) -> Group:  # fmt: skip
    """The group of a request; each turn is asked by the weights whose label `using` gives. Raises as
    Generation.generate."""

    def ask(behind: Sequence[int], n: int, most: int, turn: tuple[int, ...] = ()) -> list[Generated]:
        with using() as label:
            return generation.ask(server, request, behind, n, served, label, most, turn)

    def read(answer: Generated) -> Completion:
        return generation.read(answer, served)

    def go_on(g: int, first: Generated) -> Completion:
        episode = episodes.begin(request.prompt, (generation.seed, "sample", *request.address, g))
        try:
            return _go_on(generation, episode, g, read(first), lambda *words: read(*ask(*words)))
        finally:
            episode.forget()

    answers = ask((), G, generation.max_tokens)
    with ThreadPoolExecutor(G) as pool:
        return Group(request.prompt, tuple(pool.map(go_on, range(G), answers)), request.epoch)


def _go_on(
    generation: Generation, episode: Episode, g: int, first: Completion, ask: Callable[..., Completion]
) -> Completion:
    """One completion, from its first turn on. A turn that cannot be used ends it: it has failed."""
    turns = [first]
    while (turn := turns[-1]).outcome is None:
        episode.end_turn(turn.token_ids.tolist())
        reply = episode.take()
        if episode.outcome is not None:
            break
        turns.append(_said(reply))
        behind = torch.cat([of.token_ids for of in turns]).tolist()
        left = generation.max_tokens - sum(of.length for of in turns)
        turns.append(ask(behind, 1, left, (g, len(turns))))
    ids, logp, versions, sampled = (
        torch.cat([getattr(of, name) for of in turns]) for name in ("token_ids", "logp_alpha", "versions", "sampled")
    )
    return Completion(
        ids, logp, versions, episode.finished, generation.decode(ids.tolist()),
        turn.outcome or episode.outcome, sampled, tuple(episode.turns),
    )  # fmt: skip


def _said(tokens: tuple[int, ...]) -> Completion:
    """What the environment said, as a piece of a completion."""
    ids = torch.tensor(tokens, dtype=torch.long)
    nothing = torch.full((len(ids),), math.nan)
    return Completion(ids, nothing, torch.full((len(ids),), -1), False, "", sampled=torch.zeros(len(ids)).bool())
