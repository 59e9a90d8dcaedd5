"""How many threads compute, and how they wait for each other."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from each import each
from running import tiny_settings
from tiny import save_tiny

from lagrpo import threads
from lagrpo.cpu import kernels, library
from lagrpo.rollout.vllm.server import Launch
from lagrpo.runs import load_events
from lagrpo.training.run import train

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP is Linux's")
CLEAN = {name: value for name, value in os.environ.items() if name not in threads.WAITING}


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """PyTorch has two threads on a machine of two cores, and the user's environment does not say so."""
    before = torch.get_num_threads()
    for name in threads.NUMBER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_setting_then_environment_then_record_then_cores_decide(monkeypatch):
    assert threads.choose_threads(None) == 2
    assert threads.choose_threads(None, recorded=5) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads.choose_threads(None, recorded=5) == 2
    assert threads.choose_threads(3, recorded=5) == 3


@each(("usable", "physical", "expected"), [(1, 2, 1), (8, 2, 2), (2, 4, 2)])
def test_default_is_physical_cores_within_affinity_and_quota(monkeypatch, usable, physical, expected):
    monkeypatch.setattr(threads, "usable_cores", lambda: usable)
    torch.set_num_threads(physical)
    assert threads.choose_threads(None) == expected


def test_ranks_of_a_host_share_its_cores_whatever_torchrun_sets(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    assert [threads.choose_threads(None, ranks=ranks) for ranks in (1, 2, 3, 8)] == [1, 3, 2, 1]


def read_quota(root: Path, membership: str, **files: str) -> float | None:
    """With these files below the place where control groups are mounted."""
    root = root / str(len([*root.iterdir()]))
    for name, content in files.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (root / "membership").write_text(membership)
    return threads.read_quota(root / "groups", root / "membership")


V1 = "4:memory:/a\n3:cpu,cpuacct:/a/b\n1:name=systemd:/\n"


@each(
    ("membership", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 50000"}, 4.0),
        ("0::/not/here", {"cpu.max": "250000 100000"}, 2.5),  # the path is the host's, what is mounted the container's
        ("1:cpu:/\n0::/a", {"unified/a/cpu.max": "250000 100000"}, 2.5),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_quota_is_the_lowest_limit_of_the_groups_above(tmp_path, membership, files, expected):
    assert read_quota(tmp_path, membership, **files) == expected


# Runs


@pytest.fixture
def run(tmp_path):
    """A run of two threads, and what resumes it with other settings of the model."""
    model = save_tiny(tmp_path / "model")

    def go(batches: int, number: int | None = None) -> Path:
        sections = {
            "run": {"name": "run", "resume": "auto", "display": "plain", "save_weights": False},
            "model": {"threads": number},
            "schedule": {"batches": batches},
            "eval": {"at_start": False},
        }
        return train(tiny_settings(model, tmp_path, **sections)).run

    return go


def recorded(directory: Path) -> int:
    return json.loads((directory / "environment.json").read_bytes())["threads"]


def moved(directory: Path) -> dict[str, list[int]]:
    return [event for event in load_events(directory) if event["event"] == "resumed"][-1]["moved"]


def test_resumed_run_computes_with_the_recorded_number(run, monkeypatch, capsys):
    assert recorded(run(1)) == 2
    torch.set_num_threads(1)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)  # on a machine of one core
    directory = run(2)
    assert (recorded(directory), moved(directory), torch.get_num_threads()) == (2, {}, 1)
    assert "bit-identical" not in capsys.readouterr().out


def test_resumed_run_with_another_number_says_that_its_bits_differ(run, monkeypatch, capsys):
    run(1)
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert moved(run(2)) == {"threads": [2, 1]}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "bit-identical" in line]
    assert "threads was 2, now 1" in line
    assert moved(run(3, number=3)) == {"threads": [2, 3]}


def openmp_threads() -> int:
    """Of the calling thread's next parallel region, as OpenMP itself says."""
    found = next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)
    if found is None:
        pytest.skip("PyTorch's OpenMP here is not GNU's")
    return ctypes.CDLL(str(found)).omp_get_max_threads()


def test_one_number_holds_for_pytorch_and_for_the_kernels():
    """They load the same OpenMP (cpu/library.py), whose number PyTorch sets for the calling thread."""
    for number in (2, 1, 3):
        with threads.fixed_threads(number):
            assert openmp_threads() == number
    if library.why_not() is not None:
        pytest.skip("there is no C compiler")
    ours = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert sum(Path(torch.__file__).resolve().parent in Path(os.path.realpath(path)).parents for path in ours) == 1


@pytest.mark.usefixtures("with_kernels")
@each("dtype", [torch.float32, torch.bfloat16])
def test_kernels_sum_a_norms_gradient_over_the_same_slices_with_any_number(dtype):
    noise = torch.Generator().manual_seed(0)
    x, grad_y, grad_total = (torch.randn(300, 48, generator=noise).to(dtype) for _ in range(3))
    weight = torch.randn(48, generator=noise).to(dtype)
    rstd = kernels.norm(x, None, weight, 1e-5)[2]
    found = []
    for number in (1, 2, 3):
        with threads.fixed_threads(number):
            found.append(kernels.norm_backward(x, weight, rstd, grad_y, grad_total)[:2])
    assert found[0][1].abs().max() > 0
    assert all(map(torch.equal, found[0] * 2, found[1] + found[2]))


# How threads wait


def printed(code: str, **environment: str) -> str:
    command, given = [sys.executable, "-c", code], CLEAN | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout.strip()


@linux
@each(
    ("code", "users", "seen"),
    [
        ("import lagrpo", {}, threads.SPINS),
        ("import lagrpo", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("import lagrpo", {"OMP_WAIT_POLICY": "passive"}, "None"),
        ("import torch, lagrpo", {}, "None"),
    ],
)
def test_spin_is_short_before_pytorch_loads_unless_the_user_chose(code, users, seen):
    assert printed(f"{code}\nimport os; print(os.environ.get('GOMP_SPINCOUNT'))", **users) == seen


def test_vllm_server_gets_the_users_choice_alone(monkeypatch):
    launch = Launch(python="python", model="m", dtype="bfloat16", max_model_len=8, max_num_seqs=1)
    monkeypatch.setattr(threads, "_ours", {"GOMP_SPINCOUNT": threads.SPINS})
    monkeypatch.setenv("GOMP_SPINCOUNT", threads.SPINS)
    assert "GOMP_SPINCOUNT" not in launch.environment("key")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert launch.environment("key")["GOMP_SPINCOUNT"] == "7"
