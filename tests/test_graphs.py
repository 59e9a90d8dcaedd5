"""Decoding steps of fixed shapes, as CUDA graphs record them: by graphs that behave like the real ones (fake_graphs.py)."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from fake_graphs import install
from test_sampling import log_ratio, requests_for
from tiny import SHAPES, tiny_policy

from lagrpo import kernels
from lagrpo.sampling import decode
from lagrpo.sampling.local import LocalSampler


@pytest.fixture
def recordings(monkeypatch):
    """The graphs that were recorded."""
    kernels.select("torch")
    monkeypatch.setattr(decode, "graphs_on", lambda device: True)
    yield install(monkeypatch.setattr).graphs
    kernels.select("auto")


def sample(sampler, policy, batch, count=7, G=5):
    return {r.prompt.key: group for r, group in sampler.sample(requests_for(policy, count, batch), G)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_draw_what_steps_of_any_shape_draw(monkeypatch, recordings, dtype):
    """Rows end, others take their place, caches grow, and a second batch goes on with the steps of the first."""
    policy = tiny_policy(dtype=dtype)
    recorded = LocalSampler(policy, 0, max_tokens=90, rows=20)
    drawn = [sample(recorded, policy, batch) for batch in (1, 2)]
    assert sum(graph.replays for graph in recordings) > 10 * len(recordings)  # shapes repeat
    first = len(recordings)
    drawn.append(sample(recorded, policy, 3))
    assert len(recordings) <= first + 1  # and from batch to batch
    monkeypatch.setattr(decode, "graphs_on", lambda device: False)
    plain = LocalSampler(policy, 0, max_tokens=90, rows=20)
    for batch, groups in enumerate(drawn, start=1):
        expected = sample(plain, policy, batch)
        assert len({len(c.token_ids) for g in expected.values() for c in g.completions}) > 5
        for key, group in groups.items():
            for ours, theirs in zip(group.completions, expected[key].completions, strict=True):
                assert torch.equal(ours.token_ids, theirs.token_ids)
                torch.testing.assert_close(ours.logp_alpha, theirs.logp_alpha, rtol=0, atol=1e-4)
        assert log_ratio(policy, list(groups.values())).abs().max() <= 1e-4


def test_a_sampling_that_was_left_does_not_spoil_the_next(recordings):
    policy = tiny_policy()
    sampler = LocalSampler(policy, 0, max_tokens=30, rows=20)
    groups = sampler.sample(requests_for(policy, 7), 5)
    next(groups)
    assert isinstance(groups, Generator)
    groups.close()
    assert sample(sampler, policy, 1).keys() == set(range(7))
    assert recordings


@pytest.mark.parametrize("kind", SHAPES)
def test_given_tokens_have_the_scores_of_steps_of_any_shape(monkeypatch, recordings, kind):
    """Also when several are scored side by side, and some end before the others."""
    policy = tiny_policy(kind)
    sampler = LocalSampler(policy, 0, max_tokens=30, rows=20)
    items = [(r.prompt.token_ids, list(range(5, 6 + 4 * n))) for n, r in enumerate(requests_for(policy, 5))]
    (recorded,) = sampler.scores(items)
    assert sum(graph.replays for graph in recordings) == 16  # a token less than the longest has
    monkeypatch.setattr(decode, "graphs_on", lambda device: False)
    (plain,) = sampler.scores(items)
    for ours, theirs in zip(recorded, plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
