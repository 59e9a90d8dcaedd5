"""Checks of settings and tasks that need no model, so that they fail before it loads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.errors import SettingsError, as_settings_error, check_is_pulled
from lagrpo.model.embedded import check_path, is_adapter
from lagrpo.rewards.reward import Rewards, load_function, load_reward
from lagrpo.runs.directory import check_new, check_writable
from lagrpo.runs.environment import read_environment
from lagrpo.runs.reading import completion_files, open_run
from lagrpo.settings.load import flatten, load_settings, nest
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import ModelSettings, RewardSettings, name_setting
from lagrpo.tasks import Task, check_options, environment_of, load_task
from lagrpo.training.callbacks import check_installed
from lagrpo.training.given_rewards import as_reward, function_of, is_setting
from lagrpo.types import JsonObject, JsonView

if TYPE_CHECKING:
    from lagrpo.core.objective import Recipe

    Loss = str | Recipe | Callable[..., Any]

FREE = (
    *("run.report_to", "run.log_completions", "model.dtype", "optimizer.offload_optimizer"),
    *("eval.every", "eval.at_start", "eval.best_metric", "checkpoint.", "distributed.", "vllm."),
)
"""Settings, and sections, that a resumed run may change: they cannot alter its past batches."""
OF_CALL = ("run.name", "run.output_dir")


def check_settings(
    settings: Settings,
    task: Task | None = None,
    resume: str | None = None,
    loss: Loss | None = None,
) -> Recipe:
    """Returns the resolved recipe of settings that can be run.

    `task` replaces settings.task, and `loss` settings.loss.recipe. Raises SettingsError.
    """
    check_evaluation(settings, task)
    for evaluation_set in settings.eval.sets:
        if evaluation_set.task is not None:
            with as_settings_error(f"eval.sets, {evaluation_set.name!r}"):
                check_options(evaluation_set.task)
    with as_settings_error("offline.data"):
        completion_files(settings.offline.data)
    offline = bool(settings.offline.data) and settings.offline.fraction == 1
    if settings.rollout.num_generations == 1 and not offline:
        raise SettingsError(
            "rollout.num_generations = 1: GRPO compares completions of a prompt; set 2 or more"
        )
    check_model(settings)
    if settings.rollout.has_own_engine:
        with as_settings_error("rollout.engine"):
            load_function(settings.rollout.engine)
    if world_size() == 1 or os.environ.get("RANK", "0") == "0":
        check_run(settings, resume)
        check_server_gpus(settings)
        check_sleep(settings)
    return check_loss(settings, loss)


def check_loss(settings: Settings, loss: Loss | None = None) -> Recipe:
    """The resolved recipe of the settings.

    Raises SettingsError for one that cannot be computed, or of which a part never acts in this run.
    """
    from lagrpo.core.recipes import inert_over_pi_k, resolve  # loads torch

    knobs = settings.loss.knobs
    try:
        recipe = resolve(settings.loss.recipe if loss is None else loss, knobs)
    except (ValueError, OSError, ImportError) as error:
        raise SettingsError(name_knob(f"{error}", knobs)) from error
    if settings.schedule.num_iterations == 1 and recipe.correction is None:
        inert = inert_over_pi_k(recipe)
        if inert:
            has_knob = f"{inert[0]}.denominator" in recipe.knobs
            cure = (
                f"set {inert[0]}.denominator to 'alpha'"
                if has_knob
                else "compare with x.rollout_logp"
            )
            raise SettingsError(
                f"loss.recipe = {recipe.name!r}: {inert[0]} compares the policy with pi_k, the "
                "policy at the start of the batch. With schedule.num_iterations = 1 they are the "
                f"same, so it never acts: {cure}, or set num_iterations to 2 or more"
            )
    if settings.offline.data and recipe.needs_staleness:
        raise SettingsError(
            f"loss.recipe = {recipe.name!r} reads the staleness of samples, which "
            "offline.data does not have: choose another recipe"
        )
    if (
        settings.offline.data
        and settings.optimizer.scale_lr_by_ess
        and not recipe.needs_rollout_logp
    ):
        raise SettingsError(
            "optimizer.scale_lr_by_ess needs the log-probs of the policy that sampled: choose a "
            "recipe that reads them"
        )
    return recipe


def name_knob(problem: str, knobs: Mapping[str, Any]) -> str:
    """The problem with a knob of the recipe, which it begins with, by the name of the setting."""
    knob = problem.partition(" ")[0]
    if knob in knobs:
        return problem.replace(knob, name_setting(knob), 1)
    return f"loss: {problem}"


def check_evaluation(settings: Settings, task: Task | None = None) -> None:
    """Raise SettingsError for unknown options of the task, and a missing model or chat template."""
    if task is None:
        with as_settings_error():
            check_options(settings.task)
    with as_settings_error("model.path"):
        check_path(settings.model.path)
    with as_settings_error("model.chat_template"):
        chat_template(settings.model)


def check_model(settings: Settings) -> None:
    """Raise SettingsError for an adapter instead of a model, and for what FSDP2 cannot do."""
    path, lora_r = settings.model.path, settings.model.lora_r
    if is_adapter(Path(path).expanduser()):
        merge = "merge the adapter with PEFT's merge_and_unload first"
        raise SettingsError(
            f"model.path = {path!r} is an adapter, but a run needs a whole model: {merge}"
        )
    if world_size() > 1 and settings.distributed.strategy == "fsdp2":
        if lora_r:
            raise SettingsError(
                "distributed.strategy = 'fsdp2' trains all weights; with model.lora_r use 'zero1'"
            )
        if settings.rollout.engine == "vllm" and settings.vllm.weight_transfer != "directory":
            raise SettingsError(
                "distributed.strategy = 'fsdp2' needs vllm.weight_transfer = 'directory'"
            )


def check_run(settings: Settings, resume: str | None) -> None:
    """Raise SettingsError for a run that exists, cannot resume so, or cannot be written.

    It is raised for missing trackers, too.
    """
    with as_settings_error("--resume" if resume else "run"):
        if (run := find_run(settings, resume)) is not None:
            find_changes(settings, run)
            check_writable(run)
        else:
            check_new(Path(settings.run.output_dir), settings.run.name)
    check_installed(settings.run.report_to)


def check_server_gpus(settings: Settings) -> None:
    """Raises SettingsError if a server that the run starts gets a GPU that a rank of this host has.

    They may share a GPU if the server's share of its memory is set, but NCCL takes each GPU once.
    """
    from lagrpo.model.backend import pick_device

    vllm = settings.vllm
    has_share = any("--gpu-memory-utilization" in words for words in vllm.server_args)
    may_share = has_share and vllm.weight_transfer == "directory"
    if may_share or pick_device().type != "cuda":
        return
    shared_gpus = set(map(str, vllm.gpus)) & set(gpus_of_ranks())
    if shared_gpus:
        cure = "give the server others, or set CUDA_VISIBLE_DEVICES for the ranks"
        raise SettingsError(
            f"vllm.gpus: GPU {min(shared_gpus)} is one that this run trains on: {cure}"
        )


def check_sleep(settings: Settings) -> None:
    """Raises SettingsError if vllm.sleep is set, but there is not one GPU for all."""
    if not settings.vllm.sleep:
        return
    if world_size() > 1:
        raise SettingsError(
            "vllm.sleep is for one process: with several, the server has GPUs of its own"
        )
    if not server_shares_gpu(settings):
        raise SettingsError(
            "vllm.sleep frees memory of a GPU that the server shares with the trainer, "
            "but they share none: unset it"
        )


def gpus_of_ranks() -> list[str]:
    """The names of the GPUs that the ranks of this host have, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(local_size())]
    return [gpu.strip() for gpu in gpus[: local_size()]]


