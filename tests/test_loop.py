"""Algorithm 1: what happens, in which order, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from running import tiny_settings
from tiny import save_tiny

from lagrpo.policy.learner import Learner
from lagrpo.sampling.local import LocalSampler
from lagrpo.sampling.parity import ParityError
from lagrpo.sampling.prefetch import VersionError
from lagrpo.settings.toml import load_settings
from lagrpo.training.build import Parts
from lagrpo.training.checks import check_settings
from lagrpo.training.loop import Algorithm, Used, iterative_grpo
from lagrpo.training.run import Training


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


class Log:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.used: list[Used] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def batch(self, used: Used) -> None:
        self.used.append(used)


@pytest.fixture
def algorithm(model, tmp_path):
    """Makes the algorithm of some settings with a log as its listener; ends its workers."""
    trainings: list[Training] = []

    def of(**sections: dict[str, Any]) -> Algorithm:
        settings = load_settings(tiny_settings(model, tmp_path, **sections))
        training = Training(settings, Parts.build(settings, check_settings(settings)))
        trainings.append(training)
        return replace(training.algorithm(), listener=Log())

    yield of
    for training in trainings:
        training.verifier.close()


def log(a: Algorithm) -> Log:
    assert isinstance(a.listener, Log)
    return a.listener


def watch(monkeypatch, owner: type, name: str, events: list, note: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def watched(self, *arguments, **more):
        events.append(note(self, *arguments, **more))
        return original(self, *arguments, **more)

    monkeypatch.setattr(owner, name, watched)


def test_the_lines_of_the_algorithm_in_their_order(algorithm, monkeypatch):
    """every(2), i = 2, M = 3, S = 2: k = 2 of each stage syncs weights; what lies between weight syncs is generated at
    once."""
    a = algorithm(schedule={"v": 2, "i": 2, "batches": 3, "stages": 2}, objective={"recipe": "grpo"})
    events: list[tuple[Any, ...]] = []
    watch(monkeypatch, LocalSampler, "sync_weights", events, lambda self, weights, version: ("sync_weights", version))
    watch(monkeypatch, LocalSampler, "sample", events, lambda self, rs, G: ("generate", *sorted({r.batch for r in rs})))
    watch(monkeypatch, Learner, "step", events, lambda self, *rest: ("step", self.policy.version))
    watch(monkeypatch, Learner, "end_stage", events, lambda self, *rest: ("end", self.policy.version))
    iterative_grpo(a)
    assert events == [
        *[("sync_weights", 0), ("generate", 1), ("step", 0), ("step", 1)],
        *[("sync_weights", 2), ("generate", 2, 3, 4), ("step", 2), ("step", 3)],
        *[("step", 4), ("step", 5), ("end", 6)],
        *[("step", 6), ("step", 7)],
        *[("sync_weights", 8), ("generate", 5, 6), ("step", 8), ("step", 9)],
        *[("step", 10), ("step", 11), ("end", 12)],
    ]
    assert a.learner.reference is not None
    assert a.learner.reference.version == 12
    assert [(u.stage, u.b, u.version, u.alpha) for u in log(a).used] == [
        (1, 1, 0, 0),
        (1, 2, 2, 2),
        (1, 3, 4, 2),
        (2, 4, 6, 2),
        (2, 5, 8, 8),
        (2, 6, 10, 8),
    ]
    assert [bool(u.reason) for u in log(a).used[1:]] == [True, False, False, True, False]
    assert [len(u.updates) for u in log(a).used] == [2] * 6
    assert log(a).phases[:3] == ["sync", "sampling", "learning"]


def test_what_the_listener_gets_adds_up(algorithm):
    a = algorithm(schedule={"batches": 2})
    iterative_grpo(a)
    for used in log(a).used:
        assert len(used.batch.groups) == 2
        assert all(c.outcome is not None for g in used.batch.groups for c in g.completions)
        spent = used.clock.seconds
        assert min(spent[phase] for phase in ("sampling", "judging", "learning")) >= 0
        assert sum(spent.values()) <= used.clock.total


def test_a_sampler_that_serves_stale_weights_stops_the_run(algorithm, monkeypatch):
    a = algorithm(schedule={"batches": 3})
    original = LocalSampler.sync_weights

    def stale(self, weights, version):
        original(self, weights, version) if version == 0 else setattr(self.policy, "version", version)
        return {}

    monkeypatch.setattr(LocalSampler, "sync_weights", stale)
    with pytest.raises(ParityError, match=r"version 1 on the in-process sampler: .* serves other weights"):
        iterative_grpo(a)
    assert [u.b for u in log(a).used] == [1]


def test_a_token_of_another_version_stops_the_run(algorithm, monkeypatch):
    a = algorithm(schedule={"batches": 3})
    original = LocalSampler._close

    def mislabeled(self, row):
        group = original(self, row)
        if row.group.request.batch == 2:
            group.done[row.index] = replace(group.done[row.index], versions=group.done[row.index].versions - 1)
        return group

    monkeypatch.setattr(LocalSampler, "_close", mislabeled)
    with pytest.raises(
        VersionError, match=r"batch 2, prompt \d: a token was sampled by version 0, but the .* version 1"
    ):
        iterative_grpo(a)
    assert [u.b for u in log(a).used] == [1]
