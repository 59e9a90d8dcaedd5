"""The processes of a run, as torchrun's environment variables count them."""

from __future__ import annotations

import os

from lagrpo.errors import SettingsError


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return read_count("WORLD_SIZE", default=1, least=1)


def local_size() -> int:
    """The number of these processes that run on this host."""
    return read_count("LOCAL_WORLD_SIZE", default=1, least=1)


def read_count(name: str, default: int, least: int = 0) -> int:
    """The whole number in one of torchrun's environment variables.

    Raises SettingsError for something else.
    """
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise SettingsError(
            f"{name} = {text!r} is not a number of at least {least}: "
            "torchrun sets it, so unset it for one process"
        )
    return int(text)


def check_ranks(device: str) -> None:
    """Raise SettingsError if this is one of several processes, but not known which."""
    size = world_size()
    if size == 1:
        return
    needed = ["RANK", "MASTER_ADDR", "MASTER_PORT"]
    if device == "cuda":
        needed.append("LOCAL_RANK")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise SettingsError(
            f"WORLD_SIZE = {size}, but {missing[0]} is not set: "
            "start lagrpo with torchrun, or unset WORLD_SIZE for one process"
        )
    rank = read_count("RANK", default=0)
    port = read_count("MASTER_PORT", default=0)
    if rank >= size:
        raise SettingsError(f"RANK = {rank}, but WORLD_SIZE = {size}: ranks are 0 to {size - 1}")
    if not 0 < port < 2**16:
        raise SettingsError(f"MASTER_PORT = {port} is not a port: set 1 to 65535")
