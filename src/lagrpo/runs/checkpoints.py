"""The checkpoints of a run on disk: what is needed to go on from the end of a batch.

    checkpoints/step-000120/state.json           numbers; written last, with the size of every file of the checkpoint
                            learner.safetensors  float32 masters and moments; of several ranks that of each, as
                            learner-00001-of-00002.safetensors
                            waiting.parquet      completions that were sampled ahead, where there are any
    checkpoints/weights/v000110.safetensors      weights of alpha or pi_ref, once for all checkpoints that need them

A directory is written under a temporary name, synced to the disk and renamed, so a checkpoint is whole or absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lagrpo.runs.files import numbered, remove_directory, write_atomically, write_directory_atomically, write_table
from lagrpo.runs.rollouts import table_schema
from lagrpo.runs.state import SCHEMA, parse_state
from lagrpo.types import Completion, Group, Outcome

STATE, LEARNER, WAITING = "state.json", "learner.safetensors", "waiting.parquet"
COLUMNS = """
    batch:int32  epoch:int32  prompt_key:int64  token_ids:int32[]  logp_alpha:float[]  versions:int32[]  sampled:bool[]
    finished:bool  text:string  outcome:string  reason:string  reward:double  turns:string[]
"""
LATER = ("reward", "turns")  # columns that older checkpoints lack: without environments they are empty


class CheckpointError(OSError):
    """A checkpoint cannot be written, or cannot be read back."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint holds. Nothing in it may be in memory that the run goes on to change."""

    batch: int
    state: Mapping[str, Any]
    """what JSON holds"""
    learner: Mapping[str, Tensor]
    waiting: Mapping[int, Sequence[Group]]
    """by batch: groups that were sampled ahead"""
    weights: Mapping[int, Mapping[str, Tensor]]
    """by version: what alpha and pi_ref need, beside the weights of pi and of the initial policy"""
    of_ranks: Callable[[], Sequence[Path]] = tuple
    """waits for the files that the other ranks write, and returns them: they become part of the checkpoint"""


