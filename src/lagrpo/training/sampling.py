"""α's side of Algorithm 1: what samples completions, and what scores them.

The other side, π, is the trainer. The loop calls `decide`, `sync`, `submit` and `take`; checkpoints
and evaluations use the other methods. Seconds are booked on `clock`, wherever they are spent.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain

from torch import Tensor

from lagrpo.data.offline import OfflineData
from lagrpo.data.prompts import PromptSource
from lagrpo.distributed.ranks import Ranks
from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy, count_differing, sample_weights
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import RolloutEngine, SamplingParams, WeightCheck
from lagrpo.rollout.prefetch import Prefetcher, in_order
from lagrpo.rollout.schedule import LoopState, Schedule, SyncDecision
from lagrpo.settings.schema import Settings
from lagrpo.tasks import Task
from lagrpo.tasks.episodes import Episodes
from lagrpo.training.batch import has_zero_variance
from lagrpo.training.step import Clock, Phase
from lagrpo.types import Group, Request, SyncReason


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """A task as a run uses it: with its prompts, reward workers and environments."""

    task: Task
    prompts: PromptSource
    reward_pool: RewardPool
    episodes: Episodes | None


class Sampling:
    """The engine of a run and what belongs to it, on this rank.

    `main` is the task that the run trains on, `offline` has completions of files. `evaluator`
    samples evaluations; it is the engine itself if that `evaluates`.
    """

    def __init__(
        self,
        settings: Settings,
        engine: RolloutEngine,
        evaluator: RolloutEngine,
        weight_check: WeightCheck,
        main: TaskSetup,
        offline: OfflineData | None,
        params: SamplingParams,
        ranks: Ranks,
    ) -> None:
        self.engine = engine
        self.evaluator = evaluator
        self.weight_check = weight_check
        self.prompts = main.prompts
        self.reward_pool = main.reward_pool
        self.offline = offline
        self.offline_prompts = settings.offline_prompts
        self.smallest_reward = settings.task.reward_range[0]
        self.params = params
        self.ranks = ranks
        self.batches = settings.schedule.batches
        self.stage_length = settings.schedule.stage_length
        self.G = settings.rollout.num_generations
        self.dynamic_sampling_rounds = settings.rollout.dynamic_sampling_rounds
        schedule = settings.schedule
        self.schedule = Schedule(schedule.kind, schedule.v, schedule.sync_at_kl)
        self.continues_completions = schedule.continues_completions
        self.clock = Clock()
        wait = partial(self.clock.measure, Phase.SAMPLING)
        self.prefetcher = Prefetcher(
            engine,
            self.requests,
            self.G,
            params,
            wait,
            continues_completions=self.continues_completions,
        )
        self.synced: list[Tensor] = []  # a sample of the weights of the last weight sync

    def requests(self, b: int) -> list[Request]:
        """Returns the requests of batch b that this rank samples and scores."""
        return share(self.engine, self.ranks, self.prompts.batch(b))

    # Before a batch

    def decide(self, state: LoopState, extra_batches: int = 0) -> SyncDecision:
        """Returns the decision of the schedule for the batch after `state`.

        The first batch syncs the initial policy, because the paper leaves α undefined for k < v.
        The run has `extra_batches` more than schedule.batches.
        """
        # With dynamic sampling `every(v)` submits batches one by one.
        prefetch = not self.dynamic_sampling_rounds
        total = self.batches + extra_batches
        decision = self.schedule.next(state, total, self.stage_length, prefetch=prefetch)
        if state.alpha < 0:
            return SyncDecision(decision.batch, SyncReason.START, decision.to_generate)
        return decision

    def sync(self, policy: Policy) -> Mapping[str, float]:
        """α <- π_θ, then the weight check. Returns the metrics of both. Collective."""
        with self.ranks.sync_interrupts():
            self.prefetcher.before_sync()
        with self.clock.measure(Phase.SYNC):
            cost = self.engine.sync_weights(policy.weights, policy.version)
            self.prefetcher.on_sync(policy.version)
            changed = self._compare_with_last_sync(policy)
            differences = self.weight_check(policy)
        return {**cost, **changed, **differences}

    def _compare_with_last_sync(self, policy: Policy) -> dict[str, float]:
        """Returns `changed_fraction`: the share of weights whose bits changed since the last sync.

        Returns nothing at the first weight sync. A sample of about a million weights estimates the
        share.
        """
        last = self.synced
        self.synced = sample_weights(policy.weights)
        if not last:
            return {}
        changed = sum(
            count_differing(new, old.to(new.device))
            for new, old in zip(self.synced, last, strict=True)
        )
        return {"changed_fraction": int(changed) / sum(map(len, last))}

    def submit(self, state: LoopState, batches: range) -> LoopState:
        """Submits the prompts of these batches to α. Returns the state that says so. Collective."""
        with self.ranks.sync_interrupts():
            self.prefetcher.submit(batches, state.alpha)
        return state.after_request(batches)

    # A batch

    def take(self, state: LoopState) -> list[Group]:
        """Returns the scored groups of the batch after `state`: the ones of a file come first.

        Groups whose rewards are all equal are replaced, if the settings say so. Collective. Raises
        Interrupted, RewardError if too many completions of the batch have no reward, and
        SettingsError for a best completion that loss.reference_prompt cannot render.
        """
        b = state.batch + 1
        file_groups: Sequence[Group] = ()
        if self.offline is not None and self.ranks.is_first:
            file_groups = self.offline.batch(b, self.offline_prompts)
        groups = chain(file_groups, self.prefetcher.get(b))
        # One of several ranks scores only a share of the batch, which says little about the batch.
        max_without_reward = None if self.ranks.size == 1 else 1.0
        scored = self._score(self.prompts.batch(b), groups, max_without_reward)
        self.reward_pool.check_groups(scored)
        scored = self._replace_zero_variance(state, scored)
        self.prefetcher.keep(b)
        self.engine.before_learning()
        return self.prompts.show_best(scored, self.smallest_reward, self.params.longest)

    def _score(
        self,
        requests: Sequence[Request],
        groups: Iterable[Group],
        max_without_reward: float | None = None,
    ) -> list[Group]:
        """Scores this rank's groups as they are sampled.

        Returns the groups of all ranks, in the order of the requests. `max_without_reward` as for
        `RewardPool.score`.
        """
        scored: list[Group] = []
        with self.clock.measure(Phase.SCORING), self.ranks.sync_interrupts():
            for group in self.reward_pool.score(groups, max_without_reward=max_without_reward):
                scored.append(group)
                raise_if_asked()
        return in_order(requests, self.ranks.join(scored))

    def _replace_zero_variance(self, state: LoopState, groups: list[Group]) -> list[Group]:
        """Replaces groups whose rewards are all equal by groups of other prompts, in a few rounds.

        This is DAPO's dynamic sampling with a bound. Groups that are equal after the last round
        stay.
        """
        groups = list(groups)
        prompts_used = 0
        for _ in range(self.dynamic_sampling_rounds):
            indices = [
                index
                for index, group in enumerate(groups)
                if group.source == "sampler" and has_zero_variance(group)
            ]
            if not indices:
                break
            # The sequence of extra prompts continues where the round before ended.
            requests = self.prompts.extra(state.batch + 1, prompts_used, len(indices))
            prompts_used += len(indices)
            # Every rank has all requests, and samples its share of them.
            own_requests = share(self.engine, self.ranks, requests)
            sampled = self.prefetcher.more(own_requests, state.alpha)
            # A round may be a single group, which says little about the rewards: the share without
            # a reward is checked below, over the whole batch.
            candidates = self._score(requests, sampled, max_without_reward=1.0)
            useful = [group for group in candidates if not has_zero_variance(group)]
            for index, group in zip(indices, useful, strict=False):  # useful ones may be fewer
                groups[index] = group
        if prompts_used > 0:
            self.reward_pool.check_groups(groups)
        return groups

    # Checkpoints and evaluations

    def finish(self) -> None:
        """Completes what was submitted if the engine may round by what is sampled together.

        It would do so before the next weight sync anyway, with the same rows side by side, so a
        resumed run samples the same tokens. If completions go on after weight syncs, the
        checkpoint has what is in flight instead. Collective.
        """
        if self.engine.computes_as_trainer and not self.continues_completions:
            with self.ranks.sync_interrupts():
                self.prefetcher.finish()

    def needs_weights(self, state: LoopState) -> bool:
        """True if the engine will sample from its present weights once more. Collective."""
        if self.continues_completions:
            return False  # weights are synced before the next token
        # As if the run went on after its last batch: it may be resumed with more batches.
        decision = self.decide(state, extra_batches=self.stage_length)
        is_missing_here = self.prefetcher.has_missing(state.prefetched_batches)
        is_missing = any(self.ranks.gather(is_missing_here))
        if state.alpha < 0:  # no weights have been synced yet
            return False
        samples_before_next_sync = not decision.reason and len(decision.to_generate) > 0
        return is_missing or samples_before_next_sync

    @contextmanager
    def evaluating(self, policy: Policy, state: LoopState) -> Generator[RolloutEngine]:
        """Returns the engine that samples from π while the body runs. Collective.

        An engine that evaluates has α. It gets π, checked as after any weight sync, and then gets α
        back if α is to sample more.
        """
        if not self.engine.evaluates:
            # If layers are sharded, it samples from a whole copy of the policy.
            if self.evaluator.version != policy.version:
                self.evaluator.sync_weights(policy.weights, policy.version)
            yield self.evaluator
            return
        with self.ranks.sync_interrupts():
            self.prefetcher.finish()
        restore_afterwards = self.needs_weights(state)
        with self.engine.temporary_weights(
            policy.weights, policy.version, restore_afterwards=restore_afterwards
        ):
            # The check remembers the weights that it saw. A copy of it does so here, so that the
            # next weight sync is compared with the last one.
            check_weights = copy(self.weight_check)
            check_weights(policy)
            yield self.engine


def share(engine: RolloutEngine, ranks: Ranks, requests: Sequence[Request]) -> list[Request]:
    """Returns the requests that this rank's engine samples."""
    if engine.samples_on_every_rank:
        return ranks.share(requests)
    return list(requests) if ranks.is_first else []
