"""A run without memory says where it was and which setting to lower, and keeps what it had."""

from __future__ import annotations

import pytest
import torch
from running import leftovers, options, tiny_settings
from tiny import save_tiny

from lagrpo import cli
from lagrpo.runs import load_metrics
from lagrpo.training.trainer import Trainer


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_command_says_what_to_lower_and_keeps_what_was_learned(tmp_path, monkeypatch, capsys, error):
    original, calls = Trainer.step, []

    def step(*given):
        calls.append(given)
        if len(calls) == 2:
            raise error
        return original(*given)

    monkeypatch.setattr(Trainer, "step", step)
    settings = tiny_settings(save_tiny(tmp_path / "model"), tmp_path, run={"name": "run"}, eval={"at_start": False})
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *options(settings)])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert f"The run so far: {tmp_path / 'run'} (1 of 3 batches" in said
    assert "made; stopped during: learning)" in said
    assert "lower optimizer.micro_batch_tokens" in said
    assert (tmp_path / "run" / "weights" / "final" / "model.safetensors").is_file()
    assert len(load_metrics(tmp_path / "run")) == 1
    assert leftovers(tmp_path / "run") == []
