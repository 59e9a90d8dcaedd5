"""Decoding steps of fixed shapes, as CUDA graphs record them: graphs like the real ones, by fake_graphs.py."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from itertools import pairwise

import pytest
import tiny
import torch
from fake_graphs import install
from running import tiny_settings
from test_episodes import completions, episodes, sampled, talking
from test_sampling import ROUNDING, log_ratio, requests_for
from tiny import SHAPES, computed_by, save_tiny, tiny_policy

import lagrpo
from lagrpo.backends.choose import choose_backend
from lagrpo.backends.cuda import CudaBackend
from lagrpo.policy.learner import Learner
from lagrpo.sampling.decode import DecodeState
from lagrpo.sampling.local import LocalSampler


@pytest.fixture
def recordings(monkeypatch):
    """The graphs that were recorded by policies that a GPU's backend computes."""
    monkeypatch.setattr(tiny, "BACKEND", CudaBackend(torch.device("cpu"), torch.float32))
    monkeypatch.setattr("lagrpo.training.build.choose_backend", lambda choice, device, dtype: tiny.BACKEND)
    return install(monkeypatch.setattr).graphs


def sample(sampler, policy, batch, count=7, G=5):
    return {r.prompt.key: group for r, group in sampler.sample(requests_for(policy, count, batch), G)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recorded_steps_sample_what_steps_of_any_shape_sample(recordings, dtype):
    """Rows end, others take their place, caches grow, and a second batch goes on with the steps of the first. Token by
    token in float64; the bits of bfloat16 may depend on the shapes."""
    exact, rounding = dtype == torch.float64, ROUNDING.get(dtype, 1e-5)
    policy = tiny_policy(dtype=dtype)
    recorded = LocalSampler(policy, 0, max_tokens=90, max_num_seqs=20)
    generated = [sample(recorded, policy, batch) for batch in (1, 2)]
    assert sum(graph.replays for graph in recordings) > 10 * len(recordings)  # shapes repeat
    first = len(recordings)
    generated.append(sample(recorded, policy, 3))
    assert len(recordings) <= first + 1  # and from batch to batch
    plain = LocalSampler(computed_by(policy, "torch"), 0, max_tokens=90, max_num_seqs=20)
    for batch, groups in enumerate(generated, start=1):
        expected = sample(plain, policy, batch)
        assert len({len(c.token_ids) for g in expected.values() for c in g.completions}) > 5
        for key, group in groups.items() if exact else ():
            for ours, theirs in zip(group.completions, expected[key].completions, strict=True):
                assert torch.equal(ours.token_ids, theirs.token_ids)
                torch.testing.assert_close(ours.logp_alpha, theirs.logp_alpha, rtol=0, atol=rounding)
        assert log_ratio(policy, list(groups.values())).abs().max() <= rounding


def test_a_sampling_that_was_left_does_not_spoil_the_next(recordings):
    policy = tiny_policy()
    sampler = LocalSampler(policy, 0, max_tokens=30, max_num_seqs=20)
    groups = sampler.sample(requests_for(policy, 7), 5)
    next(groups)
    assert isinstance(groups, Generator)
    groups.close()
    assert sample(sampler, policy, 1).keys() == set(range(7))
    assert recordings


@pytest.mark.parametrize("kind", SHAPES)
def test_given_tokens_have_the_scores_of_steps_of_any_shape(recordings, kind):
    """Also when several are scored side by side, and some end before the others."""
    policy = tiny_policy(kind)
    sampler = LocalSampler(policy, 0, max_tokens=30, max_num_seqs=20)
    items = [(r.prompt.token_ids, list(range(5, 6 + 4 * n))) for n, r in enumerate(requests_for(policy, 5))]
    (recorded,) = sampler.scores(items)
    assert sum(graph.replays for graph in recordings) == 16  # a token less than the longest has
    (plain,) = LocalSampler(computed_by(policy, "torch"), 0, max_tokens=30, max_num_seqs=20).scores(items)
    for ours, theirs in zip(recorded, plain, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


class Alive:
    """The decoding states that are there, and how many recordings there had been, at each step of the learner."""

    def __init__(self, monkeypatch, recordings) -> None:
        self.states: list[int] = []
        self.recorded: list[int] = []
        known: weakref.WeakSet[DecodeState] = weakref.WeakSet()
        made, stepped = DecodeState.__init__, Learner.first_step

        def remembered(state, *args, **kwargs):
            made(state, *args, **kwargs)
            known.add(state)

        def step(learner, *args, **kwargs):
            self.states.append(len(known))
            self.recorded.append(len(recordings))
            return stepped(learner, *args, **kwargs)

        monkeypatch.setattr(DecodeState, "__init__", remembered)
        monkeypatch.setattr(Learner, "first_step", step)


@pytest.fixture
def alive(monkeypatch, recordings):
    return Alive(monkeypatch, recordings)


@pytest.fixture
def run(tmp_path):
    model = save_tiny(tmp_path / "model")

    def of(**sections):
        kinds = {"model": {"kernels": "torch"}, "evaluation": {"every": 1, "prompts": 2, "samples": 3}}
        return lagrpo.train(tiny_settings(model, tmp_path / "runs", **kinds | sections))

    return of


def test_caches_and_recordings_are_gone_while_the_policy_learns(run, alive):
    """Those of the sampler and of the evaluations before and between."""
    run(schedule={"prompts": 2, "batches": 3})
    assert alive.states == [0, 0, 0]
    assert alive.recorded[0] > 0


def test_completions_under_way_keep_their_caches_while_the_policy_learns(run, alive):
    """Prefetched: some of a later batch are unfinished when the batch is complete."""
    schedule, sampling = {"prompts": 2, "batches": 4, "v": 4}, {"max_num_seqs": 4, "G": 4, "max_tokens": 6}
    run(schedule=schedule, sampling=sampling, evaluation={"every": 0})  # a checkpoint of the best completes batches
    assert alive.states == [1, 1, 0, 0]  # batches 1 to 3 are generated together, batch 4 alone


def test_caches_are_gone_on_a_cpu_too(run, alive, monkeypatch):
    monkeypatch.setattr("lagrpo.training.build.choose_backend", choose_backend)
    run(schedule={"prompts": 2, "batches": 3})
    assert alive.states == [0, 0, 0]


def test_parity_checks_use_the_recordings_of_the_sampling(run, alive):
    """From the second batch on: the first parity check comes before anybody knows how much room the samples need."""
    added = {}
    for check_parity in (True, False):
        alive.recorded.clear()
        run(sampling={"parity_check": check_parity, "G": 4, "max_tokens": 6}, schedule={"prompts": 4, "batches": 4},
            evaluation={"before_and_after": False})  # fmt: skip
        added[check_parity] = [after - before for before, after in pairwise(alive.recorded)]
    assert added[True] == added[False]


def test_episodes_by_recorded_steps_are_those_of_steps_of_any_shape(recordings):
    """Rows that wait are computed along, and what that leaves in their caches is overwritten."""
    policy = talking(torch.float64)  # in which rounding changes no token
    found = sampled(policy, episodes(policy))
    assert sum(graph.replays for graph in recordings) > 20
    plain = computed_by(policy, "torch")
    assert max(len(c.turns) for c in completions(found)) == 5
    for ours, theirs in zip(completions(found), completions(sampled(plain, episodes(plain))), strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert ours.turns == theirs.turns
