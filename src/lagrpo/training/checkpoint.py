"""Checkpoints: what a run needs to resume after a batch, to the bit.

    checkpoints/step-000120/trainer.safetensors          float32 master weights and AdamW's moments, one file per rank
                            weights-v000110.safetensors  weights of α or π_ref, if they are other versions than π
                            rollouts.parquet             finished rollouts that wait for their batch
                            state.json                   the loop's state

A directory is written under a temporary name and renamed, so a checkpoint is whole or absent. Random numbers are keyed:
unfinished completions are sampled again, token for token.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lagrpo.data.fingerprint import check_visited
from lagrpo.errors import SettingsError, as_settings_error, describe_error
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs import files
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.training.build import TrainerComponents
from lagrpo.training.master_weights import MergedState
from lagrpo.training.ranks import Ranks
from lagrpo.types import Completion, Group, Outcome

SCHEMA = "lagrpo.checkpoint/4"
STATE, ROLLOUTS = "state.json", "rollouts.parquet"


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    state: Mapping[str, Any]

    @property
    def batch(self) -> int:
        return self.state["loop"]["batch"]


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in a folder. Raises ValueError for one that this version of lagrpo does not read, and
    CheckpointError for one that is damaged."""
    for _, path in sorted(files.numbered(folder, "step-").items(), reverse=True):
        with reading(path / STATE):
            state = json.loads((path / STATE).read_bytes())
            schema = state["schema"]
        if schema != SCHEMA:
            raise ValueError(
                f"{path} has the format {schema}; this version of lagrpo reads {SCHEMA}"
            )
        with reading(path / STATE):
            LoopState(**state["loop"])
        return Checkpoint(path, state)
    return None


def prune_checkpoints(folder: Path, keep: int) -> None:
    for _, path in sorted(files.numbered(folder, "step-").items(), reverse=True)[keep:]:
        files.remove_directory(path)


# Writing


def save_checkpoint(
    folder: Path,
    components: TrainerComponents,
    loop: LoopState,
    synced: Sequence[Tensor],
    finish: bool = True,
) -> None:
    """Write where the run stands after a batch: `loop`, and `trainer.synced` as it was then. With `finish` the local
    engine completes its requests: it would do so before the next weight sync anyway, with the same rows side by side,
    so that even inexact arithmetic repeats it. Collective. Raises CheckpointError."""
    if finish and components.samples_here:
        with components.ranks.sync_interrupts():
            components.prefetcher.finish()
    version, reference = components.trainer.policy.version, components.trainer.reference
    waiting, announced = components.prefetcher.waiting(loop.asked_ahead)
    rows = list[dict[str, Any]]()
    for b, groups in waiting.items():
        columns = [[{}] * len(group.completions) for group in groups]
        rows += rollout_rows(groups, columns, step=b, policy_version=version)
    rows = components.ranks.join(rows)
    alpha, of_alpha = (
        components.sampler.current_weights() if needs_alpha(components, loop) else (None, {})
    )
    weights = {} if reference is None else {reference.version: reference.weights}
    weights |= {} if alpha is None else {alpha: of_alpha}
    state = {
        "schema": SCHEMA,
        "loop": asdict(loop),
        "versions": {
            "policy": version,
            "alpha": alpha,
            "pi_ref": reference.version if reference is not None else None,
        },
        "announced": announced,
        "data": components.data,
        "model": components.model,
    }
    others = {
        v: components.ranks.gather_whole(of) for v, of in weights.items() if v not in (0, version)
    }
    trainer = components.trainer.state() | {
        f"synced/{n}": tensor for n, tensor in enumerate(synced) if components.ranks.is_first
    }

    def fill(directory: Path) -> None:
        for version, tensors in others.items():
            _save_tensors(tensors, directory / _weights_file(version))
        if rows:
            files.write_table(directory / ROLLOUTS, rows, rollout_schema())
        (directory / STATE).write_text(files.to_json(state) + "\n", encoding="utf-8")

    _write(folder / f"step-{loop.batch:06d}", components.ranks, trainer, fill)


def _write(
    path: Path, ranks: Ranks, trainer: Mapping[str, Tensor], fill: Callable[[Path], None]
) -> None:
    """Every rank writes its part into a directory beside `path`, and rank 0 makes the checkpoint of it."""
    name = "trainer" if ranks.size == 1 else f"trainer-{ranks.rank + 1:05d}-of-{ranks.size:05d}"
    parts = path.with_name(f".{path.name}.0-00000000.tmp")
    try:
        parts.mkdir(parents=True, exist_ok=True)
        _save_tensors(trainer, parts / f"{name}.safetensors")
        ranks.gather(None)  # all have written
        if ranks.is_first:
            fill(parts)
            files.write_directory_atomically(path, lambda directory: parts.replace(directory))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(parts, ignore_errors=True)
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def _weights_file(version: int) -> str:
    return f"weights-v{version:06d}.safetensors"


