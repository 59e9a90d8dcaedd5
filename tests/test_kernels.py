"""The kernels against the formulas in float64, and how they are had."""

from __future__ import annotations

import functools
import logging
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from feeding import flat
from rounding import rounding
from tiny import tiny_policy
from torch import Tensor, nn

from lagrpo.cpu import autograd, kernels, library
from lagrpo.cpu.autograd import rotary
from lagrpo.model import logprobs
from lagrpo.model import model as model_module
from lagrpo.model.backend import Choice, choose_backend
from lagrpo.model.layout import PackedLayout
from lagrpo.model.model import Packed, PackedWeights, copy_policy
from lagrpo.rollout.decoding import DecodeState

# below, at and beyond one vector
WIDTHS = pytest.mark.parametrize("width", [1, 33, 576], ids="width {}".format)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TEMPERATURES = pytest.mark.parametrize("tau", [1.0, 0.7], ids="temperature {}".format)
BACKENDS = pytest.mark.parametrize("choice", ["c", "torch"])
# bfloat16: half the distance between neighbors at 1, as kernels add in float32 and round once at
# the end. float32: some of its roundings, because sums of hundreds of terms round at each.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


pytestmark = pytest.mark.usefixtures("with_kernels")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer with this weight."""
    layer = nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight = nn.Parameter(weight)
    return layer


def assert_close(ours: Tensor, theirs: Tensor, roundings: float = 1.0) -> None:
    """To a number of roundings in the dtype of ours, relative to the largest value."""
    scale = theirs.abs().max().clamp(min=1e-30)
    assert ((ours.double() - theirs).abs().max() / scale).item() <= roundings * ROUNDING[ours.dtype]


@WIDTHS
@DTYPES
def test_norm_and_its_gradient(width, dtype):
    x, delta, grad_y, grad_total = (random(7, width, seed=s, dtype=dtype) for s in range(4))
    weight = random(width, seed=9, dtype=dtype)
    total, y, rstd = kernels.norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)

    total_exact = total.double().requires_grad_()
    weight_exact = weight.double().requires_grad_()
    rstd_exact = torch.rsqrt(total_exact.pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = weight_exact * total_exact * rstd_exact
    assert_close(y, expected.detach(), 3)

    grad_x, grad_weight = kernels.norm_backward(total, weight, rstd, grad_y, grad_total)
    value = (expected * grad_y.double()).sum()
    expected_grad_x, expected_grad_weight = torch.autograd.grad(value, (total_exact, weight_exact))
    assert_close(grad_x, expected_grad_x + grad_total.double(), 3)
    assert_close(grad_weight, expected_grad_weight, 3)


@WIDTHS
@DTYPES
def test_swiglu_and_its_gradient(width, dtype):
    # Times 3, so that the sigmoid is also computed where it is nearly 0 or 1.
    gate, up, grad = (random(5, width, seed=s, dtype=dtype) * 3 for s in range(3))
    gate_exact = gate.double().requires_grad_()
    up_exact = up.double().requires_grad_()
    expected = torch.nn.functional.silu(gate_exact) * up_exact
    y = kernels.swiglu(gate, up)
    assert_close(y, expected.detach(), 3)

    y_again, grad_gate, grad_up = kernels.swiglu_backward(gate, up, grad)
    assert torch.equal(y_again, y)
    value = (expected * grad.double()).sum()
    expected_grad_gate, expected_grad_up = torch.autograd.grad(value, (gate_exact, up_exact))
    assert_close(grad_gate, expected_grad_gate, 3)
    assert_close(grad_up, expected_grad_up, 3)

    # As columns of one product, whose rows are further apart.
    both = torch.cat([gate, up], 1)
    assert torch.equal(kernels.swiglu(both[:, :width], both[:, width:]), y)


@DTYPES
def test_rotary_embedding_and_its_gradient(dtype):
    x = random(6, 3, 64, dtype=dtype)
    angle = random(6, 32).repeat(1, 2)
    cosine = angle.cos().to(dtype)
    sine = angle.sin().to(dtype)
    turned = torch.cat([-x[..., 32:], x[..., :32]], -1)
    assert_close(
        kernels.rotary(x, cosine, sine),
        (x * cosine[:, None] + turned * sine[:, None]).double(),
        0.1,
    )
    # turning back is the transpose: <turn x, y> = <x, turn back y>
    y = random(6, 3, 64, seed=1, dtype=dtype)
    forward = kernels.rotary(x, cosine, sine).double() * y.double()
    backward = x.double() * kernels.rotary(y, cosine, sine, back=True).double()
    assert (forward - backward).sum().abs() <= ROUNDING[dtype] * forward.abs().sum()


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(
            ((7, (3, 9, 2)), (20, (1,)), (1, (5, 5, 30)), (5, ())), id="four short groups"
        ),
        pytest.param(((130, (70, 3)),), id="one long group"),
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d"),
    [
        pytest.param(9, 3, 64, id="9 heads on 3 of 64"),
        pytest.param(4, 4, 16, id="4 heads on 4 of 16"),
        pytest.param(8, 1, 80, id="8 heads on 1 of 80"),
        pytest.param(5, 1, 32, id="5 heads on 1 of 32"),
    ],
)
@DTYPES
def test_attention_and_its_gradient(groups, heads, kv_heads, d, dtype):
    layout = PackedLayout.build(groups)
    q, grad = (random(layout.rows, heads, d, seed=s, dtype=dtype) for s in (0, 1))
    k, v = (random(layout.rows, kv_heads, d, seed=s, dtype=dtype) for s in (2, 3))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected, lse_expected = dense_attention(layout, *exact, scaling=d**-0.5)
    out, lse = kernels.attention(layout, q, k, v, d**-0.5)
    assert_close(out, expected.detach(), 2)
    assert_close(lse, lse_expected.detach(), 2)
    grads = kernels.attention_backward(layout, q, k, v, out, lse, grad, d**-0.5)
    expected_grads = torch.autograd.grad((expected * grad.double()).sum(), exact)
    for grad_ours, grad_expected in zip(grads, expected_grads, strict=True):
        assert_close(grad_ours, grad_expected, 4)


def dense_attention(
    layout: PackedLayout, q: Tensor, k: Tensor, v: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """All rows against all rows, with a mask made from the segments."""
    seen = torch.zeros(layout.rows, layout.rows, dtype=torch.bool)
    for first, length, prefix, prefix_length in layout.segments.tolist():
        positions = torch.arange(first, first + length)
        # Within a segment causally, and all of its prompt.
        seen[positions[:, None], positions[None, :]] = positions[:, None] >= positions[None, :]
        seen[first : first + length, prefix : prefix + prefix_length] = True
    repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeats, 1)  # [rows, Hq, D]
    v = v.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling  # [Hq, rows, rows]
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)  # [rows, Hq, D]
    return out, scores.logsumexp(-1).T


@pytest.mark.parametrize("vocabulary", [2, 256, 1001], ids="{} tokens".format)
@TEMPERATURES
@DTYPES
def test_log_probs_of_tokens_and_their_gradient(vocabulary, tau, dtype):
    # Times 4, so that probabilities differ by many orders of magnitude.
    logits = (random(9, vocabulary, dtype=dtype) * 4).requires_grad_()
    ids = torch.arange(9) % vocabulary
    exact = logits.double() / tau
    expected = exact.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    logp, lse = kernels.token_logp(logits.detach(), ids, tau)
    bound = rounding(torch.float32, exact.abs().max().item(), 16)
    assert (logp - expected).abs().max().item() <= bound
    assert (lse - exact.logsumexp(-1)).abs().max().item() <= bound
    weights = torch.linspace(-1, 1, 9)
    (expected * weights).sum().backward()
    assert logits.grad is not None
    ours = kernels.token_logp_backward(logits.detach().clone(), ids, tau, lse, weights)
    assert_close(ours, logits.grad.double(), 2)


@BACKENDS
@TEMPERATURES
def test_entropy_on_request(choice, tau):
    """Compares a fair coin, certainty and random logits; log-probs stay the same."""
    token_logp = partial(logprobs.token_logp, softmax=kernels if choice == "c" else None)
    hidden = random(20, 8, seed=1)
    weight = random(300, 8, seed=2)
    head = linear(weight)
    ids = torch.arange(20)
    entropy = torch.empty(20)
    expected = torch.distributions.Categorical(logits=(hidden @ weight.T).double() / tau).entropy()
    plain = token_logp(hidden, head, ids, tau, None)
    with_entropy = token_logp(hidden, head, ids, tau, entropy)
    assert torch.equal(plain, with_entropy)
    torch.testing.assert_close(entropy.double(), expected, rtol=0, atol=1e-5)
    coin_and_certainty = torch.full((2, 40), -torch.inf)
    # Entries 3 and 30 of the first row share its probability; the second row has one entry.
    coin_and_certainty[0, [3, 30]] = 5.0
    coin_and_certainty[1, 7] = 2.0
    two_entropies = torch.empty(2)
    kernels.token_logp(coin_and_certainty, torch.tensor([3, 7]), tau, two_entropies)
    torch.testing.assert_close(two_entropies, torch.tensor([0.6931472, 0.0]))  # log 2


@pytest.mark.parametrize("vocabulary", [2, 256, 1001], ids="{} tokens".format)
@TEMPERATURES
@DTYPES
def test_gradient_of_logits_has_the_gradient_of_the_entropy(vocabulary, tau, dtype):
    logits = (random(9, vocabulary, dtype=dtype) * 4).requires_grad_()
    ids = torch.arange(9) % vocabulary
    exact = (logits.double() / tau).log_softmax(-1)
    exact_entropy = -(exact.exp() * exact).sum(-1)
    of_logp, of_entropy = torch.linspace(-1, 1, 9), torch.linspace(2, -1, 9)
    logp = exact.gather(1, ids[:, None]).squeeze(1)
    (of_logp * logp + of_entropy * exact_entropy).sum().backward()
    assert logits.grad is not None
    entropy = torch.empty(9)
    _, lse = kernels.token_logp(logits.detach(), ids, tau, entropy)
    ours = kernels.token_logp_backward(
        logits.detach().clone(), ids, tau, lse, of_logp, entropy, of_entropy
    )
    assert_close(ours, logits.grad.double(), 4)


def test_gradient_of_the_entropy_is_zero_at_impossible_tokens():
    logits = torch.full((2, 40), -torch.inf)
    logits[0, [3, 30]] = torch.tensor([1.0, 2.0])
    logits[1, 7] = 2.0
    ids = torch.tensor([3, 8])
    entropy = torch.empty(2)
    _, lse = kernels.token_logp(logits, ids, 1.0, entropy)
    no_grad, grad = torch.zeros(2), torch.ones(2)
    ours = kernels.token_logp_backward(logits.clone(), ids, 1.0, lse, no_grad, entropy, grad)
    # Two tokens, p = 1 / (1 + e): the derivative of their entropy is p (1 - p) log((1 - p) / p).
    expected = torch.zeros(2, 40)
    expected[0, [3, 30]] = torch.tensor([0.1966119, -0.1966119])
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


@DTYPES
def test_a_token_s_log_prob_is_the_same_whether_it_is_sampled_or_scored(dtype):
    logits = random(40, 1001, dtype=dtype) * 5
    tokens, logp = kernels.sample_tokens(logits, 0.9, torch.rand(40, dtype=torch.float64))
    assert torch.equal(logp, kernels.token_logp(logits, tokens, 0.9)[0])


def test_kernels_and_pytorch_sample_the_same_tokens():
    logits = random(500, 1001) * 3
    rng = torch.Generator().manual_seed(0)
    uniform = torch.rand(500, dtype=torch.float64, generator=rng)
    by_kernels = choose_backend("c", "cpu", torch.float32)
    by_torch = choose_backend("torch", "cpu", torch.float32)
    ours, logp = by_kernels.sample(logits, 0.8, uniform)
    theirs, reference = by_torch.sample(logits, 0.8, uniform)
    agrees = ours == theirs
    # A number within 1e-7 of an interval's end may fall on either side.
    assert (~agrees).sum().item() <= 1
    bound = rounding(torch.float32, logits.abs().max().item() / 0.8, 16)
    torch.testing.assert_close(logp[agrees], reference[agrees], rtol=0, atol=bound)


@pytest.mark.parametrize(
    "kept_logits",
    [
        pytest.param(0, id="none"),
        pytest.param(1, id="less than a row"),
        pytest.param(150, id="some rows"),
        pytest.param(2000, id="all rows"),
    ],
)
def test_keeping_logits_for_the_backward_pass_changes_nothing(kept_logits, monkeypatch):
    """Two forward passes come before their backward passes; one of these runs twice."""
    sizes = replace(logprobs.ON_CPU, product=300)
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", kept_logits)
    hidden = random(9, 8, seed=1).requires_grad_()
    head = linear(random(100, 8, seed=2))
    weight = head.weight
    ids = torch.arange(9)
    plain_logp = torch.log_softmax(hidden @ weight.T, -1)[ids, ids]
    expected = torch.autograd.grad(plain_logp.sum(), (hidden, weight))
    first, second = (
        logprobs.token_logp(hidden, head, ids, 1.0, softmax=kernels, sizes=sizes).sum()
        for _ in range(2)
    )
    for loss in (first, second, first):
        grads = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        for ours, theirs in zip(grads, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_row_is_independent_of_other_rows_and_of_threads():
    """To the bit: what makes sampler and trainer agree."""
    policy = tiny_policy(dtype=torch.bfloat16)
    ids = torch.Generator().manual_seed(0)
    groups = [
        ([5, 6, 7, 8], [torch.randint(103, (n,), generator=ids) for n in (9, 3, 12)])
        for _ in range(3)
    ]
    with torch.no_grad():
        together = policy.logp(Packed.build(groups))
        threads = torch.get_num_threads()
        # Another number of threads than before, whatever that was.
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            alone = [
                policy.logp(Packed.build([(prompt, [c])])) for prompt, cs in groups for c in cs
            ]
        finally:
            torch.set_num_threads(threads)
    assert torch.equal(together, torch.cat(alone))


LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
FUSED_MODELS = pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param(
            "llama",
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            id="llama with biases and tied embeddings",
        ),
        pytest.param("llama", {"rope_parameters": LINEAR_ROPE}, id="llama with linear RoPE"),
        pytest.param("mistral", {"head_dim": 32}, id="mistral with wide heads"),
        pytest.param("qwen2", {}, id="qwen2"),
        pytest.param("qwen3", {}, id="qwen3"),
    ],
)


@pytest.mark.parametrize(
    "checkpointing", [False, True], ids=["activations kept", "activations recomputed"]
)
@FUSED_MODELS
def test_the_fused_decoder_gives_the_gradient_of_transformers_modules(kind, changes, checkpointing):
    groups = [([5, 6, 7, 8, 9], [torch.tensor([4, 9, 11, 30]), torch.tensor([8, 1])])]
    gradients = {}
    for choice in ("c", "torch"):
        policy = tiny_policy(kind, backend=choice, **changes)
        assert (policy.model.layers is not None) == (choice == "c")
        if checkpointing:
            policy.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
            policy.model.lm.train()
        policy.logp(Packed.build(groups)).sum().backward()
        gradients[choice] = {n: p.grad for n, p in policy.model.lm.named_parameters()}
    for name, theirs in gradients["torch"].items():
        torch.testing.assert_close(gradients["c"][name], theirs, rtol=1e-4, atol=2e-5, msg=name)


def test_the_fused_decoder_keeps_to_the_window_and_to_whole_heads():
    policy = tiny_policy("mistral", head_dim=32, sliding_window=8)
    assert policy.model.layers is not None
    with pytest.raises(ValueError, match="attends to 8 tokens"):
        policy.logp(Packed.build([([5, 6, 7, 8, 9], [torch.arange(5)])]))
    with pytest.raises(ValueError, match="rotary embedding"):
        rotary(random(3, 2, 64), random(3, 32), random(3, 32))


@BACKENDS
@pytest.mark.parametrize("token", [-1, 103, 10**9], ids="token {}".format)
def test_a_token_outside_the_vocabulary_is_rejected(token, choice):
    with pytest.raises(ValueError, match=f"token {token}"):
        tiny_policy(backend=choice).logp(Packed.build([([5, 6], [torch.tensor([7, token])])]))


@FUSED_MODELS
def test_rows_of_zeros_in_products_of_few_rows_change_nothing(kind, changes, monkeypatch):
    """As on a GPU, where a product has sixteen rows or more. Here it has eight."""
    groups = [([5, 6, 7, 8, 9], [torch.tensor([4, 9, 11, 30]), torch.tensor([8, 1])])]
    num_padded = 0

    def with_sixteen_rows(x: Tensor) -> Tensor:
        nonlocal num_padded
        num_padded += 1
        return nn.functional.pad(x, (0, 0, 0, 16 - len(x)))

    def compute() -> list[Tensor]:
        policy = tiny_policy(kind, backend="c", **changes)
        logp = policy.logp(Packed.build(groups))
        logp.sum().backward()
        logits = policy.model.logits(torch.ones(3, policy.model.head.in_features))
        gradients = [p.grad for p in policy.model.parameters() if p.grad is not None]
        return [logp.detach(), logits.detach(), *gradients]

    expected = compute()
    for module in (autograd, logprobs, model_module):
        monkeypatch.setattr(module, "with_enough_rows", with_sixteen_rows)
    for ours, theirs in zip(compute(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    # Four groups of linear layers in each of two decoder layers; the head twice.
    assert num_padded == 10


@FUSED_MODELS
def test_policy_copy_computes_the_same_bits_as_its_policy(kind, changes):
    """Also after a weight sync; and it keeps no second copy of what it has packed."""
    policy = tiny_policy(kind, dtype=torch.bfloat16, **changes)
    copy = copy_policy(policy)
    assert isinstance(copy.weights, PackedWeights)
    packed = Packed.build([([5, 6, 7, 8, 9], [torch.tensor([4, 9, 11, 30]), torch.tensor([8, 1])])])
    rows = torch.arange(packed.layout.rows)
    for version in (0, 1):
        with torch.no_grad():
            ours, theirs = (
                p.model.hidden(
                    packed.input_ids,
                    packed.layout.position_ids,
                    p.model.backend.over(packed.layout),
                )
                for p in (copy, policy)
            )
            assert torch.equal(ours, theirs)
            assert torch.equal(copy.model.logits(ours[rows]), policy.model.logits(theirs[rows]))
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        copy.load(policy.weights, version + 1)
        assert copy.version == version + 1
    assert (
        sum(p.numel() for p in copy.model.parameters())
        < sum(p.numel() for p in policy.model.parameters()) / 2
    )
    assert all(p.numel() for p in policy.model.parameters())
    with pytest.raises(ValueError, match="1 names differ"):
        copy.load({**policy.weights, "odd": torch.zeros(1)}, 3)


@FUSED_MODELS
def test_decoding_step_equals_layer_by_layer_decoding(kind, changes):
    """Two groups of unlike size, an odd and an even prompt, rows of unlike length; hidden states
    and caches, to the bit."""
    copy = copy_policy(tiny_policy(kind, dtype=torch.bfloat16, **changes))
    layers = copy.model.layers
    assert layers is not None
    states = [DecodeState(copy.model, 7, 80) for _ in range(2)]
    outputs: list[list[Tensor]] = []
    for state in states:
        state.admit([[5, 6, 7]], 4)
        state.feed(*flat([[4], [9], [8], [30]]))
        # Rows 4 to 6 start later than rows 0 to 3, so that their caches differ in length.
        state.admit([[9, 8, 7, 30, 31, 6]], 3)
        hidden = [state.feed(*flat([[row + t] for row in range(7)])) for t in range(70)]
        state.retire([1, 5])
        hidden.append(state.feed(*flat([[row] for row in range(5)])))
        outputs.append([*hidden, state.own.keys[:, :5], state.own.values[:, :5]])
        assert (layers._stack is None) == (not layers.at_once)
        # The second state goes layer by layer.
        layers.at_once = False
        layers._stack = None
    for one, other in zip(*outputs, strict=True):
        # As bits: 0 and -0 are equal as numbers.
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


# How they are had, with a cache of their own


def chosen(monkeypatch, choice: Choice, compiler: str, cache: Path) -> str:
    """The backend that a new process would choose."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("LAGRPO_CACHE", str(cache))
    monkeypatch.setattr(library, "_library", functools.cache(library._library.__wrapped__))
    return str(choose_backend(choice, "cpu", torch.float32))


