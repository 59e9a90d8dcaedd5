"""A reward for which no group has equal rewards, so that both programs compute every completion."""

from __future__ import annotations

import zlib


def hashed(completion: str, answer: object) -> float:
    """A number in [0, 1) that depends on every character of the completion."""
    return zlib.crc32(completion.encode()) / 2**32
