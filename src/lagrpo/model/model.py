"""Policy: weights that have a version, a model that computes by them, and the chat that talks to it.

`Model` calls a causal language model of transformers on packed rows. It gives hidden states and log-probs of completion
tokens only: the LM head never runs on prompt positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends.adapters import A, B, adapted
from lagrpo.backends.attention import Layout
from lagrpo.backends.backend import Backend, is_plain_linear
from lagrpo.backends.choose import Choice, choose_backend
from lagrpo.backends.layout import PackedLayout
from lagrpo.backends.logprobs import token_logp_by_module
from lagrpo.model.adapter_files import save_adapter
from lagrpo.model.chat import Chat, Templates
from lagrpo.model.lora import save_merged


class Weights(Mapping[str, Tensor]):
    """The weights of a model of transformers by the names that a checkpoint gives them, without a gradient, read one by
    one from the model as it is: every parameter, tied ones once, and the buffers that a checkpoint has. `version` is
    how many optimizer updates they have had."""

    def __init__(self, lm: Any, version: int = 0) -> None:
        self._lm, self.version = lm, version

    def __iter__(self) -> Iterator[str]:
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
        """Copy π_version into this model's own storage. Raise ValueError for names or shapes that are not its own."""
        check_weights(weights, self.shapes(), version)
        for name, tensor in self.items():
            tensor.copy_(weights[name])
        self.version = version


class AdapterWeights(Weights):
    """The weights of a model's adapters: where it has any, they are all that a version has of its own."""

    def __iter__(self) -> Iterator[str]:
        yield from (f"{layer}.{part}" for layer in adapted(self._lm) for part in (A, B))


