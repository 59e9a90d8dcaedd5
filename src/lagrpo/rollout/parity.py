"""The log-prob parity check: after every weight sync learner and sampler score the same tokens, and must agree as far
as their arithmetic allows. The tokens are completions that the sampler generated for a few prompts of the task.

At the start of a run the difference between learner and in-process sampler is measured, and graded:

exact   Both compute by our own kernels (backends/cpu): bits are equal, and are compared after every weight sync.
close   A library decides in which order sums run (PyTorch's products, a GPU), so log-probs differ by rounding:
        hundredths of a nat a token in bfloat16. One update may move the policy by less.

With the grade close, and with vLLM, a weight sync has to pass four tests. The last two compare it with the sync before:

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
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from lagrpo.model.loading import check_context
from lagrpo.model.model import Packed, Policy
from lagrpo.rollout.base import Checkable, Item, Request
from lagrpo.types import Group

PARITY_PROMPTS = 8
LOCAL_TOKENS, SERVER_TOKENS = 8, 32  # at most, of each completion: in-process, by a vLLM server
LATER = {"exact": (8, 2), "close": (32, 1)}
"""Completions of one prompt, and tokens of each, on which an in-process sampler is compared after a weight sync, by its
grade. The second token takes a decoding step; with the grade close the step reads the same tensors as the prefill."""
LONG_PROMPT = 160  # tokens: longer than any block in which keys are computed or kept
TOO_FAR = 0.5
"""Nats a token, on average, at the start of a run: what differs by more computes something else."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest mean |Δ log-prob| in nats a token at tau = 1, by the coarser of the two dtypes. SmolLM2-135M in bfloat16
against vLLM 0.32 on a CPU: .04 to .06."""
NOISE = 3.0
"""An in-process sampler may differ by so many times the difference at the start, if that is beyond the tolerance."""
RENEW = 0.5
"""Nats a token by which the learner's mean log-prob of the tokens may fall before others take their place: unlikely
tokens are scored less exactly."""
ENOUGH = 20
"""Tokens on which the learner's log-probs must have changed before equal scores of the sampler count against it."""
CHANCE = 1e-6
"""The sampler is stale if so many of the telling tokens are nearer to the old log-probs that a fair coin would show it
with a smaller chance than this; it takes 20 of them. They are counted, not summed: the noise has heavy tails, and a few
unlikely tokens would decide a sum of squares."""


class ParityError(RuntimeError):
    """The sampler does not serve the weights of the policy."""


@dataclass(frozen=True, slots=True)
class Parity:
    """How far learner and in-process sampler agreed at the start of a run."""

    grade: Literal["exact", "close"]
    mean: float
    """Mean |Δ log-prob|, nats, at the sampling temperature."""
    largest: float
    """Largest |Δ log-prob|, nats."""
    tokens: int
    """How many were compared."""
    reason: str | None = None
    """Why the grade is no better."""

    def __str__(self) -> str:
        if self.grade == "exact":
            return f"exact: sampler and learner agree to the bit, compared on {self.tokens} tokens"
        return (
            f"close: sampler and learner differ by {self.mean:.2g} nats a token, at most {self.largest:.2g}, over "
            f"{self.tokens} tokens ({self.reason})"
        )


