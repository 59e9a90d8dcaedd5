"""The trainer: runs of one method on one task and schedule, stacked and stepped together.

Runs of a stack differ in learning rate and seed. Prompts and random numbers depend on the seed, the
update and their purpose alone, so all methods, schedules and learning rates see the same prompts. A
run's numbers do not depend on its stack (see model.py).

Shapes: S runs, B prompts (groups), G completions each, C = B G completions of L tokens; D
parameters.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, zero_variance
from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Recipe

from .ages import SawtoothSyncs, Schedule
from .control import TARGET, Control, RateControl
from .methods import Method
from .model import Architecture, StackedLlama, unpack
from .tasks import Task

G = 8
"""completions per prompt"""
POINTS = 64
"""points of a learning curve"""
DIAGNOSED_EVERY = 8
"""updates"""


class Run(NamedTuple):
    """A run of a pass, which trains several at once."""

    learning_rate: float
    seed: int
    control: Control = "fixed"


class Purpose(IntEnum):
    """The purpose of random numbers: a part of their key."""

    ROLLOUT = 0
    WARM_UP = 1
    STALE_ROLLOUT = 2
    AGES = 3


class Batch(NamedTuple):
    """Groups of each run, and what sampled and graded them."""

    prompts: Tensor
    """[S, B, P]"""
    tokens: Tensor
    """[S, B, G, L]"""
    logp: Tensor
    """[S, B, G, L] under the policy that sampled; 0 after the end"""
    rewards: Tensor
    """[S, B, G]"""
    uniform: Tensor
    """[S, B, G] a random number in [0, 1) for each completion, for advantages that draw"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    run: Run
    curve: list[float]
    """mean score of the policy's own samples, in POINTS parts of the run or one per update"""
    diagnostics: dict[str, float]
    """means over the run, see `Diagnostics`"""
    seconds: float
    """time of a core"""
    weights: Tensor
    """[D] at the end"""


def train(
    task: Task,
    architecture: Architecture,
    start: Tensor,
    method: Method,
    schedule: Schedule,
    runs: Sequence[Run],
    updates: int,
    *,
    teacher: tuple[Architecture, Tensor] | None = None,
    compiled: bool = False,
) -> list[Outcome]:
    """Train each run from the weights `start` [1, D].

    The `teacher`, with its weights [1, parameters], is the reference policy; without one `start`
    is. `compiled` is for long benchmarks, see StackedLlama.compile.
    """
    began = time.process_time()
    S = len(runs)
    model = _model(architecture, task.prompt_length, task.completion_length, compiled=compiled)
    sampler = Sampler(task, architecture, model, [run.seed for run in runs])
    weights = start.repeat(S, 1)
    optimizer = Adam(weights, [run.learning_rate for run in runs], method.max_grad_norm)
    may_sync_early = torch.tensor([run.control == "sync_at_kl" for run in runs])
    source = StaleBatches(task, schedule, sampler, start, may_sync_early)
    reference = Reference(task, *(teacher or (architecture, start)), compiled=compiled)

    scores = torch.zeros(updates, S)
    diagnostics = Diagnostics()
    rate_control = RateControl([run.control for run in runs], schedule.lag)
    was_far = torch.zeros(S, dtype=torch.bool)
    for update in range(updates):
        fresh, score, entropy = sampler.sample(weights, Purpose.ROLLOUT, update)
        scores[update] = score
        batch, age = source.next(update, weights, fresh, was_far)
        staleness = age.clamp(max=update).expand(batch.tokens.shape)

        leaf = weights.clone().requires_grad_()
        logp = model.log_probs(unpack(architecture, leaf), batch.prompts, batch.tokens)
        ref_logp = None
        if method.recipe.needs_pi_ref:
            ref_logp = reference.log_probs(batch)
        step = Step(task, method.recipe, batch, staleness, logp.detach(), ref_logp)
        (gradient,) = torch.autograd.grad(logp, leaf, step.gradient)
        factors = rate_control.factors(step.kl_of_learned, step.ess)
        if method.scale_lr_by_ess:
            factors = factors * step.ess.sqrt()
        norm = optimizer.step(gradient, factors)
        was_far = step.kl_of_learned > TARGET
        if update % DIAGNOSED_EVERY == 0:
            kl_to_teacher = reference.kl_from_sampler(fresh) if teacher else None
            diagnostics.add(step, norm, entropy, factors, kl_to_teacher)

    seconds = (time.process_time() - began) / S
    curves = _mean_of_parts(scores)
    return [
        Outcome(run, curves[:, s].tolist(), diagnostics.of_run(s), seconds, weights[s])
        for s, run in enumerate(runs)
    ]


