"""The weight-sync check: after every weight sync the sampler must have the policy's weights. Rounding never stops a
run; other weights always do.

The local engine is compared weight by weight, to the bit, and at the start of a run by log-probs: *exact* if trainer
and engine compute by our own kernels (cpu/), else *close*, hundredths of a nat a token in bfloat16.

vLLM servers are compared by log-probs of tokens that the first server generated for a few prompts of the task. A weight
sync has to pass four tests; the last two compare it with the sync before:

1. every server reports the version that was synced;
2. the mean |Δ log-prob| is within the tolerance of the dtype; also for the log-probs of what the servers generated,
   which finds a server whose log-probs are of another temperature;
3. the log-probs have changed at all, if the trainer's have on ENOUGH tokens; otherwise nothing was loaded;
4. of the tokens that the update moved by more than twice the noise, no more are nearer to the trainer's old log-probs
   than chance allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from lagrpo.model.layout import Packed
from lagrpo.model.model import Policy
from lagrpo.rollout.base import Item, Request
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import in_order
from lagrpo.types import Group

CHECK_PROMPTS = 8
LOCAL_TOKENS, SERVER_TOKENS = (
    8,
    32,
)  # at most, of each completion: of the local engine, of a vLLM server
LONG_PROMPT = 160  # tokens: longer than any block in which keys are computed or kept
TOO_FAR = 0.5  # mean nats a token, local engine: what differs by more computes something else
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest mean |Δ log-prob| in nats a token at tau = 1, by the coarser of the two dtypes. SmolLM2-135M in bfloat16
against vLLM 0.32 on a CPU: .04 to .06."""
RENEW = 0.5  # nats a token by which the tokens may become less likely before others replace them: these are less exact
ENOUGH = (
    20  # tokens on which the trainer must have changed before an unchanged server counts as stale
)
CHANCE = 1e-6
"""A server is stale if a fair coin would show so many tokens nearer to the old log-probs with a smaller chance. They
are counted, not summed: the noise has heavy tails, and a few unlikely tokens would decide a sum of squares."""


class WeightSyncError(RuntimeError):
    """The sampler does not have the weights of the policy."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far trainer and local engine agreed at the start of a run."""

    grade: Literal["exact", "close"]
    mean: float  # |Δ log-prob| a token, nats, at the sampling temperature
    largest: float
    tokens: int  # how many were compared

    def __str__(self) -> str:
        if self.grade == "exact":
            return f"exact: sampler and trainer log-probs of {self.tokens} tokens match bit for bit"
        differ = f"differ by {self.mean:.2g} nats per token (max {self.largest:.2g})"
        return f"close: sampler and trainer log-probs of {self.tokens} tokens {differ}"


class WeightSyncCheck:
    """Call it after a weight sync. `requests` are the prompts to compare on; `tolerance` replaces the one for
    `dtype`. For the local engine call `start` first."""

    def __init__(
        self, requests: Sequence[Request], dtype: torch.dtype, tolerance: float | None = None
    ) -> None:
        self.requests = list(requests)[:CHECK_PROMPTS]
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self.agreement: Agreement | None = None  # of the local engine
        self._items: list[Item] = []
        self._mean = 0.0  # the trainer's mean log-prob of these tokens when they were generated
        self._before: tuple[Tensor, Tensor] | None = (
            None  # what `_compare` returned at the last sync that passed
        )

    def start(self, policy: Policy, sampler: LocalSampler) -> Agreement:
        """Compare the log-probs of trainer and local engine for several prompts, one longer than a block. Raises
        WeightSyncError if they differ by more than TOO_FAR on average, or a log-prob is not a number."""
        joined = sum((request.prompt.token_ids for request in self.requests), ()) * LONG_PROMPT
        long = replace(self.requests[0].prompt, key=-1, token_ids=joined[:LONG_PROMPT])
        requests = [*self.requests, replace(self.requests[0], prompt=long)]
        params = replace(sampler.params, purpose="probe", max_tokens=LOCAL_TOKENS, episodes=None)
        groups = in_order(requests, [group for _, group in sampler.sample(requests, 4, params)])
        sampled_T, trainer_T = _logp_alpha(groups), _logp(policy, _items_of(groups), policy.tau)
        check_finite(trainer_T, "the initial policy")
        difference_T = (trainer_T - sampled_T).abs()
        mean, largest = float(difference_T.mean()), float(difference_T.max())
        if not mean <= TOO_FAR / policy.tau:
            what = f"trainer and local sampler differ by {mean:.3g} nats per token with the same weights"
            raise WeightSyncError(
                f"{what}: this model computes other log-probs when it decodes; it is not supported"
            )
        grade = "exact" if policy.model.exact and not largest else "close"
        self.agreement = Agreement(grade, mean, largest, len(difference_T))
        return self.agreement

    def __call__(self, policy: Policy, sampler: Any) -> Mapping[str, float]:
        """logp_difference_mean, logp_difference_max: |Δ log-prob| a token, nats, of the worst server; of the local
        engine at the start. Raises WeightSyncError if a test fails, SamplerError if a server is gone for good."""
        where = f"version {policy.version}"
        if sampler.version != policy.version:
            raise WeightSyncError(f"{where} was synced, but the sampler reports {sampler.version}")
        if self.agreement is not None:
            if names := sampler.policy.weights.differing(policy.weights):
                differ = f"{len(names)} weights, such as {names[0]}, differ from the policy's"
                raise WeightSyncError(f"{where}: the local sampler has stale weights: {differ}")
            firsts = [p.detach().flatten()[:64].float() for p in sampler.policy.model.parameters()]
            check_finite(
                torch.cat(firsts), where
            )  # a gradient that is not finite spoils all of a weight
            return {
                "logp_difference_mean": self.agreement.mean,
                "logp_difference_max": self.agreement.largest,
            }
        if not self._items:
            self._renew(policy, sampler)
        compared = trainer_T, servers_ST = self._compare(policy, sampler)
        found = []
        for number, server in enumerate(sampler.servers):
            found.append(
                check_distance(
                    trainer_T, servers_ST[number], self.tolerance, f"{where} on {server}"
                )
            )
            if self._before is not None:
                before = self._before[0], trainer_T, self._before[1][number], servers_ST[number]
                found[-1]["telling_tokens"] = check_fresh(*before, f"{where} on {server}")
        if self._mean - float(trainer_T.mean()) > RENEW:
            compared = self._renew(policy, sampler)
        self._before = compared
        return max(found, key=lambda metrics: metrics["logp_difference_mean"])

    def _renew(self, policy: Policy, sampler: Any) -> tuple[Tensor, Tensor]:
        """Compare on what the first server generates now. The log-probs that every server reports with its own
        completions must be the trainer's at the sampling temperature."""
        for number, server in reversed([*enumerate(sampler.servers)]):
            groups = sampler.generate_on_server(number, self.requests, 1, SERVER_TOKENS)
            if failed := [
                c.outcome.reason for g in groups for c in g.completions if c.outcome is not None
            ]:
                raise WeightSyncError(
                    f"{server}: a completion for the weight-sync check failed: {failed[0]}"
                )
            self._items, where = _items_of(groups), f"the completions of {server}"
            own_T = _logp(policy, self._items, policy.tau)
            check_distance(own_T, _logp_alpha(groups), self.tolerance / policy.tau, where)
        compared = self._compare(policy, sampler)
        self._mean = float(compared[0].mean())
        return compared

    def _compare(self, policy: Policy, sampler: Any) -> tuple[Tensor, Tensor]:
        """log-probs of the tokens at temperature 1 by the trainer [T] and by each server [S, T]: float32, nats."""
        flat = [[p for item in logp for p in item] for logp in sampler.scores(self._items)]
        return _logp(policy, self._items, 1.0), torch.tensor(flat)


