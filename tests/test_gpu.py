"""The same proofs on a CUDA device: pytest -m gpu."""

from __future__ import annotations

import pytest
import torch
from test_attention import GROUPS, random_groups, reference_logp
from test_sampling import log_ratio, requests_for, sampled
from tiny import save_tiny, tiny_policy

import lagrpo
from lagrpo.policy.model import Packed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logp_on_cuda_equals_the_reference_on_the_cpu(kind):
    policy = tiny_policy(kind)
    groups = random_groups(GROUPS)
    reference = reference_logp(policy, groups).detach()
    policy.model.to("cuda")
    ours = policy.logp(Packed.build(groups, policy.device)).cpu()
    torch.testing.assert_close(ours, reference, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float32, 1e-3)])
def test_sampler_and_learner_agree_on_cuda(dtype, tolerance):
    policy = tiny_policy(dtype=dtype)
    policy.model.to("cuda")
    groups = list(sampled(policy, requests_for(policy, 5)).values())
    policy.model.cpu()
    on_gpu = tiny_policy(dtype=dtype)
    on_gpu.model.to("cuda")
    packed = Packed.build([(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups], on_gpu.device)
    with torch.no_grad():
        difference = on_gpu.logp(packed).cpu() - torch.cat([c.logp_alpha for g in groups for c in g.completions])
    assert difference.abs().mean() <= tolerance
    assert log_ratio(policy, groups).abs().mean() <= 10 * tolerance  # and the CPU is not far


def test_a_run_on_cuda(tmp_path):
    settings = {
        "model": {"path": str(save_tiny(tmp_path / "model")), "device": "cuda"},
        "run": {"directory": str(tmp_path / "runs"), "display": "none"},
        "sampling": {"G": 4, "max_tokens": 8},
        "schedule": {"prompts": 4, "batches": 3, "v": 2},
        "evaluation": {"prompts": 4, "samples": 2},
    }
    result = lagrpo.train(settings)
    assert result.batches == 3
    assert result.weights is not None
    assert result.weights.is_dir()
