"""Sums over the tokens of a micro-batch, to be added over micro-batches and ranks."""

# Some methods of PyTorch have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lagrpo.core.inputs import LossInputs
from lagrpo.core.kl import ess
from lagrpo.core.objective import Derivative
from lagrpo.core.ratios import limit
from lagrpo.training.step import LOGGED_COUNT, LOGGED_SUM
from lagrpo.training.tensors import to_floats


def loss_sums(x: LossInputs, derivative: Derivative) -> dict[str, float]:
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


def own_sums(x: LossInputs) -> dict[str, float]:
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


def kl_sums(x: LossInputs, *, with_zero_advantage: bool) -> dict[str, float]:
    """Returns the sum of the estimates of KL(alpha || pi), nats, and the number of their tokens.

    Those of completions with advantage 0 are left out, unless asked for.
    """
    assert x.rollout_logp is not None
    d_T = limit((x.logp - x.rollout_logp).double())
    if not with_zero_advantage:
        d_T = d_T[x.advantage != 0]
    return {"kl_alpha": (torch.expm1(d_T) - d_T).sum().item(), "tokens_kl_alpha": len(d_T)}


def mean_kl(sums: Mapping[str, float]) -> float | None:
    """Returns the mean of `kl_sums` over all ranks; None without such a token."""
    tokens = sums.get("tokens_kl_alpha")
    return sums["kl_alpha"] / tokens if tokens else None


def completion_log_ratios(x: LossInputs) -> list[float]:
    """Returns log π(y)/α(y) of each completion, nats."""
    assert x.rollout_logp is not None
    zeros_C = x.logp.new_zeros(len(x.advantages), dtype=torch.float64)
    log_ratio_T = (x.logp - x.rollout_logp).double()
    return to_floats(zeros_C.index_add(0, x.completion, log_ratio_T))


def ess_share(log_ratios: Sequence[float]) -> float:
    """Returns (Σ s)² / (B Σ s²) over B completions, 1/B .. 1.

    This is the effective sample size over their number; s is the ratio π(y)/α(y) of a completion.
    """
    log_s_C = torch.tensor(log_ratios, dtype=torch.float64)
    s_C = (log_s_C - log_s_C.max()).exp()  # a common factor cancels
    return float(ess(s_C)) / len(log_ratios)
