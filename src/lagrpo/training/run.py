"""Starts a training run: alone, or as one of several ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from lagrpo import logs
from lagrpo.backends.hardware import pick_device
from lagrpo.backends.process import restored
from lagrpo.interrupts import interruptible
from lagrpo.objective.compose import Recipe
from lagrpo.ranks.rank import Rank
from lagrpo.ranks.signs import EndedError, RankError
from lagrpo.ranks.world import Patience, World
from lagrpo.rollout.parity import ParityError
from lagrpo.rollout.prefetch import VersionError
from lagrpo.rollout.vllm.client import SamplerError
from lagrpo.runs.directory import RunLockedError, locked
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings
from lagrpo.tasks import NO_TASK, Task
from lagrpo.terminal.text import count_of
from lagrpo.threads import choose_threads, fixed_threads
from lagrpo.training.build import Parts
from lagrpo.training.changes import after_restart, find_run
from lagrpo.training.checks import check_settings, count_shards
from lagrpo.training.follow import follow
from lagrpo.training.memory import NoMemoryError, explained
from lagrpo.training.observers import Observer, check_observers
from lagrpo.training.resume import Earlier, recorded_threads
from lagrpo.training.training import Result, Training
from lagrpo.verify import VerifierError

FAILURES = (
    *(VerifierError, ParityError, VersionError, SamplerError, RankError),
    *(FloatingPointError, NoMemoryError, OSError, RunLockedError),
)
"""Errors that end a run without being the program's: what they say is for the user."""


def train(
    settings: Settings | Mapping[str, Any] | str | os.PathLike[str],
    task: Task | None = None,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run Algorithm 1. `settings` are a Settings, a mapping, or the path of a TOML file; `task` replaces settings.task
    by a Task of your own (see lagrpo.tasks.base); `observers` are told about the run after its files and its display.

    Ctrl-C and SIGTERM end the run with the policy after the last batch, as soon as the updates on the batch under way
    are made, and write a checkpoint. An error ends it, too; what was learned and recorded until then is kept. With
    `run.resume` the run goes on from its newest checkpoint.

    Under torchrun all processes call this. The one of rank 0 owns the run, its files and its observers; all return the
    same.

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded where that can be seen.
        RunLockedError: another process is writing into the run that is to go on.
        CheckpointError: a checkpoint could not be written, or read.
        ParityError, VersionError: the sampler does not sample from the policy that the schedule announced.
        SamplerError: the vLLM servers are gone for good.
        RankError: one of the processes that torchrun started has failed, ended or fallen silent.
        VerifierError: too many completions could not be scored.
        FloatingPointError: a gradient is not finite; it names the completion.
        NoMemoryError: the memory does not suffice; it says where, and which setting to lower.
        TypeError: the settings, the task or an observer are something else, before anything is loaded.
    """
    if settings is None:
        raise TypeError("settings are a Settings, a mapping or the path of a TOML file, not None; {} are the defaults")
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task: {task!r:.80} {NO_TASK}")
    rank = Rank.find()
    settings = after_restart(settings if isinstance(settings, Settings) else load_settings(settings), rank)
    recipe = check_settings(settings, task)
    check_observers(observers)
    before = recorded_threads(settings, rank.size if rank else 1)
    threads = choose_threads(settings.model.threads, before, rank.local_size if rank else 1)
    with interruptible(), restored(), fixed_threads(threads):
        if rank is None:
            return lead(settings, recipe, task, observers)
        return train_together(rank, settings, recipe, task, observers)


def train_together(
    rank: Rank, settings: Settings, recipe: Recipe, task: Task | None, observers: Sequence[Observer]
) -> Result:
    """One of several ranks: rank 0 leads, the others follow and return its result."""
    waits = settings.distributed.model_dump(include={"deadline", "collective", "silence"})
    patience, result = Patience(**waits), None
    shards = count_shards(settings, rank)
    world = World.join(rank, pick_device(settings.model.device).type, patience, shards)
    try:
        leads = rank.number == 0
        result = lead(settings, recipe, task, observers, world) if leads else follow(world, settings, recipe)
    finally:
        world.close(result)
    if result is None:
        raise EndedError("rank 0 has ended the run; its own message says why")
    return result


def lead(
    settings: Settings, recipe: Recipe, task: Task | None, observers: Sequence[Observer], world: World | None = None
) -> Result:
    """The run itself, in one process or as rank 0 of several."""
    least = logging.WARNING if settings.run.display == "none" else logging.INFO
    directory = find_run(settings)
    with logs.shown_by(None, least), locked(directory) if directory else nullcontext():
        earlier = Earlier.find(directory, settings) if directory else None
        if settings.run.display != "none":
            ranks = f", with {count_of(world.size, 'rank')}" if world is not None else ""
            print(f"loading {settings.model.path} on {pick_device(settings.model.device)}{ranks} …", flush=True)
        with explained(lambda: "loading"):
            parts = Parts.build(settings, recipe, task, world)
        try:
            return Training(parts, observers, earlier).run()
        finally:
            parts.close()
