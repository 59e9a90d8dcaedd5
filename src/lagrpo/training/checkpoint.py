"""Checkpoints: what a run needs to resume after a batch, to the bit.

    checkpoints/step-000120/trainer.safetensors          float32 master weights and AdamW's moments, one file per rank
                            weights-v000110.safetensors  weights of α or π_ref, if they are other versions than π
                            rollouts.parquet             finished rollouts that wait for their batch
                            state.json                   the loop's state, and the size of every file

A directory is written under a temporary name, synced to the disk and renamed, so a checkpoint is whole or absent.
Random numbers are keyed: a checkpoint has no generator's state, and unfinished completions are sampled again, token for
token.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lagrpo.errors import SettingsError
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs.files import (
    numbered,
    remove_directory,
    to_json,
    write_directory_atomically,
    write_table,
)
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.training.optimizer_state import MergedState
from lagrpo.types import Completion, Group, Outcome

if TYPE_CHECKING:
    from lagrpo.training.build import TrainerComponents

SCHEMA = "lagrpo.checkpoint/2"
STATE, ROLLOUTS = "state.json", "rollouts.parquet"
DEADLINE = 3600.0  # seconds for the disk to take a checkpoint


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for. It pickles as its path."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, safe_open(path, framework="pt")

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedTensors, (self.path,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    state: Mapping[str, Any]

    @property
    def batch(self) -> int:
        return self.state["loop"]["batch"]

    def load_trainer(self) -> MergedState:
        """The state of all ranks' trainers, read as one: a trainer on any number of ranks takes its part."""
        return MergedState([SavedTensors(file) for file in sorted(self.path.glob("trainer*.safetensors"))])

    def load_weights(self, version: int) -> SavedTensors:
        return SavedTensors(self.path / _weights_file(version))

    def load_rollouts(self) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        path = self.path / ROLLOUTS
        return pq.read_table(path).to_pylist() if path.exists() else []


