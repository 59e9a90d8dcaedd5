"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257). The numbers in comments are the paper's lines.

Every rank runs this loop. Each rank samples and scores its share of the prompts; then all ranks
hold the same batch. Batches are counted through all stages: b = (s - 1)·M + k. lifecycle.py does
what surrounds the algorithm: evaluations, checkpoints, weights; recording.py writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from torch import Tensor

from lagrpo.interrupts import raise_if_asked
from lagrpo.rollout.base import Request
from lagrpo.rollout.prefetch import in_order
from lagrpo.rollout.schedule import LoopState
from lagrpo.training.batch import Batch, MicroBatch, assemble, has_zero_variance, left_out
from lagrpo.training.build import TrainerComponents
from lagrpo.training.metrics import by_completion, measure_kl_spent
from lagrpo.training.ranks import Ranks
from lagrpo.training.step import Clock, Phase, Step, ignore_activity
from lagrpo.types import Group, SyncReason


def train_loop(
    components: TrainerComponents,
    state: LoopState,
    announce: Callable[[str], None] = ignore_activity,
) -> Iterator[Step]:
    """Yields every batch after `state`.

    The first batch syncs the initial policy, because the paper leaves α undefined for k < v. Raises
    Interrupted before a batch, while it is sampled, or before its first update: the policy is then
    still the one after the last Step.
    """
    trainer = components.trainer
    policy = trainer.policy
    ranks = components.ranks
    schedule = components.settings.schedule
    M = schedule.stage_length

    while state.batch < schedule.batches:  # 5, 6   stage s, k = 1 .. M
        # If a signal has interrupted one rank, all of them stop before the same batch.
        with ranks.sync_interrupts():
            raise_if_asked()
        b = state.batch + 1
        stage = 1 + state.batch // M
        # Tokens of this batch may have been sampled before: the wait for them counts here.
        clock = Clock(announce, earlier_seconds=components.prefetcher.seconds)

        if stage > 1 and state.batch % M == 0:
            trainer.end_stage(reset_optimizer=schedule.reset_optimizer)  # 16   π_ref <- π_θ
            state = state.after_stage(policy.version)

        # rollout/schedule.py decides: sync now, and which batches to submit after the sync.
        decision = components.next_sync(state)
        reason = SyncReason.START if state.alpha < 0 else decision.reason
        if reason:  # 8
            sync_metrics = sync_weights(components, clock)  # 9   α <- π_θ
            state = state.after_sync(policy.version, sync_metrics)

        state = submit_batches(components, state, decision.to_generate)  # 7, 10   D_b, y ~ α
        groups = score_batch(components, clock, b)  # 11   r(x, y)
        groups = replace_zero_variance(components, state, clock, groups)

        version = policy.version
        components.sampler.before_learning()
        clock.announce("learning")
        with clock.measure(Phase.LEARNING):
            batch = assemble_batch(components, groups, b)  # 12-13   A_α, weights
            rows = trainer.pack(batch, _micro_batch_tokens(components))
        rows_left_out = compute_left_out(components, clock, batch)  # while the policy is still π_k
        updates: list[dict[str, float]] = []
        with clock.measure(Phase.LEARNING):
            for _ in range(schedule.num_iterations):  # 14
                rows, metrics = trainer.step(rows, in_objective=batch.in_objective)  # 15   Eq. 7, 8
                updates.append(metrics)

        logp_k = gather_by_completion(ranks, [*rows, *rows_left_out], "old_logp_T")
        entropy = gather_by_completion(ranks, rows, "entropy_T")
        record_sampling(components, clock)
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


# ---- Sampling and rewards ----


def sync_weights(components: TrainerComponents, clock: Clock) -> Mapping[str, float]:
    """α <- π_θ, then the weight-sync check. Returns the metrics of both."""
    policy = components.trainer.policy
    clock.announce("weight sync")
    with components.ranks.sync_interrupts():
        components.prefetcher.before_sync()
    with clock.measure(Phase.SYNC):
        cost = components.sampler.sync_weights(policy.weights, policy.version)
        components.prefetcher.on_sync(policy.version)
        changed = components.trainer.on_sync()
        differences = components.check_weight_sync(policy)
    return {**cost, **changed, **differences}


def submit_batches(components: TrainerComponents, state: LoopState, batches: range) -> LoopState:
    """Submits the prompts of these batches to α. Returns the state that says so."""
    with components.ranks.sync_interrupts():
        components.prefetcher.submit(batches, state.alpha)
    return state.after_request(batches)


def score_batch(components: TrainerComponents, clock: Clock, b: int) -> list[Group]:
    """Returns the scored groups of batch b: the ones from a file, then the sampled ones.

    Raises RewardError if too many completions of the batch have no reward.
    """
    groups = chain(components.read_offline(b), components.prefetcher.get(b))
    requests = components.main.prompts.batch(b)
    # One of several ranks scores only a share of the batch, which says little about the batch.
    max_without_reward = None if components.ranks.size == 1 else 1.0
    scored = score_groups(components, clock, requests, groups, max_without_reward)
    components.main.reward_pool.check_groups(scored)
    return scored


