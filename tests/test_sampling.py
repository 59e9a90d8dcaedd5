"""The in-process sampler samples exactly from α, and says exactly how likely it was."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from rounding import rounding
from tiny import SHAPES, tiny_policy

from lagrpo.distributed.ranks import Ranks
from lagrpo.model.backend import choose_backend
from lagrpo.model.layout import Packed
from lagrpo.model.logprobs import CDF_BLOCK
from lagrpo.model.model import copy_policy
from lagrpo.rng import uniforms
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.settings.schema import Settings
from lagrpo.startup.build_engines import build_evaluator, build_sampler, sampling_params
from lagrpo.types import Group, Prompt, Request

either_computation = pytest.mark.usefixtures("either_computation")


def sample_tokens(logits, tau: float, uniform):
    """Samples with the backend of this run of the test."""
    return choose_backend(tiny.BACKEND, "cpu", torch.float32).sample(logits, tau, uniform)


def request(key: int, text: str = "1+2=", batch: int = 1, epoch: int = 0, *, policy) -> Request:
    prompt = Prompt(key, ({"role": "user", "content": text},), "3")
    return Request(batch, epoch, policy.chat.tokenize(prompt))


def requests_for(policy, count: int, batch: int = 1) -> list[Request]:
    return [request(key, "x" * (3 * key + 1), batch, policy=policy) for key in range(count)]


def sampled(policy, requests, G=6, max_tokens=24, rows=64, seed=0) -> dict[int, Group]:
    sampler = LocalSampler(copy_policy(policy), seed, max_tokens, rows)
    return {r.prompt.key: group for r, group in sampler.sample(requests, G)}


def log_ratio(policy, groups) -> torch.Tensor:
    """ln ρ of every token: the trainer's packed forward against what the sampler recorded."""
    packed = Packed.build(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups]
    )
    with torch.no_grad():
        return policy.logp(packed) - torch.cat(
            [c.rollout_logp for g in groups for c in g.completions]
        )


# Where all products are ours, bits are equal. Where they are PyTorch's, the order of sums may
# differ between one row and many: 1e-4 nats in float32, and in bfloat16, which rounds every sum to
# 3 digits, .1 at the most. At τ = 1; both scale with 1/τ.
ROUNDING = {torch.bfloat16: 0.1, torch.float32: 1e-4}


@either_computation
@pytest.mark.parametrize("kind", SHAPES)
def test_ratio_is_one_right_after_a_weight_sync(kind):
    for dtype, tau in ((torch.bfloat16, 0.1), (torch.float32, 1.0)):
        policy = tiny_policy(kind, dtype, tau)
        tolerance = 0.0 if policy.model.exact else ROUNDING[dtype]
        groups = list(sampled(policy, requests_for(policy, 5)).values())
        assert (
            len({len(c.token_ids) for g in groups for c in g.completions}) > 3 or tau < 1
        )  # ragged, some retired
        assert log_ratio(policy, groups).abs().max() <= tolerance / tau


@either_computation
def test_completion_is_independent_of_other_completions_in_the_batch():
    """The same groups in narrow waves, in one wide batch, in another order and alone: to the bit by
    our products, and by PyTorch's in float64, whose rounding changes no token."""
    exact = tiny.BACKEND == "c"
    policy = tiny_policy(dtype=torch.bfloat16 if exact else torch.float64)
    requests = requests_for(policy, 5)
    wide = sampled(policy, requests)
    narrow = [sampled(policy, requests, rows=rows) for rows in (6, 13)]
    for other in (*narrow, sampled(policy, requests[::-1]), sampled(policy, requests[3:4])):
        for key, group in other.items():
            for ours, theirs in zip(group.completions, wide[key].completions, strict=True):
                assert torch.equal(ours.token_ids, theirs.token_ids)
                torch.testing.assert_close(
                    ours.rollout_logp, theirs.rollout_logp, rtol=0, atol=0 if exact else 1e-5
                )


def test_other_rng_keys_give_other_completions():
    """Completions of a group, the same prompt in two batches, in two epochs, under two seeds: never
    the same random numbers."""
    policy = tiny_policy()
    base = sampled(policy, [request(0, policy=policy)])[0]
    texts = [tuple(c.token_ids.tolist()) for c in base.completions]
    assert len(set(texts)) == len(texts)
    same, batch, epoch = (
        request(0, batch=b, epoch=e, policy=policy) for b, e in ((1, 0), (2, 0), (1, 1))
    )
    for changed, seed in ((same, 1), (batch, 0), (epoch, 0)):
        other = sampled(policy, [changed], seed=seed)[0]
        assert tuple(other.completions[0].token_ids.tolist()) != texts[0]


