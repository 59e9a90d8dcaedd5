"""Several ranks make the run that one process makes; and what becomes of a run when one of them
fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
import torch
from chaos import KINDS, Sections, leaves, merged
from ranks import RankEndError, call_on_ranks, together
from running import SendSignal, options, tiny_settings, without_timings
from safetensors.torch import load_file
from test_resume import cut_to
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lagrpo import Callback, cli, train
from lagrpo.distributed.shared import wait_for
from lagrpo.lifecycle.checkpoint import NewCheckpoint
from lagrpo.lifecycle.evaluate_model import evaluate_model
from lagrpo.lifecycle.run import Result
from lagrpo.model.model import Policy, copy_policy
from lagrpo.resume.checkpoint_files import find_checkpoint
from lagrpo.rollout.local import LocalSampler
from lagrpo.runs import load_events, load_metrics, load_rollouts
from lagrpo.settings.load import load_settings
from lagrpo.settings.schema import Settings
from lagrpo.startup import build_policy
from lagrpo.types import JsonObject

SMALL: dict[str, JsonObject] = {
    "checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 20},
    "schedule": {"num_iterations": 2, "batches": 6, "prompts_per_batch": 3, "ref_sync_every": 3},
    "loss": {"recipe": "grpo", "beta": 0.05},
    "eval": {"every": 2},
}
MEAN_ROUNDING = 1e-5
"""of weights after twelve steps of .01: AdamW divides a gradient of the size of rounding by its own
size, so a few weights differ by whole steps"""


def settings_in(
    root: Path, model: Path, name: str, /, *more_sections: Sections
) -> dict[str, JsonObject]:
    return merged(tiny_settings(model, root), SMALL, *more_sections, {"run": {"name": name}})


@pytest.fixture
def settings(model, tmp_path):
    """Settings of a tiny run of 6 batches under a name, with these sections."""
    return partial(settings_in, tmp_path, model)


@pytest.fixture(scope="module")
def kinds(model, tmp_path_factory):
    """More settings by kind of run; offline has completions of an earlier run."""
    root = tmp_path_factory.mktemp("earlier")
    earlier = train(
        merged(
            tiny_settings(model, root),
            {"schedule": {"prompts_per_batch": 3}, "run": {"name": "earlier"}},
        )
    )
    offline = {"offline": {"data": str(earlier.run), "fraction": 0.34}}
    return {**KINDS, "offline, dynamic": offline | KINDS["dynamic sampling"]}


@pytest.fixture(scope="module")
def whole_run(model, kinds, tmp_path_factory):
    """An undisturbed run of some ranks, of a kind and a sharding."""
    settings_of = partial(settings_in, tmp_path_factory.mktemp("whole"), model)

    def make(kind: str, shard: str, size: int) -> Path:
        return only_result(
            together(size, settings_of(f"{kind} {shard}", kinds[kind], sharded(shard)))
        ).run

    return cache(make)


@pytest.fixture(scope="module")
def alone(model, kinds, tmp_path_factory):
    """The run that one process makes, of a kind."""
    settings_of = partial(settings_in, tmp_path_factory.mktemp("alone"), model)
    return cache(lambda kind: train(settings_of(kind, kinds[kind])).run)


def sharded(shard: str) -> Sections:
    return {"distributed": {"strategy": shard}}


def only_result(results: list[Any]) -> Result:
    """Returns the result of all ranks, which must be the same."""
    assert all(isinstance(result, Result) for result in results), "\n\n".join(map(str, results))
    assert len({str(result) for result in results}) == 1
    return results[0]


def evaluated(run: Path) -> JsonObject:
    """The samples of each evaluation."""
    tables = {
        file.stem: pq.read_table(file).to_pylist()
        for file in (run / "evaluations").glob("*.parquet")
    }
    assert len(tables) >= 2
    return {name: [row["completions"] for row in rows] for name, rows in tables.items()}


def check_same_run(run: Path, alone: Path) -> None:
    """The same completions token for token, in evaluations, too; metrics, final weights to
    float32's rounding of six batches of updates."""
    assert [row["token_ids"] for row in load_rollouts(run)] == [
        row["token_ids"] for row in load_rollouts(alone)
    ]
    assert evaluated(run) == evaluated(alone)
    for one, other in zip(*(without_timings(load_metrics(r)) for r in (run, alone)), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"loss"}:  # a sum near 0
            close = one[name] is other[name] or one[name] == pytest.approx(
                other[name], rel=2e-3, abs=1e-4
            )
            assert close, (name, one[name], other[name])
    check_same_weights(run, alone)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "weights/final").glob("*.safetensors")))


