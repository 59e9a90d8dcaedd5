"""Decoding steps that are recorded as CUDA graphs give what the same steps give when they are
computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_graphs import record_on_cpu
from test_sampling import requests_for, sampled
from tiny import tiny_policy

from lagrpo.model.model import copy_policy
from lagrpo.rollout import decoding
from lagrpo.rollout.decoding import DecodeState, records_steps, round_up_keys
from lagrpo.rollout.local import LocalSampler

PROMPT = [5, 6, 7, 8, 9]


def torch_policy(**changes):
    """A policy that PyTorch's operations compute, as on a GPU."""
    return tiny_policy(backend="torch", **changes)


def decode(policy, *groups: list[list[list[int]]]) -> list[torch.Tensor]:
    """Hidden states of the steps of groups of four rows, one group after the other; a step feeds
    tokens to each row."""
    state = DecodeState(policy.model, 4, 400)
    hidden: list[torch.Tensor] = []
    for steps in groups:
        state.admit([PROMPT], 4)
        hidden += [state.feed(tokens) for tokens in steps]
        state.retire([0, 1, 2, 3])
    return hidden


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([6, 6, 6, 6], id="three pieces of one size"),
        pytest.param([6, 6, 6, 2], id="two pieces of one size and a smaller one"),
        pytest.param([1, 1, 1, 1], id="one piece"),
        pytest.param([9, 0, 0, 1], id="rows that wait"),
    ],
)
def test_recorded_steps_of_several_pieces_equal_computed_ones(monkeypatch, counts):
    monkeypatch.setattr(decoding, "PIECE", 8)
    rng = torch.Generator().manual_seed(0)
    steps = [
        [torch.randint(3, 90, (count,), generator=rng).tolist() for count in counts]
        for _ in range(10)
    ]
    policy = torch_policy()
    computed = decode(policy, steps)
    graphs = record_on_cpu(monkeypatch)
    recorded = decode(policy, steps)
    assert sum(graph.replays for graph in graphs) >= 6
    for ours, expected in zip(recorded, computed, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_recorded_steps_follow_a_cache_that_grows(monkeypatch):
    monkeypatch.setattr(decoding, "KEPT_BYTES", 0)
    steps = [[[20 + n % 50]] * 4 for n in range(2 * decoding.BLOCK)]
    policy = torch_policy()
    computed = decode(policy, steps, steps[::-1])
    graphs = record_on_cpu(monkeypatch)
    recorded = decode(policy, steps, steps[::-1])
    assert len(graphs) > 1
    for ours, expected in zip(recorded, computed, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


# float64: how many rows and keys are computed together changes no token
def test_sampler_keeps_its_graphs_from_batch_to_batch(monkeypatch):
    policy = torch_policy(dtype=torch.float64)
    expected = sampled(policy, requests_for(policy, 5))
    graphs = record_on_cpu(monkeypatch)
    sampler = LocalSampler(copy_policy(policy), 0, 24, 64)
    counts = []
    for _ in range(4):
        groups = {r.prompt.key: group for r, group in sampler.sample(requests_for(policy, 5), 6)}
        counts.append(len(graphs))
        for key, group in groups.items():
            for ours, plain in zip(group.completions, expected[key].completions, strict=True):
                assert torch.equal(ours.token_ids, plain.token_ids)
    assert counts[0] > 0
    assert counts[-1] == counts[-2]


def test_recorded_steps_compute_by_the_weights_of_the_last_sync(monkeypatch):
    policy = torch_policy(dtype=torch.float64)
    other = torch_policy(dtype=torch.float64, seed=1)
    expected = sampled(other, requests_for(policy, 3))
    graphs = record_on_cpu(monkeypatch)
    sampler = LocalSampler(copy_policy(policy), 0, 24, 64)
    for _ in range(3):
        list(sampler.sample(requests_for(policy, 3), 6))
    recorded = len(graphs)
    sampler.sync_weights(other.weights, 1)
    replays = sum(graph.replays for graph in graphs)
    groups = {r.prompt.key: group for r, group in sampler.sample(requests_for(policy, 3), 6)}
    assert sum(graph.replays for graph in graphs[:recorded]) > replays
    for key, group in groups.items():
        for ours, plain in zip(group.completions, expected[key].completions, strict=True):
            assert torch.equal(ours.token_ids, plain.token_ids)


def test_steps_of_a_kept_state_have_the_shapes_of_a_new_one(monkeypatch):
    """A resumed run has a new state. It rounds as the run that never stopped, whose state has held
    longer prompts."""
    record_on_cpu(monkeypatch)
    shapes = []
    attend = decoding.StepLayout.attend

    def record_shapes(self, layer, query, key, value, scaling):
        shapes.append((*query.shape, *self.mask.shape))
        return attend(self, layer, query, key, value, scaling)

    monkeypatch.setattr(decoding.StepLayout, "attend", record_shapes)
    monkeypatch.setattr(decoding, "OFTEN", 10**9)  # every step is computed, and seen
    policy = torch_policy(dtype=torch.float64)
    used, new = (LocalSampler(copy_policy(policy), 0, 24, 64) for _ in range(2))
    requests = requests_for(policy, 40)  # prompts of up to 130 tokens
    list(used.sample(requests[30:], 6))
    shapes.clear()
    list(used.sample(requests[:5], 6))
    shapes_of_used = list(shapes)
    shapes.clear()
    list(new.sample(requests[:5], 6))
    assert shapes_of_used == shapes


@pytest.mark.parametrize(
    ("kept_bytes", "capacity", "stays"),
    [
        pytest.param(decoding.KEPT_BYTES, 384, True, id="small"),
        pytest.param(1000, decoding.BLOCK, False, id="large"),
    ],
)
def test_small_cache_of_recorded_steps_has_room_for_all_tokens_and_stays(
    monkeypatch, kept_bytes, capacity, stays
):
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(decoding, "KEPT_BYTES", kept_bytes)
    state = DecodeState(torch_policy().model, 8, 300)
    assert state.own.capacity == capacity
    assert state.may_stay == stays


@pytest.mark.parametrize(
    ("kind", "changes", "records"),
    [
        ("llama", {}, True),
        ("llama", {"rope_type": "linear", "factor": 2.0}, True),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, False),
        ("phi3", {}, False),
    ],
)
def test_steps_are_recorded_if_they_never_wait_for_the_gpu(kind, changes, records):
    rope = {"rope_parameters": {"rope_theta": 10000.0} | changes} if changes else {}
    policy = tiny_policy(kind, backend="torch", **rope)
    on_gpu: Any = SimpleNamespace(
        device=torch.device("cuda"), config=policy.model.config, lm=policy.model.lm
    )
    assert records_steps(on_gpu) == records
    assert not records_steps(policy.model)


@pytest.mark.parametrize(
    ("tokens", "keys"), [(0, 64), (64, 64), (65, 96), (97, 128), (129, 192), (193, 256), (500, 512)]
)
def test_keys_are_rounded_up_to_a_power_of_two_or_three_quarters_of_one(tokens, keys):
    assert round_up_keys(tokens) == keys
