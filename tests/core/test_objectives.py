import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.loss import Terms
from lagrpo.core.objectives import (
    clip_range,
    clipped,
    clipped_between,
    cut_between,
    dual_clipped,
    f_eps,
    proportional_range,
    reinforce,
    unclipped,
)
from lagrpo.objective.recipes import resolve

LOW, HIGH = 0.2, 0.3  # asymmetric on purpose


def f_eps_cut(ratio_T, center_T, advantage_T, epsilon_low, epsilon_high):
    return cut_between(ratio_T, *clip_range(center_T, epsilon_low, epsilon_high), advantage_T)


@pytest.mark.parametrize(
    ("ratio", "center", "advantage", "value", "cut"),
    [
        # A >= 0: A min(r, c + HIGH)
        (1.0, 1.0, 2.0, 2.0, False),
        (1.4, 1.0, 2.0, 2.6, True),
        (0.1, 1.0, 2.0, 0.2, False),  # far below the range, but raising it is what A > 0 asks for
        (1.4, 1.5, 2.0, 2.8, False),  # the range follows pi_k
        (0.5, 0.1, 2.0, 0.8, True),
        # A < 0: A max(r, max(c - LOW, 0))
        (1.0, 1.0, -2.0, -2.0, False),
        (0.5, 1.0, -2.0, -1.6, True),
        (9.0, 1.0, -2.0, -18.0, False),  # no upper clip for A < 0
        (0.05, 0.1, -2.0, -0.1, False),  # c - LOW < 0: the lower end is 0, nothing is cut
        (0.0, 0.1, -2.0, 0.0, False),
        (2.0, 2.5, -2.0, -4.6, True),
        (1.4, 1.0, 0.0, 0.0, False),
        (0.5, 1.0, 0.0, 0.0, False),
    ],
)
def test_the_case_table_of_f_eps(ratio, center, advantage, value, cut):
    arguments = (tensor([ratio]), tensor([center]), tensor([advantage]), LOW, HIGH)
    assert_close(f_eps(*arguments), tensor([value]))
    assert f_eps_cut(*arguments).tolist() == [cut]


numbers = st.floats(0.0, 4.0, allow_subnormal=False)


@given(numbers, numbers, st.floats(-3, 3), st.floats(0, 1), st.floats(0, 1))
def test_f_eps_is_the_case_distinction_of_the_paper(ratio, center, advantage, low, high):
    value = f_eps(tensor([ratio]), tensor([center]), tensor([advantage]), low, high)
    above = advantage * min(ratio, center + high)
    below = advantage * max(ratio, max(center - low, 0.0))
    assert_close(value, tensor([above if advantage >= 0 else below]), atol=1e-5, rtol=1e-5)


# not so small that its products with a ratio underflow: there two different ratios would tie
@given(numbers, numbers, st.floats(1e-100, 3) | st.floats(-3, -1e-100))
def test_cut_is_exactly_where_the_gradient_is_cut(ratio, center, advantage):
    ratio_T = tensor([ratio], dtype=torch.float64, requires_grad=True)
    rest = (tensor([center], dtype=torch.float64), tensor([advantage], dtype=torch.float64), LOW, HIGH)
    gradient = torch.autograd.grad(f_eps(ratio_T, *rest).sum(), ratio_T)[0]
    at_the_edge = min(abs(ratio - center - HIGH), abs(ratio - max(center - LOW, 0))) < 1e-12
    if not at_the_edge:
        assert (float(gradient) == 0) == bool(f_eps_cut(ratio_T, *rest)), (ratio, center, advantage)


@pytest.mark.parametrize(
    "objective",
    [
        lambda logp_T, ratio_T, advantage_T: clipped(ratio_T, advantage_T, LOW, HIGH),
        lambda logp_T, ratio_T, advantage_T: f_eps(ratio_T, torch.ones_like(ratio_T), advantage_T, LOW, HIGH),
        lambda logp_T, ratio_T, advantage_T: unclipped(ratio_T, advantage_T),
        lambda logp_T, ratio_T, advantage_T: reinforce(logp_T, advantage_T, torch.ones(3).bool(), torch.ones(3)),
    ],
)
def test_at_pi_equal_alpha_every_surrogate_has_the_gradient_of_reinforce(objective):
    logp_alpha_T, advantage_T = tensor([-0.3, -2.0, -1.1]), tensor([1.5, -0.5, 0.0])
    logp_T = logp_alpha_T.clone().requires_grad_()
    objective(logp_T, (logp_T - logp_alpha_T).exp(), advantage_T).sum().backward()
    assert logp_T.grad is not None
    assert_close(logp_T.grad, advantage_T)


