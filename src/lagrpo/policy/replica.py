"""A policy's copy for sampling and for π_ref: no weights of linear layers but the packed ones.

A decoding step reads every weight once and does little else, so how the weights lie decides its time. While the copy
holds the version of the policy that learns, both read the same packs (backends/cpu/packs.py). For bfloat16 on a CPU
with C kernels, and for decoders that they compute whole; elsewhere the copy is a twin.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lagrpo.backends.cpu.packs import Packs, joined
from lagrpo.policy.model import Policy, stored


def replica(policy: Policy) -> Policy:
    """A second policy with the same weights: a Replica where the kernels compute all products, else a twin."""
    return Replica(policy) if policy.own_products else policy.twin()


class Replica(Policy):
    """Computes with packs: those of `origin` where it was given the weights of that policy, else with its own."""

    def __init__(self, origin: Policy) -> None:
        linear = {m.weight for layer in origin.decoder.layers for group in joined(layer) for m in group}  # type: ignore[union-attr]
        left_out = {id(p): nn.Parameter(p.new_empty(0), requires_grad=False) for p in linear}
        model = copy.deepcopy(origin.model, left_out)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        super().__init__(model, origin.tokenizer, origin.tau, origin.version)
        self._shapes = {name: tensor.shape for name, tensor in stored(origin.model).items()}
        self._only_packed = [name for name, p in origin.model.named_parameters() if p in linear]
        self._lender = origin.packing
        self._packs, self._lent = self._lender.lend(self), True

    def packs(self) -> Packs:
        return self._packs

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.check_weights(weights, self._shapes, version)
        for name, tensor in stored(self.model).items():
            if name not in self._only_packed:
                tensor.copy_(weights[name])
        if self._lender.owns([weights[name] for name in self._only_packed]):
            self._lender.give_back(self._packs, self)
            self._packs, self._lent = self._lender.lend(self), True
        else:
            self._pack(weights)
        self.version = version

    def _pack(self, weights: Mapping[str, Tensor]) -> None:
        """Weights that the lender does not have, into packs of this policy's own."""
        parameters = dict(self.model.named_parameters())
        for name in self._only_packed:
            parameters[name].data = weights[name].to(parameters[name].dtype)  # no copy: only to be packed
        if self._lent:
            self._lender.give_back(self._packs, self)
            self._packs, self._lent = Packs(self.decoder, self.head), False
        else:
            self._packs.fill(self.decoder, self.head)
        for name in self._only_packed:
            parameters[name].data = parameters[name].new_empty(0)
