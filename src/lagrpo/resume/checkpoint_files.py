"""The files of a checkpoint, and how damage to them is found.

    checkpoints/step-000120/
        trainer.safetensors          fp32 master weights and AdamW's moments, one file per rank
        weights-v000110.safetensors  weights of α or π_ref, if they are other versions than π
        rollouts.parquet             finished rollouts that wait for their batch
        state.json                   the loop's state; size and digest of all other files

A directory is written under a temporary name and renamed, so a checkpoint is whole or absent. What
happens to it later is found when a run resumes: a file that is not what state.json says stops it.
state.json has a digest of itself, too. Other files in the directory are not read.

A digest is XXH3 (128 bits), which reads several GB/s; it guards against accidents only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from xxhash import xxh3_128

from lagrpo.data.fingerprint import digest
from lagrpo.errors import describe_error, parse_json_object
from lagrpo.runs import files
from lagrpo.types import JsonView

SCHEMA = "lagrpo.checkpoint/5"
SCHEMA_WITHOUT_DIGESTS = "lagrpo.checkpoint/4"
STATE = "state.json"
ROLLOUTS = "rollouts.parquet"

NumberOfBatch = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=0)]


class _Loop(BaseModel, extra="forbid"):
    batch: NumberOfBatch
    alpha: Annotated[int, Field(ge=-1)]
    pi_ref: Version
    since_sync: NumberOfBatch
    spent: Annotated[float, Field(allow_inf_nan=False)]
    prefetched: list[Version]
    sync: dict[str, Any]


class _Versions(BaseModel):
    policy: Version
    alpha: Version | None
    pi_ref: Version | None


class _Rows(BaseModel):
    rows: int
    columns: dict[str, Any]


class _Visited(BaseModel):
    prompts: int
    tokens: str
    answers: str


class _Data(BaseModel):
    places: dict[str, _Rows]
    visited: _Visited


class _State(BaseModel):
    """The keys of state.json that are read, with the types of their values."""

    loop: _Loop
    versions: _Versions
    announced: dict[Annotated[str, Field(pattern="^[0-9]+$")], list[Version]]
    data: _Data
    model: str


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


class FileDigest(TypedDict):
    """The entry of a file in state.json."""

    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk, with its state.json."""

    path: Path
    state: JsonView

    @property
    def batch(self) -> int:
        """The number of batches that were finished."""
        return self.state["loop"]["batch"]

    def trainer_files(self) -> list[Path]:
        """Returns the files of the trainer's state, one per rank."""
        if "files" in self.state:
            names = [name for name in self.state["files"] if name.startswith("trainer")]
            return [self.path / name for name in sorted(names)]
        return sorted(self.path.glob("trainer*.safetensors"))


def trainer_file(rank: int, ranks: int) -> str:
    """Returns the name of the file with a rank's part of the trainer's state."""
    return (
        "trainer.safetensors"
        if ranks == 1
        else f"trainer-{rank + 1:05d}-of-{ranks:05d}.safetensors"
    )


def weights_file(version: int) -> str:
    """Returns the name of the file with the weights of a version."""
    return f"weights-v{version:06d}.safetensors"


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the newest checkpoint in a folder, or None if it has none.

    Raises ValueError for one that this version of lagrpo does not read, and CheckpointError for one
    that is damaged.
    """
    checkpoints = files.numbered(folder, "step-")
    if not checkpoints:
        return None
    path = checkpoints[max(checkpoints)]
    with reading(path / STATE):
        state = parse_json_object((path / STATE).read_bytes())
        schema = state["schema"]
    if schema not in (SCHEMA, SCHEMA_WITHOUT_DIGESTS):
        raise ValueError(f"{path} has the format {schema}; this version of lagrpo reads {SCHEMA}")
    with reading(path / STATE):
        _check_state(state)
    checkpoint = Checkpoint(path, state)
    if "files" in state:
        _check_files(path, state["files"])
    return checkpoint


def _check_state(state: JsonView) -> None:
    """Raises an error that `reading` names unless a state is whole.

    Every key has a value of its type, and the loop has no unknown keys.
    """
    try:
        _State.model_validate(state, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{name}: {problem['msg']}") from error
    if state["schema"] == SCHEMA and state["digest"] != _digest_state(state):
        raise ValueError("its content has changed since it was written")


def _check_files(path: Path, expected: Mapping[str, FileDigest]) -> None:
    """Raises CheckpointError for a file that is missing or not what state.json says."""
    for name, file_digest in expected.items():
        with reading(path / name):
            size = (path / name).stat().st_size
            if size != file_digest["bytes"]:
                raise ValueError(f"it has {size:,} bytes, not {file_digest['bytes']:,}")
    # Several ranks have written large files: threads read them side by side.
    with ThreadPoolExecutor() as pool:
        found = {name: pool.submit(digest_file, path / name) for name in expected}
    for name, file_digest in expected.items():
        with reading(path / name):
            if found[name].result() != file_digest:
                raise ValueError("its content has changed since it was written")


def digest_file(path: Path) -> FileDigest:
    """Returns the size and the digest of a file."""
    with path.open("rb") as file:
        hexdigits = hashlib.file_digest(file, xxh3_128).hexdigest()
    return {"bytes": path.stat().st_size, "digest": hexdigits}


def write_state(path: Path, run_state: JsonView, digests: Mapping[str, FileDigest]) -> None:
    """Writes state.json into a checkpoint's directory, with the digests of its other files."""
    state = {"schema": SCHEMA, **run_state, "files": digests}
    content = files.to_json(state | {"digest": _digest_state(state)})
    (path / STATE).write_text(content + "\n", encoding="utf-8")


def _digest_state(state: JsonView) -> str:
    """Returns a digest of everything in state.json but the digest itself."""
    return digest(files.to_json({key: value for key, value in state.items() if key != "digest"}))


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    newest_first = sorted(files.numbered(folder, "step-").items(), reverse=True)
    for _, path in newest_first[keep:]:
        files.remove_directory(path)


@contextmanager
def reading(file: Path, *more: type[Exception]) -> Generator[None]:
    """Turns errors about a file of a checkpoint that is missing or damaged into a CheckpointError.

    They are errors of libraries, and `more` ones.
    """
    try:
        yield
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, *more) as error:
        raise CheckpointError(
            f"{file} cannot be read ({describe_error(error)}): {_advise(file.parent)}"
        ) from error


def _advise(path: Path) -> str:
    """Says how a run resumes whose checkpoint `path` is damaged."""
    if len(files.numbered(path.parent, "step-")) > 1:
        return f"remove {path} to resume from the checkpoint before it"
    return f"restore {path}, the run's only checkpoint, or start a new run from its weights"
