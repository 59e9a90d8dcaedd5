"""Runs killed with SIGKILL at random instants and resumed leave what undisturbed runs leave: a few of `make chaos`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_killed_runs_resume_bit_for_bit():
    """Five kills, one of them of a run that was just being resumed, of two schedules."""
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), "--kills", "5"]
    command += ["--kinds", "asking ahead", "dynamic sampling"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == "5 of 5 equal"
