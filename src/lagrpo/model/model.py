"""Policy: weights that have a version, the model that computes by them, and the model's chat.

`copy_policy` makes a copy for sampling (α) or for the KL term (π_ref). If the C kernels compute all
matrix products, the copy has panels instead of the weights of linear layers. While the copy holds
the version of the policy that learns, both read the same panels (cpu/panels.py). With adapters only
the adapters are copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lagrpo.cpu.autograd import with_enough_rows
from lagrpo.cpu.decoder import Layout, is_plain_linear
from lagrpo.cpu.panels import BorrowedPanels, ModelPanels
from lagrpo.model.backend import Backend, Choice, choose_backend
from lagrpo.model.chat import Chat
from lagrpo.model.files import save_model
from lagrpo.model.layout import Packed
from lagrpo.model.logprobs import token_logp
from lagrpo.model.lora import A, B, adapted, save_adapter

# A weight sync counts changes in about this many weights.
SAMPLE = 2**20
SUMMED_AT_ONCE = 2**22
"""Numbers that `checksum` multiplies at once: 32 MiB of products."""
GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
"""2^64 divided by the golden ratio, as a signed number: a factor that spreads bits."""


class Weights(Mapping[str, Tensor]):
    """The weights of a model of transformers by their names, without a gradient.

    They are read from the model as it is: every parameter, tied ones once, and the buffers that a
    checkpoint has. With `adapters` they are the weights of its adapters alone. `version` is the
    number of optimizer updates that they have had.
    """

    def __init__(self, lm: Any, version: int = 0, *, adapters: bool = False) -> None:
        self.version = version
        self.adapters = adapters
        self._lm = lm

    def __iter__(self) -> Iterator[str]:
        if self.adapters:
            for layer in adapted(self._lm):
                yield f"{layer}.{A}"
                yield f"{layer}.{B}"
            return
        for name, _ in self._lm.named_parameters():
            yield name
        stored_names = self._lm.state_dict().keys()
        for name, _ in self._lm.named_buffers():
            if name in stored_names:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return attrgetter(name)(self._lm).detach()
        except AttributeError as error:
            raise KeyError(name) from error

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies π_version into this model. Raises ValueError for other names or shapes."""
        check_weights(weights, self.shapes(), version)
        for name, tensor in self.items():
            tensor.copy_(weights[name])
        self.version = version

    def every_nth(self, name: str, n: int) -> Tensor:
        """Returns a copy of the numbers 0, n, 2n, … of a weight, flat."""
        return self[name].reshape(-1)[::n].clone()

    def find_stale(self, copied: Weights) -> list[str]:
        """Returns the names of weights of a whole copy of this model that are not these weights."""
        return copied.differing(self)

    def differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of weights whose bits differ from `weights`."""
        return [
            name
            for name, tensor in self.items()
            if count_differing(tensor, weights[name].to(tensor.device))
        ]


class PackedWeights(Weights):
    """A version whose linear layers are in `panels`.

    The other weights (embeddings, head, norms, biases, buffers) are in `lm`.
    """

    def __init__(self, origin: Weights, lm: Any, panels: BorrowedPanels) -> None:
        super().__init__(lm, origin.version)
        self._shapes = origin.shapes()
        self._panels = panels
        # The parameters of linear layers: empty in `lm`, and keys of their weights in the panels.
        self._empty_parameters: dict[str, nn.Parameter] = {}
        for name, parameter in lm.named_parameters():
            # `Backend.copy` has left these parameters empty, of shape [0].
            if self._shapes[name] != parameter.shape:
                self._empty_parameters[name] = parameter

    def __getitem__(self, name: str) -> Tensor:
        if name in self._empty_parameters:
            return self._panels.weights()[id(self._empty_parameters[name])]
        return super().__getitem__(name)

    def items(self) -> list[tuple[str, Tensor]]:  # type: ignore[override]
        """Returns the names and the weights, unpacked all at once."""
        unpacked = self._panels.weights()
        names_and_weights: list[tuple[str, Tensor]] = []
        for name in self:
            if name in self._empty_parameters:
                weight = unpacked[id(self._empty_parameters[name])]
            else:
                weight = self[name]
            names_and_weights.append((name, weight))
        return names_and_weights

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies the weights that are in the model, and packs the others.

        Panels are borrowed instead if the weights are the lender's own.
        """
        check_weights(weights, self._shapes, version)
        for name in self:
            if name not in self._empty_parameters:
                self[name].copy_(weights[name])
        self._panels.load(
            {parameter: weights[name] for name, parameter in self._empty_parameters.items()}
        )
        self.version = version

    def differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Returns the names of weights whose bits differ from `weights`.

        If the panels are shared with the trainer, only one layer of them is compared, another one
        at each version.
        """
        if not self._panels.are_current():
            return super().differing(weights)
        unpacked = self._panels.weights(self.version)
        compared: dict[str, Tensor] = {}
        for name, parameter in self._empty_parameters.items():
            if id(parameter) in unpacked:
                compared[name] = unpacked[id(parameter)]
        for name in self:
            if name not in self._empty_parameters:
                compared[name] = self[name]
        return [name for name, tensor in compared.items() if count_differing(tensor, weights[name])]


def trained_weights(lm: Any, version: int = 0) -> Weights:
    """Returns the weights that differ between versions of a model.

    They are its adapters if it has any, else all weights.
    """
    return Weights(lm, version, adapters=bool(adapted(lm)))


def check_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], version: int
) -> None:
    """Raises ValueError for names or shapes of version `version` that differ from `shapes`."""
    differing_names = sorted(set(shapes) ^ set(weights))
    if differing_names:
        raise ValueError(
            f"weights of version {version} do not fit the model: "
            f"{len(differing_names)} names differ, e.g. {differing_names[0]}"
        )
    if isinstance(weights, Weights):
        shapes_of_version = weights.shapes()
    else:
        shapes_of_version = {name: tensor.shape for name, tensor in weights.items()}
    for name, shape in shapes.items():
        shape_of_version = shapes_of_version[name]
        if shape != shape_of_version:
            raise ValueError(
                f"{name} is {tuple(shape_of_version)} in version {version}, not {tuple(shape)}"
            )


class Model(nn.Module):
    """A model of transformers with shared-prefix attention, `lm`, which is called on packed rows.

    The modules of `lm` compute, so that hooks (sharding) fire. If all linear layers are plain
    nn.Linear without hooks, the CPU's backend computes whole layers instead, from `panels` if they
    are given, else from the weights of `lm`.

    `dtype` is the dtype that the model computes in. Shards of its weights may be wider.
    """

    def __init__(self, lm: Any, backend: Backend, panels: ModelPanels | None = None) -> None:
        super().__init__()
        self.lm: Any = lm.eval()
        self.config = lm.config
        self.backend = backend
        self.layers = backend.layers(lm, panels)
        self.dtype: torch.dtype = self.head.weight.dtype

    @property
    def decoder(self) -> nn.Module:
        return self.lm.get_decoder()

    @property
    def head(self) -> nn.Linear:
        return self.lm.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def exact(self) -> bool:
        """True if a row of the forward pass has the same bits, whatever is computed with it.

        Then π/α is exactly 1 after a weight sync.
        """
        return self.layers is not None and self.layers.exact

    @property
    def computation(self) -> str:
        """A description of the code that computes the forward pass."""
        return self.backend.computation(self.config.get_text_config(), self.layers)

    def forward(self, packed: Packed, tau: float, entropy_T: Tensor | None = None) -> Tensor:
        """Returns log π(token | prompt, tokens before it) at temperature tau: float32 [T], nats.

        There is one value for every completion token. `entropy_T`, float32 [T], is filled with the
        entropy of the distribution that each token comes from, nats.
        """
        layout = self.backend.over(packed.layout)
        hidden = self.hidden(packed.input_ids, packed.layout.position_ids, layout)  # [rows, H]
        return token_logp(
            hidden_TH=hidden.index_select(0, packed.layout.logit_rows),
            head=self.head,
            token_ids_T=packed.token_ids,
            tau=tau,
            entropy_T=entropy_T,
            softmax=self.backend.softmax,
            product=self.layers.product if self.layers is not None else None,
        )

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Returns the final hidden states [rows, H].

        The tokens, int64 [rows], are one packed row, or one token of each of several sequences.
        """
        if self.layers is not None and self.layers.fits(layout):
            return self.layers(input_ids, position_ids, layout)
        output = self.decoder(
            input_ids=input_ids.unsqueeze(0),  # [1, rows]
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            layout=layout,
        )
        return output.last_hidden_state.squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [rows, V] of hidden states [rows, H].

        They are in the model's dtype, without a gradient.
        """
        if self.layers is not None and is_plain_linear(self.head):
            product = self.layers.product
            if product is not None:
                return product(hidden)
        return self.head(with_enough_rows(hidden))[: len(hidden)]


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A version of weights, the model that computes by them, its chat, and the temperature tau."""

    weights: Weights
    model: Model
    chat: Chat
    tau: float

    @staticmethod
    def from_model(
        lm: Any,
        tokenizer: Any,
        tau: float = 1.0,
        version: int = 0,
        backend: Backend | Choice = "auto",
        chat: Chat | None = None,
    ) -> Policy:
        """Returns a policy of a model of transformers with shared-prefix attention.

        `backend` is a backend, or the setting by which one is chosen. A `chat` replaces the chat of
        model and tokenizer.
        """
        if not isinstance(backend, Backend):
            weight = lm.get_output_embeddings().weight
            backend = choose_backend(backend, weight.device, weight.dtype)
        return Policy(
            weights=trained_weights(lm, version),
            model=Model(lm, backend),
            chat=chat or Chat.from_model(lm, tokenizer),
            tau=tau,
        )

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def all_weights(self) -> Weights:
        """All weights that the policy computes by, frozen ones included."""
        if self.weights.adapters:
            return Weights(self.model.lm, self.version)
        return self.weights

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def logp(
        self, packed: Packed, entropy_T: Tensor | None = None, tau: float | None = None
    ) -> Tensor:
        """Returns log-probs, at the policy's tau unless another is given: see Model.forward."""
        if tau is None:
            tau = self.tau
        return self.model(packed, tau, entropy_T)

    def advance(self) -> None:
        """Counts an optimizer update, after which the weights are the next version."""
        self.weights.version += 1

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Loads π_version. Raises ValueError for other names or shapes."""
        self.weights.load(weights, version)

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face model directory; with adapters these alone, as PEFT does."""
        if self.weights.adapters:
            save_adapter(self.model.lm, self.weights, directory)
        else:
            save_model(self.model.lm, directory)
        self.chat.save(directory)


