"""Algorithm 1: what happens, in which order, and what stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import tiny_settings
from tiny import save_tiny

from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher, VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.sync_check import WeightSyncError
from lagrpo.settings.toml import load_settings
from lagrpo.training.build import TrainerComponents
from lagrpo.training.checks import check_settings
from lagrpo.training.loop import Step, train_loop
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, Outcome

pytestmark = pytest.mark.usefixtures("shared_templates")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


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


def test_the_lines_of_the_algorithm_in_their_order(algorithm, monkeypatch):
    """every(2), i = 2, M = 3, S = 2: k = 2 of each stage syncs weights; what lies between weight syncs is generated at
    once."""
    a = algorithm(schedule={"sync_every": 2, "num_iterations": 2, "batches": 3, "stages": 2}, loss={"recipe": "grpo"})
    events: list[tuple[Any, ...]] = []
    watch(monkeypatch, LocalSampler, "sync_weights", events, lambda self, weights, version: ("sync_weights", version))
    watch(monkeypatch, LocalSampler, "sample", events, lambda self, rs, G: ("generate", *sorted({r.batch for r in rs})))
    watch(monkeypatch, Trainer, "step", events, lambda self, *rest: ("step", self.policy.version))
    watch(monkeypatch, Trainer, "end_stage", events, lambda self, *rest: ("end", self.policy.version))
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
    assert [(u.stage, u.b, u.version, u.alpha) for u in steps] == [
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


def test_what_a_step_says_adds_up(algorithm):
    a = algorithm(schedule={"batches": 2})
    for used in train_loop(a, LoopState()):
        assert len(used.batch.groups) == 2
        assert all(c.outcome is not None for g in used.batch.groups for c in g.completions)
        spent = used.clock.seconds
        assert min(spent[phase] for phase in ("sampling", "judging", "learning")) >= 0
        assert sum(spent.values()) <= used.clock.total


def test_a_sampler_that_serves_stale_weights_stops_the_run(algorithm, monkeypatch):
    a = algorithm(schedule={"batches": 3})
    original = LocalSampler.sync_weights

    def stale(self, weights, version):
        original(self, weights, version) if version == 0 else setattr(self.policy.weights, "version", version)
        return {}

    monkeypatch.setattr(LocalSampler, "sync_weights", stale)
    steps: list[Step] = []
    with pytest.raises(WeightSyncError, match=r"version 1 on the in-process sampler: .* serves other weights"):
        steps.extend(train_loop(a, LoopState()))
    assert [u.b for u in steps] == [1]


def test_a_token_of_another_version_stops_the_run(algorithm, monkeypatch):
    a = algorithm(schedule={"batches": 3})
    original = LocalSampler._complete

    def mislabeled(self, row):
        completion = original(self, row)
        late = row.request.batch == 2
        return replace(completion, versions=completion.versions - 1) if late else completion

    monkeypatch.setattr(LocalSampler, "_complete", mislabeled)
    steps: list[Step] = []
    with pytest.raises(
        VersionError, match=r"batch 2, prompt \d: a token was sampled by version 0, but the .* version 1"
    ):
        steps.extend(train_loop(a, LoopState()))
    assert [u.b for u in steps] == [1]


# Stopped and continued


class FakeSampler:
    """Completions of two tokens by arithmetic, stamped with the version that was synced last. `calls` are the requests
    and syncs that it got."""

    spans = False

    def __init__(self) -> None:
        self.version, self.calls = -1, []

    def current_weights(self):
        return self.version, {}

    def sync_weights(self, weights, version):
        self.version = version
        self.calls.append(("sync", version))
        return {}

    def sample(self, requests, G):
        self.calls.append(("sample", self.version, *((r.batch, r.epoch, r.prompt.key) for r in requests)))
        version = self.version

        def completion(n: int) -> Completion:
            ids = torch.tensor([5 + n, 7])
            return Completion(ids, torch.tensor([-1.0, -2.0 - n]), torch.full((2,), version), True, "x" * n)

        return iter([(r, Group(r.prompt, tuple(map(completion, range(G))), r.epoch)) for r in requests])

    def score(self, prompt_ids, token_ids):
        raise AssertionError("no weight-sync check was asked for")

    def free_cache(self): ...
    def close(self): ...
    def pop_metrics(self):
        return {}


SCHEDULES: list[dict[str, Any]] = [
    {"kind": "every", "sync_every": 2, "stages": 3, "batches": 3},
    {"kind": "lagged", "sync_every": 2},
    {"kind": "budget", "sync_every": 3, "delta": 1.0},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: "-".join(map(str, s.values())))
def test_a_run_stopped_after_any_batch_goes_on_from_its_state(algorithm, monkeypatch, schedule):
    """With the same parts: the same requests, the same weight syncs and the same states, wherever it is stopped."""
    a = algorithm(
        schedule={"batches": 9} | schedule, rollout={"parity_check": False}, loss={"recipe": "grpo", "beta": 0.1}
    )
    spent = [0.5, 2.0, 0.1, 0.2, 0.3, 1.5, -1.0, 3.0, 0.0]
    monkeypatch.setattr("lagrpo.training.loop.measure_spending", lambda batch, logp_k: spent[counted[0] - 1])
    monkeypatch.setattr(type(a.reward_pool), "score", lambda self, groups: map(judge, groups))
    counted, initial = [0], {name: w.clone() for name, w in a.trainer.policy.weights.items()}

    def judge(group: Group) -> Group:
        scored = [replace(c, outcome=Outcome.scored(float(n % 2))) for n, c in enumerate(group.completions)]
        return replace(group, completions=tuple(scored))

    def run(stops: set[int]) -> tuple[list[Any], list[LoopState]]:
        a.trainer.policy.weights.load(initial, 0)
        a.trainer.reference.load(initial, 0)
        sampler: Any = FakeSampler()
        parts = replace(
            a, sampler=sampler, prefetcher=Prefetcher(sampler, a.prompts.batch, a.settings.rollout.num_generations)
        )
        state, states = LoopState(), []
        while state.batch < 9:
            for step in train_loop(parts, state):
                counted[0] = (state := step.state).batch + 1
                states.append(replace(state, sync={}))  # the optimizer's moments are not those of the first run
                assert state.pi_ref == a.trainer.reference.version
                if state.batch in stops:
                    break
        return sampler.calls, states

    counted[0] = 1
    calls, states = run(set())
    assert [s.batch for s in states] == list(range(1, 10))
    assert len([c for c in calls if c[0] == "sync"]) > 1
    for stops in ({1}, {4}, {8}, set(range(1, 9))):
        counted[0] = 1
        assert run(stops) == (calls, states), stops
