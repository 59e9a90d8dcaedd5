"""From the parts of a run to a checkpoint, and back.

A checkpoint is the end of a batch. It holds what the batches to come depend on: π with its masters and moments, the
state of the loop, the weights of α and π_ref where they are other versions, completions that were sampled ahead, and
what the parity check compares with. Random numbers have addresses, so none of their state is there; completions that
were under way are drawn again, token for token.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lagrpo.errors import SettingsError
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs.checkpoints import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    Content,
    completion_of,
    learner_file,
    save_tensors,
)
from lagrpo.runs.files import write_atomically
from lagrpo.training.build import Parts
from lagrpo.training.optimizer_state import MergedState
from lagrpo.training.ranks import Ranks
from lagrpo.types import Group

DEADLINE = 3600.0  # seconds for the disk to take a checkpoint


def copied(tensor: Tensor) -> Tensor:
    """In the host's memory, which the run does not change."""
    return tensor.detach().to("cpu", copy=True)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a run stands after a batch: what the next weight sync changes, and π does not tell."""

    state: LoopState
    version: int
    """of π"""
    parity: Mapping[str, Any] | None
    """what the parity check compares with; None where there is none"""
    synced: Sequence[Tensor]
    """sample of the weights of the last sync"""

    @staticmethod
    def of(a: Parts, state: LoopState) -> Stand:
        parity = a.check_parity.memory() if a.check_parity is not None else None
        return Stand(state, a.learner.policy.version, parity, a.learner.synced)


def fingerprint_data(a: Parts) -> str:
    """Tells the data of a run apart: the size of the split, the prompts of the first batch, the offline completions."""
    prompts = [(index, prompt.token_ids, str(prompt.gold)) for index, prompt in a.prompts.first]
    seen = repr((a.task.size("train"), prompts, str(a.offline)))
    return hashlib.blake2b(seen.encode("utf-8", "replace"), digest_size=8).hexdigest()


def capture(a: Parts, stand: Stand, further: Mapping[str, Any], path: Path, finish: bool = True) -> Content:
    """The checkpoint, below `path`, of a run that stands there, its policy too; `further` goes into the JSON. With
    `finish` the in-process sampler completes what was asked for first: it would do so before the next weight sync
    anyway, and what it draws then has the same rows beside it, so that even arithmetic that is not exact repeats it."""
    if finish and a.sampled is not None:
        a.prefetcher.finish()
    state = stand.state
    waiting, announced = a.prefetcher.waiting(state.asked_ahead)
    version, reference = a.learner.policy.version, a.learner.reference
    pi_ref = reference.version if reference is not None else None
    alpha, of_alpha = a.sampler.current_weights() if alpha_is_needed(a, state) else (None, {})
    weights = {} if alpha is None or alpha in (0, version) else {alpha: of_alpha}
    if reference is not None and pi_ref not in (0, version, *weights):
        weights[reference.version] = {name: tensor for name, tensor in reference.weights.items() if a.ranks.is_first}
    about = {
        "data": fingerprint_data(a),
        "loop": asdict(state),
        "versions": {"policy": version, "alpha": alpha, "pi_ref": pi_ref},
        "announced": announced,
        "parity": stand.parity,
    }
    copies = {name: copied(tensor) for name, tensor in a.learner.state().items()}
    if a.ranks.is_first:
        copies |= {f"synced/{n}": tensor.cpu() for n, tensor in enumerate(stand.synced)}
    kept = {version: {name: copied(tensor) for name, tensor in of.items()} for version, of in weights.items()}
    if a.ranks.size == 1:
        return Content(state.batch, {**about, **further}, copies, waiting, kept)
    folder = a.ranks.from_first(lambda: path / f".learner.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    files = [folder / learner_file(rank, a.ranks.size) for rank in range(a.ranks.size)]
    if a.ranks.is_first:
        return Content(
            state.batch, {**about, **further}, copies, waiting, kept, partial(a.ranks.await_files, files[1:])
        )
    return Content(state.batch, {}, copies, {}, {}, lambda: [files[a.ranks.rank]])


def alpha_is_needed(a: Parts, state: LoopState) -> bool:
    """Whether the sampler will draw from its present weights once more."""
    schedule = a.settings.schedule
    prefetch = a.settings.sampling.prefetch and not a.settings.sampling.dynamic_sampling
    due = a.schedule.next(state, schedule.stages + 1, schedule.batches, prefetch)  # as if the run went on
    return state.alpha >= 0 and (a.prefetcher.missing(state.asked_ahead) or (not due.reason and bool(due.to_generate)))


def restore(a: Parts, checkpoint: Checkpoint, model: str) -> LoopState:
    """Put the parts, as they were just built, where they were. `model` is the fingerprint of the initial policy. Each
    version goes where it was; what the sampler gets is proven as after a weight sync. Raises SettingsError where
    model.path or the data is not the run's, WeightSyncError where the sampler does not compute as the policy did,
    CheckpointError for files that cannot be read."""
    saved = checkpoint.state
    check_same(a, saved, model)
    if a.check_parity is not None and saved["parity"] is not None:
        a.check_parity.remember({**saved["parity"], "before": None})
    pi, alpha, pi_ref = (saved["versions"][name] for name in ("policy", "alpha", "pi_ref"))
    for version in sorted({alpha, pi_ref, pi} - {None}, key=lambda v: (v == pi, v)):  # π last: it stays
        load_version(a, checkpoint, version, pi)
        if version == pi_ref and a.learner.reference is not None:
            a.learner.load_reference()
        if version == alpha:
            a.sampler.sync_weights(a.learner.policy.weights, version)
            if a.check_parity is not None:
                a.check_parity(a.learner.policy, a.sampler)
    if a.check_parity is not None and saved["parity"] is not None:
        a.check_parity.remember(saved["parity"])
    a.prefetcher.restore(read_waiting(a, checkpoint), {int(b): of for b, of in saved["announced"].items()})
    return LoopState(**{**saved["loop"], "prefetched": tuple(saved["loop"]["prefetched"])})


def check_same(a: Parts, saved: Mapping[str, Any], model: str) -> None:
    """Raise SettingsError for another initial policy or other data than the checkpoint's."""
    if model != saved["model"]:
        raise SettingsError(
            f"model.path = {a.settings.model.path!r} is not the model that the run began with: its weights have the "
            f"fingerprint {model}, those of the run {saved['model']}"
        )
    allowed = any(name.startswith(("task.", "offline.", "schedule.prompts")) for name in a.settings.run.allow)
    if not allowed and fingerprint_data(a) != saved["data"]:
        raise SettingsError(
            "the data has changed since the run began: its size, the prompts of the first batch or the offline "
            "completions. To go on with the data as it is now: --run.allow task.data"
        )


