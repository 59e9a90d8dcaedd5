"""From the arguments of `lagrpo.train` to a finished run.

`train` checks its arguments and turns them into settings, `run_rank` builds the two sides
(build.py), and `Training` (lifecycle.py) evaluates, trains and saves. Under torchrun every rank
runs this. Rank 0 has the display, the callbacks and the files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from lagrpo import logs
from lagrpo.core.objective import Recipe
from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.distributed.ranks import Ranks, joined
from lagrpo.distributed.shared import check_shared
from lagrpo.distributed.torchrun import check_ranks, local_size
from lagrpo.errors import as_settings_error, without_own_frames
from lagrpo.interrupts import Interrupted, interruptible
from lagrpo.lifecycle.callbacks import Callback
from lagrpo.lifecycle.measure import describe_cost, measure_batch
from lagrpo.lifecycle.resuming import ResumeState
from lagrpo.lifecycle.start_to_end import Training
from lagrpo.machine import choose_threads, fixed_threads
from lagrpo.model.backend import pick_device
from lagrpo.resume.changes import find_run, recorded_threads
from lagrpo.rewards.pool import RewardError
from lagrpo.rollout.base import WeightSyncError
from lagrpo.rollout.prefetch import VersionError
from lagrpo.rollout.vllm.client import SamplerError
from lagrpo.runs.directory import locked
from lagrpo.runs.environment import naming_start
from lagrpo.settings.load import explains_arguments, load_settings
from lagrpo.settings.run_code import ARGUMENTS, TRUST_ARGUMENT, check_run_code
from lagrpo.settings.schema import Settings
from lagrpo.startup.arguments import (
    as_settings,
    build_task,
    check_arguments,
    check_one_loss,
    in_memory_arguments,
    name_rewards,
)
from lagrpo.startup.build import build_run
from lagrpo.startup.checks import check_settings
from lagrpo.startup.dry_run import explain_run
from lagrpo.startup.epochs import with_batches
from lagrpo.tasks import NOT_A_TASK, Task
from lagrpo.types import Result

DryRun = bool | Literal["measure"]
"""Only says what the settings mean; with "measure" also what a batch costs."""

SECONDS_FOR_TORCHRUN = 5.0
"""Seconds that torchrun has to see the end of another rank, before a rank that lost it ends."""
TIMEOUT_ADVICE = (
    "Another rank did not come within distributed.timeout. If it was busy, set more seconds."
)
FAILURES = (
    RewardError,
    WeightSyncError,
    VersionError,
    SamplerError,
    FloatingPointError,
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
)
"""Errors that end a run for reasons outside the program. The command line prints their messages
without a traceback."""


@without_own_frames(*FAILURES, KeyboardInterrupt)
@explains_arguments
def train(
    source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    model: str | os.PathLike[str] | None = None,
    data: object = None,
    rewards: Sequence[object] | None = None,
    loss: str | Recipe | Callable[..., Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    dry_run: DryRun = False,
    trust_run_code: bool = False,
) -> Result:
    """Trains a model (Algorithm 1 of arXiv 2505.22257).

    Returns where its files are, and the summaries of the evaluations.

    source: path of a TOML file, name of a packaged one (demo, gsm8k, deepscaler), mapping or
        Settings; None: all defaults. `settings` changes single values: {"schedule.sync_every": 4};
        `model` is short for model.path.
    data: path, hub id, datasets.Dataset, table, or list of dicts, with the columns prompt (or
        question) and answer.
    rewards: functions f(completion, answer) -> float, or in TRL's or verl's signature, names of
        built-in ones, lagrpo.Reward(function, weight=0.2, range=(-1, 1)), or tables as in TOML.
    loss: name of a recipe, lagrpo.Recipe, or function of LossInputs that gives the value of each
        token [T] to maximize.
    task: object that replaces settings.task (lagrpo.tasks.Task).
    callbacks: called after each batch is on disk.
    resume: directory of a run to resume with its own settings, or "auto": the run called run.name,
        if it exists.
    dry_run: only check data, prompts and the model's files, and print what the settings mean. The
        result has 0 batches, and the directory to which nothing was written. "measure" also makes a
        batch in a temporary directory, and prints its seconds by phase and the time of the run.
    trust_run_code: with the directory of a run as `resume`, lets functions run that only its
        settings name.

    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 stops the run after the current update and writes a
    checkpoint. Under torchrun every process calls this and gets the same Result; only rank 0 calls
    `callbacks`. Raises SettingsError for input that cannot be run, TypeError for arguments of a
    wrong type, and an error of FAILURES if the run fails.
    """
    check_types(task, callbacks)
    check_dry_run(dry_run)
    device = pick_device().type
    check_ranks(device)
    resume_from = None if resume is None else os.fspath(resume)
    # A single function stands for a list of one.
    if rewards is not None and not isinstance(rewards, list | tuple):
        rewards = [rewards]
    check_one_loss(loss, settings)
    passed_names = names_of_passed(task=task, data=data, rewards=rewards, loss=loss)
    if isinstance(source, Settings):
        check_arguments(source, resume_from, passed_names)
    else:
        changes = {**as_settings(model, data, rewards, loss), **(settings or {})}
        source = load_trusted_settings(
            source, changes, resume_from, passed_names, trust_run_code=trust_run_code
        )
    resume_arguments = in_memory_arguments(task, data, rewards, loss)

    with naming_start(find_run(source, resume_from)):
        with as_settings_error():
            task = task or build_task(source, data, rewards)
        resolved = name_rewards(with_batches(source, task), task)
        recipe = check_settings(resolved, task, resume_from, loss)
        if dry_run:
            explain_run(resolved, recipe, task)
            if dry_run == "measure":
                print_cost(resolved, recipe, task, device)
            return result_of_dry_run(resolved, resume_from)
        return run_in_process(
            resolved,
            recipe,
            task,
            callbacks,
            device=device,
            resume=resume_from,
            arguments=resume_arguments,
        )


def result_of_dry_run(settings: Settings, resume: str | None) -> Result:
    """Returns a result of 0 batches, with the directory that the run would have."""
    run = find_run(settings, resume)
    run = run or Path(settings.run.output_dir, settings.run.name or "")
    return Result(run, None, None, None, 0, 0, None)


def load_trusted_settings(
    source: Mapping[str, Any] | str | os.PathLike[str] | None,
    changes: Mapping[str, Any],
    resume: str | None,
    passed_names: Sequence[str],
    *,
    trust_run_code: bool,
) -> Settings:
    """Returns the settings of a call, whose arguments `passed_names` are.

    Raises SettingsError, also if only the directory that is resumed names code of a user, unless
    `trust_run_code`.
    """
    settings = load_settings(source, changes, resume)
    check_arguments(settings, resume, passed_names)
    if resume not in (None, "auto") and not trust_run_code:
        check_run_code(
            settings,
            Path(resume, "config.toml"),
            named=[source, changes],
            advice=f"pass {TRUST_ARGUMENT}",
            unused=[setting for name in passed_names for setting in ARGUMENTS[name]],
        )
    return settings


def run_in_process(
    settings: Settings,
    recipe: Recipe,
    task: Task | None,
    callbacks: Sequence[Callback],
    *,
    device: str,
    resume: str | None,
    arguments: Sequence[str],
) -> Result:
    """Sets this process up, with its threads, signals and the other ranks, and trains in it."""
    with set_up(settings, device, resume) as ranks:
        run_this_rank = partial(
            run_rank,
            settings=settings,
            recipe=recipe,
            task=task,
            callbacks=callbacks,
            ranks=ranks,
            resume=resume,
            arguments=arguments,
        )
        if ranks.size == 1:
            return run_this_rank()
        return run_recorded(run_this_rank)


@contextmanager
def set_up(settings: Settings, device: str, resume: str | None = None) -> Generator[Ranks]:
    """Sets this process up inside, with its threads and signals. Yields it among the ranks."""
    distributed = settings.distributed
    threads = choose_threads(recorded_threads(settings, resume), local_size())
    with (
        interruptible(),
        freed_memory_kept(),
        fixed_threads(threads),
        joined(
            device, shard_layers=distributed.strategy == "fsdp2", timeout=distributed.timeout
        ) as ranks,
    ):
        yield ranks


def print_cost(settings: Settings, recipe: Recipe, task: Task | None, device: str) -> None:
    """Measures a batch, and prints as comments what it costs. Rank 0 prints."""
    with set_up(settings, device) as ranks:
        cost = measure_batch(settings, recipe, task, ranks)
        if ranks.is_first:
            for line in describe_cost(cost, settings):
                logs.print_text(f"# {line}")


def check_dry_run(dry_run: object) -> None:
    """Raises TypeError for something else than a kind of dry run."""
    if not isinstance(dry_run, bool) and dry_run != "measure":
        raise TypeError(f'dry_run: {dry_run!r:.80} is not True, False or "measure"')


def names_of_passed(**arguments: object) -> list[str]:
    """Returns the names of the arguments that are not None."""
    return [name for name, argument in arguments.items() if argument is not None]


def check_types(task: object, callbacks: Sequence[object]) -> None:
    """Raises TypeError for an object that is not a Task or not a Callback."""
    if task is not None and not isinstance(task, Task):
        raise TypeError(f"task: {task!r:.80} {NOT_A_TASK}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks: {callback!r:.80} is not an instance of a class "
                "that inherits lagrpo.Callback"
            )


def run_recorded(run_this_rank: Callable[[], Result]) -> Result:
    """Runs this rank so that torchrun prints the error of the first rank that fails."""
    from torch.distributed.elastic.multiprocessing.errors import record

    def run() -> Result:
        try:
            return run_this_rank()
        except RuntimeError as error:
            if "Timed out" in str(error):
                error.add_note(TIMEOUT_ADVICE)
            # Gloo and NCCL raise it within milliseconds after another rank has ended. torchrun
            # looks every .1 s: of two ranks that end between two looks, it takes the lower number
            # for the first. It ends this wait as soon as it has seen the other rank.
            with suppress(Interrupted):
                time.sleep(SECONDS_FOR_TORCHRUN)
            raise

    # `record` adds None to the type: the result of a function that calls sys.exit(0).
    return cast(Result, record(run)())


def run_rank(
    settings: Settings,
    recipe: Recipe,
    task: Task | None,
    callbacks: Sequence[Callback],
    ranks: Ranks,
    resume: str | None,
    arguments: Sequence[str],
) -> Result:
    """Builds the run on this rank, and runs it.

    `arguments` are names of the arguments of `train` that its settings cannot hold.
    """
    directory = ranks.on_rank0(lambda: find_run(settings, resume))
    with as_settings_error("run.output_dir"):
        check_shared(ranks, directory or Path(settings.run.output_dir))
    with (
        # Rank 0 shows records in its display.
        nullcontext() if ranks.is_first else logs.shown_by(logs.print_line, logging.WARNING),
        locked(directory) if directory is not None and ranks.is_first else nullcontext(),
    ):
        earlier = None
        started = None
        recorded_places: Mapping[str, Any] = {}
        if directory is not None:
            earlier = ranks.on_rank0(lambda: ResumeState.find(directory, settings))
            started = earlier.started
            recorded_places = earlier.places
        built = build_run(
            settings,
            recipe,
            task,
            ranks,
            started=started,
            recorded=recorded_places,
        )
        with closing(built):
            return Training(built, callbacks, earlier, arguments).run()
