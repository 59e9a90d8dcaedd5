"""The Triton kernels compile for an H100, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="these tests need Triton: make test-triton installs it")
pytestmark = pytest.mark.triton


def test_kernels_compile_without_local_memory_and_without_atomics(tmp_path):
    """Registers that do not fit go to local memory, which is slow. Atomics add in any order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) >= 15
    assert {
        kernel["kernel"]: kernel["local_memory"] for kernel in kernels if kernel["local_memory"]
    } == {}
    assert {kernel["kernel"]: kernel["atomics"] for kernel in kernels if kernel["atomics"]} == {}
