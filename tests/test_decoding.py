"""Decoding on a GPU, with graphs recorded on a CPU: recorded steps give what computed steps give,
and what the decoding of a CPU gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_graphs import record_on_cpu
from feeding import flat
from test_episodes import make_episodes, sample_groups, talking_policy
from test_sampling import requests_for, sampled
from tiny import tiny_policy

from lagrpo.gpu import graphs as graphs_of_gpu
from lagrpo.gpu.cached_attention import attend_by_mask
from lagrpo.model.model import Model, copy_policy
from lagrpo.rollout import recorded
from lagrpo.rollout.decoding import DecodeState
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.recorded import (
    CachedLayout,
    RecordedState,
    records_steps,
    round_up_keys,
    round_up_tokens,
    rows_that_fit,
    split_prompts,
)
from lagrpo.types import Group

PROMPT = [5, 6, 7, 8, 9]
NEVER = 10**9


def torch_policy(**changes):
    """A policy that PyTorch's operations compute, as on a GPU."""
    return tiny_policy(backend="torch", **changes)


def decode(state, *groups: list[list[list[int]]]) -> list[torch.Tensor]:
    """Hidden states of the steps of groups of four rows, one group after the other; a step feeds
    tokens to each row."""
    hidden: list[torch.Tensor] = []
    for steps in groups:
        hidden.append(state.admit([PROMPT], 4))
        hidden += [state.feed(*flat(tokens)) for tokens in steps]
        state.retire([0, 1, 2, 3])
    return hidden


def random_steps(counts: list[int], number: int = 10) -> list[list[list[int]]]:
    """Steps that feed so many tokens to each row."""
    rng = torch.Generator().manual_seed(0)
    return [
        [torch.randint(3, 90, (count,), generator=rng).tolist() for count in counts]
        for _ in range(number)
    ]


def assert_close(ours, expected) -> None:
    for our_hidden, expected_hidden in zip(ours, expected, strict=True):
        torch.testing.assert_close(our_hidden, expected_hidden, rtol=0, atol=1e-5)


COUNTS = pytest.mark.parametrize(
    "counts",
    [
        pytest.param([6, 6, 6, 6], id="three pieces of one size"),
        pytest.param([6, 6, 6, 2], id="two pieces of one size and a smaller one"),
        pytest.param([1, 1, 1, 1], id="one piece"),
        pytest.param([9, 0, 0, 1], id="rows that wait"),
    ],
)


@COUNTS
def test_recorded_steps_give_the_hidden_states_of_the_cpus_decoding(monkeypatch, counts):
    monkeypatch.setattr(recorded, "PIECE", 8)
    steps = random_steps(counts)
    policy = torch_policy()
    expected = decode(DecodeState(policy.model, 4, 400), steps)
    graphs = record_on_cpu(monkeypatch)
    ours = decode(RecordedState(policy.model, 4, 400), steps)
    # Else every step was computed, and no replay was compared.
    assert sum(graph.replays for graph in graphs) >= 6
    assert_close(ours, expected)


@COUNTS
def test_recorded_steps_sample_what_computed_steps_sample(monkeypatch, counts):
    """Tokens and log-probs have the same bits: a replay makes the same operations."""
    monkeypatch.setattr(recorded, "PIECE", 8)
    steps = random_steps(counts)
    num_sampled = sum(1 for count in counts if count > 0)
    policy = torch_policy()
    graphs = record_on_cpu(monkeypatch)
    samples = []
    # First every step is computed; then a shape is recorded at its third step, and replayed.
    for often in (NEVER, 3):
        monkeypatch.setattr(graphs_of_gpu, "OFTEN", often)
        state = RecordedState(policy.model, 4, 400)
        state.admit([PROMPT], 4)
        uniform = (0.1 + 0.2 * np.arange(num_sampled)) % 1
        samples.append([state.feed_and_sample(*flat(tokens), uniform, 0.7) for tokens in steps])
    assert sum(graph.replays for graph in graphs) >= 6
    np.testing.assert_array_equal(samples[0], samples[1])
    assert all(len(tokens) == num_sampled for tokens, _ in samples[0])


