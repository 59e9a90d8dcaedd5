"""`lagrpo verify`: an untouched run agrees with its replay; every kind of change to its files is
found and located."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sample_task
import torch
from running import tiny_settings

import lagrpo
from lagrpo.cli import main
from lagrpo.core.advantages import group_mean
from lagrpo.errors import SettingsError
from lagrpo.runs import RunNotFoundError, load_events, load_metrics, load_rollouts
from lagrpo.verify import Difference, verify_run
from lagrpo.verify.tokens import read_tokens


def file_of(step: int) -> str:
    return f"rollouts/step-{step:06d}.parquet"


FIRST = file_of(1)


def trained(model: Path, root: Path, /, **sections: dict[str, Any]) -> Path:
    """A run of three batches at v = 2: versions 0 and 1 sample, and all are saved."""
    run = {"name": "run"} | sections.pop("run", {})
    sections.setdefault("checkpoint", {"export_every": 1})
    schedule = sections.pop("schedule", {})
    schedule = schedule if "constant_lag" in schedule else {"sync_every": 2} | schedule
    return lagrpo.train(tiny_settings(model, root, run=run, schedule=schedule, **sections)).run


@pytest.fixture(scope="module")
def untouched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="module")
def in_bfloat16(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp("bfloat16"), model={"dtype": "bfloat16"})


@pytest.fixture
def run(untouched: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return shutil.copytree(untouched, tmp_path / "run")


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], object], file: str = FIRST) -> None:
    table = pq.read_table(run / file)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / file)


def change_lines(run: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    change(lines)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )


def found_in(run: Path, where: str, what: str, count: int | None = 1) -> list[Difference]:
    return [
        d
        for d in verify_run(run, count).differences
        if d.where.startswith(where) and d.name == what
    ]


# Runs that nobody touched


def test_untouched_run_agrees_with_its_replay(untouched):
    report = verify_run(untouched, None)
    assert report.differences == []
    rows, done = load_rollouts(untouched), report.compared
    tokens = sum(len(row["token_ids"]) for row in rows)
    assert done["samples"] == done["rollout_logprobs"] == done["old_logprobs"] == tokens > 100
    assert report.undecided["samples"] == 0  # in float32
    assert done["advantages"] == 3 * len(rows) == 72  # excluded_reason, group_std, advantage
    assert (
        done["rewards"] == len(rows) + 2 * 2 * 3
    )  # of evaluations before and after: two prompts, three samples
    assert not report.skipped


def test_untouched_bfloat16_run_agrees_with_its_replay(in_bfloat16):
    report = verify_run(in_bfloat16, None)
    assert report.differences == []
    assert 0 < report.undecided["samples"] < report.compared["samples"]


@pytest.mark.parametrize(
    "sections",
    [
        {
            "loss": {"recipe": "red_drop"},
            "schedule": {"constant_lag": 1},
            "rollout": {"dynamic_sampling_rounds": 6, "temperature": 0.1, "num_generations": 3},
        },
        {"loss": {"recipe": "rloo"}, "schedule": {"sync_at_kl": 0.01, "num_iterations": 2}},
        {
            "loss": {"recipe": "grpo_masked"},
            "schedule": {"batches": 4, "ref_sync_every": 2},
            "rollout": {"dynamic_sampling_rounds": 2},
        },
    ],
    ids=lambda sections: sections["loss"]["recipe"],
)
def test_runs_of_other_recipes_and_schedules_agree_with_their_replay(model, tmp_path, sections):
    assert verify_run(trained(model, tmp_path, **sections), 12).differences == []


def test_finished_run_with_more_batches_agrees_with_its_replay(model, tmp_path):
    run = trained(model, tmp_path, schedule={"constant_lag": 2})
    lagrpo.train(resume=run, settings={"schedule.batches": 7})
    assert [line["staleness/max"] for line in load_metrics(run)] == [0, 1, 2, 0, 1, 2, 2]
    assert verify_run(run, 12).differences == []


def test_offline_completions_are_left_out(untouched, model, tmp_path):
    offline = {"data": str(untouched / FIRST), "fraction": 0.5}
    report = verify_run(trained(model, tmp_path, offline=offline, loss={"recipe": "asymre"}))
    assert report.differences == []
    assert report.skipped["completions, their samples and log-probs: offline data"] == 12
    assert report.compared["samples"] > 0


def test_missing_weights_are_named_with_the_setting_that_keeps_them(run):
    for folder in (run / "weights").glob("v*"):
        shutil.rmtree(folder)
    report = verify_run(run)
    assert report.differences == []
    by_first = [row for row in load_rollouts(run) if set(row["policy_versions"]) == {0}]
    assert report.compared["rollout_logprobs"] == sum(len(row["token_ids"]) for row in by_first)
    assert any("set checkpoint.export_every = 1" in why for why in report.skipped)


def test_verify_without_the_task_object_skips_rewards(model, tmp_path):
    run = lagrpo.train(
        tiny_settings(model, tmp_path, run={"name": "run"}), task=sample_task.load()
    ).run
    report = verify_run(run, 4)
    assert any("pass it to" in why for why in report.skipped)
    assert "rewards" not in report.compared
    report = verify_run(run, 4, task=sample_task.load())
    assert (report.differences, report.compared["rewards"]) == ([], 24 + 12)


# Changed rows


def test_flipped_token_is_found(run):
    recorded = load_rollouts(run, [1])[3]["token_ids"]
    flipped = 40 if recorded[2] != 40 else 41
    rewrite(run, lambda rows: rows[3]["token_ids"].__setitem__(2, flipped))
    first = found_in(run, FIRST, "token_ids", None)[0]
    assert first.where.startswith(f"{FIRST}, row 3 (prompt ")
    assert first.where.endswith(", token 2")
    assert (first.recorded, first.expected) == (flipped, recorded[2])


@pytest.mark.parametrize(
    ("name", "change", "column"),
    [("untouched", 1e-3, "rollout_logprobs"), ("in_bfloat16", 0.5, "old_logprobs")],
)
def test_changed_log_prob_is_found(request, tmp_path, name, change, column):
    run = shutil.copytree(request.getfixturevalue(name), tmp_path / "run")
    recorded = load_rollouts(run, [1])[5][column]
    rewrite(run, lambda rows: rows[5][column].__setitem__(1, recorded[1] - change))
    (found,) = found_in(run, FIRST, column, None)
    assert found.where.startswith(f"{FIRST}, row 5 ")
    assert found.where.endswith(", token 1")
    assert found.recorded == pytest.approx(recorded[1] - change, abs=1e-6)
    assert found.expected == pytest.approx(recorded[1], abs=change / 2)


def test_changed_reward_contradicts_task_advantages_and_metrics(run):
    recorded = load_rollouts(run, [1])[2]["reward"]
    rewrite(run, lambda rows: rows[2].__setitem__("reward", recorded + 0.25))
    (found,) = found_in(run, f"{FIRST}, row 2 ", "reward")
    assert (found.recorded, found.expected) == (recorded + 0.25, recorded)
    assert found_in(run, FIRST, "advantage")
    assert found_in(run, "metrics.jsonl", "reward")


def test_cells_that_do_not_fit_their_rows_are_found(run):
    """One in each group of four completions."""
    cells: list[tuple[int, int, str, Any]] = [
        (1, 3, "answer", "{"),
        (1, 7, "excluded_reason", "failed"),
        (2, 3, "completion", "other"),
        (2, 4, "prompt_token_ids", [5]),
        (3, 0, "prompt_id", 99),
        (3, 7, "staleness", 7),
    ]
    for step, row, column, value in cells:
        rewrite(
            run,
            lambda rows, cell=(row, column, value): rows[cell[0]].update({cell[1]: cell[2]}),
            file_of(step),
        )
    found = [d.where for d in verify_run(run, 1).differences]
    assert [
        c
        for c in cells
        if not any(where.startswith(f"{file_of(c[0])}, row {c[1]} ") for where in found)
    ] == []


def test_missing_completions_and_files_are_found(run):
    rewrite(run, lambda rows: rows[2].__setitem__("sample_index", 9))
    assert found_in(run, FIRST, "completions")[0].recorded == [0, 1, 9, 3]
    (run / FIRST).unlink()
    assert found_in(run, FIRST, "groups, and generated ones")[0].recorded == "no file"


def test_changed_version_contradicts_schedule_and_log_probs(run):
    rewrite(run, lambda rows: rows[4].update(policy_versions=[1] * len(rows[4]["policy_versions"])))
    (found,) = found_in(run, f"{FIRST}, row 4 ", "policy_versions")
    assert (found.recorded, found.expected) == (1, 0)
    assert {d.where.partition(" (")[0] for d in found_in(run, FIRST, "rollout_logprobs", None)} == {
        f"{FIRST}, row 4"
    }


def test_swapped_weights_are_found(run):
    weights = run / "weights"
    for old, new in (("v000001", "away"), ("v000003", "v000001"), ("away", "v000003")):
        (weights / old).rename(weights / new)
    wrong = [
        d.where[:28] for d in verify_run(run, None).differences if d.name == "rollout_logprobs"
    ]
    assert [wrong.count(f"rollouts/step-00000{n}.parquet") > 10 for n in (1, 2, 3)] == [
        False,
        True,
        True,
    ]


# Changed metrics and events


def test_changed_metrics_are_found(run):
    names = {
        "reward",
        "frac_reward_zero_std",
        "completions/clipped_ratio",
        "rollout/ess",
        "rollout/seq_kl",
    }
    names |= {"improvement"}  # of eight completions it is null
    change_lines(
        run,
        lambda lines: lines[1].update({name: (lines[1][name] or 0.0) + 0.125 for name in names}),
    )
    found = verify_run(run, 1).differences
    assert {d.where for d in found} == {"metrics.jsonl, line 2 (step 2)"}
    assert sorted(d.name for d in found) == sorted(names)
    assert [d.recorded for d in found] == pytest.approx(
        [(d.expected or 0.0) + 0.125 for d in found]
    )


@pytest.mark.parametrize(
    ("order", "what"),
    [((0, 2), "step and keys"), ((0, 1, 1, 2), "step and keys"), ((), "the line of step 1")],
)
def test_lines_that_are_missing_doubled_or_swapped_are_found(run, order, what):
    def reorder(lines):
        lines[:] = [lines[n] for n in order]

    change_lines(run, reorder)
    assert found_in(run, "metrics.jsonl", what)


def test_missing_event_of_a_weight_sync_is_found(run):
    (run / "events.jsonl").write_text("", encoding="utf-8")
    found = found_in(run, "events.jsonl", "weight_sync")
    assert [d.where for d in found] == ["events.jsonl, step 1", "events.jsonl, step 2"]
    assert found[1].expected == ("schedule", 1)


@pytest.mark.parametrize(("v", "delta", "reason"), [(3, 1e-9, "budget"), (2, 1e9, "cap")])
def test_measured_kl_decides_about_the_next_weight_sync(model, tmp_path, v, delta, reason):
    run = trained(model, tmp_path, schedule={"sync_every": v, "sync_at_kl": delta, "batches": 5})
    synced = [(e["step"], e["reason"]) for e in load_events(run) if e["event"] == "weight_sync"]
    assert synced == [(1, "start"), (3, reason), (5, reason)]
    assert verify_run(run, 1).differences == []
    change_lines(
        run,
        lambda lines: lines[3].__setitem__("rollout/seq_kl", 0.0 if reason == "budget" else 1e10),
    )
    assert [d.where for d in found_in(run, "events.jsonl", "weight_sync")] == [
        "events.jsonl, step 5"
    ]


# Wrong formulas


def sigma_of_unbiased(rewards_C, group_C, eps_std):
    """The formula of s1 in the place of s0; groups have four completions."""
    distance_C = rewards_C - group_mean(rewards_C, group_C)
    return (group_mean(distance_C.square(), group_C) * 4 / 3 + eps_std).sqrt()


@pytest.mark.parametrize(
    ("functions", "wrong", "columns"),
    [
        pytest.param(
            ["lagrpo.core.advantages.sigma", "lagrpo.training.metrics.sigma"],
            sigma_of_unbiased,
            {"advantage", "group_std"},
            id="deviation",
        ),
        pytest.param(
            ["lagrpo.training.metrics.ess", "lagrpo.core.kl.ess"],
            lambda ratio: ratio.sum() / 2,
            {"rollout/ess", "rollout/seq_ess"},
            id="sample size",
        ),
        pytest.param(
            ["lagrpo.training.metrics.limit", "lagrpo.core.ratios.limit"],
            lambda log_ratio: 2 * log_ratio,
            {"rollout/kl", "rollout/ratio_mean", "rollout/ess"},
            id="ratio",
        ),
        pytest.param(
            ["lagrpo.training.metrics.tv_terms", "lagrpo.core.kl.tv_terms"],
            lambda log_ratio, bounded: log_ratio.abs() / 4,
            {"rollout/seq_tv"},
            id="total variation",
        ),
    ],
)
def test_wrong_formula_in_training_is_found(
    model, tmp_path, monkeypatch, functions, wrong, columns
):
    """The formula is still wrong while the run is verified, so verify does not call it."""
    for function in functions:
        monkeypatch.setattr(function, wrong)
    run = trained(model, tmp_path)
    assert columns <= {difference.name for difference in verify_run(run, 1).differences}


# Changed evaluations


def test_changed_reward_of_an_evaluation_is_found(run):
    file = "evaluations/after.parquet"
    rewrite(run, lambda rows: rows[1]["rewards"].__setitem__(2, 2.0), file)
    assert found_in(run, f"{file}, row 1", "reward")


def test_changed_metric_of_an_evaluation_is_found(run):
    file = run / "evaluations/before.json"
    summary = json.loads(file.read_text(encoding="utf-8"))
    names = ("policy_version", "samples", "unscored", "pass@2")
    file.write_text(
        json.dumps(summary | {name: summary[name] + 1 for name in names}), encoding="utf-8"
    )
    found = verify_run(run, 1).differences
    assert {d.name for d in found if d.where == "evaluations/before.json"} == set(names)


# The command, and runs that cannot be read


def test_run_without_rollouts_or_with_a_broken_line_is_rejected(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text("{" + metrics.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(SettingsError, match="line 1"):
        verify_run(run)
    with pytest.raises(RunNotFoundError):
        verify_run(run.parent)
    metrics.unlink()
    shutil.rmtree(run / "rollouts")
    with pytest.raises(SettingsError, match="no rollouts"):
        verify_run(run)


def test_command_prints_differences_and_ends_with_1(run, capsys):
    main(["verify", str(run), "--rows", "2"])
    assert "\n0 differences." in capsys.readouterr().out
    rewrite(run, lambda rows: rows[6].__setitem__("advantage", 7.0))
    with pytest.raises(SystemExit) as end:
        main(["verify", str(run), "--rows", "2"])
    out = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 1
    assert f"{FIRST}, row 6 (prompt " in out
    assert "1 differences." in out


# Formulas


def test_token_interval_of_the_cdf_by_hand():
    """p = (1/2, 1/4, 1/4): token 1 has [1/2, 3/4)."""
    logits = torch.tensor([[4.0, 2.0, 2.0]], dtype=torch.float64).log().repeat(3, 1)
    tokens, uniform = torch.tensor([0, 1, 2]), torch.tensor([0.6, 0.6, 0.75], dtype=torch.float64)
    read = read_tokens(logits, tokens, uniform)
    torch.testing.assert_close(
        read.logp.exp(), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    )
    expected = [
        log(1.5),
        -log(1.5),
        0.0,
    ]  # log-odds from 1/2 to 0.6, outside and inside; at the edge of 3/4
    assert read.outside.tolist() == pytest.approx(expected, abs=1e-12)
    assert read.expected.tolist() == [1, 1, 2]
