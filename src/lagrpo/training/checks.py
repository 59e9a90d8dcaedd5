"""What can be refused before anything heavy is loaded: after the settings' own classes (settings/schema.py), everything
that needs a look at the recipes, the tasks and the disk, but neither transformers nor the task's data."""

from __future__ import annotations

import math
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.model import adapter_files
from lagrpo.model.adapter_files import is_adapter
from lagrpo.model.embedded import check_path
from lagrpo.objective.compose import Recipe
from lagrpo.objective.recipes import resolve
from lagrpo.ranks.rank import Rank
from lagrpo.runs.directory import check_new, check_writable
from lagrpo.runs.reading import completion_files
from lagrpo.settings.schema import EvalSettings, ModelSettings, Settings
from lagrpo.tasks import Task, check_options
from lagrpo.tasks.names import is_reference
from lagrpo.trackers import check_installed
from lagrpo.training.changes import after_restart, check_changes, find_run
from lagrpo.untrusted import read_text

LARGEST_EXPONENT = 80.0  # float32 ends at e^88.7; the rest is for the factors beside it


def check_settings(settings: Settings, task: Task | None = None) -> Recipe:
    """The resolved recipe of settings that can be run; `task` stands in for settings.task. Raises SettingsError for an
    unknown recipe or piece, a contradictory composition, options that the task does not take, a model or a chat
    template that is not there, a run that exists already or cannot be written."""
    check_evaluation(settings, task)
    for each in settings.evaluation.sets:
        if each.task is not None:
            with refusing(f"evaluation.sets, {each.name!r}"):
                check_options(each.task)
    check_best(settings, task)
    with refusing("offline.data"):
        completion_files(settings.offline.data or ())
    rank = Rank.find()
    check_lora(settings)
    count_shards(settings, rank)
    if rank is None or rank.number == 0:
        check_run(after_restart(settings, rank))
    with refusing("objective"):
        recipe = resolve(settings.objective.recipe, settings.objective.overrides)
        _check_exponential(recipe, settings)
    return recipe


def check_best(settings: Settings, task: Task | None) -> None:
    """Raises SettingsError for an evaluation.best that is never made, or is of a reward that is not there. What rewards
    a task of the user's own has is not known here."""
    e, best = settings.evaluation, settings.evaluation.best
    if best is None:
        return
    of, _, metric = best.rpartition(".")
    chosen = next((each for each in e.sets if each.name == of), None)
    every = e.every if chosen is None or chosen.every is None else chosen.every
    if not (e.before_and_after or every):
        raise SettingsError(f"evaluation.best = {best!r} is never found: set every, or before_and_after")
    asked = chosen.task if chosen is not None and chosen.task is not None else settings.task
    rewards = [f"reward_{each.name}_mean" for each in asked.rewards]
    unknown = not rewards and ((task is not None and asked is settings.task) or is_reference(asked.name))
    known = ("reward_mean", *rewards)
    if metric.startswith("reward_") and metric not in known and not unknown:
        raise SettingsError(f"evaluation.best = {best!r}: there is no metric {metric!r}; there are {', '.join(known)}")


def check_lora(settings: Settings) -> None:
    """Raises SettingsError for adapters that cannot be trained so, or not without a package."""
    with refusing("model.path"):
        if is_adapter(Path(settings.model.path).expanduser()):
            raise ValueError(
                f"{settings.model.path!r} is an adapter, and a run begins with a whole model: lagrpo merge "
                f"{settings.model.path} --out DIRECTORY writes one"
            )
    if not settings.model.lora.r:
        return
    with refusing("model.lora"):
        adapter_files.check_installed()
    if settings.sampling.sampler == "vllm" and settings.vllm.weight_sync != "directory":
        raise SettingsError(
            f"vllm.weight_sync = {settings.vllm.weight_sync!r} sends whole models, and vLLM loads adapters from a "
            "directory: take 'directory'"
        )


def count_shards(settings: Settings, rank: Rank | None) -> int | None:
    """How many ranks have the layers between them, None where each has all. Raises SettingsError where the ranks cannot
    be divided so."""
    if rank is None or settings.distributed.shard != "layers":
        return None
    of_host = rank.local_size if rank.size % rank.local_size == 0 else rank.size
    shards = settings.distributed.shard_ranks or of_host
    if rank.size % shards:
        raise SettingsError(f"distributed.shard_ranks = {shards} does not divide the {rank.size} ranks")
    if settings.sampling.sampler == "vllm" and settings.vllm.weight_sync != "directory":
        raise SettingsError(
            f"vllm.weight_sync = {settings.vllm.weight_sync!r} sends from one GPU, and none has all weights with "
            "distributed.shard = 'layers': they are gathered in the memory of rank 0's host. Take 'directory'"
        )
    return shards


def check_run(settings: Settings) -> None:
    """Raises SettingsError for a run that exists already, cannot go on with these settings, or cannot be written, and
    for trackers that are not installed."""
    with refusing("run.resume" if settings.run.resume else "run"):
        if (run := find_run(settings)) is not None:
            check_changes(settings, run)
            check_writable(run)
        else:
            check_new(Path(settings.run.directory), settings.run.name)
    check_installed(settings.run.trackers)


def _check_exponential(recipe: Recipe, settings: Settings) -> None:
    """Raises ValueError where e^(A / weight_temperature) overflows for rewards of task.reward_range."""
    made, (low, high) = recipe.composition, settings.task.reward_range
    if made.weight != "exp_advantage":
        return
    G, of_range = settings.sampling.G, f"task.reward_range = ({low:g}, {high:g})"
    if G == 1:
        largest, given = high, of_range
    elif made.advantage in ("normalized", "normalized_unbiased"):
        largest, given = math.sqrt(G - 1), f"sampling.G = {G}"
    else:
        largest, given = high - low, of_range
    if largest > LARGEST_EXPONENT * made.weight_temperature:
        raise ValueError(
            f"weight 'exp_advantage' is e^(A / {made.weight_temperature:g}), and with {given} A may reach "
            f"{largest:.3g}: above {LARGEST_EXPONENT:g} it overflows; scale the rewards, or set "
            f"objective.weight_temperature to {largest / LARGEST_EXPONENT:g} or more"
        )


def check_evaluation(settings: Settings | EvalSettings, task: Task | None = None) -> None:
    """Raises SettingsError for options that the task does not take, a model that is nowhere, a chat template that
    cannot be read, and an evaluation's directory that cannot be written."""
    if task is None:
        with refusing():
            check_options(settings.task)
    with refusing("model.path"):
        check_path(settings.model.path)
    with refusing("model.chat_template"):
        chat_template(settings.model)
    if isinstance(settings, EvalSettings):
        with refusing("output"):
            check_writable(Path(settings.output or "evaluations"))


def chat_template(model: ModelSettings) -> str | None:
    """The chat template that the settings put in place of the tokenizer's own."""
    return read_text(Path(model.chat_template).expanduser()) if model.chat_template else None
