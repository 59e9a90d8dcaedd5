"""pass@k by counting subsets, and how often the intervals cover."""

from itertools import combinations
from math import comb

import pytest
import torch
from torch import tensor

from lagrpo.core.estimators import (
    bootstrap_interval,
    clustered_interval,
    paired_interval,
    pass_at_k,
    student_quantile,
)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in (1, 4, 7) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, c, k):
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased_and_exact_for_large_numbers():
    n = 10
    k = 4
    p = 0.3
    expected = sum(
        comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert pass_at_k(100_000, 1, 1) == 1e-5
    assert pass_at_k(10_000, 5_000, 100) == 1.0  # 1 - 4.6e-31


def test_bootstrap_is_a_function_of_its_seed_and_matches_the_normal_interval():
    values_N = torch.rand(400, generator=torch.Generator().manual_seed(1))
    low, high = bootstrap_interval(values_N, seed=3)
    assert (
        (low, high) == bootstrap_interval(values_N, seed=3) != bootstrap_interval(values_N, seed=4)
    )
    half = 1.96 * float(values_N.std()) / 20
    assert low == pytest.approx(float(values_N.mean()) - half, abs=0.1 * half)
    assert high == pytest.approx(float(values_N.mean()) + half, abs=0.1 * half)
    assert bootstrap_interval(tensor([0.5, 0.5, 0.5])) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("confidence", "table"),
    [
        (0.95, {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 120: 1.9799}),
        (0.99, {1: 63.6567, 2: 9.9248, 3: 5.8409, 4: 4.6041, 9: 3.2498, 10: 3.1693, 120: 2.6174}),
    ],
)
def test_student_quantiles_equal_the_two_sided_ones_of_scipy(confidence, table):
    """scipy.stats.t.ppf((1 + confidence) / 2, degrees)."""
    assert {n: round(student_quantile(n, confidence), 4) for n in table} == table


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        # p = 1/2, n = 2, t = 12.70620: 1/2 -+ t / (2 sqrt(n + t^2))
        pytest.param([1.0, 0.0], 0.0030684, 0.9969316, id="2 prompts, one solved"),
        # p = 1, n = 3, t = 4.302653: from n / (n + t^2)
        pytest.param([1.0, 1.0, 1.0], 0.1394518, 1.0, id="3 prompts, all solved"),
    ],
)
def test_clustered_interval_of_few_prompts_has_students_quantile(values, low, high):
    assert clustered_interval(tensor(values), 1.0) == pytest.approx((low, high), abs=1e-6)


def test_clustered_interval_at_its_ends():
    """All right: as wide as if every prompt were one try. Prompts equally hard: as narrow as if all
    tries were free."""
    t = 2.0933  # Student's t with 19 degrees of freedom, 95 %
    low, high = clustered_interval(torch.ones(20), 16.0)
    assert (low, high) == (pytest.approx(1 / (1 + t * t / 20), abs=1e-3), 1.0)
    low, high = clustered_interval(torch.full((20,), 0.5), 16.0)
    assert high - low == pytest.approx(t / (320 + t * t) ** 0.5, abs=1e-4)
    assert paired_interval(torch.ones(20), torch.ones(20), 16.0)[1] == pytest.approx(
        t * t / (20 + t * t), abs=1e-3
    )


def test_clustered_interval_of_nearly_equal_prompts_counts_no_more_tries_than_there_are():
    """Values of 0.49 and 0.51 vary less than 320 tries of one prompt would."""
    values_N = tensor([0.49, 0.51]).repeat(10)
    low, high = clustered_interval(values_N, 16.0)
    t = 2.0933
    assert high - low == pytest.approx(t / (320 + t * t) ** 0.5, abs=1e-4)


def covered(intervals: list[tuple[float, float]], truth: float) -> float:
    return sum(low <= truth + 1e-12 and truth <= high + 1e-12 for low, high in intervals) / len(
        intervals
    )


@pytest.mark.parametrize(
    ("mean", "at_least", "bootstrap"), [(0.18, 0.93, 0.94), (0.97, 0.84, 0.80)]
)
def test_interval_of_pass_at_1_covers_at_20_prompts_of_16_samples(mean, at_least, bootstrap):
    """1,000 evaluations; the bootstrap covers at most the last number."""
    torch.manual_seed(0)
    # 1.5 is small: most prompts are nearly always solved, or nearly never.
    hardness = torch.distributions.Beta(
        tensor(1.5 * mean).double(), tensor(1.5 * (1 - mean)).double()
    )
    evaluations = (
        torch.binomial(tensor(16.0).double().expand(1_000, 20), hardness.sample((1_000, 20))) / 16
    )
    assert (
        at_least
        <= covered([clustered_interval(values_N, 16.0) for values_N in evaluations], mean)
        <= 0.985
    )
    resampled = [
        bootstrap_interval(values_N, resamples=200, seed=n)
        for n, values_N in enumerate(evaluations[:300])
    ]
    assert covered(resampled, mean) <= bootstrap


def test_interval_of_a_paired_change_covers_and_is_narrower_than_two():
    """50 prompts with 16 samples, 1,000 pairs of evaluations; the log-odds of a prompt are
    correlated .8."""
    torch.manual_seed(1)
    latent, other = torch.randn(2, 1_000, 50, dtype=torch.float64)
    # .8^2 + .6^2 = 1: the second log-odds have the same spread, and a correlation of .8 with the
    # first.
    odds = torch.stack([-2 + 2 * latent, -1.5 + 2 * (0.8 * latent + 0.6 * other)])
    z = torch.randn(1_000_000, dtype=torch.float64)
    truth = float(((-1.5 + 2 * z).sigmoid() - (-2 + 2 * z).sigmoid()).mean())
    first, second = torch.binomial(tensor(16.0).double().expand(2, 1_000, 50), odds.sigmoid()) / 16
    intervals = [paired_interval(b, a, 16.0) for b, a in zip(first, second, strict=True)]
    assert 0.91 <= covered(intervals, truth) <= 0.985
    separate = [
        clustered_interval(a, 16.0)[1] - clustered_interval(b, 16.0)[0]
        for b, a in zip(first, second, strict=True)
    ]
    assert all(high < apart for (_, high), apart in zip(intervals, separate, strict=True))
