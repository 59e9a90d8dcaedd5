"""Checkpoints: what a run needs to resume after a batch, to the bit, is written and restored here.

writer.py writes them while the run goes on. resume/checkpoint_files.py has the files of a
checkpoint, and finds damage to them. Random numbers are keyed: unfinished completions are sampled
again, token for token.
"""

# Some functions of safetensors have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import safetensors.torch as safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from lagrpo.data.fingerprint import check_visited
from lagrpo.distributed.ranks import Ranks
from lagrpo.distributed.shared import wait_for
from lagrpo.errors import SettingsError, as_settings_error, describe_error
from lagrpo.model.chat import Chat
from lagrpo.resume.checkpoint_files import (
    ROLLOUTS,
    Checkpoint,
    CheckpointError,
    FileDigest,
    digest_file,
    reading,
    trainer_file,
    weights_file,
    write_state,
)
from lagrpo.resume.model_files import Inputs, check_model_files
from lagrpo.rollout.prefetch import VersionError
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs import files
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.training.master_weights import MergedState, to_host
from lagrpo.training.sampling import Sampling
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, JsonObject, JsonView, Outcome, OutcomeKind

SYNCED = "synced/"
"""Prefix of the names of `sampling.synced` in trainer.safetensors; the rest is the index."""


# Writing


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A checkpoint of the run after `batch`, as this rank has it before it is on disk.

    - `trainer_state`: the trainer's own memory, which the next update changes, but for `copies`
    - `copies`: the names of masters that were joined for this checkpoint
    - `whole_weights`: copies of the weights of other versions than the policy's, on rank 0
    - `rows`: the completions that wait for their batch
    - `run_state`: state.json without the digests
    """

    batch: int
    trainer_state: Mapping[str, Tensor]
    copies: Collection[str]
    whole_weights: Mapping[int, Mapping[str, Tensor]]
    rows: Sequence[JsonView]
    run_state: JsonView

    def copy(self) -> NewCheckpoint:
        """Returns the checkpoint with a copy of the trainer's state in the host's memory."""
        copies = {
            name: part if name in self.copies else to_host(part, part.device)
            for name, part in self.trainer_state.items()
        }
        return replace(self, trainer_state=copies, copies=copies.keys())

    def write(self, folder: Path, ranks: Ranks) -> None:
        """Writes the checkpoint into the run's folder. Collective. Raises CheckpointError."""
        _write(folder / f"step-{self.batch:06d}", ranks, self.trainer_state, self._fill)

    def _fill(self, directory: Path, digests: dict[str, FileDigest]) -> None:
        """Writes everything but the trainer's state, whose files have these digests."""
        for version, tensors in self.whole_weights.items():
            file = directory / weights_file(version)
            _save_tensors(tensors, file)
            digests[file.name] = digest_file(file)
        if self.rows:
            file = files.write_table(directory / ROLLOUTS, self.rows, rollout_schema())
            digests[file.name] = digest_file(file)
        write_state(directory, self.run_state, digests)


def collect_checkpoint(
    sampling: Sampling,
    trainer: Trainer,
    inputs: Inputs,
    loop: LoopState,
    synced: Sequence[Tensor],
    *,
    finish: bool = True,
) -> NewCheckpoint:
    """Collects what a checkpoint of the run after a batch has.

    `loop` and `synced` are the loop's state and `sampling.synced` after that batch. With `finish`
    the engine completes its requests first, as `Sampling.finish` says. Collective.
    """
    ranks = trainer.ranks
    policy_version = trainer.policy.version

    if finish:
        sampling.finish()
    groups_by_batch, versions_by_batch = sampling.prefetcher.waiting(loop.prefetched_batches)
    in_flight = ranks.join(_list_in_flight(groups_by_batch))
    rows = ranks.join(_rows_of_groups(groups_by_batch, policy_version))

    weights_by_version: dict[int, Mapping[str, Tensor]] = {}
    reference_version = None
    if trainer.reference is not None and not trainer.has_teacher:
        reference_version = trainer.reference.version
        weights_by_version[reference_version] = trainer.reference.weights
    alpha_version = None
    if sampling.needs_weights(loop):
        alpha_version, alpha_weights = sampling.engine.current_weights()
        weights_by_version[alpha_version] = alpha_weights
    # Version 0 is built from the model of the settings, the policy's version from the masters.
    whole_weights = {
        version: ranks.gather_whole(weights)
        for version, weights in weights_by_version.items()
        if version not in (0, policy_version)
    }

    trainer_state = dict(trainer.state())
    if ranks.is_first:
        trainer_state |= {f"{SYNCED}{index}": tensor for index, tensor in enumerate(synced)}

    # The key in files keeps its first name, so that old checkpoints resume.
    names_in_file = {"kl_since_sync": "spent"}
    run_state = {
        "loop": {names_in_file.get(name, name): value for name, value in asdict(loop).items()},
        "versions": {
            "policy": policy_version,
            "alpha": alpha_version,
            "pi_ref": reference_version,
        },
        "announced": versions_by_batch,
        "in_flight": in_flight,
        "data": inputs.data,
        "model": inputs.model,
        "model_files": inputs.model_files,
        "teacher": inputs.teacher,
        "teacher_files": inputs.teacher_files,
    }

    copies = trainer.optimizer.joined_names()
    return NewCheckpoint(loop.batch, trainer_state, copies, whole_weights, rows, run_state)


