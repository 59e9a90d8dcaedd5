"""The length of a run in epochs."""

from __future__ import annotations

from collections import Counter

import pytest
from running import tiny_settings

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_rollouts
from lagrpo.settings.load import load_settings
from lagrpo.settings.schema import Settings
from lagrpo.startup.epochs import with_batches
from lagrpo.tasks import RowTask


@pytest.mark.parametrize(
    ("epochs", "prompts", "batches"),
    [(1, 2, 3), (1.5, 2, 5), (2, 4, 3), (0.01, 2, 1), (None, 2, 7)],
    ids=["one", "one and a half", "last batch begins another", "less than a batch", "batches"],
)
def test_epochs_become_batches_of_the_training_prompts(epochs, prompts, batches):
    """The task has six training prompts."""
    schedule = {"batches": 7, "epochs": epochs, "prompts_per_batch": prompts}
    settings = Settings.model_validate({"task": {"name": "sample_task:load"}, "schedule": schedule})
    resolved = with_batches(settings).schedule
    assert (resolved.batches, resolved.epochs) == (batches, None)


def test_epochs_that_fill_their_batches_need_no_batch_more():
    """1.1 * 100 is 110.00000000000001 in floating point: 11 batches of 10."""
    rows = {"train": ["?"] * 100}
    task = RowTask("hundred", rows, lambda row: (row, row), lambda completion: 0.0)
    schedule = {"epochs": 1.1, "prompts_per_batch": 10}
    settings = Settings.model_validate({"schedule": schedule})
    assert with_batches(settings, task).schedule.batches == 11


LENGTHS_TWICE = {"schedule": {"epochs": 2, "batches": 5}}


@pytest.mark.parametrize(
    ("source", "changes", "origin"),
    [(LENGTHS_TWICE, {}, "settings"), ({}, LENGTHS_TWICE, "command line")],
    ids=["in the settings", "in the changes"],
)
def test_two_lengths_in_one_place_are_rejected(source, changes, origin):
    message = rf"{origin}: schedule\.batches and schedule\.epochs both set the length"
    with pytest.raises(SettingsError, match=message):
        load_settings(source, changes)


@pytest.mark.parametrize(
    ("in_file", "typed", "length"),
    [
        ({"epochs": 2.0}, {"schedule.batches": 5}, (5, None)),
        ({"batches": 5}, {"schedule.epochs": 2.0}, (5, 2.0)),
        ({"epochs": 2.0}, {}, (100, 2.0)),
    ],
    ids=["batches over epochs", "epochs over batches", "epochs over the default"],
)
def test_length_that_was_set_last_counts(in_file, typed, length):
    """Set epochs replace the batches later, in with_batches."""
    schedule = load_settings({"schedule": in_file}, typed).schedule
    assert (schedule.batches, schedule.epochs) == length


@pytest.mark.parametrize(
    ("overlong_prompts", "fraction", "batches"),
    [("error", 0.0, 5), ("drop", 0.0, 2), ("drop", 0.5, 4)],
    ids=["kept", "dropped", "dropped, half of each batch offline"],
)
def test_epochs_count_the_prompts_that_are_not_dropped(
    model, tmp_path, overlong_prompts, fraction, batches
):
    """Four of ten prompts fit. A batch has two prompts."""
    rows = {"train": ["?"] * 4 + ["?" * 100] * 6, "test": ["?"]}
    task = RowTask("lengths", rows, lambda row: (row, row), lambda completion: 0.0)
    settings = tiny_settings(
        model, tmp_path, schedule={"epochs": 1, "prompts_per_batch": 2}, offline={}
    )
    del settings["schedule"]["batches"]
    settings["rollout"]["overlong_prompts"] = overlong_prompts
    if fraction:
        settings["offline"] = {"data": "old.jsonl", "fraction": fraction}
    resolved = with_batches(Settings.model_validate(settings), task)
    assert resolved.schedule.batches == batches


def test_dry_run_shows_the_prompts_and_batches_without_dropped_prompts(model, tmp_path, capsys):
    rows = {"train": ["?"] * 4 + ["?" * 100] * 6, "test": ["?"]}
    task = RowTask("lengths", rows, lambda row: (row, row), lambda completion: 0.0)
    settings = tiny_settings(model, tmp_path, schedule={"epochs": 1, "prompts_per_batch": 2})
    del settings["schedule"]["batches"]
    settings["rollout"]["overlong_prompts"] = "drop"
    lagrpo.train(settings, task=task, dry_run=True)
    text = capsys.readouterr().out
    assert "4 training prompts, 1 test prompt" in text
    assert "2 batches" in text


def test_epochs_of_offline_completions_alone_are_rejected():
    settings = Settings.model_validate(
        {"offline": {"data": "old.jsonl"}, "schedule": {"epochs": 1}}
    )
    with pytest.raises(SettingsError, match=r"set schedule\.batches"):
        with_batches(settings)


def test_run_of_two_epochs_visits_every_prompt_twice(model, tmp_path):
    settings = tiny_settings(
        model,
        tmp_path / "runs",
        schedule={"epochs": 2, "prompts_per_batch": 3},
        eval={"at_start": False},
    )
    del settings["schedule"]["batches"]
    result = lagrpo.train(settings)
    assert result.batches == 4
    visits = Counter(
        row["prompt_id"] for row in load_rollouts(result.run) if row["sample_index"] == 0
    )
    assert visits == dict.fromkeys(range(6), 2)
