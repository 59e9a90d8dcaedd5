"""The log-prob parity check: after every weight sync learner and sampler score the same tokens, and must agree as far
as their arithmetic allows. The tokens are completions that the sampler generated for a few prompts of the task.

If learner and in-process sampler are of the grade exact (noise.py), bits are compared. Otherwise a weight sync has to
pass four tests, the last two of which compare it with the sync before:

1. every server reports the version that was synced;
2. the mean |Δ log-prob| is within the tolerance of the dtype. Once, too, for the log-probs of what the servers
   generated: that finds a server whose log-probs are of another temperature;
3. the scores have changed at all, if the learner's have on ENOUGH tokens; otherwise nothing was loaded (on fewer
   tokens, rounding may have swallowed the change on one side);
4. of the tokens that can tell (`parity_telling`: the update moved them by more than twice the noise), no more are
   nearer to the learner's old log-probs than chance allows.

Rounding never stops a run; other weights always do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lagrpo.policy.model import Policy
from lagrpo.sampling.base import Checkable, Item, Request
from lagrpo.sampling.noise import (
    LOCAL_TOKENS,
    PARITY_PROMPTS,
    Parity,
    ParityError,
    check_finite,
    flatten,
    measure_parity,
    score_items,
)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest mean |Δ log-prob| in nats a token at tau = 1, by the coarser of the two dtypes. SmolLM2-135M in bfloat16
against vLLM 0.32 on a CPU: .04 to .06."""
NOISE = 3.0
"""An in-process sampler may differ by so many times the difference at the start, if that is beyond the tolerance."""
RENEW = 0.5
"""Nats a token by which the learner's mean log-prob of the tokens may fall before others take their place."""
ENOUGH = 20
"""Tokens on which the learner's log-probs must have changed before equal scores of the sampler count against it."""
CHANCE = 1e-6
"""The sampler is stale if so many of the telling tokens are nearer to the old log-probs that a fair coin would show it
with a smaller chance than this; it takes 20 of them. They are counted, not summed: the noise has heavy tails, and a few
unlikely tokens would decide a sum of squares."""
SERVER_TOKENS = 32  # at most, of each completion by a vLLM server
EXACT_PROMPTS, EXACT_TOKENS = 2, 4  # that are compared to the bit after a weight sync


@dataclass(frozen=True, slots=True)
class _Scores:
    """Log-probs [T] of the same tokens by the learner, and by each server."""

    learner_T: Tensor
    servers: list[Tensor]


