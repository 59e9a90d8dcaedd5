"""`lagrpo verify`: a run that was not touched agrees with its replay; every corruption is named with its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sample_task
import torch
from chaos import merged
from running import tiny_settings
from tiny import save_tiny

import lagrpo
from lagrpo.cli import main
from lagrpo.objective.composition import Composition
from lagrpo.replay import verify_run
from lagrpo.replay.findings import Difference, Report, UnreadableError
from lagrpo.replay.formulas import ADVANTAGES, advantages
from lagrpo.replay.judging import compare
from lagrpo.replay.tokens import read_tokens, spans
from lagrpo.runs import RunNotFoundError, load_events, load_rollouts
from lagrpo.types import Outcome

pytestmark = pytest.mark.usefixtures("shared_templates")

FIRST = "rollouts/step-000001.parquet"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def trained(model: Path, root: Path, /, **sections: dict[str, Any]) -> Path:
    """A run of three batches at v = 2: versions 0 and 1 draw, and all are saved."""
    run = {"name": "run", "save_every": 1} | sections.pop("run", {})
    schedule = {"v": 2} | sections.pop("schedule", {})
    return lagrpo.train(tiny_settings(model, root, run=run, schedule=schedule, **sections)).run


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def either(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp(request.param), model={"dtype": request.param})


@pytest.fixture(scope="module")
def untouched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(model, tmp_path_factory.mktemp("untouched"))


@pytest.fixture
def run(untouched: Path, tmp_path: Path) -> Path:
    """A copy to corrupt."""
    return shutil.copytree(untouched, tmp_path / "run")


def rewrite(run: Path, change: Callable[[list[dict[str, Any]]], None], file: str = FIRST) -> None:
    """Changes rows of a Parquet file in place."""
    table = pq.read_table(run / file)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), run / file)


def named(report: Report, file: str, name: str) -> list[Difference]:
    return [d for d in report.differences if d.file == file and d.name == name]


def compared(report: Report) -> dict[str, int]:
    return {check.name: check.compared for check in report.checks}


def test_a_run_that_was_not_touched_agrees_with_its_replay(either):
    report = verify_run(either, everything=True)
    assert report.differences == []
    assert all(check.compared for check in report.checks)
    rows = load_rollouts(either)
    tokens = sum(len(row["token_ids"]) for row in rows)
    done = compared(report)
    assert done["samples"] == done["log α, version 0"] + done["log α, version 1"] == tokens
    assert done["advantages"] == done["rewards"] == len(rows) == 24
    assert done["log π_k - log α"] == 2 * len(rows)  # log_ratio and kl_alpha
    assert {why for _, why in report.skipped} == {
        "their token ids are not recorded",
        "not recomputed (clocks, gradients, parity checks, other policies, intervals, Theorem 1)",
    }


def test_samples_are_decided_in_float32_and_random_numbers_of_other_addresses_would_not_do(untouched):
    samples = next(check for check in verify_run(untouched, everything=True).checks if check.name == "samples")
    assert samples.undecided == 0
    assert samples.agree == samples.compared > 100
    caught = int(samples.note.rpartition(" addresses ")[2].partition("%")[0])
    assert caught > 80


def test_a_flipped_token_is_found(run):
    recorded = load_rollouts(run, [1])[3]["token_ids"]
    flipped = 40 if recorded[2] != 40 else 41
    rewrite(run, lambda rows: rows[3]["token_ids"].__setitem__(2, flipped))
    first = named(verify_run(run), FIRST, "token_ids")[0]
    assert first.place.startswith("row 3 (prompt ")
    assert ", token 2 at uniform 0." in first.place
    assert (first.recorded, first.replayed) == (flipped, recorded[2])


def test_a_changed_log_prob_is_found(run):
    recorded = load_rollouts(run, [1])[5]["logp_alpha"]
    rewrite(run, lambda rows: rows[5]["logp_alpha"].__setitem__(1, recorded[1] - 1e-3))
    (found,) = named(verify_run(run), FIRST, "logp_alpha")
    assert found.place.startswith("row 5 ")
    assert found.place.endswith(", token 1")
    assert found.recorded == pytest.approx(recorded[1] - 1e-3, abs=1e-6)
    assert found.replayed == pytest.approx(recorded[1], abs=1e-5)


def test_a_changed_log_prob_is_found_in_bfloat16(model, tmp_path):
    run = trained(model, tmp_path, model={"dtype": "bfloat16"}, schedule={"batches": 1})
    recorded = load_rollouts(run, [1])[5]["logp_alpha"]
    rewrite(run, lambda rows: rows[5]["logp_alpha"].__setitem__(1, recorded[1] - 0.5))
    (found,) = named(verify_run(run), FIRST, "logp_alpha")
    assert found.recorded == pytest.approx(recorded[1] - 0.5, abs=1e-6)


def test_a_changed_reward_is_found_by_the_judge_and_by_the_advantages(run):
    recorded = load_rollouts(run, [1])[2]["reward"]
    rewrite(run, lambda rows: rows[2].__setitem__("reward", recorded + 0.25))
    report = verify_run(run)
    (found,) = named(report, FIRST, "reward")
    assert found.place.startswith("row 2 ")
    assert (found.recorded, found.replayed) == (recorded + 0.25, recorded)
    assert named(report, FIRST, "advantage")
    assert named(report, "metrics.jsonl", "reward_mean")


def test_a_changed_advantage_is_found(run):
    recorded = load_rollouts(run, [1])[6]["advantage"]
    rewrite(run, lambda rows: rows[6].__setitem__("advantage", recorded + 1e-4))
    (found,) = verify_run(run).differences
    assert (found.file, found.name, found.recorded) == (FIRST, "advantage", recorded + 1e-4)
    assert found.place.startswith("row 6 ")
    assert found.replayed == pytest.approx(recorded, abs=1e-6)


CHANGED = ["reward_mean", "lag_mean", "tokens_sampled", "finished_share", "sigma_mean", "sigma_bin_4", "pinsker"]
CHANGED += [
    "tv_sequence",
    "chi2_sequence",
    "lag_ess",
    "lag_reliable",
    "lag_improvement",
    "lag_identity",
]


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_metric_is_found(run, name):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    recorded = lines[1][name]
    lines[1][name] = recorded + 0.125
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = verify_run(run, rows=1).differences
    assert (found.file, found.place, found.name) == ("metrics.jsonl", "line 2 (batch 2)", name)
    assert (found.recorded, found.replayed) == (recorded + 0.125, pytest.approx(recorded))


def test_the_rounding_of_a_mean_of_float32_ratios_is_no_difference(run):
    """At ratios near 1 a spacing of float32 is 1.2e-7, whatever the distance from 1."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["ratio_mean"] == 1
    lines[0]["ratio_mean"] += 2**-21
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert verify_run(run, rows=1).differences == []


