"""What can be rejected before a model loads and beyond the settings' own classes: recipes, tasks, files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lagrpo.errors import SettingsError, refusing
from lagrpo.model.embedded import check_path, is_adapter
from lagrpo.runs.directory import check_new, check_writable
from lagrpo.runs.reading import completion_files
from lagrpo.settings.schema import EvalSettings, ModelSettings, Settings
from lagrpo.tasks import Task, check_options
from lagrpo.training.callbacks import check_installed
from lagrpo.training.resume import check_changes, find_run

if TYPE_CHECKING:
    from lagrpo.core.objective import Recipe


def check_settings(settings: Settings, task: Task | None = None) -> Recipe:
    """The resolved recipe of settings that can be run; `task` replaces settings.task. Raises SettingsError."""
    check_evaluation(settings, task)
    for each in settings.eval.sets:
        if each.task is not None:
            with refusing(f"eval.sets, {each.name!r}"):
                check_options(each.task)
    check_best(settings)
    with refusing("offline.data"):
        completion_files(settings.offline.data or ())
    check_lora(settings)
    check_ranks(settings)
    if is_first_rank():
        check_run(resume_after_restart(settings))
    from lagrpo.core.recipes import resolve  # loads torch

    with refusing("loss"):
        return resolve(settings.loss.recipe, settings.loss.knobs)


def check_evaluation(settings: Settings | EvalSettings, task: Task | None = None) -> None:
    """Raise SettingsError for options that the task does not take, a missing model or chat template, and an
    evaluation's directory that cannot be written."""
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


def check_best(settings: Settings) -> None:
    """Raise SettingsError for an eval.best_metric that is never made."""
    e, best = settings.eval, settings.eval.best_metric
    if best is not None:
        chosen = next((each for each in e.sets if each.name == best.rpartition(".")[0]), None)
        every = e.every if chosen is None or chosen.every is None else chosen.every
        if not (e.at_start or every):
            raise SettingsError(f"eval.best_metric = {best!r} is never found: set eval.every, or eval.at_start")


def check_lora(settings: Settings) -> None:
    """Raise SettingsError for adapters that cannot be trained so, or not without a package."""
    path, sync = settings.model.path, settings.vllm.weight_transfer
    if is_adapter(Path(path).expanduser()):
        merge = "merge it with PEFT's merge_and_unload first"
        raise SettingsError(f"model.path: {path!r} is an adapter, and a run begins with a whole model: {merge}")
    if not settings.model.lora_r:
        return
    from lagrpo.model import lora  # it loads PyTorch

    with refusing("model.lora_r"):
        lora.check_installed()
    if settings.rollout.engine == "vllm" and sync != "directory":
        wrong = f"vllm.weight_transfer = {sync!r} sends whole models, and vLLM loads adapters from a directory"
        raise SettingsError(f"{wrong}: take 'directory'")


def check_ranks(settings: Settings) -> None:
    """Raise SettingsError for what several ranks cannot do."""
    if world_size() == 1:
        return
    vllm, sync = settings.rollout.engine == "vllm", settings.vllm.weight_transfer
    if vllm and settings.distributed.strategy == "fsdp2" and sync != "directory":
        raise SettingsError(
            f"vllm.weight_transfer = {sync!r} sends from one GPU, and with distributed.strategy = 'fsdp2' no GPU has "
            "all weights. Take 'directory'"
        )
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and not (settings.run.name or settings.run.resume):
        raise SettingsError("torchrun --max-restarts resumes the run by its name: set run.name")


def resume_after_restart(settings: Settings) -> Settings:
    """Settings that resume the run, if torchrun has started its processes again."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or settings.run.resume is not None:
        return settings
    return settings.model_copy(update={"run": settings.run.model_copy(update={"resume": "auto"})})


def check_run(settings: Settings) -> None:
    """Raise SettingsError for a run that exists, cannot resume with these settings, or cannot be written, and for
    trackers that are not installed."""
    with refusing("run.resume" if settings.run.resume else "run"):
        if (run := find_run(settings)) is not None:
            check_changes(settings, run)
            check_writable(run)
        else:
            check_new(Path(settings.run.output_dir), settings.run.name)
    check_installed(settings.run.report_to)


def chat_template(model: ModelSettings) -> str | None:
    """The chat template that replaces the tokenizer's."""
    return Path(model.chat_template).expanduser().read_text(encoding="utf-8") if model.chat_template else None


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_size() -> int:
    """How many of them run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0" or world_size() == 1
