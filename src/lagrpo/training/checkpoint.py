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
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lagrpo.errors import SettingsError
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs.files import numbered, remove_directory, to_json, write_directory_atomically, write_table
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.training.build import TrainerComponents
from lagrpo.training.optimizer_state import MergedState
from lagrpo.training.ranks import Ranks
from lagrpo.types import Completion, Group, Outcome

SCHEMA = "lagrpo.checkpoint/2"
STATE, ROLLOUTS = "state.json", "rollouts.parquet"


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


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


class CheckpointManager:
    """Writes checkpoints to a folder and keeps the last `keep`. One is due every `every` batches, and `minutes` after
    the last one (0: never for that reason)."""

    def __init__(self, folder: Path, every: int, minutes: float, keep: int, ranks: Ranks) -> None:
        self.folder, self.every, self.minutes, self.keep, self.ranks = folder, every, minutes, keep, ranks
        self.written: list[int] = []
        """batches of the whole checkpoints, oldest first"""
        self._last = time.monotonic()

    def is_due(self, batch: int) -> bool:
        by_time = self.minutes > 0 and time.monotonic() - self._last >= 60 * self.minutes
        return by_time or (self.every > 0 and batch % self.every == 0)

    def save(
        self, state: Mapping[str, Any], trainer: Mapping[str, Tensor], weights: Mapping[int, Mapping[str, Tensor]],
        rollouts: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:  # fmt: skip
        """Write the checkpoint of the batch state["loop"]["batch"]: the state of this rank's trainer, and on rank 0
        weights of other policies by version and rows of rollouts. Returns the seconds, and on rank 0 the bytes. All
        ranks write into the run's directory. Collective. Raises CheckpointError."""
        started, batch, size = time.monotonic(), state["loop"]["batch"], 0
        path, shards = self.folder / f"step-{batch:06d}", self.folder / f".step-{batch:06d}.0-00000000.tmp"
        try:
            shards.mkdir(parents=True, exist_ok=True)
            save_tensors(trainer, shards / _trainer_file(self.ranks.rank, self.ranks.size))
            self.ranks.gather(None)  # all have written
            if self.ranks.is_first:
                write_directory_atomically(path, partial(_fill, state, weights, rollouts, shards))
                size = sum(file.stat().st_size for file in path.iterdir())
        except OSError as error:
            shutil.rmtree(shards, ignore_errors=True)
            where = f"rank {self.ranks.rank}: " if self.ranks.size > 1 else ""
            raise CheckpointError(f"{where}the checkpoint {path} could not be written: {error}") from error
        self.written, self._last = [*self.written, batch][-max(1, self.keep) :], time.monotonic()
        if self.ranks.is_first:
            self.prune(self.written)
        return {"bytes": size, "seconds": time.monotonic() - started}

    def prune(self, keep: Sequence[int]) -> None:
        """Remove the checkpoints of other batches."""
        for batch, path in numbered(self.folder, "step-").items():
            if batch not in keep and path.is_dir():
                remove_directory(path)


def _fill(state: Mapping[str, Any], weights: Mapping[int, Any], rows: Any, shards: Path, folder: Path) -> None:
    """Everything into the directory of a checkpoint; trainers' states lie in `shards`."""
    for file in shards.iterdir():
        file.replace(folder / file.name)
    shards.rmdir()
    for version, tensors in weights.items():
        save_tensors(tensors, folder / _weights_file(version))
    if rows:
        write_table(folder / ROLLOUTS, rows, rollout_schema())
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    (folder / STATE).write_text(to_json({"schema": SCHEMA, "files": sizes, **state}) + "\n")


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
    manager: CheckpointManager, a: TrainerComponents, stand: TrainState, finish: bool = True
) -> dict[str, Any]:
    """Write where the run stands, and its policy. Collective. With `finish` the local engine completes its requests:
    it would do so before the next weight sync anyway, with the same rows side by side, so that even inexact
    arithmetic repeats it."""
    if finish and a.sampled is not None:
        with a.ranks.stopping_together():
            a.prefetcher.finish()
    loop, version, reference = stand.loop, a.trainer.policy.version, a.trainer.reference
    waiting, announced = a.prefetcher.waiting(loop.asked_ahead)
    rows = a.ranks.join([row for b, groups in waiting.items() for row in _rows(groups, b, version)])
    alpha, of_alpha = a.sampler.current_weights() if needs_alpha(a, loop) else (None, {})
    weights: dict[int, Any] = {} if reference is None else {reference.version: reference.weights}
    weights |= {} if alpha is None else {alpha: of_alpha}
    pi_ref = reference.version if reference is not None else None
    state = {
        "loop": asdict(loop),
        "versions": {"policy": version, "alpha": alpha, "pi_ref": pi_ref},
        "announced": announced,
        "agreement": stand.agreement,
        "data": fingerprint_data(a),
        "model": a.model,
    }
    others = {v: a.ranks.gather_whole(of) for v, of in weights.items() if v not in (0, version)}
    synced = {f"synced/{n}": tensor for n, tensor in enumerate(stand.synced) if a.ranks.is_first}
    return manager.save(state, a.trainer.state() | synced, others, rows)