def server_shares_gpu(settings: Settings) -> bool:
    """True if a server that the run starts gets a GPU on which a rank of this host trains.

    Without vllm.gpus it sees all GPUs, and takes the first.
    """
    from lagrpo.model.backend import pick_device

    vllm = settings.vllm
    if settings.rollout.engine != "vllm" or vllm.urls or pick_device().type != "cuda":
        return False
    return not vllm.gpus or not set(map(str, vllm.gpus)).isdisjoint(gpus_of_ranks())


def chat_template(model: ModelSettings) -> str | None:
    """The chat template that replaces the tokenizer's."""
    if not model.chat_template:
        return None
    path = Path(model.chat_template).expanduser()
    check_is_pulled(path)
    return path.read_text(encoding="utf-8")


def offline_prompts(settings: Settings) -> int:
    """The number of prompts of each batch that come from a file: the share of N, at least one."""
    data, share = settings.offline.data, settings.offline.fraction
    return max(1, round(share * settings.schedule.prompts_per_batch)) if data else 0


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return read_count("WORLD_SIZE", default=1, least=1)


def local_size() -> int:
    """The number of these processes that run on this host."""
    return read_count("LOCAL_WORLD_SIZE", default=1, least=1)


def read_count(name: str, default: int, least: int = 0) -> int:
    """The whole number in one of torchrun's environment variables.

    Raises SettingsError for something else.
    """
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise SettingsError(
            f"{name} = {text!r} is not a number of at least {least}: "
            "torchrun sets it, so unset it for one process"
        )
    return int(text)


