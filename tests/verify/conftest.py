"""Runs that all tests of `lagrpo verify` share, and a copy to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from changed_runs import train_run


@pytest.fixture(scope="session")
def untouched_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in float32, where a replay decides every sampled token. Tests leave it as it is."""
    return train_run(model, tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="session")
def bfloat16_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16, where rounding leaves some tokens undecided."""
    return train_run(model, tmp_path_factory.mktemp("bfloat16"), model={"dtype": "bfloat16"})


@pytest.fixture
def run(untouched_run: Path, tmp_path: Path) -> Path:
    """A copy of the float32 run, for the test to change."""
    return shutil.copytree(untouched_run, tmp_path / "run")
