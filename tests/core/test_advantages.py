"""Advantages, by numbers worked by hand: of a group, and of a whole batch."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.advantages import (
    AdvantageInputs,
    batch_scaled,
    batch_whitened,
    centered,
    leave_one_out,
    log_mean_exp,
    maxrl,
    normalized,
    normalized_positive,
    normalized_unbiased,
    one_group,
    overlong_penalty,
    red_drop,
    sigma,
    sign_balanced,
    zero_variance,
)

OF_GROUPS = [
    normalized,
    normalized_unbiased,
    normalized_positive,
    centered,
    leave_one_out,
    maxrl,
    log_mean_exp,
    red_drop,
    sign_balanced,
]
OF_BATCHES = [batch_scaled, batch_whitened]
rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9).map(
    torch.tensor
)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def name(function) -> str:
    return function.__name__


def of_group(advantage, rewards_G, uniform_G=None, **knobs):
    """The advantages of a batch that is one group."""
    rewards_G = torch.as_tensor(rewards_G)
    if uniform_G is None:
        uniform_G = torch.linspace(0, 0.9, len(rewards_G))
    return advantage(one_group(rewards_G, uniform_G), **knobs)


def in_one_group(rewards_G):
    return rewards_G, torch.zeros(len(rewards_G), dtype=torch.long)


# One group


def test_one_success_in_four_by_hand():
    rewards_G = tensor([1.0, 0.0, 0.0, 0.0])  # mu = 1/4, s0^2 = (9 + 1 + 1 + 1)/64 = 3/16
    assert_close(sigma(*in_one_group(rewards_G), 0.0), (tensor(3.0).sqrt() / 4).expand(4))
    assert_close(of_group(centered, rewards_G), tensor([0.75, -0.25, -0.25, -0.25]))
    assert_close(of_group(normalized, rewards_G, eps_std=1 / 16), tensor([1.5, -0.5, -0.5, -0.5]))
    assert_close(
        of_group(normalized, rewards_G, eps_std=0.0),
        tensor([3.0, -1.0, -1.0, -1.0]) / tensor(3.0).sqrt(),
    )
    assert_close(
        of_group(normalized_positive, rewards_G, eps_std=1 / 16), tensor([1.5, 0.0, 0.0, 0.0])
    )
    assert_close(of_group(leave_one_out, rewards_G), tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    assert_close(of_group(maxrl, rewards_G), tensor([3.0, -1.0, -1.0, -1.0]))
    assert_close(
        of_group(log_mean_exp, rewards_G, strength=0.5),
        rewards_G - 0.5 * tensor((torch.e**2 + 3) / 4).log(),
    )


@pytest.mark.parametrize(
    ("strength", "baseline"), [(1.0, 0.357374), (0.1, 0.861384), (1000.0, 0.250094)]
)
def test_log_mean_exp_lies_between_mean_and_maximum(strength, baseline):
    """OAPL (arXiv 2602.19362): V = b1 log mean e^(r / b1) of the rewards (1, 0, 0, 0)."""
    rewards_G = tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    advantage_G = of_group(log_mean_exp, rewards_G, strength=strength)
    assert_close(rewards_G - advantage_G, torch.full((4,), baseline).double(), atol=5e-7, rtol=0.0)


def test_maxrl_of_a_group_with_a_mean_that_is_not_positive_is_zero():
    assert of_group(maxrl, [-1.0, 0.0, 0.0]).tolist() == [0.0, 0.0, 0.0]
    assert of_group(maxrl, [-1.0, 1.0]).tolist() == [0.0, 0.0]
    # Rounding leaves a mean of 9e-18.
    assert of_group(maxrl, double([0.1, 0.2, -0.3])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        pytest.param([1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3], id="one right"),
        pytest.param([1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, -3.0], id="one wrong"),
        pytest.param([0.0, 0.0], [0.0, 0.0], id="equal"),
        # The mean is .5, up to rounding: that completion is neither.
        pytest.param([0.9, 0.5, 0.1], [1.0, 0.0, -1.0], id="graded"),
    ],
)
def test_sign_balanced_gives_each_sign_the_same_weight(rewards, expected):
    assert_close(of_group(sign_balanced, double(rewards)), double(expected))


def test_normalized_unbiased_divides_by_the_sample_deviation_plus_an_offset():
    rewards_NG = torch.rand(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    differences = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    expected = differences / (rewards_NG.std(dim=1, keepdim=True) + 1e-4)
    x = AdvantageInputs(rewards_NG.flatten(), torch.arange(50).repeat_interleave(7))
    assert_close(normalized_unbiased(x, std_offset=1e-4), expected.flatten())


@pytest.mark.parametrize("G", [2, 3, 7, 16])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize(
    ("advantage", "knobs"),
    [*((f, {}) for f in OF_GROUPS if f is not log_mean_exp), (normalized, {"eps_std": 0.0})],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_equal_rewards_have_advantages_of_exactly_zero(advantage, knobs, value, G):
    rewards_G = torch.full((G,), value)
    assert bool(zero_variance(*in_one_group(rewards_G)).all())
    assert sigma(*in_one_group(rewards_G), 0.0).tolist() == [0.0] * G
    assert of_group(advantage, rewards_G, torch.rand(G), **knobs).tolist() == [0.0] * G


def test_rewards_that_differ_by_the_last_bit_have_variance():
    one = tensor(1.0)
    rewards_G = torch.stack([one, one, torch.nextafter(one, tensor(2.0))])
    assert not bool(zero_variance(*in_one_group(rewards_G)).any())


@pytest.mark.parametrize("advantage", OF_GROUPS, ids=name)
@pytest.mark.parametrize("reward", [0.7, -1.0, 100.0])
def test_advantage_of_a_single_completion_is_zero(advantage, reward):
    assert bool(zero_variance(*in_one_group(tensor([reward]))))
    assert of_group(advantage, [reward]).tolist() == [0.0]


# Several groups


@pytest.mark.parametrize("advantage", OF_GROUPS, ids=name)
def test_advantages_of_a_batch_equal_those_of_each_group_alone(advantage):
    """Groups of different sizes, one of them flat and one alone; the index 2 is unused, and the
    order is mixed."""
    rewards_C = tensor([1.0, 0.0, 2.0, 0.0, 0.0, 2.0, 5.0, 1.0, 0.25, 2.0])
    group_C = tensor([0, 3, 1, 0, 0, 1, 3, 3, 4, 3])
    uniform_C = tensor([0.1, 0.2, 0.3, 0.4, 0.05, 0.6, 0.7, 0.15, 0.9, 0.5])
    expected = torch.empty(10)
    for group in (0, 1, 3, 4):
        members = group_C == group
        expected[members] = of_group(advantage, rewards_C[members], uniform_C[members])
    advantage_C = advantage(AdvantageInputs(rewards_C, group_C, uniform=uniform_C))
    assert_close(advantage_C, expected)
    assert advantage_C[[2, 5]].tolist() == [0.0, 0.0] or advantage is log_mean_exp


@given(rewards_of_a_group)
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards_G):
    others = torch.stack(
        [torch.cat([rewards_G[:i], rewards_G[i + 1 :]]).mean() for i in range(len(rewards_G))]
    )
    assert_close(of_group(leave_one_out, rewards_G), rewards_G - others, atol=1e-3, rtol=1e-4)


# The whole batch

TWO_GROUPS = AdvantageInputs(  # means 1/2 and 2
    rewards=tensor([1.0, 0.0, 4.0, 1.0, 1.0], dtype=torch.float64),
    group=tensor([0, 0, 1, 1, 1]),
    lengths=tensor([1, 2, 1, 3, 1]),
)


def test_batch_scaled_divides_by_the_deviation_of_all_rewards():
    """r - mu = (.5, -.5, 2, -1, -1); all rewards: mean 1.4, variance (.16 + 1.96 + 6.76 + .16 +
    .16)/4 = 2.3."""
    expected = tensor([0.5, -0.5, 2.0, -1.0, -1.0], dtype=torch.float64) / (2.3**0.5 + 1e-4)
    assert_close(batch_scaled(TWO_GROUPS), expected)
    assert_close(batch_scaled(TWO_GROUPS, std_offset=0.0), expected * (2.3**0.5 + 1e-4) / 2.3**0.5)


def test_batch_whitened_centers_and_scales_over_the_tokens_of_the_batch():
    """a = r - mu = (.5, -.5, 2, -1, -1) on 1, 2, 1, 3, 1 tokens: sum .5 - 1 + 2 - 3 - 1 = -2.5,
    mean -2.5/8; squares .25 + .5 + 4 + 3 + 1 = 8.75, less 2.5^2/8: 7.96875, over 7."""
    a_C = tensor([0.5, -0.5, 2.0, -1.0, -1.0], dtype=torch.float64)
    expected = (a_C + 2.5 / 8) / (7.96875 / 7 + 1e-8) ** 0.5
    assert_close(batch_whitened(TWO_GROUPS), expected)
    lengths_C = TWO_GROUPS.lengths
    assert lengths_C is not None
    assert_close((lengths_C * expected).sum(), tensor(0.0).double(), atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("advantage", OF_BATCHES, ids=name)
def test_statistics_of_the_batch_do_not_depend_on_the_order_of_its_completions(advantage):
    order = tensor([3, 0, 4, 2, 1])
    rewards = TWO_GROUPS.rewards
    group = TWO_GROUPS.group
    lengths = TWO_GROUPS.lengths
    assert lengths is not None
    turned = AdvantageInputs(rewards[order], group[order], lengths[order])
    assert_close(advantage(turned), advantage(TWO_GROUPS)[order])


def test_group_of_one_beside_another_in_statistics_of_the_batch_by_hand():
    """Rewards (1, 3), and 102 alone: r - mu = (-1, 1, 0). All rewards have the mean 106/3 and the
    variance (103^2 + 97^2 + 200^2)/9/2 = 3334.33. Of r - mu on 1, 2, 1 tokens the mean is 1/4,
    the variance (25/16 + 2 * 9/16 + 1/16)/3 = 11/12."""
    x = AdvantageInputs(double([1.0, 3.0, 102.0]), tensor([0, 0, 1]), tensor([1, 2, 1]))
    scaled = double([-1.0, 1.0, 0.0]) / (30009 / 9) ** 0.5
    assert_close(batch_scaled(x, std_offset=0.0), scaled)
    whitened = double([-1.25, 0.75, -0.25]) / (11 / 12) ** 0.5
    assert_close(batch_whitened(x, eps_variance=0.0), whitened)


@pytest.mark.parametrize("advantage", OF_BATCHES, ids=name)
def test_batch_of_one_completion_has_no_advantage(advantage):
    x = AdvantageInputs(tensor([100.0]), tensor([0]), tensor([3]))
    assert advantage(x).tolist() == [0.0]


@pytest.mark.parametrize("advantage", OF_BATCHES, ids=name)
def test_batch_of_equal_rewards_has_finite_advantages_of_zero(advantage):
    x = AdvantageInputs(torch.ones(4), tensor([0, 0, 1, 1]), tensor([1, 2, 3, 4]))
    assert advantage(x).tolist() == [0.0] * 4


# RED-Drop


@pytest.mark.parametrize(
    ("rewards", "uniform", "expected"),
    [
        pytest.param(
            [0.0, 1.0, 0.0, 0.0, 0.0],
            [0.1, 0.0, 0.9, 0.2, 0.3],
            [0.0, 0.5, -0.5, 0.0, 0.0],
            id="three of four failures, those with the smallest numbers",
        ),
        pytest.param(
            [0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
            [0.3, 0.0, 0.4, 0.1, 0.5, 0.6],
            [0.0, 0.5, 0.0, 0.5, -0.5, -0.5],
            id="good completions stay though their numbers are the smallest",
        ),
        pytest.param(
            [0.0, 0.5, 1.0],
            [0.0, 0.0, 0.0],
            [-0.5, 0.0, 0.5],
            id="a tie with the mean is not below it, so none is too many",
        ),
        pytest.param(
            [1.0, 1.0, 0.0],
            [0.5, 0.6, 0.0],
            [1 / 3, 1 / 3, -2 / 3],
            id="fewer failures than others, so none is too many",
        ),
    ],
)
def test_red_drop_drops_the_surplus_of_failures(rewards, uniform, expected):
    assert_close(of_group(red_drop, rewards, tensor(uniform)), tensor(expected))


def test_red_drop_ranks_the_random_numbers_of_each_group_by_itself():
    rewards_C = tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    uniform_C = tensor([0.9, 0.8, 0.7, 0.3, 0.1, 0.2])
    x = AdvantageInputs(rewards_C, tensor([0, 0, 0, 1, 1, 1]), uniform=uniform_C)
    assert red_drop(x).tolist() == [0.5, -0.5, 0.0, 0.5, 0.0, -0.5]


def test_red_drop_does_not_count_a_completion_at_the_mean_as_below_it():
    """The mean of .1, .2 and .3 is above .2 by rounding."""
    uniform = double([0.1, 0.5, 0.9])
    assert_close(of_group(red_drop, double([0.1, 0.2, 0.3]), uniform), double([-0.1, 0.0, 0.1]))


@pytest.mark.parametrize(
    "advantage", [partial(batch_scaled, std_offset=0.0), partial(batch_whitened, eps_variance=0.0)]
)
def test_equal_rewards_of_a_whole_batch_have_no_advantage_without_an_offset(advantage):
    assert advantage(one_group(tensor([0.5, 0.5, 0.5]))).tolist() == [0.0, 0.0, 0.0]


def test_red_drop_without_random_numbers_is_rejected():
    with pytest.raises(ValueError, match="red_drop needs a random number"):
        red_drop(one_group(tensor([0.0, 1.0])))


def test_overlong_penalty_falls_over_the_buffer():
    assert_close(
        overlong_penalty(tensor([5, 8, 9, 10]), max_length=10, buffer=2),
        tensor([0.0, 0.0, -0.5, -1.0]),
    )
    with pytest.raises(ValueError, match="overlong_buffer"):
        overlong_penalty(tensor([5]), max_length=10, buffer=11)
