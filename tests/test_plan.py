"""`lagrpo plan`: what it reads of a run, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import tiny_settings
from test_cli import lagrpo
from tiny import save_tiny

from lagrpo.cli import read_plan
from lagrpo.planning.measured import Measured, cost_of_syncs, mean_seconds, whole_cycles
from lagrpo.planning.plan import make_plan
from lagrpo.policy.lora import count_parameters
from lagrpo.settings.plan import PlanSettings
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import validate
from lagrpo.training.build import lora_of
from lagrpo.training.explain import empty_model

# Reading a run


def line(batch: int, synced: int, **seconds: float) -> dict[str, Any]:
    parts = {"sampling": 0.0, "judging": 0.0, "learning": 0.0, "scoring": 0.0, "sync": 0.0, "total": 0.0} | seconds
    return {
        "batch": batch, "synced": synced, "seconds_generating": None, "sync_bytes": 100.0, "seconds_paused": 0.5,
        **{f"seconds_{name}": value for name, value in parts.items()},
    }  # fmt: skip


def test_whole_cycles():
    """Syncs at 1, 3, 6: batches 1 and 2 start up, 3 to 5 are whole, 6 and 7 are not; with 8 they are."""
    metrics = [line(b, int(b in (1, 3, 6))) for b in range(1, 9)]
    assert [m["batch"] for m in whole_cycles(metrics[:7], 3)] == [3, 4, 5]
    assert [m["batch"] for m in whole_cycles(metrics, 3)] == [3, 4, 5, 6, 7, 8]
    assert [m["batch"] for m in whole_cycles(metrics[:2], 3)] == [1, 2]  # one cycle alone
    assert [m["batch"] for m in whole_cycles([line(b, 1) for b in (1, 2, 3)], 1)] == [2, 3]
    assert whole_cycles([], 1) == []


def test_the_means_of_a_batch():
    metrics = [line(1, 1, sampling=2, learning=3, sync=1, total=7), line(2, 0, learning=3, total=4)]
    found = mean_seconds(metrics)
    assert {k: found[k] for k in ("sampling", "learning", "sync", "rest", "total", "generating")} == {
        "sampling": 1, "learning": 3, "sync": 0.5, "rest": 1, "total": 5.5, "generating": 1,
    }  # fmt: skip


def test_what_weight_syncs_cost_a_batch():
    cycle = [line(b, int(b % 2), sync=3.0 * (b % 2), sampling=1, total=10) for b in range(1, 7)]
    found = cost_of_syncs(cycle, 2)
    assert found == {"syncs": 0.5, "bytes": 50, "seconds": 1.5, "paused": 0.25, "waiting": 1, "total": 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Any:
    from lagrpo.training.run import train

    root = tmp_path_factory.mktemp("runs")
    schedule = {"v": 2, "batches": 7}
    further = {"evaluation": {"before_and_after": False}, "objective": {"beta": 0.0}}
    settings = tiny_settings(model, root, schedule=schedule, **further)
    return train(settings).run


def test_the_plan_of_a_run_is_the_run(run):
    """At its own settings the model gives back what it was fitted to."""
    measured = Measured.read(str(run))
    assert measured.batches == 6  # syncs at 1, 2, 4, 6: from 2 on, as 6 and 7 are whole
    plan = make_plan(measured.settings, PlanSettings(from_run=str(run)), measured)
    found = plan.best.seconds
    assert plan.best.layout.name == "1 does both"
    assert found.sampling == pytest.approx(measured.seconds["sampling"], rel=1e-6)
    assert found.learning == pytest.approx(measured.seconds["learning"])
    assert found.judging == pytest.approx(measured.seconds["judging"])
    both = measured.seconds["rest"] + measured.seconds["scoring"]
    assert found.rest + found.scoring == pytest.approx(max(both, found.scoring + measured.seconds["rest"]))
    assert found.sync == pytest.approx(measured.per_sync / 2, rel=1e-6)


def test_lengths_of_a_run(run):
    measured = Measured.read(str(run))
    own = measured.lengths(6)
    assert 1 <= own.mean <= own.longest <= 6
    assert measured.lengths(1) == replace(own, mean=1.0, longest=1.0)
    assert measured.lengths(60).longest >= own.longest


def test_a_run_predicts_another_schedule(run, model):
    """Twice the updates take twice as long; twice the prompts less, as a micro-batch has a constant of its own; more
    batches asked for at once take less each."""
    measured = Measured.read(str(run))
    given = PlanSettings(from_run=str(run))
    base = make_plan(measured.settings, given, measured).best.seconds
    schedule = measured.settings.schedule

    def changed(**change: int) -> Any:
        settings = measured.settings.model_copy(update={"schedule": schedule.model_copy(update=change)})
        return make_plan(settings, given, measured).best.seconds

    assert changed(i=2).learning == pytest.approx(2 * base.learning)
    assert base.learning < changed(prompts=4).learning < 2 * base.learning
    assert changed(v=4).sampling < base.sampling
    assert changed(v=4).sync == pytest.approx(base.sync / 2)
    assert changed(prompts=4).rest == pytest.approx(2 * base.rest)


# The command


SPLIT = ("plan", "--gpus", 8, "--gpu", "h200", "--network", "400Gb")


def test_the_command_prints_a_plan_and_says_that_it_is_a_model(model):
    code, out, err = lagrpo(*SPLIT, "--model", model, "--schedule.v", 7)
    assert (code, err) == (0, "")
    assert "a model of a batch's time, not a measurement" in out
    assert [name for name in ("8 colocated", "1 + 7", "4 + 4", "7 + 1") if name not in out] == []
    assert "assumed" in out
    assert "its data sheet" in out


def test_the_plan_for_programs(model):
    code, out, err = lagrpo(*SPLIT, "--model", model, "--servers", 1, "--json", "--sampling.G", 8)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert plan["best"]["name"] == "1 + 7"
    assert [layout["servers"] for layout in plan["layouts"]] == list(range(8))
    assert plan["batch"]["G"] == 8
    assert [entry["v"] for entry in plan["v"]] == [1, 2, 5, 10, 20]
    assert plan["weight_sync"]["bytes"] == plan["model"]["weights_bytes"] == 2 * plan["model"]["parameters"]
    assert plan["v"][3]["sync_bytes_per_batch"] == pytest.approx(plan["weight_sync"]["bytes"] / 10)
    for layout in plan["layouts"]:
        parts = {k: v for k, v in layout["seconds"].items() if k not in ("generating", "total")}
        assert sum(parts.values()) == pytest.approx(layout["seconds"]["total"])
    assert set(plan["memory_per_rank"]) == {"optimizer", "layers"}


def test_a_plan_with_adapters(model):
    settings, full = (Settings.model_validate({"model": {"path": str(model), "lora": {"r": r}}}) for r in (4, 0))
    plan, whole = (make_plan(each, PlanSettings(gpus=4, gpu="h100")) for each in (settings, full))
    lora = lora_of(settings.model)
    assert lora is not None
    assert plan.model.adapters == count_parameters(empty_model(settings), lora)
    assert plan.work.backward == 2
    assert {*plan.memory} == {"optimizer", "layers"}
    assert plan.memory["optimizer"]["optimizer"] < whole.memory["optimizer"]["optimizer"]
    assert {option.layout.wire for option in plan.options} == {"directory"}
    assert plan.to_dict()["weight_sync"]["bytes"] == 2 * plan.model.adapters
    none = make_plan(settings, PlanSettings(gpus=4, gpu="h100", memory=0.001))
    assert not any(option.layout.layers for option in none.options)
    code, out, _ = lagrpo("plan", "--model", model, "--model.lora.r", 4, "--gpu", "h100")
    assert code == 0
    assert f"frozen; {plan.model.adapters / 1e6:.1f} M numbers of adapters are trained" in " ".join(out.split())


def test_a_run_of_all_weights_predicts_one_of_adapters(run):
    given, measured = PlanSettings(from_run=str(run)), Measured.read(str(run))
    whole = make_plan(measured.settings, given, measured)
    lora = measured.settings.model.lora.model_copy(update={"r": 4})
    model = measured.settings.model.model_copy(update={"lora": lora})
    adapted = make_plan(measured.settings.model_copy(update={"model": model}), given, measured)
    assert adapted.rates.learning == whole.rates.learning
    assert adapted.rates.update == pytest.approx(whole.rates.update * adapted.model.trained / whole.model.parameters)
    assert adapted.best.seconds.learning < whole.best.seconds.learning


def test_the_best_split_is_the_fastest_that_fits(model):
    settings = Settings.model_validate({"model": {"path": str(model)}})
    plan = make_plan(settings, PlanSettings(gpus=4, gpu="h100"))
    assert plan.best.seconds.total == min(option.seconds.total for option in plan.options if option.fits)
    none = make_plan(settings, PlanSettings(gpus=4, gpu="h100", memory=0.001))
    assert not any(option.fits for option in none.options)
    assert none.options[0].layout.layers is False
    sizes = [option.learner for option in plan.options]
    tight = make_plan(settings, PlanSettings(gpus=4, gpu="h100", memory=(min(sizes) - 1) / 1e9))
    assert {option.layout.layers for option in tight.options if option.fits} == {True}


def test_what_fits_nowhere_says_what_to_lower(model):
    code, out, _ = lagrpo("plan", "--model", model, "--gpu", "h100", "--memory", 0.001)
    assert code == 0
    assert "1 does both does not fit: lower optimizer.micro_batch_tokens" in out


def test_a_plan_from_a_run(run):
    code, out, err = lagrpo("plan", "--from", run, "--schedule.v", 5)
    assert (code, err) == (0, "")
    assert "every(5)" in out
    assert "measured:" in out
    code, out, _ = lagrpo("plan", f"--from={run}", "--json", "--gpus", 2)
    assert json.loads(out)["batch"]["v"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h20"), "--gpu 'h20' is not in the table; known are b200, h200,"),
        (("--gpu", "h20"), "Did you mean 'h200'?"),
        ((), "--gpu says which: b200, h200,"),
        (("--gpu", "h200", "--network", "400"), "--network '400' is no speed: write 400Gb for 400 gigabits a second"),
        (("--gpu", "h200", "--gpus", 4, "--servers", 4), "--servers 4 of --gpus 4 leaves none that learns"),
        (("--gpu", "h200", "--gpus", 16), "are more than a node's 8: say how fast the network between nodes is"),
        (("--gpu", "h200", "--gpus", "many"), "command line: gpus = 'many'"),
        (("--gpu", "h200", "--gpuss", 3), "unknown setting 'gpuss'"),
        (("--gpu", "h200", "--schedule.w", 3), "unknown setting 'schedule.w'"),
        (("--gpu", "h200", "--learning-share", 1.5), "learning_share = '1.5'"),
        (("--gpu", "h200", "--model.lora.r", 4, "--weight-sync", "nccl"), "--weight-sync nccl: vLLM loads adapters"),
        (("--gpu", "h200", "--model.lora.r", 4, "--model.lora.targets", "q"), "model.lora: targets: 'q'"),
        (("--from", "nowhere"), "--from: there is no run at nowhere"),
        (("--gpu", "h200", "--model", "./nowhere"), "model.path"),
        (("a.toml", "b.toml", "--gpu", "h200"), "one settings file, not 2"),
    ],
)
def test_what_is_refused(model, words, said):
    given = words if "--model" in words else (*words, "--model", model)
    code, _, err = lagrpo("plan", *given)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_rate_is_not_both_measured_and_stated(run):
    code, _, err = lagrpo("plan", "--from", run, "--learning-share", 0.5)
    assert (code, err) == (
        2,
        "lagrpo: --from measures what --learning-share would state: leave out one of them\n",
    )


def test_a_run_without_batches_measures_nothing(run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("config.toml", "environment.json"):
        (empty / name).write_bytes((run / name).read_bytes())
    code, _, err = lagrpo("plan", "--from", empty)
    assert (code, err) == (2, f"lagrpo: --from: {empty} has no batches yet: nothing is measured\n")


def test_a_gpu_of_which_only_numbers_are_known(model):
    numbers = ("--peak", 500, "--bandwidth", 2000, "--memory", 64, "--link", 100)
    code, out, _ = lagrpo("plan", "--model", model, *numbers, "--json")
    assert code == 0
    assert json.loads(out)["gpu"] == "own"


def test_the_commands_of_the_page_are_words_that_it_takes():
    docs = Path(__file__).parent.parent / "docs" / "scaling.md"
    commands = re.findall(r"^lagrpo plan (.*?)\s*(?:#.*)?$", docs.read_text(), re.M)
    assert len(commands) == 4
    for command in commands:
        given, asked = read_plan(command.split())
        validate(Settings, {}, given.overrides, "command line")
        assert asked.gpus > 1 or asked.from_run
    for name in ("predicted beside measured", "communication by v"):  # benchmarks fill in what is between them
        assert docs.read_text().count(f"<!-- {name} -->") == docs.read_text().count(f"<!-- end of {name} -->") == 1


def test_the_help_lists_every_figure():
    code, out, _ = lagrpo("plan", "--help")
    assert code == 0
    for name in PlanSettings.model_fields:
        assert f"--{name}" in out


def test_settings_of_a_run_and_of_the_plan_have_different_names():
    assert not set(PlanSettings.model_fields) & set(Settings.model_fields)
