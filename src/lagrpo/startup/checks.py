"""Checks of settings and tasks that need no model, so that they fail before it loads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.distributed.torchrun import local_size, world_size
from lagrpo.errors import SettingsError, as_settings_error, check_is_pulled, suggest
from lagrpo.logs import find_secret
from lagrpo.machine import visible_gpus
from lagrpo.model.embedded import check_path, is_adapter
from lagrpo.model.reference_prompt import ReferencePrompt
from lagrpo.resume.changes import find_changes, find_run
from lagrpo.rewards.entries import load_function
from lagrpo.runs.directory import check_new, check_writable
from lagrpo.runs.metrics import METRICS, is_lagrpos
from lagrpo.runs.reading import completion_files
from lagrpo.settings.loss import name_setting
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import ModelSettings
from lagrpo.settings.stop_rule import StopRule
from lagrpo.tasks import Task, check_options

if TYPE_CHECKING:
    from lagrpo.core.objective import Recipe
    from lagrpo.startup.arguments import Loss


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
    check_model(settings)
    if settings.rollout.has_own_engine:
        with as_settings_error("rollout.engine"):
            load_function(settings.rollout.engine)
    if world_size() == 1 or os.environ.get("RANK", "0") == "0":
        check_run(settings, resume)
        check_sleep(settings)
        check_server_gpus(settings)
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
            advice = (
                f"set {inert[0]}.denominator to 'alpha'"
                if has_knob
                else "compare with x.rollout_logp"
            )
            raise SettingsError(
                f"loss.recipe = {recipe.name!r}: {inert[0]} compares the policy with pi_k, the "
                "policy at the start of the batch. With schedule.num_iterations = 1 they are the "
                f"same, so it never acts: {advice}, or set num_iterations to 2 or more"
            )
    if settings.offline.data and recipe.needs_staleness:
        raise SettingsError(
            f"loss.recipe = {recipe.name!r} reads the staleness of samples, which "
            "offline.data does not have: choose another recipe"
        )
    if settings.rollout.num_generations == 1 and not recipe.ignores_reward:
        raise SettingsError(
            f"rollout.num_generations = 1: loss.recipe = {recipe.name!r} compares completions of a "
            "prompt; set 2 or more"
        )
    check_reference(settings, recipe)
    for name in ("scale_lr_by_ess", "scale_lr_by_kl"):
        is_on = bool(getattr(settings.optimizer, name))
        if settings.offline.data and is_on and not recipe.needs_rollout_logp:
            raise SettingsError(
                f"optimizer.{name} needs the log-probs of the policy that sampled: choose a "
                "recipe that reads them"
            )
    check_stop_rule(settings)
    for name in recipe.own_metrics:
        if is_lagrpos(name):
            raise SettingsError(
                f"loss.recipe = {recipe.name!r} logs {name!r}, which is a metric of lagrpo: "
                "choose another name"
            )
    return recipe


def check_reference(settings: Settings, recipe: Recipe) -> None:
    """Raises SettingsError for settings of the reference that contradict others, or cannot act."""
    loss = settings.loss
    for name in ("reference", "reference_prompt"):
        if getattr(loss, name) is not None and not recipe.needs_pi_ref:
            raise SettingsError(
                f"loss.{name} is set, but loss.recipe = {recipe.name!r} reads no reference: set "
                "loss.beta above 0, or choose a recipe that reads pi_ref (lagrpo recipes)"
            )
    if recipe.ignores_reward and settings.rollout.dynamic_sampling_rounds:
        raise SettingsError(
            "rollout.dynamic_sampling_rounds replaces groups of equal rewards, but loss.recipe = "
            f"{recipe.name!r} learns without rewards: set it to 0"
        )
    if loss.reference is not None:
        with as_settings_error("loss.reference"):
            check_path(loss.reference)
        if settings.schedule.ref_sync_every is not None:
            raise SettingsError(
                "schedule.ref_sync_every makes the policy the reference, but loss.reference is "
                "another model: unset one of them"
            )
    if loss.reference_prompt is not None:
        if settings.offline.data:
            raise SettingsError(
                "loss.reference_prompt is for prompts of a task, and offline.data has others: "
                "unset one of them"
            )
        read_reference_prompt(settings)


def read_reference_prompt(settings: Settings) -> ReferencePrompt | None:
    """Returns the template of loss.reference_prompt; None without one. Raises SettingsError."""
    if settings.loss.reference_prompt is None:
        return None
    with as_settings_error("loss.reference_prompt"):
        return ReferencePrompt.read(settings.loss.reference_prompt)


def check_stop_rule(settings: Settings) -> None:
    """Raises SettingsError if schedule.stop_at names a metric that lagrpo does not have.

    A loss or a callback may have metrics with a slash.
    """
    if settings.schedule.stop_at is None:
        return
    metric = StopRule.parse(settings.schedule.stop_at).metric
    names = [name for names in METRICS.values() for name in names]
    has_lagrpos_prefix = any(name.startswith(f"{metric.partition('/')[0]}/") for name in names)
    if not is_lagrpos(metric) and ("/" not in metric or has_lagrpos_prefix):
        raise SettingsError(
            f"schedule.stop_at: there is no metric {metric!r}.{suggest(metric, names)}"
        )


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
        if settings.rollout.uses_vllm and settings.vllm.weight_transfer != "directory":
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
            check_secrets(settings)
    check_installed(settings.run.report_to)


def check_secrets(settings: Settings) -> None:
    """Raises SettingsError for a secret in a table of options, at any depth.

    It would be written to config.toml. It is one by its name, or by its form.
    """
    tables: dict[str, object] = {
        "model.chat_template_kwargs": settings.model.chat_template_kwargs,
        "loss.overrides": settings.loss.overrides,
    }
    tasks = {"task": settings.task}
    for evaluation_set in settings.eval.sets:
        if evaluation_set.task is not None:
            tasks[f"eval.sets, {evaluation_set.name!r}: task"] = evaluation_set.task
    for name, task in tasks.items():
        tables[f"{name}.options"] = task.options
        for reward in task.rewards:
            tables[f"{name}.rewards, {reward.name!r}: options"] = reward.options
    for name, table in tables.items():
        secret = find_secret(table, name)
        if secret is not None:
            raise SettingsError(f"{secret} would be written to disk; use an environment variable")


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
    starts_server = settings.rollout.uses_vllm and not vllm.urls
    if starts_server and not vllm.gpus and world_size() > 1:
        raise SettingsError(
            "rollout.engine = 'vllm' would start a server on a GPU of the ranks: set vllm.gpus to "
            "GPUs without a rank, or vllm.urls to servers that run already"
        )
    names = [name for name in visible_gpus() or [] if not name.isdecimal()]
    if vllm.gpus and names:
        raise SettingsError(
            f"vllm.gpus has numbers, but CUDA_VISIBLE_DEVICES names {names[0]!r}: "
            "set CUDA_VISIBLE_DEVICES to numbers, too, as nvidia-smi lists them"
        )
    shared_gpus = set(map(str, vllm.gpus)) & set(gpus_of_ranks())
    if shared_gpus:
        advice = "give the server others, or set CUDA_VISIBLE_DEVICES for the ranks"
        raise SettingsError(
            f"vllm.gpus: GPU {min(shared_gpus)} is one that this run trains on: {advice}"
        )


def check_sleep(settings: Settings) -> None:
    """Raises SettingsError if vllm.sleep is set, but there is not one GPU for all."""
    if not settings.vllm.sleep:
        return
    if world_size() > 1:
        raise SettingsError(
            "vllm.sleep is for one process: several processes need other GPUs than the server"
        )
    if not server_shares_gpu(settings):
        raise SettingsError(
            "vllm.sleep frees memory of a GPU that the server shares with the trainer, "
            "but they share none: unset it"
        )


def gpus_of_ranks() -> list[str]:
    """The names of the GPUs that the ranks of this host have, as in CUDA_VISIBLE_DEVICES."""
    gpus = visible_gpus()
    if gpus is None:
        gpus = [str(gpu) for gpu in range(local_size())]
    return gpus[: local_size()]


def server_shares_gpu(settings: Settings) -> bool:
    """True if a server that the run starts gets a GPU on which a rank of this host trains.

    Without vllm.gpus it sees all GPUs, and takes the first.
    """
    from lagrpo.model.backend import pick_device

    vllm = settings.vllm
    if not settings.rollout.uses_vllm or vllm.urls or pick_device().type != "cuda":
        return False
    return not vllm.gpus or not set(map(str, vllm.gpus)).isdisjoint(gpus_of_ranks())


def chat_template(model: ModelSettings) -> str | None:
    """The chat template that replaces the tokenizer's."""
    if not model.chat_template:
        return None
    path = Path(model.chat_template).expanduser()
    check_is_pulled(path)
    return path.read_text(encoding="utf-8")


def check_installed(trackers: Iterable[str]) -> None:
    """Raises SettingsError for a tracker whose package is missing. Nothing is imported."""
    for name in trackers:
        spec = importlib.util.find_spec(name)
        # Without an origin it is a directory of that name, such as W&B makes.
        if spec is None or spec.origin is None:
            raise SettingsError(
                f"run.report_to names {name}, which is not installed: pip install 'lagrpo[{name}]'"
            )