def find_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint in a folder, and what is wrong with newer ones."""
    problems = []
    for _, path in sorted(numbered(folder, "step-").items(), reverse=True):
        try:
            state = json.loads((path / STATE).read_bytes())
            if state["schema"] != SCHEMA:
                raise ValueError(f"it is written in {state['schema']}; this version of lagrpo reads {SCHEMA}")
            if wrong := [name for name, size in state["files"].items() if (path / name).stat().st_size != size]:
                raise ValueError(f"{wrong[0]} is not of the size that {STATE} says")
            return Checkpoint(path, state), problems
        except (OSError, ValueError, KeyError) as error:
            problems.append(f"{path} is not a whole checkpoint: {error}")
    return None, problems


def _weights_file(version: int) -> str:
    return f"weights-v{version:06d}.safetensors"


def _trainer_file(rank: int, size: int) -> str:
    return "trainer.safetensors" if size == 1 else f"trainer-{rank + 1:05d}-of-{size:05d}.safetensors"


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that the run does not change while they are written."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class CheckpointManager:
    """Writes checkpoints to a folder in the background, one at a time, and keeps the last `keep`. One is due every
    `every` batches, and `minutes` after the last one (0: never for that reason). With several ranks each has a manager:
    rank 0 calls `save`, the others `save_shard`, in the same batches. A rank that cannot write ends."""

    def __init__(
        self, folder: Path, every: int = 0, minutes: float = 0.0, keep: int = 2, rank: int = 0, size: int = 1
    ) -> None:
        self.folder, self.every, self.minutes, self.keep = folder, every, minutes, keep
        self.rank, self.size = rank, size
        self.written: list[int] = []
        """batches of the whole checkpoints, oldest first"""
        self._news: list[dict[str, Any]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._closed, self._last = threading.Event(), time.monotonic()

    def is_due(self, batch: int) -> bool:
        by_time = self.minutes > 0 and time.monotonic() - self._last >= 60 * self.minutes
        return by_time or (self.every > 0 and batch % self.every == 0)

    def save(
        self,
        state: Mapping[str, Any],
        trainer: Mapping[str, Tensor],
        weights: Mapping[int, Mapping[str, Tensor]],
        rollouts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write the checkpoint of the batch state["loop"]["batch"], once the one before is written: the state of this
        rank's trainer, weights of other policies by version (on the host), and rows of rollouts. Raises CheckpointError
        if the one before could not be written."""
        self.wait()
        files = {_weights_file(version): tensors for version, tensors in weights.items()}
        files[_trainer_file(0, self.size)] = _on_host(trainer)
        self._writing, self._last = self._pool.submit(self._write, dict(state), files, rollouts), time.monotonic()

    def save_shard(self, batch: int, trainer: Mapping[str, Tensor]) -> None:
        """On the other ranks: write the state of this rank's trainer."""
        self.wait()
        self._writing = self._pool.submit(self._write_shard, batch, _on_host(trainer))

    def pop_news(self) -> list[dict[str, Any]]:
        """Batch, bytes and seconds of each checkpoint that was written since the last call."""
        news, self._news = self._news, []
        return news

    def wait(self) -> None:
        """Return when everything is on the disk. Raises CheckpointError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result(DEADLINE)

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def prune(self, keep: Sequence[int]) -> None:
        """Remove the checkpoints of other batches."""
        for batch, path in numbered(self.folder, "step-").items():
            if batch not in keep and path.is_dir():
                remove_directory(path)

    def _write(self, state: dict[str, Any], files: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        started, batch = time.monotonic(), state["loop"]["batch"]
        path = self.folder / f"step-{batch:06d}"
        try:
            write_directory_atomically(path, partial(self._fill, state, files, rows))
        except Exception as error:
            raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error
        self.written = [*self.written, batch][-max(1, self.keep) :]
        self.prune(self.written)
        size = sum(file.stat().st_size for file in path.iterdir())
        self._news.append({"step": batch, "bytes": size, "seconds": time.monotonic() - started})

    def _fill(self, state: dict[str, Any], files: Mapping[str, Any], rows: Any, folder: Path) -> None:
        for name, tensors in files.items():
            save_tensors(tensors, folder / name)
        if rows:
            write_table(folder / ROLLOUTS, rows, rollout_schema())
        self._take_shards(state["loop"]["batch"], folder)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        (folder / STATE).write_text(to_json({"schema": SCHEMA, "files": sizes, **state}) + "\n")

    def _shards(self, batch: int) -> Path:
        return self.folder / f".step-{batch:06d}.0-00000000.tmp"

    def _write_shard(self, batch: int, trainer: Mapping[str, Tensor]) -> None:
        path = self._shards(batch) / _trainer_file(self.rank, self.size)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(trainer, scratch := path.with_suffix(".part"))
            scratch.replace(path)  # rank 0 takes it from here, and syncs it to the disk
        except Exception as error:
            path.with_suffix(".failed").write_text(said := f"rank {self.rank} could not write {path}: {error}")
            raise CheckpointError(said) from error
        self.written.append(batch)

    def _take_shards(self, batch: int, folder: Path) -> None:
        """Wait for what the other ranks write, and move it into the folder."""
        shards, end = self._shards(batch), time.monotonic() + DEADLINE
        missing = {_trainer_file(rank, self.size) for rank in range(1, self.size)}
        while missing:
            for name in {name for name in missing if (shards / name).exists()}:
                (shards / name).replace(folder / name)
                missing.discard(name)
            for failed in shards.glob("*.failed"):
                raise OSError(failed.read_text())
            if missing and (self._closed.wait(0.05) or time.monotonic() > end):
                raise OSError(f"{', '.join(missing)} did not come: all ranks need the run's directory")
        if self.size > 1:
            shards.rmdir()


# From the parts of a run to a checkpoint, and back


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands after a batch: what the next weight sync changes, and π does not tell."""

    loop: LoopState
    version: int
    """of π"""
    agreement: Mapping[str, Any] | None
    """what the weight-sync check compares with; None without a check"""
    synced: Sequence[Tensor]
    """sample of the weights of the last sync"""

    @staticmethod
    def from_parts(a: TrainerComponents, loop: LoopState) -> TrainState:
        agreement = a.check_weight_sync.memory() if a.check_weight_sync is not None else None
        return TrainState(loop, a.trainer.policy.version, agreement, a.trainer.synced)


def save_checkpoint(
    manager: CheckpointManager, a: TrainerComponents, stand: TrainState, further: Mapping[str, Any], finish: bool = True
) -> None:
    """Save where the run stands and its policy; `further` goes into the JSON. Collective. With `finish` the local
    engine completes what it was asked for first: it would do so before the next weight sync anyway, with the same rows
    side by side, so that even inexact arithmetic repeats it."""
    if finish and a.sampled is not None:
        a.prefetcher.finish()
    loop, version, reference = stand.loop, a.trainer.policy.version, a.trainer.reference
    waiting, announced = a.prefetcher.waiting(loop.asked_ahead)
    rows = [row for b, groups in waiting.items() for row in _rows(groups, b, version)]
    alpha, of_alpha = a.sampler.current_weights() if needs_alpha(a, loop) else (None, {})
    pi_ref = reference.version if reference is not None else None
    weights: dict[int, Any] = {} if reference is None else {reference.version: reference.weights}
    weights |= {} if alpha is None else {alpha: of_alpha}
    state = {
        "loop": asdict(loop),
        "versions": {"policy": version, "alpha": alpha, "pi_ref": pi_ref},
        "announced": announced,
        "agreement": stand.agreement,
        "data": fingerprint_data(a),
    }
    others = {v: a.ranks.gather_whole(of) for v, of in weights.items() if v not in (0, version)}
    if a.ranks.is_first:
        trainer = a.trainer.state() | {f"synced/{n}": tensor for n, tensor in enumerate(stand.synced)}
        manager.save({**state, **further}, trainer, others, rows)
    else:
        manager.save_shard(loop.batch, a.trainer.state())


