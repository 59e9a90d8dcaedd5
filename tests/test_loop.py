"""Algorithm 1: what happens, in which order, and what stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import sample_rewards
import torch
from running import Section, tiny_settings
from scoring import make_completion, make_group
from tiny import tiny_policy

from lagrpo.data.prompts import PromptSource
from lagrpo.distributed.ranks import Ranks
from lagrpo.rewards.pool import RewardError, RewardPool
from lagrpo.rollout.base import EngineDefaults, SamplingParams, WeightSyncError
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher, VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.settings.load import load_settings
from lagrpo.settings.schema import Settings
from lagrpo.startup.build import BuiltRun, build_run
from lagrpo.startup.checks import check_settings
from lagrpo.tasks import RowTask
from lagrpo.training.loop import train_loop
from lagrpo.training.sampling import Sampling, TaskSetup
from lagrpo.training.step import Clock, Phase, Step, ignore_activity
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, Prompt, Request


@pytest.fixture
def build(model: Path, tmp_path: Path) -> Iterator[Callable[..., BuiltRun]]:
    """A function of sections of settings. The run's workers end with the test."""
    runs: list[BuiltRun] = []

    def build(**sections: Section) -> BuiltRun:
        settings = load_settings(tiny_settings(model, tmp_path, **sections))
        runs.append(build_run(settings, check_settings(settings)))
        return runs[-1]

    yield build
    for run in runs:
        run.close()


def steps_of(run: BuiltRun, announce: Callable[[str], None] = ignore_activity) -> Iterator[Step]:
    """The batches of a run from its beginning."""
    return train_loop(
        run.sampling,
        run.trainer,
        run.settings.schedule,
        LoopState(),
        micro_batch_tokens=4096,
        announce=announce,
    )


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


def test_loop_calls_follow_the_order_of_algorithm_1(build, monkeypatch):
    """every(2), i = 2, M = 3, S = 2: k = 2 of each stage syncs weights; what lies between weight
    syncs is generated at once."""
    schedule = {"sync_every": 2, "num_iterations": 2, "batches": 6, "ref_sync_every": 3}
    run = build(schedule=schedule, loss={"recipe": "grpo"})
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
    steps = list(steps_of(run, phases.append))
    assert events == [
        *[("sync_weights", 0), ("generate", 1), ("step", 0), ("step", 1)],
        *[("sync_weights", 2), ("generate", 2, 3, 4), ("step", 2), ("step", 3)],
        *[("step", 4), ("step", 5), ("end", 6)],
        *[("step", 6), ("step", 7)],
        *[("sync_weights", 8), ("generate", 5, 6), ("step", 8), ("step", 9)],
        *[("step", 10), ("step", 11)],
    ]
    # The reference became the policy at the end of the first stage, after batch 3.
    assert run.trainer.reference is not None
    assert run.trainer.reference.version == 6
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


def test_sampler_with_stale_weights_stops_the_run(build, monkeypatch):
    """It says that it has version 1, and has loaded nothing."""
    run = build(schedule={"batches": 3, "sync_every": 2})
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
        steps.extend(steps_of(run))
    assert [step.b for step in steps] == [1]


def test_token_of_another_version_stops_the_run(build, monkeypatch):
    run = build(schedule={"batches": 3})
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
        steps.extend(steps_of(run))
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