def of_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def with_metrics(run: Path, lines: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("order", "name"),
    [((0, 2), "batch"), ((1, 2), "batch"), ((0, 1, 1, 2), "batch"), ((1, 0, 2), "batch"), ((), "the line of batch 1")],
)
def test_lines_of_metrics_that_are_missing_doubled_or_swapped_are_found(run, order, name):
    lines = of_metrics(run)
    with_metrics(run, [lines[n] for n in order])
    assert named(verify_run(run, rows=1), "metrics.jsonl", name)


def test_the_last_batch_may_lack_its_line_as_a_kill_leaves_it(run):
    with_metrics(run, of_metrics(run)[:-1])
    (found,) = verify_run(run, rows=1).differences
    assert (found.file, found.name, found.recorded, found.replayed) == ("evaluations/after.json", "batch", 3, 2)
    (run / "evaluations/after.json").unlink()
    assert verify_run(run, rows=1).differences == []


def test_a_line_without_one_of_its_keys_is_found(run):
    lines = of_metrics(run)
    del lines[1]["loss"]
    with_metrics(run, lines)
    (found,) = named(verify_run(run, rows=1), "metrics.jsonl", "keys")
    assert found.place == "line 2"
    del lines[1]["version"]
    with_metrics(run, lines)
    with pytest.raises(UnreadableError, match="line 2: version is None, not a number"):
        verify_run(run, rows=1)


