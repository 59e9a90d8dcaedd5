"""The tracker TensorBoard: event files of real runs, read back with TensorBoard's own reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from running import tiny_settings
from tiny import save_tiny

from lagrpo import train
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.trackers.to_tensorboard import TensorBoard

pytestmark = pytest.mark.usefixtures("shared_templates")


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    return found.Reload()


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run).Scalars(tag)]


def text(run: Path, tag: str) -> dict[int, str]:
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events(run).Tensors(tag)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def begin(model, tmp_path):
    own: dict[str, Any] = {"name": "run", "trackers": "tensorboard", "checkpoint_every": 1, "tracked_completions": 4}
    return lambda **sections: train(tiny_settings(model, tmp_path, run=own, **sections)).run


def test_what_tensorboard_shows_of_a_run(begin):
    run = begin(evaluation={"every": 2})
    metrics = load_metrics(run)
    for name in ("reward_mean", "tokens_sampled", "lag_max"):
        assert scalars(run, name) == [(m["batch"], pytest.approx(m[name])) for m in metrics]
    absent = {name for name in metrics[0] if all(m[name] is None for m in metrics)}
    tags = set(events(run).Tags()["scalars"])
    assert tags >= set(metrics[0]) - absent
    assert not tags & absent
    expected = [(e["batch"], pytest.approx(e["pass_at_1"])) for e in load_evaluations(run)]
    assert scalars(run, "evaluation/pass_at_1") == expected
    assert f'path = "{load_path(run)}"' in text(run, "settings")[0]
    tables = text(run, "completion_texts")
    assert sorted(tables) == [1, 2, 3]
    assert len(tables[2].splitlines()) == 2 + 4
    assert cells(tables[2])[2][:2] == [str(load_rollouts(run, [2])[0][name]) for name in ("prompt_key", "completion")]


def load_path(run: Path) -> str:
    from lagrpo.settings.toml import load_settings

    return load_settings(run / "config.toml").model.path


def cells(table: str) -> Sequence[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_a_resumed_run_has_every_batch_once_and_the_settings_once(begin):
    run = begin()
    train({"run": {"resume": str(run), "display": "none"}, "schedule": {"batches": 5}})
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert [step for step, _ in scalars(run, "reward_mean")] == [1, 2, 3, 4, 5]
    assert [step for step, _ in scalars(run, "evaluation/pass_at_1")] == [0, 3, 5]
    assert list(text(run, "settings")) == [0]


def test_a_completion_cannot_break_the_table(tmp_path):
    writer = TensorBoard()
    writer._write = lambda batch, values: shown.extend(values)  # type: ignore[method-assign]
    shown: list[Any] = []
    writer.completions(1, [{"text": "a|b\\\nc\r", "reward": None}])
    (value,) = shown
    assert value.tensor.string_val[0].decode().splitlines()[2] == "| a\\|b\\\\<br>c␍ |  |"


def test_each_set_of_evaluations_has_charts_of_its_own(begin):
    sets = [{"name": "own"}, {"name": "vowels", "task": {"name": "sample_task:load_vowels"}}]
    run = begin(evaluation={"sets": sets})
    for name in ("own", "vowels"):
        expected = [(e["batch"], pytest.approx(e["reward_mean"])) for e in load_evaluations(run) if e["set"] == name]
        assert scalars(run, f"evaluation/{name}.reward_mean") == expected
    assert "evaluation/reward_mean" not in events(run).Tags()["scalars"]
