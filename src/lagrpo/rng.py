"""Randomness that is addressed, not consumed.

Every draw comes from a counter-based generator keyed by its address, for example
(seed, "sample", batch, prompt, completion). There is no state to save or restore, and the same completion is drawn
whatever else is in the batch around it.

>>> bool((uniforms(3, 0, "sample", 1, 2, 3) == uniforms(5, 0, "sample", 1, 2, 3)[:3]).all())
True
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(*address: int | str) -> np.random.Philox:
    """A Philox bit generator keyed by the 128-bit BLAKE2b digest of the address."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in address)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def uniforms(count: int, *address: int | str) -> np.ndarray:
    """`count` uniform float64 in [0, 1) at this address, from the raw 64-bit stream (which numpy keeps stable
    between versions, unlike the distributions built on it): the top 53 bits times 2^-53."""
    return (generator(*address).random_raw(count) >> np.uint64(11)) * 2.0**-53


def signed16(count: int, *address: int | str) -> np.ndarray:
    """`count` int16 of [-32767, 32767] at this address, mean 0: the raw stream cut into 16 bits, where -32768, which
    has no counterpart, becomes 0. All but 0, which is drawn twice as often, are equally likely."""
    # Integers of the full range are the raw stream, drawn four times as fast as random_raw does.
    raw = np.random.Generator(generator(*address)).integers(
        0, 2**64, -(-count // 4), dtype=np.uint64
    )
    bits = raw.astype("<u8", copy=False).view("<i2")[:count].astype(np.int16, copy=False)
    bits[bits == -32768] = 0
    return bits


def permutation(count: int, *address: int | str) -> np.ndarray:
    """A uniformly random order of 0 .. count-1 at this address: the ranks of `count` raw 64-bit draws (stable sort)."""
    return np.argsort(generator(*address).random_raw(count), kind="stable")
