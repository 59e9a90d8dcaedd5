"""The length of a run in epochs, which are passes over the training prompts."""

from __future__ import annotations

import math

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.settings.schema import Settings
from lagrpo.startup.checks import check_model
from lagrpo.tasks import Task, drops_overlong, find_fitting, load_task

ROUNDING_TOLERANCE = 1e-12
"""Relative error that the length of a run in batches may have in floating point."""


def with_batches(settings: Settings, task: Task | None = None) -> Settings:
    """Returns the settings with `schedule.epochs` turned into `schedule.batches`.

    `task` replaces settings.task. The last batch may begin another epoch. Prompts that
    `rollout.overlong_prompts` drops do not count; to find them, the tokenizer is loaded. Raises
    SettingsError.
    """
    epochs = settings.schedule.epochs
    if epochs is None:
        return settings
    prompts_per_batch = settings.schedule.prompts_per_batch - settings.offline_prompts
    if prompts_per_batch < 1:
        raise SettingsError(
            "schedule.epochs counts the task's prompts, but all prompts come from offline.data: "
            "set schedule.batches"
        )
    if task is None:
        with as_settings_error():
            task = load_task(settings.task, settings.run.seed)
    exact_batches = epochs * count_prompts(settings, task) / prompts_per_batch
    # 1.1 epochs of 100 prompts are 110.00000000000001 prompts in floating point. Rounded up, they
    # would need one more batch.
    batches = math.ceil(exact_batches * (1 - ROUNDING_TOLERANCE))
    schedule = settings.schedule.model_copy(update={"batches": max(1, batches), "epochs": None})
    return settings.model_copy(update={"schedule": schedule})


def count_prompts(settings: Settings, task: Task) -> int:
    """Returns the number of training prompts that the run visits in an epoch."""
    with as_settings_error("task"):
        drops = drops_overlong(task, settings.rollout)
    if not drops:
        return task.size("train")
    check_model(settings)
    from lagrpo.startup.build_policy import load_prompt_chat  # loads torch

    chat = load_prompt_chat(settings.model)
    return len(find_fitting(task, "train", settings.rollout.max_prompt_length, chat))
