"""Models that the Triton kernels compute give what transformers' modules give.

On a GPU the kernels are compiled; elsewhere Triton's interpreter runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE
from rank_updates import Tensors, Updated, check_to_the_bit, copied, share, shortest_rows
from test_fsdp2 import check_passes, make_layered, short_pass
from test_kernels import FUSED_MODELS
from test_lora import move
from test_sampling import requests_for, sampled
from tiny import tiny_policy
from torch.distributed import ProcessGroup

from lagrpo.model import backend as backends
from lagrpo.model.backend import Backend
from lagrpo.model.layout import Packed
from lagrpo.model.lora import Lora
from lagrpo.model.model import copy_policy
from lagrpo.training.master_weights import MergedState

pytestmark = [
    pytest.mark.triton,
    # The interpreter computes with NumPy, which warns of infinite numbers.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

TRITON = Backend(torch.device(DEVICE), torch.float32, triton=True)
TRITON_BF16 = replace(TRITON, dtype=torch.bfloat16)
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


def answer_as_a_hopper_gpu(monkeypatch) -> None:
    """Replaces what a GPU would say of its products and of FlashAttention."""
    monkeypatch.setattr(backends, "takes_varlen", lambda device, dtype, d: True)
    monkeypatch.setattr(backends, "flash_reads_caches", lambda *arguments: True)
    monkeypatch.setattr(backends.exactness, "rows_are_independent", lambda *arguments: True)


def test_model_is_exact_if_products_and_attention_are(monkeypatch):
    answer_as_a_hopper_gpu(monkeypatch)
    exact = policy_by(replace(TRITON, exact_products=True), "llama")
    assert exact.model.exact
    assert copy_policy(exact).model.exact
    assert not policy_by(TRITON, "llama").model.exact
    monkeypatch.setattr(backends.exactness, "rows_are_independent", lambda *arguments: False)
    assert not policy_by(replace(TRITON, exact_products=True), "llama").model.exact
    monkeypatch.setattr(backends.exactness, "rows_are_independent", lambda *arguments: True)
    monkeypatch.setattr(backends, "flash_reads_caches", lambda *arguments: False)
    assert not policy_by(replace(TRITON, exact_products=True), "llama").model.exact


# Sharded layers. One GPU has one rank of them: test_gpu_ranks.py.
on_a_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="two ranks without a GPU")


def update_from(
    group: ProcessGroup | None, states: Sequence[Tensors] | None, checkpointing: bool
) -> Updated:
    """An update on two short rows, from the states of all ranks, or from the start without any."""
    trainer = make_layered(
        group,
        "bfloat16",
        backend=TRITON_BF16,
        checkpointing=checkpointing,
        # FSDP2 rounds norms in another order.
        max_grad_norm=None,
    )
    if states is not None:
        trainer.load_state(MergedState(states), 1)
    trainer.accumulate(share(group, shortest_rows(trainer, 2), first_takes_all=False))
    metrics = [trainer.update()]
    return Updated(metrics, copied(trainer.state()), copied(trainer.policy.weights))


@on_a_cpu
def test_updates_in_shards_are_those_of_one_process_also_after_a_resume(ranks):
    """To the bit: each of two ranks has one row, and a sum of two gradients has no order. The
    second update computes activations again."""
    first = update_from(None, None, False)
    results = ranks.run(update_from, None, False, size=2)
    check_to_the_bit(results, first)
    states = [result.state for result in results]
    second = update_from(None, [first.state], True)
    check_to_the_bit(ranks.run(update_from, states, True, size=2), second)


def exact_pass(group: ProcessGroup | None):
    with pytest.MonkeyPatch.context() as monkeypatch:
        answer_as_a_hopper_gpu(monkeypatch)
        return short_pass(group, replace(TRITON_BF16, exact_products=True), False)


@on_a_cpu
def test_model_in_shards_is_exact_saves_as_much_and_agrees_with_its_whole_copy(ranks):
    alone = exact_pass(None)
    assert alone.is_exact
    check_passes(ranks.run(exact_pass, size=2), alone)
