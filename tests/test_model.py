"""Weights, models and packed rows; hooks on linear layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampling import requests_for
from tiny import tiny_policy
from torch import nn

from lagrpo.model.layout import Packed
from lagrpo.rollout.local import LocalSampler

BOTH = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def packed() -> Packed:
    return Packed.build(
        [([5, 6, 7, 8], [torch.tensor([4, 9, 11]), torch.tensor([8, 30, 31, 6, 7])]), ([9], [])]
    )


@BOTH
def test_hooks_on_every_linear_layer_of_the_decoder_fire_in_trainer_and_sampler(dtype):
    """A hooked model runs module by module, although the kernels could compute whole layers."""
    policy = tiny_policy(dtype=dtype, backend="c")
    assert policy.model.layers is not None
    with torch.no_grad():
        plain = policy.logp(packed())
    called: Counter[str] = Counter()
    modules = policy.model.decoder.named_modules()
    linear = {name: module for name, module in modules if isinstance(module, nn.Linear)}
    for name, module in linear.items():
        module.register_forward_hook(lambda *_, name=name: called.update([name]))
    assert not policy.model.exact
    with torch.no_grad():
        torch.testing.assert_close(policy.logp(packed()), plain, rtol=0, atol=TOLERANCE[dtype])
    assert called.keys() == linear.keys()
    called.clear()
    list(LocalSampler(policy, 0, 5, 8).sample(requests_for(policy, 2), 3))
    assert called.keys() == linear.keys()
    assert min(called.values()) > 3  # in steps, not in the prefill alone


@BOTH
def test_gradients_flow_through_the_calls_of_hooked_layers(dtype):
    grads = []
    for hooked in (False, True):
        policy = tiny_policy("qwen2", dtype, backend="c", tie_word_embeddings=True)
        entropy_T = torch.empty(8)
        for module in policy.model.decoder.modules():
            if hooked and isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda *_: None)
        policy.logp(packed(), entropy_T).sum().backward()
        parameters = policy.model.parameters()
        grads.append([p.grad.float() for p in parameters if p.grad is not None] + [entropy_T])
    for ours, theirs in zip(*grads, strict=True):
        scale = theirs.abs().max()
        bound = {torch.float32: 1e-4, torch.bfloat16: 0.06}[dtype]
        assert ((ours - theirs).abs().max() / scale).item() < bound


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(1, 6), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_packed_row_has_every_token_at_its_position_behind_the_row_that_predicts_it(lengths):
    ids = iter(range(10**6))
    groups = [
        (
            [next(ids) for _ in range(p)],
            [torch.tensor([next(ids) for _ in range(c)]) for c in counts],
        )
        for p, counts in lengths
    ]
    row = Packed.build(groups)
    layout = row.layout
    tokens = row.input_ids.tolist()
    pairs = [(prompt, c.tolist()) for prompt, completions in groups for c in completions]
    positions = {token: at for prompt, _ in groups for at, token in enumerate(prompt)}
    positions |= {token: len(prompt) + at for prompt, c in pairs for at, token in enumerate(c)}
    assert row.token_ids.tolist() == [token for _, c in pairs for token in c]
    assert layout.position_ids.tolist() == [positions[token] for token in tokens]
    before = [token for prompt, c in pairs for token in [prompt[-1], *c[:-1]]]
    assert [tokens[at] for at in layout.logit_rows.tolist()] == before
    assert [tokens[at] for at in layout.last_prompt_rows.tolist()] == [
        prompt[-1] for prompt, _ in groups
    ]
    assert layout.rows == len(tokens)


def test_loading_copies_into_the_models_own_storage_and_counts_the_version():
    policy = tiny_policy()
    other = tiny_policy(seed=1)
    addresses = {name: w.data_ptr() for name, w in policy.weights.items()}
    policy.load(other.weights, 7)
    assert policy.version == 7
    assert addresses == {name: w.data_ptr() for name, w in policy.weights.items()}
    assert policy.weights.differing(other.weights) == []
    with pytest.raises(ValueError, match=r"model\.norm\.weight .*\(31,\)"):
        policy.load({**other.weights, "model.norm.weight": torch.ones(31)}, 8)
    assert policy.version == 7