class ParityCheck:
    """Call it after a weight sync. `requests` are the prompts to compare on; `tolerance` replaces the one for
    `dtype`. For an in-process sampler call `start` first, which finds its grade."""

    def __init__(self, requests: Sequence[Request], dtype: torch.dtype, tolerance: float | None = None) -> None:
        self.requests = list(requests)[:PARITY_PROMPTS]
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self.parity: Parity | None = None
        self._items: list[Item] = []
        self._before: tuple[Tensor, Tensor] | None = None  # what `_score` returned at the last sync that passed
        self._likeliest = -math.inf  # the highest mean log-prob that the learner has given these tokens

    def start(self, policy: Policy, sampler: Checkable) -> Parity:
        """Measure how far learner and in-process sampler differ now; later syncs are held against it. Raises
        ParityError where they compute different things."""
        self.parity, self._items = _measure(policy, sampler, self.requests)
        self.tolerance = max(self.tolerance, NOISE * self.parity.mean * policy.tau)
        return self.parity

    def __call__(self, policy: Policy, sampler: Checkable) -> Mapping[str, float]:
        """parity_mean, parity_max: |Δ log-prob| a token, nats; parity_kl: mean of ρ - 1 - ln ρ with ρ = π/α; of the
        worst server. parity_telling: how many tokens tell old from new; not after the first sync, nor if bits are
        compared. Raises ParityError where a test fails, SamplerError where a server is gone for good."""
        if sampler.version != policy.version:
            found = sampler.describe_versions()
            raise ParityError(f"version {policy.version} was synced, but the sampler reports other weights: {found}")
        if self.parity is not None and self.parity.grade == "exact":
            return self._check_bits(policy, sampler)
        self._items = self._items or self._generate(policy, sampler)
        scores = _score(policy, sampler, self._items)
        metrics = self._check_servers(sampler, scores, f"version {policy.version} on")
        if self._likeliest - float(scores[0].mean()) > RENEW:
            self._items = self._generate(policy, sampler)
            scores, self._likeliest = _score(policy, sampler, self._items), -math.inf
        self._before, self._likeliest = scores, max(self._likeliest, float(scores[0].mean()))
        return metrics

    def memory(self) -> dict[str, Any]:
        """What the next checks compare with, as JSON's lists and numbers."""
        before = self._before and [scores.tolist() for scores in self._before]
        items = [[list(prompt_ids), list(token_ids)] for prompt_ids, token_ids in self._items]
        return {"items": items, "before": before, "likeliest": self._likeliest}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take over what `memory` gave."""
        self._items = [(prompt_ids, token_ids) for prompt_ids, token_ids in memory["items"]]
        before = memory["before"]
        self._before = before and (torch.tensor(before[0]), torch.tensor(before[1]))
        self._likeliest = memory["likeliest"]

    def _check_bits(self, policy: Policy, sampler: Checkable) -> Mapping[str, float]:
        """The grade exact."""
        learner_T, samplers_ST = _score(policy, sampler, self._items)
        check_finite(learner_T, f"version {policy.version}")
        for name, sampler_T in zip(sampler.servers, samplers_ST, strict=True):
            if not torch.equal(learner_T, sampler_T):
                raise ParityError(
                    f"after the sync of version {policy.version} the learner and {name} disagree by "
                    f"{float((learner_T - sampler_T).abs().max()):.3g} nats about a token, though their arithmetic is "
                    "the same to the bit: the sampler serves other weights"
                )
        return {"parity_mean": 0.0, "parity_max": 0.0, "parity_kl": 0.0}

    def _check_servers(self, sampler: Checkable, scores: tuple[Tensor, Tensor], where: str) -> dict[str, float]:
        """Tests 2 to 4 of every server; the metrics of the worst."""
        (learner_T, servers_ST), found = scores, []
        for number, server in enumerate(sampler.servers):
            found.append(self._check_distance(learner_T, servers_ST[number], f"{where} {server}"))
            if self._before is not None and len(self._before[1]) == len(servers_ST):  # a resumed run may have others
                old_T, before_T = self._before[0], self._before[1][number]
                telling = check_fresh(old_T, learner_T, before_T, servers_ST[number], f"{where} {server}")
                found[-1]["parity_telling"] = telling
        return max(found, key=lambda metrics: metrics["parity_mean"])

    def _check_distance(self, learner_T: Tensor, server_T: Tensor, where: str, tau: float = 1.0) -> dict[str, float]:
        """Test 2, at temperature tau."""
        check_finite(learner_T, where)
        difference_T = learner_T - server_T
        mean, tolerance = float(difference_T.abs().mean()), self.tolerance / tau
        if not mean <= tolerance:
            in_process = "The sampler serves other weights"
            by_server = (
                "The server serves other weights, computes in a coarser dtype than the trainer, or gives "
                "log-probs of another temperature (--logprobs-mode)"
            )
            raise ParityError(
                f"{where}: learner and sampler differ by {mean:.3g} nats a token over {len(difference_T)} tokens, more "
                f"than the tolerance of {tolerance:.3g}. {in_process if self.parity else by_server}"
            )
        kl = float((torch.expm1(difference_T) - difference_T).mean())
        return {"parity_mean": mean, "parity_max": float(difference_T.abs().max()), "parity_kl": kl}

    def _generate(self, policy: Policy, sampler: Checkable) -> list[Item]:
        """What the first server generates. The log-probs that every server reports with its own completions must be the
        learner's at the sampling temperature."""
        found: list[list[Item]] = []
        for number, server in enumerate(sampler.servers):
            if self.parity is not None:
                groups = _generate_later(sampler, self.requests, *LATER[self.parity.grade])
            else:
                groups = sampler.generate_on_server(number, self.requests, 1, SERVER_TOKENS)
            outcomes = (group.completions[0].outcome for group in groups)
            if failed := next(filter(None, outcomes), None):
                raise ParityError(f"{server}: a completion for the parity check failed: {failed.reason}")
            found.append(_items_of(groups))
            is_sampled_T, reported_T = _sampled(groups)
            learner_T = _score_items(policy, found[-1], policy.tau)[is_sampled_T]
            self._check_distance(learner_T, reported_T, f"the completions of {server}", policy.tau)
        return found[0]


