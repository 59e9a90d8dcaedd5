"""The other end of tasks/bridge: a program in another Python that holds an environment of `verifiers`, and the pipes to
it.

A request and a reply are a line of JSON each. A program that ends, or answers with something else, is started again;
the request that it was asked gets an error with the reason. Nothing that comes from there is more than text and
numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.untrusted import parse_json

PROGRAM = Path(__file__).with_name("bridge")
PATIENCE = 300.0  # seconds for an answer, also the first; in a worker process the verifier's deadline comes before it
LONGEST = 2**24  # bytes of an answer
_ENDING = 5.0  # seconds for a killed program to be gone


class BridgeError(Exception):
    """The program ended, or what it answered cannot be read."""


class RefusedError(ValueError):
    """The program says why it cannot do what it was asked."""


@dataclass(frozen=True, slots=True)
class Given:
    """What a program is started with: which Python, the environment's name, its arguments as JSON."""

    python: str
    name: str
    arguments: str


class Bridge:
    """A program that holds an environment. Not for several threads at once."""

    def __init__(self, given: Given) -> None:
        """Start it; `described` waits until it is ready. Raises OSError where its Python cannot be started."""
        self.given = given
        self._start()

    def _start(self) -> None:
        # The same order of sets in every process: an episode is played again where another process takes it over.
        surroundings = {**os.environ, "PYTHONHASHSEED": "0", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        self._process = subprocess.Popen(
            [self.given.python, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings
        )
        self._read = b""
        self._described: dict[str, Any] | None = None
        self.alive: dict[str, int] = {}
        """Episodes that the program holds, with the number of turns that they have taken."""
        with contextlib.suppress(BridgeError):  # it is told at the first answer that does not come
            self._send({"name": self.given.name, "arguments": json.loads(self.given.arguments)})

    def described(self) -> dict[str, Any]:
        """What the program says of its environment, once it has loaded it. Raises RefusedError and BridgeError."""
        if self._described is None:
            self._described = self._answer()
        return self._described

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises RefusedError, and BridgeError where the program has been started again."""
        self.described()
        try:
            self._send(request)
            return self._answer()
        except BridgeError:
            self.close()
            self._start()
            raise

    def close(self) -> None:
        """End the program, whatever it is doing."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BridgeError(self._ended()) from error

    def _answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            answer = parse_json(line.decode())
        except ValueError as error:
            raise BridgeError(f"its program wrote no JSON, but {one_line(repr(line[:60]))}") from error
        if not isinstance(answer, dict) or len(answer) != 1:
            raise BridgeError(f"its program wrote no answer, but {one_line(repr(line[:60]))}")
        if "error" in answer:
            raise RefusedError(one_line(str(answer["error"]), 2000))
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        file, last = self._process.stdout.fileno(), time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(file, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if len(self._read) > LONGEST:
                    raise BridgeError(f"its program wrote a line of more than {LONGEST:,} bytes")
                if not selector.select(max(0.0, last - time.monotonic())):
                    raise BridgeError(f"its program did not answer within {PATIENCE:g} s")
                if not (piece := os.read(file, 2**16)):
                    raise BridgeError(self._ended())
                self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> str:
        try:
            code = self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            return "its program closed its pipes"
        return f"its program was ended by signal {-code}" if code < 0 else f"its program ended with exit code {code}"


def find_python(python: str | None) -> str:
    """The Python that the settings name, or this one. Raises ValueError where there is none."""
    if python is None:
        return sys.executable
    python = os.path.expanduser(python)
    if not os.access(python, os.X_OK) or os.path.isdir(python):
        raise ValueError(
            f"task.python: there is no program {python!r} (looked from {os.getcwd()}); `make verifiers-env` makes an "
            "environment whose Python is .venv-verifiers/bin/python"
        )
    return os.path.abspath(python)
