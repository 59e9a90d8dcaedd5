"""The proof of a delivery to the in-process sampler: learner and sampler score the same tokens, and agree. That of a
foreign sampler, which computes otherwise, is in vllm/proof.py.

Run before the first update and after every delivery. A disagreement stops the run: what the sampler serves is then not
the policy that was delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lagrpo.addressed import uniforms
from lagrpo.policy.model import Packed, Policy
from lagrpo.sampling.base import Sampler
from lagrpo.types import Prompt

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Largest |Δ log-prob| in nats at tau = 1 between learner and in-process sampler, which run one arithmetic; divided by
tau at other temperatures. Rounding alone stays far below: 0 in bfloat16 on CPUs with bf16 products, 1e-4 in float32."""
PROBE_TOKENS = 4


class DeliveryError(RuntimeError):
    """The sampler does not serve the policy that was delivered."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed tokens behind a fixed prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: Tensor

    @staticmethod
    def after(prompt: Prompt, vocabulary: int, seed: int) -> Probe:
        """PROBE_TOKENS tokens at random behind a prompt of the task."""
        ids = (uniforms(PROBE_TOKENS, seed, "probe") * vocabulary).astype("int64")
        return Probe(prompt.token_ids, torch.from_numpy(ids))


@torch.no_grad()
def prove_delivery(probe: Probe, policy: Policy, sampler: Sampler) -> Mapping[str, float]:
    """probe_mean, probe_max: |log π - log α| over the probe, nats; probe_kl: mean of ρ - 1 - ln ρ with ρ = π/α.

    Raises:
        DeliveryError: the sampler reports another version, the difference is beyond TOLERANCE / tau, or is no number.
    """
    if sampler.version != policy.version:
        raise DeliveryError(f"version {policy.version} was delivered, but the sampler reports {sampler.version}")
    packed = Packed.build([(probe.prompt_ids, [probe.token_ids])], policy.device)
    log_ratio_T = policy.logp(packed).cpu() - sampler.score(probe.prompt_ids, probe.token_ids).cpu()
    difference_T = log_ratio_T.abs()
    tolerance = TOLERANCE[policy.dtype] / policy.tau
    if bool(difference_T.isnan().any()):
        raise DeliveryError(
            f"the log-probs of version {policy.version} are not numbers: the policy has diverged; lower optimizer.lr"
        )
    if not bool((difference_T <= tolerance).all()):
        worst = int(difference_T.argmax())
        raise DeliveryError(
            f"after the delivery of version {policy.version} learner and sampler disagree about token "
            f"{int(probe.token_ids[worst])} (position {worst} of the probe) by {difference_T[worst]:.3g} nats; the "
            f"tolerance is {tolerance:.3g}. The sampler serves other weights, or computes something else"
        )
    kl = float((torch.expm1(log_ratio_T) - log_ratio_T).mean())
    return {"probe_mean": float(difference_T.mean()), "probe_max": float(difference_T.max()), "probe_kl": kl}