def test_sampling_inside_a_step_is_sampling_from_its_hidden_states(monkeypatch):
    steps = random_steps([1, 3, 0, 2], number=6)
    uniform = np.array([0.1, 0.5, 0.9])
    policy = torch_policy()
    record_on_cpu(monkeypatch)
    fused, parts = (RecordedState(policy.model, 4, 400) for _ in range(2))
    for state in (fused, parts):
        state.admit([PROMPT], 4)
    for tokens in steps:
        new_tokens, logp = fused.feed_and_sample(*flat(tokens), uniform, 0.7)
        # Of six tokens these are the last of each row that has any: 1, 3, 0 and 2.
        last_hidden = parts.feed(*flat(tokens))[[0, 3, 5]]
        expected = policy.model.backend.sample(
            policy.model.logits(last_hidden), 0.7, torch.from_numpy(uniform)
        )
        assert new_tokens.tolist() == expected[0].tolist()
        assert logp == pytest.approx(expected[1].tolist(), abs=1e-5)


def test_steps_need_one_graph_for_each_rounded_number_of_tokens(monkeypatch):
    """18 rows end one after the other, two steps each: 4 steps of 32 tokens, 32 of 16."""
    policy = torch_policy()
    graphs = record_on_cpu(monkeypatch)
    state = RecordedState(policy.model, 18, 100)
    state.admit([PROMPT], 18)
    while state.rows:
        for _ in range(2):
            state.feed_and_sample(*flat([[7]] * state.rows), np.full(state.rows, 0.5), 1.0)
        state.retire([0])
    # Two steps of each are computed; the third one is recorded, and replayed from then on.
    assert [graph.replays for graph in graphs] == [2, 30]


def test_rows_that_move_keep_their_keys(monkeypatch):
    policy = torch_policy()
    record_on_cpu(monkeypatch)
    state, alone = (RecordedState(policy.model, 4, 100) for _ in range(2))
    state.admit([PROMPT, [20, 21, 22]], 2)
    alone.admit([[20, 21, 22]], 1)
    state.feed(*flat([[11], [12], [13], [14]]))
    alone.feed(*flat([[14]]))
    # The last row takes the place of the first.
    assert state.retire([0, 2]) == [(3, 0)]
    assert state.lengths.tolist() == [4, 6]
    assert_close([state.feed(*flat([[30], [31]]))[:1]], [alone.feed(*flat([[30]]))])


def test_prompts_prefilled_in_pieces_give_the_hidden_states_of_one_piece(monkeypatch):
    prompts = [PROMPT, [20, 21, 22], [30] * 9, [40, 41]]
    policy = torch_policy()
    record_on_cpu(monkeypatch)
    results = []
    for most in (1000, 8):
        monkeypatch.setattr(recorded, "PREFILL_TOKENS", most)
        state = RecordedState(policy.model, 8, 100)
        hidden = state.admit(prompts, 2)
        results.append([hidden, state.feed(*flat([[50 + row] for row in range(8)]))])
    assert [len(piece) for piece in split_prompts(prompts)] == [2, 1, 1]
    assert_close(results[1], results[0])


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
    # The last batch recorded nothing: it replayed the graphs of the batches before.
    assert counts[-1] == counts[-2]


