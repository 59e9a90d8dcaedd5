"""The trainer: packed rows -> gradient -> optimizer step, on one policy, π.

The working weights are what rollout engine and trainer compute with (bfloat16, or float32 throughout). In bfloat16 the
optimizer steps on float32 master weights: gradients of the micro-batches are added up in float32, AdamW steps on the
masters, and the working weights are their rounding. There is no autocast.

With `ranks`, the processes of a group train together: each computes the gradient of its own rows and steps on its part
of the masters. With a `mesh` of them the layers are sharded, too; then every forward and backward pass is collective,
and all ranks make the same number of `passes`, idle ones if they have no row. Methods that say "Collective" have to be
called on all ranks, in the same order."""

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

from lagrpo.core.objective import Recipe
from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy, PolicyCopy, count_differing, sample_weights
from lagrpo.training.batch import Batch, FreshMicroBatch, MicroBatch, micro_batches
from lagrpo.training.fsdp import free_gathered, idle_row, shard_policy
from lagrpo.training.master_weights import MasterWeights, Start, ZeroMasterWeights
from lagrpo.training.optimizer_state import MOMENTS, MergedState, step_offloaded, to_host

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Optimization:
    """The numbers of AdamW and of its learning-rate schedule; `updates` is how many the run makes in all. `masters`
    says where the float32 masters of bfloat16 weights start, with random numbers keyed by `seed`; `offload_moments`
    keeps the moments in the host's memory."""

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