def check_ranks(device: str) -> None:
    """Raise SettingsError if this is one of several processes, but not known which."""
    size = world_size()
    if size == 1:
        return
    needed = ["RANK", "MASTER_ADDR", "MASTER_PORT"]
    if device == "cuda":
        needed.append("LOCAL_RANK")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise SettingsError(
            f"WORLD_SIZE = {size}, but {missing[0]} is not set: "
            "start lagrpo with torchrun, or unset WORLD_SIZE for one process"
        )
    rank, port = read_count("RANK", default=0), read_count("MASTER_PORT", default=0)
    if rank >= size:
        raise SettingsError(f"RANK = {rank}, but WORLD_SIZE = {size}: ranks are 0 to {size - 1}")
    if not 0 < port < 2**16:
        raise SettingsError(f"MASTER_PORT = {port} is not a port: set 1 to 65535")


# A run that resumes


def find_run(settings: Settings, resume: str | None) -> Path | None:
    """The directory of the run to resume; None for a new one.

    Raises FileNotFoundError or ValueError.
    """
    if resume is None:
        return None
    if resume != "auto":
        return open_run(Path(resume).expanduser()).path
    if settings.run.name is None:
        raise ValueError("auto finds a run by its name: set run.name")
    path = Path(settings.run.output_dir, settings.run.name)
    return path if (path / "config.toml").is_file() else None


def recorded_threads(settings: Settings, resume: str | None) -> int | None:
    """The number of threads that the run to resume began with.

    None for a new run or another number of ranks.
    """
    with as_settings_error():
        run = find_run(settings, resume)
        before = read_environment(run) if run is not None else {}
    return before.get("threads") if before.get("ranks") == world_size() else None


def find_changes(settings: Settings, run: Path) -> dict[str, tuple[object, object]]:
    """Settings that differ from the run's: name -> (before, now).

    Raises SettingsError if they could alter its past.
    """
    saved = load_settings(run / "config.toml")
    before = flatten(saved.model_dump())
    now = flatten(settings.model_dump())
    names = [
        name for name in now | before if name not in OF_CALL and before.get(name) != now.get(name)
    ]
    wrong = [name for name in names if not _may_change(name, settings, saved, run)]
    if wrong:
        lines = [
            f"{name} = {json.dumps(now.get(name))}, but the run has {json.dumps(before.get(name))}"
            for name in wrong
        ]
        message = "\n".join(lines) + ": a resumed run cannot change this"
        if "schedule.batches" in wrong:
            message += " (more batches need a run with lr_scheduler_type = 'constant')"
        raise SettingsError(message)
    return {name: (before.get(name), now.get(name)) for name in names}


def _may_change(name: str, settings: Settings, saved: Settings, run: Path) -> bool:
    """True if this setting may differ in a resumed run.

    More batches change nothing if the learning rate does not depend on their number, and neither
    does a reward function that was moved to another module.
    """
    if name == "schedule.batches":
        is_longer = settings.schedule.batches >= saved.schedule.batches
        return is_longer and settings.optimizer.lr_scheduler_type == "constant"
    if name == "task.rewards":
        sources = read_environment(run).get("sources", {})
        pairs = zip_longest(settings.task.rewards, saved.task.rewards)
        return all(now and before and _is_moved(now, before, sources) for now, before in pairs)
    return name in FREE or (f"{name.partition('.')[0]}." in FREE and name != "vllm.on_weight_sync")


def _is_moved(
    now: RewardSettings, before: RewardSettings, sources: Mapping[str, str | None]
) -> bool:
    """True if two entries differ at most in the module of a function with the recorded source."""
    if now == before:
        return True
    same = now.model_copy(update={"reward": before.reward}) == before
    if not same or ":" not in now.reward:
        return False
    with suppress(ValueError, ImportError):
        from lagrpo.training.sources import source_digest  # loads torch

        return source_digest(load_reward(now, None).function) == sources.get(f"reward {now.name}")
    return False


# What `lagrpo.train` gets in Python


