"""What the page holds, packed: a JSON header and the arrays that it refers to by number, deflated.

Layout, before deflating: the length of the header as a little-endian uint32; the header as UTF-8; zeros up to a
multiple of 8; the arrays, each at a multiple of 8. The header's `arrays` has [type, offset from the first, length].
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lagrpo.runs.files import to_json

TYPES = {"uint8", "uint16", "int16", "uint32", "int32", "float32", "float64"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Arrays:
    """The arrays of a page, in the order in which they were added."""

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """Its number. Raises TypeError for a type that the page does not read."""
        if array.dtype.name not in TYPES:
            raise TypeError(f"the page reads no arrays of {array.dtype.name}")
        content = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()
        self._entries.append([array.dtype.name, self._size, len(array)])
        self._pieces.append(content + bytes(-len(content) % 8))
        self._size += len(self._pieces[-1])
        return len(self._entries) - 1

    def pack(self, header: Mapping[str, Any]) -> bytes:
        """The header and all arrays, deflated (the zlib format)."""
        text = _SURROGATE.sub("\ufffd", to_json({**header, "arrays": self._entries})).encode()
        start = struct.pack("<I", len(text)) + text
        return zlib.compress(b"".join([start, bytes(-len(start) % 8), *self._pieces]), 6)


def unpack(packed: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays again, as the page reads them."""
    import json

    content = zlib.decompress(packed)
    (length,) = struct.unpack_from("<I", content)
    header, start = json.loads(content[4 : 4 + length]), 4 + length + -(4 + length) % 8
    places = header["arrays"]
    return header, [np.frombuffer(content, np.dtype(kind), count, start + at) for kind, at, count in places]


def shortest_unsigned(values: np.ndarray) -> np.ndarray:
    """The same counts, in two bytes each where these hold them, else in four."""
    return values.astype(np.uint16 if not len(values) or values.max() < 1 << 16 else np.uint32)


class Table:
    """Distinct texts, each with a number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, entry: Any) -> int:
        """That of the entry, which is added where it is new."""
        return self._numbers.setdefault(entry, len(self._numbers))

    @property
    def entries(self) -> list[Any]:
        return list(self._numbers)
