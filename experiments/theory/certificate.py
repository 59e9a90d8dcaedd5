"""A lower bound on J(pi) - J(alpha) that a finite sample of alpha certifies.

    capped gain   J(pi) - J(alpha) >= E_alpha[(min(pi/alpha, C) - 1) r]

Its terms lie in [-1, C - 1], so an inequality for bounded terms covers the error of their mean.
"""

from __future__ import annotations

from math import log
from typing import Literal

import torch
from torch import Tensor

from lagrpo.core.bounds import mean_reward, scaled


def capped_gain(pi: Tensor, alpha: Tensor, r: Tensor, cap: float) -> Tensor:
    """E_alpha[min(pi/alpha, C) r] - E_alpha r <= J(pi) - J(alpha) for r >= 0.

    The gap, E_pi[max(1 - C alpha/pi, 0) r], is at most the probability under pi of a ratio above C.
    Raises ValueError as `mean_reward` does.
    """
    reward = mean_reward(alpha, r)
    return (torch.minimum(pi, cap * alpha) * r).sum(dim=-1) - reward


def certified_improvement(
    rewards: Tensor,
    log_ratio: Tensor,
    cap: float,
    delta: float,
    prompts: Literal["fixed", "drawn"] = "fixed",
) -> Tensor:
    """A number that is at most J(pi) - J(alpha) with probability 1 - delta or more.

    It comes from N groups of G completions sampled by alpha, both arguments [N, G]: rewards in [0,
    1] and the log-ratios of whole completions log pi(y)/alpha(y), nats.

    With n independent terms z in [-1, C - 1], C = `cap`, of sample variance V (over n - 1),
    empirical Bernstein (Maurer & Pontil, arXiv 0907.3740; the terms need not be identically
    distributed):

        E mean z >= mean z - sqrt(2 V ln(2/delta) / n) - 7 C ln(2/delta) / (3 (n - 1)),
        z = (min(rho, C) - 1) r

    The population of J decides which terms are independent:

    fixed   J is the mean over these N prompts. Given the prompts, all completions are independent:
            n = N G terms
    drawn   J is the mean over the distribution that the prompts are drawn from, independently.
            Completions share their prompt, so only groups are independent: n = N means of a group

    pi and C must not depend on these samples: pi_k on a batch it has not yet learned from is right,
    pi after an update on the batch is not. To test m batches and use the first that certifies, give
    delta / m. Every completion of the groups must be there: if some are left out because of their
    text, the rest are not a sample of alpha.

    Never below -1, which rewards in [0, 1] certify without a sample. Not positive unless C > 1 and
    n > 1 + 7 C ln(2/delta) / (3 (C - 1)). Raises ValueError for r outside [0, 1], delta outside
    (0, 1), n < 2.
    """
    if not 0 < delta < 1:
        raise ValueError(
            f"delta must lie between 0 and 1, but is {delta:g}: it is the chance of a false "
            "certificate"
        )
    # Capped before exp, which would overflow for a long completion.
    capped_ratio = log_ratio.double().clamp(max=log(cap)).exp()
    terms = (capped_ratio - 1) * scaled(rewards, 0.0, 1.0).double()
    terms = terms.flatten() if prompts == "fixed" else terms.mean(dim=-1)
    n = terms.shape[0]
    if n < 2:
        raise ValueError(f"a certificate needs at least two independent terms, but has {n}")
    log_inverse_delta = log(2 / delta)
    sampling_error = (2 * terms.var() * log_inverse_delta / n).sqrt()
    range_error = 7 * cap * log_inverse_delta / (3 * (n - 1))
    return (terms.mean() - (sampling_error + range_error)).clamp(min=-1.0)