@pytest.mark.parametrize("rows", [64, 11], ids=["all at once", "in turn"])
def test_recorded_steps_sample_the_episodes_of_the_cpus_decoding(monkeypatch, rows):
    """Rows sample, wait, and read replies beside each other, and move when others end."""
    policy = talking_policy(torch.float64, backend="torch")
    expected = sample_groups(policy, make_episodes(policy), rows=rows)
    graphs = record_on_cpu(monkeypatch)
    monkeypatch.setattr(recorded, "PIECE", 8)
    ours = sample_groups(policy, make_episodes(policy), rows=rows)
    assert sum(graph.replays for graph in graphs) > 0
    assert max(len(c.turns) for group in ours.values() for c in group.completions) >= 3
    for key, group in ours.items():
        for one, other in zip(group.completions, expected[key].completions, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            assert (one.turns, one.outcome) == (other.turns, other.outcome)


@pytest.mark.parametrize("is_recorded", [False, True], ids=["computed steps", "recorded steps"])
def test_rows_whose_keys_are_computed_again_go_on_as_before(monkeypatch, is_recorded):
    """The weights are synced whenever a group has ended, and are always the same."""
    policy = torch_policy(dtype=torch.float64)
    requests = requests_for(policy, 5)
    expected = sampled(policy, requests)
    if is_recorded:
        record_on_cpu(monkeypatch)
    sampler = LocalSampler(
        copy_policy(policy), 0, 24, 12, continues_completions=True, longest_prompt=64
    )
    groups: dict[int, Group] = {}
    for request, group in sampler.sample(requests, 6):
        groups[request.prompt.key] = group
        sampler.sync_weights(policy.weights, policy.version)
    assert sampler.pop_metrics()["recomputed"] > 0
    for key, group in groups.items():
        for one, other in zip(group.completions, expected[key].completions, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)


def test_evaluation_that_fits_leaves_the_graphs_of_training(monkeypatch):
    policy = torch_policy()
    graphs = record_on_cpu(monkeypatch)
    sampler = LocalSampler(copy_policy(policy), 0, 24, 64)
    evaluation = replace(sampler.params, purpose="evaluate", max_tokens=8)
    for _ in range(3):
        list(sampler.sample(requests_for(policy, 3), 6))
    list(sampler.sample(requests_for(policy, 3), 4, evaluation))
    num_graphs = len(graphs)
    list(sampler.sample(requests_for(policy, 3), 6))
    assert len(graphs) == num_graphs


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
    # Graphs of the time before the sync ran, and read the new weights.
    assert sum(graph.replays for graph in graphs[:recorded]) > replays
    for key, group in groups.items():
        for ours, plain in zip(group.completions, expected[key].completions, strict=True):
            assert torch.equal(ours.token_ids, plain.token_ids)


def test_steps_of_a_kept_state_have_the_shapes_of_a_new_one(monkeypatch):
    """A resumed run has a new state. It rounds as the run that never stopped, whose state has held
    longer prompts."""
    record_on_cpu(monkeypatch)
    shapes = []
    attend = CachedLayout.attend

    def record_shapes(self, layer, query, key, value, scaling):
        shapes.append((*query.shape, self.num_keys))
        return attend(self, layer, query, key, value, scaling)

    monkeypatch.setattr(CachedLayout, "attend", record_shapes)
    monkeypatch.setattr(graphs_of_gpu, "OFTEN", NEVER)  # every step is computed, and seen
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
    ("kept_share", "stays"),
    [pytest.param(recorded.KEPT_SHARE, True, id="small"), pytest.param(1e-6, False, id="large")],
)
def test_small_cache_stays_for_the_next_batch(monkeypatch, kept_share, stays):
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(recorded, "KEPT_SHARE", kept_share)
    state = RecordedState(torch_policy().model, 8, 300)
    assert state.capacity == 384
    assert state.may_stay == stays
    assert state.fits(8, 384)
    assert not state.fits(9, 300)
    assert not state.fits(8, 385)


@pytest.mark.parametrize("continues", [False, True], ids=["whole batches", "goes on after syncs"])
def test_cache_that_is_freed_for_learning_is_not_kept_again(monkeypatch, continues):
    policy = torch_policy(dtype=torch.float64)
    expected = sampled(policy, requests_for(policy, 3))
    record_on_cpu(monkeypatch)
    sampler = LocalSampler(
        copy_policy(policy), 0, 24, 64, continues_completions=continues, longest_prompt=64
    )
    for frees in (True, False):
        groups = {r.prompt.key: group for r, group in sampler.sample(requests_for(policy, 3), 6)}
        sampler.before_learning()
        assert sampler.free_idle_memory() == frees
        for key, group in groups.items():
            for ours, theirs in zip(group.completions, expected[key].completions, strict=True):
                assert torch.equal(ours.token_ids, theirs.token_ids)


