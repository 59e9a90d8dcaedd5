"""Where this process stands among those that torchrun started, by the environment that torchrun gives it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from lagrpo.errors import SettingsError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """One process among `size`: the `rank`-th of all, the `local_rank`-th of the `local_size` of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosted: bool
    """torchrun's agent hosts the store at `address`; otherwise rank 0 does"""
    restarts: int
    """how often torchrun has started the processes again"""

    @staticmethod
    def find() -> Place | None:
        """The place that the environment names; None for a process that runs alone. Raises SettingsError where the
        environment names half of a place."""
        given = {name: os.environ.get(name) for name in NEEDED}
        if given["WORLD_SIZE"] in (None, "1"):
            return None
        if missing := [name for name, value in given.items() if not value]:
            raise SettingsError(
                f"WORLD_SIZE = {given['WORLD_SIZE']} is set without {', '.join(missing)}: start the processes with "
                "torchrun (torchrun --nproc-per-node 2 -m lagrpo train …), or unset WORLD_SIZE"
            )
        numbers = {name: _number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        return Place(
            rank=numbers["RANK"],
            size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_size=_number("LOCAL_WORLD_SIZE", 1),
            address=os.environ["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
        )

    def __str__(self) -> str:
        return f"rank {self.rank} on {platform.node()}"


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, "" if default is None else str(default))
    if not value.isdigit():
        raise SettingsError(f"the environment's {name} = {value!r} is no number; torchrun sets it")
    return int(value)
