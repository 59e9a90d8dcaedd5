"""FSDP2: a policy whose layers are sharded over ranks.

`fully_shard` of torch.distributed shards every decoder layer. A rank has its rows of every weight,
in float32: these are its master weights, and gradients and moments have the same shards. A layer is
whole on a rank only while it computes: gathered, and rounded to the model's dtype on the way, as
one process rounds it. The kernels that compute whole layers read the gathered weights, too.
Gradients are plain sums over the ranks, because the weights of completions already have the batch's
normalizer.

A model is sharded before it has weights (on the meta device). Then each rank reads its rows from
the files, so no rank ever has all of them.

All that computes by the model or reads a whole weight is collective: all ranks must do it, in the
same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lagrpo.cpu.decoder import compute_layer
from lagrpo.model.backend import Backend
from lagrpo.model.model import (
    Model,
    Packed,
    Policy,
    Weights,
    check_weights,
    checksum,
    count_differing,
)
from lagrpo.model.stored import StoredWeights
from lagrpo.training.master_weights import EXACT, MasterWeights, Span, Start, fill_master


def shard_policy(
    policy: Policy, mesh: DeviceMesh, group: dist.ProcessGroup, start: Start, seed: int
) -> tuple[Policy, MasterWeights]:
    """Returns the policy with its layers sharded over the mesh, and its master weights.

    It shards the model of `policy` itself, which must not be used afterward. Weights that are
    stored in files are read, each row by the rank that has it.
    """
    policy = without_panels(policy)
    masters = FsdpMasterWeights(policy, mesh, group, start, seed)
    weights = ShardedWeights(policy.model, policy.version)
    return Policy(weights, policy.model, policy.chat, policy.tau), masters


class FsdpMasterWeights(MasterWeights):
    """The master weights of a policy, whose layers it shards.

    `parameters` are this rank's rows of the weights, in float32. The gathered layers are rounded
    from them. Only one unit at a time is whole in float32.
    """

    passes_are_collective = True

    def __init__(
        self, policy: Policy, mesh: DeviceMesh, group: dist.ProcessGroup, start: Start, seed: int
    ) -> None:
        self.model = policy.model
        self.group = group
        self.spans: list[Span] = []
        self.parameters = []
        # The sharded weights of the model, whose memory `parameters` share.
        self.sharded: list[DTensor] = []
        lm = policy.model.lm
        read_rows = reader_of_rows(policy.weights)
        names = shard_model(policy.model, policy.dtype, mesh)
        allocate(policy.model, lm, policy.model.backend.device)
        self.device = policy.device
        for name in names:
            sharded: DTensor = attrgetter(name)(lm)
            first_row, stop_row = local_rows(sharded)
            # With fewer rows than ranks, the last ranks have none.
            if first_row == stop_row:
                continue
            span = local_span(name, sharded)
            master = local_shard(sharded)
            fill_master(master, span, read_rows(name, first_row, stop_row), start, seed)
            if not span.is_whole:
                master = master.view(-1)
            self.spans.append(span)
            self.parameters.append(nn.Parameter(master))
            self.sharded.append(sharded)

    def reduce_grads(self) -> None:
        """Gives every master its gradient, which the backward passes have summed over all ranks."""
        for sharded, master in zip(self.sharded, self.parameters, strict=True):
            if sharded.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad = local_shard(sharded.grad).view_as(master)

    def zero_grads(self) -> None:
        super().zero_grads()
        # Also on a rank that has no row of a weight.
        self.model.zero_grad()

    def write_back(self) -> None:
        """Makes the next pass gather the masters as they are now."""
        free_gathered(self.model)


# Sharding a model


def without_panels(policy: Policy) -> Policy:
    """Returns the policy, computed by the modules of transformers if it has panels.

    Panels are packed from whole weights, which a rank does not have.
    """
    layers = policy.model.layers
    if layers is None or layers.panels is None:
        return policy
    backend = Backend(policy.model.backend.device, policy.dtype, "its layers are sharded")
    return Policy(policy.weights, Model(policy.model.lm, backend), policy.chat, policy.tau)


def shard_model(model: Model, dtype: torch.dtype | None, mesh: DeviceMesh) -> list[str]:
    """Shards all weights of a model, as `shard_unit` does. Returns their names.

    A layer is gathered whenever it is computed, by a call of its module or by the kernels.
    """
    names: list[str] = []
    for unit in units_of(model):
        names += shard_unit(unit, model.lm, dtype, mesh)
    if model.layers is not None:
        for number, layer in enumerate(model.layers.decoder.layers):
            layer.compute_by_kernels = MethodType(compute_layer, layer)
            register_fsdp_forward_method(layer, "compute_by_kernels")
            model.layers.layer_functions[number] = layer.compute_by_kernels
    return names


def units_of(model: Model) -> list[nn.Module]:
    """Returns the modules that are gathered one at a time.

    They are the layers of the decoder, and the root, which has the weights that are in no layer.
    The root is last, because it takes all parameters that are not sharded yet.
    """
    layers: Any = model.decoder.layers
    return [*layers, model]


def shard_unit(
    unit: nn.Module, lm: nn.Module, dtype: torch.dtype | None, mesh: DeviceMesh
) -> list[str]:
    """Shards a decoder layer, or the root.

    With a `dtype` that is not exact the shards are float32, and gathered weights are rounded to it.
    Returns the names of the weights that were sharded.
    """
    unit_parameters = {id(parameter) for parameter in unit.parameters()}
    names: list[str] = []
    for name, parameter in lm.named_parameters():
        if id(parameter) in unit_parameters and not isinstance(parameter, DTensor):
            names.append(name)

    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype is not None and dtype not in EXACT:
        for name in names:
            weight = attrgetter(name)(lm)
            weight.data = weight.data.float()
        precision = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    # The root stays whole between the forward and the backward pass, which needs it first.
    is_root = isinstance(unit, Model)
    module = fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=not is_root)
    # Sums instead of FSDP's means over ranks.
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)
    return names


def reader_of_rows(weights: Weights) -> Callable[[str, int, int], Tensor]:
    """Returns a function of a weight's name, its first row and the row after the last one.

    Call it before the weights are sharded. It reads each weight once.
    """
    if isinstance(weights, StoredWeights):
        return weights.rows
    # Sharding replaces the parameters of the model.
    whole_weights = dict(weights)
    return lambda name, first_row, stop_row: whole_weights.pop(name)[first_row:stop_row]


def allocate(module: nn.Module, lm: Any, device: torch.device) -> None:
    """Gives the parameters of a model memory on a device if they are on the meta device.

    Their numbers are undefined; buffers keep theirs. `module` is `lm`, or has it and is sharded.
    """
    if not next(lm.parameters()).is_meta:
        return
    buffers = dict(lm.named_buffers())
    module.to_empty(device=device)
    for name, buffer in lm.named_buffers():
        buffer.copy_(buffers[name])
    # `to_empty` makes one parameter for each name of a tied weight.
    lm.tie_weights()


def free_gathered(model: Model) -> None:
    """Drops the root, which a pass without gradient leaves whole.

    Call it before the weights change.
    """
    cast(FSDPModule, model).reshard()


def local_shard(tensor: Any) -> Tensor:
    """Returns this rank's rows of a sharded tensor, in the memory that is sharded."""
    return tensor.detach().to_local()


