"""Studies: what their files may say, what is measured, and whole studies of a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from running import tiny_settings
from tiny import save_tiny

from lagrpo import train
from lagrpo.cli import main
from lagrpo.errors import SettingsError
from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.study.claims import Comparison
from lagrpo.study.curves import draw
from lagrpo.study.file import Study, load_study, settings_of
from lagrpo.study.measures import Finished, check_measure, measure
from lagrpo.study.report import Report
from lagrpo.study.running import Planned, check_runs
from lagrpo.study.study import Plan

TESTS = Path(__file__).parent
GRID = {"method": {"plain": {}, "masked": {}}, "v": {"v = 1": {}, "v = 10": {}}}
OF_A_SET = {"before.hard": {"pass_at_1": 0.2}, "after.hard": {"pass_at_1": 0.3, "reward_mean": 0.4}}


def finished(**curves: list[float | None]) -> Finished:
    lines = [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]
    return Finished(lines, {"before": {"pass_at_1": 0.1}, "after": {"pass_at_1": 0.9, "pass_at_2": 0.95}, **OF_A_SET})


# Measures


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("pass_at_1", 0.9),
        ("pass_at_1 before", 0.1),
        ("pass_at_2", 0.95),
        ("pass_at_2 before", None),
        ("hard.pass_at_1", 0.3),
        ("hard.pass_at_1 before", 0.2),
        ("hard.reward_mean", 0.4),
        ("easy.pass_at_1", None),
        ("mean reward_mean", 0.5),
        ("sum seconds_total", 15.0),
        ("max seconds_total", 5.0),
        ("min seconds_total", 1.0),
        ("first reward_mean", 0.1),
        ("last reward_mean", 0.4),
        ("peak reward_mean", 0.75),  # of .1, .3, .65, .75, .55
        ("end reward_mean", 0.55),
        ("fall reward_mean", 0.2),
        ("max seconds_total - reward_mean", 4.6),
        ("mean pass - reward_mean", None),
        ("seconds_total to 0.6", 6.0),
        ("seconds_total to 0.8", None),
        ("tokens to 0.6", None),  # not known of all batches until then
        ("mean nothing", None),
        ("sum sync_bytes", 20.0),  # what is repeated counts once
    ],
)
def test_measures_by_hand(text, value):
    """Rewards .1, .5, .8, .7, .4 have the means of two .1, .3, .65, .75, .55."""
    run = finished(
        reward_mean=[0.1, 0.5, 0.8, 0.7, 0.4],
        seconds_total=[1.0, 2.0, 3.0, 4.0, 5.0],
        tokens=[1.0, None, 1.0, 1.0, 1.0],
        synced=[1, 0, 0, 1, 0],
        sync_bytes=[10.0, 10.0, 10.0, 10.0, 10.0],
    )
    found = measure(text, run, smooth=2)
    assert found == (pytest.approx(value) if value is not None else None)


@pytest.mark.parametrize("text", ["reward_mean", "median reward_mean", "pass_at_1 after", "seconds to high", ""])
def test_what_is_no_measure_is_refused_with_what_is_one(text):
    with pytest.raises(ValueError, match="is no measure: write pass_at_1"):
        check_measure(text)


# Claims


def test_differences_are_taken_seed_by_seed_and_averaged_over_what_is_not_named():
    values = {
        (("plain", "v = 1"), 0): 1.0, (("plain", "v = 10"), 0): 3.0, (("masked", "v = 1"), 0): 2.0,
        (("masked", "v = 10"), 0): 6.0, (("plain", "v = 1"), 1): 1.0, (("plain", "v = 10"), 1): 1.0,
        (("masked", "v = 1"), 1): 0.0, (("masked", "v = 10"), 1): None,
    }  # fmt: skip

    def of(text: str) -> dict[int, float]:
        return Comparison.parse(text, GRID).differences(values, ["method", "v"])

    assert of("masked > plain") == {0: 2.0}  # (2 + 6) / 2 - (1 + 3) / 2; seed 1 lacks a run
    assert of("masked & v = 1 > plain & v = 1") == {0: 1.0, 1: -1.0}
    assert of("v = 10 <= v = 1") == {0: 3.0}  # (3 + 6) / 2 - (1 + 2) / 2
    assert of("plain & v = 10 > 0.5") == {0: 2.5, 1: 0.5}


def test_the_sides_of_an_unfinished_study_are_averaged_over_the_same_cells():
    """Otherwise a difference between methods would be one between v = 1 and v = 10."""
    values = {(("plain", "v = 1"), 0): 1.0, (("masked", "v = 10"), 0): 6.0}
    claim = Comparison.parse("masked > plain", GRID)
    assert claim.differences(values, ["method", "v"]) == {}
    values |= {(("plain", "v = 10"), 0): 5.0, (("masked", "v = 1"), 0): 4.0}
    values |= {(("plain", "v = 10"), 1): 5.0, (("masked", "v = 10"), 1): 4.0}
    assert claim.differences(values, ["method", "v"]) == {0: 2.0}  # seed 1 has nothing with v = 1
    assert Comparison.parse("masked > plain", GRID).differences({}, ["method", "v"]) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("masked better than plain", "compares nothing"),
        ("maskd > plain", "no label 'maskd'. Did you mean 'masked'"),
        ("masked & plain > v = 1", "are both labels of method"),
        ("masked > v = 1", "labels of the same axes"),
        ("0.5 < masked", "only the right one is a number"),
    ],
)
def test_claims_that_compare_nothing_are_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Comparison.parse(text, GRID)


# Files


def study_file(root: Path, **changes: Any) -> Path:
    """Two schedules of a tiny run, two seeds."""
    model = save_tiny(root / "model")
    (root / "base.toml").write_text(tomli_w.dumps(tiny_settings(model, root)))
    content: dict[str, Any] = {
        "title": "What v costs",
        "settings": "base.toml",
        "seeds": [3, 4],
        "smooth": 2,
        "measures": ["pass_at_1", "mean reward_mean", "max lag_max"],
        "set": {"schedule": {"batches": 4}},
        "grid": {"v": {"v = 1": {"schedule": {"v": 1}}, "v = 3": {"schedule": {"v": 3}}}},
        "claims": [
            {"says": "a sampler lags", "claim": "v = 3 > v = 1", "measure": "max lag_max", "source": "Eq. 1"},
            {"says": "v = 1 is on-policy", "claim": "v = 1 <= 0", "measure": "max lag_max"},
        ],
    }
    (root / "study.toml").write_text(tomli_w.dumps(content | changes))
    return root / "study.toml"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measurs": []}, "unknown setting 'measurs'; did you mean 'measures'"),
        ({"measures": ["speed"]}, "'speed' is no measure"),
        ({"settings": "gone.toml"}, "gone.toml: no such settings file"),
        ({"measures": ["mean reward_meen"]}, "no metric 'reward_meen'. Did you mean 'reward_mean'"),
        ({"measures": ["secs to 0.5"]}, "no metric 'secs'"),
        ({"curves": ["reward_meen"]}, "no metric 'reward_meen'"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [0, 0, 1]}, "seeds has the seed 0 twice"),
        ({"seeds": [True]}, "seeds.0 = True"),
        ({"seeds": [-1]}, "seeds.0 = -1"),
        ({"grid": {"v": {}}}, "grid.v has no label"),
        ({"grid": {"a": {"x": {}}, "b": {"x": {}}}}, "the label 'x' twice"),
        ({"grid": {"a": {"x 1": {}, "x-1": {}}}, "claims": []}, "would both be called"),
        ({"claims": [{"says": "", "claim": "v = 2 > v = 1"}]}, "no label 'v = 2'"),
        (
            {"grid": {"v": {"v = 1": {"run": {"seed": 1}}}}, "claims": []},
            "'v = 1': run.seed is set by the study itself",
        ),
        (
            {"grid": {"v": {"v = 1": {"schedule": {"w": 1}}}}, "claims": []},
            "run v-1-seed3: unknown setting 'schedule.w'",
        ),
        ({"set": {"objective": {"recipe": "grop"}}}, "run v-1-seed3: .*unknown recipe 'grop'"),
    ],
)
def test_files_that_are_no_studies_are_refused_before_anything_runs(tmp_path, capsys, changes, said):
    file = study_file(tmp_path, **changes)
    with pytest.raises(SystemExit) as ended:
        main(["study", str(file), "--dry-run", "--directory", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_settings_of_a_run_are_those_of_the_file_the_study_and_its_labels(tmp_path):
    file = study_file(tmp_path)
    study = load_study(file)
    settings = settings_of(study, file, ("v = 3",), 4, tmp_path / "runs")
    assert (settings.schedule.v, settings.schedule.batches, settings.run.seed) == (3, 4, 4)
    assert (settings.run.name, settings.run.resume, settings.run.keep_optimizer) == ("v-3-seed4", "auto", False)
    assert settings.model.path.endswith("model")


def test_a_study_without_a_grid_is_one_cell():
    assert Study(title="", settings="").cells == [()]


PAPERS = TESTS.parent / "experiments" / "papers"


@pytest.mark.parametrize("name", sorted(path.name for path in PAPERS.glob("*.toml")))
def test_the_studies_of_the_papers_can_be_run(name, tmp_path):
    """And the page on studies has each, with the number of its runs."""
    plan = Plan.read(PAPERS / name, tmp_path)
    check_runs(list(plan.runs.values()))
    row = re.search(rf"\| `experiments/papers/{name}` \|.*\| (\d+) \|", (TESTS.parent / "docs/studies.md").read_text())
    assert row is not None
    assert int(row[1]) == len(plan.runs)


@pytest.mark.parametrize(
    ("claim", "says"),
    [("one > nan", "no number to compare"), ("one > inf", "no number to compare"), ("one < one", "the same runs")],
)
def test_a_claim_that_compares_nothing_is_refused(claim, says):
    with pytest.raises(ValueError, match=says):
        Comparison.parse(claim, {"method": {"one": {}, "two": {}}})


@pytest.mark.parametrize("level", ["0.4.5", ".", "1..", "x"])
def test_a_level_that_is_no_number_is_refused(level):
    with pytest.raises(ValueError, match="no measure"):
        check_measure(f"seconds_total to {level}")


def test_curves_have_a_panel_for_each_label_with_runs_and_name_every_line():
    grid = {"method": {"one": {}, "two": {}}, "v": {"v = 1": {}, "v = 2": {}, "v = 3": {}}}
    study, run = Study(title="", settings="", seeds=(0,), grid=grid), finished(reward_mean=[0.5, 0.6])
    drawn = draw(study, {(("one", "v = 1"), 0): run, (("one", "v = 3"), 0): run, (("two", "v = 3"), 0): run})
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["v = 1", "v = 3"]
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    drawn.draw_without_rendering()
    assert legend.get_window_extent().y1 <= min(axes.get_window_extent().y0 for axes in drawn.axes), "below the curves"
    assert drawn.axes[0].get_ylabel() == "reward_mean, mean of 5 batches"
    assert draw(study.model_copy(update={"smooth": 1}), {}).axes[0].get_ylabel() == "reward_mean"
    assert len(draw(study, {}).axes) == 1


# Whole studies


@pytest.fixture
def command(monkeypatch) -> Callable[..., None]:
    """`lagrpo study`, whose runs find the task of the tests."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *words: main(["study", *map(str, words)])


