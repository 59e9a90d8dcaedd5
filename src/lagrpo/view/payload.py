"""What the page holds, packed: a JSON header and the arrays that it refers to by number, deflated.

Layout, before deflating: the length of the header as a little-endian uint32; the header as UTF-8; zeros up to a
multiple of 8; the arrays, each at a multiple of 8. The header's `arrays` has [type, offset from the first, length].
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from lagrpo.runs.files import to_json

_SURROGATE = re.compile("[\ud800-\udfff]")


class Arrays:
    """The arrays of a page, in the order in which they were added: uint8, (u)int16, (u)int32 or floats."""

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, array: np.ndarray) -> int:
        """Its number."""
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
    content = zlib.decompress(packed)
    (length,) = struct.unpack_from("<I", content)
    header, start = json.loads(content[4 : 4 + length]), 4 + length + -(4 + length) % 8
    return header, [np.frombuffer(content, np.dtype(kind), n, start + at) for kind, at, n in header["arrays"]]


def shortest_unsigned(values: Any) -> np.ndarray:
    """The same counts, in two bytes each if these hold them, else in four."""
    array = np.array(values, dtype=np.int64)
    return array.astype(np.uint16 if not len(array) or array.max() < 1 << 16 else np.uint32)


class Table(dict[Any, int]):
    """Distinct entries, each with a number."""

    def number(self, entry: Any) -> int:
        """The number of the entry, which is added if it is new."""
        return self.setdefault(entry, len(self))
