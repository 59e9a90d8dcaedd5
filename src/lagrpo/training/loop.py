"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257). The numbers beside the lines are the paper's.

Every rank runs this loop: it samples its share, and then all hold the same batch. Batches are counted through all
stages: b = (s - 1)·M + k. training/run.py does what surrounds the algorithm.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.rollout.base import Request
from lagrpo.rollout.prefetch import in_order
from lagrpo.rollout.schedule import LoopState
from lagrpo.training.batch import Batch, MicroBatch, assemble, has_zero_variance, left_out
from lagrpo.training.build import TrainerComponents
from lagrpo.training.metrics import by_completion, measure_kl_spent
from lagrpo.types import Group


@dataclass(frozen=True, slots=True)
class Step:
    """A batch that has been used, and where the loop stands after it."""

    stage: int
    b: int
    version: int  # of π_k
    reason: str  # why the sampler's weights were synced just before this batch; "" if they were not
    sampling: Mapping[str, float]  # metrics of the sampler since the batch before
    batch: Batch
    rows: Sequence[MicroBatch]  # this rank's micro-batches of the objective
    updates: Sequence[dict[str, float]]  # the metrics of each of the i updates
    logp_k: Mapping[
        int, Tensor
    ]  # log π_k of the sampled tokens of each scored completion, float32 [t]
    entropy: Mapping[
        int, Tensor
    ]  # of the distributions at these tokens, for completions in the objective
    clock: Clock
    state: LoopState


class Clock:
    """Seconds of a batch by phase (time/… in metrics.py), and in all since `earlier` seconds before it was made.
    `tell` hears what is being done now; `generated` counts the sampled tokens that came meanwhile."""

    def __init__(
        self, tell: Callable[[str], None] = lambda phase: None, earlier: float = 0.0
    ) -> None:
        self.tell, self.generated, self._started = tell, 0, time.perf_counter() - earlier
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    @property
    def total(self) -> float:
        return time.perf_counter() - self._started


def train_loop(
    components: TrainerComponents,
    state: LoopState,
    tell: Callable[[str], None] = lambda phase: None,
) -> Iterator[Step]:
    """Yield every batch after `state`. The first batch syncs the initial policy: the paper leaves α undefined for k <
    v. Raises Interrupted before a batch or while it is sampled."""
    trainer, policy, s = components.trainer, components.trainer.policy, components.settings.schedule
    longest, M = components.settings.rollout.max_completion_length, s.stage_length
    while state.batch < s.batches:  # 5, 6   stage s, k = 1 .. M
        with components.ranks.sync_interrupts():
            raise_if_asked()
        stage, b, clock = (
            state.batch // M + 1,
            state.batch + 1,
            Clock(tell, components.prefetcher.seconds),
        )
        if stage > 1 and state.batch % M == 0:
            trainer.end_stage(s.reset_optimizer)  # 16   π_ref <- π_θ
            state = state.after_stage(policy.version)
        due = components.next_sync(state)
        if reason := "start" if state.alpha < 0 else due.reason:  # 8
            state = state.after_sync(
                policy.version, sync_weights(components, clock)
            )  # 9   α <- π_θ
        state = state.after_request(due.to_generate)
        with components.ranks.sync_interrupts():
            components.prefetcher.submit(
                due.to_generate, state.alpha
            )  # 7, 10   prompts of D_b, y ~ α
        coming = chain(components.read_offline(b), components.prefetcher.get(b))
        groups = score_groups(
            components, clock, components.main.prompts.batch(b), coming
        )  # 11   r(x, y)
        groups = replace_zero_variance(components, state, clock, groups)
        clock.tell("learning")
        version = policy.version
        with clock("learning"):
            batch = assemble(
                groups, trainer.recipe, longest, components.settings.run.seed, b
            )  # 12-13   A_α, weights
            rows = trainer.pack(batch, components.settings.optimizer.micro_batch_tokens)
        rest = compute_left_out(components, clock, batch)
        updates = []
        with clock("learning"):
            for _ in range(s.num_iterations):  # 14
                rows, metrics = trainer.step(rows, batch.in_objective)  # 15   Eq. 7 or 8
                updates.append(metrics)
        found = (
            by_completion(rows, "old_logp_T") | by_completion(rest, "old_logp_T"),
            by_completion(rows, "entropy_T"),
        )
        logp_k, entropy = (dict(components.ranks.join([*own.items()])) for own in found)
        clock.seconds["sampling"], generated = components.prefetcher.pop_metrics()
        clock.generated = sum(components.ranks.gather(generated))
        state = state.after_batch(measure_kl_spent(batch, logp_k))
        yield Step(
            stage=stage,
            b=b,
            version=version,
            reason=reason,
            sampling=components.sampler.pop_metrics(),
            batch=batch,
            rows=rows,
            updates=updates,
            logp_k=logp_k,
            entropy=entropy,
            clock=clock,
            state=state,
        )


def sync_weights(components: TrainerComponents, clock: Clock) -> Mapping[str, float]:
    """α <- π_θ, checked; returns the metrics of the sync and of the weight-sync check."""
    policy = components.trainer.policy
    clock.tell("weight sync")
    with components.ranks.sync_interrupts():
        components.prefetcher.before_sync()
    with clock("sync"):
        cost = components.sampler.sync_weights(policy.weights, policy.version)
        components.prefetcher.on_sync(policy.version)
        return {
            **cost,
            **components.trainer.on_sync(),
            **components.check_weight_sync(policy, components.sampler),
        }


def score_groups(
    components: TrainerComponents,
    clock: Clock,
    requests: Sequence[Request],
    groups: Iterable[Group],
) -> list[Group]:
    """This rank's groups get their outcomes while others are still being sampled. Returns the groups of all ranks, in
    the order of the requests."""
    clock.tell("sampling")
    done, waited = [], components.prefetcher.seconds
    with clock("judging"), components.ranks.sync_interrupts():
        for group in components.main.reward_pool.score(groups):
            done.append(group)
            raise_if_asked()
    clock.seconds["judging"] -= components.prefetcher.seconds - waited
    return in_order(requests, components.ranks.join(done))


def replace_zero_variance(
    components: TrainerComponents, state: LoopState, clock: Clock, groups: list[Group]
) -> list[Group]:
    """DAPO's dynamic sampling, bounded: groups of other prompts replace groups whose rewards are all equal."""
    taken = 0
    for _ in range(components.settings.rollout.dynamic_sampling_rounds):
        flat = [
            n
            for n, group in enumerate(groups)
            if group.source == "sampler" and has_zero_variance(group)
        ]
        if not flat:
            break
        requests = components.main.prompts.extra(state.batch + 1, taken, len(flat))
        more = score_groups(
            components,
            clock,
            requests,
            components.prefetcher.more(components.share(requests), state.alpha),
        )
        taken += len(flat)
        for n, group in zip(
            flat, (group for group in more if not has_zero_variance(group)), strict=False
        ):
            groups[n] = group
    return groups


def compute_left_out(components: TrainerComponents, clock: Clock, batch: Batch) -> list[MicroBatch]:
    """The completions that the objective leaves out, with log π_k: metrics of staleness cover them too. If π_k itself
    sampled all in this process, log α is log π_k up to the rounding that the weight-sync check measures."""
    trainer, version = components.trainer, components.trainer.policy.version
    with clock("scoring"):
        given = (
            components.settings.optimizer.micro_batch_tokens,
            trainer.policy.device,
            trainer.skips_zero_advantage,
        )
        rest = left_out(batch, *given, components.ranks)
        sampled = [c for group in batch.groups for c in group.completions]
        own = components.samples_here and all(
            bool((c.versions[c.sampled] == version).all()) for c in sampled
        )
        known = [micro.rollout_logp_T for micro in rest if micro.rollout_logp_T is not None]
        found = known if own else trainer.compute_logprobs(rest)
        return [micro.with_logprobs(logp_T) for micro, logp_T in zip(rest, found, strict=True)]
