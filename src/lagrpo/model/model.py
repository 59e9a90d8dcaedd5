"""Policy: weights that have a version, a model that computes by them, and the chat that talks to it.

`copy_policy` makes a copy for sampling (α) or for the KL term (π_ref). If the C kernels compute all matrix products
(`Model.exact`), the copy has panels instead of the weights of linear layers, and while it holds the version of the
policy that learns, both read the same ones (cpu/panels.py). With adapters only these are copied.
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

from lagrpo.cpu.decoder import Layout, is_plain_linear
from lagrpo.cpu.panels import BorrowedPanels
from lagrpo.model.backend import Backend, Choice, choose_backend
from lagrpo.model.chat import Chat
from lagrpo.model.files import save_model
from lagrpo.model.layout import Packed
from lagrpo.model.logprobs import token_logp
from lagrpo.model.lora import A, B, adapted, save_adapter

SAMPLE = 2**20  # a weight sync counts changes in about so many weights


class Weights(Mapping[str, Tensor]):
    """The weights of a model of transformers by their names, without a gradient, read from the model as it is: every
    parameter, tied ones once, and the buffers that a checkpoint has. With `adapters` those of its adapters alone.
    `version` is how many optimizer updates they have had."""

    def __init__(self, lm: Any, version: int = 0, adapters: bool = False) -> None:
        self._lm, self.version, self.adapters = lm, version, adapters

    def __iter__(self) -> Iterator[str]:
        if self.adapters:
            yield from (f"{layer}.{part}" for layer in adapted(self._lm) for part in (A, B))
            return
        yield from (name for name, _ in self._lm.named_parameters())
        stored = self._lm.state_dict().keys()
        yield from (name for name, _ in self._lm.named_buffers() if name in stored)

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
        """Copy π_version into this model. Raises ValueError for other names or shapes."""
        check_weights(weights, self.shapes(), version)
        for name, tensor in self.items():
            tensor.copy_(weights[name])
        self.version = version

    def differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """The names of weights whose bits differ from `weights`."""
        return [
            name
            for name, tensor in self.items()
            if count_differing(tensor, weights[name].to(tensor.device))
        ]


class PackedWeights(Weights):
    """A version whose linear layers lie in `panels`, the others (embeddings, head, norms, biases, buffers) in `lm`."""

    def __init__(self, origin: Weights, lm: Any, panels: BorrowedPanels) -> None:
        super().__init__(lm, origin.version)
        self._shapes, self._panels = origin.shapes(), panels
        self._empty = {
            name: p for name, p in lm.named_parameters() if self._shapes[name] != p.shape
        }

    def __getitem__(self, name: str) -> Tensor:
        return (
            self._panels.weights()[id(self._empty[name])]
            if name in self._empty
            else super().__getitem__(name)
        )

    def items(self) -> Any:
        """As `Weights.items`, unpacked all at once."""
        packed = self._panels.weights()
        return [
            (name, packed[id(self._empty[name])] if name in self._empty else self[name])
            for name in self
        ]

    def shapes(self) -> dict[str, torch.Size]:
        return self._shapes

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy what lies in the model, and pack the rest, or borrow it if it is the lender's own."""
        check_weights(weights, self._shapes, version)
        for name in self:
            if name not in self._empty:
                self[name].copy_(weights[name])
        self._panels.load({parameter: weights[name] for name, parameter in self._empty.items()})
        self.version = version

    def differing(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Of panels that are the trainer's present ones one layer is compared, another one at each version."""
        if not self._panels.are_current():
            return super().differing(weights)
        packed = self._panels.weights(self.version)
        names = {name: packed[id(p)] for name, p in self._empty.items() if id(p) in packed}
        names |= {name: self[name] for name in self if name not in self._empty}
        return [name for name, tensor in names.items() if count_differing(tensor, weights[name])]


def trained_weights(lm: Any, version: int = 0) -> Weights:
    """The weights that differ between versions of a model: its adapters if it has any, else all weights."""
    return Weights(lm, version, adapters=bool(adapted(lm)))


def check_weights(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], version: int
) -> None:
    """Raise ValueError for names or shapes of version `version` that differ from `shapes`."""
    if odd := sorted(set(shapes) ^ set(weights)):
        raise ValueError(
            f"weights of version {version} do not fit the model: {len(odd)} names differ, e.g. {odd[0]}"
        )
    given = (
        weights.shapes()
        if isinstance(weights, Weights)
        else {n: tensor.shape for n, tensor in weights.items()}
    )
    for name, shape in shapes.items():
        if shape != given[name]:
            raise ValueError(
                f"{name} is {tuple(given[name])} in version {version}, not {tuple(shape)}"
            )


