"""How a driver talks to the program it measures: one JSON object per line, over standard input and output.

This is the end inside the program, imported in the peer's environment too: the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Wire:
    """Replies go to what was standard output; whatever else prints there goes to standard error instead."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def reply(self, **measurements: Any) -> None:
        print(json.dumps(measurements), file=self._replies, flush=True)

    def request(self) -> dict[str, Any]:
        """The next request; the program ends where the driver has."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        return json.loads(line)


class Gate:
    """Lets a training loop make one update per request, and times it from the request to the reply.

    `others` answers the requests that are not for an update: name -> function(**arguments) -> measurements."""

    def __init__(
        self, wire: Wire, others: dict[str, Callable[..., dict[str, Any]]] | None = None
    ) -> None:
        self._wire, self._others = wire, others or {}
        self._started = 0.0

    def wait(self) -> None:
        """Block until an update is asked for."""
        while (request := self._wire.request()).pop("do") != "update":
            name = request.pop("name")
            self._wire.reply(**self._others[name](**request))
        self._started = time.perf_counter()

    def done(self, **measurements: Any) -> None:
        """The update is made."""
        self._wire.reply(seconds=time.perf_counter() - self._started, **measurements)


def imported(reference: str) -> Any:
    """What "package.module:name" names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
