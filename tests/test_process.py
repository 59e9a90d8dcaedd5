"""What a run sets for the process, others find as it was."""

from __future__ import annotations

import os

import pytest
import torch
from running import children, tiny_settings
from tiny import save_tiny, tiny_policy

from lagrpo.errors import SettingsError
from lagrpo.runs import Run
from lagrpo.settings.schema import EvalSettings
from lagrpo.training.evaluate_model import evaluate_model
from lagrpo.training.run import train


@pytest.fixture
def settings(tmp_path):
    model = save_tiny(tmp_path / "model")
    torch.set_num_threads(1)

    def of(**sections):
        changed = {"model": {"kernels": "torch", "threads": 3}, "eval": {"at_start": False}}
        return tiny_settings(model, tmp_path / "runs", **changed | sections)

    return of


def test_threads_kernels_and_environment_are_given_back_after_runs_and_evaluations(settings, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    seen, original = [], torch.nn.utils.get_total_norm

    def spied(*given):
        seen.append(torch.get_num_threads())
        return original(*given)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", spied)
    ours = tiny_policy(backend="c")
    train(settings())
    assert (seen[0], torch.get_num_threads()) == (3, 1)
    with pytest.raises(SettingsError, match=r"tokens; rollout\.max_prompt_length is 3"):
        train(settings(rollout={"max_prompt_length": 3}))
    assert torch.get_num_threads() == 1
    given = {"model": settings()["model"], "max_tokens": 3, "max_prompt_tokens": 64, "prompts": 2}
    evaluate_model(EvalSettings.model_validate(given | {"output": str(tmp_path / "out")}))
    assert torch.get_num_threads() == 1
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert ours.model.computation.startswith("C kernels (")  # a backend belongs to its policy
    assert tiny_policy(backend="auto").model.computation == ours.model.computation


def test_reward_workers_end_with_a_run_that_cannot_be_written(settings, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Run, "create", full)
    with pytest.raises(OSError, match="No space left"):
        train(settings())
    assert not children()
