"""The trainer: packed rows -> gradient -> optimizer step, on one policy, π.

In bfloat16 gradients of the micro-batches are added up in float32, AdamW steps on float32 master
weights, and the weights that the model computes with are their rounding. Nothing uses autocast.

Ranks train together: each computes the gradient of its rows and steps on its part of the
masters. If layers are sharded, every pass is collective, so all ranks make the same number of
passes: a rank with fewer rows makes idle passes. Methods that say "Collective" have to be called on
all ranks, in the same order.
"""

# Some methods of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, concatenate, on_device
from lagrpo.core.kl import ess
from lagrpo.core.objective import Derivative, Recipe
from lagrpo.core.ratios import limit
from lagrpo.cpu.decoder import FAMILIES
from lagrpo.distributed.ranks import Ranks, add_up
from lagrpo.interrupts import raise_if_asked
from lagrpo.machine import set_own_variable
from lagrpo.model.files import save_model
from lagrpo.model.model import Model, Policy
from lagrpo.training.batch import Batch, MicroBatch, micro_batches
from lagrpo.training.entropy import EntropyTerm
from lagrpo.training.fsdp import free_gathered, idle_row, shard_policy, without_values
from lagrpo.training.kl_rate import RateByKl
from lagrpo.training.master_weights import (
    MOMENTS,
    MasterWeights,
    MergedState,
    Span,
    Start,
    ZeroMasterWeights,
    step_offloaded,
    to_host,
)
from lagrpo.training.split_masters import new_window, step_blocks
from lagrpo.training.step import LOGGED_COUNT, LOGGED_SUM
from lagrpo.training.tensors import to_floats

T = TypeVar("T")
logger = logging.getLogger("lagrpo")

PREVIOUS_GRADIENT = "previous_gradient"
ENTROPY = "entropy_term"
"""The name of the entropy term's state in the trainer's."""
KL_RATE = "kl_rate"
"""The name of the state of `RateByKl` in the trainer's."""


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


