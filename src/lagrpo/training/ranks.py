"""Several processes of one run, started by torchrun.

Every rank runs the same loop on the same batch. Each samples, scores and learns from its share, and `Ranks.gather`
gives everyone the parts of all, in the order of the ranks; so all ranks hold the same batch, the same metrics and the
same state, and rank 0 writes the files. With vLLM rank 0 talks to the servers. Random numbers are keyed, so completions
do not depend on the number of ranks; the rows of a batch share one normalizer, so the gradient depends on it only
through rounding.

A rank that raises ends. The others fail in their next collective, torchrun stops them, and prints the error of the
first.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lagrpo.interrupts import Interrupted, asked_to_stop
from lagrpo.model.model import Policy, PolicyCopy, Weights
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import Item, Request, SamplingParams
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.vllm.engine import VllmEvaluator
from lagrpo.training.batch import Batch, FreshMicroBatch, MicroBatch, micro_batches
from lagrpo.training.checks import local_size, world_size
from lagrpo.training.trainer import Trainer
from lagrpo.types import Group

TIMEOUT = timedelta(hours=1)
"""Of collectives: longer than a rank may be busy alone, as rank 0 is while servers start or sample a batch."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others: rank `rank` of `size`. `group` carries tensors (NCCL on GPUs), `objects` Python
    objects; `mesh` is the ranks as FSDP2 shards layers over them, None for whole layers."""

    rank: int = 0
    size: int = 1
    group: Any = None
    objects: Any = None
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every size-th item, beginning with this rank's."""
        return list(items[self.rank :: self.size])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank. Collective."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.objects)
        return found

    def from_first(self, call: Callable[[], T]) -> T:
        """What the call returns, or raises, on rank 0, on every rank. Collective."""
        if self.size == 1:
            return call()
        box: list[Any] = [(None, None)]
        if self.is_first:
            try:
                box = [(call(), None)]
            except (Exception, Interrupted) as error:  # noqa: BLE001 - all ranks raise it
                box = [(None, error)]
        dist.broadcast_object_list(box, 0, group=self.objects)
        result, error = box[0]
        if error is not None:
            raise error
        return result

    def gather_whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the memory of rank 0's host, nothing on the others. Collective where they are sharded."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights.items() if self.is_first}

    def raise_if_asked(self) -> None:
        """Raise Interrupted on all ranks if a signal has asked one of them to stop. Collective."""
        raise_first(self.gather(asked_to_stop()))


def raise_first(signals: Iterable[int | None]) -> None:
    """Raise Interrupted for the first signal that a rank got."""
    for signum in signals:
        if signum is not None:
            raise Interrupted(signum)


@contextmanager
def joined(device: str, shard_layers: bool) -> Iterator[Ranks]:
    """Inside, the processes that torchrun started are connected; `shard_layers` for FSDP2."""
    if world_size() == 1:
        yield Ranks()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    # torchrun keeps one store across restarts, with addresses of processes that have ended; hosts count differently
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if local_size() == size else "0"
    backend, store = "nccl" if device == "cuda" else "gloo", PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    group, objects = dist.group.WORLD, dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert group is not None
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), group, objects)
    if shard_layers:
        of_hosts = {*ranks.gather(local_size())}
        ranks = replace(ranks, mesh=make_mesh(group, device, of_hosts.pop() if len(of_hosts) == 1 else ranks.size))
    yield ranks
    dist.destroy_process_group()  # not after an error: the others would fail before it is reported


