"""Stale weights told from rounding, by log-probs of the same tokens before and after a weight sync."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lagrpo.sampling.noise import ParityError

ENOUGH = 20
"""Tokens on which the learner's log-probs must have changed before equal scores of the sampler count against it."""
CHANCE = 1e-6
"""The sampler is stale if so many of the telling tokens are nearer to the old log-probs that a fair coin would show it
with a smaller chance than this; it takes 20 of them. They are counted, not summed: the noise has heavy tails, and a few
unlikely tokens would decide a sum of squares."""


def check_fresh(old_T: Tensor, new_T: Tensor, before_T: Tensor, now_T: Tensor, where: str) -> int:
    """Tests 3 and 4 of the parity check: `old_T`, `new_T` are the learner's log-probs before and after, `before_T`,
    `now_T` the server's. Returns how many tokens tell old from new. Raises ParityError for stale weights.

    >>> old = torch.linspace(-3.0, -0.1, 30)
    >>> check_fresh(old, old + 0.3, old + 0.01, old + 0.29, "v")
    30
    """
    if int((new_T != old_T).sum()) >= ENOUGH and torch.equal(before_T, now_T):
        raise ParityError(
            f"{where}: the sampler's log-probs are exactly those of before the weight sync, though the policy has "
            "changed: it did not load the new weights"
        )
    to_new_T, to_old_T = (now_T - new_T).abs(), (now_T - old_T).abs()
    noise = torch.minimum(to_new_T, to_old_T).median()
    telling_T = (new_T - old_T).abs() > 2 * noise
    telling, older = int(telling_T.sum()), int((telling_T & (to_old_T < to_new_T)).sum())
    if _tail(older, telling) < CHANCE:
        raise ParityError(
            f"{where}: the sampler is still serving stale weights: of the {telling} tokens that tell old from new, "
            f"{older} have log-probs nearer to those of the version before"
        )
    return telling


def _tail(successes: int, trials: int) -> float:
    """The chance that a fair coin shows at least so many.

    >>> _tail(2, 3), _tail(0, 0)
    (0.5, 1.0)
    """
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials
