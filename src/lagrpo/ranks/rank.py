"""Where this process stands among those that torchrun started, by the environment that torchrun gives it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lagrpo.errors import SettingsError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Rank:
    """One process among `size`: the `number`-th of all, the `local_number`-th of the `local_size` of its host."""

    number: int
    size: int
    local_number: int
    local_size: int
    address: str
    port: int
    hosted: bool
    """torchrun's agent hosts the store at `address`; otherwise rank 0 does"""
    restarts: int
    """how often torchrun has started the processes again"""

    @staticmethod
    def find() -> Rank | None:
        """The rank that the environment names; None for a process that runs alone. Raises SettingsError where the
        environment names half of one."""
        given = {name: os.environ.get(name) for name in NEEDED}
        if given["WORLD_SIZE"] in (None, "1"):
            return None
        if missing := [name for name, value in given.items() if not value]:
            raise SettingsError(
                f"WORLD_SIZE = {given['WORLD_SIZE']} is set without {', '.join(missing)}: start the processes with "
                "torchrun (torchrun --nproc-per-node 2 -m lagrpo train …), or unset WORLD_SIZE"
            )
        numbers = {name: _number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        return Rank(
            number=numbers["RANK"],
            size=numbers["WORLD_SIZE"],
            local_number=numbers["LOCAL_RANK"],
            local_size=_number("LOCAL_WORLD_SIZE", 1),
            address=os.environ["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
        )

    def store(self, seconds: float = 60.0) -> Any:
        """A connection to the store in which the ranks meet, a TCPStore of torch.distributed. Raises RuntimeError where
        it is not there in time."""
        import torch.distributed as dist

        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self.address,
            self.port,
            is_master=self.number == 0 and not self.hosted,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def recall(self, name: str) -> str | None:
        """What `remember` kept, also of the processes before torchrun started them again."""
        store, key = self.store(), f"kept/{name}"
        return store.get(key).decode() if store.check([key]) else None

    def remember(self, name: str, value: str) -> None:
        """Keep a text in torchrun's store."""
        self.store().set(f"kept/{name}", value)

    def __str__(self) -> str:
        return f"rank {self.number} on {platform.node()}"


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, "" if default is None else str(default))
    if not value.isdigit():
        raise SettingsError(f"the environment's {name} = {value!r} is no number; torchrun sets it")
    return int(value)
