"""The parity check of a weight sync: learner and sampler score the same tokens, those of completions that the sampler
generated for a few prompts of the task, and the scores agree as far as the arithmetic of the two lets them.

There are two grades.

exact   Learner and sampler are one arithmetic, ours (backends/cpu/kernels.py): bits are equal. That is compared at the
        start, on the model of the run, and demanded after every weight sync.
close   Somebody else decides in which order sums run (PyTorch's products, a GPU, a vLLM server), so that scores differ
        by rounding: hundredths of a nat a token in bfloat16, and one update may move the policy by less. The difference
        is measured at the start, and a weight sync has to pass four tests, of which the last two compare it with the
        weight sync before:

1. every server reports the version that was synced;
2. the mean |Δ log-prob| is within the tolerance of the dtype (once, too, for what the servers say of their own samples:
   that tells a server whose log-probs are of another temperature);
3. the scores are not, to the last bit, those of before, when the learner's have changed on ENOUGH tokens: then nothing
   was loaded (on fewer, rounding may have swallowed the change on one side);
4. the scores are not nearer to the learner's of before than to those of now, on more of the tokens that can tell
   (`parity_telling`: those that the update moved by more than twice the noise) than chance would have.

Rounding never stops a run; other weights always do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lagrpo.policy.model import Packed, Policy, check_context
from lagrpo.sampling.base import Request
from lagrpo.types import Group

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest mean |Δ log-prob| in nats a token at tau = 1, by the coarser of the two dtypes. SmolLM2-135M in bfloat16
against vLLM 0.32 on a CPU: .04 to .06."""
TOO_FAR = 0.5
"""Nats a token, on average, at the start of a run: what differs by more computes something else."""
NOISE = 3.0
"""An in-process sampler may differ by so many times what it did at the start, where that is beyond the tolerance."""
CHANCE = 1e-6
"""Test 4 decides when so many of the telling tokens are nearer to the old log-probs that a fair coin would show it with
a smaller chance than this; it takes 20 of them. Counted, not summed: the noise has heavy tails, and a few unlikely
tokens would decide a sum of squares."""
ENOUGH = 20
"""Tokens on which the learner's log-probs must have changed before equal scores of the sampler are held against it."""
RENEW = 0.5
"""Nats a token by which the learner's mean log-prob of the parity prompts may fall before other completions take its
place."""
PARITY_PROMPTS = 8
PARITY_TOKENS = 32  # at most, of each prompt, by a vLLM server
LOCAL_TOKENS = 8  # and by the in-process sampler
EXACT_PROMPTS, EXACT_TOKENS = 2, 4  # that tell whether bits are equal after a weight sync
LONG_PROMPT = 160  # tokens: longer than any block in which keys are computed or kept


_Item = tuple[tuple[int, ...], list[int]]  # token ids of a prompt, and of a completion


class ParityError(RuntimeError):
    """The sampler does not serve the policy that was synced."""


class Scorer(Protocol):
    """What the parity check needs of a sampler."""

    @property
    def servers(self) -> Sequence[Any]: ...
    @property
    def version(self) -> int: ...
    def generate_on_server(self, number: int, request: Request, max_tokens: int) -> Group: ...
    def scores(self, items: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[list[float]]]: ...


class InProcess(Scorer, Protocol):
    """An in-process sampler can generate groups for a parity check, too."""

    def generate_groups(self, requests: Sequence[Request], G: int, max_tokens: int) -> list[Group]: ...