def test_clipped_is_f_eps_around_one():
    ratio_T, advantage_T = tensor([0.5, 1.0, 1.5, 0.5, 1.5]), tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    assert_close(clipped(ratio_T, advantage_T, LOW, HIGH), tensor([0.5, 1.0, 1.3, -0.8, -1.5]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "cut"),
    [
        (3.0, -2.0, -6.0, False),
        (9.0, -2.0, -8.0, True),
        (0.5, -2.0, -1.6, True),
        (9.0, 2.0, 2.6, True),
        (9.0, 0.0, 0.0, False),
    ],
)
def test_the_dual_clip_ends_how_hard_a_bad_token_is_pushed_down(ratio, advantage, value, cut):
    recipe = resolve("grpo", {"beta": 0.0, "epsilon_high": HIGH, "dual_clip": 4.0})
    logp_T = tensor([ratio]).log().requires_grad_()
    terms = Terms(logp_T, torch.zeros(1), None, None, tensor([0]), tensor([advantage]))
    assert_close(recipe.value(terms), tensor([value]))
    assert recipe.cut(terms).tolist() == [cut]
    (gradient,) = torch.autograd.grad(recipe.value(terms).sum(), logp_T)
    assert_close(gradient, tensor([0.0 if cut else ratio * advantage]))


def test_a_dual_clip_around_any_center_is_the_smaller_push():
    """A ratio inside the range of pi_k, far above 4: the dual clip holds there as well."""
    ratio_T, advantage_T = tensor([9.0, 9.0]), tensor([-1.0, 1.0])
    value_T = f_eps(ratio_T, ratio_T, advantage_T, LOW, HIGH)
    assert dual_clipped(value_T, advantage_T, 4.0).tolist() == [-4.0, 9.0]
    assert torch.equal(dual_clipped(value_T, advantage_T, float("inf")), value_T)


def test_the_center_carries_no_gradient():
    center_T = tensor([0.5]).requires_grad_()
    ratio_T = tensor([2.0]).requires_grad_()
    value = f_eps(ratio_T, center_T, tensor([1.0]), LOW, HIGH).sum()  # its slope in center_T would be 1
    gradients = torch.autograd.grad(value, (ratio_T, center_T), allow_unused=True)
    assert [None if gradient is None else float(gradient) for gradient in gradients] == [0.0, None]


def test_the_maximum_with_zero_in_the_lower_end_changes_nothing_so_geppo_is_f_eps():
    ratio_T, center_T, advantage_T = torch.rand(3, 10_000, generator=torch.Generator().manual_seed(0))
    advantage_T = advantage_T - 0.5
    without_max = clipped_between(ratio_T, center_T - LOW, center_T + HIGH, advantage_T)
    assert_close(without_max, f_eps(ratio_T, center_T, advantage_T, LOW, HIGH))
    assert int((center_T < LOW).sum()) > 1000  # the case is there


def test_the_proportional_range_scales_with_its_center():
    low_T, high_T = proportional_range(tensor([1.0, 0.1, 4.0]), LOW, HIGH)
    assert_close(low_T, tensor([0.8, 0.08, 3.2]))
    assert_close(high_T, tensor([1.3, 0.13, 5.2]))
    assert_close(
        clipped_between(tensor([9.0, 9.0, 9.0]), low_T, high_T, tensor([1.0, 2.0, -1.0])), tensor([1.3, 0.26, -9.0])
    )


def test_mask_and_weight_of_reinforce_carry_no_gradient():
    logp_T = tensor([-1.0, -2.0, -3.0]).requires_grad_()
    weight_T = (logp_T + 3).exp()
    value_T = reinforce(logp_T, tensor([2.0, -1.0, 1.0]), tensor([True, True, False]), weight_T)
    assert_close(value_T.detach(), tensor([-2.0, 2.0, 0.0]) * weight_T.detach())
    (gradient,) = torch.autograd.grad(value_T.sum(), logp_T)
    assert_close(gradient, tensor([2.0, -1.0, 0.0]) * weight_T.detach())


def test_bad_shapes_and_a_negative_epsilon_are_refused(unchecked):
    with pytest.raises(ValueError, match="one shape"):
        clipped(tensor([1.0, 1.0]), tensor([1.0]), LOW, HIGH)
    with pytest.raises(ValueError, match="flat"):
        unclipped(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"epsilon_low must be at least 0, but is -0.2"):
        clipped(tensor([1.0]), tensor([1.0]), -0.2, HIGH)
