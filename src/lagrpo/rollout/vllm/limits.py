"""How many adapters, and of which ranks, a vLLM server is started for. Nothing heavy is imported."""

from __future__ import annotations

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 can be started with
SPANNED = 4  # adapters that completions under way may have between them, where they may have several


def rank_of_server(r: int) -> int:
    """The least rank of adapters that a server can be started with for those of rank r.

    >>> rank_of_server(16), rank_of_server(20)
    (16, 32)
    """
    return next(rank for rank in RANKS if rank >= r)
