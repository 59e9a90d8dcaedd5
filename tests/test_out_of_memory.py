"""A run without memory says where it was and which setting to lower, and keeps what it had."""

from __future__ import annotations

import errno
import inspect

import pytest
import torch
from each import each
from running import leftovers, options, tiny_settings
from tiny import save_tiny

from lagrpo import cli
from lagrpo.rollout.local import LocalSampler
from lagrpo.runs import load_metrics
from lagrpo.training import build
from lagrpo.training.memory import NoMemoryError, explained
from lagrpo.training.run import train
from lagrpo.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_templates")


def exhaust(*_, **__):
    """PyTorch's own error where a CPU has no memory."""
    torch.empty(1 << 58, dtype=torch.uint8)


@pytest.fixture
def settings(tmp_path):
    evaluation = {"at_start": False}
    return tiny_settings(save_tiny(tmp_path / "model"), tmp_path / "runs", eval=evaluation)


def at_call(number, original):
    calls = []

    def called(*args, **kwargs):
        calls.append(1)
        return exhaust() if len(calls) == number else original(*args, **kwargs)

    def generate(*args, **kwargs):  # nothing happens before the first group is taken
        yield from called(*args, **kwargs) or ()

    return generate if inspect.isgeneratorfunction(original) else called


@pytest.mark.parametrize(
    ("owner", "name", "place", "setting"),
    [
        (Trainer, "step", "batch 2, learning", r"\.micro_batch_tokens.*optimizer\.gradient_checkpointing"),
        (LocalSampler, "sample", "batch 2, sampling", "rollout.max_num_seqs"),
    ],
)
def test_it_names_batch_phase_and_setting(settings, tmp_path, monkeypatch, owner, name, place, setting):
    monkeypatch.setattr(owner, name, at_call(2, getattr(owner, name)))
    with pytest.raises(NoMemoryError, match=rf"^out of memory \({place}\): .*{setting}.*DefaultCPUAllocator") as raised:
        train(settings)
    (directory,) = (tmp_path / "runs").iterdir()
    assert raised.value.__notes__[0].startswith(f"The run until then: {directory} (1 of 3 batches")
    assert (directory / "weights" / "final" / "model.safetensors").is_file()
    assert len(load_metrics(directory)) == 1
    assert leftovers(directory) == []


def test_a_model_that_does_not_fit(settings, monkeypatch):
    monkeypatch.setattr(build, "load_policy", exhaust)
    with pytest.raises(NoMemoryError, match=r"^out of memory \(loading\): take a smaller model"):
        train(settings)


def test_the_command_says_it_in_one_line(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "step", exhaust)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *options(settings)])
    assert ended.value.code == 1
    first, second = [line for line in capsys.readouterr().err.splitlines() if "memory" in line or "until then" in line]
    assert first.startswith("lagrpo: out of memory (batch 1, learning): lower optimizer.micro_batch_tokens")
    assert second.startswith(f"The run until then: {tmp_path}")


@each(
    ("error", "lacking"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_counts_as_a_want_of_memory(error, lacking):
    with pytest.raises(NoMemoryError if lacking else type(error)), explained(lambda: "learning"):
        raise error