def load_version(a: Parts, checkpoint: Checkpoint, version: int, pi: int) -> None:
    """π_version into the policy, with masters and moments where it is `pi`. Version 0 is there from the start."""
    if version == pi:
        kept = MergedState(checkpoint.read_learner())
        a.learner.load_state(kept, pi)
        samples = sorted((name for name in kept if name.startswith("synced/")), key=lambda name: int(name[7:]))
        a.learner.synced = [kept[name] for name in samples]
    elif version:
        a.learner.load_weights(checkpoint.read_weights(version), version)


def read_waiting(a: Parts, checkpoint: Checkpoint) -> dict[int, list[Group]]:
    """By batch, the groups that were sampled ahead."""
    found: dict[int, list[Group]] = {}
    for batch, rows in checkpoint.read_waiting().items():
        for request in a.prompts.batch(batch):
            own = [row for row in rows if (row["epoch"], row["prompt_key"]) == (request.epoch, request.prompt.key)]
            if own:
                found.setdefault(batch, []).append(Group(request.prompt, tuple(map(completion_of, own)), request.epoch))
    return found


class Keeper:
    """Keeps the checkpoints of a run: says when one is due, writes them in the background, one at a time, and removes
    old ones. `every` batches, `minutes` between two (0: never for that reason); the last `keep` stay, and the best.
    Ranks other than the first write their part alone."""

    def __init__(self, store: Checkpoints, every: int, minutes: float, keep: int, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.store, self.every, self.minutes, self.keep = store, every, minutes, keep
        self.best: list[float] | None = None
        """result and batch of the best evaluation so far"""
        self.written: list[int] = []
        """batches of the checkpoints that are whole, oldest first"""
        self._news: list[dict[str, Any]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._last = time.monotonic()

    def due(self, batch: int) -> bool:
        """Whether a checkpoint is to be made after this batch."""
        by_time = self.minutes > 0 and time.monotonic() - self._last >= 60 * self.minutes
        by_number = self.every > 0 and batch % self.every == 0
        return by_time or by_number or (self.best is not None and batch == self.best[1])

    def rank(self, batch: int, value: float | None) -> bool:
        """The evaluation after this batch found this result: the first of the best stays. Whether it is that now."""
        if value is None or (self.best is not None and value <= self.best[0]):
            return False
        self.best = [value, batch]
        return True

    def take_over(self, batch: int, best: list[float] | None) -> None:
        """Go on from the checkpoint of a batch."""
        self.written, self.best = [batch], best

    def tell(self) -> list[dict[str, Any]]:
        """What has been written since the last call: batch, bytes, seconds."""
        news, self._news = self._news, []
        return news

    def write(self, make: Callable[[], Content]) -> None:
        """Write what `make` captures, once the one before is written. Raises CheckpointError where that one failed."""
        self.wait()
        content = make()
        self._writing, self._last = self._pool.submit(self._write, content), time.monotonic()

    def wait(self) -> None:
        """Return when everything is on the disk. Raises CheckpointError where it could not be written, TimeoutError
        where the disk takes longer than DEADLINE."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(DEADLINE)
        except TimeoutError as error:
            raise TimeoutError(f"{self.store.path}: a checkpoint was not written within {DEADLINE:g} s") from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _write(self, content: Content) -> None:
        if not self.ranks.is_first:
            return self._write_part(content)
        started = time.monotonic()
        size = self.store.write(content)
        self.written = [*(batch for batch in self.written if batch != content.batch), content.batch]
        keep = {*self.written[-self.keep :], *([int(self.best[1])] if self.best else [])}
        self.store.prune(keep)
        self.written = [batch for batch in self.written if batch in keep]
        self._news.append({"batch": content.batch, "bytes": size, "seconds": time.monotonic() - started})

    def _write_part(self, content: Content) -> None:
        """What this rank's learner has, where rank 0 waits for it."""
        (file,) = content.of_ranks()
        try:
            write_atomically(file, partial(save_tensors, content.learner))
        except OSError as error:
            raise CheckpointError(f"rank {self.ranks.rank} could not write {file}: {error}") from error
        self.written.append(content.batch)
