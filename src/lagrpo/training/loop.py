"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257). The numbers in comments are the paper's lines.

`Sampling` is α's side, `Trainer` is π's. Every rank runs this loop. Each rank samples and scores
its share of the prompts; then all ranks hold the same batch. Batches are counted through all
stages: b = (s - 1)·M + k. lifecycle.py does what surrounds the algorithm: evaluations, checkpoints,
weights; recording.py writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lagrpo.distributed.ranks import add_up
from lagrpo.interrupts import raise_if_asked
from lagrpo.rollout.base import RolloutEngine
from lagrpo.rollout.schedule import LoopState
from lagrpo.settings.sections import ScheduleSettings
from lagrpo.training.batch import Batch, MicroBatch, assemble, left_out
from lagrpo.training.sampling import Sampling
from lagrpo.training.step import Phase, Step, ignore_activity, record_completions
from lagrpo.training.trainer import Trainer


def train_loop(
    sampling: Sampling,
    trainer: Trainer,
    schedule: ScheduleSettings,
    state: LoopState,
    *,
    micro_batch_tokens: int,
    announce: Callable[[str], None] = ignore_activity,
) -> Iterator[Step]:
    """Yields every batch after `state`. `announce` hears what is being done.

    Raises Interrupted before a batch, while it is sampled, or before its first update: the policy
    is then still the one after the last Step.
    """
    policy = trainer.policy
    ranks = trainer.ranks
    clock = sampling.clock
    M = schedule.stage_length

    while state.batch < schedule.batches:  # 5, 6   stage s, k = 1 .. M
        # If a signal has interrupted one rank, all of them stop before the same batch.
        with ranks.sync_interrupts():
            raise_if_asked()
        clock.start()
        b = state.batch + 1
        stage = 1 + state.batch // M

        if stage > 1 and state.batch % M == 0:
            trainer.end_stage(reset_optimizer=schedule.reset_optimizer)  # 16   π_ref <- π_θ
            state = state.after_stage(policy.version)

        decision = sampling.decide(state)
        if decision.reason:  # 8   k mod v = 0
            announce("weight sync")
            state = state.after_sync(policy.version, sampling.sync(policy))  # 9   α <- π_θ
        announce("sampling")
        state = sampling.submit(state, decision.to_generate)  # 7, 10   D_b, y ~ α
        groups = sampling.take(state)  # 11   r(x, y)

        announce("learning")
        version = policy.version
        updates: list[dict[str, float]] = []
        with clock.measure(Phase.LEARNING):
            max_tokens = sampling.params.max_tokens
            seed = trainer.optimization.seed
            batch = assemble(groups, trainer.recipe, max_tokens, seed, b)  # 12, 13   A_α, weights
            rows = trainer.pack(batch, micro_batch_tokens)
            with clock.measure(Phase.LOGPROBS):  # while the policy is still π_k
                others = compute_left_out(trainer, sampling.engine, batch, micro_batch_tokens)
            for _ in range(schedule.num_iterations):  # 14
                rows, metrics = trainer.step(rows, in_objective=batch.in_objective)  # 15   Eq. 7, 8
                updates.append(metrics)

        records = record_completions(batch, [*rows, *others], ranks)
        generated = sum(ranks.gather(sampling.prefetcher.pop_tokens()))
        state = state.after_batch(records.mean_kl())
        yield Step(
            stage=stage,
            b=b,
            version=version,
            reason=decision.reason,
            sampling=add_up(ranks.gather(sampling.engine.pop_metrics())),
            batch=batch,
            rows=rows,
            updates=updates,
            records=records,
            times=clock.stop(generated),
            state=state,
        )


def compute_left_out(
    trainer: Trainer, engine: RolloutEngine, batch: Batch, tokens: int
) -> list[MicroBatch]:
    """Returns the completions that updates leave out, with log π_k, at most `tokens` a row.

    Metrics of staleness cover them too. Collective: all ranks hold the same batch, so all of them
    take the same branch.
    """
    rows = left_out(
        batch,
        tokens=tokens,
        device=trainer.policy.device,
        skip_zero_advantage=trainer.skips_zero_advantage,
        ranks=trainer.ranks,
    )
    if engine.computes_as_trainer and is_on_policy(batch, trainer.policy.version):
        # log α is log π_k up to the rounding that the weight check measures: no forward pass is
        # needed. `left_out` gives only completions whose log α is known.
        logprobs = [row.rollout_logp_T for row in rows if row.rollout_logp_T is not None]
    else:
        logprobs = trainer.compute_logprobs(rows)
    return [row.with_logprobs(logp_T) for row, logp_T in zip(rows, logprobs, strict=True)]


def is_on_policy(batch: Batch, version: int) -> bool:
    """True if π_version sampled every token of the batch."""
    completions = [completion for group in batch.groups for completion in group.completions]
    return all(bool((c.versions[c.sampled] == version).all()) for c in completions)