def score_groups(
    components: TrainerComponents,
    clock: Clock,
    requests: Sequence[Request],
    groups: Iterable[Group],
    max_without_reward: float | None = None,
) -> list[Group]:
    """Scores this rank's groups as they are sampled.

    Returns the groups of all ranks, in the order of the requests. `max_without_reward` as for
    `RewardPool.score`.
    """
    clock.announce("sampling")
    scored: list[Group] = []
    waited_before = components.prefetcher.seconds
    with clock.measure(Phase.SCORING), components.ranks.sync_interrupts():
        reward_pool = components.main.reward_pool
        for group in reward_pool.score(groups, max_without_reward=max_without_reward):
            scored.append(group)
            raise_if_asked()
    # The loop above also waits for the sampler, because `groups` is an iterator. That time is
    # sampling, not scoring.
    clock.seconds[Phase.SCORING] -= components.prefetcher.seconds - waited_before
    return in_order(requests, components.ranks.join(scored))


def replace_zero_variance(
    components: TrainerComponents, state: LoopState, clock: Clock, groups: list[Group]
) -> list[Group]:
    """Replaces groups whose rewards are all equal by groups of other prompts, in a few rounds.

    This is DAPO's dynamic sampling with a bound. Groups that are equal after the last round stay.
    Raises RewardError if too many completions of the batch that results have no reward.
    """
    groups = list(groups)
    prompts_used = 0
    for _ in range(components.settings.rollout.dynamic_sampling_rounds):
        indices = [
            index
            for index, group in enumerate(groups)
            if group.source == "sampler" and has_zero_variance(group)
        ]
        if not indices:
            break
        # The sequence of extra prompts continues where the round before ended.
        requests = components.main.prompts.extra(state.batch + 1, prompts_used, len(indices))
        prompts_used += len(indices)
        # Every rank has all requests, and samples its share of them.
        sampled = components.prefetcher.more(components.share(requests), state.alpha)
        # A round may be a single group, which says little about the rewards: the share without a
        # reward is checked below, over the whole batch.
        candidates = score_groups(components, clock, requests, sampled, max_without_reward=1.0)
        useful = [group for group in candidates if not has_zero_variance(group)]
        for index, group in zip(indices, useful, strict=False):  # useful ones may be fewer
            groups[index] = group
    if prompts_used > 0:
        components.main.reward_pool.check_groups(groups)
    return groups


# ---- Learning ----


def assemble_batch(components: TrainerComponents, groups: Sequence[Group], b: int) -> Batch:
    """Returns the batch of these groups, with advantages and weights."""
    settings = components.settings
    return assemble(
        groups,
        components.trainer.recipe,
        max_tokens=settings.rollout.max_completion_length,
        seed=settings.run.seed,
        b=b,
    )


def compute_left_out(components: TrainerComponents, clock: Clock, batch: Batch) -> list[MicroBatch]:
    """Returns the completions that updates leave out, with log π_k.

    Metrics of staleness cover them too. Collective: all ranks hold the same batch, so all of them
    take the same branch.
    """
    trainer = components.trainer
    with clock.measure(Phase.LOGPROBS):
        rows = left_out(
            batch,
            tokens=_micro_batch_tokens(components),
            device=trainer.policy.device,
            skip_zero_advantage=trainer.skips_zero_advantage,
            ranks=components.ranks,
        )
        if is_on_policy(components, batch):
            # log α is log π_k up to the rounding that the weight-sync check measures: no forward
            # pass is needed. `left_out` gives only completions whose log α is known.
            logprobs = [row.rollout_logp_T for row in rows if row.rollout_logp_T is not None]
        else:
            logprobs = trainer.compute_logprobs(rows)
        return [row.with_logprobs(logp_T) for row, logp_T in zip(rows, logprobs, strict=True)]


def _micro_batch_tokens(components: TrainerComponents) -> int:
    on_gpu = components.trainer.policy.device.type == "cuda"
    return components.settings.optimizer.tokens_in_micro_batch(on_gpu=on_gpu)


def is_on_policy(components: TrainerComponents, batch: Batch) -> bool:
    """True if π_k itself sampled every token of the batch, in this process."""
    if not components.sampler.computes_as_trainer:
        return False
    version = components.trainer.policy.version
    completions = [completion for group in batch.groups for completion in group.completions]
    return all(bool((c.versions[c.sampled] == version).all()) for c in completions)


# ---- Metrics ----


def gather_by_completion(ranks: Ranks, rows: Sequence[MicroBatch], name: str) -> dict[int, Tensor]:
    """Returns a quantity of the tokens of each completion, from the rows of all ranks.

    Keys are indices in C, values float32 [t] on the host. Collective.
    """
    own_rows = by_completion(rows, name)
    return dict(ranks.join(list(own_rows.items())))


def record_sampling(components: TrainerComponents, clock: Clock) -> None:
    """Adds the wait for the sampler, and the tokens of all ranks that came, to the clock."""
    seconds, tokens = components.prefetcher.pop_metrics()
    clock.seconds[Phase.SAMPLING] = seconds
    clock.generated = sum(components.ranks.gather(tokens))
