"""The weight-sync check: it passes with the policy's weights, however they are rounded, and stops with any other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_sampling import request, requests_for
from tiny import tiny_policy

from lagrpo.model.model import Model, Packed, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.sync_check import WeightSyncCheck, WeightSyncError, check_fresh

either_computation = pytest.mark.usefixtures("either_computation")


def build_check(policy) -> WeightSyncCheck:
    requests = [request(key, f"{key}+{key}=", batch=0, policy=policy) for key in range(8)]
    return WeightSyncCheck(requests, policy.dtype)


def checked(policy) -> tuple[LocalSampler, WeightSyncCheck]:
    """A sampler of the policy, and a weight-sync check that has found their grade."""
    sampler, check = LocalSampler(copy_policy(policy), 0, 16, 64), build_check(policy)
    check.start(policy, sampler)
    return sampler, check


@either_computation
def test_the_grade_is_exact_if_all_products_are_ours():
    """Exact where all products are ours, and compared; else close, with what was measured."""
    policy = tiny_policy(dtype=torch.bfloat16, tau=0.7)
    sampler, check = checked(policy)
    assert check.agreement is not None
    assert check.agreement.grade == ("exact" if policy.model.exact else "close")
    assert check.agreement.tokens > 60
    assert check(policy, sampler)["logp_difference_mean"] <= check.agreement.mean + 1e-3
    _, check = checked(tiny_policy())
    assert check.agreement is not None
    assert check.agreement.grade == "close"
    assert check.agreement.largest < 1e-4
    assert "products of float32 are PyTorch's here" in str(check.agreement)


@either_computation
def test_a_sampler_that_should_agree_to_the_bit_and_does_not_is_close(monkeypatch):
    policy = tiny_policy(dtype=torch.bfloat16, backend="c")
    logits = Model.logits
    monkeypatch.setattr(Model, "logits", lambda self, hidden: logits(self, hidden) * (1 + 2**-7))
    sampler, check = checked(policy)
    assert check.agreement is not None
    assert check.agreement.grade == "close"
    assert "please report this processor" in str(check.agreement)
    assert 0 < check(policy, sampler)["logp_difference_mean"] < 0.1


@either_computation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_stops_on_other_weights_and_another_version(dtype):
    policy = tiny_policy(dtype=dtype)
    sampler, check = checked(policy)
    for version in (1, 2):
        policy.weights.version = version
        reports = f"version {version} was synced, but .* the in-process sampler: {version - 1}"
        with pytest.raises(WeightSyncError, match=reports):
            check(policy, sampler)
        with torch.no_grad():
            policy.model.head.weight.mul_(1.05)
        sampler.sync_weights(policy.weights, version)
        assert check(policy, sampler)["logp_difference_max"] < 0.1
    with torch.no_grad():
        policy.model.head.weight.mul_(1.05)
    policy.weights.version = sampler.policy.weights.version = 3  # says so, and has the weights of before
    with pytest.raises(WeightSyncError, match=r"serves other weights|did not load the new weights"):
        check(policy, sampler)
    with torch.no_grad():
        policy.model.head.weight.fill_(torch.nan)
    with pytest.raises(WeightSyncError, match="it has diverged"):
        check(policy, sampler)


@either_computation
def test_an_update_smaller_than_the_noise_passes_and_stale_weights_do_not():
    """The grade close, with the noise of coarse logits: a weight sync that was made passes, one that was not is
    told."""
    policy = tiny_policy(dtype=torch.bfloat16, backend="torch")
    noisy = copy_policy(policy)
    rng = torch.Generator().manual_seed(0)
    logits, scale = noisy.model.logits, 0.004
    noisy.model.logits = lambda hidden: (x := logits(hidden)) + scale * torch.randn(x.shape, generator=rng).to(x)
    sampler = LocalSampler(noisy, 0, 16, 64)
    check = build_check(policy)
    assert "close" in str(check.start(policy, sampler))
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.add_(0.005 * torch.randn(parameter.shape, generator=rng).to(parameter))
        policy.weights.version = version
        if version < 5:
            sampler.sync_weights(policy.weights, version)
            assert check(policy, sampler)["logp_difference_mean"] < 0.1
    noisy.weights.version = 5
    with pytest.raises(WeightSyncError, match="is still serving stale weights"):
        check(policy, sampler)


# ---- servers, on hand-worked log-probs ----

NOISE = torch.tensor([0.03, -0.02, 0.04, -0.03]).repeat(8)
OLD = torch.linspace(-3, -0.1, 32)


def test_a_stale_server_is_found_by_its_scores():
    """The policy moved by .2 a token, seven times the noise: all 32 tokens tell."""
    new = OLD + 0.2
    assert check_fresh(OLD, new, OLD + NOISE, new - NOISE, "v") == 32
    with pytest.raises(WeightSyncError, match=r"stale weights: of the 32 tokens that tell old from new, 32 are nearer"):
        check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v")


def test_an_update_below_the_noise_is_inconclusive():
    """A move of .001 a token cannot be told from noise of .03: nearer to the old by chance is no error."""
    new = OLD + 0.001
    assert check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v") == 0


def test_a_few_wild_tokens_decide_nothing():
    """Three tokens that became unlikely are scored far off, toward the old: by squares the old would be nearer."""
    new, now = OLD + 0.2, OLD + 0.2 - NOISE
    now[:3] = new[:3] - 1.5
    assert float((now - OLD).square().sum()) < float((now - new).square().sum())
    assert check_fresh(OLD, new, OLD + NOISE, now, "v") == 32


def test_nineteen_tokens_are_inconclusive():
    old, new = OLD[:19], OLD[:19] + 0.2
    assert check_fresh(old, new, old + NOISE[:19], old - NOISE[:19], "v") == 19


def test_unchanged_scores_are_stale_whatever_the_noise():
    with pytest.raises(WeightSyncError, match=r"did not change at all with the weight sync"):
        check_fresh(OLD, OLD + 1e-6, OLD + NOISE, OLD + NOISE, "v")
    assert check_fresh(OLD, OLD, OLD + NOISE, OLD + NOISE, "v") == 0.0  # nor did the policy


def echo(policy, shift=0.0, tau=None) -> Any:
    return Echo(policy, shift, tau or policy.tau)


class Echo:
    """A sampler whose server computes as the trainer does, shifted by `shift` nats, at the temperature `tau`."""

    def __init__(self, policy, shift, tau):
        self.policy, self.shift, self.tau = policy, shift, tau
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


def test_a_server_within_the_tolerance_passes():
    policy = tiny_policy(tau=0.7)
    metrics = WeightSyncCheck(requests_for(policy, 3), torch.bfloat16)(policy, echo(policy, shift=0.05))
    assert metrics["logp_difference_mean"] == pytest.approx(0.05, abs=1e-5)
    assert metrics["logp_difference_kl"] == pytest.approx(math.expm1(-0.05) + 0.05, abs=1e-5)
    assert policy.tau == 0.7


def test_compared_tokens_are_renewed_once_they_are_unlikely():
    """Batch 0's completions have one address: what is generated again differs because the policy does."""
    policy = tiny_policy()
    check = WeightSyncCheck(requests_for(policy, 3), torch.float32)
    check(policy, echo(policy))
    first = check._items
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    check(policy, echo(policy))
    assert check._items is first
    with torch.no_grad():
        policy.model.head.weight.copy_(-policy.model.head.weight)
    check(policy, echo(policy))
    assert check._items is not first
    assert check._items != first


def test_other_weights_and_log_probs_of_another_temperature_stop_the_run():
    policy = tiny_policy(tau=0.7)
    check = WeightSyncCheck(requests_for(policy, 3), torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"more than the tolerance of 0.1"):
        check(policy, echo(policy, shift=0.11))
    with pytest.raises(WeightSyncError, match=r"another temperature"):
        WeightSyncCheck(requests_for(policy, 3), torch.float32)(policy, echo(policy, tau=1.0))
