"""`lagrpo.train` as a Python user calls it: data, reward functions, settings and callbacks."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import datasets
import pytest
from running import tiny_settings
from sample_rewards import _weigh, correct, mood, short

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_rollouts
from lagrpo.settings.load import load_settings

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]


@pytest.fixture
def train_arguments(model, tmp_path):
    """The model, and settings of a small run, by their names."""
    sections = tiny_settings(model, tmp_path / "runs", schedule={"batches": 2})
    sections.pop("task")
    path = sections["model"].pop("path")
    return {
        "model": path,
        "settings": {
            f"{a}.{b}": value for a, values in sections.items() for b, value in values.items()
        },
    }


@pytest.mark.parametrize("kind", ["list", "splits", "file"])
def test_data_rewards_and_callbacks_make_a_run(train_arguments, tmp_path, kind):
    class Seen(lagrpo.Callback):
        batches = 0

        def on_batch(self, metrics, rollouts) -> None:
            self.batches += 1

    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8"
    )
    dataset = datasets.Dataset.from_list(ROWS)
    data: dict[str, Any] = {
        "list": ROWS,
        "splits": datasets.DatasetDict({"train": dataset, "test": dataset}),
        "file": tmp_path / "rows.jsonl",
    }
    result = lagrpo.train(
        data=data[kind],
        rewards=[correct, "exact", short],
        callbacks=[seen := Seen()],
        **train_arguments,
    )
    assert seen.batches == result.batches == 2
    assert result.weights is not None
    assert result.weights.is_dir()
    assert result.after is not None
    rows = load_rollouts(result.run)
    assert {row["prompt_text"].split("?")[0][-3:] for row in rows} <= {
        row["question"][-4:-1] for row in ROWS
    }
    assert all(row["reward_short"] > 0 and row["reward_exact"] == 0 for row in rows)


def test_names_and_functions_can_be_mixed_and_each_has_its_own_name(train_arguments):
    rewards = ["exact", _weigh, partial(_weigh, w=0.5), lambda completion, answer: 0.25]
    row = load_rollouts(lagrpo.train(data=ROWS, rewards=rewards, **train_arguments).run)[0]
    rewards_by_name = {name: value for name, value in row.items() if name.startswith("reward_")}
    assert rewards_by_name == {
        "reward_exact": 0.0,
        "reward_weigh_2": 0.0,
        "reward_weigh_3": 0.5,
        "reward_lambda": 0.25,
    }


def test_rewards_have_weights_and_ranges_as_objects_and_as_tables(train_arguments):
    rewards = [
        correct,
        lagrpo.Reward(mood, weight=0.2, range=(-1, 1)),
        {"reward": mood, "name": "table", "weight": 0.5, "options": {"scale": 0.5}},
        {"reward": "exact", "weight": 2.0},
    ]
    result = lagrpo.train(data=ROWS, rewards=rewards, **train_arguments)
    settings = load_settings(result.run / "config.toml")
    entries = {entry.name: (entry.weight, entry.range) for entry in settings.task.rewards}
    assert entries == {
        "correct": (1.0, (0.0, 1.0)),
        "mood": (0.2, (-1.0, 1.0)),
        "table": (0.5, (0.0, 1.0)),
        "exact": (2.0, (0.0, 1.0)),
    }
    for row in load_rollouts(result.run):
        assert (row["reward_mood"], row["reward_table"]) == (-1.0, -0.5)
        expected = row["reward_correct"] - 0.2 - 0.25 + 2 * row["reward_exact"]
        assert row["reward"] == pytest.approx(expected)


def test_reward_has_a_range_that_goes_up():
    with pytest.raises(ValueError, match=r"range of reward 'mood'"):
        lagrpo.Reward(mood, range=(1, 0))


def test_named_rewards_and_a_file_with_changed_settings(train_arguments, tmp_path):
    (tmp_path / "a.toml").write_text("[schedule]\nbatches = 9\n", encoding="utf-8")
    result = lagrpo.train(tmp_path / "a.toml", data=ROWS, rewards="exact", **train_arguments)
    assert result.batches == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"data": [{"text": "a"}] * 9, "rewards": [correct]},
            "no column 'prompt' .*; the columns are text",
        ),
        ({"data": ROWS, "rewards": [lambda x: 1.0]}, "name the parameters"),
        ({"data": ROWS, "rewards": ["exakt"]}, "exakt"),
        ({"data": ROWS, "rewards": {"reward": correct, "wieght": 2.0}}, "wieght"),
        ({"data": ROWS, "rewards": [(correct, 0.2)]}, r"lagrpo\.Reward\(function, weight=0\.2\)"),
        ({"data": ROWS, "reward_funcs": [correct]}, "is task.rewards, or argument rewards"),
        ({"train_dataset": ROWS, "rewards": [correct]}, "is task.data, or argument data"),
        ({"learning_rate": 1e-5}, "optimizer.learning_rate"),
        ({"data": ROWS}, "the task 'custom' needs task.rewards"),
        (
            {"data": [*ROWS, {"question": None, "answer": "5"}], "rewards": correct},
            "data, row 21: its prompt is None",
        ),
        ({"settings": {"schedule.sync_evry": 3}}, "schedule.sync_every"),
    ],
)
def test_wrong_input_is_a_settings_error(wrong, message):
    with pytest.raises(SettingsError, match=message):
        lagrpo.train(**wrong)


def test_settings_error_shows_the_callers_line_and_no_call_inside_lagrpo(monkeypatch):
    with pytest.raises(SettingsError) as raised:
        lagrpo.train(settings={"optimizer.lr": 1})
    functions = [entry.name for entry in raised.traceback]
    assert functions == [
        "test_settings_error_shows_the_callers_line_and_no_call_inside_lagrpo",
        "call",
    ]
    assert raised.value.__cause__ is None
    assert raised.value._render_traceback_() == [f"SettingsError: {raised.value}"]

    monkeypatch.setenv("LAGRPO_DEBUG", "1")
    with pytest.raises(SettingsError) as raised:
        lagrpo.train(settings={"optimizer.lr": 1})
    assert "validate" in [entry.name for entry in raised.traceback]
    assert "ValidationError" in "".join(raised.value._render_traceback_())
