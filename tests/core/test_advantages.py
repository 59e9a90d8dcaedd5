import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.advantages import (
    centered,
    leave_one_out,
    log_mean_exp,
    normalized,
    normalized_unbiased,
    overlong_penalty,
    red_drop,
    sigma,
    zero_variance,
)

ALL = [normalized, normalized_unbiased, centered, leave_one_out, log_mean_exp]
rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9).map(
    torch.tensor
)


def test_one_success_in_four_by_hand():
    rewards_G = tensor([1.0, 0.0, 0.0, 0.0])  # mu = 1/4, s0^2 = (9 + 1 + 1 + 1)/64 = 3/16
    assert_close(sigma(rewards_G, 0.0), tensor(3.0).sqrt() / 4)
    assert_close(centered(rewards_G), tensor([0.75, -0.25, -0.25, -0.25]))
    assert_close(normalized(rewards_G, eps_std=1 / 16), tensor([1.5, -0.5, -0.5, -0.5]))
    assert_close(
        normalized(rewards_G, eps_std=0.0), tensor([3.0, -1.0, -1.0, -1.0]) / tensor(3.0).sqrt()
    )
    assert_close(leave_one_out(rewards_G), tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))
    assert_close(
        log_mean_exp(rewards_G, strength=0.5), rewards_G - 0.5 * tensor((torch.e**2 + 3) / 4).log()
    )


def test_normalized_unbiased_is_trls():
    rewards_NG = torch.rand(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    differences = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    expected = differences / (rewards_NG.std(dim=1, keepdim=True) + 1e-4)
    assert_close(normalized_unbiased(rewards_NG, std_offset=1e-4), expected)


@each("value", [0.0, 0.1, 1 / 3, -7.3, 1e6])
@each("G", [2, 3, 7, 16])
def test_equal_rewards_have_advantages_of_exactly_zero(value, G):
    rewards_G = torch.full((G,), value)
    assert bool(zero_variance(rewards_G))
    assert float(sigma(rewards_G, 0.0)) == 0.0
    found = [f(rewards_G) for f in (normalized, normalized_unbiased, centered, leave_one_out)]
    for advantage_G in [
        *found,
        normalized(rewards_G, eps_std=0.0),
        red_drop(rewards_G, torch.rand(G)),
    ]:
        assert advantage_G.tolist() == [0.0] * G


def test_rewards_that_differ_by_the_last_bit_have_variance():
    one = tensor(1.0)
    assert not bool(zero_variance(torch.stack([one, one, torch.nextafter(one, tensor(2.0))])))


@each("advantage", ALL)
def test_single_completion_keeps_its_reward(advantage):
    assert bool(zero_variance(tensor([0.7])))
    assert_close(advantage(tensor([0.7])), tensor([0.7]))


@each("advantage", ALL)
def test_advantages_of_a_batch_equal_those_of_each_group_alone(advantage):
    rewards_NG = tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 5.0]])
    assert_close(advantage(rewards_NG), torch.stack([advantage(row) for row in rewards_NG]))


@given(rewards_of_a_group)
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards_G):
    others = torch.stack(
        [torch.cat([rewards_G[:i], rewards_G[i + 1 :]]).mean() for i in range(len(rewards_G))]
    )
    assert_close(leave_one_out(rewards_G), rewards_G - others, atol=1e-3, rtol=1e-4)


def test_red_drop_drops_the_surplus_of_failures_with_the_smallest_random_numbers():
    rewards_G = tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    assert red_drop(rewards_G, tensor([0.1, 0.0, 0.9, 0.2, 0.3])).tolist() == [
        0.0,
        0.5,
        -0.5,
        0.0,
        0.0,
    ]
    tie = tensor([0.0, 0.5, 1.0])  # a tie with the mean is not below it: none is too many
    assert_close(red_drop(tie, torch.zeros(3)), tie - 0.5)


def test_overlong_penalty_falls_over_the_buffer():
    assert_close(
        overlong_penalty(tensor([5, 8, 9, 10]), max_length=10, buffer=2),
        tensor([0.0, 0.0, -0.5, -1.0]),
    )
    with pytest.raises(ValueError, match="overlong_buffer"):
        overlong_penalty(tensor([5]), max_length=10, buffer=11)
