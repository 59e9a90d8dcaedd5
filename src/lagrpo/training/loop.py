"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257), and nothing else.

The numbers beside the lines are the paper's. Batches are counted through all stages: b = (s - 1)·M + k. What happens
around the algorithm (building its parts, evaluating, the files of a run) is in training/run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from torch import Tensor

from lagrpo.policy.batch import Batch, MicroBatch, assemble, is_flat, left_out, micro_batches
from lagrpo.policy.learner import Learner
from lagrpo.policy.model import Policy
from lagrpo.sampling.base import Request, Sampler
from lagrpo.sampling.prefetch import Prefetcher
from lagrpo.sampling.schedule import Schedule
from lagrpo.training.metrics import Clock
from lagrpo.types import Group
from lagrpo.verify import Verifier


@dataclass(frozen=True, slots=True)
class Used:
    """A batch that has been used. `version` is that of π_k, `alpha` that of the sampler's weights, `reason` why they
    were synced just before ("" when they were not), `weight_sync` the metrics of the last weight sync and its parity
    check, `sampling` those of the sampler since the batch before. `rows` are those of the objective and then, where the
    run asks for lag metrics, those that it leaves out. `updates` has one dict of metrics for each of the i updates;
    `after_T` the log-probs of the rows under π after them, where the run asks for that."""

    stage: int
    b: int
    version: int
    alpha: int
    reason: str
    weight_sync: Mapping[str, float]
    sampling: Mapping[str, float]
    batch: Batch
    rows: Sequence[MicroBatch]
    updates: Sequence[dict[str, float]]
    after_T: Sequence[Tensor] | None
    clock: Clock


