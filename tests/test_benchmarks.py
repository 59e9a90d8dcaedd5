"""The benchmarks measure what they say, and their tables show what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytestmark = pytest.mark.experiments

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_train_runs_the_lagrpo_of_the_given_checkout(benchmarks_on_path: None, tmp_path: Path):
    import processes

    marker = tmp_path / "was_run"
    package = tmp_path / "src" / "lagrpo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    program = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    (package / "__main__.py").write_text(program, encoding="utf-8")

    processes.train(Path("settings.toml"), {}, ranks=1, threads=1, checkout=tmp_path)

    assert marker.exists()


def batch(**changes: float | None) -> dict[str, float | None]:
    """A line of metrics.jsonl with the entries that the table of gpu_training.py reads."""
    line: dict[str, float | None] = {
        "reward": 0.0,
        "num_tokens": 100,
        "time/step": 1.0,
        "time/generate": 0.5,
        "time/train": 0.25,
        "staleness/mean": 0.0,
    }
    return line | changes


def test_seconds_of_a_run_leave_out_the_batches_that_compile(benchmarks_on_path: None):
    import gpu_training

    compiling = [batch(**{"time/step": 60.0})] * gpu_training.WARM
    settled = [batch(), batch(), batch(**{"time/step": 4.0, "time/generate": 3.5})]

    measured = gpu_training.summarize(compiling + settled, [])

    assert measured["batches"] == 13
    assert measured["seconds"] == pytest.approx(2.0)
    assert measured["seconds_median"] == 1.0
    assert measured["sampling"] == pytest.approx(1.5)
    assert measured["tokens_s"] == pytest.approx(50.0)


def test_seconds_of_a_run_that_stopped_early_are_of_all_its_batches(benchmarks_on_path: None):
    import gpu_training

    measured = gpu_training.summarize([batch(), batch(**{"time/step": 3.0})], [])

    assert measured["seconds"] == pytest.approx(2.0)


def test_reward_of_a_run_is_averaged_over_batches_at_each_end(benchmarks_on_path: None):
    import gpu_training

    # The batch without scored completions has no reward.
    rewards = [0.0, 0.2, 0.4, None, 0.6, 0.8]
    lines = [batch(reward=reward) for reward in rewards]

    measured = gpu_training.summarize(lines, [])

    assert measured["reward_start"] == pytest.approx(0.2)
    assert measured["reward_end"] == pytest.approx(0.6)


def test_row_of_a_finished_run_shows_both_evaluations(benchmarks_on_path: None):
    import gpu_training

    interval = {"pass@1_low": 0.1, "pass@1_high": 0.3}
    change = {"pass@1_change": 0.5, "pass@1_change_low": 0.4, "pass@1_change_high": 0.6}
    evaluations = [
        {"name": "before", "pass@1": 0.2, **interval},
        {"name": "after", "pass@1": 0.7, "pass@1_low": 0.6, "pass@1_high": 0.8, **change},
    ]
    measured = gpu_training.summarize([batch()], evaluations)

    cells = gpu_training.row(gpu_training.Trained("demo", 1, "done", 20.0, measured))

    assert cells["pass@1 before"] == "20.0% (10.0% … 30.0%)"
    assert cells["pass@1 after"] == "70.0% (60.0% … 80.0%)"
    assert cells["change"] == "50.0% (40.0% … 60.0%)"


def test_row_of_a_run_without_batches_says_how_it_ended(benchmarks_on_path: None):
    import gpu_training

    cells = gpu_training.row(gpu_training.Trained("demo", 10, "stopped after 40 s", 40.2, {}))

    assert cells["end"] == "stopped after 40 s"
    assert cells["s a batch"] == ""


@pytest.mark.parametrize("name", ["demo", "gsm8k"])
def test_runs_of_a_task_differ_in_v_alone(benchmarks_on_path: None, name: str):
    import gpu_training

    fresh, stale = (
        gpu_training.choose_settings(gpu_training.TASKS[name], v, quick=False) for v in (1, 10)
    )

    assert fresh | {"schedule.sync_every": 10} == stale
    assert fresh["schedule.sync_every"] == 1


@pytest.mark.parametrize("name", ["demo", "gsm8k"])
def test_settings_of_a_run_are_settings_of_lagrpo(benchmarks_on_path: None, name: str):
    import gpu_training

    from lagrpo.settings.load import load_settings

    settings = gpu_training.choose_settings(gpu_training.TASKS[name], 10, quick=True)

    assert load_settings(name, settings).schedule.sync_every == 10


def update(seconds: float, peak: int, gpu_peak: int) -> Any:
    """The measurements of an update that the table of bench_trl.py reads."""
    return {
        "seconds": seconds,
        "sampled": 10,
        "learned": 10,
        "flat": 0.0,
        "peak_bytes": peak,
        "gpu_peak_bytes": gpu_peak,
    }


def test_comparison_shows_the_memory_of_a_gpu_on_both_sides(benchmarks_on_path: None):
    import bench_trl

    ours = [update(1.0, 10**9, 2 * 10**9), update(1.0, 10**9, 3 * 10**9)]
    trl = [update(4.0, 10**9, 6 * 10**9), update(4.0, 10**9, 6 * 10**9)]

    cells = {line[""]: line for line in bench_trl.rows(ours, trl)}["most GPU memory allocated"]

    assert (cells["ours"], cells["TRL"], cells["TRL / ours"]) == ("3.00 GB", "6.00 GB", "2.00")


def test_comparison_on_a_cpu_has_no_line_about_a_gpu(benchmarks_on_path: None):
    import bench_trl

    ours = [update(1.0, 10**9, 0)]
    trl = [update(4.0, 10**9, 0)]

    assert "most GPU memory allocated" not in [line[""] for line in bench_trl.rows(ours, trl)]


def test_reply_of_a_side_waits_for_its_gpu(
    benchmarks_on_path: None, monkeypatch: pytest.MonkeyPatch
):
    import wire

    calls: list[str] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        synchronize=lambda: calls.append("wait"),
        max_memory_allocated=lambda: 5,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def reply(**measurements: object) -> None:
        calls.append(f"reply with {measurements['gpu_peak_bytes']} bytes")

    gate = wire.Gate(cast(wire.Wire, SimpleNamespace(reply=reply)))
    gate.done()

    assert calls == ["wait", "reply with 5 bytes"]
    assert wire.gpu_peak_bytes() == 5


def test_side_without_a_gpu_has_no_memory_there(
    benchmarks_on_path: None, monkeypatch: pytest.MonkeyPatch
):
    import wire

    monkeypatch.delitem(sys.modules, "torch", raising=False)

    wire.wait_for_gpu()

    assert wire.gpu_peak_bytes() == 0


def test_first_steps_of_a_gpu_session_fit_into_a_call(benchmarks_on_path: None, tmp_path: Path):
    import gpu_session

    steps = {step.name: step for step in gpu_session.steps(tmp_path, quick=False)}
    first = [steps[name] for name in gpu_session.FIRST]
    assert next(iter(steps)) == "small", "a run from start to end"
    assert sum(step.limit for step in first) < 585
    for step in first:
        assert [word for word in step.command if word.startswith(str(BENCHMARKS.parent))]
        for word in step.command:
            assert not word.startswith(str(BENCHMARKS.parent)) or Path(word).exists(), word
