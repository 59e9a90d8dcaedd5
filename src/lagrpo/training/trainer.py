"""The trainer: packed rows -> gradient -> optimizer step, on one policy, π.

In bfloat16 gradients of the micro-batches are added up in float32, AdamW steps on float32 master weights, and the
weights that the model computes with are their rounding. There is no autocast.

Ranks train together: each computes the gradient of its own rows and steps on its part of the masters. If layers are
sharded, every pass is collective, so all ranks make as many passes, idle ones if they have no row. Methods that say
"Collective" have to be called on all ranks, in the same order."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lagrpo.core.objective import Recipe
from lagrpo.cpu.decoder import FAMILIES
from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Model, Policy, count_differing, sample_weights
from lagrpo.training.batch import Batch, MicroBatch, micro_batches
from lagrpo.training.fsdp import free_gathered, idle_row, shard_policy
from lagrpo.training.master_weights import (
    MOMENTS,
    MasterWeights,
    MergedState,
    Start,
    ZeroMasterWeights,
    step_offloaded,
    to_host,
)
from lagrpo.training.ranks import Ranks, add_up


@dataclass(frozen=True, slots=True)
class Optimization:
    """AdamW and its learning-rate schedule over `updates` updates. `masters` says where float32 masters start, keyed by
    `seed`; `offload_moments` keeps the moments in the host's memory."""

    lr: float
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
        0 at update `updates` - 1 along a line or half a cosine. Masked batches make no update."""
        if update < self.warmup:
            return self.lr * (update + 1) / (self.warmup + 1)
        progress = (update - self.warmup) / max(1, self.updates - 1 - self.warmup)
        factor = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }
        return self.lr * max(0.0, factor[self.schedule])


@contextmanager
def deterministic(model: Model) -> Iterator[None]:
    """Inside, a GPU adds up gradients in a fixed order, as a CPU does, so that a run can be resumed bit for bit. Other
    families than FAMILIES may have operations without such an order; PyTorch warns of these."""
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    if model.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
        dense = model.config.get_text_config().model_type in FAMILIES
        torch.use_deterministic_algorithms(True, warn_only=not dense)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore


class Trainer:
    """Steps `policy` along the objective of `recipe`, with `reference` = π_ref if it has a KL term. `policy.version`
    counts the updates. All `ranks` have the same weights. If they shard layers, the policy given is used up: the
    trainer's own is `policy`, and `reference` is one of `copy_sharded`."""

    def __init__(
        self, policy: Policy, recipe: Recipe, optimization: Optimization, reference: Policy | None = None,
        activation_checkpointing: bool = False, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        if recipe.needs_pi_ref and reference is None:
            raise ValueError(
                f"recipe {recipe.name!r} has a KL term (beta > 0): the trainer needs a reference policy"
            )
        self.policy, self.recipe, self.optimization, self.reference = (
            policy,
            recipe,
            optimization,
            reference,
        )
        self.ranks = ranks or Ranks()
        self.masters: MasterWeights
        start = optimization.masters, optimization.seed
        if self.ranks.mesh is not None:
            self.policy, self.masters = shard_policy(
                policy, self.ranks.mesh, self.ranks.group, *start
            )
        elif self.ranks.group is not None:
            self.masters = ZeroMasterWeights(policy.model.lm, *start, self.ranks.group)
        else:
            self.masters = MasterWeights(policy.model.lm, *start)
        if activation_checkpointing:
            self.policy.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
            self.policy.model.lm.train()  # transformers checkpoints in training mode only; dropout is off
        self.synced: list[Tensor] = []  # a sample of the weights of the last weight sync
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """A fresh AdamW, moments at zero. Matrices decay; scales of norms and biases, of one dimension, do not."""
        o, pairs = (
            self.optimization,
            list(zip(self.masters.spans, self.masters.parameters, strict=True)),
        )
        groups = [
            {
                "params": [p for span, p in pairs if len(span.shape) > 1],
                "weight_decay": o.weight_decay,
            },
            {"params": [p for span, p in pairs if len(span.shape) <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, fused=True)

    # A batch: lines 14-15 of Algorithm 1

    def pack(self, batch: Batch, tokens: int) -> list[MicroBatch]:
        """This rank's micro-batches of a batch, at most `tokens` tokens each, with log π_ref if the objective reads it.
        Collective."""
        recipe, device = self.recipe, self.policy.device
        how = recipe.needs_whole_groups, recipe.skips_zero_advantage, self.ranks
        rows = micro_batches(batch, tokens, device, *how)
        if not recipe.needs_pi_ref:
            return rows
        logp_ref = self.compute_logprobs(rows, self.reference)
        return [replace(row, logp_ref_T=logp_T) for row, logp_T in zip(rows, logp_ref, strict=True)]

    def step(
        self, rows: Sequence[MicroBatch], in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """An optimizer update on a batch: its micro-batches, with log π_k, and its sums and metrics. Without anything
        `in_objective` (every group masked) there is no update. Collective; raises as `update`."""
        rows, sums = self.accumulate(rows)
        return rows, sums | (self.update() if in_objective else {})

    def accumulate(self, rows: Sequence[MicroBatch]) -> tuple[list[MicroBatch], dict[str, float]]:
        """The gradient of an update, from this rank's rows, and the sums of all ranks. The first update on a batch
        starts at π = π_k: the rows come back with its log-probs, for the updates that follow. Collective."""
        done: list[MicroBatch] = []
        sums: defaultdict[str, float] = defaultdict(float)
        with self.ranks.stopping_together():
            for row in self._passes(rows):
                logp_T, row = self._logprobs(row, sums)
                loss, diagnostics = self.recipe.loss(row.loss_inputs(logp_T), row.weight_C)
                with deterministic(self.policy.model):
                    loss.backward()
                if row.logp_alpha_T is not None:
                    largest = (logp_T.detach() - row.logp_alpha_T).abs().max().item()
                    sums["max_abs_log_ratio"] = max(sums["max_abs_log_ratio"], largest)
                    sums["tokens_alpha"] += len(logp_T)
                for name, value in {"loss": loss, **diagnostics}.items():
                    sums[name] += value.item()
                done.append(row)
        return done, add_up(self.ranks.gather(dict(sums)))

    def _logprobs(
        self, row: MicroBatch, sums: defaultdict[str, float]
    ) -> tuple[Tensor, MicroBatch]:
        """log π of a row, with a gradient, and the row; it gets them as log π_k, with the entropy, if it has none."""
        if row.logp_k_T is not None:
            return self.policy.logp(row.packed), row
        if not self.masters.passes_are_collective:
            raise_if_asked()  # nothing has moved yet
        entropy_T = row.weight_C.new_empty(len(row.completion_T), dtype=torch.float32)
        logp_T = self.policy.logp(row.packed, entropy_T)
        sums["entropy"] += entropy_T.sum().item()
        sums["tokens_entropy"] += len(entropy_T)
        return logp_T, row.with_logprobs(logp_T.detach(), entropy_T)

    def _passes(self, rows: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """The rows; then idle passes until all ranks are done. A pass is what the caller does with a row."""
        idle = self._count_passes(rows) - len(rows)
        yield from rows
        for _ in range(idle):
            (0 * self.policy.logp(idle_row(self.policy.device))).sum().backward()

    def _count_passes(self, rows: Sequence[MicroBatch]) -> int:
        return (
            max(self.ranks.gather(len(rows))) if self.masters.passes_are_collective else len(rows)
        )

    def update(self) -> dict[str, float]:
        """One step of AdamW along the gradient that was accumulated, from all ranks; returns its metrics, the same on
        all. Collective. Raises FloatingPointError, on all ranks, if the gradient is not finite: it is dropped, and
        nothing has changed."""
        self.masters.reduce_grads()
        limit = self.optimization.max_grad_norm or math.inf
        total = self.masters.grad_norm()
        norm = total.item()
        if not math.isfinite(norm):
            self.masters.zero_grads()
            what = f"the gradient of update {self.policy.version + 1} is not finite (norm {norm})"
            raise FloatingPointError(
                f"{what}; still version {self.policy.version}. Lower optimizer.learning_rate"
            )
        if norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self.masters.parameters, limit, total)
        rate = self.optimization.rate(self.policy.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.optimization.offload_moments:
            step_offloaded(self.optimizer, self.masters.parameters)
        else:
            self.optimizer.step()
        self.masters.zero_grads()
        self.masters.write_back()
        self.policy.weights.version += 1
        return {"grad_norm": norm, "lr": rate}

    # Log-probs, weight syncs, stages

    @torch.no_grad()
    def compute_logprobs(
        self, rows: Sequence[MicroBatch], by: Policy | None = None
    ) -> list[Tensor]:
        """log π of the tokens of each of this rank's rows, as the policy is now, or another one: float32 [T], nats.
        Collective."""
        by = self.policy if by is None else by
        idle = self._count_passes(rows) - len(rows)
        found = [by.logp(row.packed) for row in rows]
        for _ in range(idle):
            by.logp(idle_row(self.policy.device))
        if self.masters.passes_are_collective:
            free_gathered(by.model)
        return found

    def on_sync(self) -> dict[str, float]:
        """The share of the policy's weights whose bits changed since the last weight sync, as `changed_fraction`, by a
        sample of about a million; nothing at the first one."""
        last, self.synced = self.synced, sample_weights(self.policy.weights)
        if not last:
            return {}
        moved = sum(
            count_differing(new, old.to(new.device))
            for new, old in zip(self.synced, last, strict=True)
        )
        return {"changed_fraction": int(moved) / sum(map(len, last))}

    def end_stage(self, reset_optimizer: bool) -> None:
        """Line 16 of Algorithm 1: π_ref <- π. With `reset_optimizer` the next stage starts with moments at zero."""
        self.load_reference()
        if reset_optimizer:
            self.reset_optimizer()

    def load_reference(self) -> None:
        if self.reference is not None:
            self.reference.load(self.policy.weights, self.policy.version)

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """What decides the next updates, by name, in the trainer's own memory: masters, AdamW's moments and its step
        count. With ranks, this rank's part; `MergedState` of the states of all has everything."""
        state: dict[str, Tensor] = {}
        for span, master in zip(self.masters.spans, self.masters.parameters, strict=True):
            state[f"master/{span.label}"] = master.detach()
            for key, value in self.optimizer.state.get(master, {}).items():
                state[f"{key}/{span.name if key == 'step' else span.label}"] = value
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load what `state` gave, for π_version, or `MergedState` of the states of any number of ranks. Collective.
        Raises ValueError for another model's state."""
        saved = state if isinstance(state, MergedState) else MergedState([state])
        for span in self.masters.spans:
            if (count := saved.count(f"master/{span.name}")) != (expected := span.shape.numel()):
                raise ValueError(
                    f"master/{span.name} has {count} numbers in the trainer's state, not {expected}"
                )
        self.reset_optimizer()
        for span, master in zip(self.masters.spans, self.masters.parameters, strict=True):
            master.copy_(saved.part(f"master/{span.name}", span))
            if f"step/{span.name}" in saved:
                offload, device = self.optimization.offload_moments, master.device
                to_home = (
                    partial(to_host, of=device) if offload else partial(Tensor.to, device=device)
                )
                kept = {key: to_home(saved.part(f"{key}/{span.name}", span)) for key in MOMENTS}
                self.optimizer.state[master] = kept | {
                    "step": saved[f"step/{span.name}"].to(device).clone()
                }
        self.masters.write_back()
        self.policy.weights.version = version
