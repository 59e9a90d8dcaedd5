"""The page: data packed into arrays, and the HTML around it, one file without links, which asks no network.

Layout of the data, before deflating: the length of the header as a little-endian uint32; the header, JSON in UTF-8;
zeros up to a multiple of 8; the arrays, each at a multiple of 8. The header's `arrays` has [type, offset from the
first, length]. Scripts and styles are allowed by their hashes alone. The data is base64, and names in the title are
escaped; the script puts every other text into the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from lagrpo.runs.files import to_json

STYLES = ("uplot.css", "style.css")
SCRIPTS = ("dom", "data", "trend", "groups", "tokens", "rollouts", "evaluations", "settings", "app")


class Arrays:
    """The arrays of a page, in the order in which they were added: uint8, (u)int16, (u)int32 or floats."""

    def __init__(self) -> None:
        self._entries: list[list[Any]] = []
        self._pieces: list[bytes] = []

    def add(self, array: np.ndarray) -> int:
        """Its number."""
        content = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()
        self._entries.append([array.dtype.name, sum(map(len, self._pieces)), len(array)])
        self._pieces.append(content + bytes(-len(content) % 8))
        return len(self._entries) - 1

    def pack(self, header: Mapping[str, Any]) -> bytes:
        """The header and all arrays, deflated (the zlib format)."""
        text = re.sub("[\ud800-\udfff]", "\ufffd", to_json({**header, "arrays": self._entries})).encode()
        start = struct.pack("<I", len(text)) + text
        return zlib.compress(b"".join([start, bytes(-len(start) % 8), *self._pieces]), 6)


def make_page(names: Sequence[str], packed: bytes, live: bool = False) -> str:
    """The page of runs with these names; `live` lets it ask the server that it comes from for newer data."""
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    style, library = "\n".join(map(_asset, STYLES)), _asset("uplot.js")
    program = f'(() => {{\n"use strict";\n{scripts}\n}})();'  # one function: its names are its own
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(program)}; style-src {_hash(style)}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(f"{', '.join(names)} · lagrpo view".encode(errors="replace").decode())
    data, marks = base64.b64encode(packed).decode(), " data-live" if live else ""
    parts = {"title": title, "style": style, "data": data, "library": library, "program": program}
    return _asset("page.html").format(live=marks, policy=policy, **parts)


def _asset(name: str) -> str:
    return files("lagrpo.view").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
