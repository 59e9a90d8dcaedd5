import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.advantages import centered, leave_one_out, normalized, normalized_unbiased, sigma, zero_variance

rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9).map(torch.tensor)


def test_one_success_in_four():
    rewards_G = tensor([1.0, 0.0, 0.0, 0.0])  # mu = 1/4, s0^2 = (9 + 1 + 1 + 1)/64 = 3/16
    assert_close(sigma(rewards_G, 0.0), tensor(3.0).sqrt() / 4)
    assert_close(sigma(rewards_G, 1 / 16), tensor(0.5))
    assert_close(centered(rewards_G), tensor([0.75, -0.25, -0.25, -0.25]))
    assert_close(normalized(rewards_G, 1 / 16), tensor([1.5, -0.5, -0.5, -0.5]))
    assert_close(normalized(rewards_G, 0.0), tensor([3.0, -1.0, -1.0, -1.0]) / tensor(3.0).sqrt())
    assert_close(leave_one_out(rewards_G), tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def test_normalizing_by_the_sample_deviation_is_as_in_trl():
    """(r - mean) / (std + 1e-4) with torch's own std, which divides by G - 1."""
    rewards_NG = torch.rand(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    differences = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    assert_close(normalized_unbiased(rewards_NG, 1e-4), differences / (rewards_NG.std(dim=1, keepdim=True) + 1e-4))
    assert_close(normalized_unbiased(tensor([0.0, 1.0]), 0.0), tensor([-1.0, 1.0]) / tensor(2.0).sqrt())
    assert normalized_unbiased(torch.full((3,), 0.1), 0.0).tolist() == [0.0, 0.0, 0.0]
    assert_close(normalized_unbiased(tensor([0.7]), 1e-4), tensor([0.7]))


def test_the_standard_deviation_is_the_biased_one():
    assert_close(sigma(tensor([0.0, 1.0]), 0.0), tensor(0.5))  # not 0.7071


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize("G", [2, 3, 7, 16])
def test_equal_rewards_have_zero_variance_and_advantages_of_exactly_zero(value, G):
    rewards_G = torch.full((G,), value)
    assert bool(zero_variance(rewards_G))
    assert float(sigma(rewards_G, 0.0)) == 0.0
    for advantage_G in (
        normalized(rewards_G, 0.0),
        normalized(rewards_G, 1e-4),
        centered(rewards_G),
        leave_one_out(rewards_G),
    ):
        assert advantage_G.tolist() == [0.0] * G


def test_rewards_that_differ_by_the_last_bit_have_variance():
    one = tensor(1.0)
    assert not bool(zero_variance(torch.stack([one, one, torch.nextafter(one, tensor(2.0))])))


def test_a_single_completion_keeps_its_reward_and_has_zero_variance():
    rewards_G = tensor([0.7])
    assert bool(zero_variance(rewards_G))
    for advantage_G in (
        normalized(rewards_G, 1e-4),
        normalized(rewards_G, 0.0),
        centered(rewards_G),
        leave_one_out(rewards_G),
    ):
        assert_close(advantage_G, rewards_G)


def test_groups_of_one_size_are_treated_each_on_its_own():
    rewards_NG = tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 2.0, 5.0]])
    assert zero_variance(rewards_NG).tolist() == [False, True, False]
    for function in (centered, leave_one_out, lambda rewards: normalized(rewards, 0.01)):
        assert_close(function(rewards_NG), torch.stack([function(row) for row in rewards_NG]))


@given(rewards_of_a_group)
def test_baselines_balance_and_leave_one_out_is_the_mean_of_the_others(rewards_G):
    G = rewards_G.shape[0]
    if G > 1:
        assert abs(float(centered(rewards_G).double().sum())) <= 1e-4 * (1 + float(rewards_G.abs().max())) * G
        others = torch.stack([torch.cat([rewards_G[:i], rewards_G[i + 1 :]]).mean() for i in range(G)])
        assert_close(leave_one_out(rewards_G), rewards_G - others, atol=1e-3, rtol=1e-4)


@given(rewards_of_a_group, st.randoms())
def test_the_order_of_completions_does_not_matter(rewards_G, random):
    order = list(range(rewards_G.shape[0]))
    random.shuffle(order)
    for function in (centered, leave_one_out, lambda rewards: normalized(rewards, 0.5)):
        assert_close(function(rewards_G)[order], function(rewards_G[order]), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("function", [centered, leave_one_out, zero_variance, lambda rewards: normalized(rewards, 0.1)])
def test_an_empty_group_and_an_unscored_reward_are_refused(function, unchecked):
    with pytest.raises(ValueError, match="G >= 1"):
        function(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="finite"):
        function(tensor([0.0, float("nan")]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", [1e-3, 0.1, 0.4, 0.7, 0.99])
def test_rewards_whose_squares_overflow_are_normalized_like_small_ones(dtype, part):
    largest = torch.finfo(dtype).max ** part
    rewards_G = tensor([1.0, 0.0, 0.0, 0.0], dtype=dtype)
    assert_close(normalized(largest * rewards_G, 0.0), normalized(rewards_G, 0.0))
    assert_close(normalized(-largest * rewards_G, 1e-4), normalized(-rewards_G, 1e-4 / largest / largest))
    assert_close(sigma(largest * rewards_G, 0.0) / largest, sigma(rewards_G, 0.0))


def test_a_negative_variance_floor_is_refused():
    with pytest.raises(ValueError, match=r"eps_std must be at least 0, but is -0.1"):
        normalized(tensor([0.0, 1.0]), -0.1)
