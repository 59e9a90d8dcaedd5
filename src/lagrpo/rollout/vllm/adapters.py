"""Weight sync of adapters: each version gets to the servers as an adapter of its own name, beside the earlier ones.

The servers have the frozen weights from their start. Nothing is paused: completions under way go on by the adapter that
they began with, and whoever asks from then on names the new one. An adapter stays until nobody uses it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lagrpo.model.adapter_files import WEIGHTS, named, read_weights, save_adapter
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.server import RefusedError, SamplerError
from lagrpo.rollout.vllm.weights import Directories, WeightSync, check_file
from lagrpo.rollout.vllm.wire import DirectoryWire, Parcel, catch


def write_adapter(lm: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters of `lm`, and read them back. Raises CorruptError for a file that does not hold them."""
    save_adapter(lm, weights, folder)
    check_file(folder / WEIGHTS, named(weights))


class AdapterSync(WeightSync):
    """Versions of the adapters of `lm` to the servers of a fleet, through a directory below `parent`."""

    pauses = False

    def __init__(self, fleet: Fleet, lm: Any, parent: str | None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(fleet, DirectoryWire(), Directories(parent, partial(write_adapter, lm)), dtype, adapters=True)
        self._lock = threading.Lock()  # of what follows
        self._used: Counter[str] = Counter()  # by label: requests under way
        self._loaded: list[str] = []  # labels, oldest first

    def load(self, parcel: Parcel) -> None:
        """Load the adapter into every server. One that dies meanwhile gets it when it is back.

        Raises SamplerError where a server refused it, and all go on with the version that they had; or where a server
        is gone for good."""
        fleet, path = self._fleet, parcel.write()
        try:
            fleet.ask_all(lambda server: server.load_adapter(parcel.label, path))
        except RefusedError as error:
            self._unload(parcel.label)
            raise SamplerError(
                f"version {parcel.label.partition(':')[2]} was refused: {error}. The servers go on with what they had; "
                "a server for adapters is started with `lagrpo serve MODEL --lora-rank R`"
            ) from error
        with self._lock:
            if parcel.label not in self._loaded:  # a batch without an update is followed by the same version
                self._loaded.append(parcel.label)
            fleet.served.set(parcel)
        for server in fleet.servers:
            server.adapter = parcel.label

    def restore(self, parcel: Parcel) -> None:
        """Serve an adapter again that was served before, as the newest."""
        with self._lock:
            self._loaded = [label for label in self._loaded if label != parcel.label]
        self.load(parcel)

    @contextmanager
    def using(self) -> Iterator[str]:
        with self._lock:
            label = self._fleet.served.label
            self._used[label] += 1
        try:
            yield label
        finally:
            with self._lock:
                self._used[label] -= 1

    def forget_before(self, version: int) -> None:
        """Unload the adapters that no request under way has named, but for the newest."""
        with self._lock:
            *older, newest = self._loaded
            idle = [label for label in older if not self._used[label]]
            self._loaded = [label for label in older if self._used[label]] + [newest]
        for label in idle:
            self._unload(label)
            self.directories.drop(self._fleet.served.version_of(label))

    def read(self, parcel: Parcel) -> Mapping[str, Tensor]:
        return read_weights(Path(parcel.write()))

    def close(self) -> None:
        """Servers that run on are left without our adapters, unless they do not answer anyway."""
        for label in self._loaded if not self._fleet.broken else ():
            self._unload(label)
        super().close()

    def _unload(self, label: str) -> None:
        """A server that has not the adapter, or does not answer, has nothing to unload."""
        for server in self._fleet.servers:
            catch(partial(server.unload_adapter, label))
