"""A run restores what it sets for the whole process."""

from __future__ import annotations

import pytest
import torch
from running import tiny_settings
from tiny import save_tiny, tiny_policy

from lagrpo.errors import SettingsError
from lagrpo.lifecycle.evaluate_model import evaluate_model
from lagrpo.lifecycle.run import train
from lagrpo.settings.load import load_settings


@pytest.fixture
def settings(tmp_path):
    model = save_tiny(tmp_path / "model")
    return lambda **sections: tiny_settings(
        model, tmp_path / "runs", **{"eval": {"at_start": False}} | sections
    )


def test_threads_and_kernels_are_given_back_after_runs_and_evaluations(
    settings, tmp_path, monkeypatch
):
    torch.set_num_threads(1)
    monkeypatch.setattr("lagrpo.lifecycle.run.choose_threads", lambda *arguments: 3)
    monkeypatch.setenv("LAGRPO_KERNELS", "torch")
    ours = tiny_policy(backend="c")
    train(settings())
    assert torch.get_num_threads() == 1
    with pytest.raises(SettingsError, match=r"tokens; rollout\.max_prompt_length is 3"):
        train(settings(rollout={"max_prompt_length": 3}))
    assert torch.get_num_threads() == 1
    evaluate_model(load_settings(settings(run={"output_dir": str(tmp_path / "out")})))
    assert torch.get_num_threads() == 1
    assert ours.model.computation.startswith("C kernels (")  # a backend belongs to its policy
