from itertools import combinations
from math import comb

import pytest
import torch
from torch import tensor

from lagrpo.core.estimators import (
    _student,
    bootstrap_interval,
    clustered_interval,
    paired_interval,
    pass_at_k,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, c, k):
    completions = [True] * c + [False] * (n - c)
    subsets = list(combinations(completions, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased():
    n, k, p = 10, 4, 0.3
    expected = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_at_the_edges_and_at_large_n():
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 1, 5) == 1.0
    assert pass_at_k(50, 10, 1) == 0.2
    assert pass_at_k(100_000, 1, 1) == 1e-5
    assert pass_at_k(10_000, 5_000, 100) == 1.0  # 1 - 4.6e-31


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match=f"n = {n}, c = {c}, k = {k}"):
        pass_at_k(n, c, k)


def test_wilson_by_hand():
    # z = 1.959964: 9 of 10: (.9 + z^2/20 -+ z sqrt(.009 + z^2/400)) / (1 + z^2/10)
    assert wilson_interval(9, 10) == pytest.approx((0.595850, 0.982124), abs=1e-6)
    low, high = wilson_interval(0, 20)
    assert low == 0.0
    assert high == pytest.approx(0.161125, abs=1e-6)
    assert wilson_interval(20, 20) == pytest.approx((1 - high, 1.0))


def test_wilson_covers_on_average_over_p():
    n = 40
    intervals = [wilson_interval(c, n) for c in range(n + 1)]
    coverage = []
    for p in [i / 200 for i in range(1, 200)]:
        inside = [c for c, (low, high) in enumerate(intervals) if low <= p <= high]
        coverage.append(sum(comb(n, c) * p**c * (1 - p) ** (n - c) for c in inside))
    assert sum(coverage) / len(coverage) == pytest.approx(0.95, abs=0.006)
    assert min(coverage) > 0.83


def test_bootstrap_is_a_function_of_its_seed_and_matches_the_normal_interval():
    values_N = torch.rand(400, generator=torch.Generator().manual_seed(1))
    low, high = bootstrap_interval(values_N, seed=3)
    assert (low, high) == bootstrap_interval(values_N, seed=3)
    assert (low, high) != bootstrap_interval(values_N, seed=4)
    half = 1.96 * float(values_N.std()) / 20
    assert low == pytest.approx(float(values_N.mean()) - half, abs=0.1 * half)
    assert high == pytest.approx(float(values_N.mean()) + half, abs=0.1 * half)


def test_bootstrap_covers_the_mean():
    generator, covered = torch.Generator().manual_seed(0), 0
    for trial in range(400):
        low, high = bootstrap_interval(torch.rand(60, generator=generator) ** 2, resamples=400, seed=trial)
        covered += low <= 1 / 3 <= high
    assert covered / 400 == pytest.approx(0.95, abs=0.035)  # three standard errors of 400 trials


def test_bootstrap_of_equal_values_has_no_width():
    assert bootstrap_interval(tensor([0.5, 0.5, 0.5])) == (0.5, 0.5)


def test_bad_arguments_are_refused(unchecked):
    with pytest.raises(ValueError, match="N >= 1"):
        bootstrap_interval(torch.zeros(0))
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, but is 95"):
        bootstrap_interval(torch.zeros(3), confidence=95)
    with pytest.raises(ValueError, match="5 of 4"):
        wilson_interval(5, 4)


def covered(intervals: list[tuple[float, float]], truth: float) -> float:
    return sum(low <= truth + 1e-12 and truth <= high + 1e-12 for low, high in intervals) / len(intervals)


@pytest.mark.usefixtures("unchecked")  # thousands of intervals
@pytest.mark.parametrize(
    ("mean", "least", "bootstrap"), [(0.18, 0.93, 0.94), (0.9, 0.89, 0.92), (0.97, 0.84, 0.80), (0.99, 0.92, 0.60)]
)
def test_the_interval_of_pass_at_1_covers_at_20_prompts_of_16_samples(mean, least, bootstrap):
    """1,000 evaluations; the bootstrap, beside it, covers at most the last number."""
    torch.manual_seed(0)
    hardness = torch.distributions.Beta(tensor(1.5 * mean).double(), tensor(1.5 * (1 - mean)).double())
    evaluations = torch.binomial(tensor(16.0).double().expand(1_000, 20), hardness.sample((1_000, 20))) / 16
    assert least <= covered([clustered_interval(values_N, 16.0) for values_N in evaluations], mean) <= 0.985
    resampled = [bootstrap_interval(values_N, resamples=200, seed=n) for n, values_N in enumerate(evaluations[:300])]
    assert covered(resampled, mean) <= bootstrap


@pytest.mark.usefixtures("unchecked")  # thousands of intervals
@pytest.mark.parametrize(("before", "after"), [(-2.0, -1.5), (-2.0, 3.0), (0.0, 0.0), (3.0, 5.0)])
def test_the_interval_of_the_paired_change_covers_and_is_narrower_than_two(before, after):
    """50 prompts with 16 samples. The log-odds of a prompt are normal around these, and correlated .8 between before
    and after; 1,000 pairs of evaluations."""
    torch.manual_seed(1)
    latent, other = torch.randn(2, 1_000, 50, dtype=torch.float64)
    odds = torch.stack([before + 2 * latent, after + 2 * (0.8 * latent + 0.6 * other)])
    truth = mean_of_sigmoid(after, 2.0) - mean_of_sigmoid(before, 2.0)
    first, second = torch.binomial(tensor(16.0).double().expand(2, 1_000, 50), odds.sigmoid()) / 16
    pairs = list(zip(first, second, strict=True))
    intervals = [paired_interval(b, a, 16.0) for b, a in pairs]
    assert 0.91 <= covered(intervals, truth) <= 0.985
    separate = [clustered_interval(a, 16.0)[1] - clustered_interval(b, 16.0)[0] for b, a in pairs]
    assert all(high < apart for (_, high), apart in zip(intervals, separate, strict=True))


def mean_of_sigmoid(mean: float, deviation: float) -> float:
    """E sigmoid(x) for normal x, by the trapezoidal rule, whose error is far below what a thousand draws can tell."""
    z = torch.linspace(-8.0, 8.0, 1601, dtype=torch.float64)
    density = (-z.square() / 2).exp()
    return float((density * (mean + deviation * z).sigmoid()).sum() / density.sum())


def test_clustered_intervals_at_their_ends(unchecked):
    """All right: as wide as if every prompt were one try. Prompts equally hard: as narrow as if all tries were free."""
    t = _student(19, 0.95)
    assert t == pytest.approx(2.093, abs=1e-3)
    low, high = clustered_interval(torch.ones(20), 16.0)
    assert high == 1.0
    assert low == pytest.approx(1 / (1 + t * t / 20), abs=1e-9)
    low, high = clustered_interval(torch.full((20,), 0.5), 16.0)
    assert high - low == pytest.approx(t / (320 + t * t) ** 0.5, abs=1e-9)
    assert paired_interval(torch.ones(20), torch.ones(20), 16.0)[1] == pytest.approx(t * t / (20 + t * t), abs=1e-9)
    with pytest.raises(ValueError, match=r"value in \[0, 1\]"):
        clustered_interval(tensor([0.5, 1.5]), 4.0)
    with pytest.raises(ValueError, match="same prompts"):
        paired_interval(torch.ones(3), torch.ones(4), 2.0)
