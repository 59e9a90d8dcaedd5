"""Algorithm 1: what happens, in which order, and what stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sample_rewards
import torch
from running import Section, tiny_settings
from scoring import make_completion, make_group

from lagrpo.rewards.pool import RewardError, RewardPool
from lagrpo.rollout.base import Request, SamplingParams, WeightSyncError
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher, VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.settings.load import load_settings
from lagrpo.settings.schema import Settings
from lagrpo.training.build import TrainerComponents
from lagrpo.training.checks import check_settings
from lagrpo.training.loop import replace_zero_variance, score_batch, train_loop
from lagrpo.training.ranks import Ranks
from lagrpo.training.step import Clock, Step
from lagrpo.training.trainer import Trainer
from lagrpo.types import Group, Prompt


@pytest.fixture
def build_components(model: Path, tmp_path: Path) -> Iterator[Callable[..., TrainerComponents]]:
    """A function of sections of settings. The components' workers end with the test."""
    built: list[TrainerComponents] = []

    def build(**sections: Section) -> TrainerComponents:
        settings = load_settings(tiny_settings(model, tmp_path, **sections))
        components = TrainerComponents.build(settings, check_settings(settings))
        built.append(components)
        return components

    yield build
    for components in built:
        components.close()


Event = tuple[str | int, ...]
"""The name of a call, and the version or the batches that it is about."""


def watch(
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    events: list[Event],
    describe: Callable[..., Event],
) -> None:
    """Adds an event before every call of a method, which then does what it always does."""
    original = getattr(owner, method)

    def watched(self, *arguments, **options):
        events.append(describe(self, *arguments, **options))
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, method, watched)


def test_loop_calls_follow_the_order_of_algorithm_1(build_components, monkeypatch):
    """every(2), i = 2, M = 3, S = 2: k = 2 of each stage syncs weights; what lies between weight
    syncs is generated at once."""
    schedule = {"sync_every": 2, "num_iterations": 2, "batches": 6, "ref_sync_every": 3}
    components = build_components(schedule=schedule, loss={"recipe": "grpo"})
    events: list[Event] = []
    watch(
        monkeypatch,
        LocalSampler,
        "sync_weights",
        events,
        lambda self, weights, version: ("sync_weights", version),
    )
    watch(
        monkeypatch,
        LocalSampler,
        "sample",
        events,
        lambda self, requests, G, params: (
            "generate",
            *sorted({request.batch for request in requests}),
        ),
    )
    watch(
        monkeypatch, Trainer, "step", events, lambda self, *_, **__: ("step", self.policy.version)
    )
    watch(
        monkeypatch,
        Trainer,
        "end_stage",
        events,
        lambda self, *_, **__: ("end", self.policy.version),
    )
    phases: list[str] = []
    steps = list(train_loop(components, LoopState(), phases.append))
    assert events == [
        *[("sync_weights", 0), ("generate", 1), ("step", 0), ("step", 1)],
        *[("sync_weights", 2), ("generate", 2, 3, 4), ("step", 2), ("step", 3)],
        *[("step", 4), ("step", 5), ("end", 6)],
        *[("step", 6), ("step", 7)],
        *[("sync_weights", 8), ("generate", 5, 6), ("step", 8), ("step", 9)],
        *[("step", 10), ("step", 11)],
    ]
    # The reference became the policy at the end of the first stage, after batch 3.
    assert components.trainer.reference is not None
    assert components.trainer.reference.version == 6
    # Stage, batch, version before the batch's updates, version that sampled it.
    assert [(step.stage, step.b, step.version, step.state.alpha) for step in steps] == [
        (1, 1, 0, 0),
        (1, 2, 2, 2),
        (1, 3, 4, 2),
        (2, 4, 6, 2),
        (2, 5, 8, 8),
        (2, 6, 10, 8),
    ]
    assert [bool(step.reason) for step in steps[1:]] == [True, False, False, True, False]
    assert [len(step.updates) for step in steps] == [2] * 6
    assert phases[:3] == ["weight sync", "sampling", "learning"]


def test_sampler_with_stale_weights_stops_the_run(build_components, monkeypatch):
    """It says that it has version 1, and has loaded nothing."""
    components = build_components(schedule={"batches": 3})
    sync_weights = LocalSampler.sync_weights

    def sync_only_at_start(self, weights, version):
        if version == 0:
            sync_weights(self, weights, version)
        else:
            # The version alone is right: only a look at the weights finds the fault.
            self.policy.weights.version = version
        return {}

    monkeypatch.setattr(LocalSampler, "sync_weights", sync_only_at_start)
    steps: list[Step] = []
    with pytest.raises(WeightSyncError, match=r"version 1: the local sampler has stale weights"):
        steps.extend(train_loop(components, LoopState()))
    assert [step.b for step in steps] == [1]


def test_token_of_another_version_stops_the_run(build_components, monkeypatch):
    components = build_components(schedule={"batches": 3})
    complete = LocalSampler._complete

    def complete_with_wrong_version(self, row):
        completion = complete(self, row)
        if row.request.batch == 2:
            return replace(completion, versions=completion.versions - 1)
        return completion

    monkeypatch.setattr(LocalSampler, "_complete", complete_with_wrong_version)
    steps: list[Step] = []
    with pytest.raises(
        VersionError,
        match=r"batch 2, prompt \d: the sampler has other weights: version 0 .* not version 1",
    ):
        steps.extend(train_loop(components, LoopState()))
    assert [step.b for step in steps] == [1]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_wrong_version_at_any_token_is_found(position):
    """The second completion has a token of version 3 among tokens of version 4."""
    versions = torch.full((3,), 4)
    versions[position] = 3
    prefetcher = prefetcher_of(versions)
    prefetcher.submit(range(1, 2), version=4)
    with pytest.raises(VersionError, match="version 3 sampled a token, not version 4"):
        list(prefetcher.get(1))
    with pytest.raises(VersionError, match="version 3 sampled a token, not version 4"):
        list(prefetcher.more([REPLACEMENT], version=4))


