"""The backend: the code that attends, decodes and computes log-probs for one device and dtype.

PyTorch's operations run on any device. On a CPU with a C compiler the kernels of cpu/ replace them,
and also compute whole decoder layers for the families that cpu/decoder.py reproduces. In bfloat16
the kernels compute the matrix products of these layers and of the head, too: then rollout engine
and trainer agree to the bit. On a GPU where Triton works, the kernels of gpu/ compute the softmax
over the vocabulary and what lies between the products of these layers. The functions at the end
pick device, dtype and backend.
"""

from __future__ import annotations

import copy
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from lagrpo.cpu import autograd, kernels, library
from lagrpo.cpu.decoder import FusedDecoder, has_fixed_angles, is_reproduced
from lagrpo.cpu.library import ISA, LEVELS, NoKernels, cpu_flags, isa_level
from lagrpo.cpu.panels import (
    AdaptedPanels,
    BorrowedPanels,
    ModelPanels,
    OwnPanels,
    chosen_products,
    joined,
)
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.gpu import exactness
from lagrpo.gpu import library as gpu_library
from lagrpo.gpu.cached_attention import flash_reads_caches
from lagrpo.model import attention, logprobs
from lagrpo.model.attention import Shape, takes_varlen
from lagrpo.model.layout import PackedLayout
from lagrpo.model.logprobs import SoftmaxKernels
from lagrpo.model.lora import adapted, copy_trained

if TYPE_CHECKING:
    from lagrpo.model.model import Model

