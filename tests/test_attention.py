"""Shared-prefix attention on one packed row computes what transformers computes on whole sequences,
one by one."""

from __future__ import annotations

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import assert_close, dense_attention, random
from tiny import SHAPES, tiny_model, tiny_policy

from lagrpo.model.backend import choose_backend
from lagrpo.model.layout import Packed, PackedLayout
from lagrpo.model.loading import check_attention, check_context, check_supported
from lagrpo.model.model import Policy

either_computation = pytest.mark.usefixtures("either_computation")
# Length of a prompt, and of its completions. A completion of one token has no row of its own, a
# prompt of one token no earlier ones, and the last prompt no completion.
GROUPS = ((7, (3, 9, 1)), (20, (1,)), (1, (4, 4, 30)), (5, ()))


def random_groups(shape, vocabulary=103, seed=0):
    rng = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(vocabulary, (n,), generator=rng)  # noqa: E731
    return [(ids(p).tolist(), [ids(c) for c in lengths]) for p, lengths in shape]


def reference_logp(policy: Policy, groups) -> torch.Tensor:
    """Each prompt + completion through transformers' own attention, in a sequence of its own."""
    policy.model.lm.set_attn_implementation("eager")
    rows = []
    for prompt, completions in groups:
        for completion in completions:
            ids = torch.cat([torch.tensor(prompt, dtype=torch.long), completion])
            logits = policy.model.lm(input_ids=ids[None], use_cache=False).logits[0]
            logp = (logits / policy.tau).log_softmax(-1)
            # The row of a token predicts the next one, so the last row predicts nothing.
            rows.append(logp[len(prompt) - 1 : -1].gather(1, completion[:, None]).squeeze(1))
    policy.model.lm.set_attn_implementation("lagrpo_shared_prefix")
    return torch.cat(rows)


def gradients(policy: Policy, logp: torch.Tensor) -> dict[str, torch.Tensor]:
    # A weight of its own for each token: a sum would hide gradients that go to the wrong token.
    weights = torch.linspace(-1, 1, len(logp), dtype=logp.dtype)
    policy.model.zero_grad()
    (logp * weights).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.lm.named_parameters()}


@either_computation
@pytest.mark.parametrize("kind", SHAPES)
def test_logp_and_gradients_equal_the_per_sequence_reference(kind):
    # At .1 log-probs are ten times as large, and so is their rounding.
    for tau in (1.0, 0.1):
        policy = tiny_policy(kind, dtype=torch.float64, tau=tau)
        groups = random_groups(GROUPS)
        logp = policy.logp(Packed.build(groups))
        reference = reference_logp(policy, groups)
        # Log-probs are float32 by design; the rest of the model runs in float64 here.
        torch.testing.assert_close(logp.double(), reference, rtol=0, atol=5e-6 / tau)
        ours = gradients(policy, logp)
        theirs = gradients(policy, reference)
        for name in theirs:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=1e-4, atol=2e-5 / tau, msg=name
            )


@either_computation
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_any_packing_gives_the_logp_of_whole_sequences(shape):
    if not any(lengths for _, lengths in shape):
        return
    policy = tiny_policy()
    groups = random_groups(shape)
    packed = Packed.build(groups)
    logp = policy.logp(packed)
    logp.sum().backward()
    # No padding, and no last tokens.
    assert packed.layout.rows == sum(p + sum(c - 1 for c in lengths) for p, lengths in shape)
    torch.testing.assert_close(logp, reference_logp(policy, groups), rtol=0, atol=2e-5)
    assert all(
        torch.isfinite(p.grad).all() for p in policy.model.parameters() if p.grad is not None
    )


def assert_attends(attend, heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> None:
    """Against all rows with all rows in float64; gradients of a prompt that several segments see
    add up in float32."""
    layout = PackedLayout.build(GROUPS)
    q, k, v, grad = (
        random(layout.rows, h, d, seed=s, dtype=dtype).requires_grad_()
        for s, h in enumerate((heads, kv_heads, kv_heads, heads))
    )
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, _ = dense_attention(layout, *exact, scaling=d**-0.5)
    out = attend(layout, q, k, v, d**-0.5)
    # Roundings of scores of up to 4, of probabilities, of outputs.
    assert_close(out.detach(), expected.detach(), 6)
    expected_grads = torch.autograd.grad((expected * grad.detach().double()).sum(), exact)
    grads = torch.autograd.grad(out, (q, k, v), grad.detach())
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert_close(ours, theirs, 8)


@either_computation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradient_in_each_dtype(dtype):
    for heads, kv_heads, d in ((6, 2, 16), (3, 3, 8), (4, 1, 32)):
        attend = choose_backend(tiny.BACKEND, "cpu", dtype).attend
        assert_attends(attend, heads, kv_heads, d, dtype)


@either_computation
def test_completion_sees_neither_its_siblings_nor_other_prompts():
    policy = tiny_policy()
    groups = random_groups([(6, (5, 8)), (9, (7,))])
    prompt, completions = groups[0]
    alone = policy.logp(Packed.build([(prompt, [completions[1]])]))
    together = policy.logp(Packed.build(groups))
    # Tokens 5 to 12 are the second completion's.
    torch.testing.assert_close(together[5:13], alone, rtol=0, atol=1e-5)


@either_computation
def test_gradient_checkpointing_gives_the_same_gradient():
    policy = tiny_policy()
    groups = random_groups(GROUPS)
    plain = gradients(policy, policy.logp(Packed.build(groups)))
    policy.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.model.lm.train()
    for name, gradient in gradients(policy, policy.logp(Packed.build(groups))).items():
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=1e-6, msg=name)


