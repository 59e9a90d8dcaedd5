"""Trackers for tests: one that writes down what it is told, and some that do what no tracker should."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Notes:
    """Writes what it is told to notes.jsonl in the run's directory."""

    def open(self, about: Any, known: str | None) -> str:
        self.file = Path(about.run) / "notes.jsonl"
        self.note("open", known, about.settings["run"]["name"])
        return known or "first"

    def place(self) -> str:
        return "notes.jsonl, key=planted-parameter"

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        self.note("evaluation" if any(name.startswith("evaluation/") for name in values) else "batch", batch, values)

    def completions(self, batch: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self.note("completions", batch, rows)

    def close(self, status: str) -> None:
        self.note("close", status)

    def note(self, *what: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")


class Raises(Notes):
    """Takes no metrics of the second batch."""

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        if batch == 2:
            raise ConnectionError("no answer from https://me:planted@host")
        super().numbers(batch, values)


class Closed(Notes):
    def open(self, about: Any, known: str | None) -> str:
        raise PermissionError("no API key")


class Hangs(Notes):
    """From the first batch on, in a thread of the kind that Python's end waits for, too."""

    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        time.sleep(600)


class Slow(Notes):
    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        time.sleep(0.3)
        super().numbers(batch, values)


class Exits(Notes):
    def numbers(self, batch: int, values: Mapping[str, float]) -> None:
        os._exit(3)
