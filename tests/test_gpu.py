"""The same proofs on a CUDA device: pytest -m gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from feeding import flat
from safetensors.torch import load_file
from test_attention import GROUPS, random_groups, reference_logp
from test_decoding import NEVER, decode
from test_sampling import log_ratio, requests_for, sampled
from tiny import save_tiny, tiny_policy
from torch import nn

import lagrpo
from lagrpo.gpu import graphs
from lagrpo.gpu.cached_attention import attend_by_flash, attend_by_mask, flash_reads_caches
from lagrpo.model.attention import attend_by_segments, attend_varlen, gather_keys, takes_varlen
from lagrpo.model.layout import PackedLayout
from lagrpo.model.logprobs import ON_GPU, token_logp
from lagrpo.model.lora import Lora
from lagrpo.model.model import Packed, copy_policy
from lagrpo.rollout import recorded
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.recorded import RecordedState
from lagrpo.training.trainer import deterministic

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logp_on_cuda_equals_the_reference_on_the_cpu(kind):
    groups = random_groups(GROUPS)
    reference = reference_logp(tiny_policy(kind), groups).detach()
    policy = tiny_policy(kind, device="cuda")
    ours = policy.logp(Packed.build(groups, policy.device)).cpu()
    torch.testing.assert_close(ours, reference, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float32, 1e-3)])
def test_sampler_and_trainer_agree_on_cuda(dtype, tolerance):
    policy, on_gpu = tiny_policy(dtype=dtype), tiny_policy(dtype=dtype, device="cuda")
    groups = list(sampled(on_gpu, requests_for(policy, 5)).values())
    packed = Packed.build(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups], on_gpu.device
    )
    with torch.no_grad():
        difference = on_gpu.logp(packed).cpu() - torch.cat(
            [c.rollout_logp for g in groups for c in g.completions]
        )
    assert difference.abs().mean() <= tolerance
    assert log_ratio(policy, groups).abs().mean() <= 10 * tolerance  # and the CPU is not far


@pytest.fixture
def exact_policy():
    """A policy whose products do not depend on other rows."""
    policy = tiny_policy(dtype=torch.bfloat16, device="cuda", head_dim=32)
    if not policy.model.backend.exact_products:
        pytest.skip("no Hopper GPU, or LAGRPO_EXACT=0")
    assert policy.model.exact
    return policy


def test_ratio_is_exactly_one_right_after_a_weight_sync(exact_policy):
    groups = list(sampled(exact_policy, requests_for(exact_policy, 5)).values())
    packed = Packed.build(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups], "cuda"
    )
    with torch.no_grad():
        logp = exact_policy.logp(packed).cpu()
    assert torch.equal(logp, torch.cat([c.rollout_logp for g in groups for c in g.completions]))


def test_completion_is_independent_of_other_completions_in_the_batch(exact_policy):
    """In one wide batch, in narrow waves, in another order and alone."""
    requests = requests_for(exact_policy, 5)
    wide = sampled(exact_policy, requests, max_tokens=100)
    others = [
        sampled(exact_policy, requests, max_tokens=100, rows=6),
        sampled(exact_policy, requests, max_tokens=100, rows=13),
        sampled(exact_policy, requests[::-1], max_tokens=100),
        sampled(exact_policy, requests[3:4], max_tokens=100),
    ]
    for other in others:
        for key, group in other.items():
            for ours, theirs in zip(group.completions, wide[key].completions, strict=True):
                assert torch.equal(ours.token_ids, theirs.token_ids)
                assert torch.equal(ours.rollout_logp, theirs.rollout_logp)


def test_recorded_steps_sample_the_same_tokens(monkeypatch):
    policy = tiny_policy(dtype=torch.bfloat16, device="cuda", head_dim=32)
    samples = []
    for often in (graphs.OFTEN, NEVER):
        monkeypatch.setattr(graphs, "OFTEN", often)
        samples.append(sampled(policy, requests_for(policy, 5), max_tokens=100))
    for key, group in samples[0].items():
        for ours, plain in zip(group.completions, samples[1][key].completions, strict=True):
            assert torch.equal(ours.token_ids, plain.token_ids)
            assert torch.equal(ours.rollout_logp, plain.rollout_logp)


def test_recorded_steps_of_several_pieces_give_each_row_its_own_hidden_state(monkeypatch):
    monkeypatch.setattr(recorded, "PIECE", 8)
    policy = tiny_policy(dtype=torch.bfloat16, device="cuda", head_dim=32)
    steps = [[[20 + n, 30 + n, 40 + n] for _ in range(4)] for n in range(10)]  # pieces of 8 and 4
    replayed = decode(RecordedState(policy.model, 4, 400), steps)
    monkeypatch.setattr(graphs, "OFTEN", NEVER)
    computed = decode(RecordedState(policy.model, 4, 400), steps)
    for ours, expected in zip(replayed, computed, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(12, 2, 128), (9, 3, 64), (4, 4, 32)])
def test_flash_attention_reads_a_cache_in_place(heads, kv_heads, d):
    """Rows in any order, one of them twice; each token sees a part of its row."""
    assert flash_reads_caches(torch.device("cuda"), torch.bfloat16, heads, kv_heads, d)
    rng = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(5, heads, d, generator=rng, device="cuda").bfloat16()
    keys, values = (
        torch.randn(4, 700, kv_heads, d, generator=rng, device="cuda").bfloat16() for _ in range(2)
    )
    rows = torch.tensor([3, 0, 2, 3, 1], device="cuda")
    num_seen = torch.tensor([1, 700, 64, 129, 333], device="cuda")
    ours = attend_by_flash(query, keys, values, rows, num_seen, d**-0.5)
    expected = attend_by_mask(
        query.float(), keys.float(), values.float(), rows, num_seen, d**-0.5, num_keys=700
    )
    # The kernel rounds probabilities and outputs to bfloat16: some steps of 2^-8.
    torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tokens", [1, 700], ids=["a token a step", "a long reply"])
def test_decoding_gives_the_hidden_states_of_the_whole_row(tokens):
    """The last of eight steps, against the packed row of everything before it."""
    policy = tiny_policy(
        dtype=torch.bfloat16, device="cuda", head_dim=32, max_position_embeddings=8192
    )
    rng = torch.Generator().manual_seed(0)
    steps = [torch.randint(3, 90, (2, tokens), generator=rng).tolist() for _ in range(8)]
    state = RecordedState(policy.model, 2, 8192)
    prompt = [5, 6, 7, 8, 9]
    state.admit([prompt], 2)
    hidden = [state.feed(*flat(step)) for step in steps][-1]
    for row in range(2):
        ids = torch.tensor([*prompt, *(token for step in steps for token in step[row])])
        layout = PackedLayout.build([(len(ids), ())], "cuda")
        with torch.no_grad():
            row_states = policy.model.hidden(
                ids.cuda(), layout.position_ids, policy.model.backend.over(layout)
            )
        ours = hidden[row * tokens : (row + 1) * tokens].float()
        theirs = row_states[-tokens:].float()
        # bfloat16 through two layers, with products whose sums have another order for few rows.
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()


def test_sampler_with_graphs_of_earlier_batches_samples_what_a_new_one_does():
    policy, other = (
        tiny_policy(dtype=torch.bfloat16, device="cuda", head_dim=32, seed=seed) for seed in (0, 1)
    )
    sampler = LocalSampler(copy_policy(policy), 0, 100, 64)
    for _ in range(2):
        list(sampler.sample(requests_for(policy, 9), 6))
    sampler.sync_weights(other.weights, 1)
    groups = {r.prompt.key: group for r, group in sampler.sample(requests_for(policy, 5), 6)}
    for key, group in sampled(other, requests_for(policy, 5), max_tokens=100).items():
        for ours, new in zip(groups[key].completions, group.completions, strict=True):
            assert torch.equal(ours.token_ids, new.token_ids)
            assert torch.equal(ours.rollout_logp, new.rollout_logp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_of_log_probs_in_many_chunks_equals_that_in_one(dtype):
    torch.manual_seed(0)
    head = nn.Linear(64, 500, bias=False, device="cuda", dtype=dtype)
    hidden = torch.randn(300, 64, device="cuda", dtype=dtype, requires_grad=True)
    ids = torch.arange(300, device="cuda")
    gradients = []
    with deterministic(tiny_policy(device="cuda").model):
        # 300 rows in 43 products, and in one.
        for rows in (7, 1000):
            sizes = replace(ON_GPU, softmax=3 * 500, product=rows * 500)
            logp = token_logp(hidden, head, ids, 1.0, sizes=sizes)
            gradients.append(torch.autograd.grad(logp.sum(), (hidden, head.weight)))
    for many, one in zip(*gradients, strict=True):
        assert (many.float() - one.float()).abs().max() <= 0.02 * one.float().abs().max()


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(6, 2, 64), (4, 4, 32), (4, 2, 128)])
def test_flash_attention_and_its_gradient_equal_attention_by_segments(heads, kv_heads, d):
    layout = PackedLayout.build(
        [(7, (3, 9, 1)), (300, (1, 200, 77)), (1, (4, 4, 30)), (5, ())], "cuda"
    )
    rng = torch.Generator("cuda").manual_seed(0)
    q, k, v, weight = (
        torch.randn(
            layout.rows,
            h,
            d,
            generator=rng,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        for h in (heads, kv_heads, kv_heads, heads)
    )
    assert takes_varlen(q.device, q.dtype, d)
    outputs = []
    for attend in (attend_varlen, attend_by_segments):
        out = attend(layout, q, gather_keys(layout, k), gather_keys(layout, v), d**-0.5)
        outputs.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
    for ours, theirs in zip(*outputs, strict=True):
        assert (ours.float() - theirs.float()).abs().max() <= 0.03 * theirs.float().abs().max()


@pytest.mark.parametrize("groups", [1, 8], ids=["986 rows", "7,900 rows"])
@pytest.mark.parametrize("lora", [None, Lora(r=4, alpha=8.0, seed=3)], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_the_same_every_time(groups, lora, checkpointing):
    policy = tiny_policy(dtype=torch.bfloat16, device="cuda", head_dim=32, lora=lora)
    if checkpointing:
        policy.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
        policy.model.lm.train()
    shapes = [(300, (150, 200, 250, 90))] * groups
    packed = Packed.build(random_groups(shapes), policy.device)
    gradients = []
    for _ in range(3):
        policy.model.zero_grad()
        with deterministic(policy.model):
            policy.logp(packed).sum().backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.requires_grad])
    assert all(
        torch.equal(one, other)
        for other in gradients[1:]
        for one, other in zip(gradients[0], other, strict=True)
    )


def test_resumed_run_on_cuda_is_the_run_that_never_stopped(tmp_path):
    settings = {
        "model": {"path": str(save_tiny(tmp_path / "model"))},
        "run": {"output_dir": str(tmp_path / "runs")},
        "rollout": {"num_generations": 4, "max_completion_length": 8, "max_prompt_length": 64},
        "schedule": {"prompts_per_batch": 4, "batches": 2, "sync_every": 2, "num_iterations": 2},
        "eval": {"num_prompts": 4, "num_samples": 2},
    }
    uninterrupted = lagrpo.train(settings, settings={"schedule.batches": 4, "run.name": "whole"})
    stopped = lagrpo.train(settings, settings={"run.name": "stopped"})
    resumed = lagrpo.train(
        resume=stopped.run, settings={"schedule.batches": 4}, trust_run_code=True
    )
    assert uninterrupted.batches == resumed.batches == 4
    weights = [
        load_file(run / "weights/final/model.safetensors")
        for run in (uninterrupted.run, resumed.run)
    ]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
