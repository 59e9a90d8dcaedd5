"""Weight sync: one version of the weights into all servers, or all of them back to the one before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lagrpo.sampling.vllm.directories import Directories
from lagrpo.sampling.vllm.fleet import Fleet, Member
from lagrpo.sampling.vllm.server import SamplerError, UnreachableError
from lagrpo.sampling.vllm.wire import Parcel, StuckError, Wire


class WeightSync:
    """Weights to the servers of a fleet, in their `dtype`, by `wire`; `directories` keeps what a server may need
    again."""

    def __init__(self, fleet: Fleet, wire: Wire, directories: Directories, dtype: torch.dtype = torch.bfloat16) -> None:
        self.wire, self.directories, self.dtype = wire, directories, dtype
        self._fleet = fleet

    def pack(self, weights: Mapping[str, Tensor], version: int) -> Parcel:
        """The weights as they go over the wire, written to disk if they go that way.

        Raises:
            SamplerError: other parameters or shapes than the version before. CorruptError: the file does not
            hold the weights.
        """
        own = {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in weights.items()}
        # The trainer's weights move on. A server that dies may need these again, so a copy stays on the host.
        kept = own if self.wire.by_directory else {name: t.cpu() for name, t in own.items()}
        parcel = Parcel(self._fleet.served.label_of(version), own, lambda: str(self.directories.put(kept, version)))
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
        served = self._fleet.served
        before = served.parcel
        served.set(parcel)
        try:
            refused = self._send(parcel)
        except StuckError as error:
            self._fleet.give_up(stuck := _left_paused(parcel, error))
            raise stuck from error
        if refused:
            served.set(before)
            if before is not None:
                self._go_back(before, refused)
            after = "The servers go on with the version they had" if before else "Is it the same model?"
            raise SamplerError(f"version {_version(parcel)} was refused: {next(iter(refused.values()))}. {after}")

    def _send(self, parcel: Parcel) -> dict[Member, SamplerError]:
        """The servers that are well and refused the weights, with what they said."""
        failures = self.wire.send(self._fleet.servers, parcel)
        failed = dict(zip(self._fleet.members, failures, strict=True))
        for member, failure in failed.items():
            if failure is None:
                self._fleet.ask(member, lambda server: server.label(parcel.label))
        return {m: error for m, error in failed.items() if error is not None and not self._revive(m, error)}

    def _revive(self, member: Member, failure: SamplerError) -> bool:
        """Whether a server whose load failed was dead; then it is back and has the weights."""
        if not isinstance(failure, UnreachableError) or member.server.healthy():
            return False
        self._recover(member, failure)
        return True

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
        self._fleet.recover(member, member.life, failure)
        if self._fleet.broken:
            raise self._fleet.broken


def _version(parcel: Parcel) -> str:
    return parcel.label.partition(":")[2]


def _left_paused(parcel: Parcel, error: StuckError) -> SamplerError:
    return SamplerError(
        f"version {_version(parcel)} did not get to the servers: {error}. They are left paused and may have half of "
        "it: restart those that are still up (the ones that this run started are ended). vllm.sync_deadline is the "
        "time to wait; with vllm.weight_sync = 'directory' no server waits for another"
    )
