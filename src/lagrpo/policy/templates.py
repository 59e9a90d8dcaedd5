"""Chat templates come with models, and are programs of strangers: they may loop for ever, or take all memory.

They are rendered in a process of their own (rendering.py), with a deadline, a limit of processor time and, on Linux, a
limit of memory; macOS keeps no limit of memory, so there the deadline alone holds. The text is that of
tokenizer.apply_chat_template: the process runs transformers' function.
"""

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
START = 120.0  # seconds for the process to get ready, on a machine that does other things
_LARGEST_REPLY = 16 * rendering.LONGEST  # bytes: JSON escapes a character by at most twelve


class TemplateError(ValueError):
    """A chat template that does not make a prompt of some messages; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template cannot render it: {reason}")


class Templates:
    """The process that renders, started at the first use or by `start`. It ends with `close`, with this object and with
    the program."""

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._process: tuple[Process, Connection] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process, so that it gets ready meanwhile."""
        if self._process is not None:
            return
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = Process(target=rendering.serve, args=(theirs, MEMORY, self._seconds), daemon=True)
        with whole():
            process.start()
            theirs.close()
            self._process, self._ready = (process, ours), False
            self._end = weakref.finalize(self, _end, process, ours)

    def render(self, template: str, special: Mapping[str, Any], messages: Sequence[Any]) -> str:
        """The text of the messages, with the header of the answer that is to come. `special`: the special tokens that
        the template may name.

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


def _end(process: Process, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()
