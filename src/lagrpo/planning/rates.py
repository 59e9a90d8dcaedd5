"""How fast the parts of a batch go: stated, from a device's numbers and the shares of them that are reached."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lagrpo.planning.hardware import Device, parse_network
from lagrpo.planning.work import OPTIMIZER, Model
from lagrpo.settings.plan import PlanSettings


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that the model rests on, in words: what it is, its value and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank or server reaches: `learning` and `decoding` operations a second, `reading` bytes a second in
    decoding, `copying` those of a copy within a device; `step` seconds of a decoding step beside, `launch` those of a
    micro-batch; `update` seconds of the optimizer for all that is trained; `link`, `network` and `disk` bytes a second;
    `sync` and `server_sync` seconds of a weight sync beside its bytes, within a rank and to servers; `judge` seconds of
    a worker for a completion, `late` those that judging it outlasts sampling, `rest` what else a completion costs.
    `figures`: the same in words."""

    learning: float
    decoding: float
    reading: float
    step: float
    launch: float
    update: float
    link: float
    network: float
    disk: float
    copying: float
    sync: float
    server_sync: float
    judge: float = 0.0
    late: float = 0.0
    rest: float = 0.0
    server_speed: float = 1.0
    shared: bool = False
    """all ranks and servers share one machine"""
    figures: tuple[Figure, ...] = field(default=(), compare=False)

    def divided(self, ranks: int) -> Rates:
        """What each of so many ranks reaches; where they share one machine, that is its part of it."""
        if not self.shared or ranks == 1:
            return self
        slower = {name: getattr(self, name) * ranks for name in ("step", "launch", "update")}
        faster = {name: getattr(self, name) / ranks for name in ("learning", "decoding", "reading", "copying")}
        return replace(self, **slower, **faster)


SHARES = {
    "learning_share": "learning, share of the peak (MFU)",
    "decoding_share": "products of the sampler, share of the peak",
    "bandwidth_share": "decoding and optimizer, share of the memory bandwidth",
    "network_share": "collectives and weight syncs, share of link and network",
    "step": "a decoding step beside reading and multiplying, s",
    "launch": "a micro-batch in learning beside its operations, s",
    "server_speed": "a server's speed, as a multiple of the in-process sampler's",
    "sync": "a weight sync within a rank beside its bytes, s",
    "server_sync": "a weight sync to servers beside its bytes, s",
    "disk": "the directory of weight syncs, bytes/s",
}


def stated_rates(device: Device, given: PlanSettings, model: Model) -> Rates:
    """The rates of a device, with what the settings of the command replace in it. Raises SettingsError for a network
    that is none."""
    device, figures = _resolved(device, given)
    network = parse_network(given.network) if given.network else device.link
    if given.network:
        figures.append(Figure("network between nodes, of one GPU and one way", f"{network / 1e9:g} GB/s", "--network"))
    judge = given.judging or 0.0
    if given.judging is not None:
        figures.append(Figure("judging a completion, s", f"{judge:g}", "--judging"))
    memory = device.bandwidth * device.bandwidth_share
    return Rates(
        learning=device.peak * device.learning_share,
        decoding=device.peak * device.decoding_share,
        reading=memory,
        step=device.step,
        launch=device.launch,
        update=OPTIMIZER * model.trained / memory,
        link=device.link * device.network_share,
        network=network * device.network_share,
        disk=device.disk,
        copying=memory / 2,  # read and written
        sync=device.sync,
        server_sync=device.server_sync,
        judge=judge,
        server_speed=device.server_speed,
        shared=device.shared,
        figures=tuple(figures),
    )


def _resolved(device: Device, given: PlanSettings) -> tuple[Device, list[Figure]]:
    """The device with the given numbers in place of its own, and each number with its source."""
    figures: list[Figure] = []
    changes: dict[str, Any] = {}
    units = {"peak": (1e12, "TFLOP/s", f"{device.products} peak"), "bandwidth": (1e9, "GB/s", "memory bandwidth")}
    units |= {"link": (1e9, "GB/s", "link to the GPUs of the node, one way"), "memory": (1e9, "GB", "memory")}
    for name, (scale, unit, words) in units.items():
        own = getattr(given, name)
        changes[name] = own * scale if own is not None else getattr(device, name)
        if changes[name] is not None:
            value = f"{changes[name] / scale:g} {unit}"
            assumed = device.shared and name == "link"
            source = f"--{name}" if own is not None else "assumed" if assumed else device.sheet
            figures.append(Figure(words, value, source))
    for name, words in SHARES.items():
        own = getattr(given, name)
        changes[name] = own * (1e9 if name == "disk" else 1) if own is not None else getattr(device, name)
        source = f"--{name.replace('_', '-')}" if own is not None else device.source(name)
        figures.append(Figure(words, f"{changes[name]:g}", source))
    return replace(device, **changes), figures
