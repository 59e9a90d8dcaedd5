"""What computes attention, log-probs and decoding for one device and dtype, and how device and dtype are picked.

PyTorch's operations run on any device. On a CPU with a C compiler the kernels of cpu/ replace them, and also compute
whole decoder layers for the families that cpu/decoder.py reproduces. In bfloat16 the matrix products of these layers
and of the head are the kernels' too: then rollout engine and trainer agree to the bit.
"""

from __future__ import annotations

import copy
import os
import platform
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lagrpo.cpu import autograd, kernels, library
from lagrpo.cpu.decoder import FusedDecoder, is_reproduced
from lagrpo.cpu.library import ISA, LEVELS, NoKernels, cpu_flags, isa_level
from lagrpo.cpu.panels import AdaptedPanels, BorrowedPanels, OwnPanels, chosen_products, joined
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model import attention, logprobs
from lagrpo.model.attention import Shape, takes_varlen
from lagrpo.model.layout import PackedLayout
from lagrpo.model.lora import adapted, copy_trained

Choice = Literal["auto", "c", "torch"]
Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Backend:
    """PyTorch's operations, with the `reason`; with `kernels` the C kernels, and then `products` says what computes
    products of bfloat16 (None if PyTorch does)."""

    device: torch.device
    dtype: torch.dtype
    reason: str = "as chosen"
    kernels: bool = False
    products: str | None = None

    def __str__(self) -> str:
        return library.describe() if self.kernels else f"PyTorch ({self.reason})"

    def over(self, layout: PackedLayout) -> RowLayout:
        """The layout of a packed row that a model is called with."""
        return RowLayout(layout, self)

    def attend(
        self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attend along a packed row: [rows, Hq, D], [rows, Hkv, D] twice -> [rows, Hq, D]; differentiable."""
        way = autograd.attend if self.attends_by_kernels(query.shape[-1]) else attention.attend
        return way(layout, query, key, value, scaling)

    def sample(self, logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens by inverse CDF, and their log-probs: see `logprobs.sample_tokens`."""
        return (kernels if self.kernels else logprobs).sample_tokens(logits_RV, tau, uniform_R)

    def layers(self, lm: Any, panels: Any = None) -> Any:
        """What computes whole decoder layers of a model, from its weights or `panels`; None if its own modules do."""
        if not self.kernels or not is_reproduced(lm, Shape.of(lm.config.get_text_config()).d):
            return None
        # the kernels take bfloat16 in pairs along the inputs
        even = all(m.in_features % 2 == 0 for m in lm.modules() if isinstance(m, nn.Linear))
        if panels is None and even and self.dtype == torch.bfloat16 and self.products is not None:
            panels = OwnPanels(lm.get_decoder(), lm.get_output_embeddings())
        if isinstance(panels, OwnPanels) and adapted(lm):
            panels = AdaptedPanels(panels, lm.get_decoder())
        return FusedDecoder(lm, panels)

    def copy(self, model: Any) -> tuple[Any, BorrowedPanels | OwnPanels | None]:
        """A copy of a model's transformers model that does not learn, and `panels` for its layers. If the kernels
        compute all products, the copy lacks weights of linear layers. Copies share frozen layers that have adapters."""
        if not model.exact:
            return copy_trained(model.lm), None
        if isinstance(model.layers.panels, AdaptedPanels):
            return copy_trained(model.lm), model.layers.panels.base
        weights = [
            m.weight for layer in model.decoder.layers for group in joined(layer) for m in group
        ]
        empty = {id(p): nn.Parameter(p.new_empty(0), requires_grad=False) for p in weights}
        lm: Any = copy.deepcopy(model.lm, empty).requires_grad_(False)
        return lm, BorrowedPanels(model.layers.panels, lm.get_decoder(), lm.get_output_embeddings())

    def computation(self, text: Any, layers: FusedDecoder | None) -> str:
        """What computes the forward pass besides PyTorch's products, in words; `layers`: what computes whole layers."""
        d = Shape.of(text).d
        if not self.kernels:
            varlen = takes_varlen(self.device, self.dtype, d)
            return "PyTorch with FlashAttention (varlen_attn)" if varlen else str(self)
        said = str(self)
        if layers is not None and layers.exact:
            said += f", forward products by {self.products}"
        if layers is None or not layers.fits(None):
            said += f"; norms and activations of {text.model_type!r} by transformers"
        if not self.attends_by_kernels(d):
            said += (
                f"; attention by PyTorch (heads of {d} numbers, not a multiple of {kernels.VECTOR})"
            )
        return said

    def attends_by_kernels(self, d: int) -> bool:
        return self.kernels and d % kernels.VECTOR == 0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """A packed row, and the backend that attends along it."""

    row: PackedLayout
    backend: Backend

    @property
    def longest(self) -> int:
        return self.row.longest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        return self.backend.attend(self.row, query, key, value, scaling)


# ---- picking ----


def choose_backend(choice: Choice, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The best backend for a device and dtype (auto), the C kernels on a CPU or an error (c), or PyTorch's operations
    (torch). Raises NoKernels."""
    device = torch.device(device)
    isa_level()
    if choice == "c" and device.type != "cpu":
        raise NoKernels(f"the C kernels run on a CPU, but the model is on {device}")
    if choice == "torch":
        return Backend(device, dtype)
    if device.type != "cpu":
        return Backend(device, dtype, f"on {device.type}")
    if dtype not in (torch.float32, torch.bfloat16):
        return Backend(device, dtype, f"no C kernels for {str(dtype).removeprefix('torch.')}")
    if (reason := library.why_not()) is None:
        return Backend(device, dtype, kernels=True, products=chosen_products())
    if choice == "c":
        raise NoKernels(f"the C kernels are unavailable here: {reason}")
    return Backend(device, dtype, f"no C kernels: {reason}")


def chosen_kernels() -> Choice:
    """$LAGRPO_KERNELS: c, torch or auto. Raises SettingsError for another word."""
    choice: Any = os.environ.get("LAGRPO_KERNELS") or "auto"
    if choice not in get_args(Choice):
        raise SettingsError(f"LAGRPO_KERNELS = {choice!r}: use auto, c or torch")
    return choice


def pick_device() -> torch.device:
    """A GPU if PyTorch sees one, else the CPU; each rank of a host has its own. Raises SettingsError for too many."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank, count = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    if int(rank or 0) >= count:
        raise SettingsError(
            f"rank {rank} of this host has no GPU: PyTorch sees {count} (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda" if rank is None else f"cuda:{rank}")


def pick_dtype(
    dtype: Literal["auto", "bfloat16", "float32"], device: torch.device
) -> tuple[Dtype, str]:
    """The dtype of a setting on a device, and why: bfloat16 if the device has products of it, else float32."""
    if dtype == "float32":
        return dtype, "as set"
    with as_settings_error("", NoKernels):
        multiplies, why = multiplies_bfloat16(device)
    if dtype == "bfloat16":
        return dtype, "as set" if multiplies else f"as set, although {why}"
    return ("bfloat16" if multiplies else "float32"), why


def multiplies_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Whether a device has instructions for products of bfloat16, and how we know."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"compute capability {major}.{minor}; bfloat16 needs 8.0"
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return (
            False,
            f"bfloat16 has not been tried on {platform.machine() if device.type == 'cpu' else device.type}",
        )
    found = sorted({"avx512_bf16", "amx_bf16"} & cpu_flags())
    if not found:
        return False, "this processor lists neither avx512_bf16 nor amx_bf16"
    if not LEVELS[isa_level()].bf16:
        return False, f"{ISA} = {os.environ[ISA]} turns off the processor's {' and '.join(found)}"
    return True, f"the processor has {' and '.join(found)}"
