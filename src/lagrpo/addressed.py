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


def permutation(count: int, *address: int | str) -> np.ndarray:
    """A uniformly random order of 0 .. count-1 at this address: the ranks of `count` raw 64-bit draws (stable sort)."""
    return np.argsort(generator(*address).random_raw(count), kind="stable")
