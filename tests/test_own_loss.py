"""Losses of a user's own: the examples of docs/own-loss.md, and runs that train, resume and verify
with one."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from page_code import current_directory_with, python_blocks
from running import tiny_settings

import lagrpo
from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.settings.loss import LossSettings
from lagrpo.settings.user_loss import keep_sources
from lagrpo.verify import verify_run

MODULE = "losses_of_the_page"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The functions of the page, as a module in the current directory."""
    functions = [block for block in python_blocks("own-loss.md") if "import lagrpo" not in block]
    text = "\n\n".join(functions)
    with current_directory_with({MODULE: text}, tmp_path, monkeypatch):
        yield MODULE


@pytest.fixture
def settings(model, tmp_path):
    """Settings of a run with this loss."""
    return lambda recipe, **loss: tiny_settings(
        model,
        tmp_path / "runs",
        run={"name": "own"},
        schedule={"batches": 3},
        eval={"at_start": False},
        loss={"recipe": recipe, "beta": 0.0, **loss},
    )


def test_surrogate_of_the_page_reads_what_it_names_and_has_its_knob(module):
    recipe = resolve(f"{module}:dppo", {"delta": 0.2})
    assert recipe.required_inputs == {"rollout_logp"}
    assert recipe.settings["surrogate.delta"] == 0.2
    assert recipe.skips_zero_advantage


def test_formula_of_a_partial_is_the_docstring_of_its_function():
    def scaled(x, scale):
        """scale rho A"""
        return scale * x.logp * x.advantage

    assert resolve(partial(scaled, scale=2.0)).formula == "scale rho A"


def test_filter_of_the_page_keeps_the_first_tokens_of_each_completion(module):
    recipe = resolve("grpo", {"filters": [f"{module}:first_tokens"], "count": 2})
    from lagrpo.core.probe import LENGTHS, random_inputs

    kept_T = recipe.kept(random_inputs())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    assert torch.equal(kept_T == 1, positions < 2)


def test_statistic_of_the_page_is_collected_over_the_step(module):
    recipe = resolve("reinforce", {"mask": f"{module}:calm", "share": 0.25})
    assert recipe.needs_step_statistics
    assert recipe.required_inputs == {"entropy"}


def test_run_with_an_own_loss_resumes_and_verifies_from_the_kept_file(settings, module):
    run = lagrpo.train(settings(f"{module}:dppo")).run
    kept = (run / "loss" / f"{module}.py").read_text("utf-8")
    assert kept == Path(f"{module}.py").read_text("utf-8")
    resumed = lagrpo.train(resume=run, settings={"schedule.batches": 4}, trust_run_code=True)
    assert resumed.batches == 4
    sys.modules.pop(module)
    Path(f"{module}.py").unlink()
    shutil.rmtree("__pycache__", ignore_errors=True)
    assert not verify_run(run, trust_run_code=True).differences


def test_function_given_in_python_trains_under_the_name_of_its_module(settings, module):
    function = resolve(f"{module}:dppo").surrogate.function
    run = lagrpo.train(settings("grpo"), loss=function).run
    assert f'recipe = "{module}:dppo"' in (run / "config.toml").read_text("utf-8")


def test_loss_that_does_not_compute_is_rejected_before_the_model_loads(settings, tmp_path):
    with pytest.raises(SettingsError, match="no token has a gradient"):
        lagrpo.train(settings("grpo"), loss=lambda x: x.advantage)
    assert not (tmp_path / "runs").exists()


def test_mask_of_the_page_that_reads_a_step_statistic_trains(settings, module):
    trained = lagrpo.train(settings("reinforce", overrides={"mask": f"{module}:calm"}))
    assert trained.batches == 3


def test_loss_given_twice_is_rejected(module, tmp_path):
    function = resolve(f"{module}:dppo").surrogate.function
    with pytest.raises(SettingsError, match="give one of them"):
        lagrpo.train("demo", loss=function, settings={"loss.recipe": "grpo"})


def test_empty_list_of_filters_leaves_none():
    assert resolve("m2po", LossSettings(filters=()).knobs).filters == ()
    assert len(resolve("m2po", LossSettings().knobs).filters) == 1
    assert LossSettings.model_validate({"filters": "opsm"}).filters == ("opsm",)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"overrides": {"mask": print}}, id="mask"),
        pytest.param({"filters": [print]}, id="filter"),
    ],
)
def test_function_among_settings_is_rejected_with_the_cure(values):
    with pytest.raises(ValueError, match="'module:function'"):
        LossSettings.model_validate(values)