@cache
def _model(
    architecture: Architecture, prompt_length: int, completion_length: int, *, compiled: bool
) -> StackedLlama:
    """One model for all passes of a task, so that it is compiled once."""
    model = StackedLlama(architecture, prompt_length, completion_length)
    if compiled:
        model.compile()
    return model


class Reference:
    """A policy with the weights [1, parameters] that all runs compare with."""

    def __init__(self, task: Task, architecture: Architecture, weights: Tensor, *, compiled: bool):
        self._end = task.end
        self._architecture = architecture
        self._weights = weights
        self._model = _model(
            architecture, task.prompt_length, task.completion_length, compiled=compiled
        )

    def log_probs(self, batch: Batch) -> Tensor:
        """The log-probs of the tokens of a batch, [S, B, G, L]."""
        weights = unpack(self._architecture, self._weights.expand(len(batch.prompts), -1))
        return self._model.log_probs(weights, batch.prompts, batch.tokens)

    def kl_from_sampler(self, batch: Batch) -> Tensor:
        """The mean of log alpha - log pi_ref per token, [S]: estimates KL(alpha || pi_ref)."""
        is_token = is_before_end(batch.tokens, self._end)
        difference = torch.where(is_token, batch.logp - self.log_probs(batch), 0.0)
        return difference.sum(dim=(1, 2, 3)) / is_token.sum(dim=(1, 2, 3))


def _mean_of_parts(values: Tensor) -> Tensor:
    """The means over POINTS parts of the rows of [updates, S]; all rows if they are fewer."""
    parts = torch.tensor_split(values, min(POINTS, len(values)))
    return torch.stack([part.mean(dim=0) for part in parts])


