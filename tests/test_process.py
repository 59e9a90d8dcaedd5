"""What a run sets for the process, others find as it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from running import children, tiny_settings
from tiny import save_tiny, tiny_policy

from lagrpo.errors import SettingsError
from lagrpo.runs import Run
from lagrpo.settings.schema import EvalSettings
from lagrpo.training.evaluate_model import evaluate_model
from lagrpo.training.run import train

HERE = Path(__file__).parent


@pytest.fixture
def settings(tmp_path):
    model = save_tiny(tmp_path / "model")
    torch.set_num_threads(1)

    def of(**sections):
        changed = {"model": {"kernels": "torch", "threads": 3}, "eval": {"at_start": False}}
        return tiny_settings(model, tmp_path / "runs", **changed | sections)

    return of


@pytest.fixture
def seen(monkeypatch):
    """What was in effect while the run was going on."""
    found = []
    original = torch.nn.utils.get_total_norm

    def spied(*args):
        found.append(torch.get_num_threads())
        return original(*args)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", spied)
    return found


def test_a_run_gives_threads_back(settings, seen):
    train(settings())
    assert seen[0] == 3
    assert torch.get_num_threads() == 1


def test_so_does_one_that_is_refused_after_the_model_was_loaded(settings):
    with pytest.raises(SettingsError, match=r"tokens; rollout\.max_prompt_length is 3"):
        train(settings(rollout={"max_prompt_length": 3}))
    assert torch.get_num_threads() == 1


def test_so_does_an_evaluation(settings, tmp_path):
    model = settings()["model"]
    given = {"model": model, "max_tokens": 3, "max_prompt_tokens": 64, "prompts": 2, "output": str(tmp_path / "out")}
    evaluate_model(EvalSettings.model_validate(given))
    assert torch.get_num_threads() == 1


def test_a_run_does_not_choose_what_other_policies_compute_with(settings):
    """Its backend is its own: one by PyTorch leaves those by the kernels alone."""
    ours = tiny_policy(backend="c")
    environment = json.loads((train(settings()).run / "environment.json").read_text())
    assert environment["computation"] == "PyTorch (as chosen)"
    assert ours.model.computation.startswith("C kernels (")
    assert tiny_policy(backend="auto").model.computation == ours.model.computation


def test_tokenizers_start_threads_again(settings, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    train(settings())
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_judges_end_with_a_run_that_cannot_be_written(settings, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Run, "create", full)
    with pytest.raises(OSError, match="No space left"):
        train(settings())
    assert not children()