def needs_alpha(a: TrainerComponents, loop: LoopState) -> bool:
    """Whether the engine will sample from its present weights once more."""
    schedule = a.settings.schedule
    prefetch = a.settings.rollout.prefetch and not a.settings.rollout.dynamic_sampling_rounds
    due = a.schedule.next(loop, schedule.stages + 1, schedule.batches, prefetch)  # as if the run went on
    return loop.alpha >= 0 and (a.prefetcher.missing(loop.asked_ahead) or (not due.reason and bool(due.to_generate)))


def fingerprint_data(a: TrainerComponents) -> str:
    """Tells data apart: the size of the split, the prompts of the first batch, the offline completions."""
    prompts = [(index, prompt.token_ids, str(prompt.answer)) for index, prompt in a.prompts.first]
    seen = repr((a.task.size("train"), prompts, str(a.offline)))
    return hashlib.blake2b(seen.encode("utf-8", "replace"), digest_size=8).hexdigest()


def restore_checkpoint(a: TrainerComponents, checkpoint: Checkpoint) -> LoopState:
    """Restore newly built parts from a checkpoint. Each version goes where it was, and what the engine gets is checked
    as after a weight sync. Raises SettingsError if the model or the data is not the run's, WeightSyncError if the
    engine does not compute as the policy did, CheckpointError for files that cannot be read."""
    _check_model_and_data(a, checkpoint.state)
    try:
        _load_versions(a, checkpoint)
        rollouts = _groups(a, checkpoint.load_rollouts())
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint.path} cannot be read: {error}") from error
    announced = {int(b): versions for b, versions in checkpoint.state["announced"].items()}
    a.prefetcher.restore(rollouts, announced)
    loop = checkpoint.state["loop"]
    return LoopState(**{**loop, "prefetched": tuple(loop["prefetched"])})


def _check_model_and_data(a: TrainerComponents, saved: Mapping[str, Any]) -> None:
    if a.model != saved["model"]:
        raise SettingsError(f"model.path = {a.settings.model.path!r} is not the model that the run began with")
    if fingerprint_data(a) != saved["data"]:
        raise SettingsError(
            "task: the data has changed since the run began: its size, the prompts of the first batch or the offline "
            "completions. Restore it, or start a new run"
        )


def _load_versions(a: TrainerComponents, checkpoint: Checkpoint) -> None:
    agreement, versions = checkpoint.state["agreement"], checkpoint.state["versions"]
    pi, alpha, pi_ref = (versions[name] for name in ("policy", "alpha", "pi_ref"))
    if a.check_weight_sync is not None and agreement is not None:
        a.check_weight_sync.remember({**agreement, "before": None})
    for version in sorted({alpha, pi_ref, pi} - {None}, key=lambda v: (v == pi, v)):  # π last: it stays
        if version == pi:
            state = checkpoint.load_trainer()
            a.trainer.load_state(state, pi)
            synced = sorted((name for name in state if name.startswith("synced/")), key=lambda name: int(name[7:]))
            a.trainer.synced = [state[name] for name in synced]
        elif version:  # 0, the initial policy, is there
            a.trainer.load_weights(checkpoint.load_weights(version), version)
        if version == pi_ref and a.trainer.reference is not None:
            a.trainer.load_reference()
        if version == alpha:
            a.sampler.sync_weights(a.trainer.policy.weights, version)
            if a.check_weight_sync is not None:
                a.check_weight_sync(a.trainer.policy, a.sampler)
    if a.check_weight_sync is not None and agreement is not None:
        a.check_weight_sync.remember(agreement)


def _groups(a: TrainerComponents, rows: Sequence[Mapping[str, Any]]) -> dict[int, list[Group]]:
    """By batch, the finished groups that wait for it."""
    found: dict[int, list[Group]] = {}
    for batch in sorted({row["step"] for row in rows}):
        for request in a.prompts.batch(batch):
            key = batch, request.epoch, request.prompt.key
            own = [row for row in rows if (row["step"], row["epoch"], row["prompt_id"]) == key]
            if own:
                found.setdefault(batch, []).append(Group(request.prompt, tuple(map(_completion, own)), request.epoch))
    return found


def _rows(groups: Sequence[Group], batch: int, version: int) -> Iterator[dict[str, Any]]:
    nothing = [[{}] * len(group.completions) for group in groups]
    return rollout_rows(groups, nothing, step=batch, policy_version=version)


def _completion(row: Mapping[str, Any]) -> Completion:
    """The completion of a row. It was not scored yet: an outcome is a failure's, or its environment's."""
    return Completion(
        token_ids=torch.tensor(row["token_ids"], dtype=torch.long),
        logp_alpha=torch.tensor([math.nan if p is None else p for p in row["rollout_logprobs"]], dtype=torch.float32),
        versions=torch.tensor(row["policy_versions"], dtype=torch.long),
        finished=row["finished"],
        text=row["completion"],
        outcome=Outcome(row["outcome"], row["reward"], row["reason"]) if row["outcome"] else None,
        turns=tuple(row["messages"] or ()),
        sampled=torch.tensor(row["loss_mask"], dtype=torch.bool),
    )
