"""Algorithm 1: what happens, in which order, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from running import tiny_settings

from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.sync_check import WeightSyncError
from lagrpo.settings.load import load_settings
from lagrpo.training.build import TrainerComponents
from lagrpo.training.checks import check_settings
from lagrpo.training.loop import train_loop
from lagrpo.training.step import Step
from lagrpo.training.trainer import Trainer


@pytest.fixture
def algorithm(model, tmp_path):
    """Makes the parts of some settings; ends their workers."""
    made: list[TrainerComponents] = []

    def of(**sections: dict[str, Any]) -> TrainerComponents:
        settings = load_settings(tiny_settings(model, tmp_path, **sections))
        made.append(TrainerComponents.build(settings, check_settings(settings)))
        return made[-1]

    yield of
    for parts in made:
        parts.close()


def watch(monkeypatch, owner: type, name: str, events: list, note: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def watched(self, *arguments, **more):
        events.append(note(self, *arguments, **more))
        return original(self, *arguments, **more)

    monkeypatch.setattr(owner, name, watched)


def test_loop_calls_follow_the_order_of_algorithm_1(algorithm, monkeypatch):
    """every(2), i = 2, M = 3, S = 2: k = 2 of each stage syncs weights; what lies between weight
    syncs is generated at once."""
    schedule = {"sync_every": 2, "num_iterations": 2, "batches": 6, "ref_sync_every": 3}
    a = algorithm(schedule=schedule, loss={"recipe": "grpo"})
    events: list[tuple[Any, ...]] = []
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
        lambda self, rs, G: ("generate", *sorted({r.batch for r in rs})),
    )
    watch(
        monkeypatch,
        Trainer,
        "step",
        events,
        lambda self, *rest, **more: ("step", self.policy.version),
    )
    watch(
        monkeypatch,
        Trainer,
        "end_stage",
        events,
        lambda self, *rest, **more: ("end", self.policy.version),
    )
    phases: list[str] = []
    steps = list(train_loop(a, LoopState(), phases.append))
    assert events == [
        *[("sync_weights", 0), ("generate", 1), ("step", 0), ("step", 1)],
        *[("sync_weights", 2), ("generate", 2, 3, 4), ("step", 2), ("step", 3)],
        *[("step", 4), ("step", 5), ("end", 6)],
        *[("step", 6), ("step", 7)],
        *[("sync_weights", 8), ("generate", 5, 6), ("step", 8), ("step", 9)],
        *[("step", 10), ("step", 11)],
    ]
    assert a.trainer.reference is not None
    assert a.trainer.reference.version == 6
    assert [(u.stage, u.b, u.version, u.state.alpha) for u in steps] == [
        (1, 1, 0, 0),
        (1, 2, 2, 2),
        (1, 3, 4, 2),
        (2, 4, 6, 2),
        (2, 5, 8, 8),
        (2, 6, 10, 8),
    ]
    assert [bool(u.reason) for u in steps[1:]] == [True, False, False, True, False]
    assert [len(u.updates) for u in steps] == [2] * 6
    assert phases[:3] == ["weight sync", "sampling", "learning"]


def test_sampler_with_stale_weights_stops_the_run(algorithm, monkeypatch):
    a = algorithm(schedule={"batches": 3})
    original = LocalSampler.sync_weights

    def stale(self, weights, version):
        original(self, weights, version) if version == 0 else setattr(
            self.policy.weights, "version", version
        )
        return {}

    monkeypatch.setattr(LocalSampler, "sync_weights", stale)
    steps: list[Step] = []
    with pytest.raises(WeightSyncError, match=r"version 1: the local sampler has stale weights"):
        steps.extend(train_loop(a, LoopState()))
    assert [u.b for u in steps] == [1]


def test_token_of_another_version_stops_the_run(algorithm, monkeypatch):
    a = algorithm(schedule={"batches": 3})
    original = LocalSampler._complete

    def mislabeled(self, row):
        completion = original(self, row)
        late = row.request.batch == 2
        return replace(completion, versions=completion.versions - 1) if late else completion

    monkeypatch.setattr(LocalSampler, "_complete", mislabeled)
    steps: list[Step] = []
    with pytest.raises(
        VersionError,
        match=r"batch 2, prompt \d: the sampler has other weights: version 0 .* not version 1",
    ):
        steps.extend(train_loop(a, LoopState()))
    assert [u.b for u in steps] == [1]
