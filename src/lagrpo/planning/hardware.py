"""What GPUs are made of, by their data sheets, and the words for a network's speed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from lagrpo.errors import SettingsError, suggest


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU of this project's benchmarks: `peak` FLOP/s of dense `products`; `bandwidth` of its memory,
    bytes/s; `memory` bytes, None where it is the machine's; `link` to the others of its node, bytes/s one way; the
    shares of these that are reached; `step`, `launch`, `sync`, `server_sync`, `server_speed` as in PlanSettings, `disk`
    in bytes/s. `sheet` says where the numbers come from, `sources` where the shares do; what it does not name is
    assumed."""

    name: str
    peak: float
    bandwidth: float
    memory: float | None
    link: float
    learning_share: float = 0.4
    decoding_share: float = 0.5
    bandwidth_share: float = 0.6
    network_share: float = 0.7
    step: float = 2e-3
    launch: float = 2e-2
    server_speed: float = 1.0
    sync: float = 0.1
    server_sync: float = 0.3
    disk: float = 2e9
    products: str = "bfloat16"
    sheet: str = "its data sheet"
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def shared(self) -> bool:
        """Whether all ranks and servers share one machine."""
        return self.name == "cpu"

    def source(self, name: str) -> str:
        """Where a figure comes from."""
        return dict(self.sources).get(name, "assumed")


# Peaks are dense: data sheets of NVIDIA give twice as much "with sparsity". Links are half of the sum of both ways.
_GPUS = (
    # HGX B200 at 1,000 W: 2.25 PFLOP/s, 180 GB, 8 TB/s, NVLink 5 with 1.8 TB/s (NVIDIA's Blackwell data sheet)
    Device("b200", 2250e12, 8.0e12, 180e9, 900e9),
    # H200 SXM: 1,979 TFLOP/s with sparsity, 141 GB, 4.8 TB/s, NVLink 4 with 900 GB/s (NVIDIA's H200 data sheet)
    Device("h200", 989e12, 4.8e12, 141e9, 450e9),
    # H100 SXM: 1,979 TFLOP/s with sparsity, 80 GB, 3.35 TB/s, NVLink 4 with 900 GB/s (NVIDIA's H100 data sheet)
    Device("h100", 989e12, 3.35e12, 80e9, 450e9),
    # A100 80 GB SXM: 312 TFLOP/s, 2,039 GB/s, NVLink 3 with 600 GB/s; 40 GB: 1,555 GB/s (NVIDIA's A100 data sheet)
    Device("a100", 312e12, 2.039e12, 80e9, 300e9),
    Device("a100-40gb", 312e12, 1.555e12, 40e9, 300e9),
    # L40S: 362 TFLOP/s, 48 GB, 864 GB/s, PCIe 4 x16 with 64 GB/s (NVIDIA's L40S data sheet)
    Device("l40s", 362e12, 864e9, 48e9, 32e9),
    # L4: 242 TFLOP/s with sparsity, 24 GB, 300 GB/s, PCIe 4 x16 with 64 GB/s (NVIDIA's L4 data sheet)
    Device("l4", 121e12, 300e9, 24e9, 32e9),
    # A10: 125 TFLOP/s, 24 GB, 600 GB/s, PCIe 4 with 64 GB/s (NVIDIA's A10 data sheet)
    Device("a10", 125e12, 600e9, 24e9, 32e9),
    # RTX 4090: 165.2 TFLOP/s with float32 sums, 24 GB, 1,008 GB/s, PCIe 4 x16 (NVIDIA's Ada white paper)
    Device("rtx4090", 165.2e12, 1.008e12, 24e9, 32e9),
)
_MEASURED = "measured on two cores of an AMD EPYC (Zen 5), "
CPU = Device(
    "cpu", 815e9, 43e9, None, 2e9,
    learning_share=0.67, decoding_share=0.67, bandwidth_share=1.0, network_share=1.0, step=4e-3, server_speed=0.4,
    sync=0.14, server_sync=1.0, sheet=_MEASURED + "benchmarks/results/peak.md and benchmarks/README.md",
    sources=(
        ("learning_share", _MEASURED + "benchmarks/results/peak.md (67 and 71 %)"),
        ("decoding_share", _MEASURED + "benchmarks/results/scaling.json (16 and 160 rows)"),
        ("step", _MEASURED + "benchmarks/results/scaling.json (16 and 160 rows)"),
        ("bandwidth_share", _MEASURED + "benchmarks/README.md"),
        ("server_speed", _MEASURED + "benchmarks/results/vllm.md (2.47 and 2.56 times)"),
        ("sync", _MEASURED + "benchmarks/results/scaling.json"),
        ("server_sync", _MEASURED + "docs/vllm.md (1.19 s, .2 of them for bytes)"),
    ),
)  # fmt: skip
PEAK_FLOAT32 = {True: (210e9, "with AVX-512"), False: (115e9, "without AVX-512 (Zen 3)")}
DEVICES = {device.name: device for device in (*_GPUS, CPU)}
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def find_device(name: str) -> Device:
    """The device of a name; spaces, hyphens, upper case, the maker and SXM do not matter. Raises SettingsError for an
    unknown one, with those that are known."""
    plain = {_plain(known): known for known in DEVICES}
    if (known := plain.get(_plain(name))) is None:
        raise SettingsError(
            f"--gpu {name!r} is not in the table; known are {', '.join(DEVICES)}.{suggest(_plain(name), plain)} Others "
            "by their numbers: --peak, --bandwidth, --memory, --link, without --gpu"
        )
    return DEVICES[known]


def _plain(name: str) -> str:
    return re.sub("80gb$", "", re.sub(r"[\s_-]|nvidia|geforce|sxm\d?|hbm\de?", "", name.lower()))


def in_float32(device: Device, flags: Collection[str]) -> Device:
    """A CPU with these flags where it multiplies float32: what PyTorch's products reach. GPUs stay as they are."""
    if not device.shared:
        return device
    peak, cpu = PEAK_FLOAT32["avx512f" in flags]
    return replace(device, peak=peak, products="float32", sheet=f"measured on two cores of an AMD EPYC {cpu}")


def own_device(peak: float, bandwidth: float, memory: float, link: float) -> Device:
    """A GPU that is in no table."""
    return replace(DEVICES["h100"], name="own", peak=peak, bandwidth=bandwidth, memory=memory, link=link, sheet="given")


def parse_network(text: str) -> float:
    """A network's speed in bytes a second. Raises SettingsError for text that is none.

    >>> parse_network("400Gb"), parse_network("50 GB/s"), parse_network("100Gbit/s")
    (50000000000.0, 50000000000.0, 12500000000.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT])(b|B|bit|Bit|byte|Byte)(?:ps|/s)?\s*", text)
    if found is None or float(found[1]) == 0:
        number = re.match(r"\s*(\d+(?:\.\d+)?)", text)
        shown = number[1] if number and float(number[1]) else "400"
        raise SettingsError(
            f"--network {text!r:.40} is no speed: write {shown}Gb for {shown} gigabits a second, or {shown}GB for "
            f"{shown} gigabytes"
        )
    bits = found[3] == "b" or found[3].lower() == "bit"
    return float(found[1]) * _BITS[found[2].lower()] / (8 if bits else 1)
