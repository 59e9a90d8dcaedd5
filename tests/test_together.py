"""Several ranks make the run that one process makes; and what becomes of a run when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from chaos import KINDS, Sections, leaves, merged
from ranks import RankEndError, together
from running import options, tiny_settings, without_timings
from safetensors.torch import load_file
from tiny import save_tiny

from lagrpo import Callback, train
from lagrpo.runs import load_events, load_metrics, load_rollouts
from lagrpo.terminal.display import Display
from lagrpo.training import build
from lagrpo.training.checkpoint import find_checkpoint
from lagrpo.training.run import Result

SMALL: dict[str, dict[str, Any]] = {
    "checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 20},
    "schedule": {"num_iterations": 2, "batches": 6, "prompts_per_batch": 3, "ref_sync_every": 3},
    "loss": {"recipe": "grpo", "beta": 0.05},
    "eval": {"every": 2},
}
MEAN_ROUNDING = 1e-5
"""of weights after twelve steps of .01: AdamW divides a gradient of the size of rounding by its own size, so a few
weights differ by whole steps"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def settings_in(root: Path, model: Path, name: str, /, *more: Sections) -> dict[str, dict[str, Any]]:
    return merged(tiny_settings(model, root), SMALL, *more, {"run": {"name": name}})


@pytest.fixture
def settings(model, tmp_path):
    """Settings of a tiny run of 6 batches under a name, with these sections."""
    return partial(settings_in, tmp_path, model)


@pytest.fixture(scope="module")
def kinds(model, tmp_path_factory):
    """More settings by kind of run; offline has completions of an earlier run."""
    root = tmp_path_factory.mktemp("earlier")
    made = train(merged(tiny_settings(model, root), {"schedule": {"prompts_per_batch": 3}, "run": {"name": "earlier"}}))
    offline = {"offline": {"data": str(made.run), "fraction": 0.34}}
    return {"plain": {}, **KINDS, "offline, dynamic": offline | KINDS["dynamic sampling"]}


@pytest.fixture(scope="module")
def whole(model, kinds, tmp_path_factory):
    """An undisturbed run of two ranks, of a kind and a sharding."""
    of = partial(settings_in, tmp_path_factory.mktemp("whole"), model)
    return cache(lambda kind, shard: only_result(together(2, of(f"{kind} {shard}", kinds[kind], sharded(shard)))).run)


@pytest.fixture(scope="module")
def alone(model, kinds, tmp_path_factory):
    """The run that one process makes, of a kind."""
    of = partial(settings_in, tmp_path_factory.mktemp("alone"), model)
    return cache(lambda kind: train(of(kind, kinds[kind])).run)


def sharded(shard: str) -> Sections:
    return {"distributed": {"strategy": shard}}


def only_result(found: list[Any]) -> Result:
    """What all ranks return, which is the same."""
    assert all(isinstance(one, Result) for one in found), "\n\n".join(map(str, found))
    assert len({str(one) for one in found}) == 1
    return found[0]


def evaluated(run: Path) -> dict[str, Any]:
    """What was sampled in each evaluation."""
    tables = {file.stem: pq.read_table(file).to_pylist() for file in (run / "evaluations").glob("*.parquet")}
    assert len(tables) >= 2
    return {name: [row["completions"] for row in rows] for name, rows in tables.items()}


def check_same_run(run: Path, alone: Path) -> None:
    """The same completions token for token, in evaluations, too; metrics, final weights to float32's rounding of six
    batches of updates."""
    assert [row["token_ids"] for row in load_rollouts(run)] == [row["token_ids"] for row in load_rollouts(alone)]
    assert evaluated(run) == evaluated(alone)
    for one, other in zip(*(without_timings(load_metrics(r)) for r in (run, alone)), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"loss"}:  # a sum near 0
            close = one[name] is other[name] or one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-4)
            assert close, (name, one[name], other[name])
    check_same_weights(run, alone)


def check_same_weights(run: Path, alone: Path) -> None:
    of_run, of_one = (load_file(next((r / "weights/final").glob("*.safetensors"))) for r in (run, alone))
    assert of_run.keys() == of_one.keys()
    for name, weight in of_one.items():
        assert of_run[name].dtype == weight.dtype
        assert float((of_run[name] - weight).abs().mean()) < MEAN_ROUNDING, name


@pytest.mark.parametrize(
    ("kind", "shard", "size"),
    [
        ("asking ahead", "zero1", 2),
        ("offline, dynamic", "zero1", 3),
        ("asking ahead", "fsdp2", 2),
    ],
)
def test_completions_of_two_ranks_equal_those_of_one_process(settings, alone, kinds, kind, shard, size):
    run = only_result(together(size, settings("ranks", kinds[kind], sharded(shard)))).run
    check_same_run(run, alone(kind))
    configs = [json.loads((r / "weights/final/config.json").read_text()) for r in (run, alone(kind))]
    assert configs[0] == configs[1]