def weights_of(lm: Any, version: int = 0) -> Weights:
    """What a version of a model has of its own: its adapters where it has any, else all weights."""
    return AdapterWeights(lm, version) if adapted(lm) else Weights(lm, version)


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], version: int) -> None:
    """Raise ValueError for names or shapes of version `version` that differ from `shapes`."""
    if odd := sorted(set(shapes) ^ set(weights)):
        raise ValueError(f"weights of version {version} do not fit the model: {len(odd)} names differ, e.g. {odd[0]}")
    given = (
        weights.shapes() if isinstance(weights, Weights) else {name: tensor.shape for name, tensor in weights.items()}
    )
    for name, shape in shapes.items():
        if shape != given[name]:
            raise ValueError(f"{name} is {tuple(given[name])} in version {version}, not {tuple(shape)}")


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row ready for the model: its layout, `input_ids` [rows] and the completion tokens `token_ids` [T]."""

    layout: PackedLayout
    input_ids: Tensor
    token_ids: Tensor

    @staticmethod
    def build(groups: Sequence[tuple[Sequence[int], Sequence[Tensor]]], device: torch.device | str = "cpu") -> Packed:
        """From (prompt token ids, [completion token ids int64 [t]]) of each group."""
        layout = PackedLayout.build([(len(p), [len(c) for c in cs]) for p, cs in groups], device)
        rows, tokens = [], []
        for prompt_ids, completions in groups:
            rows.append(torch.tensor(prompt_ids, dtype=torch.long))
            rows += [c[:-1] for c in completions]
            tokens += completions
        ids = torch.cat([torch.empty(0, dtype=torch.long), *tokens])
        return Packed(layout, torch.cat(rows).to(device), ids.to(device))


class Model(nn.Module):
    """A model of transformers with shared-prefix attention, `lm`, as the learner and the sampler call it.

    Every matrix product goes through a call of the module that has its weights, so that hooks on linear layers
    (sharding, adapters) fire. Where all linear layers are plain nn.Linear without hooks, the CPU's backend computes
    whole layers in their place, with `panels` from these in place of the weights of `lm`, and log-probs are taken from
    the head's weights."""

    def __init__(self, lm: Any, backend: Backend, panels: Any = None) -> None:
        super().__init__()
        self.lm: Any = lm.eval()
        self.config, self.backend, self.layers = lm.config, backend, backend.layers(lm, panels)
        self.dtype: torch.dtype = self.head.weight.dtype
        """that it computes in; shards of its weights may be wider"""

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
        """Whether all matrix products of the forward pass are the kernels': then sampler and learner agree to the bit
        right after a weight sync."""
        return self.layers is not None and self.layers.exact

    @property
    def computation(self) -> str:
        return self.backend.computation(self.config.get_text_config(), self.layers)

    @property
    def decoding(self) -> str:
        return self.backend.decoding(self.layers)

    def forward(self, packed: Packed, tau: float, entropy_T: Tensor | None = None) -> Tensor:
        """log π(token | prompt, tokens before it) at temperature tau, of every completion token: float32 [T], nats.
        `entropy_T` float32 [T] is filled with the entropy of the distribution that each token stands for, nats."""
        layout = self.backend.over(packed.layout)
        hidden = self.hidden(packed.input_ids, packed.layout.position_ids, layout)
        rows = hidden.index_select(0, packed.layout.logit_rows)
        if not is_plain_linear(self.head):
            return token_logp_by_module(rows, self.head, packed.token_ids, tau, entropy_T)
        product = self.layers.product if self.layers is not None else None
        return self.backend.token_logp(rows, self.head, packed.token_ids, tau, entropy_T, product)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Final hidden states of one packed row, or of one token of several sequences: input_ids and position_ids
        [rows] -> [rows, H]. `layout` says who attends to whom, and attends."""
        if self.layers is not None and self.layers.fits(layout):
            return self.layers(input_ids, position_ids, layout)
        out = self.decoder(
            input_ids=input_ids.unsqueeze(0), position_ids=position_ids.unsqueeze(0), use_cache=False, layout=layout
        )
        return out.last_hidden_state.squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, V], in the model's dtype, without a gradient."""
        product = self.layers.product if self.layers is not None and is_plain_linear(self.head) else None
        return product(hidden) if product is not None else self.head(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A version of weights, the model that computes by them, its chat, and the sampling temperature tau."""

    weights: Weights
    model: Model
    chat: Chat
    tau: float

    @staticmethod
    def of(
        lm: Any, tokenizer: Any, tau: float = 1.0, version: int = 0, backend: Backend | Choice = "auto",
        templates: Templates | None = None,
    ) -> Policy:  # fmt: skip
        """Make a policy of a model of transformers with shared-prefix attention. `backend`: what computes, or how to
        choose it for the model's device and dtype."""
        if not isinstance(backend, Backend):
            weight = lm.get_output_embeddings().weight
            backend = choose_backend(backend, weight.device, weight.dtype)
        return Policy(weights_of(lm, version), Model(lm, backend), Chat.of(lm, tokenizer, templates), tau)

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def all_weights(self) -> Mapping[str, Tensor]:
        """What the policy computes by: beside the weights of its adapters the frozen ones."""
        return Weights(self.model.lm, self.version) if isinstance(self.weights, AdapterWeights) else self.weights

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def logp(self, packed: Packed, entropy_T: Tensor | None = None, tau: float | None = None) -> Tensor:
        """Log-probs, at the policy's tau unless another is given: see Model.forward."""
        return self.model(packed, self.tau if tau is None else tau, entropy_T)

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model directory: weights as safetensors, config, tokenizer and generation config. Of a
        model with adapters these alone, as PEFT writes them."""
        if isinstance(self.weights, AdapterWeights):
            save_adapter(self.model.lm, self.weights, directory)
        else:
            self.model.lm.save_pretrained(directory)
        self.chat.save(directory)

    def save_merged(self, directory: Path) -> None:
        """Write a Hugging Face model directory with the adapters added to the weights: `merged` of lora.py."""
        save_merged(self.model.lm, directory)
        self.chat.save(directory)
