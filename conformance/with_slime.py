"""slime: its GRPO beside a teacher, --use-opd, by its formula. PyPI does not have slime."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case
from pairing import Pairing, loss
from torch import Tensor


def clipped_sum(case: Case, logp: Tensor, advantages: Tensor, *, old: str) -> Tensor:
    """PPO's clip of A - (log pi_old - log pi_T), a mean over completions of their token means.

    --advantage-estimator grpo --eps-clip .2 --use-opd --opd-kl-coef 1; `old` is the policy that
    slime calls old, for the ratio and for the distance to the teacher.
    """
    old_logp = case.padded(getattr(case, old))
    advantage = advantages.unsqueeze(1) - (old_logp - case.padded(case.ref))
    ratio = (case.padded(logp) - old_logp).exp()
    losses = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
    return ((losses * case.mask).sum(1) / case.mask.sum(1)).mean()


def pairing_of(old: str) -> Pairing:
    """Compares the formula, with these log-probs as old, with ours."""
    overrides: dict[str, Any] = {"token_advantage.student": old, "surrogate.denominator": old}
    return loss(
        "slime",
        f"its formula of --use-opd, old = {old}",
        "grpo_opd",
        clipped_sum,
        peer_settings={"old": old},
        **overrides,
    )


SLIME_PAIRINGS = [pairing_of("pi_k"), pairing_of("alpha")]
