"""At pi = pi_k = alpha, with completions of one and two tokens: whose expected gradient is still along grad J?

The first of three tokens ends the completion at once, the others are followed by a second: seven completions. The
batch is one completion, so that a mean over its tokens is a mean over the completion's."""

import pytest
import torch
from torch import Tensor, tensor

from lagrpo.core.loss import Terms
from lagrpo.objective.recipes import PRESETS, resolve

ALPHA = tensor([0.1, -1.4, 0.8, 0.1, 1.1, -1.2, -1.7, 0.4, -0.2, 1.0, 0.3, 0.5], dtype=torch.float64)
REWARD = tensor([0.8, 0.4, 0.3, 0.9, 1.0, 1.0, 0.8], dtype=torch.float64)
OF_A_REWARD_OF_THEIR_OWN = {"red_weight", "opmd_kimi", "opmd_pairwise"}
EXACT = {"rloo", "dr_grpo", "topr", "unclipped"}


def token_logp(theta: Tensor) -> list[Tensor]:
    first = torch.log_softmax(theta[:3], dim=0)
    second = torch.log_softmax(theta[:3] + theta[3:].view(3, 3), dim=1)
    return [first[:1]] + [torch.stack([first[i], second[i, j]]) for i in (1, 2) for j in range(3)]


def mean_reward(theta: Tensor) -> Tensor:
    return (torch.stack([logp_T.sum() for logp_T in token_logp(theta)]).exp() * REWARD).sum()


def gradient(function) -> Tensor:
    theta = ALPHA.clone().requires_grad_()
    return torch.autograd.grad(function(theta), theta)[0]


def cosine(name: str, **overrides) -> float:
    """Of the recipe's expected gradient at alpha, its reduction included, to grad J."""
    recipe, generated = resolve(name, overrides), token_logp(ALPHA)

    def expectation(theta: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for logp_T, alpha_T, r in zip(token_logp(theta), generated, REWARD, strict=True):
            index, advantage = torch.zeros(1).long(), (r - mean_reward(ALPHA))[None]
            terms = Terms(logp_T, alpha_T, alpha_T, alpha_T, index.expand(len(logp_T)), advantage, index)
            weight = recipe.weights(tensor([len(logp_T)]), tensor([False]), 2).double()
            total = total + alpha_T.sum().exp() * (weight * recipe.value(terms)).sum()
        return total

    found, exact = gradient(expectation), gradient(mean_reward)
    return float(found @ exact / found.norm() / exact.norm())


@pytest.mark.parametrize("name", sorted(set(PRESETS) - OF_A_REWARD_OF_THEIR_OWN))
def test_lengths_turn_the_gradient_of_means_over_tokens_and_of_nothing_else(name):
    assert (cosine(name) > 1 - 1e-12) == (name in EXACT), name


def test_how_far_they_turn_it():
    assert cosine("grpo") == pytest.approx(0.9326, abs=5e-5)
    assert cosine("gspo") == pytest.approx(0.9326, abs=5e-5)
    for reduction in ("sequence_sum", "constant_length"):
        assert cosine("grpo", reduction=reduction) == pytest.approx(1.0, abs=1e-12)
