"""The rounding noise of log-probs: how far an honest run may lie from its replay.

It follows from the dtype and the sizes of the model, for every processor. Rounding errors are
independent and have the mean 0, so that squares add up (Higham and Mary, SIAM J. Sci. Comput. 41,
2019). With u = 2^-24 of float32 and U = 2^-9 of bfloat16:

1. A sum of n terms of size t, one after the other: the partial sum of k terms has the size
   sqrt(k) t, and is rounded by a share u. All roundings make u t sqrt(1 + … + n) = u t n / sqrt(2),
   a share u sqrt(n / 2) of the sum. Lanes, blocks and fused operations round less.
2. A norm after each layer keeps shares as they are. The last hidden state is off by a share e,

       e^2 = u^2 (sum of n over all products) + (2 / 3) U^2 (number of products),

   the first part for a run and a replay in float32. The second part is for a run in bfloat16, which
   rounds each product, and the function behind it, within ±U: a deviation of U / sqrt(3).
3. An error in a random direction moves a logit by e s, with s the deviation of the logits over the
   vocabulary. In bfloat16 a logit of size m is itself rounded: U m / sqrt(3).
4. The log-odds of a token compare two logits: d = sqrt(2 (e^2 s^2 + U^2 m^2 / 3)). Its log-prob is
   off by (1 - p) d.
5. In float32 the log-prob is off by another u (4 m + sqrt(V)): logit, log-sum-exp of V terms, and
   their difference.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT32_ROUNDOFF = 2.0**-24
BFLOAT16_ROUNDOFF = 2.0**-9

MAX_NOISE = 8.0
"""Deviations that a value may be off. Honest runs stayed within half."""


def hidden_noise(model: PreTrainedModel, dtype: str, length: int) -> float:
    """Returns the share e by which the last hidden state of a run in `dtype` may be off.

    `length` is the number of tokens that attention adds up.
    """
    from transformers.pytorch_utils import Conv1D

    terms = 0
    products = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            terms += module.in_features
            products += 1
        elif isinstance(module, Conv1D):
            terms += module.nx
            products += 1
    terms += model.config.get_text_config().num_hidden_layers * length
    square = FLOAT32_ROUNDOFF**2 * terms
    if dtype == "bfloat16":
        square += 2 / 3 * BFLOAT16_ROUNDOFF**2 * products
    return math.sqrt(square)


def logit_noise(scaled_TV: Tensor, size_T: Tensor, hidden: float, dtype: str) -> Tensor:
    """Returns the deviation of a logit / temperature, [T].

    `size_T` is the size of the logits that matter, `hidden` the share of `hidden_noise`.
    """
    moved_T = hidden * scaled_TV.std(-1)
    roundoff = BFLOAT16_ROUNDOFF if dtype == "bfloat16" else 0.0
    rounded_T = roundoff / math.sqrt(3) * size_T
    return torch.hypot(moved_T, rounded_T)


def float32_grain(size_T: Tensor, vocabulary: int) -> Tensor:
    """Returns how finely float32 resolves a log-prob, [T]."""
    return FLOAT32_ROUNDOFF * (4 * size_T + math.sqrt(vocabulary))


def boundary_noise(cdf: Tensor, squares_below: Tensor, squares: Tensor) -> Tensor:
    """Returns the deviation of the log-odds of a cumulative probability F, if a logit's is 1.

    A logit error c_v moves F / (1 - F) by p_v c_v / F below the boundary and by -p_v c_v / (1 - F)
    above. `squares_below` is the sum of p_v^2 below, `squares` of all.
    """
    smallest = torch.finfo(cdf.dtype).tiny
    below = squares_below / cdf.square().clamp(min=smallest)
    above = (squares - squares_below).clamp(min=0) / (1 - cdf).square().clamp(min=smallest)
    return (below + above).sqrt()