def test_versions_that_were_announced_are_accepted():
    """A reply of the environment has no version. Version 5 was synced while tokens were sampled."""
    versions = torch.tensor([4, -1, 5])
    is_sampled = torch.tensor([True, False, True])
    prefetcher = prefetcher_of(versions, is_sampled)
    prefetcher.submit(range(1, 3), version=4)
    prefetcher.on_sync(5)
    assert [len(list(prefetcher.get(batch))) for batch in (1, 2)] == [1, 1]


def test_missing_groups_of_a_resumed_run_are_sampled_by_an_announced_version():
    """The sampler has version 4."""
    prefetcher = prefetcher_of(torch.full((3,), 4))
    prefetcher.restore({}, {1: [3, 4]})
    assert len(list(prefetcher.get(1))) == 1
    with pytest.raises(VersionError, match="version 3"):
        prefetcher.restore({}, {2: [3]})


REPLACEMENT = Request(batch=1, epoch=-1, prompt=Prompt(9, (), None))


def prefetcher_of(versions: torch.Tensor, is_sampled: torch.Tensor | None = None) -> Prefetcher:
    """A prefetcher whose engine returns a completion of version 4, and one of these versions."""
    right = make_completion("7", tokens=3)
    completions = (
        replace(right, versions=torch.full((3,), 4)),
        replace(right, versions=versions, sampled=is_sampled),
    )
    engine: Any = SimpleNamespace(
        syncs_in_flight=True,
        version=4,
        sample=lambda requests, G, params: iter(
            [(request, Group(request.prompt, completions)) for request in requests]
        ),
    )
    prompt = Prompt(0, (), None)
    params = SamplingParams("sample", 1.0, 3)
    return Prefetcher(engine, lambda b: [Request(b, 0, prompt)], 2, params)


def components_with_replacement(reward_pool: RewardPool, *texts: str) -> Any:
    """What `replace_zero_variance` reads. One group of these texts comes in the only round."""
    prompt = Prompt(9, (), None)
    requests = [Request(batch=1, epoch=-1, prompt=prompt)]
    sampled = [replace(make_group(*texts, key=9), epoch=-1)]
    return SimpleNamespace(
        settings=Settings.model_validate({"rollout": {"dynamic_sampling_rounds": 1}}),
        main=SimpleNamespace(
            prompts=SimpleNamespace(extra=lambda b, taken, count: requests),
            reward_pool=reward_pool,
        ),
        prefetcher=SimpleNamespace(seconds=0.0, more=lambda requests, alpha: iter(sampled)),
        share=list,
        ranks=Ranks(),
    )


UNSCORED = ("raise bad",) * 4


def test_replacement_round_without_rewards_does_not_stop_the_run():
    """The first group has equal rewards. Its replacement has none, so the first group stays."""
    batch = [make_group("7", "7", "7", "7", key=0), make_group("7", "8", "8", "8", key=1)]
    with RewardPool(sample_rewards.act, workers=1) as reward_pool:
        groups = list(reward_pool.score(batch))
        components = components_with_replacement(reward_pool, *UNSCORED)
        assert replace_zero_variance(components, LoopState(), Clock(), groups) == groups


def test_batch_stops_the_run_if_replacements_leave_too_few_rewards():
    """4 of 8 completions have a reward, then 2: the replacement of the first group has 2."""
    batch = [make_group("7", "7", "7", "7", key=0), make_group(*UNSCORED, key=1)]
    with RewardPool(sample_rewards.act, workers=1) as reward_pool:
        groups = list(reward_pool.score(batch))
        components = components_with_replacement(reward_pool, "7", "8", "raise bad", "raise bad")
        with pytest.raises(RewardError, match="6 of 8 completions have no reward"):
            replace_zero_variance(components, LoopState(), Clock(), groups)


def test_share_without_a_reward_is_the_one_of_the_whole_batch():
    """This rank's group has no rewards. One of another rank has some, then it has none either."""
    groups_of_other_rank: list[Group] = []
    with RewardPool(sample_rewards.act, workers=1) as reward_pool:
        components: Any = SimpleNamespace(
            main=SimpleNamespace(
                prompts=SimpleNamespace(batch=lambda b: []), reward_pool=reward_pool
            ),
            read_offline=lambda b: [],
            prefetcher=SimpleNamespace(
                seconds=0.0, get=lambda b: iter([make_group(*UNSCORED, key=1)])
            ),
            ranks=SimpleNamespace(
                size=2,
                sync_interrupts=nullcontext,
                join=lambda groups: [*groups, *groups_of_other_rank],
            ),
        )
        groups_of_other_rank[:] = reward_pool.score([make_group("7", "7", "8", "8", key=0)])
        batch = score_batch(components, Clock(), 1)
        assert [len(group.rewards) for group in batch] == [0, 4]
        bad_group = make_group(*UNSCORED, key=0)
        groups_of_other_rank[:] = reward_pool.score([bad_group], max_without_reward=1.0)
        with pytest.raises(RewardError, match="8 of 8 completions have no reward"):
            score_batch(components, Clock(), 1)