class Sampler:
    """Samples and grades batches.

    Runs with the same seed get the same prompts and random numbers.
    """

    def __init__(
        self, task: Task, architecture: Architecture, model: StackedLlama, seeds: Sequence[int]
    ):
        self._task = task
        self._architecture = architecture
        self._model = model
        self._seeds = sorted(set(seeds))
        self._seed_of_run = torch.tensor([self._seeds.index(seed) for seed in seeds])

    def sample(self, weights: Tensor, purpose: Purpose, index: int) -> tuple[Batch, Tensor, Tensor]:
        """Samples a batch from the policies `weights` [S, D].

        Returns it with each run's mean score [S] and mean entropy [S].
        """
        return self._sample([weights], self._seed_of_run, purpose, index)

    def sample_initial(self, start: Tensor, index: int) -> Batch:
        """A batch of the initial policy [1, D], sampled once for all runs with the same seed."""
        seeds = torch.arange(len(self._seeds))
        policy = [start.repeat(len(seeds), 1)]
        batch, _, _ = self._sample(policy, seeds, Purpose.WARM_UP, index)
        return Batch(*(value[self._seed_of_run] for value in batch))

    def sample_in_flight(self, policies: Sequence[Tensor], index: int) -> Batch:
        """A batch of which `policies[t]` [S, D] sampled the tokens at position t."""
        batch, _, _ = self._sample(policies, self._seed_of_run, Purpose.STALE_ROLLOUT, index)
        return batch

    def _sample(
        self, policies: Sequence[Tensor], seed_of_row: Tensor, purpose: Purpose, index: int
    ) -> tuple[Batch, Tensor, Tensor]:
        """`policies` has the one that samples, or one for each position."""
        task = self._task
        B = task.prompts_per_batch
        L = task.completion_length
        prompts = []
        numbers = []
        for seed in self._seeds:
            random = np.random.default_rng((seed, purpose, index))
            prompts.append(task.prompts(random, B))
            numbers.append(torch.from_numpy(random.random((B, G, L + 2), dtype=np.float32)))
        prompts = torch.stack(prompts)[seed_of_row]
        numbers = torch.stack(numbers)[seed_of_row]
        token_uniform = numbers[..., :L]  # [S, B, G, L]
        luck = numbers[..., L]  # [S, B, G]
        uniform = numbers[..., L + 1]  # [S, B, G]
        unpacked = {id(weights): unpack(self._architecture, weights) for weights in policies}
        samples = self._model.sample(
            [unpacked[id(weights)] for weights in policies],
            prompts,
            token_uniform,
            task.end,
            task.padding,
        )
        rewards, scores = task.grade(prompts, samples.tokens, luck)
        batch = Batch(prompts, samples.tokens, samples.logp, rewards, uniform)
        lengths = is_before_end(samples.tokens, task.end).sum(dim=(1, 2, 3))
        entropy = samples.entropy.sum(dim=(1, 2, 3)) / lengths
        return batch, scores.mean(dim=(1, 2)), entropy

    def ages(self, schedule: Schedule, update: int) -> Tensor:
        """The age of each group of an update, [S, B]."""
        ages = []
        for seed in self._seeds:
            random = np.random.default_rng((seed, Purpose.AGES, update))
            ages.append(schedule.ages(update, self._task.prompts_per_batch, random))
        return torch.stack(ages)[self._seed_of_run]


def is_before_end(tokens: Tensor, end: int) -> Tensor:
    """True for the tokens of a completion, its end included, False for padding, [..., L]."""
    is_end = tokens == end
    return is_end.cumsum(dim=-1) - is_end.long() == 0


def by_length(batch: Batch, end: int) -> Batch:
    """The batch with the groups of each run by length, the one with the longest completion last."""
    lengths = is_before_end(batch.tokens, end).sum(dim=-1)  # [S, B, G]
    # Groups whose longest completions are equally long are ordered by all their tokens.
    key = lengths.amax(dim=-1) * batch.tokens[0, 0].numel() + lengths.sum(dim=-1)
    order = key.argsort(dim=-1, stable=True)  # [S, B]
    run = torch.arange(len(order))[:, None]
    return Batch(*(value[run, order] for value in batch))


class StaleBatches:
    """What S stacked runs learn from, by their schedule; they start from the weights [1, D].

    `may_sync_early` [S]: see SawtoothSyncs.
    """

    def __init__(
        self,
        task: Task,
        schedule: Schedule,
        sampler: Sampler,
        start: Tensor,
        may_sync_early: Tensor,
    ):
        self._task = task
        self._schedule = schedule
        self._sampler = sampler
        self._history = History(schedule.keeps_batches)
        for age in range(schedule.keeps_batches - 1, 0, -1):
            self._keep(sampler.sample_initial(start, age))
        self._latest_policies: deque[Tensor] = deque(maxlen=schedule.lag + 1)
        self._sawtooth = SawtoothSyncs(schedule.lag, may_sync_early)
        self._synced_weights = start.repeat(len(may_sync_early), 1)

    def next(
        self, update: int, weights: Tensor, fresh: Batch, was_far: Tensor
    ) -> tuple[Batch, Tensor]:
        """The batch of an update of the policies `weights` [S, D], and the age of its tokens.

        The age counts updates before the first one, too; it expands to [S, B, G, L]. `fresh` is
        sampled by these policies; was_far [S]: the update before was far from the sampler.
        """
        if self._schedule.keeps_batches:
            self._keep(fresh)
            age_of_group = self._sampler.ages(self._schedule, update)
            return self._history.take(age_of_group), age_of_group[..., None, None]
        if self._schedule.kind == "in_order":
            self._latest_policies.append(weights.clone())
            age = self._schedule.ages_of_tokens(self._task.completion_length)
            policies = [self._latest_policies[-1 - a] for a in age.clamp(max=update).tolist()]
            return self._sampler.sample_in_flight(policies, update), age
        syncs, age_of_run = self._sawtooth.next(was_far)
        self._synced_weights[syncs] = weights[syncs]
        batch, _, _ = self._sampler.sample(self._synced_weights, Purpose.STALE_ROLLOUT, update)
        return batch, age_of_run[:, None, None, None]

    def _keep(self, batch: Batch) -> None:
        if self._schedule.kind == "by_length":
            batch = by_length(batch, self._task.end)
        self._history.append(batch)


