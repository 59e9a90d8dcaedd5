"""The benchmarks measure the lagrpo that they say."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_train_runs_the_lagrpo_of_the_given_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import processes

    marker = tmp_path / "was_run"
    package = tmp_path / "src" / "lagrpo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    program = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (package / "__main__.py").write_text(program, encoding="utf-8")

    processes.train(Path("settings.toml"), {}, ranks=1, threads=1, checkout=tmp_path)

    assert marker.exists()