def check_same_weights(run: Path, alone: Path) -> None:
    weights_of_run = final_weights(run)
    weights_alone = final_weights(alone)
    assert weights_of_run.keys() == weights_alone.keys()
    for name, weight in weights_alone.items():
        assert weights_of_run[name].dtype == weight.dtype
        assert float((weights_of_run[name] - weight).abs().mean()) < MEAN_ROUNDING, name


def sample_in_process(settings: Settings, policy: Policy) -> LocalSampler:
    """An engine of the user's that samples as the built-in one does."""
    rollout = settings.rollout
    return LocalSampler(
        copy_policy(policy),
        settings.run.seed,
        rollout.max_completion_length,
        rollout.max_num_seqs,
    )


@pytest.mark.parametrize("shard", ["zero1", "fsdp2"])
def test_own_engine_samples_the_share_of_each_rank(settings, kinds, alone, shard):
    kind = "asking ahead"
    own_engine = {"rollout": {"engine": "test_together:sample_in_process"}}
    ranks_settings = settings("own engine", kinds[kind], sharded(shard), own_engine)
    run = only_result(together(2, ranks_settings)).run
    token_ids = [row["token_ids"] for row in load_rollouts(run)]
    assert token_ids == [row["token_ids"] for row in load_rollouts(alone(kind))]
    check_same_weights(run, alone(kind))


@pytest.mark.parametrize(
    ("kind", "shard", "size"),
    [
        ("asking ahead", "zero1", 2),
        ("offline, dynamic", "zero1", 3),
        ("asking ahead", "fsdp2", 2),
    ],
)
def test_completions_of_two_ranks_equal_those_of_one_process(whole_run, alone, kind, shard, size):
    run = whole_run(kind, shard, size)
    check_same_run(run, alone(kind))
    configs = [
        json.loads((r / "weights/final/config.json").read_text(encoding="utf-8"))
        for r in (run, alone(kind))
    ]
    assert configs[0] == configs[1]