def make_here(plan: Plan, *only: str) -> None:
    """Its runs, or those called so, one after the other in this process, without the start of one for each, and the
    report."""
    train_here(plan.chosen(only))
    plan.report()


def train_here(planned: Sequence[Planned], *_: Any) -> None:
    for run in planned:
        train(run.settings)


def numbers(report: Path) -> dict[str, Any]:
    """The measures of report.json by run, but for times."""
    runs = json.loads((report / "report.json").read_text())["runs"]
    return {
        Path(run["run"]).name: {name: value for name, value in run["measures"].items() if "seconds" not in name}
        for run in runs
    }


def test_a_study_runs_reports_and_goes_on(tmp_path, command, capsys):
    file, out = study_file(tmp_path), tmp_path / "out"
    make_here(Plan.read(file, out), "seed3")
    capsys.readouterr()
    command(file, "--directory", out, "--only", "seed3")
    assert "cannot be told with 1 seed" in capsys.readouterr().out
    assert len(numbers(out)) == 2
    command(file, "--directory", out, "--dry-run")
    said = capsys.readouterr().out
    assert "v-1-seed3: finished" in said
    assert "2 runs to make" in said
    command(file, "--directory", out)
    assert "report: " in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()}
    command(file, "--directory", out)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()} == before

    found = numbers(out)
    assert found.keys() == {f"v-{v}-seed{seed}" for v in (1, 3) for seed in (3, 4)}
    for name, measures in found.items():  # of the runs' own files
        lines, after = load_metrics(out / "runs" / name), load_evaluations(out / "runs" / name)[-1]
        assert measures["max lag_max"] == max(line["lag_max"] for line in lines)
        assert measures["mean reward_mean"] == pytest.approx(sum(line["reward_mean"] for line in lines) / 4)
        assert measures["pass_at_1"] == after["pass_at_1"]
    assert {found[name]["max lag_max"] for name in found if name.startswith("v-1")} == {0}
    assert {found[name]["max lag_max"] for name in found if name.startswith("v-3")} == {1}
    page = (out / "report.md").read_text()
    assert (
        "| a sampler lags (Eq. 1) | max lag_max: v = 3 > v = 1 | 1.000 ± 0.000 | cannot be told with 2 seeds |" in page
    )
    assert "runs missing" not in page
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    file.write_text(file.read_text().replace("batches = 4", "batches = 4\nprompts = 1"))
    with pytest.raises(SystemExit) as ended:  # what is there was made with other settings
        command(file, "--directory", out)
    assert ended.value.code == 2
    assert "run v-1-seed3: schedule.prompts = 1, and the run has 2" in capsys.readouterr().err