class Model(nn.Module):
    """A model of transformers with shared-prefix attention, `lm`, which is called on packed rows.

    Its modules compute, so that hooks (sharding) fire. If all linear layers are plain nn.Linear without hooks, the
    CPU's backend computes whole layers instead, from `panels` if they are given, else from the weights of `lm`."""

    def __init__(self, lm: Any, backend: Backend, panels: Any = None) -> None:
        super().__init__()
        self.lm: Any = lm.eval()
        self.config, self.backend, self.layers = lm.config, backend, backend.layers(lm, panels)
        self.dtype: torch.dtype = (
            self.head.weight.dtype
        )  # that it computes in; shards of its weights may be wider

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
        """Whether all products of the forward pass are the kernels': then π/α is exactly 1 after a weight sync."""
        return self.layers is not None and self.layers.exact

    @property
    def computation(self) -> str:
        """What computes the forward pass, in words."""
        return self.backend.computation(self.config.get_text_config(), self.layers)

    def forward(self, packed: Packed, tau: float, entropy_T: Tensor | None = None) -> Tensor:
        """log π(token | prompt, tokens before it) at temperature tau, of every completion token: float32 [T], nats.
        `entropy_T` float32 [T] is filled with the entropy of the distribution that each token comes from, nats."""
        layout = self.backend.over(packed.layout)
        hidden = self.hidden(packed.input_ids, packed.layout.position_ids, layout)
        rows = hidden.index_select(0, packed.layout.logit_rows)
        product = self.layers.product if self.layers is not None else None
        return token_logp(
            rows, self.head, packed.token_ids, tau, entropy_T, self.backend.kernels, product
        )

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Final hidden states of one packed row, or of one token of several sequences: [rows] twice -> [rows, H]."""
        if self.layers is not None and self.layers.fits(layout):
            return self.layers(input_ids, position_ids, layout)
        ids = {"input_ids": input_ids.unsqueeze(0), "position_ids": position_ids.unsqueeze(0)}
        return self.decoder(**ids, use_cache=False, layout=layout).last_hidden_state.squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, V], in the model's dtype, without a gradient."""
        product = (
            self.layers.product if self.layers is not None and is_plain_linear(self.head) else None
        )
        return product(hidden) if product is not None else self.head(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A version of weights, the model that computes by them, its chat, and the sampling temperature tau."""

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
    ) -> Policy:
        """A policy of a model of transformers with shared-prefix attention; `backend`: what computes, or its choice."""
        if not isinstance(backend, Backend):
            weight = lm.get_output_embeddings().weight
            backend = choose_backend(backend, weight.device, weight.dtype)
        return Policy(
            trained_weights(lm, version), Model(lm, backend), Chat.from_model(lm, tokenizer), tau
        )

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def all_weights(self) -> Weights:
        """All weights that the policy computes by, frozen ones included."""
        return Weights(self.model.lm, self.version) if self.weights.adapters else self.weights

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def logp(
        self, packed: Packed, entropy_T: Tensor | None = None, tau: float | None = None
    ) -> Tensor:
        """Log-probs, at the policy's tau unless another is given: see Model.forward."""
        return self.model(packed, self.tau if tau is None else tau, entropy_T)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load π_version. Raises ValueError for other names or shapes."""
        self.weights.load(weights, version)

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model directory, for a model with adapters these alone, as PEFT does."""
        if self.weights.adapters:
            save_adapter(self.model.lm, self.weights, directory)
        else:
            save_model(self.model.lm, directory)
        self.chat.save(directory)


def copy_policy(policy: Policy) -> Policy:
    """A copy of the policy with the same weights, for its backend and at its tau, that does not learn."""
    backend = policy.model.backend
    lm, panels = backend.copy(policy.model)
    packed = isinstance(panels, BorrowedPanels)
    weights = (
        PackedWeights(policy.weights, lm, panels) if packed else trained_weights(lm, policy.version)
    )
    return Policy(weights, Model(lm, backend, panels), policy.chat, policy.tau)


# ---- comparing versions ----


def count_differing(one: Tensor, other: Tensor) -> int | Tensor:
    """How many numbers of two tensors differ in their bits; on a GPU as a tensor, which nothing waits for."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    unequal = one.view(bits) != other.view(bits)
    # NumPy counts bytes several times as fast as PyTorch does on a CPU.
    return int(np.count_nonzero(unequal.numpy())) if unequal.device.type == "cpu" else unequal.sum()


@torch.no_grad()
def sample_weights(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """A copy of every n-th weight of each parameter, about SAMPLE in all."""
    every = max(1, sum(w.numel() for w in weights.values()) // SAMPLE) | 1
    return [w.reshape(-1)[::every].clone() for w in weights.values()]


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Tells versions of a model's weights apart, by a sample of them."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in zip(weights, sample_weights(weights), strict=True):
        digest.update(name.encode())
        digest.update(tensor.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
