"""The wheel: everything that the code reads is in it, and nothing else."""

from __future__ import annotations

import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from test_cli import lagrpo

from lagrpo import cli

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return zipfile.ZipFile(built)


def test_every_source_file_is_in_the_wheel_and_the_settings_of_the_demo(wheel):
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "src/lagrpo"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    sources = {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == sources | {"lagrpo/demo.toml"}
    for name in ("cpu/layer.c", "cpu/kernels.h", "view/assets/app.js", "py.typed"):
        assert f"lagrpo/{name}" in inside


def test_the_settings_of_the_demo_have_one_source(wheel):
    assert wheel.read("lagrpo/demo.toml") == (ROOT / "experiments" / "demo.toml").read_bytes()
    assert cli.find_demo() == ROOT / "experiments" / "demo.toml"


def test_what_the_wheel_says_of_itself(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("METADATA")]
    metadata = wheel.read(name).decode()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"Provides-Extra: {extra}" for extra in extras} <= set(metadata.splitlines())
    assert "Classifier: Typing :: Typed" in metadata
    assert " @ " not in metadata  # a requirement by its URL, which package indexes refuse


def test_the_demo_is_the_training_of_its_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = lagrpo(
        "demo", "--dry-run", "--schedule.batches", 3
    )  # the first time it converts the model, and says so
    assert code == 0
    same = lagrpo("train", ROOT / "experiments" / "demo.toml", "--dry-run", "--schedule.batches", 3)
    assert same == (0, out, "")
    assert 'path = "smollm2"' in out
    assert "batches = 3" in out


def test_the_demo_takes_no_settings_file():
    code, _, err = lagrpo("demo", "a.toml")
    assert code == 2
    assert "lagrpo train a.toml" in err
