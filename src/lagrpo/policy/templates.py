"""Renders chat templates. They come with models and are strangers' programs: they may loop forever or take all memory.

So a process of its own renders them (rendering.py), with a deadline, a limit of processor time and, on Linux, a limit
of memory (macOS enforces none). The process runs transformers' function, so the text is what
tokenizer.apply_chat_template returns."""

from __future__ import annotations

import json
import multiprocessing
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lagrpo.interrupts import whole
from lagrpo.policy import rendering
from lagrpo.workers import Process

DEADLINE = 10.0  # seconds for one prompt
MEMORY = 512 * 2**20  # bytes beyond what the process has when it begins
START = 120.0  # seconds until the process must be ready, on a busy machine
_LARGEST_REPLY = 16 * rendering.LONGEST  # bytes: JSON escapes a character by at most twelve


class TemplateError(ValueError):
    """A chat template fails on some messages; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template cannot render it: {reason}")


class Templates:
    """The rendering process. It starts at the first use or with `start`, and ends with `close`, with this object or
    with the program."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._process: tuple[Process, Connection] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process now, so that it gets ready in the background."""
        if self._process is not None:
            return
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = Process(target=rendering.serve, args=(theirs, MEMORY, self._seconds), daemon=True)
        with whole():
            process.start()
            theirs.close()
            self._process, self._ready = (process, ours), False
            self._end = weakref.finalize(self, _end_process, process, ours)

    def render(self, template: str, special: Mapping[str, Any], messages: Sequence[Any]) -> str:
        """The text of the messages with the header of the coming answer. `special` holds the special tokens that the
        template may name.

        Raises:
            TemplateError: an error in the template, or no text within the limits. The next call starts anew.
        """
        try:
            self.start()
            if not self._ready:
                self._reply(START)
                self._ready = True
            assert self._process is not None
            self._process[1].send((template, dict(special), list(messages)))
            reply = self._reply(self._seconds)
        except BaseException:
            self.close()
            raise
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process = None
            self._end()

    @property
    def _seconds(self) -> float:
        return DEADLINE if self._deadline is None else self._deadline

    def _reply(self, seconds: float) -> dict[str, str]:
        assert self._process is not None
        process, connection = self._process
        try:
            if not connection.poll(seconds):
                raise TemplateError(f"no text within {seconds:g} s")
            return json.loads(connection.recv_bytes(_LARGEST_REPLY))
        except (EOFError, OSError) as error:
            process.join()
            raise TemplateError(f"the process that renders ended with exit code {process.exitcode}") from error


def _end_process(process: Process, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()
