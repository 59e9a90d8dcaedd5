"""A run on disk, written and read back."""

from __future__ import annotations

import datetime
import doctest
import errno
import io
import json
import math
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file

from lagrpo.errors import SettingsError
from lagrpo.runs import directory, files, plots
from lagrpo.runs.directory import Run, RunExistsError, default_name
from lagrpo.runs.environment import collect_environment, git_state
from lagrpo.runs.files import append_line, naming, to_json, write_atomically, write_directory_atomically
from lagrpo.runs.lock import locked
from lagrpo.runs.plots import reward_curve
from lagrpo.runs.reading import (
    RunNotFoundError,
    load_evaluations,
    load_events,
    load_metrics,
    load_rollouts,
    open_run,
    rollout_batches,
)
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.terminal.show import render_completion, show
from lagrpo.types import Completion, Group, Outcome, Prompt

SETTINGS = {"task": {"name": "arithmetic"}, "objective": {"recipe": "grpo"}, "schedule": {"v": 10, "i": 1}}


def completion(outcome: Outcome | None, text: str = "5", versions: tuple[int, ...] = (4, 4), finished: bool = True):
    count = len(versions)
    return Completion(
        token_ids=torch.arange(5, 5 + count),
        logp_alpha=torch.linspace(-0.1, -2.5, count, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.int64),
        finished=finished,
        text=text,
        outcome=outcome,
    )


def group(key: int, *completions: Completion) -> Group:
    return Group(Prompt(key, ({"role": "user", "content": f"2+{key}="},), {"answer": "5"}, (11, 12)), completions)


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path, "one", SETTINGS, "[schedule]\nv = 10\n", {"python": "3.11"})


@pytest.fixture
def sampled(run) -> Run:
    """A run with one batch: one group with a completion of every kind, and one group without signal."""
    mixed = group(
        3,
        completion(Outcome.scored(1.0), "it is [bold]5[/bold]", versions=(4, 6)),
        completion(Outcome.scored(0.0), "\x1b[31mred", finished=False),
        completion(Outcome.unscored("deadline of 5 s")),
        completion(Outcome.failed("the sampler died"), versions=()),
    )
    equal = group(8, completion(Outcome.scored(0.0)), completion(Outcome.scored(0.0)))
    columns = [[{"advantage": 1.0}, {"advantage": -1.0}, {}, {}], [{"advantage": 0.0, "masked": True}] * 2]
    run.record_rollouts(120, list(rollout_rows([mixed, equal], columns, batch=120, stage=2, pi_k_version=9)))
    return run


def printed(run: Run | Path, **arguments) -> str:
    console = Console(file=StringIO(), width=110)
    show(run, console=console, **arguments)
    return console.file.getvalue()  # type: ignore[attr-defined]


# A new run


def test_create_writes_settings_and_environment_as_given(run):
    assert (run.path / "config.toml").read_text() == "[schedule]\nv = 10\n"
    assert json.loads((run.path / "environment.json").read_text()) == {"python": "3.11"}
    assert sorted(path.name for path in run.path.iterdir()) == ["config.toml", "environment.json"]


def test_default_names_say_what_tells_runs_apart_and_never_collide(tmp_path):
    names = [Run.create(tmp_path, None, SETTINGS, "", {}).path.name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"arithmetic-grpo-v10-i1-\d{8}-\d{6}(-\d)?", name) for name in names)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"task": {"name": "my.tasks:chess"}, "objective": {"recipe": "off_policy_grpo"}}, "chess-off_policy_grpo"),
        ({"task": {"name": "data/weird name v1.5"}}, "data-weird-name-v1.5"),
        ({"schedule": {"v": 3}}, "v3"),
    ],
)
def test_default_name_of_unusual_settings(settings, name):
    assert default_name(settings, datetime.datetime(2026, 1, 2, 3, 4, 5)) == f"{name}-20260102-030405"


def test_a_directory_with_something_in_it_is_refused_and_left_alone(run):
    with pytest.raises(RunExistsError, match="already exists and is not empty: choose another name"):
        Run.create(run.path.parent, "one", SETTINGS, "other", {})
    assert (run.path / "config.toml").read_text() == "[schedule]\nv = 10\n"


def test_an_empty_directory_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path, "empty", SETTINGS, "", {}).path == tmp_path / "empty"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/tmp", "../a", "a/", "a\0b", "a\nb", "\x1b[31m", "a" * 300, "\ud800"]
)
def test_names_that_would_leave_the_root_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not the name of a directory"):
        Run.create(tmp_path, name, SETTINGS, "", {})
    with pytest.raises(ValueError, match=r"evaluation name .* is not the name"):
        Run(tmp_path).record_evaluation(name, {"batch": 0}, [])
    assert not list(tmp_path.iterdir())


# Metrics


def test_metrics_come_back_as_written_with_null_for_what_is_no_number(run):
    run.record({"batch": 1, "loss": math.nan, "kl_alpha": math.inf, "reward_mean": np.float32(0.5), "lr": None})
    run.record({"batch": np.int64(2)})
    assert load_metrics(run) == [
        {"batch": 1, "loss": None, "kl_alpha": None, "reward_mean": 0.5, "lr": None},
        {"batch": 2},
    ]
    assert "NaN" not in run.metrics.read_text()


def test_each_batch_is_on_disk_when_record_returns(run):
    for batch in range(1, 4):
        run.record({"batch": batch})
        assert [m["batch"] for m in load_metrics(run)] == list(range(1, batch + 1))


@pytest.mark.parametrize("value", ["cap", True, [1, 2], {"a": 1}, torch.tensor(1.0)])
def test_what_is_no_number_is_refused_by_its_key(run, value):
    with pytest.raises(TypeError, match=r"metrics.jsonl holds numbers and nulls, but loss is "):
        run.record({"batch": 1, "loss": value})
    assert load_metrics(run) == []


def test_events_come_back_as_written(run):
    run.record_event("weight_sync", 3, reason="cap", version=2)
    run.record_event("warning", 4, text="look")
    assert load_events(run) == [
        {"event": "weight_sync", "batch": 3, "reason": "cap", "version": 2},
        {"event": "warning", "batch": 4, "text": "look"},
    ]


@given(torn=st.binary(min_size=1, max_size=40).filter(lambda tail: b"\n" not in tail), lines=st.integers(0, 3))
def test_a_torn_last_line_is_skipped_when_read_and_removed_by_the_next_write(tmp_path_factory, torn, lines):
    run = Run.create(tmp_path_factory.mktemp("torn"), "one", SETTINGS, "", {})
    for batch in range(lines):
        run.record({"batch": batch})
    with run.metrics.open("ab") as file:
        file.write(torn)
    before = [{"batch": batch} for batch in range(lines)]
    assert load_metrics(run) == before
    run.record({"batch": 77})
    assert load_metrics(run) == [*before, {"batch": 77}]


def test_a_torn_line_longer_than_any_block_is_removed(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"first\n" + b"x" * 200_000)
    append_line(path, "second")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(run):
    run.metrics.write_text('{"batch": 1}\n{"bat\n{"batch": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: this is not JSON"):
        load_metrics(run)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=8))
def test_any_metric_becomes_strict_json(value):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(to_json(value), parse_constant=refuse)
    if not isinstance(value, (float, list)) or (isinstance(value, float) and math.isfinite(value)):
        assert read == value


# Atomic writes


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_atomically(tmp_path / "file", "old")

    def fail(scratch: Path) -> None:
        scratch.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "old")]


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Inside, the system lets no file of this process grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refuse_to_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


def test_an_error_of_safetensors_names_the_file(run):
    """It says what happened in words of its own, without the file."""

    def write(directory: Path) -> None:
        with at_most(1000):
            save_file({"tensor": torch.zeros(1 << 16)}, directory / "model.safetensors")

    with pytest.raises(OSError, match=f"File too large: '{run.path / 'weights' / 'final'}'") as error:
        run.record_weights(write)
    assert error.value.errno == errno.EFBIG
    assert [*(run.path / "weights").iterdir()] == []


def test_an_error_of_the_system_names_the_file(run, monkeypatch):
    refuse_to_sync(monkeypatch)
    for write, file in (
        (lambda: run.write_config("x = 1"), run.path / "config.toml"),
        (lambda: run.record_evaluation("before", {}, [{"a": 1}]), run.path / "evaluations" / "before.parquet"),
        (lambda: run.record_weights(lambda directory: (directory / "a").touch()), run.path / "weights" / "final"),
    ):
        with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
            write()


def test_lines_and_the_lock_s_holder_name_their_file(run, monkeypatch):
    def full(*arguments: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_end_of_last_line", full)
    with pytest.raises(OSError, match=f"No space left on device: '{run.metrics}'"):
        run.record({"batch": 1})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*lock-holder.json'"), locked(run.path):
        pass


def test_an_error_that_names_a_file_or_is_not_the_system_s_stays_as_it_is(tmp_path):
    for error in (OSError(errno.ENOSPC, "full", "other"), OSError("words alone")):
        with pytest.raises(OSError) as raised, naming(tmp_path):  # noqa: PT011 - the object itself is compared
            raise error
        assert raised.value is error


def test_weights_are_replaced_as_a_whole(run):
    def write(*names: str):
        return lambda directory: [(directory / name).write_text(name) for name in names]

    assert run.record_weights(write("config.json", "old.safetensors")) == run.path / "weights" / "final"
    final = run.record_weights(write("config.json", "new.safetensors"))
    assert sorted(p.name for p in final.iterdir()) == ["config.json", "new.safetensors"]
    assert run.record_weights(write("config.json"), version=120).name == "v000120"
    assert sorted(p.name for p in (run.path / "weights").iterdir()) == ["final", "v000120"]


def test_a_failed_write_of_weights_keeps_those_that_were_there(tmp_path):
    write_directory_atomically(tmp_path / "final", lambda directory: (directory / "a").touch())

    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_directory_atomically(tmp_path / "final", fail)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["final", "final/a"]


# Rollouts


def test_rollouts_come_back_to_the_bit(sampled):
    rows = load_rollouts(sampled)
    assert [(row["prompt_key"], row["completion"]) for row in rows] == [(3, 0), (3, 1), (3, 2), (3, 3), (8, 0), (8, 1)]
    first = rows[0]
    assert first["logp_alpha"] == [float(np.float32(-0.1)), -2.5]
    assert {key: first[key] for key in ("token_ids", "versions", "prompt_token_ids", "text")} == {
        "token_ids": [5, 6],
        "versions": [4, 6],
        "prompt_token_ids": [11, 12],
        "text": "it is [bold]5[/bold]",
    }
    assert (first["batch"], first["stage"], first["pi_k_version"], first["prompt_text"]) == (120, 2, 9, "2+3=")
    assert json.loads(first["gold"]) == {"answer": "5"}


def test_lag_is_that_of_the_oldest_token_and_null_without_tokens(sampled):
    assert [row["lag"] for row in load_rollouts(sampled)] == [9 - 4, 5, 5, None, 5, 5]


def test_the_three_outcomes_and_the_masks(sampled):
    rows = load_rollouts(sampled)
    assert [(row["outcome"], row["reward"], row["advantage"], row["masked"]) for row in rows] == [
        ("scored", 1.0, 1.0, ""),
        ("scored", 0.0, -1.0, ""),
        ("unscored", None, None, "unscored"),
        ("failed", None, None, "failed"),
        ("scored", 0.0, 0.0, "zero_variance"),
        ("scored", 0.0, 0.0, "zero_variance"),
    ]
    assert [row["reason"] for row in rows[2:4]] == ["deadline of 5 s", "the sampler died"]


def test_the_file_says_its_schema_and_another_is_refused(sampled):
    import pyarrow.parquet as pq

    path = sampled.path / "rollouts" / "step-000120.parquet"
    assert pq.read_schema(path).metadata[b"lagrpo.schema"] == b"lagrpo.rollouts/3"
    assert pq.read_schema(path).equals(rollout_schema())
    table = pq.read_table(path).replace_schema_metadata({"lagrpo.schema": "lagrpo.rollouts/9"})
    pq.write_table(table, path)
    with pytest.raises(ValueError, match=r"lagrpo.rollouts/9; this version of lagrpo reads lagrpo.rollouts/3"):
        load_rollouts(sampled)
    with pytest.raises(SettingsError, match=r"lagrpo.rollouts/9; this version"):  # told without a traceback
        show(sampled)


def test_the_documented_query_runs_on_the_files(sampled):
    import duckdb

    connection: Any = duckdb.connect()
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    (hardest,) = re.findall(r"```sql\n(.*?);\n```", page, flags=re.DOTALL)
    assert connection.sql(hardest.replace("runs/NAME", str(sampled.path))).fetchall() == [
        (8, "2+8=", 0.0, 5, 2),
        (3, "2+3=", 0.5, 5, 2),
    ]


def test_rows_that_do_not_fit_together_are_refused():
    unjudged = group(1, completion(None))
    with pytest.raises(ValueError, match="judge the groups first"):
        list(rollout_rows([unjudged], [[{}]], batch=1, stage=1, pi_k_version=0))
    judged = group(1, completion(Outcome.scored(1.0)))
    with pytest.raises(ValueError, match="argument 2"):
        list(rollout_rows([judged], [[{}, {}]], batch=1, stage=1, pi_k_version=0))


def test_a_conversation_is_told_as_one_text():
    messages = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="})
    spoken = Group(Prompt(1, messages, 5), (completion(Outcome.scored(1.0)),))
    (row,) = rollout_rows([spoken], [[{}]], batch=1, stage=1, pi_k_version=4)
    assert row["prompt_text"] == "system: Add.\nuser: 2+3="
    assert row["gold"] == "5"


def test_batches_are_chosen_by_number(sampled):
    judged = group(1, completion(Outcome.scored(1.0)))
    sampled.record_rollouts(7, list(rollout_rows([judged], [[{}]], batch=7, stage=1, pi_k_version=4)))
    (sampled.path / "rollouts" / ".step-000009.parquet.1-ab.tmp").touch()
    assert rollout_batches(sampled) == [7, 120]
    assert {row["batch"] for row in load_rollouts(sampled, [7])} == {7}
    assert load_rollouts(sampled, [7], columns=["reward"]) == [{"reward": 1.0}]
    with pytest.raises(RunNotFoundError, match="no rollouts of batch 8; it has batches 7 to 120"):
        load_rollouts(sampled, [8])


# Evaluations


def test_evaluations_come_back_in_the_order_of_their_batches(run):
    run.record_evaluation("last", {"batch": 120, "pass_at_1": 0.98}, [{"prompt_key": 1, "correct": 4}])
    run.record_evaluation("first", {"batch": 0, "pass_at_1": math.nan}, [{"prompt_key": 1, "correct": 0}])
    assert load_evaluations(run) == [
        {"name": "first", "batch": 0, "pass_at_1": None},
        {"name": "last", "batch": 120, "pass_at_1": 0.98},
    ]
    import pyarrow.parquet as pq

    records = pq.read_table(run.path / "evaluations" / "last.parquet").to_pylist()
    assert records == [{"prompt_key": 1, "correct": 4}]


# Runs that are not there


def test_what_is_not_a_run_says_so_and_names_the_runs_nearby(run, tmp_path):
    with pytest.raises(RunNotFoundError, match=r"there is no run at .*/two\. Runs in .*: .*/one"):
        open_run(tmp_path / "two")
    with pytest.raises(RunNotFoundError, match=r"is not a run: it has no config.toml\. Runs in .*/one"):
        open_run(tmp_path)
    with pytest.raises(RunNotFoundError, match="is a file; a run is a directory"):
        open_run(run.path / "config.toml")


def test_a_run_before_its_first_batch(run):
    assert load_metrics(run) == []
    assert load_evaluations(run) == []
    assert load_rollouts(run) == []
    with pytest.raises(RunNotFoundError, match="no rollouts yet: its first batch is not finished"):
        show(run)
    with pytest.raises(RunNotFoundError, match="no metrics yet"):
        reward_curve(run)


# show


def test_show_prints_the_last_batch_with_its_facts(sampled):
    text = printed(sampled)
    assert "batch 120, π_k is version 9" in text
    assert "mean reward 0.250" in text, "the mean of 1, 0, 0, 0: those without a reward do not count"
    assert "✓ 1  ·  2 tokens  ·  generated by versions 4 to 6  ·  lag 5  ·  advantage +1.000" in text
    assert "✗ 0  ·  2 tokens  ·  cut at the limit  ·  generated by version 4  ·  lag 5  ·  advantage -1.000" in text
    assert "? unscored  ·  2 tokens  ·  generated by version 4  ·  lag 5  ·  deadline of 5 s" in text
    assert "? failed  ·  0 tokens  ·  the sampler died" in text
    assert text.count("no signal") == 2


def test_show_says_which_completions_are_offline_data():
    row = dict.fromkeys(("reward", "advantage", "lag"), None) | {"outcome": "unscored", "masked": "", "reason": ""}
    row |= {"source": "file", "sampled": [True], "versions": [-1], "finished": True, "text": "x", "turns": []}
    out = io.StringIO()
    Console(file=out, width=200).print(render_completion(row, (0.0, 1.0)))
    text = out.getvalue()
    assert "? unscored  ·  1 token  ·  offline data" in text
    assert "None" not in text
    assert "-1" not in text


def test_show_prints_what_the_model_wrote_and_obeys_none_of_it(sampled):
    text = printed(sampled)
    assert "it is [bold]5[/bold]" in text, "rich markup is text"
    assert "␛[31mred" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"only": "right"}, ["it is [bold]5[/bold]"]),
        ({"only": "wrong", "prompt": 3}, ["␛[31mred"]),
        ({"only": "unscored"}, ["5", "5"]),
        ({"prompt": 8, "count": 1}, ["5"]),
    ],
)
def test_show_chooses(sampled, choice, expected):
    lines = [line.strip() for line in printed(sampled, **choice).splitlines() if line.startswith("  ")]
    assert [line for line in lines if line] == expected


