"""A policy whose layers are sharded over ranks: FSDP2 (`fully_shard` of torch.distributed) on every decoder layer.

A rank has its rows of every weight alone, in float32: these are the masters, and their gradients and moments have the
same shards. A layer is whole on a rank only while it computes: gathered, and rounded to the model's dtype on the way,
which is the rounding of one process. Embeddings, the final norm and the head are one group, so tied ones stay tied.
Gradients are summed over the ranks in float32, by a plain sum: weights of completions have the normalizer of the batch.

A mesh of one dimension shards over all ranks; one of two (replicas, shards) has several copies of the shards (HSDP).

With adapters the frozen weights are sharded, in the model's dtype, and the adapters are whole on every rank, which has
its part of their masters (sharded.py). π_ref is adapters alone: they take the place of the policy's for a pass.

Whatever computes by the model or reads a whole weight is collective: all ranks must do it, in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lagrpo.backends.adapters import adapted
from lagrpo.backends.backend import Backend
from lagrpo.model.masters import EXACT, Start, chunks, round_, start_master, trained
from lagrpo.model.model import Model, Packed, Policy, Weights, check_weights, weights_of
from lagrpo.model.replica import Replica
from lagrpo.model.sharded import ShardedMasters, norm_over
from lagrpo.model.spans import Span


class LayeredWeights(Weights):
    """Weights in shards, read as `Weights` of the model's dtype: each is gathered from all ranks when it is read.
    Collective, but for names and shapes."""

    def __init__(self, model: Model, version: int) -> None:
        super().__init__(model.lm, version)
        self._model, self._dtype = model, model.dtype
        forget_whole(model)
        named: Any = model.lm.named_parameters()
        self.shards: dict[str, Any] = {name: p for name, p in named if isinstance(p, DTensor)}
        self._names = [*super().__iter__()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if name in self.shards:
            return self.shards[name].detach().to(self._dtype).full_tensor()
        return super().__getitem__(name)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: self.shards[name].shape if name in self.shards else self[name].shape for name in self}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over π_version, of whole weights or of another model with the same shards; then nothing travels."""
        forget_whole(self._model)
        if isinstance(weights, LayeredWeights):
            for name, shard in self.shards.items():
                local(shard).copy_(local(weights.shards[name]).to(self._dtype))
        else:
            check_weights(weights, self.shapes(), version)
            for name, shard in self.shards.items():
                local(shard).copy_(span_of(name, shard).of(weights[name]).view(local(shard).shape))
        for name in self._names:
            if name not in self.shards:
                self[name].copy_(weights[name])
        self.version = version


