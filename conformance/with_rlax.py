"""rlax: losses of JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import peers
from cases import Case
from pairing import Pairing, advantages, loss_inputs, ours
from torch import Tensor

from lagrpo.core.corrections import truncated
from lagrpo.core.kl import kl


def rlax_clipped(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    import rlax

    A = advantages(case, "grpo")[case.completion]
    jnp_loss = lambda logp, alpha, A: rlax.clipped_surrogate_pg_loss(_exp(logp - alpha), A, 0.2)  # noqa: E731
    return peers.rlax(jnp_loss, logp.detach(), case.alpha, A)


def rlax_policy_gradient(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Two actions per token, of which the first was taken with log-prob logp: rlax takes logits."""
    import jax.numpy as jnp
    import rlax

    def of(logp: Any, A: Any) -> Any:
        logits = jnp.stack([logp, jnp.log1p(-jnp.exp(logp))], 1)
        return rlax.policy_gradient_loss(logits, jnp.zeros(len(logp), int), A, jnp.ones_like(A))

    return peers.rlax(of, logp.detach(), advantages(case, "reinforce")[case.completion])


def rlax_vtrace(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    """V-trace's policy gradient advantage of single steps: min(1, rho) (r - v), times - log pi."""
    import jax.numpy as jnp
    import rlax

    def of(logp: Any, alpha: Any, pi_k: Any, A: Any) -> Any:
        none = jnp.zeros_like(A)
        out = rlax.vtrace_td_error_and_advantage(none, none, A, none, _exp(pi_k - alpha))
        return -(out.pg_advantage * logp).mean()

    return peers.rlax(
        of, logp.detach(), case.alpha, case.pi_k, advantages(case, "reinforce")[case.completion]
    )


def vtrace_of_ours(case: Case, logp: Tensor) -> Tensor:
    x = loss_inputs(case, logp, advantages(case, "reinforce"))
    return -(truncated(x, cap=1.0) * x.advantage * logp).mean()


def _exp(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.exp(x)


def rlax_kl(case: Case, logp: Tensor) -> tuple[Tensor, Tensor]:
    import rlax

    return peers.rlax(
        lambda p, q: rlax.categorical_kl_divergence(p, q).sum(),
        *(x.view(1, -1) for x in (logp.detach(), case.ref)),
    )


def kl_of_ours(case: Case, logp: Tensor) -> Tensor:
    return kl(logp.softmax(0), case.ref.softmax(0))


OF_RLAX = [
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