def test_true_is_no_number():
    with pytest.raises(ValueError, match="epsilon = true"):
        LossSettings.model_validate({"epsilon": True})


def test_filter_that_gives_other_values_than_0_and_1_is_rejected(tmp_path):
    def strange(x):
        return x.logp

    with pytest.raises(ValueError, match="0 and 1"):
        resolve("grpo", {"filters": [strange]})


def test_run_with_a_loss_of_no_module_says_how_it_resumes_and_verifies(settings):
    run = lagrpo.train(settings("grpo"), loss=lambda x: x.logp * x.advantage).run
    with pytest.raises(SettingsError, match=r"lagrpo.train\(resume=.*loss="):
        lagrpo.train(resume=run)
    report = verify_run(run, trust_run_code=True)
    assert not report.differences
    assert any("loss" in reason for reason in report.skipped)


def test_kept_file_stays_beside_a_changed_one(module, tmp_path):
    recipe = resolve(f"{module}:dppo")
    keep_sources(recipe, tmp_path)
    file = Path(f"{module}.py")
    before = file.read_text("utf-8")
    file.write_text(before + "\n# changed\n", encoding="utf-8")
    for _ in range(2):  # the second time nothing is new
        keep_sources(recipe, tmp_path)
    file_names = sorted(path.name for path in (tmp_path / "loss").iterdir())
    assert file_names == [f"{module}.2.py", f"{module}.py"]
    assert (tmp_path / "loss" / f"{module}.py").read_text("utf-8") == before


class Longest(lagrpo.Callback):
    """A metric of a callback: the tokens of the longest completion."""

    def measure(self, metrics, rollouts):
        return {"mine/longest": max(len(row["token_ids"]) for row in rollouts)}


@pytest.mark.parametrize("tokens", [16, 4096], ids=["many micro-batches", "one micro-batch"])
def test_own_metrics_are_means_over_the_batch(settings, tokens):
    """Tokens of completions with an advantage, whatever micro-batches they are in."""
    own = settings("own_functions:logs_metrics")
    own["optimizer"]["micro_batch_tokens"] = tokens
    seen = []

    class Seen(lagrpo.Callback):
        def on_batch(self, metrics, rollouts):
            seen.append(metrics)

    result = lagrpo.train(own, callbacks=[Longest(), Seen()])
    lines = load_metrics(result.run)
    assert [line["mine/longest"] for line in lines] == [line["mine/longest"] for line in seen]
    for line, rows in zip(lines, (load_rollouts(result.run, [b]) for b in (1, 2, 3)), strict=True):
        used = [row for row in rows if row["advantage"]]
        surprises = [-logp for row in used for logp in row["old_logprobs"]]
        assert line["mine/longest"] == max(len(row["token_ids"]) for row in rows)
        if used:
            assert line["mine/surprise"] == pytest.approx(sum(surprises) / len(surprises), rel=1e-5)
            positive = sum(row["advantage"] > 0 for row in used)
            assert line["mine/positive"] == pytest.approx(positive / len(used))
            assert line["mine/one"] == 1.0
    assert any("mine/one" in line for line in lines)
    assert not verify_run(result.run, trust_run_code=True).differences


def test_callback_that_cannot_measure_ends_the_run_after_its_batch_is_on_disk(settings, tmp_path):
    class Broken(lagrpo.Callback):
        def measure(self, metrics, rollouts):
            raise RuntimeError("no measure")

    with pytest.raises(RuntimeError, match="no measure"):
        lagrpo.train(settings("grpo"), callbacks=[Broken()])
    run = tmp_path / "runs" / "own"
    assert [line["step"] for line in load_metrics(run)] == [1]
    assert lagrpo.train(resume=run, trust_run_code=True).batches == 3
    assert [line["step"] for line in load_metrics(run)] == [1, 2, 3]


def test_metric_of_lagrpo_cannot_be_logged_by_a_loss(settings):
    def loss(x):
        x.log("rollout/kl", x.logp)
        return x.logp * x.advantage

    with pytest.raises(SettingsError, match="rollout/kl"):
        lagrpo.train(settings("grpo"), loss=loss)
