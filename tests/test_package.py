"""The wheel has everything that the code reads; files beside the package agree with it."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

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
                try:
                    exec(ast.unparse(node))  # ImportError: cannot import name 'x' from 'lagrpo.y'
                except ModuleNotFoundError as error:
                    # Modules of lagrpo.gpu need Triton, which is not installed everywhere.
                    if error.name != "triton":
                        raise


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_continuous_integration_tests_every_python_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    matrix = read_yaml(".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python-version"] == versions


def test_pre_commit_has_the_ruff_of_the_constraints():
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (ruff,) = [line for line in constraints if line.startswith("ruff==")]
    hooks = [
        hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    ]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format"}
    assert all(hook["additional_dependencies"] == [ruff] for hook in hooks)


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_issue_form_has_what_github_needs(form):
    template = read_yaml(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert {"name", "description", "body"} <= template.keys()
    identifiers = [field["id"] for field in template["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in template["body"])