def _rows_of_groups(
    groups_by_batch: Mapping[int, Sequence[Group]], policy_version: int
) -> list[JsonObject]:
    """Returns a row for each completion of this rank's groups, as in the files of rollouts."""
    rows: list[JsonObject] = []
    for batch, groups in groups_by_batch.items():
        no_columns: list[list[JsonObject]] = [[{} for _ in group.completions] for group in groups]
        rows += rollout_rows(groups, no_columns, step=batch, policy_version=policy_version)
    return rows


def _list_in_flight(groups_by_batch: Mapping[int, Sequence[Group]]) -> list[list[int]]:
    """Returns batch, epoch, prompt and index of each completion that has not ended."""
    return [
        [batch, group.epoch, group.prompt.key, index]
        for batch, groups in groups_by_batch.items()
        for group in groups
        for index, completion in enumerate(group.completions)
        if not completion.has_ended
    ]


def _write(
    path: Path,
    ranks: Ranks,
    trainer_state: Mapping[str, Tensor],
    fill: Callable[[Path, dict[str, FileDigest]], None],
) -> None:
    """Writes the checkpoint `path`: every rank its part of the trainer's state, rank 0 the rest.

    All write into one temporary directory beside `path`, which rank 0 fills and then renames.
    `fill` gets that directory and the digests of the files that the ranks wrote, by their names.
    """
    # All ranks know this name. It has the form that `files.remove_leftovers` removes.
    scratch = path.with_name(f".{path.name}.0-00000000.tmp")
    own_file = scratch / trainer_file(ranks.rank, ranks.size)

    def write_part() -> tuple[str, FileDigest]:
        scratch.mkdir(parents=True, exist_ok=True)
        _save_tensors(trainer_state, own_file)
        return own_file.name, digest_file(own_file)

    def publish(digests: dict[str, FileDigest]) -> None:
        check_parts(scratch, digests)
        fill(scratch, digests)
        files.write_directory_atomically(path, scratch.replace)

    try:
        digests = dict(ranks.on_every_rank(write_part))
        ranks.on_rank0(partial(publish, digests))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {describe_error(error)}"
        ) from error


def check_parts(directory: Path, digests: Mapping[str, FileDigest]) -> None:
    """Raises CheckpointError if a file that a rank has written is not in this host's directory."""

    def find_missing() -> list[str]:
        return [
            name
            for name, digest in digests.items()
            if not (directory / name).is_file()
            or (directory / name).stat().st_size != digest["bytes"]
        ]

    if not wait_for(lambda: not find_missing()):
        missing = find_missing()
        raise CheckpointError(
            f"{len(missing)} of {len(digests)} parts are not here, such as {missing[0]}: "
            "the ranks do not share this directory"
        )


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(contiguous, path, metadata={"format": "pt"})


# Reading


def restore_checkpoint(
    sampling: Sampling,
    trainer: Trainer,
    inputs: Inputs,
    checkpoint: Checkpoint,
    changed_sources: Sequence[str] = (),
) -> LoopState:
    """Restores the newly built sides of a run. Returns the state of the loop.

    Each version of the weights goes where it was. The weights that the engine gets are checked as
    after a weight sync. Raises SettingsError if the model or the data is not the run's (its message
    names the code in `changed_sources`), and CheckpointError for files that cannot be read.
    """
    state = checkpoint.state
    if inputs.model != state["model"]:
        raise SettingsError(
            f"model.path = {inputs.model_path!r} is not the model that the run started with"
        )
    if inputs.teacher != state.get("teacher"):  # older checkpoints do not have it
        raise SettingsError(
            "loss.reference is not the model that the run started with: restore it, or start a new "
            "run"
        )
    with as_settings_error("loss.reference"):
        check_model_files(state.get("teacher_files", {}), inputs.teacher_files)
    with as_settings_error():
        # Older checkpoints do not have these.
        if "model_files" in state:
            check_model_files(state["model_files"], inputs.model_files)
        check_visited(state["data"]["visited"], sampling.prompts.visited, changed_sources)
    _load_versions(checkpoint, sampling, trainer)
    # JSON has only texts as keys.
    versions_by_batch = {int(batch): versions for batch, versions in state["announced"].items()}
    rollouts = checkpoint.path / ROLLOUTS
    with reading(rollouts, VersionError):
        # Older checkpoints do not have it.
        in_flight = {tuple(address) for address in state.get("in_flight", [])}
        groups_by_batch = _load_groups(rollouts, sampling, trainer.policy.chat, in_flight)
        sampling.prefetcher.restore(groups_by_batch, versions_by_batch)
    loop: JsonObject = dict(state["loop"])
    loop["kl_since_sync"] = loop.pop("spent")
    loop["prefetched"] = tuple(loop["prefetched"])  # JSON has lists
    return LoopState(**loop)