def in_memory_arguments(
    task: object,
    data: object,
    rewards: Sequence[object] | None,
    loss: Loss | None,
) -> list[str]:
    """The arguments of `lagrpo.train` that settings cannot hold.

    A run needs them again when it is resumed.
    """
    in_memory = data is not None and not isinstance(data, str | os.PathLike)
    functions = [function_of(reward) for reward in rewards or () if not is_setting(reward)]
    needed = {
        "task": task is not None,
        "data": in_memory,
        "rewards": not all(
            is_loadable(function, name_function(function)) for function in functions
        ),
        "loss": loss is not None and not is_loadable_loss(loss),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def name_function(function: object) -> str:
    """The name of a function, or of an object's class, as "module:function"."""
    name = getattr(function, "__qualname__", None)
    if name is not None:
        return f"{function.__module__}:{name}"
    return f"{type(function).__module__}:{type(function).__qualname__}"


def is_loadable_loss(loss: Loss) -> bool:
    """True if `lagrpo train` finds the loss by the name that the settings have.

    A script is a module there.
    """
    if isinstance(loss, str):
        return True
    from lagrpo.core.rows import RECIPES  # loads torch
    from lagrpo.settings.user_loss import name_loss

    if loss in RECIPES.values():
        return True
    reference, script = name_loss(loss), sys.modules.get("__main__")
    file = Path(getattr(script, "__file__", None) or "")
    if reference.partition(":")[0] == file.stem:
        is_there = getattr(script, reference.partition(":")[2], None) is loss
        return is_there and file.absolute().parent == Path.cwd()
    return is_loadable(loss, reference)


def is_loadable(value: object, reference: str) -> bool:
    """True if `lagrpo train` finds the value by the name of its module.

    The module is in the current directory, or installed.
    """
    module_name, _, name = reference.partition(":")
    module = sys.modules.get(module_name)
    if module_name == "__main__" or module is None or getattr(module, name, None) is not value:
        return False
    file = Path(getattr(sys.modules[module_name.partition(".")[0]], "__file__", None) or "")
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    return str(folder) in (os.getcwd(), *sys.path[1:])  # the first is the directory of a script


def resume_call(run: Path, arguments: Sequence[str]) -> str:
    """The call in Python that resumes a run."""
    needed = "".join(f", {name}=…" for name in arguments)
    return f"lagrpo.train(resume={str(run)!r}{needed})"


def check_arguments(settings: Settings, resume: str | None, given: Sequence[str]) -> None:
    """Raise SettingsError if a resumed run lacks arguments that it was started with in Python."""
    with as_settings_error("--resume"):
        run = find_run(settings, resume)
        needed: list[str] = []
        if run is not None:
            needed = read_environment(run).get("arguments", [])
    missing = [name for name in needed if name not in given]
    if run is not None and missing:
        raise SettingsError(
            f"{run} was started from Python with {' and '.join(missing)} that its settings cannot "
            "hold: "
            f"resume it by {resume_call(run, needed)}"
        )


def check_one_loss(loss: object, settings: JsonView | None) -> None:
    """Raise SettingsError if a loss is given both as an argument and among the settings."""
    if loss is not None and "recipe" in nest(settings or {}).get("loss", {}):
        raise SettingsError("loss and settings['loss.recipe'] both name a loss: give one of them")


def as_settings(
    model: str | os.PathLike[str] | None,
    data: object,
    rewards: Sequence[object] | None,
    loss: Loss | None = None,
) -> JsonObject:
    """The settings of these arguments, as far as they are settings."""
    changes: JsonObject = {} if model is None else {"model.path": os.fspath(model)}
    if loss is not None:
        from lagrpo.settings.user_loss import name_loss  # loads torch

        changes["loss.recipe"] = name_loss(loss)
    if data is not None:
        changes["task.name"] = "custom"
    if isinstance(data, str | os.PathLike):
        changes["task.data"] = os.fspath(data)
    if rewards is not None and all(map(is_setting, rewards)):
        changes["task.rewards"] = list(rewards)
    return changes


def build_task(settings: Settings, data: object, rewards: Sequence[object] | None) -> Task | None:
    """Returns the task of data in memory and of reward functions; None if the settings say all.

    A tenth of the data is held out for testing (`lagrpo.tasks.data`). Raises ValueError for unfit
    rows and rewards.
    """
    has_functions = not all(map(is_setting, rewards or ()))
    in_memory = data is not None and not isinstance(data, str | os.PathLike)
    if not in_memory and not has_functions:
        return None
    replaced: JsonObject = {"data": data} if in_memory else {}
    replaced |= {"rewards": (RewardSettings(name="none", reward="exact"),)} if has_functions else {}
    task_settings = settings.task.model_copy(update=replaced | {"tools": ()})
    task: Any = load_task(task_settings, settings.run.seed)
    if not has_functions:
        return task
    parts = list(map(as_reward, rewards or ()))
    names = [part.name for part in parts]
    parts = [
        replace(r, name=f"{r.name}_{n}") if names.count(r.name) > 1 else r
        for n, r in enumerate(parts, start=1)
    ]
    return replace(task, reward=Rewards(tuple(parts)))


def name_rewards(settings: Settings, task: Task | None) -> Settings:
    """The settings with the names, weights and ranges of a task object's rewards.

    Records and metrics need them.
    """
    if (
        task is None
        or environment_of(task) is not None
        or not Rewards.from_reward(task.reward).names
    ):
        return settings
    entries: list[RewardSettings] = []
    for part in Rewards.from_reward(task.reward).parts:
        reference = name_function(part.function)
        entries.append(
            RewardSettings(name=part.name, reward=reference, weight=part.weight, range=part.range)
        )
    return settings.model_copy(
        update={"task": settings.task.model_copy(update={"rewards": tuple(entries)})}
    )