def copy_policy(policy: Policy) -> Policy:
    """Returns a copy of the policy with the same weights, backend and tau, that does not learn."""
    backend = policy.model.backend
    lm, panels = backend.copy(policy.model)
    if isinstance(panels, BorrowedPanels):
        weights = PackedWeights(policy.weights, lm, panels)
    else:
        weights = trained_weights(lm, policy.version)
    return Policy(weights, Model(lm, backend, panels), policy.chat, policy.tau)


# Comparing versions


def as_integers(tensor: Tensor) -> Tensor:
    """Returns a view of the bits of a tensor."""
    integer_dtypes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integer_dtypes[tensor.element_size()])


def count_differing(one: Tensor, other: Tensor) -> int | Tensor:
    """Returns how many numbers of two tensors differ in their bits.

    On a GPU the result is a tensor, for which nothing waits.
    """
    differs = as_integers(one) != as_integers(other)
    if differs.device.type == "cpu":
        # NumPy counts bytes several times as fast as PyTorch does on a CPU.
        return int(np.count_nonzero(differs.numpy()))
    return differs.sum()


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Returns a sum over the bits of a tensor, each with a factor of its position: int64 [].

    Odd factors let no change of one number get lost. Of larger changes one in 2^64 is not seen.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for numbers in as_integers(tensor.contiguous()).reshape(-1).split(SUMMED_AT_ONCE):
        factors = torch.arange(start, start + len(numbers), device=tensor.device)
        factors = factors * GOLDEN_RATIO
        factors = (factors ^ (factors >> 29)) * GOLDEN_RATIO | 1
        total += (numbers * factors).sum()
        start += len(numbers)
    return total


@torch.no_grad()
def sample_weights(weights: Weights) -> list[Tensor]:
    """Returns a copy of every n-th weight of each parameter, about SAMPLE in all."""
    num_weights = sum(shape.numel() for shape in weights.shapes().values())
    # An odd stride visits every column of a matrix whose width is a power of two.
    stride = max(1, num_weights // SAMPLE) | 1
    return [weights.every_nth(name, stride) for name in weights]


def fingerprint(weights: Weights) -> str:
    """Returns a digest that tells versions of a model's weights apart, by a sample of them."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in zip(weights, sample_weights(weights), strict=True):
        digest.update(name.encode())
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