def test_cache_of_full_size_may_take_half_of_the_memory(monkeypatch):
    model = torch_policy().model  # 2 layers, 2 key heads of 32, 4 bytes: 1,024 bytes a token
    monkeypatch.setattr(recorded, "total_memory", lambda device: 2 * 1024 * 8 * 128)
    assert rows_that_fit(model, max_tokens=100, share=0.5) == 8
    assert rows_that_fit(model, max_tokens=129, share=0.5) == 4  # a capacity of 256 tokens


@pytest.mark.parametrize(
    ("exact", "rows_of_memory", "max_rows"),
    [
        pytest.param(True, 50, 10, id="a fifth of the memory"),
        pytest.param(True, 12, 6, id="one group"),
        pytest.param(True, 10, None, id="not one group fits into half of it"),
        pytest.param(False, 20, None, id="rounding would differ"),
    ],
)
def test_exact_model_samples_as_many_rows_as_fit(monkeypatch, exact, rows_of_memory, max_rows):
    """None: the state whose cache grows."""
    policy = torch_policy()
    requests = requests_for(policy, 3)
    expected = sampled(policy, requests)
    record_on_cpu(monkeypatch)
    longest = max(len(request.prompt.token_ids) for request in requests) + 24
    memory = 1024 * recorded.round_up_keys(longest) * rows_of_memory
    monkeypatch.setattr(recorded, "total_memory", lambda device: memory)
    monkeypatch.setattr(recorded, "KEPT_SHARE", 0.5)  # so that the state can be looked at
    monkeypatch.setattr(Model, "exact", exact)
    # At most 64 rows; three groups of six.
    sampler = LocalSampler(copy_policy(policy), 0, 24, 64)
    groups = {r.prompt.key: group for r, group in sampler.sample(requests, 6)}
    state = sampler._idle_state
    assert (None if state is None else state.max_rows) == max_rows
    for key, group in groups.items():
        for ours, theirs in zip(group.completions, expected[key].completions, strict=True):
            assert torch.equal(ours.token_ids, theirs.token_ids)


def test_attention_to_a_cache_is_attention_to_the_keys_that_a_token_sees():
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(4, 6, 8, generator=rng)
    keys, values = (torch.randn(3, 10, 2, 8, generator=rng) for _ in range(2))
    rows, num_seen = torch.tensor([2, 0, 1, 2]), torch.tensor([1, 9, 4, 7])
    ours = attend_by_mask(query, keys, values, rows, num_seen, 0.3, num_keys=9)
    for token in range(4):
        seen = int(num_seen[token])
        k = keys[rows[token], :seen].repeat_interleave(3, 1)  # [seen, 6, 8]
        v = values[rows[token], :seen].repeat_interleave(3, 1)
        weights = (0.3 * (k * query[token]).sum(-1)).softmax(0)  # [seen, 6]
        expected = (weights[..., None] * v).sum(0)
        torch.testing.assert_close(ours[token], expected, rtol=0, atol=1e-5)


# Scales of each of a head's sixteen frequencies, for short and for long sequences.
LONG_ROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    ("kind", "changes", "records"),
    [
        ("llama", {}, True),
        ("llama", {"rope_type": "linear", "factor": 2.0}, True),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, False),
        ("llama", {"rope_type": "longrope", "factor": 2.0} | LONG_ROPE, False),
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
    ("tokens", "rounded"), [(1, 16), (16, 16), (65, 80), (255, 256), (257, 288), (1025, 1152)]
)
def test_tokens_of_a_step_are_rounded_up_by_an_eighth_at_most(tokens, rounded):
    assert round_up_tokens(tokens) == rounded


@pytest.mark.parametrize(("keys", "rounded"), [(1, 128), (128, 128), (129, 256), (300, 384)])
def test_keys_are_rounded_up_to_a_multiple_of_128(keys, rounded):
    assert round_up_keys(keys) == rounded