class Signal(Callback):
    """Sends a signal to a process in the first phase of this name after so many batches."""

    def __init__(self, phase: str, number: int, pid: Callable[[], int], after: int) -> None:
        self.wanted, self.number, self.pid, self.after, self.batches = phase, number, pid, after, 0
        Display.phase = lambda display, name: self.phase(name)  # type: ignore[method-assign]

    def phase(self, name: str) -> None:
        if name == self.wanted and self.batches >= self.after:
            self.wanted = ""
            os.kill(self.pid(), self.number)

    def on_batch(self, metrics, rollouts) -> None:
        self.batches = metrics["step"]


def strike(root: Path, phase: str, number: int, victim: int, rank: int, after: int = 2) -> list[Callback]:
    """On rank 0: send the signal to rank `victim` in that phase."""
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    return [Signal(phase, number, lambda: int((root / f"pid-{victim}").read_text()), after)] if rank == 0 else []


def check_last_checkpoint(root: Path) -> None:
    last = find_checkpoint(root / "run" / "checkpoints")
    assert last is not None
    assert [*last.path.glob("trainer*.safetensors")]


def test_killed_rank_ends_the_run_and_leaves_a_whole_checkpoint(settings, tmp_path):
    prepare = partial(strike, tmp_path, "checkpoint", signal.SIGKILL, 1)
    first, second = together(2, settings("run", KINDS["asking ahead"]), prepare)
    assert isinstance(first, RankEndError)
    assert second is None
    check_last_checkpoint(tmp_path)


FAILING = """
import os, sys
import torch
from lagrpo import cli
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    def fail(*given): raise ZeroDivisionError("a reason of its own")
    torch.optim.AdamW.step = fail
cli.main(["train", *sys.argv[1:]])
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_prints_the_first_error_and_resumes_after_a_restart(settings, tmp_path, restarts):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "--max-restarts", str(restarts), str(script), *options(settings("run"))]
    command += ["--resume", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=Path(__file__).parent)
    assert "ZeroDivisionError: a reason of its own" in done.stderr
    if restarts:
        assert done.returncode == 0, done.stderr
        assert len(load_metrics(tmp_path / "run")) == 6
    else:
        assert done.returncode == 1
        assert "Root Cause" in done.stderr
        assert "rank      : 1" in done.stderr[done.stderr.index("Root Cause") :]


@pytest.mark.parametrize(("phase", "shard", "after"), [("sampling", "zero1", 2), ("learning", "fsdp2", 4)])
def test_stopped_run_resumes_bit_for_bit(settings, whole, tmp_path, phase, shard, after):
    """The signal of one rank stops all. After four batches π_ref is neither the initial policy nor π."""
    prepare = partial(strike, tmp_path, phase, signal.SIGTERM, 0, after=after)
    stopped = only_result(together(2, settings("run", KINDS["asking ahead"], sharded(shard)), prepare))
    assert stopped.interrupted == signal.SIGTERM
    assert after <= stopped.batches < 6
    assert after < 4 or [*(stopped.run / "checkpoints").glob("step-*/weights-v*")]
    again = only_result(together(2, {}, resume=stopped.run))
    found, expected = leaves(again.run, exact=True), leaves(whole("asking ahead", shard), exact=True)
    assert [key for key in expected if found.get(key) != expected[key]] == []


@pytest.mark.parametrize(("shards", "after"), [(("zero1", "fsdp2"), 2), (("fsdp2", "zero1"), 1)])
def test_run_resumes_with_another_number_of_ranks(settings, alone, shards, after):
    own = settings("run", sharded(shards[0]), {"schedule": {"batches": 3}})
    short = only_result(together(3, own))
    longer = merged({"schedule": {"batches": 6}}, sharded(shards[1]))
    together_again = partial(together, after, longer, resume=short.run)
    long = only_result(together_again()) if after > 1 else train(longer, resume=short.run)
    whole = alone("plain")
    assert [row["token_ids"] for row in load_rollouts(long.run)] == [row["token_ids"] for row in load_rollouts(whole)]
    check_same_weights(long.run, whole)
    resumed = next(event for event in load_events(long.run) if event["event"] == "resumed")
    assert resumed["moved"]["ranks"] == [3, after]


def load_another_model(rank: int) -> tuple[()]:
    """Rank 1 has other weights."""
    if rank == 1:
        load = build.load_policy

        def other(*given: Any) -> Any:
            policy = load(*given)
            with torch.no_grad():
                next(policy.model.parameters()).add_(1)
            return policy

        build.load_policy = other
    return ()


def test_ranks_with_different_models_are_rejected(settings):
    for found in together(2, settings("run"), load_another_model):
        assert "SettingsError: model.path: model weights differ between ranks 0 and 1" in str(found)
