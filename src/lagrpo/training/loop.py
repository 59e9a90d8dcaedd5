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
from lagrpo.sampling.prefetch import Draws
from lagrpo.sampling.schedule import Schedule
from lagrpo.training.metrics import Clock
from lagrpo.types import Group
from lagrpo.verify import Verifier


@dataclass(frozen=True, slots=True)
class Used:
    """A batch that has been used. `version` is that of π_k, `alpha` that of the sampler's weights, `reason` why they
    were delivered just before ("" when they were not), `delivery` the figures of the last delivery and its proof,
    `sampling` those of the sampler since the batch before. `rows` are those of the objective and then, where the run
    asks for figures of the lag, those that it leaves out. `updates` has one dict of figures for each of the i updates;
    `after_T` the log-probs of the rows under π after them, where the run asks for that."""

    stage: int
    b: int
    version: int
    alpha: int
    reason: str
    delivery: Mapping[str, float]
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

    `advantage(b)(rewards_G, lengths_G, g)` gives A_α of group g of batch b, `weights` the normaliser (policy/batch.py);
    the rest of the objective is the recipe that the learner holds. `prove(policy, sampler)` raises unless the sampler
    serves what was delivered, and gives figures of how well the two agree. `recorded(b)` are groups that somebody else
    drew, `extra(b, taken, count)` further prompts, after `taken` ones, in place of groups whose rewards are all equal,
    in at most `resample` rounds. `score_lag`: log π_k of the completions that the objective leaves out is known too,
    see `scored_rest`; `one_program`: the sampler's arithmetic is the learner's, up to rounding. `spends(batch, rows)`
    is the number by which budget and certified decide about the next delivery, None where the batch does not tell.
    """

    learner: Learner
    sampler: Sampler
    draws: Draws
    verifier: Verifier
    schedule: Schedule
    prove: Callable[[Policy, Any], Mapping[str, float]]
    listener: Listener
    advantage: Callable[[int], Callable[[Tensor, Tensor, int], Tensor]]
    weights: Callable[[Tensor, Tensor], Tensor]
    recorded: Callable[[int], Sequence[Group]]
    extra: Callable[[int, int, int], Sequence[Request]]
    S: int
    M: int
    i: int
    ahead: bool
    tokens: int
    resample: int
    score_lag: bool
    one_program: bool
    score_update: bool
    spends: Callable[[Batch, Sequence[MicroBatch]], float | None]
    reset_optimizer: bool


def iterative_grpo(a: Algorithm) -> None:
    """Lines 5-17. The initial policy is delivered before the first batch: the paper leaves α undefined for k < v."""
    learner, policy, recipe = a.learner, a.learner.policy, a.learner.recipe
    alpha, delivery, spent = policy.version, {}, [0.0]  # what the schedule decides by, since the delivery
    plan = a.schedule.plan(a.S, a.M, a.ahead and not a.resample, lambda: spent[-1])
    for s in range(1, a.S + 1):  # 5
        for k in range(1, a.M + 1):  # 6
            b, clock, due = (s - 1) * a.M + k, Clock(), next(plan)
            reason = due.reason if b > 1 else "start"
            if reason:  # 8
                alpha, delivery, spent = *deliver(a, clock), [0.0]  # 9   α <- π_θ
            a.draws.ask(due.draws, alpha)  # 7, 10   prompts of D_b, y ~ α
            groups = judged(a, clock, chain(a.recorded(b), a.draws.take(b)))  # 11   r(x, y)
            groups = resampled(a, b, alpha, clock, a.draws.in_order(b, groups))
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
            figures = delivery, a.sampler.read()
            a.listener.batch(Used(s, b, version, alpha, reason, *figures, batch, scored, updates, after_T, clock))
        learner.end_stage(a.reset_optimizer)  # 16   π_ref <- π_θ


def deliver(a: Algorithm, clock: Clock) -> tuple[int, Mapping[str, float]]:
    """α <- π_θ, proven; returns the version and the figures of delivery and proof."""
    policy = a.learner.policy
    a.listener.phase("delivery")
    with clock("sampling"):
        a.draws.before_delivery()
    clock.drawn += a.draws.read()[1]
    with clock("delivery"):
        cost = a.sampler.deliver(policy.weights, policy.version)
        a.draws.delivered(policy.version)
        return policy.version, {**cost, **a.learner.delivered(), **a.prove(policy, a.sampler)}


def judged(a: Algorithm, clock: Clock, groups: Iterator[Group]) -> list[Group]:
    """The groups with their outcomes; judging goes on while they are being drawn."""
    a.listener.phase("sampling")
    with clock("judging"):
        done = list(a.verifier.judge(groups))
    seconds, tokens = a.draws.read()
    clock.move("judging", "sampling", seconds)
    clock.drawn += tokens
    return done


def scored_rest(a: Algorithm, batch: Batch, rows: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The completions that the objective leaves out, with log π_k: a forward pass without gradient. Where π_k itself
    drew them, and by the same program, log π_k is log α up to the rounding that the proof measures, and costs nothing.
    """
    learner = a.learner
    rest = left_out(batch, rows, a.tokens, learner.policy.device)
    drawn_by = {v for micro in rest for c in micro.members for v in batch.completion(c).versions.tolist()}
    if a.one_program and drawn_by <= {learner.policy.version}:
        scores = [micro.logp_alpha_T for micro in rest]
    else:
        scores = learner.score(rest)
    for micro, logp_T in zip(rest, scores, strict=True):
        micro.logp_k_T = logp_T
    return rest


def resampled(a: Algorithm, b: int, alpha: int, clock: Clock, groups: list[Group]) -> list[Group]:
    """DAPO's dynamic sampling, bounded: groups without a signal make way for groups of further prompts with one."""
    taken = 0
    for _ in range(a.resample):
        flat = [n for n, group in enumerate(groups) if group.source == "sampler" and is_flat(group)]
        if not flat:
            break
        more = judged(a, clock, a.draws.more(a.extra(b, taken, len(flat)), alpha))
        taken += len(flat)
        for n, group in zip(flat, (group for group in more if not is_flat(group)), strict=False):
            groups[n] = group
    return groups
