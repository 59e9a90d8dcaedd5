"""A policy small enough to enumerate: three tokens, two positions, nine completions, every
expectation a finite sum.

The logits of the first token are b, those of the second b + U[first token]: b is shared by both
positions. Expectations under alpha weigh each completion by its probability; gradients are with
respect to all twelve parameters. What is biased is asserted as biased, with its number.
"""

from typing import Any

import pytest
import torch
from losses import inputs, with_statistics
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.inputs import LossInputs
from lagrpo.core.kl import k1, k2, k3
from lagrpo.core.losses import opmd_kimi, opmd_pairwise
from lagrpo.core.recipes import resolve
from lagrpo.core.rows import DISTILLATION_ROWS, RECIPES


def double(*values: float) -> Tensor:
    return tensor(values, dtype=torch.float64)


# b, then the rows of U. From alpha to pi the ratios of tokens go from .25 to 2.4, of completions
# from .13 to 3.1: most clips and masks below have tokens on both sides.
ALPHA = double(0.4, -0.2, 0.1, 0.5, -0.6, 0.0, -0.3, 0.2, 0.6, 0.1, 0.7, -0.4)
PI = ALPHA + double(0.3, -0.4, 0.5, -0.2, 0.6, 0.1, 0.4, -0.5, 0.2, -0.3, 0.1, 0.6)
PI_REF = ALPHA + double(-0.2, 0.1, 0.2, 0.3, -0.1, -0.4, 0.2, 0.3, -0.1, 0.1, -0.2, 0.2)
PI_K = (ALPHA + PI) / 2
REWARD = double(0.0, 0.2, 1.0, 0.5, 0.0, 0.9, 0.3, 1.0, 0.1)
# Completion 3 * first + second; its two tokens stand side by side.
COMPLETION_T = torch.arange(9).repeat_interleave(2)


def token_logp(theta: Tensor) -> Tensor:
    """Log-probs of the two tokens of each of the nine completions, [18]."""
    b = theta[:3]
    U = theta[3:].view(3, 3)
    first = torch.log_softmax(b, dim=0)
    second = torch.log_softmax(b + U, dim=1)
    # [3, 3, 2]: first token, second token, position
    return torch.stack([first[:, None].expand(3, 3), second], dim=-1).reshape(18)


def logp(theta: Tensor) -> Tensor:
    return token_logp(theta).view(9, 2).sum(dim=1)


def p(theta: Tensor) -> Tensor:
    return logp(theta).exp()


def mean_reward(theta: Tensor) -> Tensor:
    return (p(theta) * REWARD).sum()


def kl(theta: Tensor, other: Tensor) -> Tensor:
    return (p(theta) * (logp(theta) - logp(other))).sum()