class Stored(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for. It holds the path alone, so that other
    processes can be sent it. Raises CheckpointError for a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            yield from file.keys()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        with self._open() as file:
            if name not in file.keys():  # noqa: SIM118 - it is no mapping
                raise KeyError(name)
            return file.get_tensor(name)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole."""

    path: Path
    batch: int
    state: Mapping[str, Any]
    """as `State` says"""

    def read_learner(self) -> list[Stored]:
        """What each rank had, in their order."""
        return [Stored(file) for file in sorted(self.path.glob("learner*.safetensors"))]

    def read_weights(self, version: int) -> Stored:
        return Stored(_weights_file(self.path.parent, version))

    def read_waiting(self) -> dict[int, list[dict[str, Any]]]:
        """By batch, the rows of the completions that were sampled ahead: see `completion_of`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, found = self.path / WAITING, dict[int, list[dict[str, Any]]]()
        if not path.exists():
            return found
        try:
            table = pq.read_table(path)
            names = [name for name in table_schema(COLUMNS).names if name in table.column_names or name not in LATER]
            rows = table.select(names).to_pylist()
        except (OSError, KeyError, pa.ArrowException) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        for row in rows:
            found.setdefault(row["batch"], []).append(row)
        return found


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints in the directory of a run."""

    run: Path
    identity: str | None = None
    """of the run: checkpoints of another one are none; None: whichever"""

    @property
    def path(self) -> Path:
        return self.run / "checkpoints"

    def write(self, content: Content) -> int:
        """Write a checkpoint, and return its bytes. Raises CheckpointError where that fails; what was there stays."""
        target = self._of(content.batch)
        try:
            for version, weights in content.weights.items():
                if not (file := _weights_file(self.path, version)).exists():
                    write_atomically(file, partial(save_tensors, weights))
            write_directory_atomically(target, partial(self._fill, content))
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of batch {content.batch} could not be written to {self.path}: {error}. "
                f"{self._remedy()}"
            ) from error
        return sum(file.stat().st_size for file in target.iterdir())

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest whole checkpoint, and why newer ones are none."""
        complaints = []
        for batch in sorted(self._batches(), reverse=True):
            try:
                return self._open(batch), complaints
            except CheckpointError as error:
                complaints.append(str(error))
        return None, complaints

    def prune(self, keep: Collection[int]) -> None:
        """Remove the checkpoints of other batches, and weights that none needs any more."""
        for batch in self._batches() - set(keep):
            remove_directory(self._of(batch))
        needed = {version for batch in self._batches() for version in _versions(self._of(batch))}
        for version, file in numbered(self.path / "weights", "v", ".safetensors").items():
            if version not in needed:
                file.unlink()

    def _batches(self) -> set[int]:
        return {batch for batch, path in numbered(self.path, "step-").items() if path.is_dir()}

    def _open(self, batch: int) -> Checkpoint:
        found = _open(self._of(batch))
        if found.batch != batch:
            raise CheckpointError(
                f"{found.path} is no checkpoint of batch {batch}: it says that it is of {found.batch}"
            )
        if self.identity is not None and found.state.get("run", "") != self.identity:
            raise CheckpointError(f"{found.path} is a checkpoint of another run")
        return found

    def _of(self, batch: int) -> Path:
        return self.path / f"step-{batch:06d}"

    def _fill(self, content: Content, folder: Path) -> None:
        shards = content.of_ranks()
        save_tensors(content.learner, folder / (learner_file(0, len(shards) + 1)))
        for shard in shards:
            shard.replace(folder / shard.name)
        for emptied in {shard.parent for shard in shards}:
            emptied.rmdir()
        if any(content.waiting.values()):
            rows = [row for batch, groups in content.waiting.items() for g in groups for row in _rows(batch, g)]
            write_table(folder / WAITING, rows, table_schema(COLUMNS))
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        weights = {version: _weights_file(self.path, version).stat().st_size for version in content.weights}
        about = {"schema": SCHEMA, "batch": content.batch, "files": sizes, "weights": weights}
        (folder / STATE).write_text(json.dumps({**about, **content.state}, default=float, indent=1) + "\n")

    def _remedy(self) -> str:
        last, _ = self.newest()
        whole = f"The one of batch {last.batch} is whole" if last else "There is none before it"
        return f"{whole}. Make room, or mend the directory"


def _open(path: Path) -> Checkpoint:
    """Raises CheckpointError for one that lacks something, or says something that no checkpoint says."""
    try:
        state = parse_state((path / STATE).read_bytes())
        files = {path / name: size for name, size in state["files"].items()}
        files |= {_weights_file(path.parent, version): size for version, size in state["weights"].items()}
        for file, size in files.items():
            if (found := file.stat().st_size) != size:
                raise CheckpointError(f"{file} has {found} bytes, not {size}")
            _check_header(file)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no whole checkpoint: {error}") from error
    return Checkpoint(path, state["batch"], state)


def _versions(path: Path) -> list[int]:
    try:
        return [*_open(path).state["weights"]]
    except CheckpointError:
        return []


def _weights_file(checkpoints: Path, version: int) -> Path:
    return checkpoints / "weights" / f"v{version:06d}.safetensors"


def learner_file(rank: int, size: int) -> str:
    """Where a checkpoint has what rank `rank` of `size` learned.

    >>> learner_file(0, 1), learner_file(1, 2)
    ('learner.safetensors', 'learner-00002-of-00002.safetensors')
    """
    return LEARNER if size == 1 else f"learner-{rank + 1:05d}-of-{size:05d}.safetensors"


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _check_header(file: Path) -> None:
    """Raise CheckpointError for a safetensors file whose header is damaged."""
    from safetensors import SafetensorError, safe_open

    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error


def _rows(batch: int, group: Group) -> list[dict[str, Any]]:
    place = {"batch": batch, "epoch": group.epoch, "prompt_key": group.prompt.key}
    return [
        {
            **place,
            **{name: getattr(c, name).tolist() for name in ("token_ids", "logp_alpha", "versions", "sampled")},
            "finished": c.finished,
            "text": c.text,
            "outcome": c.outcome.kind if c.outcome else None,
            "reason": c.outcome.reason if c.outcome else None,
            "reward": c.reward,
            "turns": list(c.turns),
        }
        for c in group.completions
    ]


def completion_of(row: Mapping[str, Any]) -> Completion:
    """The completion of a row of `Checkpoint.read_waiting`. It was not judged, so an outcome says that it failed, or
    what its environment gave."""
    return Completion(
        token_ids=torch.tensor(row["token_ids"], dtype=torch.long),
        logp_alpha=torch.tensor(row["logp_alpha"], dtype=torch.float32),
        versions=torch.tensor(row["versions"], dtype=torch.long),
        finished=row["finished"],
        text=row["text"],
        outcome=Outcome(row["outcome"], row.get("reward"), row["reason"]) if row["outcome"] else None,
        turns=tuple(row.get("turns") or ()),
        sampled=torch.tensor(row["sampled"], dtype=torch.bool),
    )
