"""A reward that leaves no group without a signal: both programs must compute every completion."""

from __future__ import annotations

import zlib
from typing import Any


def hashed(completion: str, answer: Any) -> float:
    """A number in [0, 1) that depends on every character of the text, so that only equal texts have equal rewards."""
    return zlib.crc32(completion.encode()) / 2**32