Choice = Literal["auto", "c", "triton", "torch"]
Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Backend:
    """PyTorch's operations, the C kernels, or the Triton kernels.

    - `reason`: why they are PyTorch's operations
    - `kernels`: True if they are the C kernels
    - `triton`: True if they are the Triton kernels
    - `exact_products`: True if PyTorch's products give a row the same bits, whatever rows are
      computed with it
    - `products`: the name of the instructions by which the kernels compute products of bfloat16;
      None if PyTorch computes them
    """

    device: torch.device
    dtype: torch.dtype
    reason: str = "as chosen"
    kernels: bool = False
    triton: bool = False
    exact_products: bool = False
    products: str | None = None

    def __str__(self) -> str:
        if self.triton:
            return "Triton kernels"
        return library.describe() if self.kernels else f"PyTorch ({self.reason})"

    @property
    def softmax(self) -> SoftmaxKernels | None:
        """The module that computes the softmax over the vocabulary; None if PyTorch does."""
        if self.triton:
            # Not at the top: CPU builds of PyTorch come without Triton.
            from lagrpo.gpu import softmax

            return softmax
        return kernels if self.kernels else None

    def over(self, layout: PackedLayout) -> RowLayout:
        """Returns the layout that a model is called with for a packed row."""
        return RowLayout(layout, self)

    def attend(
        self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Attends along a packed row; differentiable.

        The query is [rows, Hq, D], key and value are [rows, Hkv, D]; the result is [rows, Hq, D].
        """
        if self.attends_by_kernels(query.shape[-1]):
            return autograd.attend(layout, query, key, value, scaling)
        return attention.attend(layout, query, key, value, scaling, by_triton=self.triton)

    def sample(self, logits_RV: Tensor, tau: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
        """Samples tokens by inverse CDF, and returns their log-probs, too.

        See `logprobs.sample_tokens`.
        """
        if self.softmax is not None:
            return self.softmax.sample_tokens(logits_RV, tau, uniform_R)
        return logprobs.sample_tokens(logits_RV, tau, uniform_R)

    def layers(self, lm: Any, panels: ModelPanels | None = None) -> FusedDecoder | None:
        """Returns what computes whole decoder layers of a model, from its weights or `panels`.

        Returns None if the model's own modules compute them.
        """
        if not self.kernels and not self.triton:
            return None
        if not is_reproduced(lm, Shape.of(lm.config.get_text_config()).d):
            return None
        if self.triton:
            from lagrpo.gpu import layers

            exact = (
                self.exact_products
                and has_fixed_angles(lm.config.get_text_config())
                and self._attends_by_flash(lm)
                and exactness.rows_are_independent(lm, self.device)
            )
            return FusedDecoder(lm, layer_kernels=layers, exact_products=exact)
        if panels is None and self._packs(lm):
            panels = OwnPanels(lm.get_decoder(), lm.get_output_embeddings())
        if isinstance(panels, OwnPanels) and adapted(lm):
            panels = AdaptedPanels(panels, lm.get_decoder())
        return FusedDecoder(lm, panels)

    def _attends_by_flash(self, lm: Any) -> bool:
        """True if FlashAttention attends both along packed rows and in decoding steps."""
        shape = Shape.of(lm.config.get_text_config())
        return takes_varlen(self.device, self.dtype, shape.d) and flash_reads_caches(
            self.device, self.dtype, shape.heads, shape.kv_heads, shape.d
        )

    def _packs(self, lm: Any) -> bool:
        """True if the kernels can compute the products of a model."""
        if self.products is None or self.dtype != torch.bfloat16:
            return False
        # The kernels take bfloat16 in pairs along the inputs.
        linear_layers = (module for module in lm.modules() if isinstance(module, nn.Linear))
        return all(layer.in_features % 2 == 0 for layer in linear_layers)

    def copy(self, model: Model) -> tuple[Any, BorrowedPanels | OwnPanels | None]:
        """Returns a copy of a model's transformers model that does not learn, and its panels.

        If the kernels compute all products, the weights of linear layers are empty in the copy, and
        in the panels instead. Copies of a model with adapters share its frozen layers.
        """
        panels = None if model.layers is None else model.layers.panels
        if panels is None or not model.exact:
            return copy_trained(model.lm), None
        if isinstance(panels, AdaptedPanels):
            return copy_trained(model.lm), panels.base
        # A model that learns computes by its own panels.
        assert isinstance(panels, OwnPanels)
        # A memo for deepcopy: it replaces a weight by the empty one under its id.
        empty_weights: dict[int, Any] = {}
        layers: Any = model.decoder.layers
        for layer in layers:
            for group in joined(layer):
                for linear in group:
                    empty = linear.weight.new_empty(0)
                    empty_weights[id(linear.weight)] = nn.Parameter(empty, requires_grad=False)
        lm = copy.deepcopy(model.lm, empty_weights).requires_grad_(requires_grad=False)
        return lm, BorrowedPanels(panels, lm.get_decoder(), lm.get_output_embeddings())

    def computation(self, text_config: Any, layers: FusedDecoder | None) -> str:
        """Returns a description of what computes the forward pass besides PyTorch's products.

        `layers` computes whole layers, if anything does.
        """
        shape = Shape.of(text_config)
        if not self.kernels:
            if not takes_varlen(self.device, self.dtype, shape.d):
                return str(self)
            description = "PyTorch with FlashAttention"
            if self.triton:
                description += f", {self}"
            if layers is not None and layers.exact:
                description += ", products independent of other rows"
            return description
        description = str(self)
        if layers is not None and layers.exact:
            description += f", forward products by {self.products}"
        if layers is None or not layers.fits(None):
            description += f"; norms and activations of {text_config.model_type!r} by transformers"
        if not self.attends_by_kernels(shape.d):
            description += (
                f"; attention by PyTorch (heads of {shape.d} numbers, "
                f"not a multiple of {kernels.VECTOR})"
            )
        return description

    def attends_by_kernels(self, d: int) -> bool:
        """True if the kernels attend with heads of d numbers: they take whole vectors."""
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


# Picking


def choose_backend(choice: Choice, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """Returns the backend for a device and dtype. To choose Triton, it compiles and runs a kernel.

    `choice` is "auto" for the best one that has been measured, "c" for the C kernels on a CPU or an
    error, "triton" for the Triton kernels on a GPU or an error, "torch" for PyTorch's operations.
    Raises NoKernels.
    """
    device = torch.device(device)
    # An impossible LAGRPO_CPU_ISA is an error, whatever computes.
    isa_level()
    if choice == "c" and device.type != "cpu":
        raise NoKernels(f"the C kernels run on a CPU, but the model is on {device}")
    if choice == "triton" and device.type != "cuda":
        raise NoKernels(f"the Triton kernels run on an NVIDIA GPU, but the model is on {device}")
    if choice == "torch":
        return Backend(device, dtype)
    if device.type == "cuda":
        return _choose_on_gpu(choice, device, dtype)
    if device.type != "cpu":
        return Backend(device, dtype, f"on {device.type}")
    if dtype not in (torch.float32, torch.bfloat16):
        return Backend(device, dtype, f"no C kernels for {str(dtype).removeprefix('torch.')}")
    reason = library.why_not()
    if reason is None:
        return Backend(device, dtype, kernels=True, products=chosen_products())
    if choice == "c":
        raise NoKernels(f"the C kernels are unavailable here: {reason}")
    return Backend(device, dtype, f"no C kernels: {reason}")


def _choose_on_gpu(choice: Choice, device: torch.device, dtype: torch.dtype) -> Backend:
    """Returns the backend on a GPU. Raises NoKernels if Triton was asked for and does not work."""
    if dtype in (torch.float32, torch.bfloat16):
        reason = gpu_library.why_not(dtype)
    else:
        reason = f"no Triton kernels for {str(dtype).removeprefix('torch.')}"
    if reason is not None:
        if choice == "triton":
            raise NoKernels(f"the Triton kernels are unavailable here: {reason}")
        return Backend(device, dtype, f"no Triton kernels: {reason}")
    exact = wants_exact_products() and exactness.has_exact_products(device, dtype)
    if exact:
        exactness.forbid_split_k()
    return Backend(device, dtype, triton=True, exact_products=exact)


def chosen_kernels() -> Choice:
    """Returns $LAGRPO_KERNELS: auto, c, triton or torch. Raises SettingsError for another word."""
    choice = os.environ.get("LAGRPO_KERNELS") or "auto"
    if choice not in get_args(Choice):
        raise SettingsError(f"LAGRPO_KERNELS = {choice!r}: use auto, c, triton or torch")
    return cast(Choice, choice)


def wants_exact_products() -> bool:
    """False if $LAGRPO_EXACT is 0: products of a GPU may split a sum then.

    Raises SettingsError for another word than 0 and 1.
    """
    choice = os.environ.get("LAGRPO_EXACT") or "1"
    if choice not in ("0", "1"):
        raise SettingsError(
            f"LAGRPO_EXACT = {choice!r}: use 1, or 0 to let a GPU split the sums of products"
        )
    return choice == "1"


def pick_device() -> torch.device:
    """Returns a GPU if PyTorch sees one, else the CPU. Ranks of one host do not share a GPU.

    Raises SettingsError if there are more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK")
    num_gpus = torch.cuda.device_count()
    if int(rank or 0) >= num_gpus:
        raise SettingsError(
            f"rank {rank} of this host has no GPU: PyTorch sees {num_gpus} (CUDA_VISIBLE_DEVICES)"
        )
    return torch.device("cuda" if rank is None else f"cuda:{rank}")


def pick_dtype(
    dtype: Literal["auto", "bfloat16", "float32"], device: torch.device
) -> tuple[Dtype, str]:
    """Returns the dtype of a setting on a device, and the reason.

    "auto" is bfloat16 if the device has instructions for its products, else float32.
    """
    if dtype == "float32":
        return dtype, "as set"
    with as_settings_error("", NoKernels):
        multiplies, reason = multiplies_bfloat16(device)
    if dtype == "bfloat16":
        return dtype, "as set" if multiplies else f"as set, although {reason}"
    return ("bfloat16" if multiplies else "float32"), reason


def multiplies_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Returns True if a device has instructions for products of bfloat16, and how we know."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"compute capability {major}.{minor}; bfloat16 needs 8.0"
    machine = platform.machine() if device.type == "cpu" else device.type
    if machine not in ("x86_64", "AMD64"):
        return False, f"bfloat16 has not been tried on {machine}"
    features = sorted({"avx512_bf16", "amx_bf16"} & cpu_flags())
    if not features:
        return False, "this processor lists neither avx512_bf16 nor amx_bf16"
    names = " and ".join(features)
    if not LEVELS[isa_level()].bf16:
        return False, f"{ISA} = {os.environ[ISA]} turns off the processor's {names}"
    return True, f"the processor has {names}"