def test_runs_of_another_machine_count_by_their_report(tmp_path, command, capsys, monkeypatch):
    file, there, here = study_file(tmp_path), tmp_path / "there", tmp_path / "here"
    make_here(Plan.read(file, there))
    kept = there / "report.json"
    first = json.loads(kept.read_text())
    assert [run["run"] for run in first["runs"]] == ["v-1-seed3", "v-3-seed3", "v-1-seed4", "v-3-seed4"]
    kept.write_text(json.dumps(first | {"runs": first["runs"][:3]}))
    shutil.rmtree(there / "runs")

    command(file, "--directory", here, "--results", kept, "--dry-run")
    said = capsys.readouterr().out
    assert "3 runs made elsewhere" in said
    assert "1 run to make" in said
    monkeypatch.setattr("lagrpo.study.study.run_missing", train_here)
    command(file, "--directory", here, "--results", kept)
    assert [path.name for path in (here / "runs").iterdir() if path.is_dir()] == ["v-3-seed4"]
    both = json.loads((here / "report.json").read_text())
    assert [run["cell"] | {"seed": run["seed"]} for run in both["runs"]] == [
        run["cell"] | {"seed": run["seed"]} for run in first["runs"]
    ]
    for now, then in zip(both["runs"][:3], first["runs"], strict=False):
        assert now["measures"] == pytest.approx(then["measures"], rel=1e-5)
        assert {name: now[name] for name in now if name != "measures"} == {
            name: then[name] for name in then if name != "measures"
        }
    assert numbers(here)["v-3-seed4"] == {
        name: value for name, value in first["runs"][3]["measures"].items() if "seconds" not in name
    }


