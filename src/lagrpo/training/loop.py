"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257), and nothing else.

The numbers beside the lines are the paper's. Batches are counted through all stages: b = (s - 1)·M + k.
training/training.py does what stands around the algorithm: evaluations, the files of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from lagrpo.interrupts import whole
from lagrpo.model.batch import Batch, FreshMicroBatch, MicroBatch, assemble, is_flat, left_out
from lagrpo.rollout.schedule import LoopState
from lagrpo.training.build import Parts
from lagrpo.training.clock import Clock
from lagrpo.training.lag import lag_is_complete, measure_spending
from lagrpo.types import Group


@dataclass(frozen=True, slots=True)
class Step:
    """A batch that has been used, and where the loop stands after it."""

    stage: int
    b: int
    version: int
    """of π_k"""
    reason: str
    """why the sampler's weights were synced just before this batch; "" when they were not"""
    sampling: Mapping[str, float]
    """metrics of the sampler since the batch before"""
    batch: Batch
    rows: Sequence[MicroBatch]
    """the micro-batches of the objective; then, where the run asks for metrics of the lag, what it leaves out"""
    updates: Sequence[dict[str, float]]
    """the metrics of each of the i updates"""
    after_T: Sequence[Tensor] | None
    """log-probs of the rows under π after the updates, where the run asks for them"""
    clock: Clock
    state: LoopState

    @property
    def alpha(self) -> int:
        """Version of the sampler's weights."""
        return self.state.alpha


def iterative_grpo(
    a: Parts, state: LoopState, tell: Callable[[str], None] = lambda phase: None
) -> Generator[Step, None, None]:
    """Lines 5-17, from `state` on; yields every batch with the state after it. The initial policy is synced before the
    first batch: the paper leaves α undefined for k < v. Line 16 comes when the next stage begins. No interruption comes
    between the first update on a batch and the request for the next one: then π is the policy after the batch that was
    yielded last. `tell` is told what is being done from then on."""
    learner, policy, settings = a.learner, a.learner.policy, a.settings
    S, M, i = settings.schedule.stages, settings.schedule.batches, settings.schedule.i
    prefetch = settings.sampling.prefetch and not settings.sampling.dynamic_sampling
    for s in range(state.batch // M + 1, S + 1):  # 5
        if s > 1 and state.batch % M == 0:
            learner.end_stage(settings.schedule.reset_optimizer)  # 16   π_ref <- π_θ
            state = state.after_stage(policy.version)
        for _ in range(state.batch % M, M):  # 6   k = 1 .. M
            b, clock, due = state.batch + 1, Clock(tell), a.schedule.next(state, S, M, prefetch)
            count_sampling_before(a, clock)
            reason = "start" if state.alpha < 0 else due.reason
            if reason:  # 8
                state = state.after_sync(policy.version, sync_weights(a, clock))  # 9   α <- π_θ
            state = state.after_request(due.to_generate)
            a.prefetcher.ask(due.to_generate, state.alpha)  # 7, 10   prompts of D_b, y ~ α
            groups = judge_groups(a, clock, chain(a.read_offline(b), a.prefetcher.take(b)))  # 11   r(x, y)
            groups = replace_flat(a, state, clock, a.prefetcher.in_order(b, groups))
            clock.tell("learning")
            a.sampler.rest()
            version = policy.version
            with clock("learning"):
                batch = assemble(groups, learner.recipe, settings.sampling.max_tokens, settings.run.seed, b)  # 12-13
                fresh = learner.pack(batch, settings.optimizer.micro_batch_tokens)
            rest = score_rest(a, clock, batch, fresh)
            with whole():
                with clock("learning"):
                    rows, updates = update(a, batch, fresh, i)  # 14-15   Eq. 7 or 8
                rows += rest
                after_T = score_update(a, clock, rows)
                state, read = state.after_batch(measure_spending(settings, batch, rows)), a.sampler.read()
                yield Step(s, b, version, reason, read, batch, rows, updates, after_T, clock, state)


def count_sampling_before(a: Parts, clock: Clock) -> None:
    """Book what was generated for this batch and later ones since the batch before: evaluations and checkpoints wait
    for completions that are under way."""
    seconds, tokens = a.prefetcher.read()
    clock.add("sampling", seconds)
    clock.generated += tokens


def sync_weights(a: Parts, clock: Clock) -> Mapping[str, float]:
    """α <- π_θ, checked; returns the metrics of the sync and of the parity check."""
    policy = a.learner.policy
    clock.tell("weight sync")
    with clock("sampling"):
        a.prefetcher.before_sync()
    clock.generated += a.prefetcher.read()[1]
    with clock("sync"):
        cost = a.sampler.sync_weights(policy.weights, policy.version)
        a.prefetcher.on_sync(policy.version)
        checked = a.check_parity(policy, a.sampler) if a.check_parity is not None else {}
        return {**cost, **a.learner.on_sync(), **checked}


def judge_groups(a: Parts, clock: Clock, groups: Iterator[Group]) -> list[Group]:
    """The groups with their outcomes; judging goes on while they are being sampled."""
    clock.tell("sampling")
    with clock("judging"):
        done = list(a.verifier.judge(groups))
    seconds, tokens = a.prefetcher.read()
    clock.move("judging", "sampling", seconds)
    clock.generated += tokens
    return done


def replace_flat(a: Parts, state: LoopState, clock: Clock, groups: list[Group]) -> list[Group]:
    """DAPO's dynamic sampling, bounded: groups without a signal make way for groups of further prompts with one."""
    b, taken = state.batch + 1, 0
    for _ in range(a.settings.sampling.dynamic_sampling):
        flat = [n for n, group in enumerate(groups) if group.source == "sampler" and is_flat(group)]
        if not flat:
            break
        more = judge_groups(a, clock, a.prefetcher.more(a.prompts.extra(b, taken, len(flat)), state.alpha))
        taken += len(flat)
        for n, group in zip(flat, (group for group in more if not is_flat(group)), strict=False):
            groups[n] = group
    return groups


def update(
    a: Parts, batch: Batch, fresh: Sequence[FreshMicroBatch], i: int
) -> tuple[list[MicroBatch], list[dict[str, float]]]:
    """i optimizer updates. The first one starts at π_k, and its forward pass gives log π_k to the others."""
    rows, first = a.learner.first_step(fresh, batch.in_objective)
    return rows, [first, *(a.learner.step(rows, batch.in_objective) for _ in range(i - 1))]


def score_rest(a: Parts, clock: Clock, batch: Batch, rows: Sequence[FreshMicroBatch]) -> list[MicroBatch]:
    """The completions that the objective leaves out, with log π_k: a forward pass without gradient, where the run asks
    for it. Where π_k itself sampled them in this process, log α stands for log π_k, up to the rounding that the parity
    check measures."""
    if not a.settings.run.score_lag:
        return []
    learner, version = a.learner, a.learner.policy.version
    with clock("scoring"):
        rest = left_out(batch, rows, a.settings.optimizer.micro_batch_tokens, learner.policy.device)
        completions = [batch.completion(c) for micro in rest for c in micro.members]
        own = a.sampled is not None and all(bool((c.versions[c.sampled] == version).all()) for c in completions)
        known = [micro.logp_alpha_T for micro in rest if micro.logp_alpha_T is not None]
        scores = known if own else learner.score(rest)
        return [micro.scored_by(logp_T) for micro, logp_T in zip(rest, scores, strict=True)]


def score_update(a: Parts, clock: Clock, rows: Sequence[MicroBatch]) -> list[Tensor] | None:
    """log π after the updates, for the two sides of the bounds on them, where the run asks for that."""
    if not (a.settings.run.score_update and lag_is_complete(a.settings, a.learner.recipe)):
        return None
    with clock("scoring"):
        return a.learner.score(rows)