def test_show_says_when_nothing_fits(sampled):
    assert "Prompt 4 is not in this batch; its prompts are 3, 8." in printed(sampled, prompt=4)
    assert "No completion here is right." in printed(sampled, prompt=8, only="right")


def test_right_is_what_has_the_greatest_reward_of_the_runs_range(tmp_path):
    run = Run.create(tmp_path, "ten", SETTINGS, "[task]\nreward_range = [0.0, 10.0]\n", {})
    texts = {0.0: "nothing", 1.0: "a little", 10.0: "all of it"}
    groups = [group(3, *(completion(Outcome.scored(reward), text) for reward, text in texts.items()))]
    run.record_rollouts(1, list(rollout_rows(groups, [[{}] * 3], batch=1, stage=1, pi_k_version=5)))
    assert "all of it" in (right := printed(run, only="right"))
    assert "a little" not in right
    assert "✗ 1 " in printed(run)


# The reward curve


def metrics(count: int, **more) -> list[dict]:
    return [{"batch": k, "stage": 1 + (k > count // 2), "reward_mean": k / count, **more} for k in range(1, count + 1)]


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_curve_is_drawn_from_whatever_metrics_there_are(run, count):
    for batch in metrics(count):
        run.record(batch)
    run.record({"batch": count + 1, "reward_mean": math.nan})
    png = reward_curve(run)
    assert png == run.path / "reward.png"
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_curve_shows_the_numbers_of_the_run():
    lags = [{"lag_min": k % 10, "lag_max": k % 10, "synced": k % 10 == 0} for k in range(1, 41)]
    batches = [m | lag for m, lag in zip(metrics(40, zero_variance_share=0.25), lags, strict=True)]
    evaluations = [
        {"batch": 0, "pass_at_1": 0.15, "pass_at_1_low": 0.12, "pass_at_1_high": 0.19},
        {"batch": 40, "pass_at_1": 0.98, "pass_at_1_low": 0.96, "pass_at_1_high": 1.0},
    ]
    figure = plots.draw("a run", batches, evaluations)
    axes: Any = figure.axes
    reward, variance, lag = axes
    dots = [line.get_ydata() for line in reward.get_lines() if line.get_label() == "reward of a batch"]
    assert [list(values) for values in dots] == [[k / 40 for k in range(1, 41)]]
    assert {text.get_text() for text in reward.texts} == {"15.0%", "98.0%"}
    low, high = (segment[:, 1].tolist() for segment in reward.containers[0].lines[2][0].get_segments())
    assert [low, high] == [pytest.approx([0.12, 0.19]), pytest.approx([0.96, 1.0])]
    legend = {text.get_text() for text in reward.get_legend().get_texts()}
    assert legend == {"weight sync", "new stage", "reward of a batch", "mean of 3 batches", "pass@1, held-out prompts"}
    filled, line = (patch.get_data() for patch in lag.patches)
    assert list(line.values) == list(filled.baseline) == [k % 10 for k in range(1, 41)]
    assert list(line.edges) == [k + 0.5 for k in range(41)]
    assert set(variance.patches[1].get_data().values) == {0.25}


def test_smoothing_keeps_a_constant_and_the_length():
    assert plots.smooth([2.0] * 7, 3) == [2.0] * 7
    assert plots.smooth([1.0], 9) == [1.0]


# The environment


def test_the_environment_says_what_one_needs_to_run_it_again():
    environment = collect_environment()
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["packages"]["lagrpo"]
    assert environment["threads"] == torch.get_num_threads()
    assert environment["device"] == "cpu"
    assert all(environment[key] for key in ("python", "platform", "cpu", "command", "started"))
    to_json(environment)


def test_git_state_of_a_clean_and_a_changed_repository(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_the_state_of_a_repository_is_read_without_its_lock(tmp_path):
    """A run that is killed while git looks would leave the lock behind, and nobody could commit any more."""
    for command in (["init"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    (tmp_path / "file").write_text("1")
    subprocess.run(["git", "-C", str(tmp_path), "add", "file"], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "commit", "-m", "1"], check=True, capture_output=True)
    os.utime(tmp_path / "file", (1, 1))  # status would write this down in the index
    before = (tmp_path / ".git" / "index").read_bytes()
    state = git_state(tmp_path)
    assert state is not None
    assert not state["dirty"]
    assert (tmp_path / ".git" / "index").read_bytes() == before


def test_the_examples_in_the_docstrings_hold():
    for module in (directory, plots):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0