class LayerMasters:
    """`Masters` (masters.py) of a model that `shard` has sharded: `parameters` are this rank's rows of its weights,
    which go on as float32 masters. Masters start as the same numbers on any number of ranks. Each unit is sharded
    before the next one: no more than one is there in float32."""

    def __init__(self, policy: Policy, mesh: DeviceMesh, start: Start, seed: int) -> None:
        self._model, lm, dtype = policy.model, policy.model.lm, policy.dtype
        self._group = mesh.get_group(mesh.ndim - 1)
        self._replicas = mesh.size(0) if mesh.ndim > 1 else 1
        self.is_first = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
        """of the ranks that have the same shards"""
        self._exact, self.device = dtype in EXACT, policy.device
        found: dict[str, tuple[Span, nn.Parameter, Tensor]] = {}
        for unit in units_of(policy.model):
            for name, before in shard(unit, lm, dtype, mesh).items():
                sharded = attrgetter(name)(lm)
                span = span_of(name, sharded)
                own = local(sharded) if span.is_whole else local(sharded).view(-1)
                rounded = own.to(dtype)
                if not self._exact and sharded.requires_grad:
                    own.copy_(start_master(span, before, start, seed))
                found[name] = span, nn.Parameter(own), rounded
        self._shards: dict[str, DTensor] = trained(lm)  # pyright: ignore[reportAttributeAccessIssue]
        self._numbers = sum(s.numel() for s in self._shards.values())
        held = [(*found[name], sharded) for name, sharded in self._shards.items() if found[name][0].size]
        self.spans, self.parameters = [span for span, *_ in held], [master for _, master, *_ in held]
        self._rounded, self._held = [rounded for *_, rounded, _ in held], [sharded for *_, sharded in held]

    def begin_pass(self, last: bool) -> None:
        """Before the forward pass of a row: replicas add up what their shards collected after the last one."""
        if self._replicas > 1:
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_all_reduce(last)

    def collect(self) -> None:
        """Give every master the gradient of the whole batch: what the backward passes summed over all ranks."""
        for sharded, master in zip(self._held, self.parameters, strict=True):
            master.grad = torch.zeros_like(master) if sharded.grad is None else local(sharded.grad).view_as(master)

    def norm(self) -> Tensor:
        """The norm of what all ranks collected, a tensor of one number, the same on all. Collective."""
        return norm_over(self._group, self.parameters, self.device)

    def discard(self) -> None:
        """Drop the gradients."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):  # what replicas have not added up yet
                state: Any = module._get_fsdp_state()
                for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                    if group is not None:
                        group._partial_reduce_output = None
        for sharded in self._shards.values():
            sharded.grad = None
        for master in self.parameters:
            master.grad = None

    @torch.no_grad()
    def round(self) -> float | None:
        """What is gathered from now on are the masters as they are now. Returns the share of the weights whose bits
        changed; None where nothing is rounded. Collective."""
        forget_whole(self._model)
        if self._exact:
            return None
        moved = torch.zeros((), dtype=torch.long, device=self.device)
        for rounded, master in zip(self._rounded, self.parameters, strict=True):
            for old, exact in zip(chunks(rounded), chunks(master), strict=True):
                moved += round_(old, exact)
        dist.all_reduce(moved, group=self._group)
        return moved.item() / self._numbers


class AdapterMasters(ShardedMasters):
    """Masters of adapters that are whole on every rank, beside layers that are sharded over the ranks."""

    def begin_pass(self, last: bool) -> None:
        """Nothing: what replicas add up is of sharded weights, and these are frozen."""


InStep = LayerMasters | AdapterMasters
"""Masters of a policy whose every pass is collective."""


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPolicy(Policy):
    """A policy whose adapters, which are its weights, are whole, and whose frozen weights are sharded."""

    @property
    def all_weights(self) -> Weights:
        return LayeredWeights(self.model, self.version)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterReference(Replica):
    """π_ref as adapters alone, `weights`, beside the frozen weights that `model`, the policy's own, has in shards."""

    def logp(self, packed: Packed) -> Tensor:
        with torch.no_grad():
            self._exchange()
            try:
                return self.model(packed, self.tau)
            finally:
                self._exchange()

    def _exchange(self) -> None:
        mine: Any = self.weights
        for name, theirs in weights_of(self.model.lm).items():
            kept = theirs.clone()
            theirs.copy_(mine[name])
            mine[name].copy_(kept)


def make_layered(
    policy: Policy, mesh: DeviceMesh, ranks: dist.ProcessGroup, start: Start, seed: int
) -> tuple[Policy, InStep]:
    """The policy with its layers sharded over the mesh, and the masters to step on. The policy given is used up."""
    layered = with_modules(policy)
    model, lm = layered.model, layered.model.lm
    if adapted(lm):
        for unit in units_of(model):
            shard(unit, lm, None, mesh)
        policy = LayeredPolicy(weights_of(lm, policy.version), model, policy.chat, policy.tau)
        return policy, AdapterMasters(lm, start, seed, ranks)
    masters = LayerMasters(layered, mesh, start, seed)
    return Policy(LayeredWeights(model, policy.version), model, policy.chat, policy.tau), masters


def make_layered_replica(policy: Policy, mesh: DeviceMesh) -> Replica:
    """A copy of a policy of `with_modules`, as it is before its own layers are sharded, that does not learn: in shards
    of the model's dtype, or its adapters alone."""
    if adapted(policy.model.lm):
        weights = weights_of(without_numbers(policy.model.lm, but_adapters=True), policy.version)
        return AdapterReference(weights, policy.model, policy.chat, policy.tau)
    lm = copy.deepcopy(policy.model.lm).requires_grad_(False)
    model = Model(lm, policy.model.backend)
    for unit in units_of(model):
        shard(unit, lm, None, mesh)
    return Replica(LayeredWeights(model, policy.version), model, policy.chat, policy.tau)