def strike(
    root: Path, phase: str, number: int, victim: int, rank: int, after: int = 2
) -> list[Callback]:
    """On rank 0: send the signal to rank `victim` in that phase."""
    (root / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")
    return (
        [
            SendSignal(
                phase,
                number,
                lambda: int((root / f"pid-{victim}").read_text(encoding="utf-8")),
                after,
            )
        ]
        if rank == 0
        else []
    )


def check_last_checkpoint(root: Path) -> None:
    last = find_checkpoint(root / "run" / "checkpoints")
    assert last is not None
    assert last.trainer_files() == sorted(last.path.glob("trainer*.safetensors"))


def test_killed_rank_ends_the_run_and_leaves_a_whole_checkpoint(settings, tmp_path):
    prepare = partial(strike, tmp_path, "checkpoint", signal.SIGKILL, 1)
    first, second = together(2, settings("run", KINDS["asking ahead"]), prepare)
    assert isinstance(first, RankEndError)
    assert second is None
    check_last_checkpoint(tmp_path)


def train_until_the_sixth_update_fails(*words: str) -> None:
    if os.environ["RANK"] == "1":
        step, calls = torch.optim.AdamW.step, []

        def fail(*arguments: Any) -> Any:
            calls.append(arguments)
            return step(*arguments) if len(calls) < 6 else 1 / 0

        torch.optim.AdamW.step = fail  # type: ignore[method-assign]
    try:
        cli.main(["train", *words])
    except SystemExit:
        os._exit(1)  # at once: torchrun has asked it to end


@pytest.fixture
def handlers():
    """torchrun's functions set these and leave them."""
    handlers_before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for number, handler in handlers_before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_torchrun_resumes_after_a_restart_and_has_the_error_of_the_first_failure(
    settings, tmp_path
):
    """Does what torchrun does, with functions instead of a script. The error returns in batch 5."""
    launch = LaunchConfig(
        1,
        1,
        2,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    with pytest.raises(ChildFailedError) as error:
        elastic_launch(launch, train_until_the_sixth_update_fails)(
            *options(settings("run")), "--resume", "auto"
        )
    assert error.value.failures.keys() == {1}
    assert "ZeroDivisionError" in str(error.value.failures[1].message)
    assert [m["step"] for m in load_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert [e["step"] for e in load_events(tmp_path / "run") if e["event"] == "resumed"] == [2]


@pytest.mark.parametrize(
    ("phase", "shard", "after"), [("sampling", "zero1", 2), ("learning", "fsdp2", 4)]
)
def test_stopped_run_resumes_bit_for_bit(settings, whole_run, tmp_path, phase, shard, after):
    """The signal of one rank stops all. After four batches π_ref is neither the initial policy nor
    π."""
    prepare = partial(strike, tmp_path, phase, signal.SIGTERM, 0, after=after)
    stopped = only_result(
        together(2, settings("run", KINDS["asking ahead"], sharded(shard)), prepare)
    )
    assert stopped.interrupted == signal.SIGTERM
    assert after <= stopped.batches < 6
    assert after < 4 or [*(stopped.run / "checkpoints").glob("step-*/weights-v*")]
    again = only_result(together(2, {}, resume=stopped.run))
    outputs, expected = (
        leaves(again.run, exact=True),
        leaves(whole_run("asking ahead", shard, 2), exact=True),
    )
    assert [key for key in expected if outputs.get(key) != expected[key]] == []


class NoteBatch(Callback):
    """Makes a file after the second batch."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_batch(self, metrics, rollouts) -> None:
        if metrics["step"] == 2:
            self.file.touch()


def write_after_batch(root: Path, rank: int) -> list[Callback]:
    """Lets the threads write their first checkpoint only after the second batch."""
    file = root / "batch"
    write = NewCheckpoint.write

    def write_later(checkpoint: NewCheckpoint, *arguments: Any) -> None:
        NewCheckpoint.write = write  # type: ignore[method-assign]
        if wait_for(file.exists):
            (root / f"overlapped-{rank}").touch()
        write(checkpoint, *arguments)

    NewCheckpoint.write = write_later  # type: ignore[method-assign]
    return [NoteBatch(file)] if rank == 0 else []


@pytest.mark.parametrize("shard", ["zero1", "fsdp2"])
def test_ranks_train_while_their_threads_write_a_checkpoint(settings, whole_run, tmp_path, shard):
    kind = "asking ahead"
    prepare = partial(write_after_batch, tmp_path)
    run = only_result(together(2, settings("run", KINDS[kind], sharded(shard)), prepare)).run
    assert len([*tmp_path.glob("overlapped-*")]) == 2
    expected = leaves(whole_run(kind, shard, 2), exact=True)
    killed = cut_to(run, 1, tmp_path / "killed")
    for finished in (run, only_result(together(2, {}, resume=killed)).run):
        outputs = leaves(finished, exact=True)
        assert [key for key in expected if outputs.get(key) != expected[key]] == []


@pytest.mark.parametrize(("shards", "after"), [(("zero1", "fsdp2"), 3), (("fsdp2", "zero1"), 1)])
def test_run_resumes_with_another_number_of_ranks(whole_run, alone, tmp_path, shards, after):
    other_sharding = sharded(shards[1])
    stopped = cut_to(whole_run("asking ahead", shards[0], 2), 3, tmp_path)
    if after > 1:
        result = only_result(together(after, other_sharding, resume=stopped))
    else:
        result = train(other_sharding, resume=stopped, trust_run_code=True)
    run = result.run
    token_ids = [row["token_ids"] for row in load_rollouts(run)]
    expected = [row["token_ids"] for row in load_rollouts(alone("asking ahead"))]
    assert token_ids == expected
    check_same_weights(run, alone("asking ahead"))
    resumed = next(event for event in load_events(run) if event["event"] == "resumed")
    assert resumed["moved"]["ranks"] == [2, after]


def load_another_model(rank: int) -> tuple[()]:
    """Rank 1 has other weights."""
    if rank == 1:
        load = build_policy.load_policy

        def other(*arguments: Any, **options: Any) -> Policy:
            policy = load(*arguments, **options)
            with torch.no_grad():
                next(policy.model.parameters()).add_(1)
            return policy

        build_policy.load_policy = other
    return ()


def test_ranks_with_different_models_are_rejected(settings):
    for error in together(2, settings("run"), load_another_model):
        assert "SettingsError: model.path: model weights differ between ranks 0 and 1" in str(error)


def evaluate_as_rank(settings: JsonObject) -> tuple[list[JsonObject], int, str]:
    """The records of `lagrpo eval`, the number of prompts of this rank, and its output."""
    sample = LocalSampler.sample
    with (
        patch.object(LocalSampler, "sample", autospec=True, side_effect=sample) as sampling,
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        evaluation = evaluate_model(load_settings(settings))
    return evaluation.records, len(sampling.call_args.args[1]), out.getvalue()


def test_ranks_share_an_evaluation_and_rank_0_writes_it(model, tmp_path):
    sections = {"eval": {"num_prompts": 3, "num_samples": 2}}
    records, prompts, text = evaluate_as_rank(tiny_settings(model, tmp_path / "alone", **sections))
    results = call_on_ranks(2, evaluate_as_rank, tiny_settings(model, tmp_path / "two", **sections))
    assert prompts == 3
    assert [result[:2] for result in results] == [(records, 2), (records, 1)]
    assert [bool(result[2]) for result in results] == [True, False]
    assert text.splitlines()[:-1] == results[0][2].splitlines()[:-1]  # the last has the path
    assert len(list(tmp_path.glob("two/*"))) == len(list(tmp_path.glob("alone/*"))) == 1
