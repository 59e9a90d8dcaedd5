"""rlax: losses of JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import peers
from cases import Case
from pairing import Pairing, advantages, loss_inputs, ours
from torch import Tensor

from lagrpo.core.corrections import truncated
from lagrpo.core.kl import kl

# JAX is not installed where types are checked.
Array: TypeAlias = Any


def rlax_clipped(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    import rlax

    def clipped(logp: Array, alpha: Array, A: Array) -> Array:
        return rlax.clipped_surrogate_pg_loss(_exp(logp - alpha), A, 0.2)

    A_T = advantages(case, "grpo")[case.completion]
    return peers.rlax(clipped, logp.detach(), case.alpha, A_T)


def rlax_policy_gradient(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    """The policy gradient of two actions per token.

    rlax takes logits. The first action was taken, with log-prob logp; the second has the rest.
    """
    import jax.numpy as jnp
    import rlax

    def policy_gradient(logp: Array, A: Array) -> Array:
        # log pi of the action that was taken, and of all others together.
        logits = jnp.stack([logp, jnp.log1p(-jnp.exp(logp))], 1)  # [T, 2]
        # Action 0 was taken at every token, each with a weight of 1.
        return rlax.policy_gradient_loss(logits, jnp.zeros(len(logp), int), A, jnp.ones_like(A))

    A_T = advantages(case, "reinforce")[case.completion]
    return peers.rlax(policy_gradient, logp.detach(), A_T)


def rlax_vtrace(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    """V-trace's policy gradient advantage of single steps: min(1, rho) (r - v), times - log pi."""
    import jax.numpy as jnp
    import rlax

    def vtrace(logp: Array, alpha: Array, pi_k: Array, A: Array) -> Array:
        zeros = jnp.zeros_like(A)  # values before and after, and discounts
        out = rlax.vtrace_td_error_and_advantage(zeros, zeros, A, zeros, _exp(pi_k - alpha))
        return -(out.pg_advantage * logp).mean()

    A_T = advantages(case, "reinforce")[case.completion]
    return peers.rlax(vtrace, logp.detach(), case.alpha, case.pi_k, A_T)


def vtrace_of_ours(case: Case, logp: Tensor) -> Tensor:
    inputs = loss_inputs(case, logp, advantages(case, "reinforce"))
    return -(truncated(inputs, cap=1.0) * inputs.advantage * logp).mean()


def _exp(x: Array) -> Array:
    import jax.numpy as jnp

    return jnp.exp(x)


def rlax_kl(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    import rlax

    def categorical_kl(p: Array, q: Array) -> Array:
        return rlax.categorical_kl_divergence(p, q).sum()

    # One distribution: the T log-probs of the case are its logits.
    return peers.rlax(categorical_kl, logp.detach().view(1, -1), case.ref.view(1, -1))


def kl_of_ours(case: Case, logp: Tensor) -> Tensor:
    return kl(logp.softmax(0), case.ref.softmax(0))


RLAX_PAIRINGS = [
    Pairing(
        "rlax",
        "`rlax.clipped_surrogate_pg_loss`",
        "`grpo` with beta = 0.0, reduction = 'token_mean'",
        rlax_clipped,
        partial(ours, name="grpo", beta=0.0, reduction="token_mean"),
    ),
    Pairing(
        "rlax",
        "`rlax.policy_gradient_loss`",
        "`reinforce`",
        rlax_policy_gradient,
        partial(ours, name="reinforce"),
    ),
    Pairing(
        "rlax",
        "`rlax.vtrace_td_error_and_advantage`, single steps",
        "`corrections.truncated`, cap = 1, times reinforce",
        rlax_vtrace,
        vtrace_of_ours,
        note="discount 0: V-trace's min(1, pi_k/alpha) in front of the advantage",
    ),
    Pairing(
        "rlax",
        "`rlax.categorical_kl_divergence`",
        "`kl.kl`",
        rlax_kl,
        kl_of_ours,
        note="the case's log-probs as the logits of one distribution",
    ),
]
