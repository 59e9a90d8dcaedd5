"""The proof of a delivery to a foreign sampler, whose arithmetic is not the learner's.

Learner and servers score the same tokens: those of completions that the first server drew for a few prompts of the
task, when the run began or when the policy had moved away from those before. In bfloat16 they differ by a few
hundredths of a nat a token even when everything is right, and one update may move the policy by less than that. So a
delivery has to pass four tests, of which the last two compare it with the delivery before:

1. every server reports the version that was delivered;
2. the mean |Δ log-prob| is within the tolerance of the dtype (once, too, for what the servers say of their own draws:
   that tells a server whose log-probs are of another temperature);
3. the scores are not, to the last bit, those of before, when the learner's have changed: then nothing was loaded;
4. the scores are not nearer to the learner's of before than to those of now, on more of the tokens that can tell
   (`probe_telling`: those that the update moved by more than twice the noise) than chance would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lagrpo.policy.model import Packed, Policy
from lagrpo.sampling.base import Request
from lagrpo.sampling.proof import DeliveryError
from lagrpo.types import Group

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest mean |Δ log-prob| in nats a token at tau = 1, by the coarser of the two dtypes. SmolLM2-135M in bfloat16
against vLLM 0.32 on a CPU: .04 to .06."""
CHANCE = 1e-6
"""Test 4 decides when so many of the telling tokens are nearer to the old log-probs that a fair coin would show it with
a smaller chance than this; it takes 20 of them. Counted, not summed: the noise has heavy tails, and a few unlikely
tokens would decide a sum of squares."""
RENEW = 0.5
"""Nats a token by which the learner's mean log-prob of the probe may fall before other completions take its place."""
PROBE_PROMPTS = 8
PROBE_TOKENS = 32  # at most, of each