class Trainer:
    """Steps `policy` along the objective of `recipe`, with `reference` = π_ref if it has a KL term. `policy.version`
    counts the updates. With `entropy` the first update on a batch also measures π's entropy. `ranks` train together:
    all start from the same weights, and have the same after every update. With `mesh` the trainer shards the layers of
    the policy given, which is used up: its own is `policy`, and `reference` is one of `copy_sharded`."""

    def __init__(
        self, policy: Policy, recipe: Recipe, optimization: Optimization, reference: PolicyCopy | None = None,
        activation_checkpointing: bool = False, entropy: bool = False, ranks: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:  # fmt: skip
        if recipe.needs_pi_ref and reference is None:
            raise ValueError(f"recipe {recipe.name!r} has a KL term (beta > 0): the trainer needs a reference policy")
        self.policy, self.recipe, self.optimization, self.reference = policy, recipe, optimization, reference
        self.entropy = entropy
        self.masters: MasterWeights
        start = optimization.masters, optimization.seed
        if mesh is not None:
            assert ranks is not None
            self.policy, self.masters = shard_policy(policy, mesh, ranks, *start)
        elif ranks is not None:
            self.masters = ZeroMasterWeights(policy.model.lm, *start, ranks)
        else:
            self.masters = MasterWeights(policy.model.lm, *start)
        if activation_checkpointing:
            self.policy.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
            self.policy.model.lm.train()  # transformers checkpoints in training mode only; dropout is off
        self.synced: list[Tensor] = []  # a sample of the weights of the last weight sync
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """A fresh AdamW, moments at zero. Matrices decay; scales of norms and biases, of one dimension, do not."""
        o, pairs = self.optimization, list(zip(self.masters.spans, self.masters.parameters, strict=True))
        groups = [
            {"params": [p for span, p in pairs if len(span.shape) > 1], "weight_decay": o.weight_decay},
            {"params": [p for span, p in pairs if len(span.shape) <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=True)

    @property
    def passes_are_collective(self) -> bool:
        """Whether all ranks have to make every pass through the model."""
        return self.masters.passes_are_collective

    # A batch: lines 14-15 of Algorithm 1

    def pack(self, batch: Batch, tokens: int) -> list[FreshMicroBatch]:
        """The micro-batches of a batch, at most `tokens` tokens each, with log π_ref if the objective reads it."""
        recipe, device = self.recipe, self.policy.device
        reference = self.reference.logp if self.reference is not None and recipe.needs_pi_ref else None
        return micro_batches(batch, tokens, device, recipe.needs_whole_groups, recipe.skips_zero_advantage, reference)

    def first_step(
        self, fresh: Sequence[FreshMicroBatch], in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The first update on a batch, with the micro-batches for those that follow. It starts at π = π_k, so its own
        log-probs are π_k's. Otherwise as `step`; the sums have the entropy too, if it is measured."""
        rows, sums = self.accumulate_first(fresh)
        return rows, {**sums, **(self.update(rows) if in_objective else {})}

    def step(self, rows: Sequence[MicroBatch], in_objective: bool = True) -> dict[str, float]:
        """One more optimizer update on a batch; returns its sums and metrics. Without anything `in_objective` (every
        group masked) there is no update. A gradient known to be 0 makes one: AdamW still moves by its moments.
        Collective; micro-batches and sums are this rank's. Raises as `update`."""
        sums = self.accumulate(rows)
        return {**sums, **(self.update(rows) if in_objective else {})}

    def accumulate_first(
        self, fresh: Sequence[FreshMicroBatch], passes: int = 0
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """The gradient of the first update on a batch, from this rank's rows, if it has any: returns the micro-batches
        for the updates that follow, and the sums. `update` or `zero_grads` is next."""
        rows: list[MicroBatch] = []
        sums: defaultdict[str, float] = defaultdict(float)
        for row in self._passes(fresh, passes):
            if not self.passes_are_collective:
                raise_if_asked()  # nothing has moved yet
            entropy_T = row.weight_C.new_empty(len(row.completion_T), dtype=torch.float32) if self.entropy else None
            logp_T = self.policy.logp(row.packed, entropy_T)
            if entropy_T is not None:
                sums["entropy"] += entropy_T.sum().item()
                sums["tokens_entropy"] += len(entropy_T)
            rows.append(row.with_logprobs(logp_T.detach(), entropy_T))
            self._backward(rows[-1], logp_T, sums)
        return rows, dict(sums)

    def accumulate(self, rows: Sequence[MicroBatch], passes: int = 0) -> dict[str, float]:
        """The gradient of another update on a batch, as `accumulate_first`; returns the sums."""
        sums: defaultdict[str, float] = defaultdict(float)
        for row in self._passes(rows, passes):
            self._backward(row, self.policy.logp(row.packed), sums)
        return dict(sums)

    def _passes(self, rows: Sequence[T], passes: int) -> Iterator[T]:
        """The rows; then idle passes until there were `passes`. A pass is what the caller does with a row."""
        count = max(passes, len(rows))
        for n in range(count):
            self.masters.begin_pass(last=n + 1 == count)
            if n < len(rows):
                yield rows[n]
            else:
                (0 * self.policy.logp(idle_row(self.policy.device))).sum().backward()

    def _backward(self, row: MicroBatch, logp_T: Tensor, sums: defaultdict[str, float]) -> None:
        """Add the gradient of a row to the masters' gradients, and what the loss measures to the sums."""
        loss, diagnostics = self.recipe.loss(row.loss_inputs(logp_T), row.weight_C)
        loss.backward()
        if row.logp_alpha_T is not None:
            largest = (logp_T.detach() - row.logp_alpha_T).abs().max().item()
            sums["max_abs_log_ratio"] = max(sums["max_abs_log_ratio"], largest)
            sums["tokens_alpha"] += len(logp_T)
        sums["loss"] += loss.item()
        for name, value in diagnostics.items():
            sums[name] += value.item()

    def update(self, rows: Sequence[MicroBatch] = ()) -> dict[str, float]:
        """One step of AdamW along the gradient that was accumulated, from all ranks; returns its metrics, the same on
        all. Collective.

        Raises FloatingPointError, on all ranks, if the gradient is not finite, with a completion among this rank's
        `rows`. The gradient is dropped, and nothing has changed."""
        self.masters.reduce_grads()
        limit = self.optimization.max_grad_norm or math.inf
        total = self.masters.grad_norm()
        norm = total.item()
        if not math.isfinite(norm):
            self._reject(norm, rows)
        if norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self.masters.parameters, limit, total)
        rate = self.optimization.rate(self.policy.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.optimization.offload_moments:
            step_offloaded(self.optimizer, self.masters.parameters)
        else:
            self.optimizer.step()
        self.zero_grads()
        moved = self.masters.write_back()
        self.policy.weights.version += 1
        return {"grad_norm": norm, "lr": rate} | ({} if moved is None else {"moved": moved})

    def zero_grads(self) -> None:
        """Drop the gradient that was accumulated."""
        self.masters.zero_grads()

    def _reject(self, norm: float, rows: Sequence[MicroBatch]) -> NoReturn:
        self.zero_grads()
        shares = [
            (share, row.name(c))
            for row in rows
            for c, share in enumerate((row.weight_C * row.advantage_C).abs().nan_to_num(math.inf).tolist())
        ]
        share, name = max(shares, default=(0.0, "none"))
        raise FloatingPointError(
            f"the gradient of update {self.policy.version + 1} is not finite (norm {norm}); the policy is still "
            f"version {self.policy.version}. Largest |weight x advantage|: {share:g}, of {name}. "
            "Lower optimizer.learning_rate, or leave the completion out"
        )

    # Log-probs, weight syncs, stages

    @torch.no_grad()
    def compute_logprobs(
        self, rows: Sequence[FreshMicroBatch], passes: int = 0, by: Policy | PolicyCopy | None = None
    ) -> list[Tensor]:
        """log π of the tokens of each row as the policy is now, or another one: float32 [T], nats."""
        by = self.policy if by is None else by
        found = [by.logp(row.packed) for row in rows]
        for _ in range(passes - len(found)):
            by.logp(idle_row(self.policy.device))
        if self.passes_are_collective:
            free_gathered(by.model)
        return found

    def on_sync(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """The share of the policy's weights whose bits changed since the weight sync before, as `changed_fraction`;
        nothing at the first one. A sample of about a million weights tells: the share p has a standard error of about
        √(p / 10⁶)."""
        last, self.synced = self.synced, sample_weights(self.policy.weights if weights is None else weights)
        if not last:
            return {}
        moved = sum(count_differing(new, old.to(new.device)) for new, old in zip(self.synced, last, strict=True))
        return {"changed_fraction": int(moved) / sum(map(len, last))}

    def end_stage(self, reset_optimizer: bool) -> None:
        """Line 16 of Algorithm 1: π_ref <- π. With `reset_optimizer` the next stage starts with moments at zero."""
        self.load_reference()
        if reset_optimizer:
            self.reset_optimizer()

    def load_reference(self) -> None:
        """π_ref <- π."""
        if self.reference is not None:
            self.reference.load(self.policy.weights, self.policy.version)

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """What decides the next updates, by name, in the memory that the trainer continues to change: masters, AdamW's
        moments and its step count (none before the first update). With ranks, this rank's part, nothing if another one
        has the same; `MergedState` of the states of all has everything."""
        state: dict[str, Tensor] = {}
        if not self.masters.has_state:
            return state
        for span, master in zip(self.masters.spans, self.masters.parameters, strict=True):
            state[f"master/{span.label}"] = master.detach()
            for key, value in self.optimizer.state.get(master, {}).items():
                state[f"{key}/{span.name if key == 'step' else span.label}"] = value
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load what `state` gave, for π_version: the state of a trainer in one process, of the same rank of as many, or
        `MergedState` of the states of any number of ranks. Collective. Raises ValueError for another model's state."""
        saved = state if isinstance(state, MergedState) else MergedState([state])
        for span in self.masters.spans:
            saved.check(f"master/{span.name}", span)
        self.reset_optimizer()
        for span, master in zip(self.masters.spans, self.masters.parameters, strict=True):
            master.copy_(saved.part(f"master/{span.name}", span))
            if f"step/{span.name}" in saved:
                offload, device = self.optimization.offload_moments, master.device
                to_home = partial(to_host, of=device) if offload else partial(Tensor.to, device=device)
                kept = {key: to_home(saved.part(f"{key}/{span.name}", span)) for key in MOMENTS}
                self.optimizer.state[master] = kept | {"step": saved[f"step/{span.name}"].to(device).clone()}
        self.masters.write_back()
        self.policy.weights.version = version

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """π_version into the working weights. `load_state` has to come before the next update: until then the masters
        belong to another version. Raises ValueError for other names or shapes than its own."""
        self.policy.weights.load(weights, version)