def test_runs_of_another_study_count_by_their_settings(tmp_path, command, capsys):
    """What they are called there says nothing, nor how their objective is written."""
    plain = {"recipe": "grpo", "epsilon_low": 0.2}
    grid = {"lag": {"none": {"objective": plain}, "two": {"schedule": {"v": 2}}}}
    make_here(Plan.read(study_file(tmp_path, grid=grid, claims=[], seeds=[3]), tmp_path / "there"))
    file = study_file(tmp_path)
    capsys.readouterr()
    command(file, "--directory", tmp_path / "here", "--results", tmp_path / "there", "--dry-run")
    assert "1 run made elsewhere" in (said := capsys.readouterr().out)
    assert "v-1-seed3" not in said
    plan = Plan.read(file, tmp_path / "here", [tmp_path / "there"])
    assert {key: Path(run.run).name for key, run in plan.made.items()} == {(("v = 1",), 3): "none-seed3"}
    plan.report()
    assert numbers(tmp_path / "here").keys() == {"none-seed3"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b"x\n", "metrics.jsonl, line 1: this is not JSON"),
        ("config.toml", b"objective.recipe = 'nosuch'\nschedule.batches = 4\n", "config.toml: unknown recipe 'nosuch'"),
        ("environment.json", b"[]", "environment.json"),
    ],
)
def test_damaged_runs_are_refused_in_a_line(tmp_path, name, content, said):
    """In a directory that --results names, and in the study's own."""
    file, run = study_file(tmp_path), tmp_path / "there" / "runs" / "v-1-seed3"
    train(Plan.read(file, tmp_path / "there").runs[("v = 1",), 3].settings)
    (run / name).write_bytes(content)
    with pytest.raises(SettingsError, match=re.escape(said)):
        Plan.read(file, tmp_path / "here", [tmp_path / "there"])
    with pytest.raises(SettingsError):
        Plan.read(file, tmp_path / "there").report()


