"""Studies: their files, the grid of runs, measures, claims, and one whole study of a tiny model."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from chaos import start
from running import tiny_settings

import lagrpo.study.command as study_command
from lagrpo.errors import SettingsError
from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.runs.files import write_atomically
from lagrpo.settings.load import load_settings, to_toml
from lagrpo.settings.sections import EvalSetSettings, EvalSettings
from lagrpo.study.command import main, parse_options, run_missing
from lagrpo.study.measures import RunResult, commit_text, is_evaluated, measure, parse_measure
from lagrpo.study.report import format_interval, load_results, write_report
from lagrpo.study.spec import Claim, Run, Study, load_study
from lagrpo.study.statistics import (
    Interval,
    count_lacking,
    judge,
    paired_differences,
    parse_claim,
)
from lagrpo.types import JsonObject

TESTS = Path(__file__).parent
PAPERS = TESTS.parent / "experiments" / "papers"
GRID = {"method": {"plain": {}, "masked": {}}, "v": {"v = 1": {}, "v = 10": {}}}


# Statistics


def test_interval_by_hand():
    """Values 1, 2, 3: mean 2, s = 1, t = 4.303, so ± 4.303 / √3."""
    interval = Interval.of([1.0, 2.0, 3.0])
    assert (interval.mean, interval.half, interval.n) == (
        2.0,
        pytest.approx(4.3027 / 3**0.5, abs=1e-4),
        3,
    )
    assert Interval.of([0.5]).half is None


@pytest.mark.parametrize(
    ("measure_text", "interval", "text"),
    [
        ("mean kl", Interval(3e-4, 5e-5, 3), "0.0003 ± 5e-05"),
        ("mean kl", Interval(-3.14e-6, None, 1), "-3.1e-06"),
        ("mean kl", Interval(0.0, 0.0, 3), "0.000 ± 0.000"),
        ("mean kl", Interval(3e-17, 1e-17, 3), "0.000 ± 0.000"),
        ("mean kl", Interval(3e-4, 5e-3, 3), "0.000 ± 0.005"),
        ("mean kl", Interval(1.5, 2e-4, 3), "1.500 ± 0.000"),
        ("mean tokens", Interval(123.45, 6.0, 3), "123.5 ± 6.0"),
        ("hard.pass@1", Interval(0.5, 0.0125, 3), "50.0 ± 1.2 %"),
        ("pass@1", Interval(1e-4, None, 1), "0.0 %"),
    ],
)
def test_small_numbers_have_two_digits(measure_text, interval, text):
    assert format_interval(measure_text, interval) == text


@pytest.mark.parametrize(
    ("differences", "relation", "margin", "outcome"),
    [
        ([1.0, 2.0, 3.0], ">", 0.0, "inconclusive"),  # 2 ± 2.48
        ([1.5, 2.0, 2.5], ">", 0.0, "supported"),  # 2 ± 1.24
        ([1.5, 2.0, 2.5], ">", 3.3, "refuted"),
        ([-1.5, -2.0, -2.5], "<", 0.0, "supported"),
        ([1.0, 2.0, 3.0], ">=", 0.5, "supported"),  # -.48 > -.5
        ([1.0, 2.0, 3.0], ">=", 0.4, "inconclusive"),
        ([-1.5, -2.0, -2.5], ">=", 0.5, "refuted"),
        ([-0.5, 0.0, 0.5], "~", 1.3, "supported"),  # 0 ± 1.24
        ([-0.5, 0.0, 0.5], "~", 1.2, "inconclusive"),
        ([1.5, 2.0, 2.5], "~", 0.7, "refuted"),
        ([0.1, 0.1], ">", 0.0, "inconclusive"),  # two equal differences are no evidence
        ([0.9 - 0.8, 0.8 - 0.7], ">", 0.0, "inconclusive"),  # equal up to rounding
        ([1000.9 - 1000.8, 0.8 - 0.7, 0.2 - 0.1], ">", 0.0, "supported"),
        ([0.5], ">", 0.0, "inconclusive"),
    ],
)
def test_verdicts_by_hand(differences, relation, margin, outcome):
    assert judge(differences, relation, margin).outcome == outcome


# Claims and measures


def test_differences_are_paired_by_seed_and_averaged_over_unnamed_axes():
    values = {
        (("plain", "v = 1"), 0): 1.0,
        (("plain", "v = 10"), 0): 3.0,
        (("masked", "v = 1"), 0): 2.0,
        (("masked", "v = 10"), 0): 6.0,
        (("plain", "v = 1"), 1): 1.0,
        (("plain", "v = 10"), 1): 1.0,
        (("masked", "v = 1"), 1): 0.0,
        (("masked", "v = 10"), 1): None,
    }

    def differences(text: str) -> dict[int, float]:
        return paired_differences(parse_claim(text, GRID), values, ["method", "v"])

    assert differences("masked > plain") == {
        0: 2.0
    }  # (2 + 6) / 2 - (1 + 3) / 2; seed 1 lacks a value
    assert differences("masked & v = 1 > plain & v = 1") == {0: 1.0, 1: -1.0}
    assert differences("v = 10 <= v = 1") == {0: 3.0}  # (3 + 6) / 2 - (1 + 2) / 2
    assert differences("plain & v = 10 > 0.5") == {0: 2.5, 1: 0.5}


def test_unfinished_study_compares_the_same_cells_on_both_sides():
    """Otherwise a difference between methods would be one between v = 1 and v = 10."""
    values = {(("plain", "v = 1"), 0): 1.0, (("masked", "v = 10"), 0): 6.0}
    claim = parse_claim("masked > plain", GRID)
    assert paired_differences(claim, values, ["method", "v"]) == {}
    values |= {(("plain", "v = 10"), 0): 5.0, (("masked", "v = 1"), 0): 4.0}
    assert paired_differences(claim, values, ["method", "v"]) == {0: 2.0}


@pytest.mark.parametrize("claim", ["masked > plain", "plain > masked"])
def test_cell_that_one_side_alone_has_leaves_the_seed_out(claim):
    """Seed 0 has v = 10 with one method only. Seed 1 has both methods at both."""
    values: dict[tuple[tuple[str, ...], int], float | None] = {
        (("plain", "v = 1"), 0): 1.0,
        (("masked", "v = 1"), 0): 2.0,
        (("masked", "v = 10"), 0): 9.0,
    }
    differences = paired_differences(parse_claim(claim, GRID), values, ["method", "v"])
    assert differences == {}
    complete = {
        (("plain", "v = 1"), 1): 0.0,
        (("plain", "v = 10"), 1): 1.0,
        (("masked", "v = 1"), 1): 2.0,
        (("masked", "v = 10"), 1): 5.0,
    }
    differences = paired_differences(parse_claim(claim, GRID), values | complete, ["method", "v"])
    assert {seed: abs(difference) for seed, difference in differences.items()} == {1: 3.0}


@pytest.mark.parametrize(
    ("claim", "lacking"),
    [
        ("masked > plain", 3),
        ("plain > masked", 3),
        ("plain > 0.5", 2),
        ("masked & v = 1 > plain & v = 1", 1),
    ],
)
def test_runs_without_a_value_are_counted_on_both_sides(claim, lacking):
    values = {
        (("plain", "v = 1"), 0): 1.0,
        (("plain", "v = 1"), 1): None,
        (("plain", "v = 10"), 0): None,
        (("masked", "v = 1"), 0): 2.0,
        (("masked", "v = 10"), 0): None,
    }
    assert count_lacking(parse_claim(claim, GRID), values, ["method", "v"]) == lacking


def test_claim_is_inconclusive_if_a_finished_run_lacks_the_value(tmp_path):
    """Otherwise `plain` would be faster by the seeds on which it reached the reward."""
    text = "time/step to 0.9"
    claim = {"says": "plain is faster", "claim": "plain < masked", "measure": text}
    grid = {"method": {"plain": {}, "masked": {}}}
    study = Study(
        title="",
        settings="",
        measures=(text,),
        seeds=(0, 1, 2, 3, 4),
        grid=grid,
        claims=(Claim.model_validate(claim),),
    )
    times = {"plain": [10, 11, 12, None, None], "masked": [20, 22, 21, 23, 20]}
    results = {}
    for method, costs in times.items():
        for seed, cost in enumerate(costs):
            line = {"reward": 0.0 if cost is None else 1.0, "time/step": cost}
            results[(method,), seed] = RunResult([line], {})
    write_report(study, results, tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| inconclusive: no value in 2 runs |" in page
    assert "| plain | 5 | 11.0 ± 2.5 (3 values) |" in page
    assert "| masked | 5 | 21.2 ± 1.6 |" in page

    # A run that is not finished is no failure.
    del results[("plain",), 3], results[("plain",), 4]
    write_report(study, results, tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| supported, 3 seeds |" in page


def test_number_is_a_label_if_an_axis_has_it():
    grid = {"age": {"fresh": {}, "16": {}}}
    assert parse_claim("fresh > 16", grid) == ({"age": "fresh"}, ">", {"age": "16"})
    assert parse_claim("16 > 0.5", grid) == ({"age": "16"}, ">", 0.5)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("masked better than plain", "write LEFT > RIGHT"),
        ("maskd > plain", "no label 'maskd'. Did you mean 'masked'"),
        ("masked & plain > v = 1", "are both labels of method"),
        ("masked > v = 1", "the same axes"),
    ],
)
def test_text_that_is_not_a_claim_is_rejected(text, cause):
    with pytest.raises(ValueError, match=cause):
        parse_claim(text, GRID)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pass@1", 0.9),
        ("pass@1 before", 0.1),
        ("mean reward", 0.5),
        ("last reward", 0.4),
        ("peak reward", 0.75),  # of .1, .3, .65, .75, .55
        ("fall reward", 0.2),
        ("max time/step - reward", 4.6),
        ("time/step to 0.6", 6.0),
        ("time/step to 0.8", None),
        ("tokens to 0.6", None),  # not known of all batches until then
    ],
)
def test_measures_by_hand(text, value):
    """Rewards .1, .5, .8, .7, .4, smoothed over two batches: .1, .3, .65, .75, .55."""
    rewards, tokens = [0.1, 0.5, 0.8, 0.7, 0.4], [1.0, None, 1.0, 1.0, 1.0]
    lines = [
        {"reward": reward, "time/step": n + 1.0, "tokens": tokens[n]}
        for n, reward in enumerate(rewards)
    ]
    evaluations = {
        "before": {"pass@1": 0.1},
        "after": {"pass@1": 0.9},
        "after.hard": {"reward": 0.4},
    }
    assert measure(text, RunResult(lines, evaluations), smooth=2) == (
        value and pytest.approx(value)
    )


def test_batches_without_a_reward_count_in_what_a_reward_costs():
    lines = [{"reward": reward, "time/step": 10.0} for reward in (None, None, 1.0)]
    assert measure("time/step to 0.9", RunResult(lines, {}), smooth=1) == 30.0


CLEAN, MODIFIED = {"commit": "a1", "dirty": False}, {"commit": "a1", "dirty": True}
LATER = {"commit": "b2", "dirty": False}


@pytest.mark.parametrize(
    ("start", "resumed", "text"),
    [
        (CLEAN, [], "a1"),
        (MODIFIED, [], "a1 (modified)"),
        (CLEAN, [CLEAN], "a1"),
        (CLEAN, [MODIFIED], "a1 and a1 (modified)"),
        (CLEAN, [CLEAN, LATER], "a1 and b2"),
        (None, [None], None),
    ],
    ids=["clean", "modified", "resumed", "resumed modified", "resumed later", "no repository"],
)
def test_commit_of_a_run_says_whether_the_tree_was_modified(start, resumed, text):
    events = [{"event": "weight_sync"}, *({"event": "resumed", "git": git} for git in resumed)]
    assert commit_text(start, events) == text


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        ("pass@1", True),
        ("pass@4 before", True),
        ("pass@6", True),
        ("pass@3", False),
        ("pass@8", False),
        ("hard.pass@1", True),
        ("hard.reward", True),
        ("hard.pass@3", True),
        ("hard.pass@4", False),
        ("hrad.pass@1", False),
        ("mean reward", True),
    ],
)
def test_measure_needs_an_evaluation_that_computes_it(text, is_known):
    sets = (EvalSetSettings(name="hard", num_samples=3),)
    assert is_evaluated(text, EvalSettings(num_samples=6, sets=sets)) == is_known


@pytest.mark.parametrize("text", ["reward", "median reward", "pass@1 after", "x to high", "x to ."])
def test_text_that_is_not_a_measure_is_rejected(text):
    with pytest.raises(ValueError, match="is not a measure"):
        parse_measure(text)


# Files


def study_file(model: Path, root: Path, **changes: object) -> Path:
    """Two schedules of a tiny run, two seeds."""
    (root / "base.toml").write_text(tomli_w.dumps(tiny_settings(model, root)), encoding="utf-8")
    content: JsonObject = {
        "title": "What v costs",
        "settings": "base.toml",
        "seeds": [3, 4],
        "smooth": 2,
        "measures": ["pass@1", "mean reward", "max staleness/max"],
        "set": {"schedule": {"batches": 4}},
        "grid": {
            "v": {
                "v = 1": {"schedule": {"sync_every": 1}},
                "v = 3": {"schedule": {"sync_every": 3}},
            }
        },
        "claims": [
            {
                "says": "a sampler lags",
                "claim": "v = 3 > v = 1",
                "measure": "max staleness/max",
                "source": "Eq. 1",
            },
            {"says": "v = 1 is on-policy", "claim": "v = 1 <= 0", "measure": "max staleness/max"},
        ],
    }
    (root / "study.toml").write_text(tomli_w.dumps(content | changes), encoding="utf-8")
    return root / "study.toml"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"measures": ["mean reward_meen"]}, "'reward'"),
        ({"measures": ["hrad.pass@1"]}, r"study\.toml: no run has 'hrad\.pass@1'"),
        ({"measures": ["pass@4"]}, r"study\.toml: no run has 'pass@4'"),
        ({"seeds": [0, 0, 1]}, "seeds: 0 occurs twice"),
        ({"grid": {"a": {"x": {}}, "b": {"x": {}}}}, "grid: 'x' occurs twice"),
        (
            {"set": {"schedule": {"batches": 4, "epochs": 2}}},
            "run v-1-seed3: .* both set the length",
        ),
        ({"set": {"loss": {"recipe": "grop"}}}, "run v-1-seed3: .*'grop'"),
    ],
)
def test_wrong_study_file_is_rejected(model, tmp_path, changes, cause):
    with pytest.raises(SettingsError, match=cause):
        load_study(study_file(model, tmp_path, **changes), tmp_path / "out")


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_number_of_jobs_below_1_is_rejected(jobs, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_options(["study.toml", "--jobs", jobs])
    assert f"--jobs {jobs}: write a number of at least 1" in capsys.readouterr().err


def test_required_key_of_a_study_file_is_named_alone(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text('title = "What v costs"\n', encoding="utf-8")
    with pytest.raises(SettingsError, match=r"study\.toml: settings is missing$"):
        load_study(file, tmp_path / "out")


def test_run_has_the_settings_of_the_base_the_study_and_its_labels(model, tmp_path):
    _, runs = load_study(study_file(model, tmp_path), tmp_path / "out")
    assert [(run.cell, run.seed) for run in runs] == [
        ((v,), seed) for seed in (3, 4) for v in ("v = 1", "v = 3")
    ]
    settings = runs[3].settings
    assert (settings.schedule.sync_every, settings.schedule.batches, settings.run.seed) == (3, 4, 4)
    assert (settings.run.name, settings.checkpoint.save_total_limit) == ("v-3-seed4", 0)
    assert Study(title="", settings="").cells == [()]


@pytest.mark.experiments
@pytest.mark.parametrize("name", sorted(path.name for path in PAPERS.glob("*.toml")))
def test_studies_of_the_papers_can_run_and_their_records_load(name, tmp_path, monkeypatch):
    monkeypatch.chdir(TESTS.parent)
    study, runs = load_study(PAPERS / name, tmp_path)
    record = PAPERS / "results" / f"{Path(name).stem}.json"
    assert not record.is_file() or load_results(record, study).keys() <= {
        (run.cell, run.seed) for run in runs
    }


def test_study_of_the_documentation_can_run(model, tmp_path):
    page = (TESTS.parent / "docs" / "studies.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    file = study_file(model, tmp_path)
    base = (tmp_path / "base.toml").read_text(encoding="utf-8")
    (tmp_path / "settings.toml").write_text(base, encoding="utf-8")
    file.write_text(block, encoding="utf-8")
    _, runs = load_study(file, tmp_path / "out")
    assert len(runs) == 12
    assert {run.settings.schedule.constant_lag for run in runs} == {None, 16}


@pytest.mark.parametrize(
    ("base", "changes", "label", "batches"),
    [
        ({"epochs": 2}, {}, {}, 6),  # six prompts, two per batch
        ({"epochs": 2}, {"batches": 4}, {}, 4),
        ({"batches": 4}, {"epochs": 1}, {}, 3),
        ({"batches": 4}, {"epochs": 1}, {"batches": 5}, 5),
        ({"epochs": 1}, {"batches": 4}, {"epochs": 2}, 6),
    ],
)
def test_length_of_a_run_is_the_one_set_last(model, tmp_path, base, changes, label, batches):
    file = study_file(
        model,
        tmp_path,
        set={"schedule": changes},
        grid={"v": {"x": {"schedule": label}}},
        claims=[],
    )
    settings = tiny_settings(model, tmp_path)
    del settings["schedule"]["batches"]
    settings["schedule"] |= base
    (tmp_path / "base.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    _, runs = load_study(file, tmp_path / "out")
    schedule = runs[0].settings.schedule
    assert (schedule.batches, schedule.epochs) == (batches, None)
    # The process of the run reads the same settings.
    (tmp_path / "run.toml").write_text(to_toml(runs[0].settings), encoding="utf-8")
    assert load_settings(tmp_path / "run.toml") == runs[0].settings


def test_run_with_evaluation_sets_is_finished_once_all_are_evaluated(model, tmp_path):
    sets = [{"name": "easy"}, {"name": "hard"}]
    settings = {"schedule": {"batches": 1}, "eval": {"sets": sets}}
    _, runs = load_study(study_file(model, tmp_path, set=settings), tmp_path / "out")
    run = runs[0]
    (run.path / "evaluations").mkdir(parents=True)
    (run.path / "config.toml").write_text(to_toml(run.settings), encoding="utf-8")
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    assert not run.is_finished()
    for name, is_last in ("before.easy", False), ("after.easy", False), ("after.hard", True):
        file = run.path / "evaluations" / f"{name}.json"
        file.write_text(json.dumps({"step": 1}), encoding="utf-8")
        assert run.is_finished() == is_last


# A whole study


def start_forked(run: Any, threads: int) -> Any:
    """As `start_run`, a process that has imported everything before."""
    write_atomically(Path(f"{run.path}.toml"), to_toml(run.settings))
    process = start([f"{run.path}.toml", "--resume", "auto"], Path(f"{run.path}.log"))
    process.poll, process.wait = lambda: process.exitcode, process.join
    return process


def test_study_ended_by_a_signal_resumes_and_reports(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study_command, "start_run", start_forked)
    file = study_file(
        model, tmp_path, set={"schedule": {"batches": 12}, "checkpoint": {"save_every": 1}}
    )
    out, first = tmp_path / "runs" / "studies" / "study", "v-1-seed3"
    lines = out / first / "metrics.jsonl"

    def wait(seconds: float) -> None:
        time.sleep(0.01)
        if lines.exists() and lines.read_bytes().count(b"\n") >= 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(study_command, "time", SimpleNamespace(sleep=wait))
        with pytest.raises(SystemExit, match="143"):
            main([str(file), "--jobs", "1"])
    lines_before = lines.read_text(encoding="utf-8")
    assert 2 <= lines_before.count("\n") < 12

    assert main([str(file), "--only", "seed3", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.count("inconclusive: ") == 2  # with one seed
    assert "| inconclusive, 1 seed |" in (out / "report.md").read_text(encoding="utf-8")
    assert lines.read_text(encoding="utf-8").startswith(lines_before)
    assert main([str(file), "--jobs", "2"]) == 0
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*")}
    assert main([str(file)]) == 0  # nothing is missing
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*")} == before

    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert len(report["runs"]) == 4
    for run in report["runs"]:
        directory = out / f"{run['cell']['v'].replace(' = ', '-')}-seed{run['seed']}"
        metrics = load_metrics(directory)
        assert run["measures"]["max staleness/max"] == max(
            line["staleness/max"] for line in metrics
        )
        assert run["measures"]["mean reward"] == pytest.approx(
            sum(line["reward"] for line in metrics) / 12
        )
        assert run["measures"]["pass@1"] == load_evaluations(directory)[-1]["pass@1"]
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "| a sampler lags (Eq. 1) | max staleness/max: v = 3 > v = 1 |" in page
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_run_that_failed_to_write_its_weights_after_its_last_evaluation_is_finished(
    model, tmp_path, monkeypatch, capsys
):
    class Ended:
        def poll(self) -> int:
            return 1

    _, runs = load_study(study_file(model, tmp_path), tmp_path / "out")
    process = Ended()
    monkeypatch.setattr(study_command, "start_run", lambda run, threads: process)
    monkeypatch.setattr(Run, "is_finished", lambda run: True)
    assert run_missing(runs[:1], jobs=1) == []
    assert capsys.readouterr().out.endswith("v-1-seed3: finished\n")


def test_process_of_a_run_imports_nothing_from_the_current_directory(model, tmp_path, monkeypatch):
    (tmp_path / "token.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    _, runs = load_study(study_file(model, tmp_path), tmp_path / "out")
    runs[0].path.parent.mkdir(parents=True)
    monkeypatch.setattr(study_command, "to_toml", lambda settings: "not TOML")
    process = study_command.start_run(runs[0], threads=1)
    assert process.wait() == 2
    assert "executed" not in Path(f"{runs[0].path}.log").read_text(encoding="utf-8")
