"""Servers lent to an evaluation: what they are sent, in which order, and what comes back. The server is a stub."""

from __future__ import annotations

import pytest
import torch
from test_sampling import requests_for
from test_vllm_client import generous, sampler_at, stub
from tiny import tiny_policy

from lagrpo.rollout.base import Manner
from lagrpo.rollout.vllm.evaluating import VllmEvaluator


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A policy, a sampler that has synced its version 0, and what the server is asked from then on."""
    monkeypatch.setattr(generous, "label", "default")
    calls: list[tuple[str, object]] = []

    def answer(method, path, body):
        calls.append((path, body))
        return generous(method, path, body)

    policy = tiny_policy()
    with stub(answer) as url:
        sampler = sampler_at(url, policy, tmp_path)
        sampler.sync_weights(policy.weights, 0)
        calls.clear()
        yield policy, sampler, calls
        sampler.close()


def loaded(calls) -> list[str]:
    """The versions that the server was told to load, by the names of their directories."""
    return [body["kwargs"]["weights_path"][-7:] for path, body in calls if path == "/collective_rpc"]


def move(policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.5)
    policy.weights.version += 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_version_before_comes_back_whatever_happens(asked, fails):
    """Its weights, not those that the trainer has meanwhile; and a checkpoint made inside has them, too."""
    policy, sampler, calls = asked
    old = {name: tensor.clone() for name, tensor in policy.weights.items()}
    move(policy)
    try:
        with sampler.lent(policy.weights, 1, back=True):
            assert sampler.version == 1
            version, weights = sampler.served()
            assert version == 0
            assert all(torch.equal(weights[name], tensor) for name, tensor in old.items())
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert loaded(calls) == ["v000001", "v000000"]
    assert sampler.version == sampler.served()[0] == 0
    assert all(torch.equal(sampler.served()[1][name], tensor) for name, tensor in old.items())


def test_nothing_goes_back_where_nothing_more_is_sampled_from_it(asked):
    policy, sampler, calls = asked
    move(policy)
    with sampler.lent(policy.weights, 1, back=False):
        pass
    assert loaded(calls) == ["v000001"]
    assert sampler.version == 1
    sampler.sync_weights(policy.weights, 1)  # as the next batch begins
    assert sampler.version == 1


def test_nothing_is_sent_where_the_servers_have_the_version(asked):
    policy, sampler, calls = asked
    with sampler.lent(policy.weights, 0, back=True):
        pass
    assert loaded(calls) == []


def test_an_evaluation_has_its_own_temperature_limit_and_random_numbers(asked):
    policy, sampler, calls = asked
    requests = requests_for(policy, 2)
    list(sampler.sample(requests, 2))
    evaluator = VllmEvaluator(sampler)
    for manner in (Manner("evaluate", 0.5, 3), Manner("evaluate other", 0.5, 3)):
        evaluator.adopt(manner)
        found = list(evaluator.sample(requests, 3))
        assert sorted(request.prompt.key for request, _ in found) == sorted(r.prompt.key for r in requests)
    given = [body["sampling_params"] for path, body in calls if path == "/inference/v1/generate"]
    assert [(p["n"], p["temperature"], p["max_tokens"]) for p in given] == [(2, 1.0, 4)] * 2 + [(3, 0.5, 3)] * 4
    assert len({p["seed"] for p in given}) == 6