def needs_alpha(a: TrainerComponents, loop: LoopState) -> bool:
    """Whether the engine will sample from its present weights once more."""
    schedule = a.settings.schedule
    prefetch = a.settings.rollout.prefetch and not a.settings.rollout.dynamic_sampling_rounds
    due = a.schedule.next(loop, schedule.stages + 1, schedule.batches, prefetch)  # as if the run went on
    missing = any(a.ranks.gather(a.prefetcher.missing(loop.asked_ahead)))
    return loop.alpha >= 0 and (missing or (not due.reason and bool(due.to_generate)))


def fingerprint_data(a: TrainerComponents) -> str:
    """Tells data apart: the size of the split, the prompts of the first batch, the offline completions."""
    prompts = [(index, prompt.token_ids, str(prompt.answer)) for index, prompt in a.prompts.first]
    seen = repr((a.task.size("train"), prompts, str(a.offline)))
    return hashlib.blake2b(seen.encode("utf-8", "replace"), digest_size=8).hexdigest()


def restore_checkpoint(a: TrainerComponents, checkpoint: Checkpoint) -> LoopState:
    """Restore newly built parts from a checkpoint. Each version goes where it was, and what the engine gets is checked
    as after a weight sync. Raises SettingsError if the model or the data is not the run's, WeightSyncError if the
    engine does not compute as the policy did, CheckpointError for files that cannot be read."""
    state = checkpoint.state
    if a.model != state["model"]:
        raise SettingsError(f"model.path = {a.settings.model.path!r} is not the model that the run began with")
    if fingerprint_data(a) != state["data"]:
        raise SettingsError(
            "task: the data has changed since the run began: its size, the prompts of the first batch or the offline "
            "completions. Restore it, or start a new run"
        )
    try:
        _load_versions(a, checkpoint)
        rollouts = _groups(a, checkpoint.load_rollouts())
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint.path} cannot be read: {error}") from error
    a.prefetcher.restore(rollouts, {int(b): versions for b, versions in state["announced"].items()})
    return LoopState(**{**state["loop"], "prefetched": tuple(state["loop"]["prefetched"])})


def _load_versions(a: TrainerComponents, checkpoint: Checkpoint) -> None:
    agreement, versions, check = checkpoint.state["agreement"], checkpoint.state["versions"], a.check_weight_sync
    pi, alpha, pi_ref = (versions[name] for name in ("policy", "alpha", "pi_ref"))
    if check is not None and agreement is not None:
        check.remember({**agreement, "before": None})
    for version in sorted({alpha, pi_ref, pi} - {None}, key=lambda v: (v == pi, v)):  # π last: it stays
        if version == pi:
            state = checkpoint.load_trainer()
            a.trainer.load_state(state, pi)
            names = sorted((name for name in state if name.startswith("synced/")), key=lambda name: int(name[7:]))
            a.trainer.synced = [state[name] for name in names]
        elif version:  # 0, the initial policy, is there
            a.trainer.load_weights(checkpoint.load_weights(version), version)
        if version == pi_ref:
            a.trainer.load_reference()
        if version == alpha:
            a.sampler.sync_weights(a.trainer.policy.weights, version)
            if check is not None:
                check(a.trainer.policy, a.sampler)
    if check is not None and agreement is not None:
        check.remember(agreement)


def _groups(a: TrainerComponents, rows: Sequence[Mapping[str, Any]]) -> dict[int, list[Group]]:
    """By batch, the finished groups that wait for it."""
    found: dict[int, list[Group]] = {}
    for batch in sorted({row["step"] for row in rows}):
        for request in a.share(a.prompts.batch(batch)):
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
