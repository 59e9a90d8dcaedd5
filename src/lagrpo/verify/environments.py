"""Environments in worker processes: every turn is a call with the verifier's deadline, in whichever process is free.

An environment travels pickled, so a process that is ended takes only its own turn with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lagrpo.tasks.base import Address, Make
from lagrpo.types import Prompt
from lagrpo.verify import worker
from lagrpo.verify.pool import Job, Workers


class Environments:
    """The processes, for what `make` makes; settings as those of a Verifier. Any thread may use them. Raises TypeError
    for what cannot be sent to another process."""

    def __init__(
        self, make: Make, *, workers: int | None = None, deadline: float = 5.0, memory: float = 4.0,
        file_size: float = 1.0,
    ) -> None:  # fmt: skip
        self._workers = Workers(make, "environment", workers, deadline, memory, file_size)

    def open(self, prompt: Prompt, address: Address) -> tuple[Mapping[str, Any], ...]:
        """The messages with which an episode begins. Raises ValueError where it cannot."""
        kind, said = self.result(self.submit(None, prompt, address, None))
        if kind == "unscored":
            raise ValueError(f"its environment does not start: {said}")
        return said[0]

    def submit(self, state: bytes | None, prompt: Prompt | None, address: Address | None, text: str | None) -> Job:
        """Have an environment reply to `text`: the one that is pickled in `state`, else a new one, which starts with
        the prompt and the address."""
        return self._workers.submit(worker.take_turn, state, prompt, address, text)

    def result(self, job: Job) -> tuple[str, Any]:
        """("turn", (messages, reward, state)), ("final", (reward, reason)) or ("unscored", reason)."""
        return self._workers.result(job)

    def forget(self, job: Job) -> None:
        """Nobody will ask for its result."""
        self._workers.forget(job)

    def close(self) -> None:
        """End the processes, whatever they are doing, within seconds."""
        self._workers.close()

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