class History:
    """The latest batches, as many as fit. A new batch overwrites the oldest."""

    def __init__(self, size: int):
        self._size = size
        self._count = 0
        self._fields: list[Tensor] = []
        """of Batch, each [size, S, B, ...]"""

    def append(self, batch: Batch) -> None:
        if not self._fields:
            self._fields = [value.new_zeros(self._size, *value.shape) for value in batch]
        for field, value in zip(self._fields, batch, strict=True):
            field[self._count % self._size] = value
        self._count += 1

    def take(self, age: Tensor) -> Batch:
        """The groups that were appended `age` [S, B] batches ago, 0 for the last batch."""
        S, B = age.shape
        position = (self._count - 1 - age) % self._size  # [S, B]
        run = torch.arange(S)[:, None]
        group = torch.arange(B)
        return Batch(*(field[position, run, group] for field in self._fields))


class Step:
    """The gradient of an update by the log-probs, for all runs of a stack.

    It is computed by the recipe's own functions.
    For advantages and the loss, the runs are one batch of more groups: neither compares completions
    of different groups. Weights and statistics of the step are computed run by run. Positions after
    the end of a completion belong to one more completion, with weight 0, so that a run always has
    the same number of tokens.
    """

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        batch: Batch,
        staleness: Tensor,
        logp: Tensor,
        ref_logp: Tensor | None,
    ):
        S, B, _, L = batch.tokens.shape
        C = B * G
        self.is_token = is_before_end(batch.tokens, task.end).view(S, C, L)
        is_token = self.is_token.flatten()
        lengths = self.is_token.sum(dim=-1)  # [S, C]
        group = torch.arange(S * B).repeat_interleave(G)
        rewards = batch.rewards.flatten().double()
        advantages = recipe.advantages(
            AdvantageInputs(rewards, group, lengths.flatten(), batch.uniform.flatten()), L
        ).float()
        has_zero_variance = zero_variance(rewards, group).view(S, C)
        weights = [recipe.weights(lengths[s], has_zero_variance[s], L) for s in range(S)]
        # T = S C L: tokens with padding.
        completion = torch.arange(S * C).repeat_interleave(L)
        logp_T = torch.where(is_token, logp.flatten(), 0.0)
        inputs = LossInputs(
            logp=logp_T,
            rollout_logp=batch.logp.flatten(),
            old_logp=logp_T,
            ref_logp=None if ref_logp is None else torch.where(is_token, ref_logp.flatten(), 0.0),
            completion=torch.where(is_token, completion, S * C),
            advantages=_append(advantages, last=0.0),
            group=_append(group, last=S * B),
            staleness=staleness.flatten(),
            finished=_append((batch.tokens == task.end).any(dim=-1).flatten(), last=True),
        )
        if recipe.needs_step_statistics:
            statistics = _statistics_by_run(recipe, inputs, S, C * L, is_token)
            inputs = replace(inputs, step=statistics)
        derivative = recipe.differentiate(inputs, _append(torch.cat(weights), last=0.0))
        self.advantages = advantages.view(S, C)
        self.gradient = torch.where(is_token, derivative.gradient_T, 0.0).view(batch.tokens.shape)
        """[S, B, G, L] of the loss by the log-prob of each token"""
        self.staleness = staleness.reshape(S, C, L)
        self.is_clipped = derivative.clipped_T.view(S, C, L)
        self.log_ratio = (inputs.logp - inputs.rollout_logp).view(S, C, L)  # pyright: ignore
        learns_from = advantages.view(S, C) != 0
        if not recipe.skips_zero_advantage:
            learns_from = torch.ones_like(learns_from)
        self._is_learned = self.is_token & learns_from[..., None]  # [S, C, L]

    @property
    def kl(self) -> Tensor:
        """The estimate of KL(alpha || pi) per token of each run, nats, [S]."""
        return self._mean_k3(self.is_token)

    @property
    def kl_of_learned(self) -> Tensor:
        """The same over the tokens that the update learns from, [S]; 0 if there are none."""
        return self._mean_k3(self._is_learned)

    def _mean_k3(self, selected: Tensor) -> Tensor:
        k3 = torch.expm1(self.log_ratio.clamp(max=20)) - self.log_ratio
        count = selected.sum(dim=(1, 2)).clamp(min=1)
        return torch.where(selected, k3, 0.0).sum(dim=(1, 2)) / count

    @property
    def ess(self) -> Tensor:
        """Effective sample size of the completions' ratios s over their number, [S].

        (sum s)^2 / (C sum s^2), which does not change if all s are scaled.
        """
        log_s = self.log_ratio.sum(dim=-1)  # [S, C]
        s = (log_s - log_s.amax(dim=-1, keepdim=True)).exp()
        return s.sum(dim=-1).square() / (s.shape[-1] * s.square().sum(dim=-1))