def gradient(function, theta: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


SIGMA = float((p(ALPHA) * (REWARD - mean_reward(ALPHA)).square()).sum().sqrt())
CENTERED = REWARD - mean_reward(ALPHA)


def tokens(theta: Tensor, advantage_C: Tensor, pi_k: Tensor) -> LossInputs:
    """The tokens of the nine completions under pi = theta, one group. Their entropy, and their
    staleness of 3, are numbers that no policy here has."""
    return inputs(
        *map(token_logp, (theta, ALPHA, pi_k, PI_REF)),
        A=advantage_C,
        completion=COMPLETION_T,
        staleness=torch.full((18,), 3),
        entropy=double(*range(18)),
        finished=torch.ones(9, dtype=torch.bool),
    )


def surrogate(name: str, advantage_C: Tensor, pi_k: Tensor = ALPHA, **overrides):
    """theta -> E_alpha of the sum over tokens of the recipe's surrogate. The nine completions are a
    whole step."""
    recipe = resolve(name, overrides)

    def expectation(theta: Tensor) -> Tensor:
        x = with_statistics(recipe, tokens(theta, advantage_C, pi_k))
        return (p(ALPHA)[COMPLETION_T] * recipe.value(x)).sum()

    return expectation


def error(gradient_12: Tensor, exact: Tensor) -> float:
    return float((gradient_12 - exact).norm() / exact.norm())


def cosine(gradient_12: Tensor, exact: Tensor) -> float:
    return float(gradient_12 @ exact / gradient_12.norm() / exact.norm())


TIMES_GRAD_J = {
    # The ratio of the completion stands at each of its two tokens.
    "unclipped": 2.0,
    # The derivative of its square is 2 * its strength of 1e-3 at pi = alpha.
    "oapl": 2e-3,
}
OTHERWISE = {
    *("red_weight", "opmd_kimi"),
    *("opmd_pairwise", "tba", "online_dpo", "online_ipo", "gepo"),  # compare a group's completions
    "grpo_top_entropy",  # keeps some tokens only
    *DISTILLATION_ROWS,  # move to another policy
}


@pytest.mark.parametrize("name", sorted(set(RECIPES) - OTHERWISE))
def test_at_pi_equal_pi_k_equal_alpha_the_gradient_is_that_of_the_mean_reward(name):
    """With any constant baseline, AsymRE's among them: E_alpha[(A + c) grad log pi] = grad J."""
    computed = gradient(surrogate(name, CENTERED), ALPHA)
    assert_close(computed, TIMES_GRAD_J.get(name, 1.0) * gradient(mean_reward, ALPHA))


def test_off_policy_the_sequence_ratio_is_unbiased_and_nothing_else_is():
    """E_alpha[s A] = (J(pi) - J(alpha)) / sigma in value and gradient; the others: relative error
    and cosine."""
    exact = gradient(mean_reward, PI) / SIGMA
    advantage = CENTERED / SIGMA
    assert_close(
        surrogate("unclipped", advantage)(PI) / 2, (mean_reward(PI) - mean_reward(ALPHA)) / SIGMA
    )
    assert_close(gradient(surrogate("unclipped", advantage), PI) / 2, exact)
    # Relative errors and cosines to four decimals, as this enumeration gives them: a change of a
    # formula shows in them.
    biased = {
        "token ratio": (
            gradient(surrogate("unclipped", advantage, ratio="token"), PI),
            0.4824,
            0.9202,
        ),
        "length-normalized ratio": (
            gradient(surrogate("unclipped", advantage, ratio="length_normalized"), PI),
            0.2530,
            0.9772,
        ),
        "no ratio": (gradient(surrogate("stale_reinforce", advantage), PI), 0.4724, 0.9300),
        "clipped token ratio": (gradient(surrogate("grpo", advantage), PI), 0.5418, 0.8803),
        "two-side": (gradient(surrogate("rec_two_side_is", advantage), PI), 0.6458, 0.8117),
    }
    for label, (computed, relative, angle) in biased.items():
        assert error(computed, exact) == pytest.approx(relative, abs=5e-5), label
        assert cosine(computed, exact) == pytest.approx(angle, abs=5e-5), label


RHO = (token_logp(PI) - token_logp(ALPHA)).exp()
S = (p(PI) / p(ALPHA))[COMPLETION_T]
A_T = (CENTERED / SIGMA)[COMPLETION_T]
CHANGE = token_logp(PI).exp() - token_logp(ALPHA).exp()


def two_symbol_kl() -> Tensor:
    a = token_logp(ALPHA).exp()
    q = token_logp(PI).exp()
    return a * (a / q).log() + (1 - a) * ((1 - a) / (1 - q)).log()


def soft(t: Tensor) -> Tensor:
    """1 / cosh^2(t (rho - 1) / 2) = 4 p (1 - p), p the sigmoid of t (rho - 1)."""
    return 1 / torch.cosh(t * (RHO - 1) / 2).square()


def largest_k3() -> Tensor:
    return (RHO - 1 - RHO.log()).view(9, 2).amax(dim=1)[COMPLETION_T]


def mean_of_completion(values_T: Tensor) -> Tensor:
    return values_T.view(9, 2).mean(dim=1)[COMPLETION_T]


def of_m2po(tau: float) -> Tensor:
    """rho, but 0 at the outward tokens with the largest (log rho)^2: taken away one by one, as in
    the paper."""
    squares = RHO.log().square()
    outward = (A_T > 0) == (RHO > 1)
    remaining = torch.ones(18, dtype=torch.bool)
    while float(squares[outward & remaining].mean()) > tau:
        remaining[torch.where(outward & remaining, squares, -1.0).argmax()] = False
    return RHO * remaining


UP = A_T > 0
DOWN = A_T < 0
COEFFICIENTS = {  # of A grad log pi at each token, for pi_k = alpha
    "dppo_tv": RHO * ~((UP & (CHANGE > 0.15)) | (DOWN & (-CHANGE > 0.15))),
    "dppo_kl": RHO * ~(((RHO > 1) == UP) & (two_symbol_kl() > 0.05)),
    "ipo_mask": RHO * (CHANGE.abs() <= 0.1) - 2e-3 * RHO.log() / A_T,
    "prime_rl": RHO * ~((UP & (CHANGE > 0.2)) | (DOWN & (-CHANGE > 0.2))) - 2e-3 * RHO.log() / A_T,
    "rollout_is": RHO * ((RHO - 1).abs() <= 0.2),
    "decoupled_ppo": RHO * ~((UP & (RHO > 1.2)) | (DOWN & (RHO < 0.8))),
    # The range is a power of its ends: the staleness of every token is 3.
    "a3po": RHO * ~((UP & (RHO > 1.2**3)) | (DOWN & (RHO < 0.8**3))),
    "m2po": of_m2po(0.04),
    "sapo": RHO * soft(torch.where(UP, 1.0, 1.05)),
    # s^k e^(l (1 - s)) with k, l = 2, 3 where A > 0 and 3, 2 where A < 0.
    "vespo": torch.where(UP, S**2 * (3 - 3 * S).exp(), S**3 * (2 - 2 * S).exp()),
    "seq_tis": S.clamp(max=8.0),
    "opsm": RHO * ~((UP & (RHO > 1.2)) | (DOWN & (RHO < 0.8))) * ~(DOWN & (S.log() / 2 < 0.0)),
    "trm": RHO * ~((UP & (RHO > 1.2)) | (DOWN & (RHO < 0.8))) * (largest_k3() <= 0.05),
    "carm": RHO
    * ~((UP & (RHO > 1.2)) | (DOWN & (RHO < 0.8)))
    * (mean_of_completion(RHO.log().abs()) <= 0.1823),
    # The geometric mean of ratios, each cut where A points.
    "gmpo": mean_of_completion(
        torch.where(UP, RHO.log().clamp(max=0.4), RHO.log().clamp(min=-0.4))
    ).exp()
    * ~((UP & (RHO.log() > 0.4)) | (DOWN & (RHO.log() < -0.4))),
    "positive_only": torch.ones(18, dtype=torch.float64),
    "topr_token": torch.where(UP, 1.0, RHO.clamp(max=1.0)),
    "asymmetric_cap": torch.where(UP, RHO, RHO.clamp(max=1.0)),
    "grpo_finished": RHO * ~((UP & (RHO > 1.2)) | (DOWN & (RHO < 0.8))),
    # The entropies are 0 to 17, so their quantile of .8 is .8 * 17.
    "grpo_top_entropy": RHO
    * ~((UP & (RHO > 1.2)) | (DOWN & (RHO < 0.8)))
    * (torch.arange(18) >= 0.8 * 17),
    "oapl": 2e-3 * (1 - 1e-3 * S.log() / A_T),
}


@pytest.mark.parametrize(
    ("name", "relative", "angle"),
    [
        ("dppo_tv", 0.4638, 0.9278),
        ("dppo_kl", 0.4638, 0.9278),
        ("ipo_mask", 0.6586, 0.7550),
        ("prime_rl", 0.4812, 0.9206),
        ("rollout_is", 0.6458, 0.8117),
        ("decoupled_ppo", 0.5418, 0.8803),
        ("a3po", 0.4638, 0.9278),
        ("m2po", 0.3877, 0.9245),
        ("sapo", 0.5338, 0.8997),
        ("vespo", 0.5637, 0.9180),
        ("seq_tis", 0.0000, 1.0000),
        ("opsm", 1.2351, -0.0339),
        ("trm", 0.6067, 0.8092),
        ("carm", 0.6274, 0.7805),
        ("gmpo", 0.2554, 0.9807),
        ("positive_only", 0.4724, 0.9300),
        ("topr_token", 0.3814, 0.9525),
        ("asymmetric_cap", 0.6001, 0.8841),
        ("grpo_finished", 0.5418, 0.8803),
        ("grpo_top_entropy", 1.0169, 0.1847),
        ("oapl", 0.9977, 0.9301),
    ],
)
def test_off_policy_gradients_of_the_methods_for_stale_rollouts(name, relative, angle):
    """Each is E_alpha of coefficient A grad log pi; relative error and cosine to grad J / sigma at
    pi."""
    overrides: Any = {"delta": 0.0} if name == "opsm" else {}  # with .5 nothing here is dropped
    computed = gradient(surrogate(name, CENTERED / SIGMA, **overrides), PI)
    factor_T = (p(ALPHA)[COMPLETION_T] * COEFFICIENTS[name] * A_T).detach()
    assert_close(computed, gradient(lambda theta: (factor_T * token_logp(theta)).sum(), PI))
    exact = gradient(mean_reward, PI) / SIGMA
    assert error(computed, exact) == pytest.approx(relative, abs=5e-5)
    assert cosine(computed, exact) == pytest.approx(angle, abs=5e-5)


def test_m2po_released_clips_to_the_range_of_the_step_by_enumeration():
    """The mean of the outward (log rho)^2 is above .04; cut down to the largest value at which it
    is not, t^2."""
    computed = gradient(surrogate("m2po_released", CENTERED / SIGMA), PI)
    v = RHO.log().square()[(RHO > 1) == UP].sort().values
    t = max(float(cut) ** 0.5 for cut in v if float(v.clamp(max=cut).mean()) < 0.04)
    low = min(torch.e**-t, 0.7)
    high = max(torch.e**t, 1.5)
    coefficient_T = RHO * ~((UP & (high < RHO)) | (DOWN & (low > RHO)))
    factor_T = p(ALPHA)[COMPLETION_T] * coefficient_T * A_T
    assert_close(computed, gradient(lambda theta: (factor_T * token_logp(theta)).sum(), PI))
    # Else nothing was clipped, and the plain surrogate would pass, too.
    assert not bool((coefficient_T == RHO).all())


@pytest.mark.parametrize("strength", [0.1, 2.0])
def test_preferences_by_enumeration(strength):
    """The third of the nine completions is the best (so is the eighth), the first the worst."""
    best = 2
    worst = 0
    advantage = CENTERED

    def margin(theta: Tensor) -> Tensor:
        log_ratio = logp(theta) - logp(PI_REF)
        return log_ratio[best] - log_ratio[worst]

    def mean_over_completions(name: str):
        recipe = resolve(name, {"strength": strength})
        return lambda theta: recipe.value(tokens(theta, advantage, ALPHA)).sum() / 9

    dpo = gradient(lambda theta: torch.sigmoid(strength * margin(theta)).log(), PI)
    assert_close(gradient(mean_over_completions("online_dpo"), PI), dpo)
    ipo = gradient(lambda theta: -(margin(theta) - 1 / (2 * strength)).square(), PI)
    assert_close(gradient(mean_over_completions("online_ipo"), PI), ipo)


INFINITE = {"cap": float("inf")}


def per_completion(name: str, theta: Tensor, **overrides) -> Tensor:
    """The gradient of the recipe's surrogate on each of the nine completions, pi_k half-way from
    alpha: [9, 12]."""
    recipe = resolve(name, overrides)

    def values(theta: Tensor) -> Tensor:
        value_T = recipe.value(tokens(theta, CENTERED, PI_K))
        return torch.zeros(9, dtype=torch.float64).index_add(0, COMPLETION_T, value_T)

    return torch.func.jacrev(values)(theta)


@pytest.mark.parametrize(
    ("name", "changes", "relative", "angle", "variance"),
    [
        ("grpo_recomputed", {}, 0.2133, 0.9812, 0.2585),
        ("stale_reinforce", {}, 0.2133, 0.9812, 0.2585),  # pi = pi_k: nothing else is left of it
        ("grpo", {}, 0.1667, 0.9916, 0.2112),
        ("grpo_tis", INFINITE, 0.2158, 0.9803, 0.2384),
        ("grpo_tis", {}, 0.2158, 0.9803, 0.2384),  # no token reaches 2
        ("grpo_tis", {"cap": 1.2}, 0.2467, 0.9748, 0.2199),
        ("grpo_tis_sequence", INFINITE, 0.0, 1.0, 0.2624),
        ("grpo_tis_sequence", {"cap": 1.5}, 0.0511, 0.9989, 0.2314),
        ("grpo_tis_sequence", {"cap": 1.2}, 0.0935, 0.9964, 0.2069),
        (
            "grpo_tis_sequence",
            INFINITE | {"level": "length_normalized"},
            0.1048,
            0.9954,
            0.2377,
        ),
        ("grpo_mis_sequence", {"cap": 1.5}, 0.2733, 0.9743, 0.1606),
        ("grpo_icepop", {"floor": 2 / 3, "cap": 1.5}, 0.3145, 0.9632, 0.1682),
    ],
)
def test_at_pi_k_untruncated_weights_of_completions_are_unbiased_and_nothing_else_is(
    name, changes, relative, angle, variance
):
    """Relative error and cosine of the expected gradient to grad J(pi_k), and the variance on one
    completion of alpha (the trace of its covariance; of grad log pi_k A on completions of pi_k
    itself it is .2427)."""
    exact = gradient(mean_reward, PI_K)
    samples = per_completion(name, PI_K, **changes)
    expected_gradient = (p(ALPHA)[:, None] * samples).sum(dim=0)
    assert_close(expected_gradient, gradient(surrogate(name, CENTERED, pi_k=PI_K, **changes), PI_K))
    assert error(expected_gradient, exact) == pytest.approx(relative, abs=5e-5)
    assert cosine(expected_gradient, exact) == pytest.approx(angle, abs=5e-5)
    trace = (p(ALPHA)[:, None] * (samples - expected_gradient).square()).sum()
    assert float(trace) == pytest.approx(variance, abs=5e-5)


def test_weights_and_ratios_of_completions_together_are_unbiased_wherever_pi_is():
    """(pi_k/alpha)(pi/pi_k) = pi/alpha: with tokens' ratios the first factor corrects alpha, not
    what pi did since."""
    exact = gradient(mean_reward, PI)
    weight_of_completions = INFINITE | {"level": "sequence"}
    parts = {"denominator": "pi_k", "correction": "truncated"} | weight_of_completions
    by_completions = gradient(surrogate("unclipped", CENTERED, pi_k=PI_K, **parts), PI)
    assert_close(by_completions, 2 * exact)  # the ratio stands at each of two tokens
    by_tokens = gradient(surrogate("unclipped", CENTERED, pi_k=PI_K, ratio="token", **parts), PI)
    assert error(by_tokens, exact) == pytest.approx(0.2459, abs=5e-5)


def test_the_exact_clip_in_expectation_is_the_case_distinction_under_equation_6():
    computed = surrogate("off_policy_grpo_exact", CENTERED, pi_k=PI_K, ratio="sequence")(PI) / 2
    s = p(PI) / p(ALPHA)
    c = p(PI_K) / p(ALPHA)
    good = CENTERED * torch.minimum(s, c + 0.2)
    bad = CENTERED * torch.maximum(s, (c - 0.2).clamp(min=0))
    assert_close(computed, (p(ALPHA) * torch.where(CENTERED >= 0, good, bad)).sum())


def against_pi(theta: Tensor, advantage_C: Tensor, completions: list[int]) -> LossInputs:
    """The tokens of a group of these completions under theta, as if pi had sampled them."""
    token_T = torch.cat([tensor([2 * c, 2 * c + 1]) for c in completions])
    completion_T = torch.arange(len(completions)).repeat_interleave(2)
    return inputs(
        token_logp(theta)[token_T], token_logp(PI)[token_T], A=advantage_C, completion=completion_T
    )


def test_pairwise_opmd_at_pi_t_is_reinforce_whoever_sampled_the_group():
    generated = [0, 2, 2, 4, 8]  # no policy sampled these
    r = REWARD[generated]

    def loss(theta: Tensor) -> Tensor:
        return -opmd_pairwise(against_pi(theta, r, generated), strength=0.3).sum() / len(generated)

    def reinforce(theta: Tensor) -> Tensor:
        return -2 * 0.3 * ((r - r.mean()) * logp(theta)[generated]).mean()

    assert_close(gradient(loss, PI), gradient(reinforce, PI))


def tilted_theta(strength: float) -> Tensor:
    """The parameters of pi_t e^(r / strength) / Z: with b and U free, every distribution of the
    nine can be had."""
    p = torch.softmax(logp(PI) + REWARD / strength, dim=0).view(3, 3)
    b = p.sum(dim=1).log()
    return torch.cat([b, (p.log() - b[None, :]).reshape(9)])


def test_the_minimizer_of_pairwise_opmd_and_of_kimi_is_the_exponential_tilt():
    theta = tilted_theta(0.3)
    all_nine = list(range(9))
    assert_close(p(theta), torch.softmax(logp(PI) + REWARD / 0.3, dim=0))
    assert (
        float(opmd_pairwise(against_pi(theta, REWARD, all_nine), strength=0.3).abs().max()) < 1e-20
    )
    log_Z = 0.3 * (p(PI) * (REWARD / 0.3).exp()).sum().log()  # the exact tau log E e^(r / tau)
    assert (
        float(opmd_kimi(against_pi(theta, REWARD - log_Z, all_nine), strength=0.3).abs().max())
        < 1e-20
    )


def test_asymre_gradient_is_zero_at_its_fixed_point():
    """If w = alpha (r - mu + strength) is positive throughout, the fixed point is pi = w /
    strength."""
    strength = 0.6
    w = p(ALPHA) * (CENTERED + strength)
    # Where w is negative the fixed point is on the boundary, which logits do not reach.
    assert bool((w > 0).all())
    target = (w / strength).view(3, 3)
    b = target.sum(dim=1).log()
    theta = torch.cat([b, (target.log() - b[None, :]).reshape(9)])
    objective = surrogate("asymre", CENTERED, strength=strength)
    assert float(gradient(objective, theta).abs().max()) < 1e-12
    # Elsewhere the gradient is far from 0.
    assert float(gradient(objective, ALPHA).abs().max()) > 0.05


ON_POLICY = p(PI)[COMPLETION_T]
OFF_POLICY = p(ALPHA)[COMPLETION_T]
TOKEN_WEIGHTED = OFF_POLICY * (token_logp(PI) - token_logp(ALPHA)).exp()
SEQUENCE_WEIGHTED = OFF_POLICY * (p(PI) / p(ALPHA))[COMPLETION_T]


@pytest.mark.parametrize(
    ("estimator", "on_policy", "off_policy", "token_weighted"),
    [(k1, 0.1428, -0.1257, 0.1567), (k2, 0.1310, 0.2126, 0.1371), (k3, 0.1428, 0.2946, 0.1567)],
)
def test_values_of_the_kl_estimators(estimator, on_policy, off_policy, token_weighted):
    """KL(pi || pi_ref) is .1428: k1 and k3 hit it on their own samples only; the token's ratio
    mends part of the rest, that of the sequence all."""
    estimate_T = estimator(tokens(PI, CENTERED, PI_K))
    assert float(kl(PI, PI_REF)) == pytest.approx(0.1428, abs=5e-5)
    assert float((ON_POLICY * estimate_T).sum()) == pytest.approx(on_policy, abs=5e-5)
    assert float((OFF_POLICY * estimate_T).sum()) == pytest.approx(off_policy, abs=5e-5)
    assert float((TOKEN_WEIGHTED * estimate_T).sum()) == pytest.approx(token_weighted, abs=5e-5)
    assert_close((SEQUENCE_WEIGHTED * estimate_T).sum(), (ON_POLICY * estimate_T).sum())


def kl_gradient(estimator, weight_T: Tensor) -> Tensor:
    return gradient(lambda theta: (weight_T * estimator(tokens(theta, CENTERED, PI_K))).sum(), PI)


def log_probs_of_both_tokens(theta: Tensor) -> list[Tensor]:
    """log pi of the first token [1, 3], and of the second one after each first token [3, 3]."""
    b = theta[:3]
    U = theta[3:].view(3, 3)
    return [torch.log_softmax(b, dim=0)[None], torch.log_softmax(b + U, dim=1)]


@pytest.mark.parametrize("reverse", [False, True])
def test_on_policy_k2_is_the_gradient_of_each_tokens_kl_and_k3_that_of_the_other_kl(reverse):
    """The probability of what precedes the second token is held: what the first does to it is in
    neither."""
    exact = gradient(lambda theta: kl_of_tokens(theta, PI, reverse=reverse), PI)
    assert_close(kl_gradient(k3 if reverse else k2, ON_POLICY), exact)


def kl_of_tokens(theta: Tensor, before: Tensor, *, reverse: bool) -> Tensor:
    """The two tokens' KL(pi || pi_ref), or KL(pi_ref || pi), after prefixes of `before`."""
    p_first = p(before).view(3, 3).sum(dim=1)
    pi = log_probs_of_both_tokens(theta)
    ref = log_probs_of_both_tokens(PI_REF)
    pairs = [(r, p) if reverse else (p, r) for p, r in zip(pi, ref, strict=True)]
    kls = [(p.exp() * (p - r)).sum(dim=1) for p, r in pairs]
    return kls[0].sum() + (p_first * kls[1]).sum()


NO_REWARD = torch.zeros(9, dtype=torch.float64)


@pytest.mark.parametrize("theta", [ALPHA, PI], ids=["fresh", "stale"])
@pytest.mark.parametrize(
    ("name", "reverse"), [("opd_recomputed", False), ("opd_forward", True)], ids=lambda value: ""
)
def test_recomputed_distillation_has_the_gradient_of_the_tokens_kl_whoever_sampled(
    name, reverse, theta
):
    """After prefixes of alpha: their distribution is all that staleness changes."""
    exact = gradient(lambda theta: -kl_of_tokens(theta, ALPHA, reverse=reverse), theta)
    assert_close(gradient(surrogate(name, NO_REWARD), theta), exact)


@pytest.mark.parametrize(
    ("name", "relative", "angle", "at_teacher"),
    [
        ("opd", 0.8337, 0.8814, 0.0000),
        ("opd_recomputed", 0.1492, 0.9888, 0.0000),
        ("opd_stale", 1.3191, -0.3895, 0.0847),
        ("opd_forward", 0.4621, 0.9412, 0.0000),
        ("iw_opd", 1.3030, -0.1972, 0.1323),
    ],
)
def test_gradients_of_distillation_on_stale_samples(name, relative, angle, at_teacher):
    """Relative error and cosine to -grad KL(pi || pi_ref) at pi, and the largest component at
    pi = pi_ref, where the gradient should be 0: d of alpha pushes away from alpha there."""
    expected = gradient(lambda theta: -kl(theta, PI_REF), PI)
    computed = gradient(surrogate(name, NO_REWARD), PI)
    assert error(computed, expected) == pytest.approx(relative, abs=5e-5)
    assert cosine(computed, expected) == pytest.approx(angle, abs=5e-5)
    remaining = gradient(surrogate(name, NO_REWARD), PI_REF).abs().max()
    assert float(remaining) == pytest.approx(at_teacher, abs=5e-5)


@pytest.mark.parametrize(
    ("estimator", "samples", "relative", "angle"),
    [
        (k2, ON_POLICY, 0.0619, 0.9990),
        (k2, OFF_POLICY, 0.8337, 0.8814),
        (k2, TOKEN_WEIGHTED, 0.1492, 0.9888),
        (k2, SEQUENCE_WEIGHTED, 0.0619, 0.9990),
        (k3, ON_POLICY, 0.3247, 0.9745),
        (k3, OFF_POLICY, 1.9570, 0.8044),
        (k3, TOKEN_WEIGHTED, 0.4621, 0.9412),
        (k3, SEQUENCE_WEIGHTED, 0.3247, 0.9745),
    ],
)
def test_distance_of_kl_penalties_from_the_kl_gradient_by_enumeration(
    estimator, samples, relative, angle
):
    exact = gradient(lambda theta: kl(theta, PI_REF), PI)
    assert error(kl_gradient(estimator, samples), exact) == pytest.approx(relative, abs=5e-5)
    assert cosine(kl_gradient(estimator, samples), exact) == pytest.approx(angle, abs=5e-5)


def test_k1_gradient_is_zero_on_policy_and_biased_off_policy():
    exact = gradient(lambda theta: kl(theta, PI_REF), PI)
    for samples in (ON_POLICY, TOKEN_WEIGHTED, SEQUENCE_WEIGHTED):
        assert float(kl_gradient(k1, samples).abs().max()) < 1e-14
    assert cosine(kl_gradient(k1, OFF_POLICY), exact) == pytest.approx(-0.9569, abs=5e-5)
    assert_close(kl_gradient(k1, OFF_POLICY), -gradient(kl_of_alpha_to, PI))


def kl_of_alpha_to(theta: Tensor) -> Tensor:
    return (p(ALPHA) * (logp(ALPHA) - logp(theta))).sum()