@contextmanager
def deterministic(model: Model) -> Generator[None]:
    """Makes a GPU add up gradients in a fixed order, so that a run can be resumed bit for bit.

    A CPU does so anyway. Other families than FAMILIES may have operations without such an order;
    PyTorch warns of these.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled_before = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    if model.device.type == "cuda":
        # PyTorch asks for this variable. It stays set: workspaces that cuBLAS makes later should
        # have the same size.
        set_own_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
        is_known = model.config.get_text_config().model_type in FAMILIES
        torch.use_deterministic_algorithms(mode=True, warn_only=not is_known)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled_before  # pyright: ignore


class Trainer:
    """Steps `policy` along the objective of `recipe`, with `reference` = π_ref if it reads that.

    `policy.version` counts the updates. All `ranks` have the same weights. If they shard layers,
    the given policy is used up: the trainer's is `trainer.policy`, and `reference` is made by
    `copy_sharded`. With `has_teacher` the reference is another model, which never changes;
    otherwise it is a version of the policy.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        optimization: Optimization,
        reference: Policy | None = None,
        *,
        has_teacher: bool = False,
        entropy: EntropyTerm | None = None,
        activation_checkpointing: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if recipe.needs_pi_ref and reference is None:
            raise ValueError(
                f"recipe {recipe.name!r} reads log pi_ref: the trainer needs a reference policy"
            )
        self.policy = policy
        self.recipe = recipe
        self.optimization = optimization
        self.reference = reference
        self.has_teacher = has_teacher
        self.entropy = entropy or EntropyTerm()
        self.rate_by_kl: RateByKl | None = None
        if optimization.full_rate_kl:
            self.rate_by_kl = RateByKl(optimization.full_rate_kl, optimization.oldest_samples)
        self.ranks = ranks or Ranks()
        # Frees what the sampler keeps for later batches; False if it keeps nothing.
        self.free_idle_memory: Callable[[], bool] = bool
        self.skeleton: Any = None  # the model of transformers without its numbers, if sharded
        self.masters: MasterWeights
        start = optimization.masters
        seed = optimization.seed
        if self.ranks.mesh is not None:
            self.skeleton = without_values(policy.model.lm)
            self.policy, self.masters = shard_policy(
                policy, self.ranks.mesh, self.ranks.group, start, seed
            )
        elif self.ranks.group is not None:
            self.masters = ZeroMasterWeights(policy.model.lm, start, seed, self.ranks.group)
        else:
            self.masters = MasterWeights(policy.model.lm, start, seed)
        if activation_checkpointing:
            lm = self.policy.model.lm
            # transformers 5.23 renamed it, and warns of the old name.
            new_name = getattr(lm, "activation_checkpointing_enable", None)
            enable = new_name or lm.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            lm.train()  # transformers checkpoints in training mode only; dropout is off
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Replaces AdamW by a new one, with moments at zero.

        Matrices decay. Scales of norms and biases, which have one dimension, do not.
        """
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for span, parameter in zip(self.masters.spans, self.masters.parameters, strict=True):
            if span.is_matrix:
                matrices.append(parameter)
            else:
                vectors.append(parameter)
        groups = [
            {"params": matrices, "weight_decay": self.optimization.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.optimization.lr, betas=self.optimization.betas, fused=True
        )

    # A batch: lines 14-15 of Algorithm 1

    def pack(self, batch: Batch, tokens: int) -> list[MicroBatch]:
        """Returns this rank's micro-batches of a batch, at most `tokens` tokens each.

        They have log π_ref if the objective reads it. Collective.
        """
        recipe = self.recipe
        rows = micro_batches(
            batch,
            tokens,
            self.policy.device,
            whole_groups=recipe.needs_whole_groups,
            skip_zero_advantage=self.skips_zero_advantage,
            ranks=self.ranks,
        )
        if not recipe.needs_pi_ref:
            return rows
        seen_rows = [row.seen_by_reference() for row in rows]
        ref_logps = self.compute_logprobs(seen_rows, self.reference)
        return [
            replace(row, ref_logp_T=logp_T) for row, logp_T in zip(rows, ref_logps, strict=True)
        ]

    @property
    def skips_zero_advantage(self) -> bool:
        """True if updates leave out completions with advantage 0.

        Then they have no gradient, and no statistic of the step covers them.
        """
        reads_all = bool(self.optimization.full_rate_ess) or self.entropy.is_used
        return self.recipe.skips_zero_advantage and not reads_all

    def step(
        self, rows: Sequence[MicroBatch], *, in_objective: bool = True
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Makes an optimizer update on a batch.

        Returns its micro-batches, with log π_k, and its sums and metrics.

        Makes no update if nothing is `in_objective` (every group masked). Collective; raises as
        `update`.
        """
        coef = self.entropy.coef
        rows, sums = self.accumulate(rows)
        if self.entropy.is_used:
            sums["entropy_coef"] = coef
        if not in_objective:
            return rows, sums
        metrics = self.update(sums.get("ess_share"), _mean_kl(sums))
        if sums.get("tokens_entropy"):  # the first update on the batch
            self.entropy.observe(sums["entropy"] / sums["tokens_entropy"])
        return rows, sums | metrics

    def accumulate(self, rows: Sequence[MicroBatch]) -> tuple[list[MicroBatch], dict[str, float]]:
        """Computes the gradient of an update from this rank's rows.

        Returns the rows, and the sums of all ranks.

        The first update on a batch starts at π = π_k: the rows come back with its log-probs, for
        the updates that follow. Collective.
        """
        with self.ranks.sync_interrupts():
            statistics = self._collect_statistics(rows)
            passes = self._count_passes(rows)
            used_rows, sums, log_ratios = self._with_room(
                partial(self._accumulate_rows, rows, statistics)
            )
            for _ in range(passes - len(rows)):
                self._pass_idle_row()
        totals = add_up(self.ranks.gather(sums))
        if self.optimization.full_rate_ess:
            log_ratios = self.ranks.join(log_ratios)
        if log_ratios:
            totals["ess_share"] = _ess_share(log_ratios)
        return used_rows, totals

    def _with_room(self, compute: Callable[[], T]) -> T:
        """Returns the result of `compute`, which is called again if memory runs out.

        Before the second call the sampler frees what it keeps, once in a run. `compute` must begin
        anew, to the same bits. The other ranks notice nothing, unless they take part in the passes:
        then the error is raised.
        """
        try:
            return compute()
        except torch.OutOfMemoryError:
            if self.masters.passes_are_collective or not self.free_idle_memory():
                raise
        # Not inside of `except`: the error holds the memory of its frames.
        logger.warning("memory ran out while learning: rollouts keep no memory between batches now")
        return compute()

    def _accumulate_rows(
        self, rows: Sequence[MicroBatch], statistics: Mapping[str, Tensor]
    ) -> tuple[list[MicroBatch], dict[str, float], list[float]]:
        """Adds up the gradients of this rank's rows.

        Returns the rows with log π_k, sums over them, and log π(y)/α(y) of their completions, nats,
        if the learning rate follows them. If memory runs out, the gradients are dropped.
        """
        used_rows: list[MicroBatch] = []
        log_ratios: list[float] = []
        sums: defaultdict[str, float] = defaultdict(float)
        try:
            for row in rows:
                used_rows.append(self._accumulate_row(row, statistics, sums, log_ratios))
        except torch.OutOfMemoryError:
            self.masters.zero_grads()
            raise
        return used_rows, dict(sums), log_ratios

    def _accumulate_row(
        self,
        row: MicroBatch,
        statistics: Mapping[str, Tensor],
        sums: defaultdict[str, float],
        log_ratios: list[float],
    ) -> MicroBatch:
        """Adds the gradient of a row, and extends `sums` and `log_ratios`.

        Returns the row with log π_k.
        """
        version = self.policy.version
        coef = self.entropy.coef
        entropy_T = None
        if row.old_logp_T is None:
            logp_T, entropy_T = self._first_logprobs(row)
            sums["entropy"] += entropy_T.sum().item()
            sums["tokens_entropy"] += len(entropy_T)
            row = row.with_logprobs(logp_T.detach(), entropy_T.detach())
        elif coef > 0:
            entropy_T = _room_for_entropy(row)
            logp_T = self.policy.logp(row.packed, entropy_T)
        else:
            logp_T = self.policy.logp(row.packed)
        x = row.loss_inputs(logp_T.detach(), version, statistics)
        x = self.recipe.with_token_advantages(x)
        # `weight_C` has the normalizer of the whole step: gradients only have to be added.
        derivative = self.recipe.differentiate(x, row.weight_C)
        # The loss is differentiated by log π, and by the entropy if it has a coefficient. From
        # there its gradient goes through the model, and adds to the gradients of the rows before.
        with deterministic(self.policy.model):
            if coef > 0 and entropy_T is not None:
                entropy_weight_T = -coef * row.weight_C[row.completion_T]
                torch.autograd.backward(
                    [logp_T, entropy_T], [derivative.gradient_T, entropy_weight_T]
                )
                sums["loss"] += (entropy_weight_T * entropy_T.detach()).sum().item()
            else:
                logp_T.backward(derivative.gradient_T)
        row_sums = _sums(x, derivative) | _own_sums(x)
        if x.rollout_logp is not None:
            if self.optimization.full_rate_ess:
                log_ratios += _completion_log_ratios(x)
            if self.rate_by_kl is not None:
                row_sums |= self._kl_sums(x)
        for name, value in row_sums.items():
            sums[name] += value
        return row

    def _collect_statistics(self, rows: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Returns the statistics of the whole step that the recipe's pieces read.

        They come from a pass without gradient over the rows of all ranks. A recipe without such a
        piece has no statistics, and needs no pass. Collective if there is one.
        """
        if not self.recipe.needs_step_statistics:
            return {}
        entropies: list[Tensor] = []
        logps = self.compute_logprobs(rows, entropies=entropies)
        inputs: list[LossInputs] = []
        for row, logp_T, entropy_T in zip(rows, logps, entropies, strict=True):
            if row.entropy_T is None:  # the first update on the batch: the policy is π_k
                row = replace(row, entropy_T=entropy_T)
            inputs.append(row.loss_inputs(logp_T, self.policy.version))
        own_inputs = on_device(concatenate(inputs), "cpu") if inputs else None
        parts = [part for part in self.ranks.gather(own_inputs) if part is not None]
        if not parts:
            return {}
        statistics = self.recipe.collect(concatenate(parts))
        return {name: value.to(self.policy.device) for name, value in statistics.items()}

    def _first_logprobs(self, row: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns log π of a row at the first update, and the entropy, both with a gradient.

        Both are float32 [T], nats. Raises Interrupted.
        """
        if not self.masters.passes_are_collective:
            raise_if_asked()  # no weight has changed yet
        entropy_T = _room_for_entropy(row)
        logp_T = self.policy.logp(row.packed, entropy_T)
        return logp_T, entropy_T

    def _pass_idle_row(self) -> None:
        """Passes a row without a gradient forward and backward.

        A rank that has no row left does so while others have rows.
        """
        logp_T = self.policy.logp(idle_row(self.policy.device))
        # Zeros: the collectives of a backward pass take place, and no gradient changes.
        (0 * logp_T).sum().backward()

    def _count_passes(self, rows: Sequence[MicroBatch]) -> int:
        """Returns the number of passes that this rank has to make. Collective if passes are."""
        if self.masters.passes_are_collective:
            return max(self.ranks.gather(len(rows)))
        return len(rows)

    def _kl_sums(self, x: LossInputs) -> dict[str, float]:
        """Returns the sum of the estimates of KL(alpha || pi) and the number of their tokens.

        These are the tokens that the update learns from, though it may read others.
        """
        assert x.rollout_logp is not None
        d_T = limit((x.logp - x.rollout_logp).double())
        if self.recipe.skips_zero_advantage:
            d_T = d_T[x.advantage != 0]
        return {"kl_alpha": (torch.expm1(d_T) - d_T).sum().item(), "tokens_kl_alpha": len(d_T)}

    def update(self, ess_share: float | None = None, kl: float | None = None) -> dict[str, float]:
        """Makes one step of AdamW along the gradient that was accumulated, from all ranks.

        `kl` is the mean KL(alpha || pi) per token that it learns from. Returns its metrics, the
        same on all.

        Collective. Raises FloatingPointError, on all ranks, if the gradient is not finite: it is
        dropped, and nothing has changed.
        """
        self._with_room(self.masters.reduce_grads)
        norm_tensor = self.masters.grad_norm()
        # Waits for the GPU: what follows depends on the number.
        norm = norm_tensor.item()
        version = self.policy.version
        if not math.isfinite(norm):
            self.masters.zero_grads()
            raise FloatingPointError(
                f"the gradient of update {version + 1} is not finite (norm {norm}); "
                f"still version {version}. Lower optimizer.learning_rate"
            )
        metrics = {"grad_norm": norm}
        max_norm = self.optimization.max_grad_norm or math.inf
        if norm > max_norm:
            # With the norm of all ranks' gradients: this rank has only its part.
            torch.nn.utils.clip_grads_with_norm_(self.masters.parameters, max_norm, norm_tensor)
        gradients: list[Tensor | None] = []
        if self.optimization.log_gradient_cosine:
            metrics |= self._gradient_cosine()
            gradients = [master.grad for master in self.masters.parameters]

        rate = self.optimization.rate(version, ess_share)
        if self.rate_by_kl is not None and kl is not None:
            rate *= self.rate_by_kl.next_factor(kl)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        window = self._with_room(self._make_room_for_step)
        step_blocks(self.optimizer, self.masters.blocks, self.masters.parameters, window)
        # The other masters, which are in no block.
        if self.optimization.offload_moments:
            step_offloaded(self.optimizer, self.masters.parameters)
        else:
            self.optimizer.step()
        if self.optimization.log_gradient_cosine:
            self._keep_gradient(gradients)
        self.masters.zero_grads()
        self.masters.write_back()
        self.policy.advance()
        return metrics | {"lr": rate}

    def _make_room_for_step(self) -> Tensor:
        """Makes the moments that AdamW's first step would make. Returns memory for `step_blocks`.

        That step could not be repeated if memory ran out: it may have changed masters by then.
        """
        for master in self.masters.parameters:
            if not self.optimizer.state[master]:
                moments = {name: torch.zeros_like(master) for name in MOMENTS}
                if self.optimization.offload_moments:
                    moments = {name: to_host(m, master.device) for name, m in moments.items()}
                step = torch.zeros((), dtype=torch.float32, device=master.device)
                self.optimizer.state[master] = {"step": step, **moments}
        return new_window(self.masters.blocks)

    def _gradient_cosine(self) -> dict[str, float]:
        """Returns the cosine between this gradient and the gradient of the update before.

        It is near 0 on fresh samples, near 1 where stale samples push the same way again and again
        (GAC, arXiv 2603.01501). The first update has none. Collective.
        """
        # new·old, new·new, old·old over this rank's masters
        products = torch.zeros(3, dtype=torch.float64)
        for master in self.masters.parameters:
            previous = self.optimizer.state.get(master, {}).get(PREVIOUS_GRADIENT)
            if previous is not None and master.grad is not None:
                new = master.grad.double().flatten()
                old = previous.to(new.device).double().flatten()
                products += torch.stack([new @ old, new @ new, old @ old]).cpu()
        products_by_rank = torch.tensor(self.ranks.gather(to_floats(products)), dtype=torch.float64)
        dot, new_square, old_square = products_by_rank.sum(dim=0)
        if old_square == 0 or new_square == 0:
            return {}
        return {"gradient_cosine": float(dot / (new_square * old_square).sqrt())}

    def _keep_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Keeps the gradient beside AdamW's moments, so that checkpoints have it.

        Call it after the optimizer's step: AdamW takes a parameter whose state has something for
        one whose state has moments.
        """
        offload = self.optimization.offload_moments
        for master, gradient in zip(self.masters.parameters, gradients, strict=True):
            if gradient is None:
                continue
            copied = to_host(gradient, master.device) if offload else gradient.clone()
            self.optimizer.state[master][PREVIOUS_GRADIENT] = copied

    # Log-probs, stages

    @torch.no_grad()
    def compute_logprobs(
        self,
        rows: Sequence[MicroBatch],
        by: Policy | None = None,
        entropies: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Returns log π of the tokens of each of this rank's rows: float32 [T], nats.

        π is the policy as it is now, or `by`. A list for `entropies` gets the entropy at these
        tokens, too. Collective.
        """
        policy = self.policy if by is None else by
        passes = self._count_passes(rows)

        def compute() -> list[tuple[Tensor, Tensor | None]]:
            outputs: list[tuple[Tensor, Tensor | None]] = []
            for row in rows:
                entropy_T = None if entropies is None else _room_for_entropy(row)
                outputs.append((policy.logp(row.packed, entropy_T), entropy_T))
            return outputs

        outputs = self._with_room(compute)
        if entropies is not None:
            entropies += [entropy_T for _, entropy_T in outputs if entropy_T is not None]
        for _ in range(passes - len(rows)):
            policy.logp(idle_row(self.policy.device))
        if self.masters.passes_are_collective:
            free_gathered(policy.model)
        return [logp_T for logp_T, _ in outputs]

    def end_stage(self, *, reset_optimizer: bool) -> None:
        """Sets π_ref <- π: line 16 of Algorithm 1.

        With `reset_optimizer` the next stage starts with moments at zero.
        """
        self.load_reference()
        if reset_optimizer:
            self.reset_optimizer()

    def load_reference(self) -> None:
        """Sets π_ref <- π, if there is a reference that is a version of the policy."""
        if self.reference is not None and not self.has_teacher:
            self.reference.load(self.policy.weights, self.policy.version)

    # Checkpoints and weights

    def gather_policy(self) -> Callable[[Path], None]:
        """Returns a function that writes π as it is now into a directory: a model, or its adapter.

        Rank 0 calls it. Collective.
        """
        policy = self.policy
        skeleton = self.skeleton
        if skeleton is None:
            return policy.save
        whole_weights = self.ranks.gather_whole(policy.weights)

        def save(directory: Path) -> None:
            save_model(skeleton, directory, whole_weights)
            policy.chat.save(directory)

        return save

    def state(self) -> dict[str, Tensor]:
        """Returns all tensors that decide the next updates, by name: masters, moments, step count.

        Masters that are split are copies, all else is the trainer's own memory. With ranks
        this is one rank's part; `MergedState` of the states of all has everything.
        """
        state: dict[str, Tensor] = {}
        masters = self.masters
        for span, master, numbers in zip(
            masters.spans, masters.parameters, masters.read(), strict=True
        ):
            state[f"master/{span.label}"] = numbers
            for key, value in self.optimizer.state.get(master, {}).items():
                # A step count is one number: it has no part per rank.
                label = span.name if key == "step" else span.label
                state[f"{key}/{label}"] = value
        if self.entropy.target is not None:
            state[ENTROPY] = self.entropy.state()
        if self.rate_by_kl is not None:
            state[KL_RATE] = self.rate_by_kl.state()
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Loads what `state` returned, for π_version.

        `state` may also be a `MergedState` of the states of any number of ranks. Collective. Raises
        ValueError for another model's state.
        """
        saved = state if isinstance(state, MergedState) else MergedState([state])
        for span in self.masters.spans:
            count = saved.count(f"master/{span.name}")
            expected = span.shape.numel()
            if count != expected:
                raise ValueError(
                    f"master/{span.name} has {count} numbers in the trainer's state, not {expected}"
                )
        self.reset_optimizer()
        self.masters.load(lambda span: saved.part(f"master/{span.name}", span))
        for span, master in zip(self.masters.spans, self.masters.parameters, strict=True):
            # A run that stopped before its first update has no moments.
            if f"step/{span.name}" in saved:
                self.optimizer.state[master] = self._load_moments(saved, span, master)
        if ENTROPY in saved:
            self.entropy.load(saved[ENTROPY])
        if self.rate_by_kl is not None and KL_RATE in saved:
            self.rate_by_kl.load(saved[KL_RATE])
        self.masters.write_back()
        self.policy.weights.version = version

    def _load_moments(self, saved: MergedState, span: Span, master: Tensor) -> dict[str, Tensor]:
        """Returns AdamW's state of a master, and its previous gradient if `saved` has one."""
        keys: list[str] = [*MOMENTS]
        if f"{PREVIOUS_GRADIENT}/{span.name}" in saved:
            keys.append(PREVIOUS_GRADIENT)
        state: dict[str, Tensor] = {}
        for key in keys:
            moment = saved.part(f"{key}/{span.name}", span)
            if self.optimization.offload_moments:
                state[key] = to_host(moment, master.device)
            else:
                state[key] = moment.to(device=master.device)
        state["step"] = saved[f"step/{span.name}"].to(master.device).clone()
        return state


def _room_for_entropy(row: MicroBatch) -> Tensor:
    """Returns memory for the entropy at each token of a row: float32 [T], with anything in it."""
    return row.weight_C.new_empty(len(row.completion_T), dtype=torch.float32)


# Sums over the tokens of a micro-batch


def _mean_kl(sums: Mapping[str, float]) -> float | None:
    """Returns the mean of `_kl_sums` over all ranks; None without such a token."""
    tokens = sums.get("tokens_kl_alpha")
    return sums["kl_alpha"] / tokens if tokens else None


def _sums(x: LossInputs, derivative: Derivative) -> dict[str, float]:
    """Returns sums over a micro-batch, to be added over micro-batches and ranks."""
    is_clipped_T = derivative.clipped_T & ~derivative.filtered_T
    is_dropped_C = _all_of_completion(derivative.filtered_T, x.completion, len(x.advantages))
    has_signal_T = x.advantage != 0  # updates may leave out the others
    has_signal_C = ~_all_of_completion(~has_signal_T, x.completion, len(x.advantages))
    sums = {
        "loss": derivative.loss,
        "tokens": torch.tensor(len(x.logp)),
        "kl_ref": derivative.kl_T.sum(),
        "clipped_positive": (is_clipped_T & (x.advantage > 0)).sum(),
        "clipped_negative": (is_clipped_T & (x.advantage < 0)).sum(),
        "filtered_tokens": (derivative.filtered_T & has_signal_T).sum(),
        "filtered_completions": (is_dropped_C & has_signal_C).sum(),
    }
    # One copy from a GPU instead of one for each sum.
    values = torch.stack([value.to(x.logp.device, torch.float64) for value in sums.values()])
    return dict(zip(sums, to_floats(values), strict=True))


def _own_sums(x: LossInputs) -> dict[str, float]:
    """Returns sum and count of each metric that the loss has logged with `x.log`."""
    sums: dict[str, float] = {}
    for name, values in x.logged.items():
        sums[f"{name}{LOGGED_SUM}"] = values.double().sum().item()
        sums[f"{name}{LOGGED_COUNT}"] = len(values)
    return sums


def _all_of_completion(is_true_T: Tensor, completion_T: Tensor, completions: int) -> Tensor:
    """Returns True for the completions all of whose tokens are true, [C]."""
    false_C = torch.zeros(completions, device=is_true_T.device)
    false_C = false_C.index_add(0, completion_T, (~is_true_T).float())
    return false_C == 0


def _completion_log_ratios(x: LossInputs) -> list[float]:
    """Returns log π(y)/α(y) of each completion, nats."""
    assert x.rollout_logp is not None
    zeros_C = x.logp.new_zeros(len(x.advantages), dtype=torch.float64)
    log_ratio_T = (x.logp - x.rollout_logp).double()
    return to_floats(zeros_C.index_add(0, x.completion, log_ratio_T))


def _ess_share(log_ratios: Sequence[float]) -> float:
    """Returns (Σ s)² / (B Σ s²) over B completions, 1/B .. 1.

    This is the effective sample size over their number; s is the ratio π(y)/α(y) of a completion.
    """
    log_s_C = torch.tensor(log_ratios, dtype=torch.float64)
    s_C = (log_s_C - log_s_C.max()).exp()  # a common factor cancels
    return float(ess(s_C)) / len(log_ratios)