def _measure(policy: Policy, sampler: Checkable, requests: Sequence[Request]) -> tuple[Parity, list[Item]]:
    """Compare learner and in-process sampler with several numbers of rows, prompts longer than a block, groups of one
    and of several. Returns their parity, and the prompts and completions that later checks can score. Raises
    ParityError where they differ by more than TOO_FAR on average, or a log-prob is not a number."""
    later = _generate_later(sampler, requests, *map(max, LATER["exact"], LATER["close"]))
    items, groups = _items_of(later), later
    groups += sampler.generate_on_server(0, requests, 2, LOCAL_TOKENS)
    groups += sampler.generate_on_server(0, [*requests[:1], *_lengthen(policy, requests)], 1, LOCAL_TOKENS)
    is_sampled_T, sampled_T = _sampled(groups)
    together_T = _score_groups(policy, groups)[is_sampled_T]
    check_finite(together_T, "the initial policy")
    difference_T = (together_T - sampled_T).abs()
    mean, largest = float(difference_T.mean()), float(difference_T.max())
    if not mean <= TOO_FAR / policy.tau:
        raise ParityError(
            f"learner and in-process sampler differ by {mean:.3g} nats a token, with the same weights: this model "
            "computes something else when it decodes; it is not supported"
        )
    learner_T, samplers_ST = _score(policy, sampler, items)
    equal = (
        torch.equal(together_T, sampled_T)
        and torch.equal(torch.cat([_score_groups(policy, [group]) for group in groups])[is_sampled_T], sampled_T)
        and all(torch.equal(learner_T, sampler_T) for sampler_T in samplers_ST)
    )
    reason = None if equal and policy.model.exact else _why_close(policy, equal)
    grade = "close" if reason else "exact"
    count, tokens = LATER[grade]
    kept = [(prompt_ids, token_ids[:tokens]) for prompt_ids, token_ids in items[:count]]
    return Parity(grade, mean, largest, len(sampled_T), reason), kept


def _generate_later(sampler: Checkable, requests: Sequence[Request], completions: int, tokens: int) -> list[Group]:
    """Completions of the shortest prompt: few tokens, so that the check after a sync takes little of a batch's time."""
    shortest = min(requests, key=lambda request: len(request.prompt.token_ids))
    return sampler.generate_on_server(0, [shortest], completions, tokens)


def check_finite(learner_T: Tensor, where: str) -> None:
    """Raise ParityError for log-probs of the learner that are not numbers."""
    if not bool(learner_T.isfinite().all()):
        raise ParityError(f"{where}: the policy's log-probs are not numbers, it has diverged; lower optimizer.lr")


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


def _items_of(groups: Sequence[Group]) -> list[Item]:
    return [(g.prompt.token_ids, c.token_ids.tolist()) for g in groups for c in g.completions]


def _sampled(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Which tokens of the groups' completions were sampled, and the log-probs that the sampler gave these."""
    is_sampled_T = torch.cat([c.sampled for g in groups for c in g.completions])
    return is_sampled_T, torch.cat([c.logp_alpha for g in groups for c in g.completions])[is_sampled_T]


def _score(policy: Policy, sampler: Checkable, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
    """log-probs of the items' tokens at temperature 1 by the learner [T] and by each server [S, T]: float32, nats."""
    flat = [[p for item in scores for p in item] for scores in sampler.scores(items)]
    return _score_items(policy, items), torch.tensor(flat)


def _score_items(policy: Policy, items: Sequence[Item], tau: float = 1.0) -> Tensor:
    groups = groupby(items, key=itemgetter(0))  # completions of one prompt, side by side, share its rows
    return _score_packed(policy, [(ids, [torch.tensor(tokens) for _, tokens in group]) for ids, group in groups], tau)


def _score_groups(policy: Policy, groups: Sequence[Group]) -> Tensor:
    return _score_packed(
        policy, [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups], policy.tau
    )


def _score_packed(policy: Policy, groups: Sequence[tuple[Sequence[int], Sequence[Tensor]]], tau: float) -> Tensor:
    with torch.no_grad():
        return policy.logp(Packed.build(groups, policy.device), tau=tau).float().cpu()


def _lengthen(policy: Policy, requests: Sequence[Request]) -> list[Request]:
    """All prompts joined and repeated to LONG_PROMPT tokens, if the model takes so many."""
    try:
        check_context(policy, LONG_PROMPT + LOCAL_TOKENS)
    except ValueError:
        return []
    joined = sum((request.prompt.token_ids for request in requests), ()) * LONG_PROMPT
    first = requests[0]
    return [replace(first, prompt=replace(first.prompt, key=-1, token_ids=joined[:LONG_PROMPT]))]


def _why_close(policy: Policy, equal: bool) -> str:
    if policy.model.exact:
        return "they should agree to the bit, and do not: please report this processor and compiler"
    kind = str(policy.dtype).removeprefix("torch.")
    return f"products of {kind} are PyTorch's here{', which happen to agree' if equal else ''}"