@pytest.mark.parametrize("make", [lambda path: None, lambda path: (path / "runs").mkdir()])
def test_directories_without_runs_of_the_study_are_refused(tmp_path, make):
    (tmp_path / "there").mkdir()
    make(tmp_path / "there")
    with pytest.raises(SettingsError, match="no run is in it, nor in its directory runs"):
        Plan.read(study_file(tmp_path), tmp_path / "out", [tmp_path / "there"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace('"seed"', '"seeed"'), "run 0 has no seed"),
        (lambda text: text.replace('"schedule.batches": 4', '"schedule.batches": 5'), "had schedule.batches = 5"),
        (lambda text: text.replace('"v = 1"', '"v = 2"').replace('"v = 3"', '"v = 4"'), "it has no run of this study"),
        (lambda text: text.replace('"model.dtype": "float32"', '"model.dtype": "auto"'), "had model.dtype = 'auto'"),
        (lambda text: text.replace('"evaluation.', '"evaluation.every": 9, "evaluation.', 1), "had evaluation."),
        (lambda text: text[:50], "not the report.json of a study"),
    ],
)
def test_reports_that_do_not_fit_are_refused(tmp_path, capsys, change, said):
    plan, reward = Plan.read(study_file(tmp_path), tmp_path / "out"), {"reward_mean": 0.5, "lag_max": 0}
    runs = {key: Finished([reward] * 4, {"after": {"pass_at_1": 0.5}}) for key in plan.runs}
    report = tmp_path / "report.json"
    report.write_text(change(Report(plan.study, runs, {key: run.settings for key, run in plan.runs.items()}).to_json()))
    with pytest.raises(SettingsError, match=re.escape(said)):
        Plan.read(tmp_path / "study.toml", tmp_path / "out", [report])


@pytest.mark.parametrize(
    ("dtypes", "warned"),
    [(["float32"], False), (["bfloat16", "float32"], True)],
)
def test_runs_that_computed_in_several_dtypes_are_named(tmp_path, dtypes, warned):
    plan = Plan.read(study_file(tmp_path), tmp_path / "out")
    runs = {
        key: Finished([{"reward_mean": 0.5, "lag_max": 0}] * 4, {}, {"cpu": "any", "dtype": dtypes[n % len(dtypes)]})
        for n, key in enumerate(plan.runs)
    }
    page = Report(plan.study, runs, {key: run.settings for key, run in plan.runs.items()}).to_markdown()
    assert ("Computed in bfloat16 and float32: a difference between two runs may be one of rounding" in page) == warned


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path, command, capsys):
    grid = {"v": {"v = 1": {}, "broken": {"sampling": {"max_prompt_tokens": 1}}}}
    file, out = study_file(tmp_path, grid=grid, claims=[], seeds=[3]), tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        command(file, "--directory", out)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "1 run failed: broken-seed3" in said
    assert "max_prompt_tokens" in said  # the end of its log
    assert [*numbers(out)] == ["v-1-seed3"]
    assert "**1 run missing**" in (out / "report.md").read_text()


def end_study(words: list[str], number: int, run: Path) -> int:
    """Send a study the signal once its run has made two more batches, and wait for both to end. Returns the study's
    exit code."""
    lines, lock = run / "metrics.jsonl", run / ".lock-holder.json"

    def batches() -> int:
        return lines.read_bytes().count(b"\n") if lines.exists() else 0

    before = batches()
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as study:
        end = time.monotonic() + 120
        while batches() < before + 2 and time.monotonic() < end:
            time.sleep(0.05)
        study.send_signal(number)
        code = study.wait(120)
    end = time.monotonic() + 60
    while lock.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return code


