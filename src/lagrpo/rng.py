"""Randomness that is addressed, not consumed.

Every draw comes from a counter-based generator keyed by its address, for example
(seed, "sample", batch, prompt, completion). It has no state to save or restore, and a
completion does not depend on the others in its batch.

>>> bool((uniforms(3, 0, "sample", 1, 2, 3) == uniforms(5, 0, "sample", 1, 2, 3)[:3]).all())
True
"""

from __future__ import annotations

import hashlib

import numpy as np


def generator(*address: int | str) -> np.random.Philox:
    """Returns a Philox bit generator keyed by the 128-bit BLAKE2b digest of the address."""
    # Types and separators keep (1, 12) apart from ("1", 12) and from (11, 2).
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in address)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def uniforms(count: int, *address: int | str) -> np.ndarray:
    """Returns `count` uniform float64 in [0, 1) at this address: the top 53 bits times 2^-53.

    They come from the raw 64-bit stream, which numpy keeps stable between versions, unlike the
    distributions built on it.
    """
    return (generator(*address).random_raw(count) >> np.uint64(11)) * 2.0**-53


def signed16(start: int, stop: int, *address: int | str) -> np.ndarray:
    """Returns the numbers `start` .. `stop` - 1 at this address, int16 of [-32767, 32767].

    They are the raw stream cut into 16 bits, where -32768, which has no counterpart, becomes 0. All
    numbers but 0, which is drawn twice as often, are equally likely. Their mean is 0. Numbers
    before `start` are skipped, not drawn.
    """
    # A step of the generator makes four words of 64 bits, and each word is four numbers.
    skipped_steps = start // 16
    first = 16 * skipped_steps
    number_of_words = -(-(stop - first) // 4)  # rounded up
    bit_generator = generator(*address)
    bit_generator.advance(skipped_steps)
    # Integers of the full range are the raw stream, drawn four times as fast as random_raw does.
    raw = np.random.Generator(bit_generator).integers(0, 2**64, number_of_words, dtype=np.uint64)
    # Little-endian, so that a processor of the other kind draws the same numbers.
    bits = raw.astype("<u8", copy=False).view("<i2")[start - first : stop - first]
    bits = bits.astype(np.int16, copy=False)
    bits[bits == -32768] = 0
    return bits


def permutation(count: int, *address: int | str) -> np.ndarray:
    """Returns a uniformly random order of 0 .. count-1 at this address.

    It sorts the indices by `count` raw 64-bit draws.
    """
    return np.argsort(generator(*address).random_raw(count), kind="stable")
