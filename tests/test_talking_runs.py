"""Runs whose completions talk to an environment: records, replay, resume, ranks, evaluations, and what a user sees."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from running import leftovers, tiny_settings, without_timings
from test_episodes import TURNS
from test_resume import cut_to, go_on
from tiny import save_tiny, tiny_model, tiny_tokenizer
from together import together

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.terminal.show import show
from lagrpo.verify import verify_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that ends about every tenth token, with a chat template for several turns."""
    directory = tmp_path_factory.mktemp("model")
    made = tiny_model(max_position_embeddings=1024)
    made.get_output_embeddings().weight.data[1] *= 3
    made.save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(directory)
    return directory


def settings(model: Path, root: Path, /, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    base: dict[str, dict[str, Any]] = {
        "environment": {"name": "talkers:Counting"},
        "rollout": {"max_completion_length": 40},
        "eval": {"at_start": False},
    }
    return tiny_settings(model, root, **{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def test_a_run_is_recorded_shown_and_replayed(model, tmp_path):
    result = lagrpo.train(
        settings(model, tmp_path, checkpoint={"export_every": 1}, schedule={"sync_every": 2}, eval={"at_start": True})
    )
    rows = load_rollouts(result.run)
    assert max(len(row["messages"]) for row in rows) == 5
    for row in rows:
        assert row["reason"] == "after 3 turns" or row["reason"].startswith(("cut", "after 3 turns; cut"))
        changes = sum(a != b for a, b in zip(row["loss_mask"], row["loss_mask"][1:], strict=False))
        assert len(row["messages"]) == changes + 1
    metrics = load_metrics(result.run)
    assert sum(line["num_tokens"] for line in metrics) == sum(sum(row["loss_mask"]) for row in rows)
    report = verify_run(result.run, None)
    assert report.differences == []
    assert report.compared["episodes"] == 2 * len(rows)
    show(result.run, console=Console(file=(out := io.StringIO()), width=200))
    shown = out.getvalue()
    assert re.search(r"3 turns.*after 3 turns|1 turn  .*cut after 40 sampled tokens", shown)
    assert re.search(r"environment: 1/\d", shown)
    assert leftovers(tmp_path) == []


def test_a_reply_that_was_changed_on_disk_is_found(model, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = lagrpo.train(settings(model, tmp_path, schedule={"batches": 1})).run
    path = run / "rollouts" / "step-000001.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    changed = next(row for row in rows if len(row["messages"]) > 2)
    changed["messages"][1] = "1/100"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    assert any(found.what == "replies" for found in verify_run(run).differences)


def test_sampling_ahead_gives_the_records_of_batch_by_batch(model, tmp_path):
    runs = [
        lagrpo.train(
            settings(
                model,
                tmp_path / str(ahead),
                schedule={"sync_every": 3},
                rollout={"prefetch": ahead},
                model={"dtype": "bfloat16"},
            )
        ).run
        for ahead in (True, False)
    ]
    assert load_rollouts(runs[0]) == load_rollouts(runs[1])


def test_a_resumed_run_is_the_run_that_was_never_stopped(model, tmp_path):
    """Stopped where completions of later batches are waiting in the checkpoint, rewards and turns with them."""
    given = settings(model, tmp_path, schedule={"sync_every": 3}, checkpoint={"save_every": 1, "save_total_limit": 5})
    whole = lagrpo.train(given).run
    stopped = cut_to(whole, 1, tmp_path / "cut")
    assert list((stopped / "checkpoints").glob("*/rollouts.parquet"))
    assert go_on(stopped).batches == 3
    assert load_rollouts(stopped) == load_rollouts(whole)
    assert without_timings(load_metrics(stopped)) == without_timings(load_metrics(whole))


def test_tools_are_called(model, tmp_path):
    given = settings(model, tmp_path, rollout={"max_prompt_length": 620, "max_completion_length": 10})
    given["environment"] = {"tools": ["calculator"], "max_tokens": 20}
    rows = load_rollouts(lagrpo.train(given).run)
    assert rows[0]["prompt_text"].startswith("system: You can call functions:")
    assert {len(row["messages"]) for row in rows} == {1}  # a random model calls nothing
    assert {row["outcome"] for row in rows} == {"scored"}


def test_a_task_with_an_environment_of_its_own(model, tmp_path):
    given = settings(model, tmp_path, task={"name": "guess_number", "largest": 9}, rollout={"max_prompt_length": 100})
    del given["environment"]
    rows = load_rollouts(lagrpo.train(given).run)
    assert any("My number is " in turn or "That is no number" in turn for row in rows for turn in row["messages"])


GUESSING = {"name": "guess_number", "largest": 9}
SETS: list[dict[str, Any]] = [
    {"name": "own", "max_completion_length": 20},
    {"name": "vowels", "task": {"name": "sample_task:load_vowels"}},
    {"name": "guess", "task": GUESSING},
]


def turns_of(run: Path, name: str) -> float:
    return max(record["num_turns"] for record in load_evaluation_records(run, name))


def test_sets_beside_an_environment_have_its_turns_their_own_or_one(model, tmp_path):
    wide = {"max_completion_length": 40, "max_prompt_length": 100}
    given = {"rollout": wide, "eval": {"at_start": True}}
    plain = lagrpo.train(settings(model, tmp_path / "plain", **given)).run
    given["eval"] = {"at_start": True, "sets": SETS}
    run = lagrpo.train(settings(model, tmp_path / "sets", **given)).run
    assert load_rollouts(run) == load_rollouts(plain)
    assert turns_of(run, "before.own") > 1
    assert turns_of(run, "before.guess") > 1
    assert turns_of(run, "before.vowels") == 1
    records = [load_evaluation_records(*of) for of in ((run, "before.own"), (plain, "before"))]
    longest = [max(record["mean_length"] for record in each) for each in records]
    assert longest[0] <= 20 < longest[1]
    report = verify_run(run)
    assert report.differences == []
    assert {"evaluation before.vowels"} == {check for check in report.compared if "before" in check}
    assert leftovers(tmp_path) == []


def test_a_set_of_several_turns_beside_a_task_of_one(model, tmp_path):
    given = settings(model, tmp_path, rollout={"max_prompt_length": 100}, schedule={"batches": 1})
    del given["environment"]
    given["eval"] = {"sets": [{"name": "own"}, {"name": "guess", "task": GUESSING}]}
    run = lagrpo.train(given).run
    assert [turns_of(run, f"before.{name}") > 1 for name in ("own", "guess")] == [False, True]
    assert verify_run(run).differences == []


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"name": "guess_number"}, "environment": {"tools": ["calculator"]}}, "leave out environment.tools"),
        ({"eval": {"sets": [{"name": "a", "task": {"name": "guess_number", "rewards": [{"name": "x", "reward":
          "task"}]}}]}}, "sets, 'a': .*leave out task.rewards"),
        ({"task": {"name": "talkers:load_counting", "rewards": [{"name": "x", "reward": "task"}]}, "environment": {}},
         "the environment of 'talkers:load_counting' gives the rewards"),
    ],
)  # fmt: skip
def test_environments_and_tasks_that_do_not_go_together_are_refused(model, tmp_path, sections, message):
    with pytest.raises(SettingsError, match=message):
        lagrpo.train(settings(model, tmp_path) | sections)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"name": "talkers:Counting", "tools": ["calculator"]}, "are two environments: set one of them"),
        ({"tools": ["talkers:add", "talkers:also_add"]}, "another one is called 'add'"),
        ({"tools": ["talkers:nameless"]}, "tool 'talkers:nameless' is not a plain function"),
        ({"tools": ["talkers:wait"]}, "tool 'talkers:wait' is not a plain function"),
        ({"name": "calculator"}, "not of the form 'package.module:function'"),
        ({"name": "talkers:Countin"}, "has no attribute 'Countin'. Did you mean 'Counting'?"),
        ({"tools": ["calculater"]}, "there is no tool 'calculater'; there are calculator.* Did you mean 'calculator'?"),
        ({"tools": ["talkers:unresolved"]}, "tool 'unresolved' does not say how it is called: name 'Nowhere'"),
        ({"tools": ["talkers:placed"]}, "tool 'placed' takes 'x' by position, and a call names its arguments"),
        ({"tools": ["talkers:undescribed"]}, "tool 'undescribed' does not say how it is called"),
        ({"max_turns": 0}, "greater than or equal to 1"),
        (
            {"name": "talkers:Counting", "max_tokens": 1000},
            "longest position .* is 1024; lower .* or environment.max_tokens",
        ),
        (
            {"name": "talkers:Refusing"},
            "prompt 0 of the train split .*: its environment does not start: .*no game today",
        ),
    ],
)
def test_wrong_settings_are_refused(model, tmp_path, environment, message):
    with pytest.raises((SettingsError, ValueError), match=message):
        lagrpo.train(settings(model, tmp_path) | {"environment": environment})
    assert leftovers(tmp_path) == []