@pytest.mark.parametrize(
    ("column", "value"),
    [("batch", None), ("stage", 2), ("epoch", None), ("prompt_key", None), ("finished", None), ("pi_k_version", None),
     ("gold", "{"), ("gold", None), ("log_ratio", None), ("kl_alpha", None)],
)  # fmt: skip
def test_a_cell_that_does_not_fit_its_row_is_named(run, column, value):
    rewrite(run, lambda rows: rows[3].__setitem__(column, value))
    found = [d for d in verify_run(run, rows=1).differences if d.file == FIRST and d.place.startswith("row 3 ")]
    assert found[0].name in (column, "log_ratio" if column == "kl_alpha" else column)


def test_a_batch_without_rows_and_completions_that_are_numbered_wrong_are_found(run):
    rewrite(run, lambda rows: rows[2].__setitem__("completion", 9))
    (found,) = named(verify_run(run, rows=1), FIRST, "numbers of the completions")
    assert (found.recorded, found.replayed) == ([0, 1, 9, 3], [0, 1, 2, 3])
    rewrite(run, lambda rows: rows.clear())
    (found,) = named(verify_run(run, rows=1), FIRST, "number of groups")
    assert (found.recorded, found.replayed) == (0, 2)


def test_a_weight_sync_that_the_schedule_does_not_have_is_found(run):
    """At v = 2 versions 0, 1 and 1 draw; the files are made to agree on 0, 1 and 2."""
    lines = of_metrics(run)
    lines[2].update(synced=1, lag_min=0, lag_mean=0.0, lag_max=0)
    with_metrics(run, lines)
    (found,) = named(verify_run(run, rows=1), "metrics.jsonl", "synced")
    assert (found.place, found.recorded, found.replayed) == ("line 3 (batch 3)", 1, 0)


def test_an_event_of_a_weight_sync_that_is_gone_is_found(run):
    (run / "events.jsonl").write_text("")
    found = named(verify_run(run, rows=1), "events.jsonl", "weight_sync")
    assert [d.place for d in found] == ["batch 1", "batch 2"]
    assert found[1].replayed == {"reason": "schedule", "version": 1}


@pytest.mark.parametrize(
    ("schedule", "metric", "reason"),
    [
        ({"kind": "budget", "v": 3, "delta": 1e-9}, "kl_sequence", "budget"),
        ({"kind": "budget", "v": 2, "delta": 1e9}, "kl_sequence", "cap"),
    ],
)
def test_what_a_batch_says_decides_about_the_weight_sync_before_the_next(model, tmp_path, schedule, metric, reason):
    run = trained(model, tmp_path, schedule={**schedule, "batches": 5})
    synced = [(e["batch"], e["reason"]) for e in load_events(run) if e["event"] == "weight_sync"]
    assert synced == [(1, "start"), (3, reason), (5, reason)]
    assert verify_run(run, rows=1).differences == []
    lines = of_metrics(run)
    lines[3][metric] = 0.0 if reason == "budget" else 1e10
    with_metrics(run, lines)
    assert [d.place for d in named(verify_run(run, rows=1), "events.jsonl", "weight_sync")] == ["batch 5"]


def test_completions_that_are_said_to_come_from_a_file_are_found(run):
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows[:4]:
            row["source"] = "file"

    rewrite(run, change)
    (found,) = named(verify_run(run, rows=1), FIRST, "number of groups that the sampler generated")
    assert (found.recorded, found.replayed) == (1, 2)


def test_a_changed_divergence_is_found(run):
    file = "rollouts/step-000003.parquet"  # generated by version 1, learned by version 2
    (row, recorded), *_ = ((n, r["kl_alpha"]) for n, r in enumerate(load_rollouts(run, [3])) if r["kl_alpha"])
    rewrite(run, lambda rows: rows[row].__setitem__("kl_alpha", recorded + 0.01), file)
    report = verify_run(run, everything=True)
    (found,) = named(report, file, "kl_alpha")
    assert found.replayed == pytest.approx(recorded, abs=1e-4)
    assert named(report, "metrics.jsonl", "kl_sequence")


def test_a_swapped_version_is_found_by_the_schedule_and_by_the_log_probs(run):
    rewrite(run, lambda rows: rows[4].update(versions=[1] * len(rows[4]["versions"])))
    report = verify_run(run, everything=True)
    (found,) = named(report, FIRST, "versions")
    assert found.place.startswith("row 4 ")
    assert (found.recorded, found.replayed) == (1, 0)
    assert {d.place.partition(" (")[0] for d in named(report, FIRST, "logp_alpha")} == {"row 4"}


