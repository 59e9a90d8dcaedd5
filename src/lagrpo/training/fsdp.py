"""FSDP2: a policy whose layers are sharded over ranks (`fully_shard` of torch.distributed on every decoder layer).

A rank has its rows of every weight, in float32: these are its master weights, and gradients and moments have the same
shards. A layer is whole on a rank only while it computes: gathered, and rounded to the model's dtype on the way, as one
process rounds it. Gradients are plain sums over the ranks: the weights of completions have the batch's normalizer.

Whatever computes by the model or reads a whole weight is collective: all ranks must do it, in the same order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lagrpo.model.backend import Backend
from lagrpo.model.model import Model, Packed, Policy, Weights, check_weights
from lagrpo.rollout.base import Request, SamplingParams
from lagrpo.rollout.local import LocalSampler
from lagrpo.training.master_weights import EXACT, MasterWeights, Span, Start, start_master
from lagrpo.types import Group


def shard_policy(
    policy: Policy, mesh: DeviceMesh, group: dist.ProcessGroup, start: Start, seed: int
) -> tuple[Policy, MasterWeights]:
    """The policy with its layers sharded over the mesh, and its master weights. The policy given is used up."""
    policy = with_modules(policy)
    masters = FsdpMasterWeights(policy, mesh, group, start, seed)
    weights = ShardedWeights(policy.model, policy.version)
    return Policy(weights, policy.model, policy.chat, policy.tau), masters


class FsdpMasterWeights(MasterWeights):
    """Shards the layers of a policy; `parameters` are this rank's rows of its weights, which become float32 masters.
    Only one unit at a time is whole in float32."""

    passes_are_collective = True

    def __init__(
        self, policy: Policy, mesh: DeviceMesh, group: dist.ProcessGroup, start: Start, seed: int
    ) -> None:
        self.model, self.group, self.device = policy.model, group, policy.device
        self.spans, self.parameters, self.sharded = [], [], list[nn.Parameter]()
        for unit in units_of(policy.model):
            for name, before in shard_unit(unit, policy.model.lm, policy.dtype, mesh).items():
                sharded = attrgetter(name)(policy.model.lm)
                span, own = local_span(name, sharded), local_shard(sharded)
                own = own if span.is_whole else own.view(-1)
                if policy.dtype not in EXACT:
                    own.copy_(start_master(span, before, start, seed))
                if span.stop > span.start:
                    self.spans.append(span)
                    self.parameters.append(nn.Parameter(own))
                    self.sharded.append(sharded)

    def reduce_grads(self) -> None:
        """The backward passes have summed over all ranks."""
        for sharded, master in zip(self.sharded, self.parameters, strict=True):
            own = None if sharded.grad is None else local_shard(sharded.grad).view_as(master)
            master.grad = torch.zeros_like(master) if own is None else own

    def zero_grads(self) -> None:
        super().zero_grads()
        self.model.zero_grad()  # also on a rank that has no row of a weight

    def write_back(self) -> None:
        """The masters as they are now are what is gathered from now on."""
        free_gathered(self.model)


# Sharding a model


def with_modules(policy: Policy) -> Policy:
    """The policy, computed by calls of the model's own modules, whose hooks gather the layers."""
    if policy.model.layers is None:
        return policy
    backend = Backend(policy.device, policy.dtype, "its layers are sharded")
    return Policy(policy.weights, Model(policy.model.lm, backend), policy.chat, policy.tau)


def units_of(model: Any) -> list[nn.Module]:
    """What is gathered at a time: each layer of the decoder, and the root, which has what is in no layer."""
    return [*model.decoder.layers, model]


def shard_unit(
    unit: nn.Module, lm: nn.Module, dtype: torch.dtype | None, mesh: DeviceMesh
) -> dict[str, Tensor]:
    """Shard a decoder layer, or the root. With a `dtype` that is not exact the shards are float32, and what is
    gathered is rounded to it. Returns the weights that were sharded by name, as they were."""
    own = {id(p) for p in unit.parameters()}
    before = {
        n: p.detach()
        for n, p in lm.named_parameters()
        if id(p) in own and not isinstance(p, DTensor)
    }
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype is not None and dtype not in EXACT:
        for name in before:
            weight = attrgetter(name)(lm)
            weight.data = weight.data.float()
        mixed = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    module = fully_shard(
        unit, mesh=mesh, mp_policy=mixed, reshard_after_forward=not isinstance(unit, Model)
    )
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)
    return before


def free_gathered(model: Any) -> None:
    """Drop what a pass without gradient has left whole, the root: its weights are about to change."""
    model.reshard()


def local_shard(tensor: Any) -> Tensor:
    """What this rank has of a sharded tensor, in the memory that is sharded."""
    return tensor.detach().to_local()


def local_span(name: str, sharded: Any) -> Span:
    """Which numbers of a weight this rank has: whole rows."""
    ranks, rank, rows = (
        sharded.device_mesh.size(),
        sharded.device_mesh.get_local_rank(),
        sharded.shape[0],
    )
    each, of_row = -(-rows // ranks), sharded.shape.numel() // rows
    return Span(name, sharded.shape, *(min(r * each, rows) * of_row for r in (rank, rank + 1)))


def idle_row(device: torch.device) -> Packed:
    """The smallest row, which a rank without rows passes through the layers in step with the other ranks."""
    return Packed.build([((0, 0), [torch.zeros(2, dtype=torch.long)])], device)


# The weights of a sharded model, and copies of it


class ShardedWeights(Weights):
    """Weights in shards, gathered in the model's dtype when they are read. Collective, except for names and shapes."""

    def __init__(self, model: Model, version: int) -> None:
        super().__init__(model.lm, version)
        self._model, self._dtype = model, model.dtype
        free_gathered(model)
        named: Any = model.lm.named_parameters()
        self.shards: dict[str, Any] = {name: p for name, p in named if isinstance(p, DTensor)}
        self._names = [*super().__iter__()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if name in self.shards:
            return self.shards[name].detach().to(self._dtype).full_tensor()
        return super().__getitem__(name)

    def shapes(self) -> dict[str, torch.Size]:
        return {
            name: self.shards[name].shape if name in self.shards else self[name].shape
            for name in self
        }

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load π_version, from whole weights or from another model with the same shards; then nothing travels."""
        free_gathered(self._model)
        check_weights(weights, self.shapes(), version)
        for name in self._names:
            if name not in self.shards:
                self[name].copy_(weights[name])
                continue
            own = local_shard(self.shards[name])
            if isinstance(weights, ShardedWeights):
                own.copy_(local_shard(weights.shards[name]).to(self._dtype))
            else:
                own.copy_(local_span(name, self.shards[name]).of(weights[name]).view(own.shape))
        self.version = version


def copy_sharded(policy: Policy, mesh: DeviceMesh) -> Policy:
    """A copy of a policy of `with_modules` that does not learn, in shards of the model's dtype."""
    lm = copy.deepcopy(policy.model.lm).requires_grad_(False)
    model = Model(lm, policy.model.backend)
    for unit in units_of(model):
        shard_unit(unit, lm, None, mesh)
    return Policy(ShardedWeights(model, policy.version), model, policy.chat, policy.tau)


def without_values(lm: Any) -> Any:
    """A copy of a model of transformers whose weights have names and shapes only, to write its directory with."""
    return copy.deepcopy(
        lm, {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in lm.parameters()}
    )


class EvaluationSampler(LocalSampler):
    """Samples by a whole copy of the sharded policy `source`. `sample` is collective."""

    source: Policy

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[Request, Group]]:
        self.policy.load(self.source.weights, self.source.version)
        return super().sample(requests, G, params)
