"""Runs killed with SIGKILL at random instants and resumed leave what undisturbed runs leave: a few
of `make chaos`."""

from __future__ import annotations

from chaos import Trials, merged, tiny


def test_run_killed_twice_resumes_bit_for_bit(tmp_path):
    """The second kill comes while it resumes."""
    short = {"schedule": {"batches": 6, "ref_sync_every": 3}}
    trials = Trials(tmp_path, merged(tiny(tmp_path), short), exact=True, seed=0)
    assert trials.trial(2, "asking ahead")[1] == []
