"""The wheel has everything that the code reads, and nothing else; programs outside of it use names
that it has."""

from __future__ import annotations

import ast
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(
        directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]
    )
    return zipfile.ZipFile(built)


def test_every_source_file_is_in_the_wheel(wheel):
    tracked = subprocess.run(
        [
            "git",
            "-C",
            str(ROOT),
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "src/lagrpo",
        ],
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=60,
    ).stdout.split()
    sources = {name.removeprefix("src/") for name in tracked if (ROOT / name).is_file()}
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == sources
    for name in ("cpu/layer.c", "settings/presets/demo.toml", "view/assets/app.js", "py.typed"):
        assert f"lagrpo/{name}" in inside


def test_programs_outside_the_package_import_names_that_exist():
    for path in (
        path
        for name in ("benchmarks", "conformance", "experiments")
        for path in (ROOT / name).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "lagrpo"
            ):
                exec(ast.unparse(node))  # ImportError: cannot import name 'x' from 'lagrpo.y'
