"""The formulas of `lagrpo verify`: advantages, KL, ESS, total variation, learning rate, pass@k.

Nothing here calls the functions that the trainer uses, so an error there shows as a difference. The
one exception is an advantage function that the user wrote: its code is the only formula.

Tensors have the completions of one group [G], all completions of a batch [C], or tokens [T].
Rewards and log-ratios are float64. In the formulas r is a reward, mu the mean of its group, s0 the
standard deviation of the group over G, and s1 the one over G - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.objective import Recipe
from lagrpo.settings.sections import OptimizerSettings, ScheduleSettings

MAX_LOG_RATIO = 20.0
"""Nats. Ratios of tokens are limited to e^-20 .. e^20."""

MIN_ESS_SHARE = 0.8
"""Share of the completions that their ESS must reach for the unbounded estimate of TV."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The scored completions of a prompt; there is at least one."""

    rewards_G: Tensor
    lengths: Sequence[int]
    """sampled tokens of each completion"""
    uniform_G: Tensor
    """the random number in [0, 1) of each completion"""


# Advantages


def compute_advantages(
    recipe: Recipe, groups: Sequence[ScoredGroup], max_length: int
) -> list[Tensor]:
    """Returns the advantages [G] of each group.

    `max_length` is the limit of a completion in tokens.
    """
    if recipe.overlong_buffer:
        groups = [
            _add_overlong_penalty(group, max_length, recipe.overlong_buffer) for group in groups
        ]
    name = recipe.advantage.name
    knobs = recipe.advantage.knobs
    if name in GROUP_FORMULAS:
        formula_of_group = GROUP_FORMULAS[name]
        return [formula_of_group(group, **knobs) for group in groups]
    if name in BATCH_FORMULAS:
        formula_of_batch = BATCH_FORMULAS[name]
        return formula_of_batch(groups, **knobs)
    return _call_own_function(recipe, groups)


def group_deviation(rewards_G: Tensor, eps_std: float) -> float:
    """sqrt(s0^2 + eps_std), the denominator of Eq. 2 of arXiv 2505.22257.

    s0 is exactly 0 for equal rewards.
    """
    if _are_equal(rewards_G):
        return math.sqrt(eps_std)
    squared_distance_G = (rewards_G - _mean_in_order(rewards_G)).square()
    return math.sqrt(_mean_in_order(squared_distance_G) + eps_std)


def normalized(group: ScoredGroup, *, eps_std: float) -> Tensor:
    """(r - mu) / sqrt(s0^2 + eps_std): GRPO, Eq. 2 of arXiv 2505.22257."""
    return _scaled(group.rewards_G, group_deviation(group.rewards_G, eps_std))


def normalized_unbiased(group: ScoredGroup, *, std_offset: float) -> Tensor:
    """(r - mu) / (s1 + std_offset): GRPO as in TRL, with s1^2 = s0^2 G / (G - 1)."""
    G = len(group.rewards_G)
    s0 = group_deviation(group.rewards_G, eps_std=0.0)
    s1 = s0 * math.sqrt(G / max(G - 1, 1))
    return _scaled(group.rewards_G, s1 + std_offset)


def normalized_positive(group: ScoredGroup, *, eps_std: float) -> Tensor:
    """max(0, (r - mu) / sqrt(s0^2 + eps_std))."""
    return normalized(group, eps_std=eps_std).clamp(min=0.0)


def centered(group: ScoredGroup) -> Tensor:
    """r - mu: Dr. GRPO, arXiv 2503.20783. Equal rewards, and groups of one, give exactly 0."""
    return _scaled(group.rewards_G, scale=1.0)


def leave_one_out(group: ScoredGroup) -> Tensor:
    """r - mean of the others: RLOO, arXiv 2402.14740."""
    return leave_one_out_of(group.rewards_G)


def leave_one_out_of(rewards_G: Tensor) -> Tensor:
    """r - mean of the others, [G]; 0 for equal rewards and in a group of one."""
    if _are_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    mean_of_others_G = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
    return rewards_G - mean_of_others_G


def maxrl(group: ScoredGroup) -> Tensor:
    """(r - mu) / mu, and 0 where mu <= 0, up to rounding: MaxRL, arXiv 2602.02710."""
    mu = _mean_in_order(group.rewards_G)
    is_positive = mu > _rounding_of_mean(group.rewards_G)
    return _scaled(group.rewards_G, scale=mu if is_positive else 0.0)


def sign_balanced(group: ScoredGroup) -> Tensor:
    """1 above mu, -n+/n- below it, 0 at it, up to rounding: SignBalance, arXiv 2609.04063."""
    mu = _mean_in_order(group.rewards_G)
    rounding = _rounding_of_mean(group.rewards_G)
    if _are_equal(group.rewards_G):
        rounding = math.inf
    signs = [
        (reward > mu + rounding) - (reward < mu - rounding) for reward in group.rewards_G.tolist()
    ]
    ratio = signs.count(1) / max(1, signs.count(-1))
    advantages = [1.0 if sign > 0 else sign * ratio for sign in signs]
    return group.rewards_G.new_tensor(advantages)