def make_mesh(group: dist.ProcessGroup, device: str, shards: int) -> DeviceMesh:
    """The ranks as a mesh for FSDP2: one dimension if all have one copy of the layers between them, or (replicas,
    shards) if every `shards` neighbors have one. Collective."""
    size, rank = group.size(), group.rank()
    if shards == size:
        return DeviceMesh.from_group(group, device, mesh_dim_names=("shards",))
    grid = torch.arange(size).view(-1, shards)
    rows = [dist.new_group(row, timeout=TIMEOUT) for row in grid.tolist()]
    columns = [dist.new_group(column, timeout=TIMEOUT) for column in grid.T.tolist()]
    own: Any = [columns[rank % shards], rows[rank // shards]]
    return DeviceMesh.from_group(own, device, mesh=grid, mesh_dim_names=("replicas", "shards"))


def divide(costs: Sequence[int], size: int) -> list[list[int]]:
    """Items, by their numbers, over `size` ranks: largest first, each to the rank that has least.

    >>> divide([5, 3, 3, 1], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    sums = [0] * size
    for n in sorted(range(len(costs)), key=lambda n: -costs[n]):
        least = sums.index(min(sums))
        shares[least].append(n)
        sums[least] += costs[n]
    return shares


def add_up(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sums of all ranks, in their order; of `max_abs_log_ratio` the largest.

    >>> add_up([{"loss": 1.0, "max_abs_log_ratio": 2.0}, {"loss": 0.5, "max_abs_log_ratio": 1.0}])
    {'loss': 1.5, 'max_abs_log_ratio': 2.0}
    """
    total: defaultdict[str, float] = defaultdict(float)
    for sums in of_ranks:
        for name, value in sums.items():
            total[name] = max(total[name], value) if name == "max_abs_log_ratio" else total[name] + value
    return dict(total)


class RankTrainer(Trainer):
    """A trainer that computes its share of the rows of a batch, and steps with the other ranks."""

    def __init__(self, ranks: Ranks, *given: Any) -> None:
        super().__init__(*given, ranks=ranks.group, mesh=ranks.mesh)
        self.peers = ranks
        self._own: list[MicroBatch] = []  # this rank's rows of the batch
        self._passes_of_all = 0  # over the rows of the batch, of every rank in step

    def pack(self, batch: Batch, tokens: int) -> list[FreshMicroBatch]:
        """All rows of the batch; log π_ref is in this rank's alone."""
        recipe, how = self.recipe, (self.recipe.needs_whole_groups, self.recipe.skips_zero_advantage)
        rows = micro_batches(batch, tokens, self.policy.device, *how, ranks=self.peers.size)
        if self.reference is not None and recipe.needs_pi_ref:
            own, passes = self._share(rows)
            for n, logp_T in zip(
                own, super().compute_logprobs([rows[n] for n in own], passes, self.reference), strict=True
            ):
                rows[n] = replace(rows[n], logp_ref_T=logp_T)
        return rows

    def compute_logprobs(
        self, micro_batches: Sequence[FreshMicroBatch], passes: int = 0, by: Policy | PolicyCopy | None = None
    ) -> list[Tensor]:
        own, passes = self._share(micro_batches)
        scored = super().compute_logprobs([micro_batches[n] for n in own], passes, by)
        found = self._gather({n: logp_T.cpu() for n, logp_T in zip(own, scored, strict=True)})
        return [found[n].to(self.policy.device) for n in range(len(micro_batches))]

    def first_step(
        self, fresh: Sequence[FreshMicroBatch], in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        own, passes = self._share(fresh)
        self._passes_of_all = passes
        stop, sums = None, dict[str, float]()
        try:
            self._own, sums = self.accumulate_first([fresh[n] for n in own], passes)
        except Interrupted as error:
            stop = error.signal
        found = self.peers.gather((sums, stop))
        raise_first(signum for _, signum in found)
        total = add_up([sums for sums, _ in found])
        scores = [(row.logp_k_T.cpu(), row.entropy_T.cpu() if row.entropy_T is not None else None) for row in self._own]
        scored = self._gather(dict(zip(own, scores, strict=True)))
        device = self.policy.device
        rows = [row.with_logprobs(scored[n][0].to(device), scored[n][1]) for n, row in enumerate(fresh)]
        return rows, total | (self.update(self._own) if in_objective else {})

    def step(self, micro_batches: Sequence[MicroBatch], in_objective: bool = True) -> dict[str, float]:
        total = add_up(self.peers.gather(self.accumulate(self._own, self._passes_of_all)))
        return total | (self.update(self._own) if in_objective else {})

    def _share(self, rows: Sequence[FreshMicroBatch]) -> tuple[list[int], int]:
        """The numbers of this rank's rows, by tokens through the model, and how many passes all ranks make in step; 0
        where each makes its own."""
        of_ranks = divide([len(row.packed.input_ids) for row in rows], self.peers.size)
        return of_ranks[self.peers.rank], max(map(len, of_ranks)) if self.passes_are_collective else 0

    def _gather(self, own: dict[int, T]) -> dict[int, T]:
        return {n: value for of_rank in self.peers.gather(own) for n, value in of_rank.items()}


class RankSampler(LocalSampler):
    """An in-process sampler that samples its share of the groups, and yields those of all ranks. Collective."""

    def __init__(self, ranks: Ranks, *given: Any) -> None:
        super().__init__(*given)
        self.peers = ranks

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        own, found, stop = super().sample(self.peers.share(requests), G), [], None
        try:
            found = list(own)
        except Interrupted as error:  # the others are on their way to the gather
            stop = error.signal
        gathered = self.peers.gather((found, stop))
        raise_first(signum for _, signum in gathered)
        yield from (item for items, _ in gathered for item in items)


class RankBorrower(RankSampler):
    """The same by a copy, `policy`, of the sharded policy `source`, which is set before its first use. The copy has
    weights from `sample` to `free_cache`, and otherwise no memory for them."""

    source: Policy

    def __init__(self, ranks: Ranks, policy: PolicyCopy, *given: Any) -> None:
        super().__init__(ranks, policy, *given)
        self._copy = policy
        own = [p.detach() for p in policy.model.lm.parameters()] if isinstance(policy.weights, Weights) else []
        self._storages = [(p.untyped_storage(), p.numel() * p.element_size()) for p in own]  # panels keep theirs
        self.free_cache()

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        for storage, size in self._storages:
            storage.resize_(size)
        self._copy.load(self.source.all_weights, self.source.version)
        yield from super().sample(requests, G)

    def free_cache(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)


class RankRewardPool(RewardPool):
    """Scores its share of the groups, and returns those of all ranks. Collective."""

    def __init__(self, ranks: Ranks, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.peers = ranks

    def score(self, groups: Any) -> Iterator[Group]:
        given, size = list(groups), self.peers.size
        scored = self.peers.gather(list(super().score(self.peers.share(given))))
        yield from (scored[n % size][n // size] for n in range(len(given)))


class FirstRankSampler:
    """The vLLM sampler of rank 0, `own`, as all ranks call it: everyone gets what the servers answer. Collective."""

    def __init__(self, ranks: Ranks, own: Any) -> None:
        self.ranks, self.own = ranks, own
        said = ranks.from_first(lambda: (own.spans, tuple(map(str, own.servers)), own.weights.dtype))
        self.spans, self.servers, self.dtype = said

    @property
    def version(self) -> int:
        return self.ranks.from_first(lambda: self.own.version)

    def describe_versions(self) -> str:
        return self.ranks.from_first(lambda: self.own.describe_versions())

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, float]:
        whole = self._whole(weights)
        return self.ranks.from_first(lambda: self.own.sync_weights(whole, version))

    @contextmanager
    def lent(self, weights: Mapping[str, Tensor], version: int, back: bool) -> Iterator[None]:
        whole = self._whole(weights)
        with ExitStack() as stack:
            self.ranks.from_first(lambda: stack.enter_context(self.own.lent(whole, version, back)))
            yield

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        """On rank 0; the others get the version alone."""
        found = self.own.current_weights() if self.ranks.is_first else None
        version = self.ranks.from_first(lambda: found[0] if found is not None else -1)
        return found or (version, {})

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        """The servers are asked at once; what has come is sent to all ranks when the first group is taken."""
        coming = self.own.sample(requests, G) if self.ranks.is_first else ()
        return self._hand_out(coming)

    def _hand_out(self, coming: Any) -> Iterator[tuple[Request, Group]]:
        yield from self.ranks.from_first(lambda: list(coming))

    def generate_on_server(self, number: int, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]:
        return self.ranks.from_first(lambda: self.own.generate_on_server(number, requests, G, max_tokens))

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        return self.ranks.from_first(lambda: self.own.scores(items))

    def free_cache(self) -> None:
        """The servers have memory of their own."""

    def pop_metrics(self) -> Mapping[str, float]:
        return self.own.pop_metrics() if self.ranks.is_first else {}

    def close(self) -> None:
        if self.ranks.is_first:
            self.own.close()

    def _whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.ranks.gather_whole(weights) if self.ranks.mesh is not None else weights


class FirstRankEvaluator:
    """Evaluations by the servers that rank 0 talks to; `own` samples them on rank 0. Collective."""

    def __init__(self, sampler: FirstRankSampler) -> None:
        self.sampler, self.ranks = sampler, sampler.ranks
        self.own = VllmEvaluator(sampler.own) if sampler.ranks.is_first else None

    def set_sampling_params(self, params: SamplingParams) -> None:
        if self.own is not None:
            self.own.set_sampling_params(params)

    def sample(self, requests: Sequence[Request], G: int) -> Iterator[tuple[Request, Group]]:
        own = self.own
        yield from self.ranks.from_first(lambda: list(own.sample(requests, G)) if own is not None else [])

    def free_cache(self) -> None:
        """The servers have memory of their own."""