class Provable(Protocol):
    """What the proof needs of a sampler over servers; see VllmSampler."""

    @property
    def servers(self) -> Sequence[Any]: ...
    @property
    def version(self) -> int: ...
    def drawn_by(self, number: int, request: Request, max_tokens: int) -> Group: ...
    def scores(self, items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last delivery that passed: log-probs of the probe by the learner [T], and by each server."""

    learner_T: Tensor
    servers: list[Tensor]


class PairedProof:
    """Calling it proves the delivery that was just made. `requests` are the prompts of the probe, `tolerance` replaces
    that of the dtype."""

    def __init__(self, requests: Sequence[Request], dtype: torch.dtype, tolerance: float | None = None) -> None:
        self.requests = list(requests)[:PROBE_PROMPTS]
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self._items: list[tuple[tuple[int, ...], list[int]]] = []
        self._seen: _Seen | None = None
        self._likely = -math.inf  # the highest mean log-prob that the learner has given the tokens of the probe

    def __call__(self, policy: Policy, sampler: Provable) -> Mapping[str, float]:
        """probe_mean, probe_max: |Δ log-prob| a token, nats; probe_kl: mean of ρ - 1 - ln ρ with ρ = π/α; of the worst
        server. probe_telling: how many tokens can tell old from new, None after the first delivery.

        Raises:
            DeliveryError: a test failed. SamplerError: a server is gone for good.
        """
        if sampler.version != policy.version:
            found = ", ".join(f"{server}: {server.version()!r}" for server in sampler.servers)
            raise DeliveryError(
                f"version {policy.version} was delivered, but the servers report other weights: {found}"
            )
        if not self._items:
            self._items = self._draw(policy, sampler)
        seen = self._look(policy, sampler)
        worst: dict[str, float] = {}
        for number, server_T in enumerate(seen.servers):
            where = f"version {policy.version} on {sampler.servers[number]}"
            figures = self._within(seen.learner_T, server_T, where)
            if self._seen is not None:
                before_T = self._seen.servers[number]
                figures["probe_telling"] = _not_stale(self._seen.learner_T, seen.learner_T, before_T, server_T, where)
            if not worst or figures["probe_mean"] > worst["probe_mean"]:
                worst = figures
        self._seen = self._renewed(policy, sampler, seen)
        return worst

    def _look(self, policy: Policy, sampler: Provable) -> _Seen:
        """The log-probs of the probe by all sides."""
        learner_T = self._learner(policy, self._items, tau=1.0)
        return _Seen(
            learner_T, [torch.tensor([p for item in items for p in item]) for items in sampler.scores(self._items)]
        )

    def _renewed(self, policy: Policy, sampler: Provable, seen: _Seen) -> _Seen:
        """The same, of a new probe where the policy has moved away from the tokens of this one: unlikely tokens are
        scored less exactly."""
        likely = float(seen.learner_T.mean())
        if self._likely - likely > RENEW:
            self._items = self._draw(policy, sampler)
            seen = self._look(policy, sampler)
            self._likely = float(seen.learner_T.mean())
        else:
            self._likely = max(self._likely, likely)
        return seen

    def _draw(self, policy: Policy, sampler: Provable) -> list[tuple[tuple[int, ...], list[int]]]:
        """The probe: what the first server drew. What every server says of its own draws must be the learner's log-prob
        at the sampling temperature."""
        items: list[tuple[tuple[int, ...], list[int]]] = []
        for number, server in enumerate(sampler.servers):
            own, said = [], []
            for request in self.requests:
                completion = sampler.drawn_by(number, request, PROBE_TOKENS).completions[0]
                if completion.outcome is not None:
                    raise DeliveryError(f"{server}: a completion for the probe failed: {completion.outcome.reason}")
                own.append((request.prompt.token_ids, completion.token_ids.tolist()))
                said.append(completion.logp_alpha)
            self._within(self._learner(policy, own, policy.tau), torch.cat(said), f"the draws of {server}", policy.tau)
            items = items or own
        return items

    def _learner(self, policy: Policy, items: Sequence[tuple[Sequence[int], list[int]]], tau: float) -> Tensor:
        """log π of the items' tokens at temperature tau, float32 [T] on the CPU."""
        packed = Packed.build([(ids, [torch.tensor(tokens)]) for ids, tokens in items], policy.device)
        own, policy.tau = policy.tau, tau
        try:
            with torch.no_grad():
                return policy.logp(packed).float().cpu()
        finally:
            policy.tau = own

    def _within(self, learner_T: Tensor, server_T: Tensor, where: str, tau: float = 1.0) -> dict[str, float]:
        """Test 2."""
        difference_T = learner_T - server_T
        if not bool(learner_T.isfinite().all()):
            raise DeliveryError(f"{where}: the policy's log-probs are not numbers, it has diverged; lower optimizer.lr")
        mean, tolerance = float(difference_T.abs().mean()), self.tolerance / tau
        if not mean <= tolerance:
            raise DeliveryError(
                f"{where}: learner and server differ by {mean:.3g} nats a token over {len(difference_T)} tokens of the "
                f"probe, more than the tolerance of {tolerance:.3g} (vllm.tolerance). The server serves other weights, "
                "computes in a coarser dtype, or gives log-probs of another temperature (--logprobs-mode)"
            )
        kl = float((torch.expm1(difference_T) - difference_T).mean())
        return {"probe_mean": mean, "probe_max": float(difference_T.abs().max()), "probe_kl": kl}


def _not_stale(old_T: Tensor, new_T: Tensor, before_T: Tensor, now_T: Tensor, where: str) -> int:
    """Tests 3 and 4: `old_T`, `new_T` are the learner's log-probs, `before_T`, `now_T` the server's. Returns how many
    tokens can tell. Raises DeliveryError for a server that still has what it had.

    >>> old = torch.linspace(-3.0, -0.1, 30)
    >>> _not_stale(old, old + 0.3, old + 0.01, old + 0.29, "v")
    30
    """
    if bool((new_T != old_T).any()) and torch.equal(before_T, now_T):
        raise DeliveryError(
            f"{where}: the server scores the probe exactly as before the delivery, though the policy has changed: it "
            "did not load the new weights"
        )
    to_new_T, to_old_T = (now_T - new_T).abs(), (now_T - old_T).abs()
    noise = torch.minimum(to_new_T, to_old_T).median()
    telling_T = (new_T - old_T).abs() > 2 * noise
    telling, older = int(telling_T.sum()), int((telling_T & (to_old_T < to_new_T)).sum())
    if _tail(older, telling) < CHANCE:
        raise DeliveryError(
            f"{where}: the server scores the probe as the version delivered before would: {older} of the {telling} "
            "tokens that can tell are nearer to that. It still serves the old weights"
        )
    return telling


def _tail(successes: int, trials: int) -> float:
    """The chance that a fair coin shows at least so many.

    >>> _tail(2, 3), _tail(0, 0)
    (0.5, 1.0)
    """
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials
