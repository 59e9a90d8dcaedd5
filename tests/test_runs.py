"""A run on disk, written and read back."""

from __future__ import annotations

import contextlib
import datetime
import errno
import io
import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from rich.console import Console

from lagrpo import cli
from lagrpo.errors import SettingsError, explain_os_error
from lagrpo.runs import directory, files, plots
from lagrpo.runs.comparing import compare
from lagrpo.runs.directory import Run, default_name
from lagrpo.runs.environment import collect_environment, git_state, naming_start
from lagrpo.runs.files import write_atomically, write_directory_atomically, write_table
from lagrpo.runs.plots import reward_curve
from lagrpo.runs.reading import (
    RunNotFoundError,
    load_metrics,
    load_rollouts,
    rollout_batches,
)
from lagrpo.runs.recorded import RecordedRun, group_seeds, load_runs
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.terminal.show import show, show_comparison
from lagrpo.types import Completion, Group, JsonObject, Outcome, Prompt

SETTINGS = {
    "task": {"name": "arithmetic"},
    "loss": {"recipe": "grpo"},
    "schedule": {"sync_every": 10, "num_iterations": 1},
}


def completion(
    outcome: Outcome | None,
    text: str = "5",
    versions: tuple[int, ...] = (4, 4),
    finished: bool = True,
):
    count = len(versions)
    return Completion(
        token_ids=torch.arange(5, 5 + count),
        rollout_logp=torch.linspace(-0.1, -2.5, count, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.int64),
        finished=finished,
        text=text,
        outcome=outcome,
    )


def group(key: int, *completions: Completion) -> Group:
    return Group(
        Prompt(key, ({"role": "user", "content": f"2+{key}="},), {"answer": "5"}, (11, 12)),
        completions,
    )


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(
        tmp_path, "one", SETTINGS, "[schedule]\nsync_every = 10\n", {"python": "3.11"}
    )


@pytest.fixture
def sampled(run) -> Run:
    """A run with one batch: one group with a completion of every kind, and one group without
    signal."""
    mixed = group(
        3,
        completion(Outcome.scored(1.0), "it is [bold]5[/bold]", versions=(4, 6)),
        completion(Outcome.scored(0.0), "\x1b[31mred", finished=False),
        completion(Outcome.unscored("deadline of 5 s")),
        completion(Outcome.failed("the sampler died"), versions=()),
    )
    equal = group(8, completion(Outcome.scored(0.0)), completion(Outcome.scored(0.0)))
    columns = [
        [{"advantage": 1.0}, {"advantage": -1.0}, {}, {}],
        [{"advantage": 0.0, "excluded_reason": "zero_variance"}] * 2,
    ]
    run.record_rollouts(
        120, list(rollout_rows([mixed, equal], columns, step=120, policy_version=9))
    )
    return run