def test_swapped_weights_are_found(run):
    weights = run / "weights"
    (weights / "v000001").rename(weights / "away")
    (weights / "v000003").rename(weights / "v000001")
    (weights / "away").rename(weights / "v000003")
    report = verify_run(run, everything=True)
    of = {name: len(named(report, f"rollouts/step-00000{n}.parquet", "logp_alpha")) for n, name in enumerate("abc", 1)}
    assert of["a"] == 0  # version 0
    assert of["b"] > 10
    assert of["c"] > 10


def test_a_changed_evaluation_is_found(run):
    file = "evaluations/after.parquet"
    rewrite(run, lambda rows: rows[1]["rewards"].__setitem__(2, 2.0), file)
    report = verify_run(run, rows=1)
    assert named(report, file, "reward")[0].place.startswith("row 1 (prompt ")
    assert named(report, file, "reward_mean")


@pytest.mark.parametrize("column", ["prompt_key", "prompt", "gold"])
def test_another_prompt_in_an_evaluation_is_found(run, column):
    def change(rows: list[dict[str, Any]]) -> None:
        rows[1][column] = 99 if column == "prompt_key" else rows[1][column] + "?"

    rewrite(run, change, "evaluations/after.parquet")
    name = "prompt_key of all rows" if column == "prompt_key" else column
    assert named(verify_run(run, rows=1), "evaluations/after.parquet", name)


@pytest.mark.parametrize("name", ["batch", "version", "samples", "prompts", "without_reward", "pass_at_1", "pass_at_2"])
def test_a_changed_or_missing_metric_of_an_evaluation_is_found(run, name):
    file = run / "evaluations/before.json"
    summary = json.loads(file.read_text())
    for changed in (summary | {name: summary[name] + 1}, {k: v for k, v in summary.items() if k != name}):
        file.write_text(json.dumps(changed))
        assert named(verify_run(run, rows=1), "evaluations/before.json", name)


def test_a_missing_evaluation_is_found(run):
    (run / "evaluations/before.json").unlink()
    (found,) = verify_run(run, rows=1).differences
    assert str(found) == "evaluations/before.json: the file is 'missing', the replay gives 'there'"


def test_what_could_not_be_checked_is_said_with_the_setting_that_would_allow_it(model, tmp_path):
    report = verify_run(trained(model, tmp_path, run={"save_every": 0, "save_weights": False}))
    assert report.differences == []
    assert compared(report).keys() & {"log α, version 0", "log α, version 1"} == {"log α, version 0"}
    why = "no weights on disk of version 1: set run.save_every = 1 to keep the weights of every version"
    assert report.skipped["samples and log-probs: completions", why] == 16


def test_a_subset_is_spread_over_the_versions(untouched):
    report = verify_run(untouched, rows=2)
    assert {"log α, version 0", "log α, version 1"} <= compared(report).keys()
    assert (
        report.skipped["samples and log-probs: completions", "not in the subset: take more with --rows N, or --all"]
        == 22
    )


@pytest.mark.parametrize(
    "sections",
    [
        {"objective": {"recipe": "red_drop"}, "schedule": {"kind": "lagged", "v": 1}},
        {
            "objective": {"recipe": "dapo", "overlong_buffer": 4},
            "sampling": {"dynamic_sampling": 2, "temperature": 0.7},
        },
        {"objective": {"recipe": "rloo"}, "schedule": {"kind": "budget", "delta": 0.01, "i": 2}},
        {"objective": {"recipe": "off_policy_grpo_exact"}, "schedule": {"stages": 2, "prompts": 5}},
        {"objective": {"recipe": "grpo_masked"}, "task": {"name": "sample_task:load_even"}},
    ],
    ids=lambda sections: sections["objective"]["recipe"],
)
def test_other_objectives_and_schedules_agree_too(model, tmp_path, sections):
    sections.setdefault("schedule", {}).setdefault("v", 2)
    report = verify_run(trained(model, tmp_path, **sections), rows=12)
    assert report.differences == []


LAGGED = {"schedule": {"kind": "lagged", "v": 2, "batches": 6}}
EVERY = {"schedule": {"v": 3, "batches": 6}}


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run of six batches as one that was killed after the checkpoint of batch 4, when it had asked for others."""

    @cache
    def stop(kind: str) -> Path:
        root, often = tmp_path_factory.mktemp(kind), {"checkpoint_every": 1, "keep_checkpoints": 9, "save_every": 1}
        sections = {
            **(LAGGED if kind == "lagged" else EVERY),
            "run": often,
            "task": {"name": "sample_task:load_letters"},
        }
        run = lagrpo.train(tiny_settings(model, root, **merged(sections, {"run": {"name": "run"}}))).run
        for batch in (5, 6):
            shutil.rmtree(run / "checkpoints" / f"step-{batch:06d}")
        return run

    return stop


CHANGES: dict[str, dict[str, Any]] = {
    "recipe": {"objective": {"recipe": "asymre"}},
    "temperature": {"sampling": {"temperature": 0.7}},
    "G": {"sampling": {"G": 3}},
    "max_tokens": {"sampling": {"max_tokens": 3}},
    "dynamic sampling": {"sampling": {"dynamic_sampling": 3}},
    "prompts": {"schedule": {"prompts": 3}},
    "v": {"schedule": {"v": 1}},
    "i": {"schedule": {"i": 2}},
    "kind": {"schedule": {"kind": "lagged", "v": 1}},
    "rewards": {"task": {"name": "sample_task:load_vowels", "reward_range": [0.0, 2.0]}},
    "evaluation": {"evaluation": {"prompts": 4, "samples": 2}},
    "a larger lag": {"schedule": {"v": 3}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_whose_settings_were_changed_agrees_with_its_replay(stopped, tmp_path, change):
    run = shutil.copytree(stopped("lagged" if change in ("a larger lag", "temperature") else "every"), tmp_path / "run")
    allowed = [f"{section}.{name}" for section, values in CHANGES[change].items() for name in values]
    lagrpo.train(
        merged(CHANGES[change], {"run": {"resume": str(run), "allow": allowed}}, {"schedule": {"batches": 10}})
    )
    report = verify_run(run, rows=40)
    assert [str(difference) for difference in report.differences] == []
    assert compared(report)["advantages"] > 7 * 2 * 3
    asked = sum(count for (what, _), count in report.skipped.items() if what == "rows: batches")
    samples = change not in ("recipe", "i", "evaluation")
    assert asked == (0 if not samples else 2 if change in ("a larger lag", "temperature") else 1)


def test_a_change_that_is_not_on_record_is_found(stopped, tmp_path):
    run = shutil.copytree(stopped("every"), tmp_path / "run")
    lagrpo.train({"run": {"resume": str(run), "allow": ["sampling.G"]}, "sampling": {"G": 3}})
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace('"sampling.G": [4, 3]', '"sampling.G": [3, 3]'))
    assert named(verify_run(run, rows=4), "rollouts/step-000004.parquet", "numbers of the completions")


@pytest.mark.parametrize("changed", ['"sampling.G": 3', '"sampling.G": [0, 3]', '"sampling.G": ["x", 3]'])
def test_a_damaged_resumption_is_refused(run, changed):
    with (run / "events.jsonl").open("a") as events:
        events.write(f'{{"event": "resumed", "batch": 2, "changed": {{{changed}}}}}\n')
    with pytest.raises(UnreadableError, match="cannot be replayed"):
        verify_run(run, rows=1)


def test_completions_that_somebody_else_drew_are_left_out(untouched, model, tmp_path):
    offline = {"data": str(untouched / FIRST), "share": 0.5}
    report = verify_run(trained(model, tmp_path, offline=offline, objective={"recipe": "asymre"}))
    assert report.differences == []
    assert report.skipped["samples and log-probs: completions", "offline data"] == 12
    assert compared(report)["samples"] > 0


def test_a_task_of_the_caller_s_own_is_asked_for(model, tmp_path):
    settings = tiny_settings(model, tmp_path, run={"name": "run"})
    run = lagrpo.train(settings, task=sample_task.load()).run
    report = verify_run(run, rows=4)
    why = "the run was given a task of the caller's own: pass it to lagrpo.replay.verify_run"
    assert report.skipped["prompts and rewards: completions", why] == 24
    assert "rewards" not in compared(report)
    report = verify_run(run, rows=4, task=sample_task.load())
    assert report.differences == []
    assert compared(report)["rewards"] == 24


def corrupt(run: Path, name: str) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2])


FILES = [FIRST, "environment.json", "config.toml", "weights/v000001/model.safetensors"]
FILES += ["evaluations/after.parquet", "evaluations/after.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_half_written_file_is_refused_by_name(run, name, capsys):
    corrupt(run, name)
    with pytest.raises(SystemExit) as end:
        main(["verify", str(run), "--rows", "4"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert Path(name).parent.name in said or Path(name).name in said
    assert "Traceback" not in said


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["verify", str(tmp_path)])
    assert end.value.code == 2
    assert "no config.toml" in capsys.readouterr().err


def test_a_run_without_rollouts_or_with_a_broken_line_is_refused(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text("{" + metrics.read_text())
    with pytest.raises(UnreadableError, match="line 1: this is not JSON"):
        verify_run(run)
    metrics.unlink()
    shutil.rmtree(run / "rollouts")
    with pytest.raises(RunNotFoundError, match="no rollouts yet"):
        verify_run(run)


def test_a_batch_that_is_missing_is_named(run):
    (run / "rollouts/step-000002.parquet").unlink()
    (found,) = verify_run(run, rows=1).differences
    assert str(found) == "rollouts/step-000002.parquet: the file is 'missing', the replay gives 'there'"


def test_the_command_prints_what_differs_and_ends_with_1(run, capsys):
    rewrite(run, lambda rows: rows[6].__setitem__("advantage", 7.0))
    with pytest.raises(SystemExit) as end:
        main(["verify", str(run), "--rows", "2"])
    assert end.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert f"{FIRST}, row 6 (prompt " in out
    assert "advantage is 7, the replay gives" in out
    assert "1 value differs." in out


def test_the_command_ends_with_0_where_nothing_differs(untouched, capsys):
    main(["verify", str(untouched), "--rows", "2"])
    assert "Nothing differs." in capsys.readouterr().out


def test_every_advantage_has_a_written_formula():
    from lagrpo.core.pieces import ADVANTAGES as PIECES

    assert ADVANTAGES.keys() == PIECES.keys()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_written_formulas_are_those_of_core(name):
    from lagrpo.core.pieces import ADVANTAGES as PIECES

    rng = torch.Generator().manual_seed(3)
    made = Composition(advantage=name)
    reads = {"normalized": "eps_std", "normalized_unbiased": "std_offset", "log_mean_exp": "strength"}
    knobs = {knob: getattr(made, knob) for knob in [reads.get(name)] if knob}
    for G in (1, 2, 5, 8):
        for _ in range(20):
            rewards = torch.randint(3, (G,), generator=rng).double() / 2
            uniform = torch.rand(G, generator=rng, dtype=torch.float64)
            written = advantages(rewards.tolist(), made, uniform.tolist())
            assert written == pytest.approx(PIECES[name](rewards, uniform, **knobs).tolist(), abs=1e-12)


def test_a_token_s_part_of_the_distribution_by_hand():
    """p = (1/2, 1/4, 1/4): token 1 has [1/2, 3/4)."""
    logits = torch.tensor([[4.0, 2.0, 2.0]], dtype=torch.float64).log().repeat(3, 1)
    tokens, uniform = torch.tensor([0, 1, 2]), torch.tensor([0.6, 0.6, 0.75], dtype=torch.float64)
    read = read_tokens(logits, tokens, uniform)
    torch.testing.assert_close(read["logp"].exp(), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))
    torch.testing.assert_close(read["low"].sigmoid(), torch.tensor([0.0, 0.5, 0.75], dtype=torch.float64))
    torch.testing.assert_close(read["high"].sigmoid(), torch.tensor([0.5, 0.75, 1.0], dtype=torch.float64))
    assert read["expected"].tolist() == [1, 1, 2]


def test_spans():
    assert spans([1, 2, 3, 5, 8, 9]) == "1-3, 5, 8-9"


@pytest.mark.parametrize(
    ("reason", "undecided"),
    [
        ("no verdict within 5 s", 1),
        ("the worker process took more than 4 GiB of memory while it judged", 1),
        ("the judge raised ValueError: bad luck", 0),
    ],
)
def test_a_verdict_that_the_machine_prevented_decides_nothing(reason, undecided):
    found = Report("run").check("rewards")
    compare(found, "file", "row 0", Outcome.unscored(reason), Outcome.scored(1.0))
    assert (found.undecided, len(found.differences)) == (undecided, 1 - undecided)
