"""The pieces a recipe is composed of, by name. Within a table all functions are called alike, so that any can stand in
for any other; the numbers a piece reads are its keyword-only arguments, and nothing else of the settings reaches it.

    ADVANTAGES   (rewards_G, uniform_G, *, knobs) -> advantage_G    uniform_G: a draw in [0, 1) for each completion
    RATIOS       (logp_T, logp_alpha_T, completion_T, C) -> ratio_T
    SURROGATES   value, cut: (Terms, *, knobs) -> [T]               see `Surrogate`
    KLS          (logp_T, logp_ref_T) -> estimate_T
    REDUCTIONS   (lengths_C, kept_C, counted_C, max_length) -> weight_C
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lagrpo.core import advantages, divergences, objectives, ratios, reductions
from lagrpo.core.loss import Ratio


class Surrogate(NamedTuple):
    """An objective per token and the mask of the tokens whose gradient it cuts. `reads_ratio`: whether the level of the
    ratio matters to it; `needs_pi_k`: whether it is centred on pi_k/alpha and so needs pi_k's log-probs."""

    value: Callable[..., Tensor]
    cut: Callable[..., Tensor]
    reads_ratio: bool = True
    needs_pi_k: bool = False


def _nothing_cut(t):
    return torch.zeros_like(t.logp, dtype=torch.bool)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "whitened": lambda r, u, *, eps_std: advantages.whitened(r, eps_std),
    "centred": lambda r, u: advantages.centred(r),
    "leave_one_out": lambda r, u: advantages.leave_one_out(r),
}

RATIOS: dict[str, Ratio] = {
    "token": lambda logp, logp_alpha, completion, C: ratios.token_ratio(logp, logp_alpha),
    "sequence": ratios.sequence_ratio,
    "length_normalised": ratios.length_normalised_ratio,
}

SURROGATES: dict[str, Surrogate] = {
    "clipped": Surrogate(
        lambda t, *, epsilon_low, epsilon_high: objectives.clipped(t.ratio, t.advantage, epsilon_low, epsilon_high),
        lambda t, *, epsilon_low, epsilon_high: objectives.f_eps_cut(
            t.ratio, torch.ones_like(t.ratio), t.advantage, epsilon_low, epsilon_high
        ),
    ),
    "clipped_exact": Surrogate(
        lambda t, *, epsilon_low, epsilon_high: objectives.clipped_exact(
            t.ratio, t.centre, t.advantage, epsilon_low, epsilon_high
        ),
        lambda t, *, epsilon_low, epsilon_high: objectives.f_eps_cut(
            t.ratio, t.centre, t.advantage, epsilon_low, epsilon_high
        ),
        needs_pi_k=True,
    ),
    "unclipped": Surrogate(lambda t: objectives.unclipped(t.ratio, t.advantage), _nothing_cut),
    "reinforce": Surrogate(lambda t: objectives.reinforce(t.logp, t.advantage), _nothing_cut, reads_ratio=False),
}

KLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": divergences.k1, "k2": divergences.k2, "k3": divergences.k3}

REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "token_mean": lambda lengths, kept, counted, max_length: reductions.token_mean(lengths, kept, counted),
    "sequence_mean": lambda lengths, kept, counted, max_length: reductions.sequence_mean(lengths, kept, counted),
    "sequence_sum": lambda lengths, kept, counted, max_length: reductions.sequence_sum(lengths, kept, counted),
    "constant_length": reductions.constant_length,
}
