"""The learner: gradient steps on one policy, π.

The working copy of the weights is what sampler and learner compute with (bfloat16, or float32 throughout). In bfloat16
the optimizer keeps float32 masters (masters.py): gradients of the micro-batches are added up in float32, AdamW steps on
the masters and the working copy is their rounding. No autocast anywhere.

With `ranks`, the processes of a group learn together: each computes the gradient of its own rows and steps on its shard
of the masters (sharded.py). With a `mesh` of them the layers are sharded, too (layered.py); then every forward and
backward pass is collective, and all ranks make the same number of `passes`, idle ones where they have no row. What says
"collective" has to be called on all ranks, in the same order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lagrpo.core.loss import InfiniteGradientError
from lagrpo.interrupts import raise_if_asked
from lagrpo.model import blame
from lagrpo.model.batch import Batch, FreshMicroBatch, MicroBatch, micro_batches
from lagrpo.model.layered import InStep, LayerMasters, forget_whole, idle_row, make_layered
from lagrpo.model.masters import Masters, Start, SyncedWeights
from lagrpo.model.model import Policy
from lagrpo.model.offload import MOMENTS, HostMoments, on_host
from lagrpo.model.replica import Replica
from lagrpo.model.sharded import ShardedMasters, say_largest
from lagrpo.model.spans import Merged
from lagrpo.objective.compose import Recipe

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Optimization:
    """The numbers of AdamW and of its learning-rate schedule; `updates` is how many the run makes in all. `masters`
    says where the float32 masters of bfloat16 weights start, by draws of `seed`; `offload_moments` keeps the moments in
    the host's memory."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    updates: int = 1
    masters: Start = "dithered"
    seed: int = 0
    offload_moments: bool = False

    def rate(self, update: int) -> float:
        """The learning rate of update 0, 1, …: linear warm-up over `warmup` updates, then constant, or from lr down to
        0 along a line or half a cosine. The last update, `updates` - 1, is the one at 0, unless it is the first after
        the warm-up. Masked batches make no update: a run that has some ends before it is there."""
        if update < self.warmup:
            return self.lr * (update + 1) / (self.warmup + 1)
        progress = (update - self.warmup) / max(1, self.updates - 1 - self.warmup)
        factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return self.lr * max(0.0, factor[self.schedule])


