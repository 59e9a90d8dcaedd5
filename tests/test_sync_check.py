"""The weight-sync check: it passes with the policy's weights, however they are rounded, and stops
with any other."""

from __future__ import annotations

import pytest
import torch
from test_lora import LORA
from test_sampling import request, requests_for
from tiny import tiny_policy

from lagrpo.model.layout import Packed
from lagrpo.model.model import Policy, copy_policy
from lagrpo.rollout.base import WeightSyncError
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.sync_check import LocalCheck, ServerCheck, check_fresh

either_computation = pytest.mark.usefixtures("either_computation")


def checked(policy: Policy) -> tuple[LocalSampler, LocalCheck]:
    """A sampler of the policy, and its check."""
    sampler = LocalSampler(copy_policy(policy), 0, 16, 64)
    requests = [request(key, f"{key}+{key}=", batch=0, policy=policy) for key in range(8)]
    return sampler, sampler.weight_check(policy, requests)


@torch.no_grad()
def update(policy: Policy, *names: str) -> None:
    """The next version: other numbers in these weights, or in all."""
    for name in names or policy.weights:
        policy.weights[name].mul_(1.05)
    policy.advance()


# In-process


@either_computation
def test_grade_is_exact_if_all_products_are_ours():
    policy = tiny_policy(dtype=torch.bfloat16, tau=0.7)
    _, check = checked(policy)
    agreement = check.agreement
    assert agreement.grade == ("exact" if policy.model.exact else "close")
    assert agreement.tokens > 60
    assert check(policy)["logp_difference_mean"] == agreement.mean
    agreement = checked(tiny_policy())[1].agreement
    assert agreement.grade == "close"
    assert agreement.largest < 1e-4


@either_computation
@pytest.mark.parametrize(
    ("dtype", "lora"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, LORA)],
    ids=str,
)
def test_check_passes_after_a_sync_and_stops_on_stale_weights_of_any_layer(dtype, lora):
    policy = tiny_policy(dtype=dtype, lora=lora)
    sampler, check = checked(policy)
    update(policy)
    with pytest.raises(WeightSyncError, match="reports 0"):
        check(policy)
    for name in policy.weights:
        sampler.sync_weights(policy.weights, policy.version)
        check(policy)
        update(policy, name)
        sampler.policy.weights.version = policy.version  # says so, and has the weights of before
        if bool(policy.weights[name].any()):  # an adapter's B starts at 0
            with pytest.raises(WeightSyncError, match="stale weights"):
                check(policy)


@either_computation
def test_policy_that_has_diverged_stops_the_run():
    policy = tiny_policy(dtype=torch.bfloat16)
    sampler, check = checked(policy)
    with torch.no_grad():
        for weight in policy.weights.values():
            weight.fill_(torch.nan)
    sampler.sync_weights(policy.weights, 0)
    with pytest.raises(WeightSyncError, match="training diverged"):
        check(policy)


# Servers, on hand-worked log-probs

NOISE = torch.tensor([0.03, -0.02, 0.04, -0.03]).repeat(8)
OLD = torch.linspace(-3, -0.1, 32)


def test_stale_server_is_found_by_its_log_probs():
    """The policy moved by .2 a token, seven times the noise: all 32 tokens tell."""
    new = OLD + 0.2
    assert check_fresh(OLD, new, OLD + NOISE, new - NOISE, "v") == 32
    with pytest.raises(WeightSyncError, match=r"stale weights: 32 of 32 tokens"):
        check_fresh(OLD, new, OLD + NOISE, OLD - NOISE, "v")
    with pytest.raises(WeightSyncError, match=r"did not load the new weights"):
        check_fresh(OLD, OLD + 1e-6, OLD + NOISE, OLD + NOISE, "v")
    assert check_fresh(OLD, OLD, OLD + NOISE, OLD + NOISE, "v") == 0  # nor did the policy


def test_small_update_or_few_tokens_are_inconclusive():
    """A move of .001 a token cannot be told from noise of .03: nearer to the old by chance is no
    error."""
    assert check_fresh(OLD, OLD + 0.001, OLD + NOISE, OLD - NOISE, "v") == 0
    old, noise = OLD[:19], NOISE[:19]
    assert check_fresh(old, old + 0.2, old + noise, old - noise, "v") == 19


class Echo:
    """A server that computes as the trainer does, shifted by `shift` nats, at the temperature
    `tau`, and has a second replica with the weights of `stale`, if that is given."""

    stale: Policy | None = None

    def __init__(self, policy: Policy, shift: float = 0.0, tau: float | None = None) -> None:
        self.policy, self.shift, self.tau, self.version = (
            policy,
            shift,
            tau or policy.tau,
            policy.version,
        )

    def generate_on_servers(self, requests, G, max_tokens):
        sampler = LocalSampler(copy_policy(self.policy), 0, max_tokens, 8, tau=self.tau)
        return {"the server": [group for _, group in sampler.sample(requests, G)]}

    @torch.no_grad()
    def get_logprobs(self, items):
        packed = Packed.build([(ids, [torch.tensor(tokens)]) for ids, tokens in items])
        replicas = {"the server": self.policy}
        if self.stale is not None:
            replicas["its second replica"] = self.stale
        logprobs = {}
        for name, policy in replicas.items():
            logp = (policy.model(packed, tau=1.0) + self.shift).tolist()
            logprobs[name] = [[logp.pop(0) for _ in tokens] for _, tokens in items]
        return logprobs


def test_server_within_the_tolerance_passes_and_other_weights_or_temperature_stop_the_run():
    policy = tiny_policy(tau=0.7)
    echo = Echo(policy, shift=0.05)
    check = ServerCheck(echo, requests_for(policy, 3), torch.bfloat16)
    metrics = check(policy)
    assert metrics["logp_difference_mean"] == pytest.approx(0.05, abs=1e-5)
    echo.shift = 0.11
    with pytest.raises(WeightSyncError, match=r"tolerance 0.1"):
        check(policy)
    other = ServerCheck(Echo(policy, tau=1.0), requests_for(policy, 3), torch.float32)
    with pytest.raises(WeightSyncError, match=r"another temperature"):
        other(policy)


def test_one_replica_with_old_weights_stops_the_run():
    policy = tiny_policy()
    echo = Echo(policy)
    echo.stale = copy_policy(policy)
    check = ServerCheck(echo, requests_for(policy, 3), torch.bfloat16, tolerance=10.0)
    check(policy)
    update(policy)
    echo.version = policy.version
    with pytest.raises(WeightSyncError, match="second replica"):
        check(policy)