def red_drop(group: ScoredGroup) -> Tensor:
    """r - mean of the remaining, and 0 for the dropped: RED-Drop, arXiv 2509.24203.

    If more completions lie below mu than not, the surplus with the smallest random numbers is
    dropped. A completion at mu, up to rounding, does not lie below it.
    """
    rewards_G = group.rewards_G
    if _are_equal(rewards_G):
        return _scaled(rewards_G, scale=1.0)
    is_below_G = _mean_in_order(rewards_G) - rewards_G > _rounding_of_mean(rewards_G)
    below = is_below_G.nonzero().flatten().tolist()
    surplus = max(0, len(below) - (len(rewards_G) - len(below)))
    below.sort(key=lambda index: float(group.uniform_G[index]))
    is_dropped_G = torch.zeros_like(is_below_G)
    is_dropped_G[below[:surplus]] = True
    mean_of_remaining = rewards_G[~is_dropped_G].mean()
    return torch.where(is_dropped_G, 0.0, rewards_G - mean_of_remaining)


def log_mean_exp(group: ScoredGroup, *, strength: float) -> Tensor:
    """r - strength log mean e^(r / strength): OPMD, arXiv 2501.12599; OAPL, arXiv 2602.19362."""
    rewards_G = group.rewards_G
    log_mean = (rewards_G / strength).logsumexp(0) - math.log(len(rewards_G))
    return rewards_G - strength * log_mean


def zero(group: ScoredGroup) -> Tensor:
    """0: only a teacher teaches."""
    return torch.zeros_like(group.rewards_G)


def batch_scaled(groups: Sequence[ScoredGroup], *, std_offset: float) -> list[Tensor]:
    """(r - mu) / (s + std_offset): Lite PPO, arXiv 2508.08221.

    s is the standard deviation over C - 1 of the batch.
    """
    rewards_C = torch.cat([group.rewards_G for group in groups])
    if len(rewards_C) == 1:
        return [centered(group) for group in groups]
    squared_distance_C = (rewards_C - rewards_C.mean()).square()
    deviation = (squared_distance_C.sum() / (len(rewards_C) - 1)).sqrt()
    return [centered(group) / (deviation + std_offset) for group in groups]


def batch_whitened(groups: Sequence[ScoredGroup], *, eps_variance: float) -> list[Tensor]:
    """(a - m) / sqrt(v + eps_variance) with a = r - mu: REINFORCE++ with a baseline.

    arXiv 2501.03262. m and v are the mean and the variance (over T - 1) of a over the T sampled
    tokens of the batch.
    """
    centered_C = torch.cat([centered(group) for group in groups])
    lengths_C = torch.tensor([length for group in groups for length in group.lengths])
    centered_T = centered_C.repeat_interleave(lengths_C)
    mean = centered_T.mean()
    variance = (centered_T - mean).square().sum() / max(len(centered_T) - 1, 1)
    return [(centered(group) - mean) / (variance + eps_variance).sqrt() for group in groups]


GROUP_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "normalized": normalized,
    "normalized_unbiased": normalized_unbiased,
    "normalized_positive": normalized_positive,
    "centered": centered,
    "leave_one_out": leave_one_out,
    "maxrl": maxrl,
    "sign_balanced": sign_balanced,
    "red_drop": red_drop,
    "log_mean_exp": log_mean_exp,
    "zero": zero,
}
"""Formulas of one group, by the names that settings use. The knobs are keyword arguments."""

BATCH_FORMULAS: dict[str, Callable[..., list[Tensor]]] = {
    "batch_scaled": batch_scaled,
    "batch_whitened": batch_whitened,
}
"""Formulas of a whole batch."""


def _add_overlong_penalty(group: ScoredGroup, max_length: int, buffer: int) -> ScoredGroup:
    """Adds DAPO's penalty of long completions to the rewards (Eq. 13 of arXiv 2503.14476).

    It is 0 up to max_length - buffer tokens, and falls linearly to -1 at max_length.
    """
    tokens_left_G = torch.tensor([max_length - buffer - length for length in group.lengths])
    # float32, as in training: a rounded penalty decides which rewards of a group are equal.
    penalty_G = (tokens_left_G.float() / buffer).clamp(-1.0, 0.0)
    return replace(group, rewards_G=group.rewards_G + penalty_G)


def _call_own_function(recipe: Recipe, groups: Sequence[ScoredGroup]) -> list[Tensor]:
    """Calls the user's own advantage function, which the run kept, on the whole batch."""
    sizes = [len(group.rewards_G) for group in groups]
    inputs = AdvantageInputs(
        rewards=torch.cat([group.rewards_G for group in groups]),
        group=torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)),
        lengths=torch.tensor([length for group in groups for length in group.lengths]),
        uniform=torch.cat([group.uniform_G for group in groups]),
    )
    return list(recipe.advantage(inputs).split(sizes))