def test_a_study_that_was_ended_twice_goes_on_to_the_same_numbers(tmp_path, command):
    """By SIGTERM, and in what went on by SIGKILL: its run ends by itself, with a checkpoint."""
    slow = {"schedule": {"batches": 16}, "run": {"checkpoint_minutes": 0, "checkpoint_every": 1}}
    one = {"v": {"v = 1": {}}}
    file, out = study_file(tmp_path, set=slow, grid=one, claims=[], seeds=[3]), tmp_path / "out"
    words = [sys.executable, "-m", "lagrpo", "study", str(file), "--directory", str(out), "--jobs", "1"]
    run, made = out / "runs" / "v-1-seed3", 0
    for number, code in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        assert end_study(words, number, run) == code
        assert made + 2 <= len(load_metrics(run)) < 16
        made = len(load_metrics(run))
    command(file, "--directory", out)
    make_here(Plan.read(file, tmp_path / "undisturbed"))
    assert numbers(out) == numbers(tmp_path / "undisturbed")


def test_two_processes_do_not_make_one_study(tmp_path, command, capsys):
    from lagrpo.runs.lock import locked

    file, out = study_file(tmp_path), tmp_path / "out"
    out.mkdir()
    with locked(out), pytest.raises(SystemExit) as ended:
        command(file, "--directory", out)
    assert ended.value.code == 2
    assert "another process is writing into" in capsys.readouterr().err


def test_the_report_of_no_runs_says_what_is_missing(tmp_path):
    plan = Plan.read(study_file(tmp_path), tmp_path / "out")
    page = Report(plan.study, {}, {}).to_markdown()
    assert "**4 runs missing**" in page
    assert "cannot be told: no seed has runs of both sides" in page


def test_a_claim_of_a_measure_that_no_run_has_says_so(tmp_path):
    claims = [{"says": "", "claim": "v = 3 > v = 1", "measure": measure} for measure in ("pass_at_9", "pass_at_1")]
    plan = Plan.read(study_file(tmp_path, claims=claims), tmp_path / "out")
    run = Finished([{"reward_mean": 0.5, "lag_max": 0}] * 4, {"after": {"pass_at_1": 0.5}})
    settings = {key: run.settings for key, run in plan.runs.items()}
    lines = Report(plan.study, {key: run for key in plan.runs if key[0] == ("v = 1",)}, settings).to_markdown()
    assert "| cannot be told: no run has this measure |" in lines
    assert "| cannot be told: no seed has runs of both sides |" in lines


def test_a_claim_against_a_number_shows_the_value_beside_the_difference(tmp_path):
    claims = [{"says": "", "claim": "v = 1 >= 0.5"}, {"says": "", "claim": "v = 1 > 0"}]
    plan = Plan.read(study_file(tmp_path, claims=claims), tmp_path / "out")
    runs = {
        (cell, seed): Finished([{"reward_mean": 0.5, "lag_max": 0}] * 4, {"after": {"pass_at_1": seed / 10}})
        for cell, seed in plan.runs
    }
    page = Report(plan.study, runs, {key: run.settings for key, run in plan.runs.items()}).to_markdown()
    assert "| -15.0% ± 63.5% (of 35.0%) |" in page
    assert "| 35.0% ± 63.5% |" in page


def test_a_directory_that_cannot_be_made_is_named(tmp_path, command, capsys):
    (tmp_path / "file").write_text("")
    for words in ([], ["--report"]):
        with pytest.raises(SystemExit) as ended:
            command(study_file(tmp_path), "--directory", tmp_path / "file" / "out", *words)
        assert ended.value.code == 2
        assert f"{tmp_path / 'file' / 'out'}: Not a directory" in capsys.readouterr().err


def test_relative_settings_are_beside_the_study(tmp_path):
    (tmp_path / "sub").mkdir()
    file = study_file(tmp_path, settings="sub/base.toml")
    (tmp_path / "base.toml").rename(tmp_path / "sub" / "base.toml")
    assert len(Plan.read(file, tmp_path / "out").runs) == 4
    (tmp_path / "sub" / "base.toml").unlink()
    with pytest.raises(SettingsError, match=r"sub/base\.toml: no such settings file"):
        Plan.read(file, tmp_path / "out")
