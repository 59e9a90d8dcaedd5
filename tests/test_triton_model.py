"""Models that the Triton kernels compute give what transformers' modules give.

On a GPU the kernels are compiled; elsewhere Triton's interpreter runs them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE
from test_kernels import FUSED_MODELS
from test_lora import move
from test_sampling import requests_for, sampled
from tiny import tiny_policy

from lagrpo.model import backend as backends
from lagrpo.model.backend import Backend
from lagrpo.model.layout import Packed
from lagrpo.model.lora import Lora
from lagrpo.model.model import copy_policy

pytestmark = [
    pytest.mark.triton,
    # The interpreter computes with NumPy, which warns of infinite numbers.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

TRITON = Backend(torch.device(DEVICE), torch.float32, triton=True)
GROUPS = [
    ([5, 6, 7, 8, 9], [torch.tensor([4, 9, 11, 30]), torch.tensor([8, 1])]),
    ([20, 21, 22], [torch.tensor([7])]),
]


def policy_by(backend, kind: str, **changes):
    return tiny_policy(kind, backend=backend, device=DEVICE, **changes)


def logp_and_gradients(policy):
    """The log-probs of the tokens of GROUPS, and the gradient of their sum by name."""
    logp = policy.logp(Packed.build(GROUPS, policy.device))
    logp.sum().backward()
    gradients = {
        name: parameter.grad
        for name, parameter in policy.model.lm.named_parameters()
        if parameter.requires_grad
    }
    return logp.detach(), gradients


def assert_same_logp_and_gradients(ours, theirs) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=2e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, atol=2e-5, msg=name)


@FUSED_MODELS
def test_log_probs_and_gradients_are_those_of_transformers_modules(kind, changes):
    ours, theirs = policy_by(TRITON, kind, **changes), policy_by("torch", kind, **changes)
    assert ours.model.layers is not None
    assert theirs.model.layers is None
    assert_same_logp_and_gradients(logp_and_gradients(ours), logp_and_gradients(theirs))


def test_gradients_are_the_same_bits_if_activations_are_recomputed():
    stored, recomputed = (policy_by(TRITON, "qwen3") for _ in range(2))
    recomputed.model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed.model.lm.train()
    _, gradients = logp_and_gradients(stored)
    for name, gradient in logp_and_gradients(recomputed)[1].items():
        assert torch.equal(gradient, gradients[name]), name


def test_gradients_of_adapters_are_those_of_transformers_modules():
    lora = Lora(r=3, alpha=6.0, targets=("q_proj", "v_proj", "up_proj"), seed=1)
    results = []
    for backend in (TRITON, "torch"):
        policy = policy_by(backend, "qwen2", lora=lora)
        move(policy, spread=0.2)
        results.append(logp_and_gradients(policy))
    assert_same_logp_and_gradients(*results)


def test_sampler_records_the_log_probs_of_the_trainer():
    policy = policy_by(TRITON, "llama")
    groups = list(sampled(policy, requests_for(policy, 2), G=3, max_tokens=6).values())
    packed = Packed.build(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups], DEVICE
    )
    recorded = torch.cat([c.rollout_logp for g in groups for c in g.completions])
    with torch.no_grad():
        logp = policy.logp(packed).cpu()
    # The products of one row and of many sum in another order.
    torch.testing.assert_close(logp, recorded, rtol=0, atol=1e-4)


def test_model_is_exact_if_products_and_attention_are(monkeypatch):
    """What a GPU would say of FlashAttention is replaced."""
    monkeypatch.setattr(backends, "takes_varlen", lambda device, dtype, d: True)
    monkeypatch.setattr(backends, "flash_reads_caches", lambda *arguments: True)
    monkeypatch.setattr(backends.exactness, "rows_are_independent", lambda *arguments: True)
    exact = policy_by(replace(TRITON, exact_products=True), "llama")
    assert exact.model.exact
    assert copy_policy(exact).model.exact
    assert not policy_by(TRITON, "llama").model.exact
    monkeypatch.setattr(backends.exactness, "rows_are_independent", lambda *arguments: False)
    assert not policy_by(replace(TRITON, exact_products=True), "llama").model.exact
    monkeypatch.setattr(backends.exactness, "rows_are_independent", lambda *arguments: True)
    monkeypatch.setattr(backends, "flash_reads_caches", lambda *arguments: False)
    assert not policy_by(replace(TRITON, exact_products=True), "llama").model.exact