class Listener(Protocol):
    """What is told about the run: the files on disk, the display, trackers."""

    def phase(self, name: str) -> None:
        """What is being done from now on."""
        ...

    def batch(self, used: Used) -> None:
        """A batch was used."""
        ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The parts of Algorithm 1.

    `advantage(b)(rewards_G, lengths_G, g)` gives A_α of group g of batch b, `weights` the normalizer (policy/batch.py);
    the rest of the objective is the recipe that the learner holds. `check_parity(policy, sampler)` raises unless the
    sampler serves what was synced, and gives metrics of how well the two agree. `offline_groups(b)` are offline groups,
    `extra(b, taken, count)` further prompts, after `taken` ones, in place of groups whose rewards are all equal, in at
    most `dynamic_sampling` rounds. `score_lag`: log π_k of the completions that the objective leaves out is known too,
    see `scored_rest`; `one_program`: the sampler's arithmetic is the learner's, up to rounding. `spends(batch, rows)`
    is the number by which budget and certified decide about the next weight sync, None where the batch does not tell.
    """

    learner: Learner
    sampler: Sampler
    prefetcher: Prefetcher
    verifier: Verifier
    schedule: Schedule
    check_parity: Callable[[Policy, Any], Mapping[str, float]]
    listener: Listener
    advantage: Callable[[int], Callable[[Tensor, Tensor, int], Tensor]]
    weights: Callable[[Tensor, Tensor], Tensor]
    offline_groups: Callable[[int], Sequence[Group]]
    extra: Callable[[int, int, int], Sequence[Request]]
    S: int
    M: int
    i: int
    prefetch: bool
    tokens: int
    dynamic_sampling: int
    score_lag: bool
    one_program: bool
    score_update: bool
    spends: Callable[[Batch, Sequence[MicroBatch]], float | None]
    reset_optimizer: bool


def iterative_grpo(a: Algorithm) -> None:
    """Lines 5-17. The initial policy is synced before the first batch: the paper leaves α undefined for k < v."""
    learner, policy, recipe = a.learner, a.learner.policy, a.learner.recipe
    alpha, weight_sync, spent = policy.version, {}, [0.0]  # what the schedule decides by, since the weight sync
    plan = a.schedule.plan(a.S, a.M, a.prefetch and not a.dynamic_sampling, lambda: spent[-1])
    for s in range(1, a.S + 1):  # 5
        for k in range(1, a.M + 1):  # 6
            b, clock, due = (s - 1) * a.M + k, Clock(), next(plan)
            reason = due.reason if b > 1 else "start"
            if reason:  # 8
                alpha, weight_sync, spent = *sync_weights(a, clock), [0.0]  # 9   α <- π_θ
            a.prefetcher.ask(due.to_generate, alpha)  # 7, 10   prompts of D_b, y ~ α
            groups = judge_groups(a, clock, chain(a.offline_groups(b), a.prefetcher.take(b)))  # 11   r(x, y)
            groups = resample_groups(a, b, alpha, clock, a.prefetcher.in_order(b, groups))
            a.listener.phase("learning")
            a.sampler.rest()
            with clock("learning"):
                batch = assemble(groups, a.advantage(b), a.weights)  # 12-13   A_α, Eq. 2
                rows = micro_batches(batch, a.tokens, policy.device, recipe.needs_whole_groups, recipe.silent)
                learner.score_reference(rows)
                version = policy.version
            with clock("scoring"):
                scored = [*rows, *scored_rest(a, batch, rows)] if a.score_lag else rows
            with clock("learning"):
                updates = [learner.step(rows, batch.in_objective) for _ in range(a.i)]  # 14-15   Eq. 7 or 8
            with clock("scoring"):
                after_T = learner.score(scored) if a.score_update else None
            spent.append(value if (value := a.spends(batch, scored)) is not None else spent[-1])
            metrics = weight_sync, a.sampler.read()
            a.listener.batch(Used(s, b, version, alpha, reason, *metrics, batch, scored, updates, after_T, clock))
        learner.end_stage(a.reset_optimizer)  # 16   π_ref <- π_θ


def sync_weights(a: Algorithm, clock: Clock) -> tuple[int, Mapping[str, float]]:
    """α <- π_θ, checked; returns the version and the metrics of weight sync and parity check."""
    policy = a.learner.policy
    a.listener.phase("sync")
    with clock("sampling"):
        a.prefetcher.before_sync()
    clock.generated += a.prefetcher.read()[1]
    with clock("sync"):
        cost = a.sampler.sync_weights(policy.weights(), policy.version)
        a.prefetcher.on_sync(policy.version)
        return policy.version, {**cost, **a.learner.on_sync(), **a.check_parity(policy, a.sampler)}


def judge_groups(a: Algorithm, clock: Clock, groups: Iterator[Group]) -> list[Group]:
    """The groups with their outcomes; judging goes on while they are being generated."""
    a.listener.phase("sampling")
    with clock("judging"):
        done = list(a.verifier.judge(groups))
    seconds, tokens = a.prefetcher.read()
    clock.move("judging", "sampling", seconds)
    clock.generated += tokens
    return done


def scored_rest(a: Algorithm, batch: Batch, rows: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The completions that the objective leaves out, with log π_k: a forward pass without gradient. Where π_k itself
    sampled them, and by the same program, log π_k is log α up to the rounding that the parity check measures, and costs
    nothing.
    """
    learner = a.learner
    rest = left_out(batch, rows, a.tokens, learner.policy.device)
    generated_by = {v for micro in rest for c in micro.members for v in batch.completion(c).versions.tolist()}
    if a.one_program and generated_by <= {learner.policy.version}:
        scores = [micro.logp_alpha_T for micro in rest]
    else:
        scores = learner.score(rest)
    for micro, logp_T in zip(rest, scores, strict=True):
        micro.logp_k_T = logp_T
    return rest


def resample_groups(a: Algorithm, b: int, alpha: int, clock: Clock, groups: list[Group]) -> list[Group]:
    """DAPO's dynamic sampling, bounded: groups without a signal make way for groups of further prompts with one."""
    taken = 0
    for _ in range(a.dynamic_sampling):
        flat = [n for n, group in enumerate(groups) if group.source == "sampler" and is_flat(group)]
        if not flat:
            break
        more = judge_groups(a, clock, a.prefetcher.more(a.extra(b, taken, len(flat)), alpha))
        taken += len(flat)
        for n, group in zip(flat, (group for group in more if not is_flat(group)), strict=False):
            groups[n] = group
    return groups
