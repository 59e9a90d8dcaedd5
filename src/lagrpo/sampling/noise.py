"""How far learner and in-process sampler differ while they have the same weights: measured at the start of a run.

exact   Both compute by our own kernels (backends/cpu): bits are equal, and must be after every weight sync.
close   A library decides in which order sums run (PyTorch's products, a GPU), so log-probs differ by rounding:
        hundredths of a nat a token in bfloat16. One update may move the policy by less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lagrpo.policy.loading import check_context
from lagrpo.policy.model import Packed, Policy
from lagrpo.sampling.base import Checkable, Item, Request
from lagrpo.types import Group

PARITY_PROMPTS = 8
LOCAL_TOKENS = 8  # at most, of each completion
LONG_PROMPT = 160  # tokens: longer than any block in which keys are computed or kept
TOO_FAR = 0.5
"""Nats a token, on average, at the start of a run: what differs by more computes something else."""


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


def measure_parity(policy: Policy, sampler: Checkable, requests: Sequence[Request]) -> tuple[Parity, list[Item]]:
    """Compare learner and in-process sampler with several numbers of rows, prompts longer than a block, groups of one
    and of several. Returns their parity, and the prompts and completions that later checks can score.

    Raises:
        ParityError: they differ by more than TOO_FAR on average, or a log-prob is not a number.
    """
    groups = sampler.generate_on_server(0, requests, max(2, -(-PARITY_PROMPTS // len(requests))), LOCAL_TOKENS)
    items: list[Item] = [(g.prompt.token_ids, c.token_ids.tolist()) for g in groups for c in g.completions]
    groups += sampler.generate_on_server(0, [*requests[:1], *_lengthen(policy, requests)], 1, LOCAL_TOKENS)
    is_sampled_T = torch.cat([c.sampled for g in groups for c in g.completions])
    sampled_T = torch.cat([c.logp_alpha for g in groups for c in g.completions])[is_sampled_T]
    together_T = _score_groups(policy, groups)[is_sampled_T]
    check_finite(together_T, "the initial policy")
    difference_T = (together_T - sampled_T).abs()
    mean, largest = float(difference_T.mean()), float(difference_T.max())
    if not mean <= TOO_FAR / policy.tau:
        raise ParityError(
            f"learner and in-process sampler differ by {mean:.3g} nats a token, with the same weights: this model "
            "computes something else when it decodes; it is not supported"
        )
    equal = (
        torch.equal(together_T, sampled_T)
        and torch.equal(torch.cat([_score_groups(policy, [group]) for group in groups])[is_sampled_T], sampled_T)
        and torch.equal(score_items(policy, items), flatten(sampler.scores(items)[0]))
    )
    reason = None if equal and policy.model.exact else _why_close(policy, equal)
    return Parity("close" if reason else "exact", mean, largest, len(sampled_T), reason), items


def score_items(policy: Policy, items: Sequence[Item], tau: float = 1.0) -> Tensor:
    """The learner's log π of the items' tokens at temperature tau: float32 [T] on the CPU, nats."""
    return _score(policy, [(ids, [torch.tensor(tokens)]) for ids, tokens in items], tau)


def flatten(scores: Sequence[Sequence[float]]) -> Tensor:
    """A server's log-probs [item][token] as float32 [T]."""
    return torch.tensor([p for item in scores for p in item])


def check_finite(learner_T: Tensor, where: str) -> None:
    """Raise ParityError for log-probs of the learner that are not numbers."""
    if not bool(learner_T.isfinite().all()):
        raise ParityError(f"{where}: the policy's log-probs are not numbers, it has diverged; lower optimizer.lr")


def _score_groups(policy: Policy, groups: Sequence[Group]) -> Tensor:
    return _score(policy, [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups], policy.tau)


def _score(policy: Policy, groups: Sequence[tuple[Sequence[int], Sequence[Tensor]]], tau: float) -> Tensor:
    with torch.no_grad():
        return policy.model(Packed.build(groups, policy.device), tau).float().cpu()


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
    """Why bits are not demanded of an in-process sampler."""
    if policy.model.exact:
        return "they should agree to the bit, and do not: please report this processor and compiler"
    kind = str(policy.dtype).removeprefix("torch.")
    return f"products of {kind} are PyTorch's here{', which happen to agree' if equal else ''}"
