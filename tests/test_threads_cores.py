"""How many CPUs a process may use, from the files of its control groups."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from lagrpo.threads import cores


def read_quota(root: Path, membership: str, **files: str) -> float | None:
    """With these files below the place where control groups are mounted."""
    for name, content in files.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (root / "membership").write_text(membership)
    return cores.read_quota(root / "groups", root / "membership")


V1 = "4:memory:/a\n3:cpu,cpuacct:/a/b\n1:name=systemd:/\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 50000"}, 4.0),
        ("0::/a/b", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "100000 100000", "cpu.max": "max 100000"}, 1.0),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "400000 100000"}, 0.5),
        ("0::/a", {"other/cpu.max": "50000 100000"}, None),
        ("0::/not/here", {"cpu.max": "250000 100000"}, 2.5),  # the path is the host's, what is mounted the container's
        ("0::/../../a", {"cpu.max": "250000 100000"}, 2.5),
        ("1:cpu:/\n0::/a", {"unified/a/cpu.max": "250000 100000"}, 2.5),
        (V1, {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "200000", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/a/cpu.cfs_quota_us": "30000", "cpu/a/cpu.cfs_period_us": "20000"}, 1.5),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6.0),
        (V1, {"memory/a/cpu.cfs_quota_us": "600000", "memory/a/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": ""}, None),
        ("", {"cpu.max": "150000 100000"}, None),
    ],
)
def test_the_quota(tmp_path, membership, files, expected):
    assert read_quota(tmp_path, membership, **files) == expected


def test_without_control_groups_there_is_none(tmp_path):
    assert cores.read_quota(tmp_path, tmp_path / "missing") is None


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(cores)
    assert (results.attempted > 0, results.failed) == (True, 0)