class Scripted(EngineDefaults):
    """An engine of version 4 that answers a request with the next of these groups' completions."""

    version = 4

    def __init__(self, *answers: tuple[Completion, ...]) -> None:
        self.answers = list(answers)

    def sync_weights(self, weights: object, version: int) -> dict[str, float]:
        return {}

    def current_weights(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self.version, {}

    def sample(self, requests, G, params):
        for request in requests:
            yield request, Group(request.prompt, self.answers.pop(0), request.epoch)

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def prefetcher_of(versions: torch.Tensor, is_sampled: torch.Tensor | None = None) -> Prefetcher:
    """A prefetcher whose engine returns a completion of version 4, and one of these versions."""
    right = make_completion("7", tokens=3)
    completions = (
        replace(right, versions=torch.full((3,), 4)),
        replace(right, versions=versions, sampled=is_sampled),
    )
    prompt = Prompt(0, (), None)
    params = SamplingParams("sample", 1.0, 3)
    engine = Scripted(*[completions] * 3)
    return Prefetcher(engine, lambda b: [Request(b, 0, prompt)], 2, params)


class WithOtherRank(Ranks):
    """The first of two ranks. What the other one has scored is in `others`."""

    others: ClassVar[list[Group]] = []

    def gather(self, value):
        return [value, self.others if isinstance(value, list) else None]


@pytest.fixture(scope="module")
def reward_pool() -> Iterator[RewardPool]:
    with RewardPool(sample_rewards.act, workers=1) as pool:
        yield pool


def sampling_of(reward_pool: RewardPool, *texts: Texts, ranks: Ranks | None = None) -> Sampling:
    """α's side with an engine that answers with groups of these texts, which has got batch 1.

    A batch has two prompts. Groups without variance are replaced in one round.
    """
    policy = tiny_policy()
    task = RowTask(
        "7", {"train": [*"abcd"], "test": []}, lambda row: (row, "7"), sample_rewards.act
    )
    sections = {
        "rollout": {"dynamic_sampling_rounds": 1, "num_generations": 4},
        "schedule": {"prompts_per_batch": 2, "batches": 1},
    }
    engine = Scripted(*[tuple(map(make_completion, group)) for group in texts])
    sampling = Sampling(
        Settings.model_validate(sections),
        engine,
        engine,
        engine.weight_check(policy, []),
        TaskSetup(task, PromptSource(task, policy, 0, 2, 64), reward_pool, None),
        None,
        SamplingParams("sample", 1.0, 3),
        ranks or Ranks(),
    )
    sampling.submit(LoopState(alpha=4), range(1, 2))
    return sampling


def texts_of(groups: Sequence[Group]) -> list[Texts]:
    return [tuple(completion.text for completion in group.completions) for group in groups]


Texts = tuple[str, ...]
UNSCORED = ("raise bad",) * 4
EQUAL = ("7",) * 4
USEFUL = ("7", "8", "8", "8")


@pytest.mark.parametrize(
    ("replacement", "batch"),
    [
        pytest.param(("8", "7", "7", "7"), [("8", "7", "7", "7"), USEFUL], id="useful"),
        pytest.param(("8",) * 4, [EQUAL, USEFUL], id="equal, too"),
        pytest.param(UNSCORED, [EQUAL, USEFUL], id="without rewards"),
    ],
)
def test_group_with_equal_rewards_is_replaced_by_one_with_a_signal(reward_pool, replacement, batch):
    sampling = sampling_of(reward_pool, EQUAL, USEFUL, replacement)
    assert texts_of(sampling.take(LoopState(alpha=4))) == batch


def test_batch_stops_the_run_if_replacements_leave_too_few_rewards(reward_pool):
    """4 of 8 completions have a reward, then 2: the replacement of the first group has 2."""
    half = ("7", "8", "raise bad", "raise bad")
    sampling = sampling_of(reward_pool, EQUAL, UNSCORED, half, UNSCORED)
    with pytest.raises(RewardError, match="6 of 8 completions have no reward"):
        sampling.take(LoopState(alpha=4))


def test_share_without_a_reward_is_the_one_of_the_whole_batch(reward_pool, monkeypatch):
    """This rank's group has no rewards. One of another rank has some, then it has none either."""
    for texts, error in [
        (("7", "7", "8", "8"), nullcontext()),
        (UNSCORED, pytest.raises(RewardError, match="8 of 8 completions have no reward")),
    ]:
        others = [make_group(*texts, key=99)]
        scored = list(reward_pool.score(others, max_without_reward=1.0))
        monkeypatch.setattr(WithOtherRank, "others", scored)
        ranks = WithOtherRank(size=2)
        sampling = sampling_of(reward_pool, UNSCORED, ranks=ranks)
        sampling.dynamic_sampling_rounds = 0
        with error:
            groups = sampling.take(LoopState(alpha=4))
            assert sorted(len(group.rewards) for group in groups) == [0, 4]


def test_time_of_a_phase_does_not_count_the_phase_within_it(monkeypatch):
    """Scoring takes 9 seconds, of which it waits 4 for the sampler; 1 second passes before."""
    times = iter([0.0, 1.0, 3.0, 7.0, 10.0, 12.0])
    monkeypatch.setattr("lagrpo.training.step.perf_counter", lambda: next(times))
    clock = Clock()
    with clock.measure(Phase.SCORING), clock.measure(Phase.SAMPLING):
        pass
    batch = clock.stop(generated=30)
    assert batch.seconds == {Phase.SAMPLING: 4.0, Phase.SCORING: 5.0}
    assert batch.total == 12.0


def test_time_between_two_batches_counts_for_the_next_if_a_phase_took_it(monkeypatch):
    """A checkpoint waits 5 seconds for the sampler, and takes 20 more. The batch takes 10."""
    times = iter([0.0, 10.0, 11.0, 16.0, 36.0, 46.0])
    monkeypatch.setattr("lagrpo.training.step.perf_counter", lambda: next(times))
    clock = Clock()
    clock.stop(generated=0)
    with clock.measure(Phase.SAMPLING):
        pass
    clock.start()
    assert clock.stop(generated=0).total == 15.0
