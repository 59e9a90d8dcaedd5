"""What is refused before anything heavy is loaded."""

from __future__ import annotations

import os
from typing import Any

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


def test_models_that_may_exist_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "no-such").mkdir()
    (tmp_path / "no-such" / "config.json").write_text("{}")
    for model in ("model", "smollm2", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "~/no-such"):
        assert check_settings(settings(model={"path": model})).name == "grpo"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": {"path": "./nosuch"}}, r"model.path: model directory './nosuch' does not exist"),
    ({"model": {"path": "smolm2"}}, "model.path: .* did you mean 'smollm2'"),
    ({"model": {"path": "adapter"}}, "model.path: 'adapter' is not a model directory: it has no config.json"),
    ({"model": {"path": "model", "chat_template": "nosuch"}}, "model.chat_template: nosuch: No such file"),
    ({"run": {"name": "../x"}}, "run: run name '../x' is not .*set run.output_dir"),
    ({"run": {"name": "taken"}}, "run: the run runs/taken already exists and is not empty: choose another name"),
    ({"run": {"output_dir": "file"}}, "run: file is a file, so nothing can be written to file"),
    ({"task": {"name": "gsm"}}, "task.name: there is no task 'gsm'.* Did you mean 'gsm8k'"),
    ({"task": {"numbers": 4}}, "task.numbers is set, but the task 'arithmetic' does not take it: countdown do"),
    ({"task": {"reward": "exakt"}}, "task.reward: no built-in reward 'exakt'"),
    ({"offline": {"data": "nosuch.jsonl"}}, "offline.data: nosuch.jsonl matches no such file"),
    ({"loss": {"recipe": "grop"}}, "loss: unknown recipe 'grop'; the nearest is 'grpo'"),
    ({"loss": {"recipe": "dapo", "kl_estimator": "k3"}}, "loss: kl was set, but nothing reads it.*beta = 0"),
    ({"eval": {"best_metric": "pass@1", "at_start": False}}, "eval.best_metric = 'pass@1' is never found"),
]


def test_settings_that_cannot_be_run_are_rejected_by_name():
    for sections, message in WRONG:
        with pytest.raises(SettingsError, match=f"^{message}"):
            check_settings(settings(**sections))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "sealed").mkdir(mode=0o500)
    with pytest.raises(SettingsError, match="sealed cannot be written"):
        check_settings(settings(run={"output_dir": "sealed/runs"}))


def test_task_object_replaces_the_settings_of_the_task(tmp_path):
    from sample_task import load

    check_settings(settings(task={"name": "gsm"}, run={"output_dir": "new/runs"}), load())
    assert not (tmp_path / "new").exists()


def test_evaluations_are_checked_alike():
    check_evaluation(EvalSettings.model_validate({"model": {"path": "model"}}))
    with pytest.raises(SettingsError, match=r"^model\.path"):
        check_evaluation(EvalSettings.model_validate({"model": {"path": "./nosuch"}}))
    with pytest.raises(SettingsError, match=r"^task\.numbers"):
        check_evaluation(EvalSettings.model_validate({"task": {"numbers": 3}}))


def test_refusing_names_the_setting_and_leaves_other_errors_alone():
    with pytest.raises(SettingsError, match=r"^run: no") as error, refusing("run"):
        raise OSError("no")
    assert isinstance(error.value.__cause__, OSError)
    with pytest.raises(SettingsError, match=r"^as it was"), refusing("run"):
        raise SettingsError("as it was")
    with pytest.raises(TypeError), refusing("run"):
        raise TypeError
