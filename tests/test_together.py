"""Several ranks make the run that one process makes; and what becomes of a run when one of them fails."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from chaos import KINDS, Sections, leaves, merged
from running import tiny_settings, without_timings
from safetensors.torch import load_file
from tiny import save_tiny
from together import QUICK, RankEndError, together

from lagrpo import Observer, train
from lagrpo.model.learner import Learner
from lagrpo.model.spans import Merged
from lagrpo.ranks.world import World
from lagrpo.runs import load_events, load_metrics
from lagrpo.runs.checkpoints import Checkpoints
from lagrpo.training import build, shards
from lagrpo.training.run import Result

pytestmark = pytest.mark.usefixtures("shared_templates")

SMALL: dict[str, dict[str, Any]] = {
    "run": {"checkpoint_every": 1, "checkpoint_minutes": 0, "keep_checkpoints": 20},
    "schedule": {"i": 2, "stages": 2, "batches": 3, "prompts": 3},
    "objective": {"recipe": "grpo", "beta": 0.05},
    "evaluation": {"every": 2},
    "distributed": QUICK,
}
SHARDS: dict[str, dict[str, Any]] = {
    "optimizer": {"distributed": {**QUICK, "shard": "optimizer"}},
    "layers": {"distributed": {**QUICK, "shard": "layers"}},
    "layers by pairs": {"distributed": {**QUICK, "shard": "layers", "shard_ranks": 2}},
    "copies": {"distributed": {**QUICK, "shard": "layers", "shard_ranks": 1}},
}
PLAIN = {"model": {"kernels": "torch"}}
MEAN_ROUNDING = 1e-5
"""of weights after twelve steps of .01: AdamW divides a gradient of the size of rounding by its own size, so a few
weights differ by whole steps"""
OF_SUMS_NEAR_0 = {"objective", "loss"}


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
    """Further settings by kind of run; offline has completions of an earlier run."""
    root = tmp_path_factory.mktemp("earlier")
    made = train(merged(tiny_settings(model, root), {"schedule": {"prompts": 3}, "run": {"name": "earlier"}}))
    adapters = {"model": {"lora": {"r": 4}}, "optimizer": {"lr": 0.02}}
    merging = adapters | {"model": {"lora": {"r": 4, "merge": True}}}
    of_adapters = {"adapters": adapters, "adapters, merged": merging}
    return {"plain": {}, **KINDS, **of_adapters, "offline": {"offline": {"data": str(made.run), "share": 0.34}}}


@pytest.fixture(scope="module")
def whole(model, kinds, tmp_path_factory):
    """A run of two ranks that nobody disturbed, of a kind and a sharding."""
    of = partial(settings_in, tmp_path_factory.mktemp("whole"), model)
    return cache(lambda kind, shard: only_result(together(2, of(f"{kind} {shard}", kinds[kind], SHARDS[shard]))).run)


@pytest.fixture(scope="module")
def alone(model, kinds, tmp_path_factory):
    """The run that one process makes, of a kind, by these kernels."""
    of = partial(settings_in, tmp_path_factory.mktemp("alone"), model)
    return cache(lambda kind, by: train(of(f"{kind} {by}", kinds[kind], {"model": {"kernels": by}})).run)


def only_result(found: list[Any]) -> Result:
    """What all ranks return, which is the same."""
    assert all(isinstance(one, Result) for one in found), "\n\n".join(map(str, found))
    assert len({str(one) for one in found}) == 1
    return found[0]


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [row for table in sorted((run / "rollouts").iterdir()) for row in pq.read_table(table).to_pylist()]


def evaluated(run: Path) -> dict[str, Any]:
    """What was sampled in each evaluation."""
    tables = {file.stem: pq.read_table(file).to_pylist() for file in (run / "evaluations").glob("*.parquet")}
    assert len(tables) >= 2
    return {name: [row["completions"] for row in rows] for name, rows in tables.items()}


def check_same_run(run: Path, alone: Path) -> None:
    """The same completions token for token, in evaluations, too; metrics, final weights to float32's rounding of six
    batches of updates."""
    assert [row["token_ids"] for row in rollouts(run)] == [row["token_ids"] for row in rollouts(alone)]
    assert evaluated(run) == evaluated(alone)
    for one, other in zip(*(without_timings(load_metrics(r)) for r in (run, alone)), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - OF_SUMS_NEAR_0:
            close = one[name] is other[name] or one[name] == pytest.approx(other[name], rel=2e-3, abs=1e-4)
            assert close, (name, one[name], other[name])
    check_same_weights(run, alone)


def check_same_weights(run: Path, alone: Path) -> None:
    of_run, of_one = (load_file(next((r / "weights/final").glob("*.safetensors"))) for r in (run, alone))
    assert of_run.keys() == of_one.keys()
    for name, weight in of_one.items():
        assert of_run[name].dtype == weight.dtype
        assert float((of_run[name] - weight).abs().mean()) < MEAN_ROUNDING, name


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in [*KINDS, "offline"]), ("dynamic sampling", 3)])
def test_several_ranks_make_the_run_of_one(settings, alone, kinds, kind, size):
    run = only_result(together(size, settings("ranks", kinds[kind]))).run
    check_same_run(run, alone(kind, "auto"))


@pytest.mark.parametrize(
    ("kind", "size", "shard"),
    [
        ("asking ahead", 2, "layers"),
        ("offline", 4, "layers by pairs"),
        ("lagged", 3, "layers"),
        ("dynamic sampling", 2, "layers"),
        ("adapters", 2, "layers"),
        ("adapters, merged", 4, "layers by pairs"),
    ],
)
def test_ranks_that_have_the_layers_between_them_make_the_run_of_one(settings, alone, kinds, kind, size, shard):
    run = only_result(together(size, settings("ranks", kinds[kind], SHARDS[shard], PLAIN))).run
    check_same_run(run, alone(kind, "torch"))
    file = "adapter_config.json" if kind == "adapters" else "config.json"
    configs = [json.loads((r / "weights/final" / file).read_text()) for r in (run, alone(kind, "torch"))]
    assert configs[0] == configs[1]


class Signal(Observer):
    """Sends a signal to a process in the first phase of this name after so many batches."""

    def __init__(self, phase: str, number: int, pid: Callable[[], int], after: int) -> None:
        self.wanted, self.number, self.pid, self.after, self.batches = phase, number, pid, after, 0

    def phase(self, name: str) -> None:
        if name == self.wanted and self.batches >= self.after:
            self.wanted = ""
            os.kill(self.pid(), self.number)

    def batch(self, step, metrics, rollouts) -> None:
        self.batches = step.b


def strike(root: Path, phase: str, number: int, victim: int, rank: int, after: int = 2) -> list[Observer]:
    """On rank 0: send the signal to rank `victim` in that phase."""
    (root / f"pid-{rank}").write_text(str(os.getpid()))
    return [Signal(phase, number, lambda: int((root / f"pid-{victim}").read_text()), after)] if rank == 0 else []


EVALUATION = "evaluation (batch-000004)"


@pytest.mark.parametrize(
    ("phase", "shard"),
    [
        *((phase, "optimizer") for phase in ["sampling", "learning", "weight sync", "checkpoint", EVALUATION]),
        *((phase, "layers") for phase in ["learning", EVALUATION]),
    ],
)
def test_a_rank_that_is_killed_ends_the_run_and_is_named(settings, tmp_path, phase, shard):
    prepare = partial(strike, tmp_path, phase, signal.SIGKILL, 1)
    first, killed = together(2, settings("run", KINDS["asking ahead"], SHARDS[shard]), prepare)
    assert killed is None
    assert isinstance(first, RankEndError)
    assert str(first).startswith("RankError: ")
    assert "rank 1 on " in str(first)
    last, complaints = Checkpoints(tmp_path / "run").newest()
    assert last is not None
    assert not complaints
    assert load_events(tmp_path / "run")[-1]["status"] == "failed"


def test_a_rank_that_hangs_is_given_up(settings, tmp_path):
    short = settings("run", {"distributed": {"collective": 20}})
    first, _ = together(2, short, partial(strike, tmp_path, "learning", signal.SIGSTOP, 1), grace=0.1)
    assert "no sign of life" in str(first)


def test_a_run_whose_rank_0_is_killed_ends_on_the_others(settings, tmp_path):
    killed, other = together(2, settings("run"), partial(strike, tmp_path, "learning", signal.SIGKILL, 0))
    assert killed is None
    assert str(other).startswith("RankError: ")
    assert "rank 0" in str(other)


def fail_on(failing: int, error: Callable[[], Exception], rank: int) -> tuple[()]:
    """In the backward pass of the ninth row, this rank has an error of its own."""
    rows, loss = 0, Learner._loss

    def fail(learner: Learner, *given: Any) -> Any:
        nonlocal rows
        if (rows := rows + 1) == 9:
            raise error()
        return loss(learner, *given)

    if rank == failing:
        Learner._loss = fail  # type: ignore[method-assign]
    return ()


def fail_in_update(failing: int, error: Callable[[], Exception], rank: int) -> tuple[()]:
    """In its fifth update this rank has an error of its own."""
    updates, step = 0, torch.optim.AdamW.step

    def fail(optimizer: torch.optim.AdamW, *given: Any) -> Any:
        nonlocal updates
        if (updates := updates + 1) == 5:
            raise error()
        return step(optimizer, *given)

    if rank == failing:
        torch.optim.AdamW.step = fail  # type: ignore[method-assign]
    return ()


def no_memory() -> Exception:
    return MemoryError("nothing left")


@pytest.mark.parametrize(
    ("failing", "shard", "where"),
    [
        (0, "layers", fail_on),
        (1, "layers", fail_on),
        (1, "layers", fail_in_update),
        (0, "optimizer", fail_in_update),
        (1, "optimizer", fail_in_update),
    ],
)
def test_ranks_in_step_do_not_wait_for_one_that_failed(settings, tmp_path, failing, shard, where):
    """What is left is the checkpoint of the batch before, and weights of that, not half of the next version; the
    message says where and why."""
    bfloat16 = {"model": {"dtype": "bfloat16"}}
    found = together(2, settings("run", SHARDS[shard], bfloat16), partial(where, failing, no_memory))
    first, other = found[failing], found[1 - failing]
    assert str(first).startswith("NoMemoryError" if failing == 0 else "MemoryError")
    assert "nothing left" in str(first)
    assert str(other).startswith("RankError")
    assert f"rank {failing}" in str(other)
    assert "nothing left" in str(found[0])
    last, complaints = Checkpoints(tmp_path / "run").newest()
    assert last is not None
    assert not complaints
    if where is fail_in_update and (saved := tmp_path / "run/weights/final/model.safetensors").exists():
        masters = Merged(last.read_learner())
        for name, weight in load_file(saved).items():
            assert torch.equal(masters[f"master/{name}"].view_as(weight).bfloat16(), weight), name


@pytest.mark.parametrize(
    ("phase", "shard", "after"),
    [
        *((phase, "optimizer", 2) for phase in ["sampling", "learning", "weight sync"]),
        *((phase, "layers", 2) for phase in ["learning", "weight sync"]),
        ("learning", "layers", 4),
    ],
)
def test_a_stopped_run_goes_on_to_the_bit_on_as_many_ranks(settings, whole, tmp_path, phase, shard, after):
    """After four batches and more π_ref is neither the initial policy nor π: the checkpoint has its weights."""
    prepare = partial(strike, tmp_path, phase, signal.SIGTERM, 0, after=after)
    stopped = only_result(together(2, settings("run", KINDS["asking ahead"], SHARDS[shard]), prepare))
    assert stopped.interrupted == signal.SIGTERM
    assert after <= stopped.batches < 6
    assert after < 4 or [*(stopped.run / "checkpoints" / "weights").iterdir()]
    again = only_result(together(2, {"run": {"resume": str(stopped.run)}}))
    found, expected = leaves(again.run, exact=True), leaves(whole("asking ahead", shard), exact=True)
    assert [key for key in expected if found.get(key) != expected[key]] == []


def test_torchrun_starts_a_killed_run_again_where_it_was(settings, whole, tmp_path):
    together(2, settings("run"), partial(strike, tmp_path, "learning", signal.SIGKILL, 1))
    again = only_result(together(2, settings("run"), restarts=1))
    found, expected = leaves(again.run, exact=True), leaves(whole("plain", "optimizer"), exact=True)
    assert [key for key in expected if found.get(key) != expected[key]] == []


@pytest.mark.parametrize(
    ("before", "shard_before", "after", "shard_after", "kind"),
    [
        (3, "optimizer", 2, "optimizer", "plain"),
        (1, "optimizer", 2, "layers", "plain"),
        (2, "copies", 1, "optimizer", "plain"),
        (3, "layers", 2, "optimizer", "plain"),
        (3, "layers", 2, "layers", "adapters"),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    settings, alone, kinds, before, shard_before, after, shard_after, kind
):
    def make(size: int, of: dict[str, Any]) -> Result:
        return only_result(together(size, of)) if size > 1 else train(of)

    short = make(before, settings("run", kinds[kind], PLAIN, SHARDS[shard_before], {"schedule": {"stages": 1}}))
    longer = {"run": {"resume": str(short.run)}, "schedule": {"stages": 2}}
    long = make(after, merged(longer, SHARDS[shard_after]))
    whole = alone(kind, "torch")
    assert [row["token_ids"] for row in rollouts(long.run)] == [row["token_ids"] for row in rollouts(whole)]
    check_same_weights(long.run, whole)
    resumed = next(event for event in load_events(long.run) if event["event"] == "resumed")
    assert resumed["moved"]["ranks"] == [before, after]


def fill_disk(rank: int) -> tuple[()]:
    """Rank 1 cannot write what it has of the third checkpoint."""
    written = 0

    def write(path: Path, content: Callable[[Path], object]) -> Path:
        nonlocal written
        if (written := written + 1) == 3:
            raise OSError(28, "No space left on device", str(path))
        content(path)
        return path

    if rank == 1:
        shards.write_atomically = write
    return ()


def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before(settings, tmp_path):
    first, other = together(2, settings("run"), fill_disk)
    assert str(first).startswith("CheckpointError: ")
    assert "rank 1: OSError: [Errno 28] No space left on device" in str(first)
    assert "The one of batch 2 is whole" in str(first)
    assert str(other).startswith("EndedError")
    last, _ = Checkpoints(tmp_path / "run").newest()
    assert last is not None
    assert last.batch == 2


def test_what_is_refused_is_refused_on_all_ranks(settings):
    first, other = together(2, settings("run", {"task": {"name": "nowhere"}}))
    assert "SettingsError" in str(first)
    assert "SettingsError" in str(other)


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


def test_ranks_with_different_models_are_told_apart(settings):
    first, other = together(2, settings("run"), load_another_model)
    assert "model.path is another model on rank 1 than on rank 0" in str(first)
    assert str(other).startswith("EndedError")


def test_ranks_that_shards_do_not_divide_are_refused(settings):
    for found in together(3, settings("run", SHARDS["layers by pairs"])):
        assert "SettingsError: distributed.shard_ranks = 2 does not divide the 3 ranks" in str(found)


def signal_at(name: str, rank: int) -> tuple[()]:
    """Rank 0 gets SIGTERM while it announces this command for the third time."""
    announced, announce = 0, World._announce

    def strike(world: World, what: str, payload: Any) -> None:
        nonlocal announced
        announced += what == name
        if what == name and announced == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        announce(world, what, payload)

    if rank == 0:
        World._announce = strike  # type: ignore[method-assign]
    return ()


@pytest.mark.parametrize(
    "command",
    ["learning", "updating", "scoring a row", "gathering weights", "weight sync", "gathering for an evaluation"],
)
def test_a_signal_while_a_command_is_announced_leaves_no_rank_behind(settings, command):
    """All stop in step, and the run says that it was interrupted."""
    stopped = only_result(together(2, settings("run", SHARDS["layers"]), partial(signal_at, command)))
    assert stopped.interrupted == signal.SIGTERM


def count_what_travels(rank: int) -> tuple[()]:
    """A rank fails that sends rank 0, or itself, as much as a tenth of the tiny model's weights."""
    gather = dist.gather_object

    def counting(result: Any, *given: Any) -> None:
        assert len(pickle.dumps(result)) < 10_000
        gather(result, *given)

    dist.gather_object = counting
    return ()


def test_what_ranks_answer_is_small_where_rank_0_gathers_a_model(settings):
    """A gather of objects takes as much from each rank as the largest answer has."""
    only_result(together(2, settings("run", SHARDS["layers"], {"schedule": {"stages": 1}}), count_what_travels))


def unlike_hosts(rank: int) -> tuple[()]:
    os.environ["LOCAL_WORLD_SIZE"] = "1" if rank == 2 else "2"
    return ()


def test_hosts_with_other_numbers_of_ranks_share_the_layers_among_all(settings):
    run = only_result(together(3, settings("run", SHARDS["layers"], {"schedule": {"stages": 1}}), unlike_hosts)).run
    assert json.loads((run / "environment.json").read_text())["sharded"] == "layers, each over 3 ranks"