def _scaled(rewards_G: Tensor, scale: float) -> Tensor:
    """(r - mu) / scale; 0 for equal rewards, in a group of one, and for a scale of 0."""
    if scale == 0 or _are_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return (rewards_G - _mean_in_order(rewards_G)) / scale


def _are_equal(rewards_G: Tensor) -> bool:
    return bool((rewards_G == rewards_G[0]).all())


def _rounding_of_mean(values_G: Tensor) -> float:
    """Returns a bound on the rounding error of the mean of float64 numbers."""
    largest = float(values_G.abs().max())
    return len(values_G) * torch.finfo(torch.float64).eps * largest


def _mean_in_order(values_G: Tensor) -> float:
    """Returns the mean, adding one value after the other.

    The order decides about rounding, and so about ties: red_drop asks which rewards lie below the
    mean, and maxrl if the mean is positive. Training adds in the same order.
    """
    total = 0.0
    for value in values_G.tolist():
        total += value
    return total / len(values_G)


# Policy π_k against α, from samples of α. d = log π_k - log α, nats


def limit(log_ratio_T: Tensor) -> Tensor:
    """Returns d within ±MAX_LOG_RATIO."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_terms(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d, whose mean estimates KL(α‖π_k) without bias (k3, J. Schulman 2020)."""
    return log_ratio.expm1() - log_ratio


def effective_sample_size(log_ratio: Tensor) -> float:
    """(sum rho)^2 / sum rho^2 with rho = e^d (Kish), between 1 and the number of samples."""
    # A common factor cancels; without it e^d could overflow.
    weight = (log_ratio - log_ratio.max()).exp()
    return (weight.sum().square() / weight.square().sum()).item()


def total_variation(log_ratio_C: Tensor) -> float:
    """TV(α, π_k): mean |rho - 1| / 2, or the bounded mean max(0, 1 - rho) if the ESS is small."""
    ratio_minus_one_C = log_ratio_C.expm1()
    if effective_sample_size(log_ratio_C) < MIN_ESS_SHARE * len(log_ratio_C):
        return (-ratio_minus_one_C).clamp(min=0.0).mean().item()
    return (ratio_minus_one_C.abs() / 2).mean().item()


# Learning rate


def learning_rate(optimizer: OptimizerSettings, update: int, updates: int) -> float:
    """The scheduled learning rate of update 0 .. updates - 1, before any scaling by the ESS.

    It rises by equal steps to lr after `warmup_steps` updates. From there it is constant, or falls
    along a line or half a cosine that reaches 0 after the last update.
    """
    lr = optimizer.learning_rate
    warmup = optimizer.warmup_steps
    if update < warmup:
        return lr * (update + 1) / (warmup + 1)
    if optimizer.lr_scheduler_type == "constant":
        return lr
    share_left = 1 - (update - warmup) / max(1, updates - warmup)
    if optimizer.lr_scheduler_type == "cosine":
        share_left = math.sin(math.pi / 2 * share_left) ** 2
    return lr * max(0.0, share_left)


def log_factors_by_kl(
    optimizer: OptimizerSettings, schedule: ScheduleSettings, log_scale: float, kl: float
) -> tuple[float, float]:
    """The logarithms of the scale and of the factor that acts at once, of `scale_lr_by_kl`.

    `log_scale` is from the update before, `kl` the mean KL(α‖π) per token, nats. With c =
    log(target / KL) they are log s + c / (2 τ), at most 0, c within ±2, τ the largest staleness but
    at least 8; and c / 2, at most 0.
    """
    c = math.log(optimizer.scale_lr_by_kl) - math.log(max(kl, 1e-9))
    scale = log_scale + max(-2.0, min(2.0, c)) / (2 * max(8, schedule.oldest_samples))
    return min(0.0, max(-9.0, scale)), min(0.0, c / 2)


# Coefficient of the entropy


def entropy_coefs(start: float, target: float, entropies: Iterable[float | None]) -> list[float]:
    """The coefficient of each batch, given the mean entropy of each: arXiv 2505.22312.

    It begins at `start`. It rises after an entropy of at most `target`, and falls after a higher
    one, by .005 or a tenth of it, whichever is more, within 0 .. 10. It is 0 in the batch after a
    higher one. None: a batch without an update, which changes nothing.
    """
    level = start
    is_high = False
    coefs: list[float] = []
    for entropy in entropies:
        coefs.append(0.0 if is_high else level)
        if entropy is None:
            continue
        is_high = entropy > target
        step = max(0.005, level / 10)
        level = max(0.0, level - step) if is_high else min(10.0, level + step)
    return coefs


# Counts and means


def pass_at_k(completions: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for n completions, c correct: Eq. 1 of arXiv 2107.03374."""
    return 1.0 - math.comb(completions - correct, k) / math.comb(completions, k)


def mean(values: Iterable[float]) -> float | None:
    """Returns the mean; None for no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None
