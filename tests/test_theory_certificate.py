import pytest
import torch
from theory.certificate import capped_gain, certified_improvement
from torch import tensor

from lagrpo.core.bounds import mean_reward

pytestmark = pytest.mark.experiments


@pytest.mark.parametrize("cap", [1.0, 1.5, 4.0])
def test_the_capped_gain_is_a_bound_and_lacks_at_most_the_probability_beyond_the_cap(cap):
    generator = torch.Generator().manual_seed(4)
    # Exponential numbers divided by their sum are uniform on the simplex.
    exponential = -torch.rand(2, 20_000, 4, generator=generator, dtype=torch.float64).log()
    pi, alpha = exponential / exponential.sum(dim=-1, keepdim=True)
    r = torch.rand(20_000, 4, generator=generator, dtype=torch.float64)
    missing = mean_reward(pi, r) - mean_reward(alpha, r) - capped_gain(pi, alpha, r, cap)
    assert float(missing.min()) >= -1e-9  # rounding
    # The probability under pi of outcomes whose ratio is cut.
    beyond = torch.where(pi > cap * alpha, pi, 0.0).sum(dim=-1)
    assert bool((missing <= beyond + 1e-9).all())
    assert bool((missing[beyond == 0].abs() <= 1e-9).all())


def test_a_certificate_worked_by_hand():
    """z = (min(rho, 2) - 1) r = 1, 0, -.5, 0: mean .125, variance .296875, ln(2/.1) = 2.995732."""
    rewards = tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    ratio = tensor([[3.0, 5.0], [0.5, 1.0]], dtype=torch.float64)
    many = [x.repeat(100, 1) for x in (rewards, ratio.log())]
    # n = 400: variance .296875 * 400/399; .125 - sqrt(2 .297619 2.995732 / 400) - 14 2.995732 /
    # 1197
    assert float(certified_improvement(*many, cap=2.0, delta=0.1)) == pytest.approx(
        0.0231944, abs=1e-6
    )
    # n = 200 means of a group, .5 and -.25: variance .140625 * 200/199
    groups = certified_improvement(*many, cap=2.0, delta=0.1, prompts="drawn")
    assert float(groups) == pytest.approx(-0.0103202, abs=1e-6)
    assert float(certified_improvement(rewards, ratio.log(), cap=2.0, delta=0.1)) == -1.0  # vacuous