def test_processes_that_start_together_compile_the_library_once(tmp_path, monkeypatch, caplog):
    """Threads stand for them. The compiler of this test copies a library compiled before."""
    compiler = tmp_path / "cc"
    compiled = shlex.quote(library._library()[0]._name)
    version_line = '[ "$1" = --version ] && exec echo cc'
    copy_line = f'while [ "$1" != -o ]; do shift; done; exec cp {compiled} "$2"'
    compiler.write_text(f"#!/bin/sh\n{version_line}\n{copy_line}\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("LAGRPO_CACHE", str(tmp_path / "cache"))
    together = threading.Barrier(2)
    fingerprint = library._fingerprint
    monkeypatch.setattr(
        library, "_fingerprint", lambda *parts: (fingerprint(*parts), together.wait())[0]
    )
    with caplog.at_level(logging.INFO), ThreadPoolExecutor() as pool:
        versions = [version for _, version in pool.map(lambda _: library.load_library(), "ab")]
    assert versions == ["cc", "cc"]
    assert ["compiling" in message for message in caplog.messages] == [True]


def test_library_of_another_user_is_not_loaded(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\necho cc\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n',
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "is_own", lambda path: False)
    computation = chosen(monkeypatch, "auto", str(compiler), tmp_path / "cache")
    assert computation.startswith("PyTorch (no C kernels: ")
    assert "another user" in computation


@pytest.mark.parametrize("compiler", ["no-such-compiler", "/bin/false"])
def test_without_a_compiler_pytorch_computes_and_says_why(tmp_path, monkeypatch, compiler):
    assert chosen(monkeypatch, "auto", compiler, tmp_path).startswith(
        f"PyTorch (no C kernels: {compiler} "
    )
    with pytest.raises(library.NoKernels, match="unavailable"):
        chosen(monkeypatch, "c", compiler, tmp_path)
    assert not [*tmp_path.rglob("*.so")]
