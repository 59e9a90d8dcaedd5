"""The weight-sync check on hand-worked log-probs, and against a sampler that computes as the trainer does."""

from __future__ import annotations

import math

import pytest
import torch
from test_sampling import requests_for
from tiny import tiny_policy

from lagrpo.model.model import Packed, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.parity import ParityCheck, ParityError, check_fresh

NOISE = torch.tensor([0.03, -0.02, 0.04, -0.03]).repeat(8)
OLD = torch.linspace(-3, -0.1, 32)


def test_a_stale_server_is_told_by_its_scores_alone():
    """The policy moved by .2 a token, seven times the noise: all 32 tokens tell, and 2^-32 is no chance."""
    new = OLD + 0.2
    assert check_fresh(OLD, new, OLD + NOISE, new - NOISE, "v") == 32
    with pytest.raises(ParityError, match=r"stale weights: of the 32 tokens that tell old from new, 32 are nearer"):
        check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v")


def test_what_the_noise_hides_is_not_decided():
    """A move of .001 a token cannot be told from noise of .03: nearer to the old by chance is no error."""
    new = OLD + 0.001
    assert check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v") == 0


def test_a_few_wild_tokens_decide_nothing():
    """Three tokens that became unlikely are scored far off, toward the old: by squares the old would be nearer."""
    new, now = OLD + 0.2, OLD + 0.2 - NOISE
    now[:3] = new[:3] - 1.5
    assert float((now - OLD).square().sum()) < float((now - new).square().sum())
    assert check_fresh(OLD, new, OLD + NOISE, now, "v") == 32


def test_nineteen_tokens_are_too_few_to_say():
    old, new = OLD[:19], OLD[:19] + 0.2
    assert check_fresh(old, new, old + NOISE[:19], old - NOISE[:19], "v") == 19


def test_scores_that_did_not_change_at_all_are_stale_whatever_the_noise():
    with pytest.raises(ParityError, match=r"did not change at all with the weight sync"):
        check_fresh(OLD, OLD + 1e-6, OLD + NOISE, OLD + NOISE, "v")
    assert check_fresh(OLD, OLD, OLD + NOISE, OLD + NOISE, "v") == 0.0  # nor did the policy


class Echo:
    """A sampler whose server computes as the learner does, shifted by `shift` nats, at the temperature `tau`."""

    def __init__(self, policy, shift=0.0, tau=None):
        self.policy, self.shift, self.tau = policy, shift, tau or policy.tau
        self.servers, self.version = ["the server"], policy.version

    def describe_versions(self):
        return f"the server: {self.version}"

    def generate_on_server(self, number, requests, G, max_tokens):
        return LocalSampler(copy_policy(self.policy), 0, max_tokens, 8, tau=self.tau).generate_on_server(
            0, requests, G, max_tokens
        )

    def scores(self, items):
        packed = Packed.build([(ids, [torch.tensor(tokens)]) for ids, tokens in items])
        with torch.no_grad():
            logp = (self.policy.model(packed, tau=1.0) + self.shift).tolist()
        return [[[logp.pop(0) for _ in tokens] for _, tokens in items]]


def test_the_parity_check_passes_what_agrees_and_says_by_how_much():
    policy = tiny_policy(tau=0.7)
    metrics = ParityCheck(requests_for(policy, 3), torch.bfloat16)(policy, Echo(policy, shift=0.05))
    assert metrics["parity_mean"] == pytest.approx(0.05, abs=1e-5)
    assert metrics["parity_kl"] == pytest.approx(math.expm1(-0.05) + 0.05, abs=1e-5)
    assert policy.tau == 0.7


def test_the_compared_tokens_are_renewed_when_the_policy_has_moved_away_from_them():
    """Batch 0's completions have one address: what is generated again differs because the policy does."""
    policy = tiny_policy()
    check = ParityCheck(requests_for(policy, 3), torch.float32)
    check(policy, Echo(policy))
    first = check._items
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    check(policy, Echo(policy))
    assert check._items is first
    with torch.no_grad():
        policy.model.head.weight.copy_(-policy.model.head.weight)
    check(policy, Echo(policy))
    assert check._items is not first
    assert check._items != first


def test_the_parity_check_refuses_other_weights_and_log_probs_of_another_temperature():
    policy = tiny_policy(tau=0.7)
    check = ParityCheck(requests_for(policy, 3), torch.bfloat16)
    with pytest.raises(ParityError, match=r"more than the tolerance of 0.1"):
        check(policy, Echo(policy, shift=0.11))
    with pytest.raises(ParityError, match=r"another temperature"):
        ParityCheck(requests_for(policy, 3), torch.float32)(policy, Echo(policy, tau=1.0))