def needs_alpha(components: TrainerComponents, loop: LoopState) -> bool:
    """Whether the engine will sample from its present weights once more."""
    due = components.next_sync(
        loop, further=components.settings.schedule.stage_length
    )  # as if the run went on
    missing = any(components.ranks.gather(components.prefetcher.missing(loop.asked_ahead)))
    return loop.alpha >= 0 and (missing or (not due.reason and bool(due.to_generate)))


# Reading


def restore_checkpoint(
    components: TrainerComponents, checkpoint: Checkpoint, changed_sources: Sequence[str] = ()
) -> LoopState:
    """Restore newly built parts from a checkpoint. Each version goes where it was, and what the engine gets is checked
    as after a weight sync. Raises SettingsError if the model or the data is not the run's (its message names code that
    has changed, `changed_sources`), CheckpointError for files that cannot be read."""
    state = checkpoint.state
    if components.model != state["model"]:
        raise SettingsError(
            f"model.path = {components.settings.model.path!r} is not the model that the run started with"
        )
    with as_settings_error():
        check_visited(state["data"]["visited"], components.main.prompts.visited, changed_sources)
    _load_versions(components, checkpoint)
    with reading(checkpoint.path / ROLLOUTS):
        groups = _load_groups(components, checkpoint.path / ROLLOUTS)
    components.prefetcher.restore(
        groups, {int(b): versions for b, versions in state["announced"].items()}
    )
    return LoopState(**{**state["loop"], "prefetched": tuple(state["loop"]["prefetched"])})


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what libraries raise for a missing or damaged file of a checkpoint into a CheckpointError."""
    from pyarrow import ArrowException

    problems = (SafetensorError, ArrowException, OSError, ValueError, LookupError, TypeError)
    try:
        yield
    except problems as error:
        raise CheckpointError(
            f"{file} cannot be read ({describe_error(error)}): "
            f"remove {file.parent} to resume from the checkpoint before it"
        ) from error


def _load_versions(components: TrainerComponents, checkpoint: Checkpoint) -> None:
    pi, alpha, pi_ref = (
        checkpoint.state["versions"][name] for name in ("policy", "alpha", "pi_ref")
    )
    for version in sorted(
        {alpha, pi_ref, pi} - {None}, key=lambda v: (v == pi, v)
    ):  # π last: it stays
        if version == pi:
            with reading(checkpoint.path / "trainer.safetensors"):
                parts = sorted(checkpoint.path.glob("trainer*.safetensors"))
                # The files are mapped, not read: each rank takes its part.
                state = MergedState([load_file(file) for file in parts])
                components.trainer.load_state(state, pi)
            names = sorted(
                (name for name in state if name.startswith("synced/")),
                key=lambda name: int(name[7:]),
            )
            components.trainer.synced = [state[name] for name in names]
        elif version:  # 0, the initial policy, is there
            file = checkpoint.path / _weights_file(version)
            with reading(file):
                components.trainer.policy.load(load_file(file), version)
        if version == pi_ref:
            components.trainer.load_reference()
        if version == alpha:
            components.sampler.sync_weights(components.trainer.policy.weights, version)
            components.check_weight_sync(components.trainer.policy, components.sampler)


def _load_groups(components: TrainerComponents, file: Path) -> dict[int, list[Group]]:
    """By batch, the finished groups that wait for it."""
    import pyarrow.parquet as pq

    found: defaultdict[tuple[int, ...], list[Completion]] = defaultdict(list)
    for row in pq.read_table(file).to_pylist() if file.exists() else ():
        found[row["step"], row["epoch"], row["prompt_id"]].append(_completion(row))
    groups: dict[int, list[Group]] = {}
    for batch in sorted({batch for batch, *_ in found}):
        requests = [
            r for r in components.share(components.main.prompts.batch(batch)) if r.address in found
        ]
        groups[batch] = [Group(r.prompt, tuple(found[r.address]), r.epoch) for r in requests]
    return groups


def _completion(row: Mapping[str, Any]) -> Completion:
    """The completion of a row. It was not scored yet: an outcome is a failure's, or its environment's."""
    return Completion(
        token_ids=torch.tensor(row["token_ids"], dtype=torch.long),
        logp_alpha=torch.tensor(
            [math.nan if p is None else p for p in row["rollout_logprobs"]], dtype=torch.float32
        ),
        versions=torch.tensor(row["policy_versions"], dtype=torch.long),
        finished=row["finished"],
        text=row["completion"],
        outcome=Outcome(row["outcome"], row["reward"], row["reason"]) if row["outcome"] else None,
        turns=tuple(row["messages"] or ()),
        sampled=torch.tensor(row["loss_mask"], dtype=torch.bool),
    )