def test_a_chat_template_that_cannot_take_turns_is_refused(tmp_path):
    plain = save_tiny(tmp_path / "model", max_position_embeddings=1024)
    with pytest.raises(SettingsError, match=r"environment: the chat template .*model\.chat_template"):
        lagrpo.train(settings(plain, tmp_path))


def test_several_ranks_make_the_run_of_one(model, tmp_path):
    """Each rank has environments of its own; evaluations talk to them, too, and sets to their own."""
    sets = {"at_start": True, "sets": [{"name": "own"}, SETS[2]]}
    given = {"eval": sets, "rollout": {"max_completion_length": 40, "max_prompt_length": 100}}
    alone = lagrpo.train(settings(model, tmp_path / "one", **given)).run
    first, second = together(2, settings(model, tmp_path / "two", **given))
    assert first == second
    compared = ("token_ids", "loss_mask", "messages", "outcome", "reward", "reason", "finished")
    of_run, of_one = ([[row[name] for name in compared] for row in load_rollouts(run)] for run in (first.run, alone))
    assert of_run == of_one
    assert max(len(turns) for _, _, turns, *_ in of_run) > 2
    for name in ("before.own", "before.guess"):
        found, expected = (load_evaluation_records(run, name) for run in (first.run, alone))
        assert [record["completions"] for record in found] == [record["completions"] for record in expected]
