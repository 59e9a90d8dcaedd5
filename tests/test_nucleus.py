"""Nucleus sampling: the tokens that stay, by hand and against a full sort; use in evaluations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sample_rewards import correct
from test_sampling import requests_for
from tiny import tiny_policy

from lagrpo.lifecycle.evaluation import build_eval_set
from lagrpo.rollout import nucleus
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.nucleus import keep_nucleus
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import EvalSetSettings

PROBABILITIES = [0.5, 0.25, 0.125, 0.0625, 0.0625]


@pytest.mark.parametrize(
    ("top_p", "nucleus_size"),
    [(0.3, 1), (0.5, 1), (0.6, 2), (0.75, 2), (0.76, 3), (0.9, 5), (1.0, 5), (1e-6, 1)],
)
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, nucleus_size):
    """.9 needs one of two equal tokens, so both stay."""
    logits = torch.tensor([PROBABILITIES, PROBABILITIES[::-1]]).log()
    result = keep_nucleus(logits, 1.0, top_p)
    assert result.isfinite().sum(-1).tolist() == [nucleus_size, nucleus_size]
    assert torch.equal(result[0, :nucleus_size], logits[0, :nucleus_size])
    assert torch.equal(result[1, 5 - nucleus_size :], logits[1, 5 - nucleus_size :])


def test_nucleus_is_that_of_the_temperature():
    """At temperature .5 the probabilities are squared: .5 becomes .25 / .3359 = .744."""
    logits = torch.tensor([PROBABILITIES]).log()
    assert keep_nucleus(logits, 0.5, 0.74).isfinite().sum() == 1
    assert keep_nucleus(logits, 1.0, 0.74).isfinite().sum() == 2


def test_nucleus_larger_than_the_candidates_is_found_by_sorting_all(monkeypatch):
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    expected = keep_nucleus(logits, 0.9, 0.95)
    monkeypatch.setattr(nucleus, "CANDIDATES", 4)
    assert torch.equal(keep_nucleus(logits, 0.9, 0.95), expected)
    probabilities = (logits / 0.9).softmax(-1).sort(descending=True).values
    sizes = (probabilities.cumsum(-1) - probabilities < 0.95).sum(-1)
    assert expected.isfinite().sum(-1).tolist() == sizes.tolist()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_sampler_takes_tokens_of_the_nucleus_with_the_log_probs_of_it(backend):
    policy = tiny_policy(backend=backend)
    sampler = LocalSampler(policy, seed=0, max_tokens=8, max_num_seqs=8)
    greedy = SamplingParams("evaluate", tau=1.0, max_tokens=8, top_p=1e-9)
    groups = [group for _, group in sampler.sample(requests_for(policy, 2), 3, greedy)]
    for group in groups:
        first, *others = group.completions
        assert all(torch.equal(first.token_ids, other.token_ids) for other in others)
        assert torch.equal(first.rollout_logp, torch.zeros(first.length))

    half = SamplingParams("evaluate", tau=1.0, max_tokens=8, top_p=0.5)
    wide_params = SamplingParams("evaluate", tau=1.0, max_tokens=8)
    for (_, narrow_group), (_, wide_group) in zip(
        sampler.sample(requests_for(policy, 1), 8, half),
        sampler.sample(requests_for(policy, 1), 8, wide_params),
        strict=True,
    ):
        for narrow, wide in zip(narrow_group.completions, wide_group.completions, strict=True):
            if narrow.token_ids[0] == wide.token_ids[0]:
                # Renormalized over at least half of the probability.
                gain = float(narrow.rollout_logp[0] - wide.rollout_logp[0])
                assert 0 < gain <= math.log(2) + 1e-5


def test_evaluations_sample_as_their_settings_say_and_training_from_the_whole_distribution():
    settings = Settings.model_validate(
        {
            "rollout": {"temperature": 0.8},
            "eval": {
                "temperature": 0.6,
                "top_p": 0.95,
                "sets": [{"name": "a"}, {"name": "b", "temperature": 1.2, "top_p": 0.5}],
            },
        }
    )
    prompts: Any = SimpleNamespace(held_out=lambda count: [])
    setup: Any = SimpleNamespace(
        prompts=prompts, reward_pool=None, episodes=None, task=SimpleNamespace(reward=correct)
    )
    params = [
        build_eval_set(settings, setup, set_settings).params for set_settings in settings.eval.sets
    ]
    assert [(one.tau, one.top_p) for one in params] == [(0.6, 0.95), (1.2, 0.5)]
    plain = Settings.model_validate({"rollout": {"temperature": 0.8}})
    params = build_eval_set(plain, setup, EvalSetSettings(name="only")).params
    assert (params.tau, params.top_p) == (0.8, 1.0)
    sampler = LocalSampler(tiny_policy(tau=0.8), seed=0, max_tokens=8, max_num_seqs=8)
    assert (sampler.params.tau, sampler.params.top_p) == (0.8, 1.0)
