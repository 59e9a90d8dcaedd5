"""The number of threads that compute."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from ranks import torchrun_environment
from running import tiny_settings

from lagrpo import machine
from lagrpo.cpu import kernels
from lagrpo.lifecycle.run import train
from lagrpo.runs import load_events


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """PyTorch has two threads on a machine of two cores, and the user's environment does not say
    so."""
    before = torch.get_num_threads()
    for name in machine.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_environment_then_record_then_cores_decide(monkeypatch):
    assert machine.choose_threads() == 2
    assert machine.choose_threads(recorded=5) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine.choose_threads(recorded=5) == 2


@pytest.mark.parametrize(
    ("usable", "physical", "expected"),
    [
        pytest.param(1, 2, 1, id="1 of 2 cores usable"),
        pytest.param(8, 2, 2, id="8 logical cores on 2"),
        pytest.param(2, 4, 2, id="2 of 4 cores usable"),
    ],
)
def test_default_is_physical_cores_within_affinity_and_quota(
    monkeypatch, usable, physical, expected
):
    monkeypatch.setattr(machine, "usable_cores", lambda: usable)
    torch.set_num_threads(physical)
    assert machine.choose_threads() == expected


def test_environment_without_torchrun_lacks_what_torchrun_sets_and_keeps_the_rest():
    users_variables = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "MY_RANK": "3", "MASTER": "x"}
    assert (
        machine.drop_torchrun(torchrun_environment(1, 2, 29500) | users_variables)
        == users_variables
    )


def test_ranks_of_a_host_share_its_cores_whatever_torchrun_sets(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    assert [machine.choose_threads(ranks=ranks) for ranks in (1, 2, 3, 8)] == [1, 3, 2, 1]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"cpu.max": "150000 100000"}, 1.5, id="version 2"),
        pytest.param({"cpu.max": "max 100000"}, None, id="version 2 without a quota"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2.0,
            id="version 1",
        ),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
            id="version 1 without a quota",
        ),
        pytest.param({}, None, id="no control groups"),
    ],
)
def test_quota_of_either_version_is_read_in_cpus(tmp_path, files, expected):
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n", encoding="utf-8")
    assert machine.read_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("file", "content", "is_limited"),
    [
        pytest.param("memory.max", "4096", True, id="version 2"),
        pytest.param("memory.max", "max", False, id="version 2 without a limit"),
        pytest.param("memory/memory.limit_in_bytes", "4096", True, id="version 1"),
        pytest.param(
            "memory/memory.limit_in_bytes", str(2**63 - 4096), False, id="version 1 without a limit"
        ),
    ],
)
def test_memory_is_limited_by_the_container(tmp_path, file, content, is_limited):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n", encoding="utf-8")
    assert (machine.memory_limit(tmp_path) == 4096) == is_limited


VERSION_2 = {"memory.max": "4096", "memory.current": "3000"}
VERSION_1 = {"memory/memory.limit_in_bytes": "4096", "memory/memory.usage_in_bytes": "3000"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 2048, id="no control groups"),
        pytest.param(
            VERSION_2 | {"memory.stat": "anon 2000\ninactive_file 100\nactive_file 50"},
            4096 - 3000 + 150,
            id="version 2, whose files can go",
        ),
        pytest.param(
            VERSION_2 | {"memory.max": "max", "memory.stat": ""}, 2048, id="version 2, no limit"
        ),
        pytest.param(
            VERSION_1
            | {
                "memory/memory.stat": "inactive_file 1\nactive_file 1\n"
                "total_inactive_file 100\ntotal_active_file 50"
            },
            4096 - 3000 + 150,
            id="version 1, with the groups inside",
        ),
    ],
)
def test_available_memory_is_what_system_and_container_allow(tmp_path, files, expected):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       2 kB\n", encoding="utf-8")
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n", encoding="utf-8")
    assert machine.available_memory(tmp_path, meminfo) == expected
    assert machine.available_memory(tmp_path, tmp_path / "none") is None


# Runs


def test_resume_uses_the_recorded_number_of_threads_and_warns_about_another(
    model, tmp_path, monkeypatch, capsys
):
    def run(batches: int) -> Path:
        """Starts a run of two threads, or resumes it."""
        sections = {
            "run": {"name": "run"},
            "schedule": {"batches": batches},
            "eval": {"at_start": False},
        }
        return train(tiny_settings(model, tmp_path, **sections), resume="auto").run

    run(1)
    torch.set_num_threads(1)
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)  # on a machine of one core
    directory = run(2)
    assert json.loads((directory / "environment.json").read_bytes())["threads"] == 2
    assert torch.get_num_threads() == 1
    assert "bit-identical" not in capsys.readouterr().out
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    *_, event = [event for event in load_events(run(3)) if event["event"] == "resumed"]
    assert event["moved"] == {"threads": [2, 1]}
    assert "threads was 2, now 1" in capsys.readouterr().out


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_sum_a_norms_gradient_over_the_same_slices_with_any_number(dtype):
    noise = torch.Generator().manual_seed(0)
    x, grad_y, grad_total = (torch.randn(300, 48, generator=noise).to(dtype) for _ in range(3))
    weight = torch.randn(48, generator=noise).to(dtype)
    rstd = kernels.norm(x, None, weight, 1e-5)[2]
    gradients = []
    for number in (1, 2, 3):
        with machine.fixed_threads(number):
            gradients.append(kernels.norm_backward(x, weight, rstd, grad_y, grad_total)[:2])
    assert gradients[0][1].abs().max() > 0
    assert all(map(torch.equal, gradients[0] * 2, gradients[1] + gradients[2]))


@pytest.mark.parametrize("kind", ["file", "link", "linked"])
def test_path_of_another_user_is_not_own(tmp_path, monkeypatch, kind):
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(file)
    path = file if kind == "file" else link
    assert machine.is_own(path)
    if os.getuid() == 0:
        os.chown(link if kind == "link" else file, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not machine.is_own(path)
