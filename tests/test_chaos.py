"""Runs killed with SIGKILL at random instants and resumed leave what undisturbed runs leave: a few of `make chaos`."""

from __future__ import annotations

from pathlib import Path

from chaos import Trials, tiny


def test_killed_runs_resume_bit_for_bit(tmp_path, monkeypatch):
    """The last of the three kills comes while the run is being resumed."""
    monkeypatch.chdir(Path(__file__).parent)  # where the tiny model's task is
    trials = Trials(tmp_path, tiny(tmp_path), exact=True, seed=0)
    assert [trials.trial(number, "asking ahead")[1] for number in (1, 2)] == [[], []]
