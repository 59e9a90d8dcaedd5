"""What is refused before anything heavy is loaded."""

from __future__ import annotations

import os

import pytest

from lagrpo.errors import SettingsError, refusing
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.training.checks import check_evaluation, check_settings


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """In an empty directory with a model that has only its config, a file, and a run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)


def settings(**sections) -> Settings:
    return Settings.model_validate({"model": {"path": "model"}} | sections)


@pytest.mark.parametrize(
    "model", ["model", "./model", "smollm2", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "~/no-such"], ids=str
)
def test_models_that_may_be_there(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "no-such").mkdir()
    (tmp_path / "no-such" / "config.json").write_text("{}")
    assert check_settings(settings(model={"path": model})).name == "grpo"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "./nosuch"}}, r"model.path: model directory './nosuch' does not exist"),
        ({"model": {"path": "smolm2"}}, "model.path: .* did you mean 'smollm2'"),
        ({"model": {"path": "a/b/c"}}, r"model.path: there is no directory 'a/b/c' .*, and it is no hub id"),
        ({"model": {"path": "adapter"}}, "model.path: 'adapter' is no model directory: it has no config.json"),
        ({"model": {"path": "file"}}, "model.path: 'file' is a file; a model is a directory"),
        ({"model": {"path": "model", "chat_template": "nosuch"}}, "model.chat_template: nosuch: No such file"),
        ({"run": {"name": "../x"}}, "run: run name '../x' is not .*set run.output_dir"),
        ({"run": {"name": "taken"}}, "run: the run runs/taken already exists and is not empty: choose another name"),
        ({"run": {"name": "a/b"}}, "run: run name 'a/b' is not .*set run.output_dir"),
        ({"run": {"output_dir": "file"}}, "run: file is a file, so nothing can be written to file"),
        ({"run": {"output_dir": "file/below", "name": "x"}}, "run: .*file is a file, so nothing can be written to"),
        ({"task": {"name": "gsm"}}, "task.name: there is no task 'gsm'.* Did you mean 'gsm8k'"),
        ({"task": {"numbers": 4}}, "task.numbers is set, but the task 'arithmetic' does not take it: countdown do"),
        ({"task": {"reward": "exakt"}}, "task.reward: no built-in reward 'exakt'"),
        ({"offline": {"data": "nosuch.jsonl"}}, "offline.data: nosuch.jsonl matches no such file"),
        ({"loss": {"recipe": "grop"}}, "loss: unknown recipe 'grop'; the nearest is 'grpo'"),
        ({"loss": {"overrides": {"surrogate": "cliped"}}}, "loss: unknown surrogate 'cliped'; .* 'clipped'"),
        ({"loss": {"recipe": "dapo", "kl_estimator": "k3"}}, "loss: kl was set, but nothing reads it.*beta = 0"),
        ({"loss": {"overrides": {"mask": "ring"}}}, "loss: mask was set, but nothing reads it"),
        ({"loss": {"overrides": {"masked_count": True}}}, "loss: masked_count .* mask_zero_variance is off"),
    ],
)  # fmt: skip
def test_what_is_refused(sections, message):
    with pytest.raises(SettingsError, match=f"^{message}"):
        check_settings(settings(**sections))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "sealed").mkdir(mode=0o500)
    with pytest.raises(SettingsError, match="sealed cannot be written"):
        check_settings(settings(run={"output_dir": "sealed/runs"}))


def test_a_task_object_takes_the_place_of_the_tasks_settings():
    from sample_task import load

    check_settings(settings(task={"name": "gsm"}), load())


def test_nothing_is_made_by_looking(tmp_path):
    check_settings(settings(run={"output_dir": "new/runs", "name": "one"}))
    assert not (tmp_path / "new").exists()


def test_evaluations_are_checked_alike():
    check_evaluation(EvalSettings.model_validate({"model": {"path": "model"}}))
    with pytest.raises(SettingsError, match=r"^model\.path"):
        check_evaluation(EvalSettings.model_validate({"model": {"path": "./nosuch"}}))
    with pytest.raises(SettingsError, match=r"^task\.numbers"):
        check_evaluation(EvalSettings.model_validate({"task": {"numbers": 3}}))


def test_refusing_says_what_it_was_about_and_leaves_other_errors_alone():
    with pytest.raises(SettingsError, match=r"^run: no") as error, refusing("run"):
        raise OSError("no")
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(SettingsError, match=r"^as it was"), refusing("run"):
        raise SettingsError("as it was")
    with pytest.raises(TypeError), refusing("run"):
        raise TypeError
    with pytest.raises(SettingsError), refusing("run", TypeError):
        raise TypeError