class ParityCheck:
    """Call it after a weight sync. `requests` are the prompts to compare on; `tolerance` replaces the one for
    `dtype`. For an in-process sampler call `start` first, which finds its grade."""

    def __init__(self, requests: Sequence[Request], dtype: torch.dtype, tolerance: float | None = None) -> None:
        self.requests = list(requests)[:PARITY_PROMPTS]
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self.parity: Parity | None = None
        self._tokens = SERVER_TOKENS
        self._items: list[Item] = []
        self._before: _Scores | None = None  # at the last sync that passed
        self._likeliest = -math.inf  # the highest mean log-prob that the learner has given these tokens

    def start(self, policy: Policy, sampler: Checkable) -> Parity:
        """Measure how far learner and in-process sampler differ now; later syncs are held against it.

        Raises:
            ParityError: they compute different things.
        """
        self._tokens = LOCAL_TOKENS
        self.parity, self._items = measure_parity(policy, sampler, self.requests)
        self.tolerance = max(self.tolerance, NOISE * self.parity.mean * policy.tau)
        return self.parity

    def __call__(self, policy: Policy, sampler: Checkable) -> Mapping[str, float]:
        """parity_mean, parity_max: |Δ log-prob| a token, nats; parity_kl: mean of ρ - 1 - ln ρ with ρ = π/α; of the
        worst server. parity_telling: how many tokens tell old from new; not after the first sync, nor if bits are
        compared.

        Raises:
            ParityError: a test failed. SamplerError: a server is gone for good.
        """
        if sampler.version != policy.version:
            found = ", ".join(f"{server}: {server.version()!r}" for server in sampler.servers)
            raise ParityError(f"version {policy.version} was synced, but the sampler reports other weights: {found}")
        if self.parity is not None and self.parity.grade == "exact":
            return self._check_bits(policy, sampler)
        if not self._items:
            self._items = self._generate(policy, sampler)
        scores = _score(policy, sampler, self._items)
        found = [self._check_server(policy, sampler, number, scores) for number in range(len(scores.servers))]
        self._before = self._renew(policy, sampler, scores)
        return max(found, key=lambda metrics: metrics["parity_mean"])

    def _check_bits(self, policy: Policy, sampler: Checkable) -> Mapping[str, float]:
        """The grade exact."""
        step = -(-len(self._items) // EXACT_PROMPTS)
        scores = _score(policy, sampler, [(ids, tokens[:EXACT_TOKENS]) for ids, tokens in self._items[::step]])
        check_finite(scores.learner_T, f"version {policy.version}")
        if not torch.equal(scores.learner_T, scores.servers[0]):
            largest = float((scores.learner_T - scores.servers[0]).abs().max())
            raise ParityError(
                f"after the sync of version {policy.version} learner and sampler disagree by {largest:.3g} nats about "
                "a token, though their arithmetic is the same to the bit: the sampler serves other weights"
            )
        return {"parity_mean": 0.0, "parity_max": 0.0, "parity_kl": 0.0}

    def _check_server(self, policy: Policy, sampler: Checkable, number: int, scores: _Scores) -> dict[str, float]:
        """Tests 2 to 4 of one server."""
        where = f"version {policy.version} on {sampler.servers[number]}"
        now_T, before = scores.servers[number], self._before
        metrics = self._check_distance(scores.learner_T, now_T, where)
        if before is not None:
            telling = check_fresh(before.learner_T, scores.learner_T, before.servers[number], now_T, where)
            metrics["parity_telling"] = telling
        return metrics

    def _check_distance(self, learner_T: Tensor, server_T: Tensor, where: str, tau: float = 1.0) -> dict[str, float]:
        """Test 2, at temperature tau."""
        check_finite(learner_T, where)
        difference_T = learner_T - server_T
        mean, tolerance = float(difference_T.abs().mean()), self.tolerance / tau
        if not mean <= tolerance:
            raise ParityError(
                f"{where}: learner and sampler differ by {mean:.3g} nats a token over {len(difference_T)} tokens, more "
                f"than the tolerance of {tolerance:.3g}. {self._causes}"
            )
        kl = float((torch.expm1(difference_T) - difference_T).mean())
        return {"parity_mean": mean, "parity_max": float(difference_T.abs().max()), "parity_kl": kl}

    @property
    def _causes(self) -> str:
        if self.parity is not None:
            return "The sampler serves other weights"
        return (
            "The server serves other weights, computes in a coarser dtype than vllm.tolerance allows for, or gives "
            "log-probs of another temperature (--logprobs-mode)"
        )

    def _renew(self, policy: Policy, sampler: Checkable, scores: _Scores) -> _Scores:
        """The scores; of new tokens if the policy has moved away from these: unlikely tokens are scored less
        exactly."""
        likely = float(scores.learner_T.mean())
        if self._likeliest - likely <= RENEW:
            self._likeliest = max(self._likeliest, likely)
            return scores
        self._items = self._generate(policy, sampler)
        scores = _score(policy, sampler, self._items)
        self._likeliest = float(scores.learner_T.mean())
        return scores

    def _generate(self, policy: Policy, sampler: Checkable) -> list[Item]:
        """What the first server generates. The log-probs that every server reports with its own completions must be the
        learner's at the sampling temperature."""
        found = [self._generate_by(number, policy, sampler) for number in range(len(sampler.servers))]
        return found[0]

    def _generate_by(self, number: int, policy: Policy, sampler: Checkable) -> list[Item]:
        server, groups = sampler.servers[number], sampler.generate_on_server(number, self.requests, 1, self._tokens)
        completions = [group.completions[0] for group in groups]
        if failed := next((c.outcome for c in completions if c.outcome is not None), None):
            raise ParityError(f"{server}: a completion for the parity check failed: {failed.reason}")
        items: list[Item] = [(g.prompt.token_ids, g.completions[0].token_ids.tolist()) for g in groups]
        sampled_T = torch.cat([c.sampled for c in completions])
        reported_T = torch.cat([c.logp_alpha for c in completions])[sampled_T]
        learner_T = score_items(policy, items, policy.tau)[sampled_T]
        self._check_distance(learner_T, reported_T, f"the completions of {server}", policy.tau)
        return items


def _score(policy: Policy, sampler: Checkable, items: Sequence[Item]) -> _Scores:
    return _Scores(score_items(policy, items), [flatten(scores) for scores in sampler.scores(items)])


def check_fresh(old_T: Tensor, new_T: Tensor, before_T: Tensor, now_T: Tensor, where: str) -> int:
    """Tests 3 and 4 of the parity check: `old_T`, `new_T` are the learner's log-probs before and after, `before_T`,
    `now_T` the server's. Returns how many tokens tell old from new. Raises ParityError for stale weights.

    >>> old = torch.linspace(-3.0, -0.1, 30)
    >>> check_fresh(old, old + 0.3, old + 0.01, old + 0.29, "v")
    30
    """
    if int((new_T != old_T).sum()) >= ENOUGH and torch.equal(before_T, now_T):
        raise ParityError(
            f"{where}: the sampler's log-probs did not change at all with the weight sync, though the policy's did: it "
            "did not load the new weights"
        )
    to_new_T, to_old_T = (now_T - new_T).abs(), (now_T - old_T).abs()
    noise = torch.minimum(to_new_T, to_old_T).median()
    telling_T = (new_T - old_T).abs() > 2 * noise
    telling, older = int(telling_T.sum()), int((telling_T & (to_old_T < to_new_T)).sum())
    if _tail(older, telling) < CHANCE:
        raise ParityError(
            f"{where}: the sampler is still serving stale weights: of the {telling} tokens that tell old from new, "
            f"{older} are nearer to the version before"
        )
    return telling


def _tail(successes: int, trials: int) -> float:
    """The chance that a fair coin shows at least so many.

    >>> _tail(2, 3), _tail(0, 0)
    (0.5, 1.0)
    """
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials
