"""The weight-sync check: after every weight sync the sampler must have the policy's weights.

Rounding never stops a run; other weights always do. Every engine has a check (`weight_check` in
base.py): `LocalCheck` and `ServerCheck` are here, `VersionCheck` is the default.

The local engine is compared weight by weight, to the bit, and at the start of a run by log-probs:
*exact* if a row has the same bits in trainer and engine (`Model.exact`), else *close*, hundredths
of a nat per token in bfloat16.

vLLM servers are compared by log-probs of tokens that the first server generated for a few prompts
of the task. A weight sync has to pass four tests; the last two compare it with the sync before:

1. every server reports the version that was synced;
2. the mean |Δ log-prob| is within the tolerance of the dtype. The same holds for the log-probs of
   what the servers generated: this finds a server whose log-probs are of another temperature;
3. the log-probs have changed at all, if the trainer's have on ENOUGH tokens; otherwise nothing was
   loaded;
4. of the tokens that the update moved by more than twice the noise, no more are nearer to the
   trainer's old log-probs than chance allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from lagrpo.model.layout import Packed
from lagrpo.model.model import Policy
from lagrpo.rollout.base import Item, WeightSyncError, check_version
from lagrpo.rollout.prefetch import in_order
from lagrpo.types import Group, Request

if TYPE_CHECKING:
    from lagrpo.rollout.local import LocalSampler

CHECK_PROMPTS = 8
# Most tokens of each completion that is compared.
LOCAL_TOKENS = 8
SERVER_TOKENS = 32
# Completions of each prompt that the local engine is compared on.
LOCAL_COMPLETIONS = 4
# Tokens of a long prompt: more than any block in which keys are computed or kept.
LONG_PROMPT = 160
# Mean nats per token, local engine: with a larger difference it computes something else.
TOO_FAR = 0.5
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Largest mean |Δ log-prob| in nats per token at tau = 1, by the coarser of the two dtypes.

SmolLM2-135M in bfloat16 against vLLM 0.32 on a CPU: .04 to .06.
"""
# Nats per token by which the compared tokens may become less likely before others replace them:
# the log-probs of unlikely tokens are less exact.
RENEW = 0.5
# Tokens on which the trainer must have changed before an unchanged server counts as stale.
ENOUGH = 20
CHANCE = 1e-6
"""A server is stale if a fair coin would show as many tokens nearer to the old log-probs with a
smaller chance than this.

Tokens are counted, not summed: the noise has heavy tails, and a few unlikely tokens would decide a
sum of squares.
"""


class ServedEngine(Protocol):
    """The part of an engine over servers that the check uses."""

    @property
    def version(self) -> int: ...

    def generate_on_servers(
        self, requests: Sequence[Request], G: int, max_tokens: int
    ) -> Mapping[str, list[Group]]: ...  # by the URL of each server

    def get_logprobs(self, items: Sequence[Item]) -> Mapping[str, list[list[float]]]:
        """By replica of a server, as one server may have several copies of the weights."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of trainer and local engine at the start of a run.

    `mean` and `largest` are |Δ log-prob| per token, in nats at the sampling temperature; `tokens`
    is the number of tokens that were compared.
    """

    grade: Literal["exact", "close"]
    mean: float
    largest: float
    tokens: int

    def __str__(self) -> str:
        if self.grade == "exact":
            return f"exact: sampler and trainer log-probs of {self.tokens} tokens match bit for bit"
        return (
            f"close: sampler and trainer log-probs of {self.tokens} tokens "
            f"differ by {self.mean:.2g} nats per token (max {self.largest:.2g})"
        )


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Log-probs of the compared tokens at temperature 1: float32, nats."""

    trainer_T: Tensor  # [T]
    servers: dict[str, Tensor]  # [T] by each replica of each server


class LocalCheck:
    """The check of the local engine. `agreement` is from the start of the run.

    At the start trainer and engine are compared on `requests`, and on a prompt longer than a block.
    Raises WeightSyncError if the log-probs differ by more than TOO_FAR on average, or if a log-prob
    is not a number.
    """

    def __init__(self, policy: Policy, sampler: LocalSampler, requests: Sequence[Request]) -> None:
        self.sampler = sampler
        requests = [*requests, _long_request(requests)]
        params = replace(sampler.params, purpose="probe", max_tokens=LOCAL_TOKENS, episodes=None)
        groups = [group for _, group in sampler.sample(requests, LOCAL_COMPLETIONS, params)]
        groups = in_order(requests, groups)

        sampled_T = _rollout_logp(groups)
        trainer_T = _logp(policy, _items_of(groups), policy.tau)
        check_finite(trainer_T, "the initial policy")
        difference_T = (trainer_T - sampled_T).abs()
        mean = float(difference_T.mean())
        largest = float(difference_T.max())
        # Not `mean > …`, which is False for NaN.
        if not mean <= TOO_FAR / policy.tau:
            raise WeightSyncError(
                f"trainer and local sampler differ by {mean:.3g} nats per token with the same "
                "weights: this model computes other log-probs when it decodes; it is not supported"
            )
        is_exact = policy.model.exact and largest == 0.0
        self.agreement = Agreement(
            grade="exact" if is_exact else "close",
            mean=mean,
            largest=largest,
            tokens=len(difference_T),
        )

    def __call__(self, policy: Policy) -> Mapping[str, float]:
        """Returns logp_difference_mean and logp_difference_max, nats per token, at the start.

        Raises WeightSyncError if a weight of the engine differs from the policy's.
        """
        check_version(policy, self.sampler.version)
        where = f"version {policy.version}"
        sampler_weights = self.sampler.policy.weights
        stale_names: list[str] = []
        if sampler_weights is not policy.weights:
            stale_names = policy.weights.find_stale(sampler_weights)
        if stale_names:
            raise WeightSyncError(
                f"{where}: the local sampler has stale weights: {len(stale_names)} weights, "
                f"such as {stale_names[0]}, differ from the policy's"
            )
        # A few numbers of each weight suffice: a gradient that is not finite spoils all of it.
        first_numbers = [
            parameter.detach().flatten()[:64].float()
            for parameter in self.sampler.policy.model.parameters()
        ]
        check_finite(torch.cat(first_numbers), where)
        return {
            "logp_difference_mean": self.agreement.mean,
            "logp_difference_max": self.agreement.largest,
        }


def _long_request(requests: Sequence[Request]) -> Request:
    """Returns a request whose prompt repeats all prompts up to LONG_PROMPT tokens."""
    token_ids: list[int] = []
    for request in requests:
        token_ids += request.prompt.token_ids
    repeated = (token_ids * LONG_PROMPT)[:LONG_PROMPT]
    first = requests[0]
    prompt = replace(first.prompt, key=-1, token_ids=tuple(repeated))
    return replace(first, prompt=prompt)


class ServerCheck:
    """The check of an engine over servers.

    `requests` are the prompts to compare on. `tolerance` replaces the tolerance for `dtype`, the
    servers'.
    """

    agreement = None

    def __init__(
        self,
        sampler: ServedEngine,
        requests: Sequence[Request],
        dtype: torch.dtype,
        tolerance: float | None = None,
    ) -> None:
        self.sampler = sampler
        self.requests = requests
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        # The compared tokens, and the trainer's mean log-prob of them when they were generated.
        self._items: list[Item] = []
        self._mean_logp = 0.0
        # The comparison at the last sync that passed.
        self._before: _Comparison | None = None

    def __call__(self, policy: Policy) -> Mapping[str, float]:
        """Returns logp_difference_mean and logp_difference_max: |Δ log-prob| per token, nats.

        They are of the replica that differs most. Raises WeightSyncError if a test fails,
        SamplerError if a server is gone for good.
        """
        check_version(policy, self.sampler.version)
        if not self._items:
            self._renew(policy)
        now = self._compare(policy)
        metrics_of_servers: list[dict[str, float]] = []
        for name, server_T in now.servers.items():
            where = f"version {policy.version} on {name}"
            metrics = check_distance(now.trainer_T, server_T, self.tolerance, where)
            # A server that was gone at the last sync is not in `_before`.
            if self._before is not None and name in self._before.servers:
                metrics["telling_tokens"] = check_fresh(
                    self._before.trainer_T,
                    now.trainer_T,
                    self._before.servers[name],
                    server_T,
                    where,
                )
            metrics_of_servers.append(metrics)
        if self._mean_logp - float(now.trainer_T.mean()) > RENEW:
            now = self._renew(policy)
        self._before = now
        return max(metrics_of_servers, key=lambda metrics: metrics["logp_difference_mean"])

    def _renew(self, policy: Policy) -> _Comparison:
        """Replaces the compared tokens by what the first server generates now.

        The log-probs that every server reports with its own completions must be the trainer's at
        the sampling temperature.
        """
        groups_of_servers = self.sampler.generate_on_servers(self.requests, 1, SERVER_TOKENS)
        for server, groups in groups_of_servers.items():
            for group in groups:
                for completion in group.completions:
                    if completion.outcome is not None:
                        raise WeightSyncError(
                            f"{server}: a completion for the weight-sync check failed: "
                            f"{completion.outcome.reason}"
                        )
            check_distance(
                _logp(policy, _items_of(groups), policy.tau),
                _rollout_logp(groups),
                self.tolerance / policy.tau,
                f"the completions of {server}",
            )
        self._items = _items_of(next(iter(groups_of_servers.values())))
        comparison = self._compare(policy)
        self._mean_logp = float(comparison.trainer_T.mean())
        return comparison

    def _compare(self, policy: Policy) -> _Comparison:
        """Returns the log-probs of the compared tokens by the trainer and by each server."""
        servers: dict[str, Tensor] = {}
        for name, logp_of_items in self.sampler.get_logprobs(self._items).items():
            servers[name] = torch.tensor([logp for item in logp_of_items for logp in item])
        return _Comparison(trainer_T=_logp(policy, self._items, 1.0), servers=servers)


def check_finite(values: Tensor, where: str) -> None:
    """Raises WeightSyncError for log-probs or weights of the trainer that are not numbers."""
    if not bool(values.isfinite().all()):
        raise WeightSyncError(
            f"{where}: the policy's log-probs are not finite: "
            "training diverged; lower optimizer.learning_rate"
        )


def check_distance(
    trainer_T: Tensor, server_T: Tensor, tolerance: float, where: str
) -> dict[str, float]:
    """Makes test 2. Returns the mean and the largest difference.

    Raises WeightSyncError if the mean is beyond the tolerance.
    """
    check_finite(trainer_T, where)
    difference_T = (trainer_T - server_T).abs()
    mean = float(difference_T.mean())
    largest = float(difference_T.max())
    # Not `mean > tolerance`, which is False for NaN.
    if not mean <= tolerance:
        raise WeightSyncError(
            f"{where}: log-probs of trainer and sampler differ by {mean:.3g} nats per token "
            f"(tolerance {tolerance:.3g}). The sampler has other weights, a coarser dtype, or "
            "log-probs at another temperature (--logprobs-mode)"
        )
    return {"logp_difference_mean": mean, "logp_difference_max": largest}


def check_fresh(old_T: Tensor, new_T: Tensor, before_T: Tensor, now_T: Tensor, where: str) -> int:
    """Makes tests 3 and 4. Returns the number of tokens that tell old from new.

    `old_T` and `new_T` are the trainer's log-probs before and after the sync, `before_T` and
    `now_T` the server's. Raises WeightSyncError for stale weights.
    """
    num_changed = int((new_T != old_T).sum())
    if num_changed >= ENOUGH and torch.equal(before_T, now_T):
        raise WeightSyncError(
            f"{where}: the sampler did not load the new weights: "
            "the sync changed the policy's log-probs, but not the sampler's"
        )
    to_new_T = (now_T - new_T).abs()
    to_old_T = (now_T - old_T).abs()
    noise = torch.minimum(to_new_T, to_old_T).median()
    telling_T = (new_T - old_T).abs() > 2 * noise
    num_telling = int(telling_T.sum())
    num_older = int((telling_T & (to_old_T < to_new_T)).sum())
    # A fair coin shows at least `num_older` heads in `num_telling` tosses in this many of the
    # 2^num_telling cases.
    num_cases = sum(math.comb(num_telling, heads) for heads in range(num_older, num_telling + 1))
    if num_cases < CHANCE * 2**num_telling:
        raise WeightSyncError(
            f"{where}: the sampler still has stale weights: {num_older} of {num_telling} tokens "
            "whose log-probs changed are closer to the previous version"
        )
    return num_telling


def _items_of(groups: Sequence[Group]) -> list[Item]:
    return [
        (group.prompt.token_ids, completion.token_ids.tolist())
        for group in groups
        for completion in group.completions
    ]


def _rollout_logp(groups: Sequence[Group]) -> Tensor:
    """Returns the log-probs [T] with which the groups were sampled."""
    return torch.cat(
        [completion.rollout_logp for group in groups for completion in group.completions]
    )


@torch.no_grad()
def _logp(policy: Policy, items: Sequence[Item], tau: float) -> Tensor:
    """Returns the trainer's log-probs of the items' tokens: float32 [T] on the CPU, nats."""
    prompts_with_completions: list[tuple[Sequence[int], list[Tensor]]] = []
    # Completions of one prompt are side by side in `items`; they share its rows.
    for prompt_ids, items_of_prompt in groupby(items, key=itemgetter(0)):
        completions = [torch.tensor(token_ids) for _, token_ids in items_of_prompt]
        prompts_with_completions.append((prompt_ids, completions))
    packed = Packed.build(prompts_with_completions, policy.device)
    return policy.logp(packed, tau=tau).float().cpu()
