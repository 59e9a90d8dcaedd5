"""The optimizer: AdamW on a rank's part of the masters, its learning rate, and their state."""

# Some methods of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lagrpo.distributed.ranks import Ranks
from lagrpo.training.kl_rate import RateByKl
from lagrpo.training.master_weights import (
    MOMENTS,
    MasterWeights,
    MergedState,
    Span,
    Start,
    step_offloaded,
    to_host,
)
from lagrpo.training.split_masters import new_window, step_blocks
from lagrpo.training.tensors import to_floats

PREVIOUS_GRADIENT = "previous_gradient"
KL_RATE = "kl_rate"
"""The name of the state of `RateByKl` in the optimizer's."""


@dataclass(frozen=True, slots=True)
class Optimization:
    """AdamW and its learning-rate schedule over `updates` updates.

    `masters` says where float32 masters start, keyed by `seed`; `offload_moments` keeps the moments
    in the host's memory.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    updates: int = 1
    masters: Start = "dithered"
    seed: int = 0
    offload_moments: bool = False
    full_rate_ess: float = 0.0
    """Share of the completions that their effective sample size must reach for the full rate
    (VCPO's e0); 0: off"""
    full_rate_kl: float = 0.0
    """KL(alpha || pi) per token above which the rate falls, nats (`RateByKl`); 0: off"""
    oldest_samples: int = 0
    """the largest staleness that the schedule allows, in updates"""
    log_gradient_cosine: bool = False

    def rate(self, update: int, ess_share: float | None = None) -> float:
        """Returns the learning rate of update 0, 1, ….

        Linear warm-up over `warmup` updates, then constant, or from lr down along a line or half a
        cosine that reaches 0 after the last update, as in transformers: without a warm-up the
        factors of a line over N updates are 1, (N - 1)/N, …, 1/N. Masked batches make no update.

        With `full_rate_ess` the rate is scaled by sqrt(min(1, ess_share / full_rate_ess)),
        `ess_share` being the effective sample size of the step's completions over their number:
        VCPO (arXiv 2602.17616).
        """
        rate = self._scheduled(update)
        if self.full_rate_ess and ess_share is not None:
            rate *= math.sqrt(min(1.0, ess_share / self.full_rate_ess))
        return rate

    def _scheduled(self, update: int) -> float:
        if update < self.warmup:
            # Above 0 at the first update; update `warmup` is the first with the full rate.
            return self.lr * (update + 1) / (self.warmup + 1)
        # 0 after the warm-up, 1 where an update after the last one would be.
        progress = (update - self.warmup) / max(1, self.updates - self.warmup)
        factor = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }
        return self.lr * max(0.0, factor[self.schedule])


class Optimizer:
    """Steps AdamW on `masters`, at the rates of `optimization`.

    Each of the `ranks` steps on its part of the masters.
    """

    def __init__(self, masters: MasterWeights, optimization: Optimization, ranks: Ranks) -> None:
        self._masters = masters
        self._optimization = optimization
        self._ranks = ranks
        self.rate_by_kl: RateByKl | None = None
        if optimization.full_rate_kl:
            self.rate_by_kl = RateByKl(optimization.full_rate_kl, optimization.oldest_samples)
        self.reset()

    def reset(self) -> None:
        """Replaces AdamW by a new one, with moments at zero.

        Matrices decay. Scales of norms and biases, which have one dimension, do not.
        """
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for span, parameter in zip(self._masters.spans, self._masters.parameters, strict=True):
            if span.is_matrix:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self._optimization.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=self._optimization.lr, betas=self._optimization.betas, fused=True
        )

    def make_room(self) -> Tensor:
        """Makes the moments that AdamW's first step would make. Returns memory for `step`.

        That step could not be repeated if memory ran out: it may have changed masters by then.
        """
        for master in self._masters.parameters:
            if not self.adamw.state[master]:
                moments = {name: torch.zeros_like(master) for name in MOMENTS}
                if self._optimization.offload_moments:
                    moments = {name: to_host(m, master.device) for name, m in moments.items()}
                step = torch.zeros((), dtype=torch.float32, device=master.device)
                self.adamw.state[master] = {"step": step, **moments}
        return new_window(self._masters.blocks)

    def step(
        self, update: int, window: Tensor, *, ess_share: float | None, kl: float | None
    ) -> dict[str, float]:
        """Makes update 0, 1, … along the masters' gradients, and drops these.

        `window` is the memory of `make_room`; `ess_share` and `kl` are the step's, for its rate.
        Returns the metrics. Collective if the gradient's cosine is logged.
        """
        metrics: dict[str, float] = {}
        gradients: list[Tensor | None] = []
        if self._optimization.log_gradient_cosine:
            metrics |= self._gradient_cosine()
            gradients = [master.grad for master in self._masters.parameters]
        rate = self._optimization.rate(update, ess_share)
        if self.rate_by_kl is not None and kl is not None:
            rate *= self.rate_by_kl.next_factor(kl)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        step_blocks(self.adamw, self._masters.blocks, self._masters.parameters, window)
        # The other masters, which are in no block.
        if self._optimization.offload_moments:
            step_offloaded(self.adamw, self._masters.parameters)
        else:
            self.adamw.step()
        if self._optimization.log_gradient_cosine:
            self._keep_gradient(gradients)
        self._masters.zero_grads()
        return metrics | {"lr": rate}

    def _gradient_cosine(self) -> dict[str, float]:
        """Returns the cosine between this gradient and the gradient of the update before.

        It is near 0 on fresh samples, near 1 where stale samples push the same way again and again
        (GAC, arXiv 2603.01501). The first update has none. Collective.
        """
        # new·old, new·new, old·old over this rank's masters
        products = torch.zeros(3, dtype=torch.float64)
        for master in self._masters.parameters:
            previous = self.adamw.state.get(master, {}).get(PREVIOUS_GRADIENT)
            if previous is not None and master.grad is not None:
                new = master.grad.double().flatten()
                old = previous.to(new.device).double().flatten()
                products += torch.stack([new @ old, new @ new, old @ old]).cpu()
        products_by_rank = torch.tensor(
            self._ranks.gather(to_floats(products)), dtype=torch.float64
        )
        dot, new_square, old_square = products_by_rank.sum(dim=0)
        if old_square == 0 or new_square == 0:
            return {}
        return {"gradient_cosine": float(dot / (new_square * old_square).sqrt())}

    def _keep_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Keeps the gradient beside AdamW's moments, so that checkpoints have it.

        Call it after the optimizer's step: AdamW takes a parameter whose state has something for
        one whose state has moments.
        """
        offload = self._optimization.offload_moments
        for master, gradient in zip(self._masters.parameters, gradients, strict=True):
            if gradient is None:
                continue
            copied = to_host(gradient, master.device) if offload else gradient.clone()
            self.adamw.state[master][PREVIOUS_GRADIENT] = copied

    def state(self) -> dict[str, Tensor]:
        """Returns masters, moments and step count by name: one rank's part of them.

        Masters in `joined_names` are copies, all else is the optimizer's own memory.
        """
        state: dict[str, Tensor] = {}
        masters = self._masters
        for span, master, numbers in zip(
            masters.spans, masters.parameters, masters.read(), strict=True
        ):
            state[f"master/{span.label}"] = numbers
            for key, value in self.adamw.state.get(master, {}).items():
                # A step count is one number: it has no part per rank.
                label = span.name if key == "step" else span.label
                state[f"{key}/{label}"] = value
        if self.rate_by_kl is not None:
            state[KL_RATE] = self.rate_by_kl.state()
        return state

    def joined_names(self) -> set[str]:
        """Returns the names in `state` of masters that are split, and joined for it."""
        spans = self._masters.spans
        split = {piece.index for block in self._masters.blocks for piece in block.pieces}
        return {f"master/{spans[index].label}" for index in split}

    @torch.no_grad()
    def load(self, saved: MergedState) -> None:
        """Loads what `state` returned, on any number of ranks. Writes the weights. Collective.

        Raises ValueError, before anything changes, for another model's state.
        """
        for span in self._masters.spans:
            count = saved.count(f"master/{span.name}")
            expected = span.shape.numel()
            if count != expected:
                raise ValueError(
                    f"master/{span.name} has {count} numbers in the trainer's state, not {expected}"
                )
        self.reset()
        self._masters.load(lambda span: saved.part(f"master/{span.name}", span))
        for span, master in zip(self._masters.spans, self._masters.parameters, strict=True):
            # A run that stopped before its first update has no moments.
            if f"step/{span.name}" in saved:
                self.adamw.state[master] = self._load_moments(saved, span, master)
        if self.rate_by_kl is not None and KL_RATE in saved:
            self.rate_by_kl.load(saved[KL_RATE])
        self._masters.write_back()

    def _load_moments(self, saved: MergedState, span: Span, master: Tensor) -> dict[str, Tensor]:
        """Returns AdamW's state of a master, and its previous gradient if `saved` has one."""
        keys: list[str] = [*MOMENTS]
        if f"{PREVIOUS_GRADIENT}/{span.name}" in saved:
            keys.append(PREVIOUS_GRADIENT)
        state: dict[str, Tensor] = {}
        for key in keys:
            moment = saved.part(f"{key}/{span.name}", span)
            if self._optimization.offload_moments:
                state[key] = to_host(moment, master.device)
            else:
                state[key] = moment.to(device=master.device)
        state["step"] = saved[f"step/{span.name}"].to(master.device).clone()
        return state
