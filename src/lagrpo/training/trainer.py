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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs, concatenate, on_device
from lagrpo.core.objective import Recipe
from lagrpo.cpu.decoder import FAMILIES
from lagrpo.distributed.ranks import Ranks, add_up
from lagrpo.interrupts import raise_if_asked
from lagrpo.machine import set_own_variable
from lagrpo.model.files import save_model
from lagrpo.model.model import Model, Policy
from lagrpo.training.batch import Batch, MicroBatch, micro_batches
from lagrpo.training.entropy import EntropyTerm
from lagrpo.training.fsdp import free_gathered, idle_row, shard_policy, without_values
from lagrpo.training.master_weights import MasterWeights, MergedState, ZeroMasterWeights
from lagrpo.training.optimizer import Optimization, Optimizer
from lagrpo.training.sums import (
    completion_log_ratios,
    ess_share,
    kl_sums,
    loss_sums,
    mean_kl,
    own_sums,
)

T = TypeVar("T")
logger = logging.getLogger("lagrpo")

ENTROPY = "entropy_term"
"""The name of the entropy term's state in the trainer's."""


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
        self.optimizer = Optimizer(self.masters, optimization, self.ranks)

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
        metrics = self.update(sums.get("ess_share"), mean_kl(sums))
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
            totals["ess_share"] = ess_share(log_ratios)
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
        row_sums = loss_sums(x, derivative) | own_sums(x)
        if x.rollout_logp is not None:
            if self.optimization.full_rate_ess:
                log_ratios += completion_log_ratios(x)
            if self.optimization.full_rate_kl:
                row_sums |= kl_sums(x, with_zero_advantage=not self.recipe.skips_zero_advantage)
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
        window = self._with_room(self.optimizer.make_room)
        metrics |= self.optimizer.step(version, window, ess_share=ess_share, kl=kl)
        self.masters.write_back()
        self.policy.advance()
        return metrics

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
            self.optimizer.reset()

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
        """Returns all tensors that decide the next updates, by name.

        Most are the trainer's own memory. With ranks this is one rank's part; `MergedState` of the
        states of all has everything.
        """
        state = self.optimizer.state()
        if self.entropy.target is not None:
            state[ENTROPY] = self.entropy.state()
        return state

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Loads what `state` returned, for π_version.

        `state` may also be a `MergedState` of the states of any number of ranks. Collective. Raises
        ValueError for another model's state.
        """
        saved = state if isinstance(state, MergedState) else MergedState([state])
        self.optimizer.load(saved)
        if ENTROPY in saved:
            self.entropy.load(saved[ENTROPY])
        self.policy.weights.version = version


def _room_for_entropy(row: MicroBatch) -> Tensor:
    """Returns memory for the entropy at each token of a row: float32 [T], with anything in it."""
    return row.weight_C.new_empty(len(row.completion_T), dtype=torch.float32)
