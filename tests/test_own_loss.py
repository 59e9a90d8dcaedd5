"""Losses of a user's own: the examples of docs/own-loss.md, and runs that train, resume and verify with one."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from running import tiny_settings
from tiny import save_tiny

import lagrpo
from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.verify import verify_run

PAGE = Path(__file__).parents[1] / "docs" / "own-loss.md"
MODULE = "losses_of_the_page"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The functions of the page, as a module in the current directory."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    functions = [block for block in blocks if "import lagrpo" not in block]
    (tmp_path / f"{MODULE}.py").write_text("\n\n".join(functions), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield MODULE
    sys.modules.pop(MODULE, None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def settings(tmp_path, recipe, **loss):
    model = tmp_path / "model"
    if not model.exists():
        save_tiny(model)
    return tiny_settings(
        model,
        tmp_path / "runs",
        run={"name": "own"},
        schedule={"batches": 3},
        loss={"recipe": recipe, "beta": 0.0, **loss},
    )


def test_surrogate_of_the_page_reads_what_it_names_and_has_its_knob(module):
    recipe = resolve(f"{module}:dppo", {"delta": 0.2})
    assert recipe.required_inputs == {"rollout_logp"}
    assert recipe.settings["surrogate.delta"] == 0.2
    assert recipe.skips_zero_advantage


def test_filter_of_the_page_keeps_the_first_tokens_of_each_completion(module):
    recipe = resolve("grpo", {"filters": [f"{module}:first_tokens"], "count": 2})
    from lagrpo.core.probe import LENGTHS, random_inputs

    kept_T = recipe.kept(random_inputs())
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    assert torch.equal(kept_T == 1, places < 2)


def test_statistic_of_the_page_is_collected_over_the_step(module):
    recipe = resolve("reinforce", {"mask": f"{module}:calm", "share": 0.25})
    assert recipe.needs_step_statistics
    assert recipe.required_inputs == {"entropy"}


def test_a_run_with_an_own_loss_resumes_and_verifies_from_the_kept_file(module, tmp_path):
    run = lagrpo.train(settings(tmp_path, f"{module}:dppo")).run
    assert (run / "loss" / f"{module}.py").read_text("utf-8") == Path(f"{module}.py").read_text(
        "utf-8"
    )
    assert not verify_run(run).differences
    resumed = lagrpo.train(resume=run, settings={"schedule.batches": 4})
    assert resumed.batches == 4


def test_verify_takes_the_kept_file_after_the_module_is_gone(module, tmp_path):
    run = lagrpo.train(settings(tmp_path, f"{module}:dppo")).run
    sys.modules.pop(module)
    Path(f"{module}.py").unlink()
    shutil.rmtree("__pycache__", ignore_errors=True)
    assert not verify_run(run).differences


def test_function_given_in_python_trains_under_the_name_of_its_module(module, tmp_path):
    function = resolve(f"{module}:dppo").surrogate.function
    run = lagrpo.train(settings(tmp_path, "grpo"), loss=function).run
    assert f'recipe = "{module}:dppo"' in (run / "config.toml").read_text("utf-8")


def test_loss_that_does_not_compute_is_rejected_before_the_model_loads(tmp_path):
    with pytest.raises(SettingsError, match="no token has a gradient"):
        lagrpo.train(settings(tmp_path, "grpo"), loss=lambda x: x.advantage)
    assert not (tmp_path / "runs").exists()