@dataclass(frozen=True, slots=True)
class Parity:
    """How far learner and in-process sampler agreed at the start of a run: mean and largest |Δ log-prob| in nats at the
    sampling temperature, over how many tokens; `reason`: why the grade is no better."""

    grade: Literal["exact", "close"]
    mean: float
    largest: float
    tokens: int
    reason: str | None = None

    def __str__(self) -> str:
        if self.grade == "exact":
            return f"exact: sampler and learner agree to the bit, compared on {self.tokens} tokens"
        return (
            f"close: sampler and learner differ by {self.mean:.2g} nats a token, at most {self.largest:.2g}, over "
            f"{self.tokens} tokens ({self.reason})"
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last weight sync that passed: log-probs of the parity prompts by the learner [T], and by each server."""

    learner_T: Tensor
    servers: list[Tensor]


class ParityCheck:
    """Calling it checks the weight sync that was just made. `requests` are the parity prompts, `tolerance` replaces
    that of the dtype. `start` finds the grade of an in-process sampler; without it the grade is close."""

    def __init__(self, requests: Sequence[Request], dtype: torch.dtype, tolerance: float | None = None) -> None:
        self.requests = list(requests)[:PARITY_PROMPTS]
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self.parity: Parity | None = None
        self._tokens = PARITY_TOKENS
        self._items: list[_Item] = []
        self._seen: _Seen | None = None
        # the highest mean log-prob that the learner has given the tokens of the parity prompts
        self._likely = -math.inf

    def start(self, policy: Policy, sampler: InProcess) -> Parity:
        """Compare learner and sampler, who have the same weights, with several numbers of rows, prompts longer than a
        block, groups of one and of several; what they do from then on is held against it.

        Raises:
            ParityError: they differ by more than TOO_FAR on average, or by no number.
        """
        self._tokens = LOCAL_TOKENS
        alone = sampler.generate_groups([*self.requests[:1], *self._long(policy)], 1, LOCAL_TOKENS)
        groups = sampler.generate_groups(self.requests, max(2, -(-PARITY_PROMPTS // len(self.requests))), LOCAL_TOKENS)
        self._items = [(g.prompt.token_ids, c.token_ids.tolist()) for g in groups for c in g.completions]
        groups += alone
        generated_T = torch.cat([c.logp_alpha for g in groups for c in g.completions])
        with torch.no_grad():
            together_T = policy.logp(Packed.build([_ids(g) for g in groups], policy.device)).float().cpu()
            one_by_one = [policy.logp(Packed.build([_ids(g)], policy.device)).float().cpu() for g in groups]
        self._finite(together_T, "the initial policy")
        difference_T = (together_T - generated_T).abs()
        fed_T = torch.tensor([p for item in sampler.scores(self._items)[0] for p in item])
        equal = (
            torch.equal(together_T, generated_T)
            and torch.equal(torch.cat(one_by_one), generated_T)
            and torch.equal(self._learner(policy, self._items, tau=1.0), fed_T)
        )
        mean, largest = float(difference_T.mean()), float(difference_T.max())
        if not mean <= TOO_FAR / policy.tau:
            raise ParityError(
                f"learner and in-process sampler differ by {mean:.3g} nats a token, with the same weights: this model "
                "computes something else when it decodes; it is not supported"
            )
        reason = None if equal and policy.own_products else _why_close(policy, equal)
        self.parity = Parity("close" if reason else "exact", mean, largest, len(generated_T), reason)
        self.tolerance = max(self.tolerance, NOISE * mean * policy.tau)
        return self.parity

    def __call__(self, policy: Policy, sampler: Scorer) -> Mapping[str, float]:
        """parity_mean, parity_max: |Δ log-prob| a token, nats; parity_kl: mean of ρ - 1 - ln ρ with ρ = π/α; of the
        worst server. parity_telling: how many tokens can tell old from new, None after the first weight sync and where
        bits are compared.

        Raises:
            ParityError: a test failed. SamplerError: a server is gone for good.
        """
        if sampler.version != policy.version:
            found = ", ".join(f"{server}: {server.version()!r}" for server in sampler.servers)
            raise ParityError(f"version {policy.version} was synced, but the sampler reports other weights: {found}")
        if self.parity is not None and self.parity.grade == "exact":
            return self._exactly(policy, sampler)
        if not self._items:
            self._items = self._generate(policy, sampler)
        seen = self._look(policy, sampler)
        worst: dict[str, float] = {}
        for number, server_T in enumerate(seen.servers):
            where = f"version {policy.version} on {sampler.servers[number]}"
            metrics = self._within(seen.learner_T, server_T, where)
            if self._seen is not None:
                before_T = self._seen.servers[number]
                metrics["parity_telling"] = _not_stale(self._seen.learner_T, seen.learner_T, before_T, server_T, where)
            if not worst or metrics["parity_mean"] > worst["parity_mean"]:
                worst = metrics
        self._seen = self._renewed(policy, sampler, seen)
        return worst

    def _long(self, policy: Policy) -> list[Request]:
        """The prompts one behind the other, LONG_PROMPT tokens, where the model takes so many."""
        try:
            check_context(policy, LONG_PROMPT + LOCAL_TOKENS)
        except ValueError:
            return []
        joined = sum((request.prompt.token_ids for request in self.requests), ()) * LONG_PROMPT
        first = self.requests[0]
        return [replace(first, prompt=replace(first.prompt, key=-1, token_ids=joined[:LONG_PROMPT]))]

    def _exactly(self, policy: Policy, sampler: Scorer) -> Mapping[str, float]:
        """The grade exact: bits."""
        items = [(ids, tokens[:EXACT_TOKENS]) for ids, tokens in self._items[:: -(-len(self._items) // EXACT_PROMPTS)]]
        seen = self._look(policy, sampler, items)
        server_T = seen.servers[0]
        self._finite(seen.learner_T, f"version {policy.version}")
        if not torch.equal(seen.learner_T, server_T):
            largest = float((seen.learner_T - server_T).abs().max())
            raise ParityError(
                f"after the weight sync of version {policy.version} learner and sampler disagree by {largest:.3g} nats "
                "about a token of the parity prompts, though their arithmetic is the same to the bit: the sampler "
                "serves other weights"
            )
        return {"parity_mean": 0.0, "parity_max": 0.0, "parity_kl": 0.0}

    def _look(self, policy: Policy, sampler: Scorer, items: Sequence[_Item] | None = None) -> _Seen:
        """The log-probs of the parity prompts, or of `items`, by all sides."""
        items = self._items if items is None else items
        learner_T = self._learner(policy, items, tau=1.0)
        scores = ([p for item in found for p in item] for found in sampler.scores(items))
        return _Seen(learner_T, [torch.tensor(found) for found in scores])

    def _renewed(self, policy: Policy, sampler: Scorer, seen: _Seen) -> _Seen:
        """The same, of new parity prompts where the policy has moved away from the tokens of the present ones: unlikely
        tokens are scored less exactly."""
        likely = float(seen.learner_T.mean())
        if self._likely - likely > RENEW:
            self._items = self._generate(policy, sampler)
            seen = self._look(policy, sampler)
            self._likely = float(seen.learner_T.mean())
        else:
            self._likely = max(self._likely, likely)
        return seen

    def _generate(self, policy: Policy, sampler: Scorer) -> list[_Item]:
        """The parity prompts: what the first server generated. What every server says of its own samples must be the
        learner's log-prob at the sampling temperature."""
        items: list[_Item] = []
        for number, server in enumerate(sampler.servers):
            own, said = [], []
            for request in self.requests:
                completion = sampler.generate_on_server(number, request, self._tokens).completions[0]
                if completion.outcome is not None:
                    raise ParityError(
                        f"{server}: a completion for the parity prompts failed: {completion.outcome.reason}"
                    )
                own.append((request.prompt.token_ids, completion.token_ids.tolist()))
                said.append(completion.logp_alpha)
            self._within(
                self._learner(policy, own, policy.tau), torch.cat(said), f"the samples of {server}", policy.tau
            )
            items = items or own
        return items

    def _learner(self, policy: Policy, items: Sequence[_Item], tau: float) -> Tensor:
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
        self._finite(learner_T, where)
        mean, tolerance = float(difference_T.abs().mean()), self.tolerance / tau
        if not mean <= tolerance:
            raise ParityError(
                f"{where}: learner and sampler differ by {mean:.3g} nats a token over {len(difference_T)} tokens of "
                f"the parity prompts, more than the tolerance of {tolerance:.3g}. {self._causes}"
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

    @staticmethod
    def _finite(learner_T: Tensor, where: str) -> None:
        if not bool(learner_T.isfinite().all()):
            raise ParityError(f"{where}: the policy's log-probs are not numbers, it has diverged; lower optimizer.lr")


def _ids(group: Group) -> tuple[tuple[int, ...], list[Tensor]]:
    return group.prompt.token_ids, [c.token_ids for c in group.completions]


def _why_close(policy: Policy, equal: bool) -> str:
    """Why bits are not demanded of an in-process sampler."""
    if policy.own_products:
        return "they should agree to the bit, and do not: please report this processor and compiler"
    kind = str(policy.dtype).removeprefix("torch.")
    return f"products of {kind} are PyTorch's here{', which happen to agree' if equal else ''}"


def _not_stale(old_T: Tensor, new_T: Tensor, before_T: Tensor, now_T: Tensor, where: str) -> int:
    """Tests 3 and 4: `old_T`, `new_T` are the learner's log-probs, `before_T`, `now_T` the server's. Returns how many
    tokens can tell. Raises ParityError for a server that still has what it had.

    >>> old = torch.linspace(-3.0, -0.1, 30)
    >>> _not_stale(old, old + 0.3, old + 0.01, old + 0.29, "v")
    30
    """
    if int((new_T != old_T).sum()) >= ENOUGH and torch.equal(before_T, now_T):
        raise ParityError(
            f"{where}: the sampler scores the parity prompts exactly as before the weight sync, though the policy has "
            "changed: it did not load the new weights"
        )
    to_new_T, to_old_T = (now_T - new_T).abs(), (now_T - old_T).abs()
    noise = torch.minimum(to_new_T, to_old_T).median()
    telling_T = (new_T - old_T).abs() > 2 * noise
    telling, older = int(telling_T.sum()), int((telling_T & (to_old_T < to_new_T)).sum())
    if _tail(older, telling) < CHANCE:
        raise ParityError(
            f"{where}: the sampler scores the parity prompts as the version synced before would: {older} of the "
            f"{telling} tokens that can tell are nearer to that. It still serves the old weights"
        )
    return telling


def _tail(successes: int, trials: int) -> float:
    """The chance that a fair coin shows at least so many.

    >>> _tail(2, 3), _tail(0, 0)
    (0.5, 1.0)
    """
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials
