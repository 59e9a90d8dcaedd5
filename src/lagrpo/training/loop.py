"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257). The numbers beside the lines are the paper's.

Every rank runs this loop: it samples its share, and then all hold the same batch. Batches are counted through all
stages: b = (s - 1)·M + k. training/run.py does what surrounds the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from lagrpo.interrupts import raise_if_asked
from lagrpo.rollout.base import Request
from lagrpo.rollout.prefetch import in_order
from lagrpo.rollout.schedule import LoopState
from lagrpo.training.batch import Batch, MicroBatch, assemble, has_zero_variance, left_out
from lagrpo.training.build import TrainerComponents
from lagrpo.training.metrics import by_completion, measure_kl_spent
from lagrpo.training.step import Clock, Step, ignore_activity
from lagrpo.types import Group


def train_loop(
    components: TrainerComponents,
    state: LoopState,
    announce: Callable[[str], None] = ignore_activity,
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
            Clock(announce, components.prefetcher.seconds),
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
        clock.announce("learning")
        version = policy.version
        with clock.measure("learning"):
            batch = assemble(
                groups, trainer.recipe, longest, components.settings.run.seed, b
            )  # 12-13   A_α, weights
            rows = trainer.pack(batch, components.settings.optimizer.micro_batch_tokens)
        rest = compute_left_out(components, clock, batch)
        updates = []
        with clock.measure("learning"):
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
    clock.announce("weight sync")
    with components.ranks.sync_interrupts():
        components.prefetcher.before_sync()
    with clock.measure("sync"):
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
    clock.announce("sampling")
    done, waited = [], components.prefetcher.seconds
    with clock.measure("judging"), components.ranks.sync_interrupts():
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
    with clock.measure("scoring"):
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