def _append(values: Tensor, *, last: float) -> Tensor:
    return torch.cat([values, values.new_tensor([last])])


def _statistics_by_run(
    recipe: Recipe, inputs: LossInputs, S: int, tokens: int, is_token: Tensor
) -> dict[str, Tensor]:
    """The recipe's statistics of the step by token, [..., S tokens]: each token has its run's.

    `tokens` is the number of tokens of a run, padding included.
    """
    C = (len(inputs.advantages) - 1) // S  # without the completion of the padding
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for s in range(S):
        indices = torch.arange(s * tokens, (s + 1) * tokens)
        indices = indices[is_token[indices]]
        completions = slice(s * C, (s + 1) * C)
        token_values = {}
        for name in ("logp", "rollout_logp", "old_logp", "ref_logp", "staleness"):
            value = getattr(inputs, name)
            if value is not None:
                token_values[name] = value[indices]
        run_inputs = replace(
            inputs,
            **token_values,
            completion=inputs.completion[indices] - s * C,
            advantages=inputs.advantages[completions],
            group=inputs.group[completions] - s * (C // G),  # pyright: ignore
            finished=inputs.finished[completions],  # pyright: ignore
        )
        for name, value in recipe.collect(run_inputs).items():
            columns[name].append(value)
    return {
        name: torch.stack(values, dim=-1).repeat_interleave(tokens, dim=-1)
        for name, values in columns.items()
    }


class Adam:
    """Adam without weight decay, for stacked runs with a learning rate each.

    It changes `weights` [S, D] in place.
    """

    def __init__(
        self, weights: Tensor, learning_rates: Sequence[float], max_grad_norm: float | None
    ):
        self._weights = weights
        self._learning_rate = torch.tensor(learning_rates)[:, None]
        self._max_grad_norm = max_grad_norm
        self._mean = torch.zeros_like(weights)
        self._square = torch.zeros_like(weights)
        self._updates = 0

    def step(self, gradient: Tensor, factors: Tensor) -> Tensor:
        """Make an update and return the norm of each gradient before it is clipped, [S].

        The learning rates are multiplied by `factors` [S]. A gradient that is not finite counts
        as 0.
        """
        norm = torch.linalg.vector_norm(gradient, dim=1)
        if self._max_grad_norm is not None:
            scale = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            gradient = gradient * scale[:, None]
        gradient = torch.where(norm.isfinite()[:, None], gradient, 0.0)
        self._updates += 1
        self._mean.lerp_(gradient, 0.1)
        self._square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        unbiased_mean = self._mean / (1 - 0.9**self._updates)
        unbiased_square = self._square / (1 - 0.999**self._updates)
        learning_rate = self._learning_rate * factors[:, None]
        self._weights -= learning_rate * unbiased_mean / (unbiased_square.sqrt() + 1e-8)
        return norm


class Diagnostics:
    """Numbers of each run, from every DIAGNOSED_EVERY-th update, as means over the run:

    entropy             of the policy at the tokens that it samples, nats
    gradient_norm       before it is clipped
    not_finite          share of updates whose gradient is not finite
    clipped_positive    share of tokens without a gradient among those with A > 0
    clipped_negative    the same for A < 0
    ess                 effective sample size of the ratios of completions, over their number
    log_ratio_squared   mean (log rho)^2, nats^2
    kl                  rho - 1 - log rho: estimates KL(alpha || pi) per token, nats
    kl_first_quarter    the same over the first quarter of the run
    rate_factor         of the learning rate, by the run's control
    age                 of the tokens, updates
    age_by_length       slope of the mean age of a completion by its length, updates per token
    kl_to_teacher       KL(pi || teacher) per token over the last tenth of the run, nats
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[Tensor]] = defaultdict(list)

    def add(
        self,
        step: Step,
        norm: Tensor,
        entropy: Tensor,
        factors: Tensor,
        kl_to_teacher: Tensor | None,
    ) -> None:
        tokens = step.is_token.sum(dim=(1, 2))  # [S]
        advantages = step.advantages[..., None] * step.is_token  # [S, C, L]
        log_ratio = step.log_ratio
        self._columns["entropy"].append(entropy)
        self._columns["gradient_norm"].append(norm)
        self._columns["not_finite"].append((~norm.isfinite()).float())
        signs = {"positive": advantages > 0, "negative": advantages < 0}
        for name, has_sign in signs.items():
            clipped = (has_sign & step.is_clipped).sum(dim=(1, 2))
            self._columns[f"clipped_{name}"].append(clipped / has_sign.sum(dim=(1, 2)))
        self._columns["ess"].append(step.ess)
        self._columns["log_ratio_squared"].append(log_ratio.square().sum(dim=(1, 2)) / tokens)
        self._columns["kl"].append(step.kl)
        self._columns["rate_factor"].append(factors)
        ages = (step.staleness * step.is_token).sum(dim=-1)  # [S, C], summed over tokens
        self._columns["age"].append(ages.sum(dim=1) / tokens)
        self._columns["age_by_length"].append(_slope(ages, step.is_token.sum(dim=-1)))
        if kl_to_teacher is not None:
            self._columns["kl_to_teacher"].append(kl_to_teacher)

    def of_run(self, s: int) -> dict[str, float]:
        """The mean of each diagnostic over its finite values; -1 if there are none."""
        quarter = -(-len(self._columns["kl"]) // 4)
        columns = {**self._columns, "kl_first_quarter": self._columns["kl"][:quarter]}
        if "kl_to_teacher" in columns:
            tenth = max(1, round(len(columns["kl"]) / 10))
            columns["kl_to_teacher"] = columns["kl_to_teacher"][-tenth:]
        means = {}
        for name, rows in columns.items():
            values = torch.stack(rows)[:, s]
            values = values[values.isfinite()]
            means[name] = float(values.mean()) if len(values) else -1.0
        return means


def _slope(ages: Tensor, lengths: Tensor) -> Tensor:
    """The slope of the mean age of a completion by its length, [S]; NaN if all are equally long.

    ages [S, C] are sums over the tokens of a completion, lengths [S, C] their number.
    """
    mean_age = ages / lengths
    deviation = lengths - lengths.float().mean(dim=1, keepdim=True)
    return (deviation * mean_age).sum(dim=1) / deviation.square().sum(dim=1)