def check_finite(values: Tensor, where: str) -> None:
    """Raise WeightSyncError for log-probs or weights of the trainer that are not numbers."""
    if not bool(values.isfinite().all()):
        cure = "training diverged; lower optimizer.learning_rate"
        raise WeightSyncError(f"{where}: the policy's log-probs are not finite: {cure}")


def check_distance(
    trainer_T: Tensor, server_T: Tensor, tolerance: float, where: str
) -> dict[str, float]:
    """Test 2: the mean and the largest difference. Raises WeightSyncError if the mean is beyond the tolerance."""
    check_finite(trainer_T, where)
    difference_T = (trainer_T - server_T).abs()
    mean, largest = float(difference_T.mean()), float(difference_T.max())
    if not mean <= tolerance:
        what = f"log-probs of trainer and sampler differ by {mean:.3g} nats per token (tolerance {tolerance:.3g})"
        causes = (
            "other weights, a coarser dtype, or log-probs at another temperature (--logprobs-mode)"
        )
        raise WeightSyncError(f"{where}: {what}. The sampler has {causes}")
    return {"logp_difference_mean": mean, "logp_difference_max": largest}


def check_fresh(old_T: Tensor, new_T: Tensor, before_T: Tensor, now_T: Tensor, where: str) -> int:
    """Tests 3 and 4: `old_T`, `new_T` are the trainer's log-probs before and after, `before_T`, `now_T` the server's.
    Returns how many tokens tell old from new. Raises WeightSyncError for stale weights."""
    if int((new_T != old_T).sum()) >= ENOUGH and torch.equal(before_T, now_T):
        what = "the sync changed the policy's log-probs, but not the sampler's"
        raise WeightSyncError(f"{where}: the sampler did not load the new weights: {what}")
    to_new_T, to_old_T = (now_T - new_T).abs(), (now_T - old_T).abs()
    noise = torch.minimum(to_new_T, to_old_T).median()
    telling_T = (new_T - old_T).abs() > 2 * noise
    telling, older = int(telling_T.sum()), int((telling_T & (to_old_T < to_new_T)).sum())
    if sum(math.comb(telling, k) for k in range(older, telling + 1)) < CHANCE * 2**telling:
        what = f"{older} of {telling} tokens whose log-probs changed are closer to the previous version"
        raise WeightSyncError(f"{where}: the sampler still has stale weights: {what}")
    return telling


def _items_of(groups: Sequence[Group]) -> list[Item]:
    return [(g.prompt.token_ids, c.token_ids.tolist()) for g in groups for c in g.completions]


def _logp_alpha(groups: Sequence[Group]) -> Tensor:
    return torch.cat([c.logp_alpha for g in groups for c in g.completions])


@torch.no_grad()
def _logp(policy: Policy, items: Sequence[Item], tau: float) -> Tensor:
    groups = groupby(
        items, key=itemgetter(0)
    )  # completions of one prompt, side by side, share its rows
    packed = [
        (prompt_ids, [torch.tensor(tokens) for _, tokens in group]) for prompt_ids, group in groups
    ]
    return policy.logp(Packed.build(packed, policy.device), tau=tau).float().cpu()
