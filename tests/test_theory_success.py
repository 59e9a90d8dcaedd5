from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory.success import amplified, fixed_points, slope, tilted, trajectory
from torch import tensor

pytestmark = pytest.mark.experiments

EPS = 1e-4


def test_the_first_iterations_at_beta_one():
    p = trajectory(p_ref=0.05, beta=1.0, eps_std=EPS, iterations=60)
    assert p[1:4] == pytest.approx([0.8374, 0.4414, 0.2827], abs=5e-5)
    assert p[-1] == pytest.approx(0.3126, abs=5e-5)
    assert p[1] > p[2] > p[3] < p[4]  # not monotone


@pytest.mark.parametrize(
    ("beta", "p_ref", "expected"),
    [
        (1.0, 0.05, 0.3126),
        (2.0, 0.05, 0.1673),
        (2.0, 0.2, 0.4087),
        (2.0, 0.5, 0.7646),
        (5.0, 0.05, 0.0944),
        (5.0, 0.2, 0.2806),
    ],
)
def test_iterations_converge_to_the_fixed_point(beta, p_ref, expected):
    (p, stable), *_ = fixed_points(p_ref, beta, EPS)
    assert p == pytest.approx(expected, abs=5e-5)
    assert stable
    assert amplified(p, p_ref, beta, EPS) == pytest.approx(p, abs=1e-12)
    assert trajectory(p_ref, beta, EPS, 200)[-1] == pytest.approx(p, abs=1e-6)


def test_small_variance_floor_makes_success_1_a_stable_fixed_point():
    low, middle, high = fixed_points(0.05, 1.0, EPS)
    assert [point[1] for point in (low, middle, high)] == [True, False, True]
    assert middle[0] == pytest.approx(0.97738, abs=1e-5)
    assert high[0] == 1.0
    above = below = middle[0]
    above = above + 1e-3
    below = below - 1e-3
    for _ in range(200):
        above = amplified(above, 0.05, 1.0, EPS)
        below = amplified(below, 0.05, 1.0, EPS)
    assert above == pytest.approx(1.0)
    assert below == pytest.approx(low[0])


probabilities = st.floats(0.01, 0.99)


@given(probabilities, probabilities, st.floats(0.3, 20))
def test_success_of_every_iteration_exceeds_the_reference(p, p_ref, beta):
    assert amplified(p, p_ref, beta, EPS) > p_ref
    assert all(fixed > p_ref for fixed, _ in fixed_points(p_ref, beta, EPS, cells=200))


@given(probabilities, probabilities, st.floats(0.3, 20))
def test_slope_equals_the_numerical_derivative(p, p_ref, beta):
    # Central differences: their error is of the order of step^2, rounding of 1e-16 / step.
    step = 1e-6
    difference = amplified(p + step, p_ref, beta, EPS) - amplified(p - step, p_ref, beta, EPS)
    assert slope(p, p_ref, beta, EPS) == pytest.approx(difference / (2 * step), abs=1e-5, rel=1e-4)


@given(probabilities, probabilities, st.floats(0.3, 20))
def test_h_equals_the_success_of_an_exponential_tilt(p, p_ref, beta):
    """Four outcomes, two of them right; pi_old succeeds with p, the reference with p_ref."""
    reward = tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    reference = tensor(
        [0.3 * p_ref, 0.7 * p_ref, 0.4 * (1 - p_ref), 0.6 * (1 - p_ref)], dtype=torch.float64
    )
    advantage = (reward - p) / sqrt(p * (1 - p) + EPS)
    success = tilted(reference, advantage, beta)[:2].sum()
    assert float(success) == pytest.approx(amplified(p, p_ref, beta, EPS), rel=1e-9)
