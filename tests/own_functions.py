"""Functions of a user, for tests: settings name them own_functions:NAME. Some do not compute."""

from __future__ import annotations

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, group_mean
from lagrpo.core.inputs import LossInputs, alpha, collects, pi_k
from lagrpo.core.losses import reinforce
from lagrpo.core.objective import Recipe
from lagrpo.core.pieces import piece

NUMBER = 3

# What a recipe is made of


def dppo(x: LossInputs, *, delta: float = 0.2) -> Tensor:
    """rho A of tokens whose probability has changed by at most delta.

    A second paragraph, which is no part of the formula."""
    change = (x.logp.exp() - alpha(x).exp()).abs()
    return torch.where(change <= delta, (x.logp - alpha(x)).exp() * x.advantage, 0.0)


def narrow(x: LossInputs, *, width: float = 0.1) -> Tensor:
    """A mask."""
    return (x.logp - alpha(x)).abs() <= width


def distilled(x: LossInputs) -> Tensor:
    """The advantage, and log π_T - log π of each token as a reward."""
    assert x.ref_logp is not None
    assert x.rollout_logp is not None
    distance = (x.logp - x.ref_logp).detach()
    return (x.logp - x.rollout_logp).exp() * (x.advantage - distance)


def since_pi_k(x: LossInputs) -> Tensor:
    """A mask that never acts while pi is pi_k."""
    return (x.logp - pi_k(x)).abs() <= 0.1


def halved(x: LossInputs) -> Tensor:
    """A weight."""
    return torch.full_like(x.logp, 0.5)


def probable(x: LossInputs, *, least: float = 0.3) -> Tensor:
    """A filter."""
    return x.logp.exp() >= least


def _largest_logp(x: LossInputs, *, share: float) -> Tensor:
    return x.logp.max() * share


@collects(_largest_logp)
def near_the_most_probable(x: LossInputs, *, share: float = 30.0) -> Tensor:
    """A filter with a statistic of the step."""
    return x.logp >= x.step["near_the_most_probable"]


def above_the_mean(x: AdvantageInputs, *, scale: float = 2.0) -> Tensor:
    """An advantage."""
    return scale * (x.rewards - group_mean(x.rewards, x.group)).clamp(min=0)


def square_root(lengths_C: Tensor, counted_C: Tensor, max_length: int) -> Tensor:
    """A reduction."""
    return 1 / (lengths_C.double().sqrt() * counted_C.sum().clamp(min=1))


RECIPE = Recipe(
    "M A logp, M = narrow",
    "a test",
    surrogate=piece(reinforce, mask=piece(narrow, width=0.3)),
    filters=(probable,),  # type: ignore[arg-type] - a function stands for its piece
)

# What is rejected


def fails(x: LossInputs) -> Tensor:
    return x.logp[:, None] @ x.logp


def fails_in_statistic(x: LossInputs) -> Tensor:
    return x.step["of another function"] * x.logp


def summed(x: LossInputs) -> Tensor:
    return (x.logp * x.advantage).sum()


def without_gradient(x: LossInputs) -> Tensor:
    return x.logp.detach() * x.advantage


def infinite(x: LossInputs) -> Tensor:
    return x.logp / (x.advantage * 0)


def infinite_gradient(x: LossInputs) -> Tensor:
    """0 everywhere, with a derivative that is not a number."""
    return (x.logp - x.logp.detach()).abs().sqrt() * x.advantage


def advantage_of_groups(x: AdvantageInputs) -> Tensor:
    """One number for each group, not for each completion."""
    return x.rewards.new_zeros(int(x.group.max()) + 1)


def infinite_advantage(x: AdvantageInputs) -> Tensor:
    return x.rewards / 0.0


def scalar_reduction(lengths_C: Tensor, counted_C: Tensor, max_length: int) -> Tensor:
    return 1 / lengths_C.sum()


def knob_without_default(x: LossInputs, *, width: float) -> Tensor:
    return x.logp * width


def to_minimize(x: LossInputs) -> Tensor:
    """A loss with the sign of other libraries."""
    return -dppo(x)


def without_advantage(x: LossInputs) -> Tensor:
    return x.logp


def misspelled(x: LossInputs) -> Tensor:
    return x.logp * x.rollout_logprob * x.advantage  # pyright: ignore


def not_collected(x: LossInputs) -> Tensor:
    return x.logp * x.step["y"] * x.advantage


def logs_sums(x: LossInputs) -> Tensor:
    x.log("mine/sums", x.logp[:2])
    return x.logp * x.advantage


def logs_like_lagrpo(x: LossInputs) -> Tensor:
    x.log("reward", x.logp)
    return x.logp * x.advantage


def logs_metrics(x: LossInputs) -> Tensor:
    """Logs a metric per token, one per completion, and one number."""
    x.log("mine/surprise", -x.logp)
    x.log("mine/positive", (x.advantages > 0).double())
    x.log("mine/one", x.logp.new_ones(()))
    return x.logp * x.advantage