def test_model_with_another_attention_is_rejected_when_it_is_loaded(monkeypatch):
    policy = tiny_policy(spread=2.0)
    assert check_attention(policy) < 1e-4
    monkeypatch.setattr(
        type(policy.model.backend), "attend", lambda backend, layout, q, k, v, scaling: q * 0.5
    )
    with pytest.raises(ValueError, match="differ from transformers"):
        check_attention(policy)


def test_check_of_a_model_begins_with_the_token_that_begins_its_texts():
    policy = tiny_policy()
    policy.chat.tokenizer.bos_token = "<stop>"
    first_tokens: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, arguments: first_tokens.append(int(arguments[0].input_ids[0]))
    )
    check_attention(policy)
    assert first_tokens == [policy.chat.tokenizer.bos_token_id]


def test_unsupported_architecture_is_rejected_by_name():
    from transformers import AutoConfig

    for kind, reason in {
        "gemma2": "soft-capping",
        "cohere": "a scale on the logits",
        "gpt_oss": "sinks",
        "diffllama": "attend more than once",
        "hrm_text": "attend more than once",
        "deepseek_v3": "latent",
        "t5": "encoder",
        "mixtral": "experts",
        "qwen3_moe": "experts",
        "qwen2_5_vl": "image",
        "bloom": "outside",
    }.items():
        changes = {"logit_scale": 0.06} if kind == "cohere" else {}
        with pytest.raises(ValueError, match=rf"'{kind}.*{reason}"):
            check_supported(AutoConfig.for_model(kind, **changes))


@either_computation
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_sequence_longer_than_the_sliding_window_or_the_positions_is_rejected(kind):
    policy = Policy.from_model(tiny_model(kind, sliding_window=24), None)
    check_context(policy.model.config, 24)
    with pytest.raises(ValueError, match="sliding window"):
        check_context(policy.model.config, 25)
    with pytest.raises(ValueError, match="attends to 24 tokens"):
        policy.logp(Packed.build(random_groups([(20, (5,))])))
    inside = random_groups([(16, (5, 8))])
    torch.testing.assert_close(
        policy.logp(Packed.build(inside)), reference_logp(policy, inside), rtol=0, atol=2e-5
    )
    with pytest.raises(ValueError, match="longest position"):
        check_context(tiny_policy().model.config, 513)


@pytest.mark.parametrize(
    ("long_factor", "longest"),
    [
        pytest.param(4.0, 32, id="another factor beyond 32 tokens"),
        pytest.param(1.0, 512, id="the same factor"),
    ],
)
def test_sequence_beyond_the_switch_of_longrope_is_rejected(long_factor, longest):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [long_factor] * 8,
    }
    config = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=32).config
    check_context(config, longest)
    with pytest.raises(ValueError, match=f" is {longest}: lower"):
        check_context(config, longest + 1)


@pytest.mark.parametrize(
    ("positions", "longest"),
    [
        pytest.param(64, 256, id="original positions in the config"),
        pytest.param(256, 256, id="stretched positions in the config"),
        pytest.param(300, 300, id="more positions in the config"),
    ],
)
def test_yarn_stretches_the_longest_position(positions, longest):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_model("qwen2", max_position_embeddings=positions, rope_parameters=rope).config
    check_context(config, longest)
    with pytest.raises(ValueError, match=f"longest position of this model is {longest}:"):
        check_context(config, longest + 1)


def test_model_call_without_a_layout_is_an_error():
    with pytest.raises(ValueError, match="without a layout"):
        tiny_model()(input_ids=torch.tensor([[3, 4, 5]]))


def test_each_row_is_seen_by_its_group_or_by_its_completion():
    """A prompt of two rows, completions of two and one rows; then a prompt of one row alone."""
    layout = PackedLayout.build([(2, [3, 2]), (1, [])])
    first, count, position, starts = (tensor.tolist() for tensor in layout.seen_by)
    assert first == [0, 0, 1, 1, 2, 3]
    assert count == [3, 3, 1, 1, 1, 1]
    assert position == [0, 1, 2, 3, 2, 0]
    assert starts == [0, 2, 6, 9]
    # Every entry of `seen_rows` is found again from the row that is seen there.
    entries = [
        (starts[segment] + position[row], row)
        for row in range(layout.rows)
        for segment in range(first[row], first[row] + count[row])
    ]
    assert sorted(entries) == list(enumerate(layout.seen_rows.tolist()))