def local_rows(sharded: DTensor) -> tuple[int, int]:
    """Returns the first row of a weight that this rank has, and the row after its last one."""
    return rows_of_rank(sharded, sharded.device_mesh.get_local_rank())


def rows_of_rank(sharded: DTensor, rank: int) -> tuple[int, int]:
    """Returns the first row of a weight that a rank has, and the row after its last one.

    Every rank has the same number of rows, rounded up; the last ranks have fewer, or none.
    """
    num_ranks = sharded.device_mesh.size()
    rows = sharded.shape[0]
    rows_per_rank = -(-rows // num_ranks)
    return min(rank * rows_per_rank, rows), min((rank + 1) * rows_per_rank, rows)


def local_span(name: str, sharded: DTensor) -> Span:
    """Returns the numbers of a weight that this rank has: whole rows."""
    first_row, stop_row = local_rows(sharded)
    numbers_per_row = sharded.shape.numel() // sharded.shape[0]
    return Span(
        name, sharded.shape, start=first_row * numbers_per_row, stop=stop_row * numbers_per_row
    )


def idle_row(device: torch.device) -> Packed:
    """Returns the smallest row.

    A rank without rows passes it through the layers, in step with the other ranks.
    """
    return Packed.build([((0, 0), [torch.zeros(2, dtype=torch.long)])], device)


# The weights of a sharded model, and copies of it


class ShardedWeights(Weights):
    """Weights in shards, gathered in the model's dtype when they are read.

    Reading is collective, except for names and shapes.
    """

    def __init__(self, model: Model, version: int) -> None:
        super().__init__(model.lm, version)
        self._model = model
        self._dtype = model.dtype
        free_gathered(model)
        self.shards: dict[str, DTensor] = {}
        for name, parameter in model.lm.named_parameters():
            if isinstance(parameter, DTensor):
                self.shards[name] = parameter
        self._names = [*super().__iter__()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shards:
            return super().__getitem__(name)
        rounded: Any = self.shards[name].detach().to(self._dtype)
        return rounded.full_tensor()

    @torch.no_grad()
    def every_nth(self, name: str, n: int) -> Tensor:
        """Returns a copy of the numbers 0, n, 2n, … of a weight, flat. Only these travel."""
        if name not in self.shards:
            return super().every_nth(name, n)
        sharded = self.shards[name]
        mesh = sharded.device_mesh
        width = sharded.shape.numel() // sharded.shape[0]
        # The numbers 0, n, … before the first row of each rank, and before the end of the weight.
        firsts = [-(-rows_of_rank(sharded, rank)[0] * width // n) for rank in range(mesh.size())]
        firsts.append(-(-sharded.shape.numel() // n))
        lengths = [stop - first for first, stop in pairwise(firsts)]
        rank = mesh.get_local_rank()
        own_start = firsts[rank] * n - rows_of_rank(sharded, rank)[0] * width
        own_numbers = local_shard(sharded).reshape(-1)[own_start::n].to(self._dtype)
        # Ranks exchange equal lengths.
        padded = own_numbers.new_zeros(max(lengths))
        padded[: len(own_numbers)] = own_numbers
        parts = gather_equal(padded, mesh)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    @torch.no_grad()
    def find_stale(self, copied: Weights) -> list[str]:
        """Returns the names of weights of this rank's whole copy that are not these weights.

        Every rank sums up its own rows, and all compare these sums with the rows of their copies.
        """
        mesh = next(iter(self.shards.values())).device_mesh
        own_sums = [
            checksum(local_shard(sharded).to(self._dtype)) for sharded in self.shards.values()
        ]
        sums_by_rank = gather_equal(torch.stack(own_sums), mesh)
        whole = dict(copied.items())
        sums_of_copy: list[Tensor] = []
        for rank in range(mesh.size()):
            sums_of_rank: list[Tensor] = []
            for name, sharded in self.shards.items():
                first_row, stop_row = rows_of_rank(sharded, rank)
                sums_of_rank.append(checksum(whole[name][first_row:stop_row]))
            sums_of_copy.append(torch.stack(sums_of_rank))
        sums_RN = torch.stack(sums_by_rank).cpu()
        sums_of_copy_RN = torch.stack(sums_of_copy).cpu()
        stale_names: list[str] = []
        for index, name in enumerate(self.shards):
            if not torch.equal(sums_RN[:, index], sums_of_copy_RN[:, index]):
                stale_names.append(name)
        for name in self:
            if name not in self.shards and count_differing(self[name], whole[name]):
                stale_names.append(name)
        return stale_names

    def shapes(self) -> dict[str, torch.Size]:
        shapes: dict[str, torch.Size] = {}
        for name in self:
            # The shape of a shard is the shape of the whole weight.
            weight = self.shards[name] if name in self.shards else self[name]
            shapes[name] = weight.shape
        return shapes

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies π_version into the shards, from whole weights, other shards, or stored weights.

        Nothing travels between ranks if `weights` has the same shards or is stored in files. Raises
        ValueError for other names or shapes.
        """
        free_gathered(self._model)
        check_weights(weights, self.shapes(), version)
        for name in self._names:
            if name not in self.shards:
                self[name].copy_(weights[name])
                continue
            shard = local_shard(self.shards[name])
            if isinstance(weights, ShardedWeights):
                shard.copy_(local_shard(weights.shards[name]).to(self._dtype))
            elif isinstance(weights, StoredWeights):
                first_row, stop_row = local_rows(self.shards[name])
                if first_row < stop_row:
                    shard.copy_(weights.rows(name, first_row, stop_row))
            else:
                span = local_span(name, self.shards[name])
                shard.copy_(span.select(weights[name]).view(shard.shape))
        self.version = version


def gather_equal(values: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Returns the values of all ranks, which have the same shape. Collective."""
    parts = [torch.empty_like(values) for _ in range(mesh.size())]
    dist.all_gather(parts, values, group=mesh.get_group())  # pyright: ignore
    return parts


def copy_sharded(policy: Policy, mesh: DeviceMesh) -> Policy:
    """Returns a copy of a policy of `without_panels` that does not learn, in shards of its dtype.

    If the policy's weights are stored in files, the copy's are undefined until it loads some.
    """
    lm = copy.deepcopy(policy.model.lm).requires_grad_(requires_grad=False)
    model = Model(lm, policy.model.backend)
    shard_model(model, None, mesh)
    allocate(model, lm, model.backend.device)
    return Policy(ShardedWeights(model, policy.version), model, policy.chat, policy.tau)


def copy_whole(policy: Policy, skeleton: Any, backend: Backend) -> Policy:
    """Returns a whole copy of a sharded policy that does not learn, computed by `backend`.

    `skeleton` is its model of transformers, from `without_values`. Collective.
    """
    lm = copy.deepcopy(skeleton).requires_grad_(requires_grad=False)
    allocate(lm, lm, backend.device)
    whole = Policy(Weights(lm), Model(lm, backend), policy.chat, policy.tau)
    whole.load(policy.weights, policy.version)
    return whole


def without_values(lm: Any) -> Any:
    """Returns a copy of a model of transformers whose weights have names and shapes only.

    The directory of a model is written with it, and whole copies of a sharded model are made of it.
    """
    # A memo for deepcopy: it replaces a parameter by the empty one under its id.
    empty_parameters = {
        id(parameter): nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        for parameter in lm.parameters()
    }
    return copy.deepcopy(lm, empty_parameters)
