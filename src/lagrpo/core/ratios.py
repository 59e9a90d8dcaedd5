"""Importance ratios at three levels, each given per token [T].

`log_ratio_T` is log pi - log alpha of each token, nats, at the sampling temperature. `completion_T`
has the index of the token's completion, 0 .. C-1. All tokens of a completion are in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Ratio: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(log_ratio_T, completion_T) -> a ratio at each token [T]: the knobs `ratio` and `level`."""

MAX_LOG_RATIO = 20.0
"""Nats, as in verl: e^20 is 5e8. In float32 an exponential overflows at e^89."""


def limit(log_ratio: Tensor) -> Tensor:
    """The log-ratio within ±MAX_LOG_RATIO, as in verl.

    Beyond, its exponential is constant and has no gradient.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token(log_ratio_T: Tensor, completion_T: Tensor) -> Tensor:
    """rho_t = pi/alpha of each token."""
    return limit(log_ratio_T).exp()


def sequence(log_ratio_T: Tensor, completion_T: Tensor) -> Tensor:
    """s = pi(y|x)/alpha(y|x) of the completion, at each of its tokens.

    It is the ratio of Eq. 3 and 6 of arXiv 2505.22257.
    """
    return limit(total(log_ratio_T, completion_T)).exp()


def length_normalized(log_ratio_T: Tensor, completion_T: Tensor) -> Tensor:
    """s^(1/|y|) at each token: GSPO, arXiv 2507.18071, Eq. 7.

    The derivative by each log pi is the ratio over |y|.
    """
    lengths_T = total(torch.ones_like(log_ratio_T), completion_T)
    return limit(total(log_ratio_T, completion_T) / lengths_T).exp()


def total(value_T: Tensor, completion_T: Tensor) -> Tensor:
    """The sum over the tokens of a completion, at each of them [T]."""
    # [T] instead of [C]: C would have to be read from the device, and there are at most T
    # completions.
    sums = torch.zeros_like(value_T).index_add(0, completion_T, value_T)
    return sums[completion_T]