@pytest.mark.parametrize(
    ("columns", "width"),
    [pytest.param(None, 200, id="wide by default"), pytest.param("60", 60, id="COLUMNS")],
)
def test_file_has_wider_lines_than_a_terminal(sampled, monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show(sampled)
    rules = [line for line in out.getvalue().splitlines() if line.startswith("prompt 3 ")]
    assert [len(rule) for rule in rules] == [width]


def printed(run: Run | Path) -> str:
    console = Console(file=io.StringIO(), width=110)
    show(run, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# A new run


def test_default_run_names_are_descriptive_and_unique(tmp_path):
    names = [Run.create(tmp_path, None, SETTINGS, "", {}).path.name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"arithmetic-grpo-v10-i1-\d{8}-\d{6}(-\d)?", name) for name in names)
    odd = {"task": {"name": "data/weird name:load"}, "loss": {"recipe": "rloo"}}
    assert default_name(odd, datetime.datetime(2026, 1, 2, 3, 4, 5)) == "load-rloo-20260102-030405"


def test_directory_with_content_or_outside_of_the_root_is_rejected(run, tmp_path):
    with pytest.raises(FileExistsError, match="already exists"):
        Run.create(run.path.parent, "one", SETTINGS, "other", {})
    assert (run.path / "config.toml").read_text(encoding="utf-8") == "[schedule]\nsync_every = 10\n"
    (tmp_path / "empty").mkdir()
    assert Run.create(tmp_path, "empty", SETTINGS, "", {}).path == tmp_path / "empty"
    for name in ("", "..", "a/b"):
        with pytest.raises(ValueError, match=r"run\.name"):
            Run.create(tmp_path, name, SETTINGS, "", {})


# Metrics and events


def test_metrics_come_back_with_null_for_what_is_not_finite(run):
    run.record(
        {
            "step": 1,
            "loss": math.nan,
            "rollout/kl": math.inf,
            "reward": np.float32(0.5),
            "learning_rate": None,
        }
    )
    assert load_metrics(run) == [
        {"step": 1, "loss": None, "rollout/kl": None, "reward": 0.5, "learning_rate": None}
    ]
    with pytest.raises(TypeError):
        run.record({"step": torch.tensor(1.0)})  # type: ignore[dict-item]


def test_line_is_on_the_disk_when_it_is_recorded(run, monkeypatch):
    """Else a checkpoint that is written after it may survive a power cut that the line does not."""
    on_disk: dict[Path, str] = {}

    def sync(path: Path) -> None:
        on_disk[path] = path.read_text(encoding="utf-8")

    monkeypatch.setattr(directory, "sync_to_disk", sync)
    run.record({"step": 1, "reward": 0.5})
    assert json.loads(on_disk[run.metrics].splitlines()[-1])["reward"] == 0.5
    run.record_event("weight_sync", 1)
    assert json.loads(on_disk[run.events].splitlines()[-1])["event"] == "weight_sync"


def test_torn_last_line_is_skipped(run):
    run.record({"step": 1})
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert load_metrics(run) == [{"step": 1}]


def test_broken_line_is_an_error_with_its_number(run):
    run.metrics.write_text('{"step": 1}\n{"bat\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        load_metrics(run)


# Atomic writes


def test_weights_are_replaced_as_a_whole_or_not_at_all(run):
    def write(*names: str):
        return lambda folder: [(folder / name).write_text(name, encoding="utf-8") for name in names]

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    run.record_weights(write("config.json", "old.safetensors"))
    final = run.record_weights(write("config.json", "new.safetensors"))
    with pytest.raises(KeyboardInterrupt):
        write_directory_atomically(final, fail)
    assert sorted(p.name for p in final.iterdir()) == ["config.json", "new.safetensors"]
    assert run.record_weights(write("config.json"), version=120).name == "v000120"
    assert sorted(p.name for p in (run.path / "weights").iterdir()) == ["final", "v000120"]


# Rollouts and evaluations


def test_rollouts_are_read_back_bit_for_bit(sampled):
    rows = load_rollouts(sampled)
    assert [(row["prompt_id"], row["sample_index"]) for row in rows] == [
        (3, 0),
        (3, 1),
        (3, 2),
        (3, 3),
        (8, 0),
        (8, 1),
    ]
    first = rows[0]
    assert first["rollout_logprobs"] == [float(np.float32(-0.1)), -2.5]
    assert (first["token_ids"], first["policy_versions"], first["prompt_token_ids"]) == (
        [5, 6],
        [4, 6],
        [11, 12],
    )
    assert (first["step"], first["policy_version"], first["prompt_text"]) == (120, 9, "2+3=")
    assert json.loads(first["answer"]) == {"answer": "5"}
    assert [row["staleness"] for row in rows] == [9 - 4, 5, 5, None, 5, 5]
    assert [
        (row["outcome"], row["reward"], row["advantage"], row["excluded_reason"]) for row in rows
    ] == [
        ("scored", 1.0, 1.0, ""),
        ("scored", 0.0, -1.0, ""),
        ("unscored", None, None, "unscored"),
        ("failed", None, None, "failed"),
        ("scored", 0.0, 0.0, "zero_variance"),
        ("scored", 0.0, 0.0, "zero_variance"),
    ]
    assert [row["reason"] for row in rows[2:4]] == ["deadline of 5 s", "the sampler died"]


def test_rollouts_of_another_schema_are_rejected(sampled):
    import pyarrow.parquet as pq

    path = sampled.path / "rollouts" / "step-000120.parquet"
    assert pq.read_schema(path).equals(rollout_schema())
    table = pq.read_table(path).replace_schema_metadata({"lagrpo.schema": "lagrpo.rollouts/9"})
    pq.write_table(table, path)
    with pytest.raises(ValueError, match=r"lagrpo.rollouts/9"):
        load_rollouts(sampled)
    with pytest.raises(SettingsError, match=r"lagrpo.rollouts/9"):
        show(sampled)


def test_batches_are_chosen_by_number(sampled):
    judged = group(1, completion(Outcome.scored(1.0)))
    sampled.record_rollouts(7, list(rollout_rows([judged], [[{}]], step=7, policy_version=4)))
    (sampled.path / "rollouts" / ".step-000009.parquet.1-ab.tmp").touch()
    assert rollout_batches(sampled) == [7, 120]
    assert load_rollouts(sampled, [7], columns=["reward"]) == [{"reward": 1.0}]
    with pytest.raises(RunNotFoundError, match="no rollouts of step 8"):
        load_rollouts(sampled, [8])


# show


def test_show_prints_the_last_batch_with_its_facts(sampled):
    text = printed(sampled)
    assert "batch 120, π_k is version 9" in text
    assert "mean reward 0.250" in text, (
        "the mean of 1, 0, 0, 0: completions without a reward do not count"
    )
    assert (
        "✓ 1  ·  2 tokens  ·  generated by versions 4 to 6  ·  staleness 5  ·  advantage +1.000"
        in text
    )
    assert (
        "✗ 0  ·  2 tokens  ·  cut at the limit  ·  generated by version 4  ·  staleness 5  "
        "·  advantage -1.000" in text
    )
    assert (
        "? unscored  ·  2 tokens  ·  generated by version 4  ·  staleness 5  ·  deadline of 5 s"
        in text
    )
    assert "? failed  ·  0 tokens  ·  the sampler died" in text
    assert "2 × ✗ 0" in text
    assert text.count("no signal") == 1, "equal completions are printed once"
    assert "it is [bold]5[/bold]" in text, "rich markup is text"
    assert "␛[31mred" in text
    assert "\x1b" not in text


def test_show_prints_characters_that_act_on_the_terminal_as_their_names(tmp_path):
    active = "\x1b]8;;u\x07\x9bm\u202e\u2028\u200b"
    run = Run.create(tmp_path, f"run{active}", SETTINGS, "", {})
    reason = Outcome.unscored(f"reason {active}")
    groups = [group(3, completion(Outcome.scored(1.0), active), completion(reason))]
    rows = list(rollout_rows(groups, [[{}] * 2], step=1, policy_version=5, rewards=[active]))
    run.record_rollouts(1, rows)
    run.record_evaluation("before.set", {"set": active, "step": 0}, [])
    text = printed(run)
    assert not set(active) & set(text) - set("]8;um")
    shown = text.count("␛]8;;u␇")
    assert shown == 6, "path, evaluation set, completion, reason, two rewards"


def test_show_opens_on_the_last_batch_with_a_signal(sampled):
    flat = group(1, completion(Outcome.scored(1.0)), completion(Outcome.scored(1.0)))
    columns = [[{"advantage": 0.0}] * 2]
    sampled.record_rollouts(121, list(rollout_rows([flat], columns, step=121, policy_version=10)))
    assert "batch 120, π_k is version 9  ·  the last batch with a signal" in printed(sampled)
    (sampled.path / "rollouts" / "step-000120.parquet").unlink()
    assert "batch 121, π_k is version 10  ·  2 completions" in printed(sampled)


def test_right_is_the_largest_reward_of_the_runs_range(tmp_path):
    run = Run.create(tmp_path, "ten", SETTINGS, "[[task.rewards]]\nrange = [0.0, 10.0]\n", {})
    texts = {0.0: "nothing", 1.0: "a little", 10.0: "all of it"}
    groups = [
        group(3, *(completion(Outcome.scored(reward), text) for reward, text in texts.items()))
    ]
    run.record_rollouts(1, list(rollout_rows(groups, [[{}] * 3], step=1, policy_version=5)))
    marks = {
        line.split()[0] + " " + line.split()[1]
        for line in printed(run).splitlines()
        if "token" in line
    }
    assert marks == {"✗ 0", "✗ 1", "✓ 10"}


# Files that cannot be written


def write_line(path: Path) -> None:
    Run(path.parent).record_event("end", 1)


WRITERS = {
    "file": lambda path: write_atomically(path, "text"),
    "table": lambda path: write_table(path, [{"a": 1}]),
    "directory": lambda path: write_directory_atomically(path, lambda made: (made / "x").touch()),
    "line": write_line,
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_file_that_cannot_be_written_is_named_with_the_reason(tmp_path, monkeypatch, write, number):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(files, "sync_to_disk", fail)
    monkeypatch.setattr(directory, "sync_to_disk", fail)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        write(path)
    monkeypatch.undo()
    assert explain_os_error(caught.value).startswith(f"{path}: {os.strerror(number)}")
    assert [file.name for file in tmp_path.iterdir()] in ([], ["events.jsonl"])


def test_temporary_name_that_cannot_be_removed_does_not_hide_the_reason(tmp_path, monkeypatch):
    def fail(*_: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Path, "write_bytes", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OSError, match="read-only") as caught:
        write_atomically(tmp_path / "a", "text")
    assert caught.value.filename == str(tmp_path / "a")


def test_missing_source_is_named_and_not_the_file_that_is_written(tmp_path):
    def copy(scratch: Path) -> None:
        shutil.copyfile("nosuch", scratch)

    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "a", copy)
    assert caught.value.filename == "nosuch"


# Several runs


def recorded(name: str, **sections: JsonObject) -> RecordedRun:
    """A run that has recorded nothing yet."""
    settings = {"run": {"name": name, "output_dir": "runs"}} | sections
    settings["run"] = settings["run"] | sections.get("run", {})
    return RecordedRun(Path(name), name, settings, [], [])


def test_runs_that_differ_only_in_their_seed_are_one_method():
    runs = [
        recorded("v-1-seed0", run={"seed": 0}, schedule={"sync_every": 1}),
        recorded("v-10-seed0", run={"seed": 0}, schedule={"sync_every": 10}),
        recorded(
            "v-1-seed1", run={"seed": 1, "output_dir": "elsewhere"}, schedule={"sync_every": 1}
        ),
        recorded("again", run={"seed": 0}, schedule={"sync_every": 1}),
        recorded("v-10-seed10", run={"seed": 10}, schedule={"sync_every": 10}),
    ]
    methods = group_seeds(runs)
    assert {
        name: [run.name for run in runs_of_method] for name, runs_of_method in methods.items()
    } == {
        "v-1": ["v-1-seed0", "v-1-seed1"],
        "v-10": ["v-10-seed0", "v-10-seed10"],
        "again": ["again"],
    }


def test_methods_have_distinct_names():
    """By the beginning of its names the first method would be x, and the second one x-1."""
    runs = [
        recorded("x-1", run={"seed": 1}),
        recorded("x-2", run={"seed": 2}),
        recorded("x-1-1", run={"seed": 1}, schedule={"sync_every": 4}),
        recorded("x-1-2", run={"seed": 2}, schedule={"sync_every": 4}),
        recorded("x", schedule={"sync_every": 8}),
    ]
    methods = group_seeds(runs)
    assert {name: len(runs_of_method) for name, runs_of_method in methods.items()} == {
        "x-1": 2,
        "x-1-1": 2,
        "x": 1,
    }


def test_several_runs_are_read_with_their_evaluations_and_distinct_names(run, tmp_path):
    other = Run.create(tmp_path / "more", "one", SETTINGS, "[run]\nseed = 4\n", {})
    summary = {"step": 0, "pass@1": 0.5, "pass@1_low": 0.3, "pass@1_high": 0.7}
    other.record_evaluation("before", summary, [])
    other.record({"step": 1, "reward": 0.25})
    first, second = load_runs([run, other.path])
    assert (first.name, first.metrics, first.evaluations, first.seed) == (
        str(run.path),
        [],
        [],
        None,
    )
    assert (second.name, second.seed) == (str(other.path), 4)
    assert second.metrics == [{"step": 1, "reward": 0.25}]
    assert second.evaluations == [summary | {"name": "before"}]


def test_runs_of_a_table_have_distinct_names(run, tmp_path, monkeypatch):
    other = Run.create(tmp_path / "more", "one", SETTINGS, "[run]\nseed = 4\n", {})
    assert compare([run, other.path]).index.tolist() == [str(run.path), str(other.path)]
    monkeypatch.chdir(other.path)
    assert compare(".").index.tolist() == ["one"]


@pytest.mark.parametrize(
    ("sync_every", "last", "largest", "reward"),
    [(1, None, 9, 6.5), (4, None, 3, 9.5), (4, 2, 3, 10.5), (16, None, 9, 5.5)],
    ids=["on-policy: 10 batches", "a cycle of 4", "two batches", "fewer than a cycle"],
)
def test_recent_metrics_cover_a_cycle_of_weight_syncs(tmp_path, sync_every, last, largest, reward):
    """Batch b of 12 has the reward b - 1 and the staleness (b - 1) mod 4, but 9 in batch 5."""
    config = f"[schedule]\nsync_every = {sync_every}\n"
    run = Run.create(tmp_path, "one", SETTINGS, config, {})
    for b in range(12):
        run.record({"step": b + 1, "reward": b, "staleness/max": 9 if b == 4 else b % 4})
    row = compare(run, last).loc["one"]
    assert (row["staleness/max"], row["reward"]) == (largest, reward)


def test_compare_prints_each_run_with_its_intervals(tmp_path, capsys):
    for name, value in (("first", 0.25), ("second", 0.5)):
        run = Run.create(tmp_path, name, SETTINGS, f"[run]\nseed = {value}\n", {})
        run.record({"step": 1, "reward": value})
        summary = {"step": 1, "pass@1": value, "pass@1_low": 0.1, "pass@1_high": 0.9}
        run.record_evaluation("after", summary, [])
    cli.main(["compare", str(tmp_path / "first"), str(tmp_path / "second")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["first", "second"]
    lines = {line.split()[0]: line.split()[1:] for line in printed[1:]}
    assert lines["reward"] == ["0.25", "0.5"]
    assert lines["eval/pass@1"] == ["0.25", "0.5"]
    assert [line.split()[2:] for line in printed[-2:]] == [["0.1", "0.1"], ["0.9", "0.9"]]


@pytest.mark.parametrize("columns", [80, 100])
def test_comparison_of_five_runs_with_long_names_fits_the_terminal(tmp_path, columns):
    names = [f"{'long-name-' * 4}{number}" for number in range(5)]
    for number, name in enumerate(names):
        recipe = f'[loss]\nrecipe = "rec_one_side_nois_wide_{number}"\n'
        run = Run.create(tmp_path, name, SETTINGS, recipe, {})
        run.record({"step": 1, "reward": number / 4, "rollout/kl": 1.2345e-5})
    output = io.StringIO()
    show_comparison(
        [tmp_path / name for name in names], console=Console(file=output, width=columns)
    )
    lines = output.getvalue().splitlines()
    assert [line.split() for line in lines[:5]] == [[str(n + 1), f"{names[n]}"] for n in range(5)]
    assert max(map(len, lines)) <= columns
    (rewards,) = [line.split()[1:] for line in lines if line.startswith("reward")]
    assert rewards == ["0", "0.25", "0.5", "0.75", "1"]


# The reward curve and the environment


def test_curve_of_a_run_with_dollars_in_its_name_is_drawn(tmp_path):
    run = Run.create(tmp_path, "a$_$b", SETTINGS, "", {})
    run.record({"step": 1, "reward": 0.5})
    assert reward_curve(run).is_file()


def test_curve_shows_the_numbers_of_the_run(run):
    before = {"step": 0, "pass@1": 0.15, "pass@1_low": 0.12, "pass@1_high": 0.19}
    steps = [
        {"step": k, "reward": math.nan if k == 3 else k / 40, "frac_reward_zero_std": 0.25}
        for k in range(1, 41)
    ]
    axes: Any = plots.draw("a run", steps, [before]).axes
    assert axes[0].get_lines()[0].get_ydata()[[0, 39]].tolist() == [1 / 40, 1.0]
    assert list(axes[1].get_lines()[0].get_ydata()) == [0.25] * 40
    run.record({"step": 1, "reward": 0.5})
    assert reward_curve(run).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_environment_file_names_the_computation():
    environment = collect_environment()
    # PyPI's package 2.13.0 calls itself 2.13.0+cu130 where it was built for CUDA.
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert environment["threads"] == torch.get_num_threads()
    assert all(environment[key] for key in ("python", "platform", "cpu", "command", "started"))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    "config",
    [
        ("core.fsmonitor", "PROGRAM"),
        ("filter.f.clean", "PROGRAM"),
        ("filter.f.process", "PROGRAM"),
        ("core.hooksPath", "."),
        ("include.path", "included"),
    ],
    ids=lambda config: config[0],
)
def test_state_of_a_repository_runs_no_program_of_its_config(tmp_path, config):
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True)

    program = tmp_path / "post-index-change"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/executed'\ncat\n", encoding="utf-8")
    program.chmod(0o700)
    (tmp_path / "file").write_text("1", encoding="utf-8")
    (tmp_path / ".gitattributes").write_text("file filter=f\n", encoding="utf-8")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "1")
    included = tmp_path / ".git" / "included"
    included.write_text(f'[filter "f"]\nclean = {program}\nrequired = true\n', encoding="utf-8")
    name, value = config
    git("config", name, value.replace("PROGRAM", str(program)))

    os.utime(tmp_path / "file", (1, 1))  # git compares the contents
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is False
    assert not (tmp_path / "executed").exists()
    (tmp_path / "file").write_text("2", encoding="utf-8")
    state = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is True
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def moved(tmp_path, monkeypatch) -> Path:
    """The directory in which a run started; the test runs in another one, with the run in `run`."""
    start = tmp_path / "start"
    settings = {
        "model": {"path": "models/tiny"},
        "task": {"data": "train.jsonl", "rewards": [{"reward": "scores:length"}]},
        "offline": {"data": ["old/*.parquet"]},
    }
    files_there = ("models/tiny/config.json", "train.jsonl", "scores.py", "old/1.parquet")
    for name in (*files_there, ".venv-vllm/bin/python"):
        file = start / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    run = tmp_path / "elsewhere" / "run"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    (run / "environment.json").write_text(json.dumps({"directory": str(start)}), encoding="utf-8")
    monkeypatch.chdir(run.parent)
    return start


def problem_elsewhere(problem: str) -> str:
    with pytest.raises(SettingsError) as caught, naming_start(Path("run")):
        raise SettingsError(problem)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["models/tiny", "train.jsonl", "scores:length", "old/*.parquet", ".venv-vllm/bin/python"],
)
def test_error_about_a_relative_path_names_the_directory_in_which_the_run_started(moved, name):
    assert str(moved) in problem_elsewhere(f"no {name!r} here")


def test_error_about_something_else_does_not_name_the_directory_of_the_start(moved):
    assert str(moved) not in problem_elsewhere("schedule.batches = 0")


def test_file_of_another_directory_with_the_name_of_the_runs_file_is_reported(moved, caplog):
    Path("train.jsonl").touch()
    with naming_start(Path("run")):
        pass
    assert "train.jsonl" in caplog.text
    assert str(moved) in caplog.text


def test_nothing_is_reported_in_the_directory_in_which_the_run_started(moved, monkeypatch, caplog):
    run = Path("run").absolute()
    monkeypatch.chdir(moved)
    with naming_start(run):
        pass
    assert not caplog.text
