"""Runs whose completions talk to an environment: records, replay, resume, ranks, evaluations, and
what a user sees."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from ranks import together
from rich.console import Console
from running import leftovers, tiny_settings, without_timings
from test_resume import cut_to, go_on
from tiny import TURNS, save_tiny, tiny_model, tiny_tokenizer

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.terminal.show import show
from lagrpo.types import JsonObject
from lagrpo.verify import verify_run

GUESSING = {"name": "guess_number", "options": {"largest": 9}}
SETS: list[JsonObject] = [
    {"name": "own", "max_completion_length": 20},
    {"name": "vowels", "task": {"name": "sample_task:load_vowels"}},
    {"name": "guess", "task": GUESSING},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that ends about every tenth token, with a chat template for several turns."""
    directory = tmp_path_factory.mktemp("model")
    random_model = tiny_model(max_position_embeddings=2048, num_hidden_layers=1)
    random_model.get_output_embeddings().weight.data[1] *= 3
    random_model.save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(directory)
    return directory


def settings(model: Path, root: Path, /, **sections: JsonObject) -> dict[str, JsonObject]:
    base: dict[str, JsonObject] = {
        "task": {"name": "talkers:load"},
        "rollout": {"max_completion_length": 40},
        "eval": {"at_start": False},
    }
    return tiny_settings(
        model,
        root,
        **{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections},
    )


def test_run_is_recorded_shown_and_replayed(model, tmp_path):
    sections = {"schedule": {"sync_every": 2}, "eval": {"at_start": True}}
    result = lagrpo.train(settings(model, tmp_path, checkpoint={"export_every": 1}, **sections))
    rows = load_rollouts(result.run)
    assert max(len(row["messages"]) for row in rows) == 5
    for row in rows:
        assert row["reason"] == "after 3 turns" or row["reason"].startswith(
            ("cut", "after 3 turns; cut")
        )
        changes = sum(a != b for a, b in zip(row["loss_mask"], row["loss_mask"][1:], strict=False))
        assert len(row["messages"]) == changes + 1
    sampled = sum(line["num_tokens"] for line in load_metrics(result.run))
    assert sampled == sum(sum(row["loss_mask"]) for row in rows)
    report = verify_run(result.run, None, trust_run_code=True)
    assert report.differences == []
    assert report.compared["episodes"] == 2 * len(rows)
    show(result.run, console=Console(file=(out := io.StringIO()), width=200))
    assert re.search(r"environment: 1/\d", out.getvalue())
    assert leftovers(tmp_path) == []


def test_resumed_run_equals_an_uninterrupted_run(model, tmp_path):
    """Stopped while completions of later batches wait in the checkpoint, rewards and turns with
    them."""
    run_settings = settings(
        model,
        tmp_path,
        schedule={"sync_every": 3},
        checkpoint={"save_every": 1, "save_total_limit": 5},
    )
    uninterrupted = lagrpo.train(run_settings).run
    stopped = cut_to(uninterrupted, 1, tmp_path / "cut")
    assert list((stopped / "checkpoints").glob("*/rollouts.parquet"))
    assert go_on(stopped).batches == 3
    assert load_rollouts(stopped) == load_rollouts(uninterrupted)
    assert without_timings(load_metrics(stopped)) == without_timings(load_metrics(uninterrupted))


def test_tools_are_described_to_the_policy(model, tmp_path):
    run_settings = settings(
        model, tmp_path, rollout={"max_prompt_length": 620, "max_completion_length": 10}
    )
    run_settings["task"] = {"name": "sample_task:load", "tools": ["calculator"]}
    rows = load_rollouts(lagrpo.train(run_settings).run)
    assert rows[0]["prompt_text"].startswith("system: You can call functions:")
    assert {len(row["messages"]) for row in rows} == {1}  # a random model calls nothing
    assert {row["outcome"] for row in rows} == {"scored"}


def turns_of(run: Path, name: str) -> float:
    return max(record["num_turns"] for record in load_evaluation_records(run, name))


def test_sets_have_the_turns_of_the_run_their_own_or_one(model, tmp_path):
    wide = {"max_completion_length": 40, "max_prompt_length": 100}
    sections = {"rollout": wide, "eval": {"at_start": True}}
    plain = lagrpo.train(settings(model, tmp_path / "plain", **sections)).run
    sections["eval"] = {"at_start": True, "sets": SETS}
    run = lagrpo.train(settings(model, tmp_path / "sets", **sections)).run
    assert load_rollouts(run) == load_rollouts(plain)
    assert turns_of(run, "before.own") > 1
    assert turns_of(run, "before.guess") > 1
    assert turns_of(run, "before.vowels") == 1
    records = [
        load_evaluation_records(*evaluation)
        for evaluation in ((run, "before.own"), (plain, "before"))
    ]
    longest = [
        max(record["mean_length"] for record in records_of_set) for records_of_set in records
    ]
    assert longest[0] <= 20 < longest[1]
    assert verify_run(run, trust_run_code=True).differences == []
    assert leftovers(tmp_path) == []


def test_environment_settings_that_exclude_each_other_are_rejected(model, tmp_path):
    rewards, sample = ["exact"], "sample_task:load"
    for task, message in [
        ({"name": "guess_number", "tools": ["calculator"]}, "has an environment"),
        (
            {"name": "talkers:load", "rewards": rewards},
            "add 'task', the reward of the environment",
        ),
        (
            {"name": sample, "tools": ["talkers:undescribed"]},
            "tool 'undescribed' has no usable signature",
        ),
        (
            {"name": "talkers:load", "options": {"make": "Broken"}},
            "its environment did not start: .*no game today",
        ),
    ]:
        with pytest.raises(SettingsError, match=message):
            lagrpo.train(settings(model, tmp_path) | {"task": task})
    sets = {"eval": {"sets": [{"name": "a", "task": {"name": "guess_number", "rewards": rewards}}]}}
    with pytest.raises(SettingsError, match=r"sets, 'a': .*'task'"):
        lagrpo.train(settings(model, tmp_path, **sets))
    with pytest.raises(SettingsError, match=r"longest position .* is 2048"):
        lagrpo.train(settings(model, tmp_path, rollout={"max_completion_length": 1200}))
    plain = save_tiny(tmp_path / "model", max_position_embeddings=2048)
    with pytest.raises(SettingsError, match=r"the chat template .*model\.chat_template"):
        lagrpo.train(settings(plain, tmp_path))
    assert leftovers(tmp_path) == []


def test_completions_of_two_ranks_equal_those_of_one_process(model, tmp_path):
    """Each rank has its own environments; evaluations talk to them, too, and sets to theirs."""
    sets = {"at_start": True, "sets": [{"name": "own"}, SETS[2]]}
    sections = {"eval": sets, "rollout": {"max_completion_length": 40, "max_prompt_length": 100}}
    alone = lagrpo.train(settings(model, tmp_path / "one", **sections)).run
    first, second = together(2, settings(model, tmp_path / "two", **sections))
    assert first == second
    compared = ("token_ids", "loss_mask", "messages", "outcome", "reward", "reason", "finished")
    turns_of_ranks, turns_of_process = (
        [[row[name] for name in compared] for row in load_rollouts(run)]
        for run in (first.run, alone)
    )
    assert turns_of_ranks == turns_of_process
    assert max(len(turns) for _, _, turns, *_ in turns_of_ranks) > 2
    for name in ("before.own", "before.guess"):
        records, expected = (load_evaluation_records(run, name) for run in (first.run, alone))
        assert [record["completions"] for record in records] == [
            record["completions"] for record in expected
        ]