class Learner:
    """Steps `policy` along the objective of `recipe`, with `reference` = π_ref where it has a KL term. `policy.version`
    counts the updates. With `entropy` the first update on a batch also measures π's entropy. `ranks` learn together:
    all start from the same weights, and have them after every update. With `mesh` the learner shards the layers of the
    policy given, which is used up: its own is `policy`, and `reference` is one of `make_layered_replica`."""

    def __init__(
        self, policy: Policy, recipe: Recipe, optimization: Optimization, reference: Replica | None = None,
        activation_checkpointing: bool = False, entropy: bool = False, ranks: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:  # fmt: skip
        if recipe.needs_pi_ref and reference is None:
            raise ValueError(f"recipe {recipe.name!r} has a KL term (beta > 0): the learner needs a reference policy")
        self.policy, self.recipe, self.optimization, self.reference = policy, recipe, optimization, reference
        self.entropy, self._ranks = entropy, ranks
        start = optimization.masters, optimization.seed
        self._masters: Masters | ShardedMasters | InStep
        if mesh is not None:
            assert ranks is not None
            self.policy, self._masters = make_layered(policy, mesh, ranks, *start)
        elif ranks is not None:
            self._masters = ShardedMasters(policy.model.lm, *start, ranks)
        else:
            self._masters = Masters(policy.model.lm, *start)
        if activation_checkpointing:
            self.policy.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
            self.policy.model.lm.train()  # transformers checkpoints in training mode only; dropout is off
        self.synced = SyncedWeights()
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """A fresh AdamW, moments at zero. Matrices decay; scales of norms and biases, of one dimension, do not."""
        o, pairs = self.optimization, list(zip(self._masters.spans, self._masters.parameters, strict=True))
        groups = [
            {"params": [p for span, p in pairs if len(span.shape) > 1], "weight_decay": o.weight_decay},
            {"params": [p for span, p in pairs if len(span.shape) <= 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)
        self._stepping = (
            HostMoments(self._optimizer, self._masters.parameters) if o.offload_moments else self._optimizer
        )

    def end_stage(self, reset_optimizer: bool) -> None:
        """Line 16 of Algorithm 1: π_ref <- π. With `reset_optimizer` the next stage starts with moments at zero."""
        self.load_reference()
        if reset_optimizer:
            self.reset_optimizer()

    def state(self) -> dict[str, Tensor]:
        """What makes the next updates what they are, by name, in the memory that the learner goes on to change: the
        float32 masters, AdamW's moments and its step count (none before the first update). With ranks, what this one
        has of them, nothing where another one has the same; `Merged` of the states of all has everything."""
        state: dict[str, Tensor] = {}
        if isinstance(self._masters, LayerMasters) and not self._masters.is_first:
            return state
        for span, master in zip(self._masters.spans, self._masters.parameters, strict=True):
            state[f"master/{span.label}"] = master.detach()
            for key, value in self._optimizer.state.get(master, {}).items():
                state[f"{key}/{span.name if key == 'step' else span.label}"] = value
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take over what `state` gave, for π_version: the state of a learner in one process, that of the same rank of
        as many, or `Merged` of the states of any number of ranks; the learner may go on in its tensors. Collective.
        Raises ValueError where it is of another model."""
        saved = state if isinstance(state, Merged) else Merged([state])
        for span in self._masters.spans:
            saved.check(f"master/{span.name}", span)
        self.reset_optimizer()
        for span, master in zip(self._masters.spans, self._masters.parameters, strict=True):
            master.copy_(saved.part(f"master/{span.name}", span))
            if f"step/{span.name}" in saved:
                offload, device = self.optimization.offload_moments, master.device
                to_home = partial(on_host, of=device) if offload else partial(Tensor.to, device=device)
                kept = {key: to_home(saved.part(f"{key}/{span.name}", span)) for key in MOMENTS}
                self._optimizer.state[master] = kept | {"step": saved[f"step/{span.name}"].to(master.device)}
        self._masters.round()
        self.policy.weights.version = version

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """π_version into the working weights. `load_state` has to come before the next update: until then the masters
        are another version's. Raises ValueError for other names or shapes than its own."""
        self.policy.weights.load(weights, version)

    def load_reference(self) -> None:
        """π_ref <- π."""
        if self.reference is not None:
            self.reference.load(self.policy.weights, self.policy.version)

    def pack(self, batch: Batch, tokens: int) -> list[FreshMicroBatch]:
        """The micro-batches of a batch, at most `tokens` tokens each, with log π_ref where the objective reads it."""
        recipe, device = self.recipe, self.policy.device
        reference = self.reference.logp if self.reference is not None and recipe.needs_pi_ref else None
        return micro_batches(batch, tokens, device, recipe.needs_whole_groups, recipe.silent, reference)

    @property
    def in_step(self) -> bool:
        """Whether every pass through the model is collective."""
        return isinstance(self._masters, InStep)

    @torch.no_grad()
    def score(
        self, micro_batches: Sequence[FreshMicroBatch], passes: int = 0, by: Policy | Replica | None = None
    ) -> list[Tensor]:
        """log π of the tokens of each row as the policy is now, or of another one: float32 [T], nats."""
        by = self.policy if by is None else by
        found = [by.logp(micro.packed) for micro in micro_batches]
        for _ in range(passes - len(found)):
            by.logp(idle_row(self.policy.device))
        if self.in_step:
            forget_whole(by.model)
        return found

    def first_step(
        self, fresh: Sequence[FreshMicroBatch], in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The first update on a batch, with the micro-batches for those that follow. It starts at π = π_k, so its own
        log-probs are π_k's. Otherwise as `step`; the sums have the entropy too, where it is measured."""
        micro_batches, sums = self.accumulate_first(fresh)
        return micro_batches, {**sums, **(self.update(micro_batches) if in_objective else {})}

    def step(self, micro_batches: Sequence[MicroBatch], in_objective: bool = True) -> dict[str, float]:
        """Lines 14-15 of Algorithm 1: one more optimizer update on a batch; returns its sums and metrics. Nothing
        `in_objective` (every group masked) makes no update. A gradient known to be 0 makes one: AdamW moves on by its
        moments. Collective; micro-batches and sums are this rank's.

        Raises FloatingPointError, which names the completion, where the gradient is not finite; nothing has been
        changed."""
        sums = self.accumulate(micro_batches)
        return {**sums, **(self.update(micro_batches) if in_objective else {})}

    def accumulate_first(
        self, fresh: Sequence[FreshMicroBatch], passes: int = 0
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The gradient of the first update on a batch, from the rows of this rank, which may have none: returns the
        micro-batches for the updates that follow, and the sums. `update` or `discard` is next."""
        micro_batches: list[MicroBatch] = []
        sums: defaultdict[str, float] = defaultdict(float)
        for row in self._passes(fresh, passes):
            if not self.in_step:
                raise_if_asked()  # nothing has moved yet
            entropy_T = row.weight_C.new_empty(len(row.completion_T), dtype=torch.float32) if self.entropy else None
            logp_T = self.policy.logp(row.packed, entropy_T)
            if entropy_T is not None:
                sums["entropy"] += entropy_T.sum().item()
                sums["tokens_entropy"] += len(entropy_T)
            micro_batches.append(row.scored_by(logp_T.detach(), entropy_T))
            self._backward(micro_batches[-1], logp_T, sums)
        return micro_batches, dict(sums)

    def accumulate(self, micro_batches: Sequence[MicroBatch], passes: int = 0) -> dict[str, float]:
        """The gradient of a further update on a batch, as `accumulate_first`; returns the sums.

        Raises FloatingPointError where the loss of a token has no finite derivative: with sharded layers on all ranks,
        otherwise on this rank alone, and then the other ranks have to `discard`."""
        sums: defaultdict[str, float] = defaultdict(float)
        for micro in self._passes(micro_batches, passes):
            self._backward(micro, self.policy.logp(micro.packed), sums)
        return dict(sums)

    def _passes(self, rows: Sequence[T], passes: int) -> Iterator[T]:
        """The rows; then idle passes until there were as many. A pass is what is done before the next row is taken."""
        masters, count = self._masters, max(passes, len(rows))
        for n in range(count):
            if isinstance(masters, InStep):
                masters.begin_pass(last=n + 1 == count)
            if n < len(rows):
                yield rows[n]
            else:
                logp_T = self.policy.logp(idle_row(self.policy.device))
                self._agree(None)
                (0 * logp_T).sum().backward()

    def discard(self) -> None:
        """Drop the gradient that was accumulated."""
        self._masters.discard()

    def _backward(self, micro: MicroBatch, logp_T: Tensor, sums: defaultdict[str, float]) -> None:
        loss, diagnostics = self._loss(micro, logp_T)
        self._agree(None)
        loss.backward()
        if micro.logp_alpha_T is not None:
            largest = (logp_T.detach() - micro.logp_alpha_T).abs().max().item()
            sums["max_abs_log_ratio"] = max(sums["max_abs_log_ratio"], largest)
            sums["tokens_alpha"] += len(logp_T)
        sums["loss"] += loss.item()
        for name, value in diagnostics.items():
            sums[name] += value.item()

    def _loss(self, micro: MicroBatch, logp_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            return self.recipe.loss(micro.terms(logp_T), micro.weight_C)
        except InfiniteGradientError as error:
            self.discard()
            token = f"token {error.position} of {blame.name(micro, error.completion)}"
            said = (
                f"the gradient of update {self.policy.version + 1} is not finite at {token} (all from 0): "
                f"{error.reason}; the policy is still version {self.policy.version}. Choose a recipe that cuts or caps "
                "such a ratio, or leave the completion out"
            )
            self._agree(said)
            raise FloatingPointError(said) from error

    def _agree(self, problem: str | None) -> None:
        """With sharded layers: raise FloatingPointError on all ranks where one has a problem with its row, since none
        could go on without it. Collective."""
        if not self.in_step or self._ranks is None:
            return
        worst = torch.tensor(float(problem is not None), device=self.policy.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._ranks)
        if worst.item():
            self.discard()
            said, rank = say_largest(self._ranks, float(problem is not None), problem or "", self.policy.device)
            raise FloatingPointError(f"{said} (rank {rank})")

    def update(self, rows: Sequence[MicroBatch] = ()) -> dict[str, float]:
        """One step of AdamW along the gradient that was accumulated, of all ranks; returns its metrics, the same on
        all. Collective.

        Raises FloatingPointError, on all ranks, where the gradient is not finite; it names the completion among the
        `rows` that were accumulated. The gradient is dropped, and nothing has been changed."""
        masters = self._masters
        masters.collect()
        limit = self.optimization.max_grad_norm or math.inf
        total = masters.norm()
        norm = total.item()
        if not math.isfinite(norm):
            self._refuse(norm, rows)
        if norm > limit:
            torch.nn.utils.clip_grads_with_norm_(masters.parameters, limit, total)
        rate = self.optimization.rate(self.policy.version)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._stepping.step()
        masters.discard()
        moved = masters.round()
        self.policy.weights.version += 1
        return {"grad_norm": norm, "lr": rate} | ({} if moved is None else {"moved": moved})

    def _refuse(self, norm: float, rows: Sequence[MicroBatch]) -> NoReturn:
        self.discard()
        given = self.policy, self.recipe, rows
        if isinstance(self._masters, InStep) and self._ranks is not None:
            size, culprit = blame.find_in_step(*given, self._masters, self._ranks)
        else:
            size, culprit = blame.find_culprit(*given)
        if self._ranks is not None:
            said, rank = say_largest(self._ranks, size, culprit, self.policy.device)
            culprit = f"{said}, of rank {rank}"
        raise FloatingPointError(
            f"the gradient of update {self.policy.version + 1} is not finite (norm {norm}); the largest is that of "
            f"{culprit}; the policy is still version {self.policy.version}. Lower optimizer.lr, or leave the "
            "completion out"
        )

    def on_sync(self) -> dict[str, float]:
        """The share of the working weights that a weight sync changes, as `moved_synced`; nothing at the first one."""
        return self.synced.metrics(self.policy.weights)