def _load_versions(checkpoint: Checkpoint, sampling: Sampling, trainer: Trainer) -> None:
    """Loads the weights of π, α and π_ref, each through the trainer's policy."""
    policy = trainer.policy
    versions = checkpoint.state["versions"]
    policy_version = versions["policy"]
    alpha_version = versions["alpha"]
    reference_version = versions["pi_ref"]
    other_versions = {alpha_version, reference_version} - {None, policy_version}
    # π comes last: it stays in the trainer.
    for version in [*sorted(other_versions), policy_version]:
        if version == policy_version:
            sampling.synced = _load_trainer(trainer, checkpoint)
        elif version > 0:  # the new policy has version 0 already
            file = checkpoint.path / weights_file(version)
            with reading(file):
                policy.load(safetensors.load_file(file), version)
        if version == reference_version:
            trainer.load_reference()
        if version == alpha_version:
            sampling.engine.sync_weights(policy.weights, version)
            sampling.weight_check(policy)


def _load_trainer(trainer: Trainer, checkpoint: Checkpoint) -> list[Tensor]:
    """Loads master weights and optimizer state. Returns the sample of the last weight sync."""
    with reading(checkpoint.path / "trainer.safetensors"):
        # The files are mapped, not read: each rank takes its part.
        state = MergedState([safetensors.load_file(file) for file in checkpoint.trainer_files()])
        trainer.load_state(state, checkpoint.state["versions"]["policy"])
    indices = [int(name.removeprefix(SYNCED)) for name in state if name.startswith(SYNCED)]
    return [state[f"{SYNCED}{index}"] for index in sorted(indices)]


def _load_groups(
    file: Path, sampling: Sampling, chat: Chat, in_flight: Set[tuple[int, ...]]
) -> dict[int, list[Group]]:
    """Returns this rank's groups that wait for their batch, by batch.

    `in_flight` has batch, epoch, prompt and index of each completion that has not ended.
    """
    if not file.exists():
        return {}
    # Keys are (batch, epoch, prompt), as Request.address.
    completions: defaultdict[tuple[int, ...], list[Completion]] = defaultdict(list)
    for row in files.read_table(file):
        address = (row["step"], row["epoch"], row["prompt_id"])
        has_ended = (*address, row["sample_index"]) not in in_flight
        completions[address].append(_completion(row, chat, has_ended=has_ended))
    for (batch, _, prompt), sampled in completions.items():
        if len(sampled) != sampling.G:
            raise ValueError(f"batch {batch}, prompt {prompt} has {len(sampled)} completions")
    groups: dict[int, list[Group]] = {}
    for batch in sorted({batch for batch, _, _ in completions}):
        requests = sampling.requests(batch)
        groups[batch] = [
            Group(request.prompt, tuple(completions[request.address]), request.epoch)
            for request in requests
            if request.address in completions
        ]
    return groups


def _completion(row: JsonView, chat: Chat, *, has_ended: bool) -> Completion:
    """Returns the completion of a row.

    It was not scored yet. If it has an outcome, it failed, or its environment scored it.
    """
    outcome = None
    if row["outcome"]:
        outcome = Outcome(OutcomeKind(row["outcome"]), row["reward"], row["reason"])
    later_prefixes = chat.find_later_prefixes(row["token_ids"], row["loss_mask"])
    logprobs = [math.nan if logp is None else logp for logp in row["rollout_logprobs"]]
    return Completion(
        token_ids=torch.tensor(row["token_ids"], dtype=torch.long),
        rollout_logp=torch.tensor(logprobs, dtype=torch.float32),
        versions=torch.tensor(row["policy_versions"], dtype=torch.long),
        finished=row["finished"],
        text=row["completion"],
        outcome=outcome,
        turns=tuple(row["messages"] or ()),
        sampled=torch.tensor(row["loss_mask"], dtype=torch.bool),
        prefix=later_prefixes[-1] if later_prefixes else None,
        has_ended=has_ended,
    )
