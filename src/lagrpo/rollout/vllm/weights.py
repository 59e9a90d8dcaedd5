"""Weight sync: one version of the weights into all servers, or all of them back to the one before. Versions are also
directories that trainer and servers both see: written, read back, and only then named."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lagrpo.rollout.vllm.fleet import Fleet, Member
from lagrpo.rollout.vllm.server import SamplerError, UnreachableError
from lagrpo.rollout.vllm.wire import Parcel, StuckError, Wire

FILE = "model.safetensors"


class WeightSync:
    """Weights to the servers of a fleet, in their `dtype`, by `wire`; `directories` keeps what a server may need
    again. `adapters`: the weights are those of adapters (adapters.py)."""

    pauses = True
    """Whether the servers have to be paused meanwhile."""

    def __init__(
        self, fleet: Fleet, wire: Wire, directories: Directories, dtype: torch.dtype = torch.bfloat16,
        adapters: bool = False,
    ) -> None:  # fmt: skip
        self.wire, self.directories, self.dtype, self.adapters = wire, directories, dtype, adapters
        self._fleet = fleet

    def pack(self, weights: Mapping[str, Tensor], version: int) -> Parcel:
        """The weights as they go over the wire, written to disk if they go that way. Raises SamplerError for other
        parameters or shapes than the version before, CorruptError for a file that does not hold the weights."""
        own = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in weights.items()}
        # The trainer's weights move on. A server that dies may need these again, so a copy stays on the host.
        kept = own if self.wire.by_directory else {name: t.cpu() for name, t in own.items()}
        label = self._fleet.served.label_of(version)
        parcel = Parcel(label, own, lambda: str(self.directories.put(kept, version)), self.adapters)
        before = self._fleet.served.parcel
        if before is not None and parcel.shapes != before.shapes:
            raise SamplerError(f"version {version} has other parameters or shapes than the version before: not sent")
        if self.wire.by_directory:
            parcel.write()
        return parcel

    def load(self, parcel: Parcel) -> None:
        """Load the weights into every server, all of them paused. A server that dies gets them when it is back.

        Raises:
            SamplerError: a server refused them, and all are back at the version before; or a server is gone for good;
            or the transfer is stuck, and the fleet broken, so that nothing generates with half of the weights.
        """
        served, version = self._fleet.served, parcel.label.partition(":")[2]
        before = served.parcel
        served.set(parcel)
        try:
            refused = self._send(parcel)
        except StuckError as error:
            stuck = SamplerError(
                f"version {version} did not get to the servers: {error}. They are left paused and may have half of "
                "it: restart those that are still up (the ones that this run started are ended). vllm.sync_deadline is "
                "the time to wait; with vllm.weight_sync = 'directory' no server waits for another"
            )
            self._fleet.give_up(stuck)
            raise stuck from error
        if refused:
            served.set(before)
            if before is not None:
                self._go_back(before, refused)
            after = "The servers go on with the version they had" if before else "Is it the same model?"
            raise SamplerError(f"version {version} was refused: {next(iter(refused.values()))}. {after}")

    def restore(self, parcel: Parcel) -> None:
        """Load weights once more that all servers had, from the shared directory. All servers are paused."""
        self._fleet.served.set(parcel)
        self._go_back(parcel, {})

    @contextmanager
    def using(self) -> Iterator[str]:
        """Inside, a server is asked by the version of this label, which stays."""
        yield self._fleet.served.label

    def forget_before(self, version: int) -> None:
        """Remove what only older versions need."""
        self.directories.drop_before(version)

    def close(self) -> None:
        """Remove what lies in the shared directory."""
        self.directories.close()

    def read(self, parcel: Parcel) -> Mapping[str, Tensor]:
        """The weights of a version, as they were sent."""
        return load_file(Path(parcel.write()) / FILE)

    def _send(self, parcel: Parcel) -> dict[Member, SamplerError]:
        """The servers that are well and refused the weights, with what they said. One whose load failed because it was
        dead is back, and has the weights."""
        refused, failures = {}, self.wire.send(self._fleet.servers, parcel)
        for member, failure in zip(self._fleet.members, failures, strict=True):
            if failure is None:
                self._fleet.ask(member, lambda server: server.label(parcel.label))
            elif isinstance(failure, UnreachableError) and not member.server.healthy():
                self._recover(member, failure)
            else:
                refused[member] = failure
        return refused

    def _go_back(self, before: Parcel, refused: Mapping[Member, SamplerError]) -> None:
        """The version before into all servers. One that failed to load the new one is left with half of it and cannot
        load anything any more (vLLM 0.32): it is brought back like one that died."""
        for member in self._fleet.members:
            if isinstance(failure := refused.get(member), UnreachableError):
                self._recover(member, failure)
            else:
                self._fleet.ask(member, lambda server: server.reload(before.write()))
                self._fleet.ask(member, lambda server: server.label(before.label))

    def _recover(self, member: Member, failure: UnreachableError) -> None:
        loading = f"{failure} (version {self._fleet.served.version} was being loaded)"
        self._fleet.recover(member, member.life, UnreachableError(loading))
        if self._fleet.broken:
            raise self._fleet.broken


class CorruptError(SamplerError):
    """A file of weights does not hold what was written into it."""


class Directories:
    """The versions that may still be needed, each a directory of safetensors below `root`. The root is our own: `close`
    removes it, and if this process is killed, a later one does."""

    def __init__(self, parent: str | None, write: Callable[[Mapping[str, Tensor], Path], None] | None = None) -> None:
        """`write` fills the directory of a version; `write_weights` unless given."""
        self._write = write or write_weights
        base = Path(parent).expanduser() if parent else _shared_memory()
        if parent is None:  # in a directory of the user's, other hosts may be at work
            _remove_abandoned(base)
        self.root = base / f"lagrpo-{os.getpid()}-{secrets.token_hex(4)}"
        self.root.mkdir(parents=True, mode=0o755)

    def put(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """Write a version, read it back, and only then give it its name. Raises CorruptError for a file that does not
        hold the weights, OSError for one that cannot be written."""
        path = self.root / f"v{version:06d}"
        if path.is_dir():
            return path
        scratch = path.with_suffix(".tmp")
        scratch.mkdir(exist_ok=True)
        self._write(weights, scratch)
        return scratch.rename(path)

    def drop(self, version: int) -> None:
        """Remove a version."""
        shutil.rmtree(self.root / f"v{version:06d}", ignore_errors=True)

    def drop_before(self, version: int) -> None:
        """Remove the versions older than this one."""
        for path in self.root.iterdir():
            if path.name < f"v{version:06d}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a version, and read it back. Raises CorruptError for a file that does not hold the weights."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(own, folder / FILE, metadata={"format": "pt"})
    check_file(folder / FILE, own)


def check_file(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Raises CorruptError unless the file holds exactly these weights, bit for bit: NaN equals itself."""
    wrong = f"{path} was not written as it should be"
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(weights):
                raise CorruptError(f"{wrong}: it has other parameters")
            for name, tensor in weights.items():
                bits = [t.contiguous().view(-1).view(torch.uint8) for t in (file.get_tensor(name), tensor)]
                if not torch.equal(*bits):
                    raise CorruptError(f"{wrong}: {name} differs from what was written")
    except SafetensorError as error:
        raise CorruptError(f"{wrong}: {error}") from error


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _remove_abandoned(base: Path) -> None:
    """Remove the directories of processes of this machine that have ended."""
    for path in base.glob("lagrpo-*-*") if base.is_dir() else ():
        number = path.name.split("-")[1]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