def make_whole_replica(policy: Policy) -> Replica:
    """A copy of a policy with adapters that shares no weight with it, and computes by its modules."""
    lm = copy.deepcopy(policy.model.lm).requires_grad_(False)
    model = Model(lm, by_modules(policy.model.backend))
    return Replica(Weights(lm, policy.version), model, policy.chat, policy.tau)


def without_numbers(lm: Any, but_adapters: bool = False) -> Any:
    """A copy of a model of transformers whose weights have names and shapes only: what writes its directory. With
    `but_adapters` its adapters have their numbers."""
    empty = [p for p in lm.parameters() if not (but_adapters and p.requires_grad)]
    return copy.deepcopy(lm, {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in empty})


def with_modules(policy: Policy) -> Policy:
    """The policy with what computes by calls of the model's own modules, whose hooks gather the layers: itself where it
    does."""
    if policy.model.layers is None:
        return policy
    return Policy(policy.weights, Model(policy.model.lm, by_modules(policy.model.backend)), policy.chat, policy.tau)


def by_modules(backend: Backend) -> Backend:
    """What computes in place of a backend that has whole layers of its own."""
    return Backend(backend.device, backend.dtype, "its layers are sharded")


def why_not(policy: Policy) -> str | None:
    """Why the layers of this model cannot be sharded, in words."""
    if odd := {p.dtype for p in policy.model.lm.parameters()} - {policy.dtype}:
        return f"it has weights in {', '.join(map(str, sorted(odd, key=str)))} beside {policy.dtype}"
    if not isinstance(getattr(policy.model.decoder, "layers", None), nn.ModuleList):
        return f"{type(policy.model.decoder).__name__} has no list of layers"
    return None


def units_of(model: Any) -> list[nn.Module]:
    """What is gathered at a time: each layer of the decoder, and the root, which has what is in no layer."""
    return [*model.decoder.layers, model]


def shard(unit: nn.Module, lm: nn.Module, dtype: torch.dtype | None, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Shard a decoder layer, or the root: what of `lm` is in no layer. With a `dtype` that is not exact the shards are
    float32, and what is gathered is rounded to it. Adapters stay whole. Returns the weights that were sharded by name,
    as they were."""
    beside = {p for layer in adapted(unit).values() for p in (layer.lora_A, layer.lora_B)}
    own = {id(p) for p in unit.parameters() if p not in beside}
    before = {n: p.detach() for n, p in lm.named_parameters() if id(p) in own and not isinstance(p, DTensor)}
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype is not None and dtype not in EXACT:
        for name in before:
            weight = attrgetter(name)(lm)
            weight.data = weight.data.float()
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    module = fully_shard(
        unit, mesh=mesh, mp_policy=mixed, reshard_after_forward=not isinstance(unit, Model), ignored_params=beside
    )
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)
    return before


def forget_whole(model: Any) -> None:
    """Drop what a pass without gradient has left whole, the root: its weights are about to change."""
    model.reshard()


def local(tensor: Any) -> Tensor:
    """What this rank has of a sharded tensor, in the memory that is sharded."""
    return tensor.detach().to_local()


def span_of(name: str, sharded: Any) -> Span:
    """Which numbers of a weight this rank has: whole rows."""
    mesh = sharded.device_mesh
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    rows = sharded.shape[0]
    each, of_row = -(-rows // ranks), sharded.shape.numel() // rows
    first, last = (min(r * each, rows) for r in (rank, rank + 1))
    return Span(name, sharded.shape, first * of_row, last * of_row)


def idle_row(device: torch.device) -> Packed:
    """The smallest row: what a rank without rows of its own passes through the layers, in step with the others."""
    return Packed.build([((0, 0), [torch.zeros(2, dtype=torch.long)])], device)