@either_computation
def test_frequencies_match_the_softmax():
    """Chi-square of the first token over 20,000 samples; 0.001 of correct samplers would fail, this
    seed does not."""
    logits, count = torch.randn(103, generator=torch.Generator().manual_seed(3)) * 2, 20_000
    uniform = torch.from_numpy(uniforms(count, "chi-square"))
    tokens, logp = sample_tokens(logits.expand(count, -1).contiguous(), 1.0, uniform)
    expected = logits.double().softmax(-1) * count
    observed = torch.bincount(tokens, minlength=103).double()
    # The usual rule for chi-square: cells below 5 are counted as one.
    likely = expected >= 5
    cells_expected = torch.cat([expected[likely], expected[~likely].sum()[None]])
    cells_observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
    statistic = ((cells_observed - cells_expected) ** 2 / cells_expected).sum().item()
    freedom = len(cells_expected) - 1
    # Wilson-Hilferty: (chi2/k)^(1/3) is nearly normal
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.1
    expected = logits.double().log_softmax(-1)[tokens]
    bound = rounding(torch.float32, expected.abs().max().item(), 16)
    torch.testing.assert_close(logp.double(), expected, rtol=0, atol=bound)


@either_computation
def test_uniform_number_picks_the_token_whose_interval_holds_it():
    """Literal: equal probabilities over 1,001 tokens, uniform number in the middle of an interval;
    and its ends. A token of probability zero is never sampled."""
    for position in (0, CDF_BLOCK - 1, CDF_BLOCK, 1000):
        u = (
            torch.tensor(
                [position + 0.5, position + 1e-4, position + 1 - 1e-4], dtype=torch.float64
            )
            / 1001
        )
        tokens, logp = sample_tokens(torch.zeros(3, 1001), 1.0, u)
        assert tokens.tolist() == [position] * 3
        torch.testing.assert_close(logp, torch.full((3,), -math.log(1001)))
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 300] = 0.0
    tokens, logp = sample_tokens(logits, 1.0, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert (tokens.tolist(), logp.tolist()) == ([300, 300], [0.0, 0.0])


def test_every_end_of_sequence_id_ends_a_completion_and_the_limit_cuts_it():
    policy = tiny_policy()
    assert policy.chat.eos_ids == {1, 2}
    with torch.no_grad():  # make both ends likely
        policy.model.head.weight[1] = policy.model.head.weight[2] = policy.model.head.weight[
            5:40
        ].mean(0)
    completions = [
        c
        for g in sampled(policy, requests_for(policy, 6), max_tokens=40).values()
        for c in g.completions
    ]
    assert {int(c.token_ids[-1]) for c in completions if c.finished} == {1, 2}
    for c in completions:
        assert not any(t in (1, 2) for t in c.token_ids[:-1].tolist())
        assert c.finished == (int(c.token_ids[-1]) in (1, 2))
        assert c.finished or len(c.token_ids) == 40
        assert bool(c.sampled.all())
        assert "<stop>" not in c.text


def test_prefetcher_rejects_a_group_with_another_number_of_completions():
    policy = tiny_policy()
    sampler = LocalSampler(copy_policy(policy), 0, 12, 8)

    class OneLess:
        """An engine that forgets a completion of each group."""

        def sample(self, requests, G, params):
            return sampler.sample(requests, G - 1, params)

    requests = requests_for(policy, 1, batch=1)
    prefetcher = Prefetcher(OneLess(), lambda _: requests, 4, sampler.params)  # pyright: ignore
    prefetcher.submit(range(1, 2), 0)
    with pytest.raises(RuntimeError, match="3 completions"):
        next(prefetcher.get(1))


def test_prefetcher_hands_out_batch_by_batch_what_was_generated_together():
    policy = tiny_policy(dtype=torch.float64)  # rounding by the rows beside one changes no token
    sampler = LocalSampler(copy_policy(policy), 0, 12, 8)
    source = {b: requests_for(policy, 3, batch=b) for b in (1, 2, 3)}
    together, apart = (
        Prefetcher(sampler, source.__getitem__, 4, sampler.params),
        Prefetcher(sampler, source.__getitem__, 4, sampler.params),
    )
    together.submit(range(1, 4), 0)
    for b in (1, 2, 3):
        apart.submit(range(b, b + 1), 0)
        prefetch, lazy = ({g.prompt.key: g for g in d.get(b)} for d in (together, apart))
        assert prefetch.keys() == lazy.keys() == {0, 1, 2}
        for key in prefetch:
            for x, y in zip(prefetch[key].completions, lazy[key].completions, strict=True):
                assert torch.equal(x.token_ids, y.token_ids)


@pytest.mark.parametrize("sync_every", [1, 2])
def test_samplers_of_a_run_have_the_values_of_its_settings(sync_every):
    sections = {
        "schedule": {"sync_every": sync_every},
        "run": {"seed": 11},
        "rollout": {"max_num_seqs": 24, "max_completion_length": 7, "stop": ["x"]},
    }
    settings = Settings.model_validate(sections)
    policy = tiny_policy(tau=0.5)
    params = sampling_params(settings)
    sampler = build_sampler(settings, policy, [], params, Ranks(), 0)
    evaluator = build_evaluator(settings, policy, sampler)
    for engine in (sampler, evaluator):
        assert isinstance(engine, LocalSampler)
        assert (engine.seed, engine.max_num_seqs) == (11, 24)
        assert (engine.params.max_tokens, engine.params.tau) == (7, 0.5)
        # Stale training samples from a copy, evaluations from the policy as it is.
        assert (engine.policy is policy) == (engine is evaluator or sync_every == 1)
        # The parameters of an evaluation set have its stop texts.
        assert engine.params.stop == (("x",) if engine is sampler else ())
    assert (params.max_tokens, params.stop) == (7, ("x",))
