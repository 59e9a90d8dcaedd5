"""Versions of the weights as directories that trainer and servers both see: written, read back, and only then named."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lagrpo.sampling.vllm.server import SamplerError

FILE = "model.safetensors"


class CorruptError(SamplerError):
    """A file of weights does not hold what was written into it."""


class Directories:
    """The versions that may still be needed, each a directory of safetensors below `root`. The root is our own: `close`
    removes it, and if this process is killed, a later one does."""

    def __init__(self, parent: str | None) -> None:
        base = Path(parent).expanduser() if parent else _shared_memory()
        if parent is None:  # in a directory of the user's, other hosts may be at work
            _remove_abandoned(base)
        self.root = base / f"lagrpo-{os.getpid()}-{secrets.token_hex(4)}"
        self.root.mkdir(parents=True, mode=0o755)

    def put(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """Write a version, read it back, and only then give it its name.

        Raises:
            CorruptError: the file does not hold the weights. OSError: it could not be written.
        """
        from safetensors.torch import save_file

        path = self.root / f"v{version:06d}"
        if path.is_dir():
            return path
        scratch = path.with_suffix(".tmp")
        scratch.mkdir(exist_ok=True)
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(own, scratch / FILE, metadata={"format": "pt"})
        check_file(scratch / FILE, own)
        scratch.rename(path)
        return path

    def drop_before(self, version: int) -> None:
        """Remove the versions older than this one."""
        for path in self.root.iterdir():
            if path.name < f"v{version:06d}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def check_file(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Raises CorruptError unless the file holds exactly these weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(weights):
                raise CorruptError(f"{path} was not written as it should be: it has other parameters")
            for name, tensor in weights.items():
                if not torch.equal(_bits(file.get_tensor(name)), _bits(tensor)):
                    raise CorruptError(f"{path} was not written as it should be: {name} differs from what was written")
    except SafetensorError as error:
        raise CorruptError(f"{path} was not written as it should be: {error}") from error


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: equal bits are equal weights, and NaN equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _remove_abandoned(base: Path) -> None:
    """Remove the directories of processes of this machine that have ended."""
    for path in base.glob("lagrpo-*-*") if base.is_dir() else ():
        number = path.name.split("-")[1]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
