"""Ratios beyond what float32 holds: exp overflows at 88.7 nats. Where the gradient is finite it must come out finite,
and 0 where the clip, the advantage or the mask makes it 0; where it is infinite an error names the token.

What is true is computed in float64, which holds every ratio here."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from losses import loss_of
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.loss import InfiniteGradientError, Terms
from lagrpo.objective.recipes import PRESETS, resolve

LOG_RATIOS = (-200.0, -100.0, -20.0, -0.1, 0.0, 0.1, 20.0, 80.0, 100.0, 200.0)
LARGEST = torch.finfo(torch.float32).max
LEVELS = ("token", "sequence", "length_normalized")
Case = tuple[float, float, str, str, float]
CASES: list[Case] = list(product(LOG_RATIOS, (-1.0, 0.0, 1.0), ("alpha", "pi"), ("alpha", "pi"), (1.0, 0.0)))


def batch(cases: Sequence[Case]) -> dict[str, Tensor]:
    """For each case a group of two completions of two tokens. pi/alpha is e^log_ratio at the first token of the first,
    1 or close elsewhere; pi_k and pi_ref are pi or alpha; the first completion has the weight 1 or 0 (masked)."""
    parts = []
    for log_ratio, advantage, pi_k, ref, weight in cases:
        alpha = tensor([-1.0 - max(log_ratio, 0.0), -0.5, -1.0, -2.0])
        policies = {"alpha": alpha, "pi": alpha + tensor([log_ratio, 0.0, 0.25, -0.125])}
        parts.append((policies["pi"], alpha, policies[pi_k], policies[ref], tensor([advantage, 0.5, weight, 1.0])))
    logp_T, logp_alpha_T, logp_k_T, logp_ref_T, own = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return {
        "logp_T": logp_T,
        "logp_alpha_T": logp_alpha_T,
        "logp_k_T": logp_k_T,
        "logp_ref_T": logp_ref_T,
        "advantage_C": own.view(-1, 2, 2)[:, 0].flatten(),
        "weight_C": own.view(-1, 2, 2)[:, 1].flatten(),
        "completion_T": torch.arange(2 * len(cases)).repeat_interleave(2),
        "group_C": torch.arange(len(cases)).repeat_interleave(2),
    }


def values(recipe: Any, given: dict[str, Tensor]) -> Tensor:
    """The surrogate less the KL term of each token, and nothing where the token has no weight."""
    names = ("logp_T", "logp_alpha_T", "logp_k_T", "logp_ref_T", "completion_T", "advantage_C", "group_C")
    terms = Terms(*(given[name] for name in names))
    value_T = recipe.value(terms) - recipe.beta * recipe.kl(terms)
    return torch.where(given["weight_C"][given["completion_T"]] > 0, value_T, 0)


def gradient(recipe: Any, given: dict[str, Tensor]) -> Tensor:
    given = given | {"logp_T": given["logp_T"].clone().requires_grad_()}
    return torch.autograd.grad(loss_of(recipe, **given)[0], given["logp_T"])[0]


FURTHER = {  # overrides that bring in an exponential of their own
    "grpo": [{"kl_importance": True, "kl": "k2"}, {"kl": "k3_clamped"}, {"kl": "k3_linear"}, {"dual_clip": 4.0}],
    "grpo_tis": [{"correction_cap": float("inf")}],
    "grpo_tis_sequence": [{"correction_cap": float("inf")}],
}


def compositions(name: str) -> list[dict[str, Any]]:
    """The overrides under which the preset takes its ratio at each level (none where it has no ratio), and more."""
    try:
        found = [{"ratio": resolve(name, {"ratio": level}).composition.ratio} for level in LEVELS]
    except ValueError:
        found = [{}]
    return found + FURTHER.get(name, [])


def refused(recipe: Any, name: str, case: Case) -> None:
    """The case ends in an error that names the token: the first of the first completion."""
    with pytest.raises(InfiniteGradientError, match="token 0 of completion 0 ") as raised:
        gradient(recipe, batch([case]))
    assert (raised.value.completion, raised.value.position) == (0, 0), (name, case)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_what_is_finite_comes_out_finite_and_what_is_not_names_its_token(name):
    """Every preset, ratio level, log-ratio, sign of the advantage, pi_k and pi_ref, with the completion masked and not:
    the gradient of float32 is that of float64, or an error is raised because that is beyond float32."""
    for overrides in compositions(name):
        recipe = resolve(name, overrides)
        exact = {key: x.double() if x.is_floating_point() else x for key, x in batch(CASES).items()}
        true_T = gradient(recipe, exact)
        assert bool(true_T.isfinite().all())
        fits = (true_T.abs() <= LARGEST).view(-1, 4).all(dim=1).tolist()
        for case, fit in zip(CASES, fits, strict=True):
            if not fit:
                refused(recipe, name, case)
        kept = [case for case, fit in zip(CASES, fits, strict=True) if fit]
        true_T, true_value_T = (x.view(-1, 4)[tensor(fits)].flatten() for x in (true_T, values(recipe, exact)))
        found_T, value_T = gradient(recipe, batch(kept)), values(recipe, batch(kept))
        assert_close(found_T.double(), true_T, rtol=1e-4, atol=1e-6)
        assert bool((found_T[true_T == 0] == 0).all())
        holds = true_value_T.abs() < LARGEST
        assert_close(value_T[holds].double(), true_value_T[holds], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_a_kl_term_whose_weight_overflows_asks_for_nothing_where_pi_is_still_pi_ref(kl):
    recipe = resolve("stale_reinforce", {"beta": 1.0, "kl": kl, "kl_importance": True})
    given = batch([(100.0, -1.0, "alpha", "pi", 1.0)])
    assert gradient(recipe, given).tolist() == gradient(recipe, given | {"logp_alpha_T": given["logp_T"]}).tolist()


def test_the_error_says_which_token_and_by_how_much():
    given = batch([(0.0, 1.0, "alpha", "alpha", 1.0), (100.0, -1.0, "alpha", "pi", 1.0)])
    with pytest.raises(InfiniteGradientError) as raised:
        gradient(resolve("grpo"), given)
    assert str(raised.value) == (
        "the gradient at token 0 of completion 2 is not finite: its advantage is -1, log pi -1, "
        "log pi/alpha 100 nats at the token and 100 over the completion, "
        "log pi/pi_k 100 nats at the token and 100 over the completion, "
        "log pi/pi_ref 0 nats at the token and 0 over the completion"
    )


def test_a_policy_that_computes_nan_is_named_though_a_mask_would_have_dropped_the_token():
    given = batch([(0.0, 1.0, "alpha", "alpha", 1.0)])
    given["logp_T"][1] = torch.nan
    with pytest.raises(InfiniteGradientError, match="token 1 of completion 0 is not finite"):
        gradient(resolve("rec_two_side_is"), given)
