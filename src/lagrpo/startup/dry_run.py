"""A dry run: it checks what a run checks before its first batch, and prints what the settings mean.

It reads the data, the tokenizer and the files of the model, but no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from lagrpo.core.objective import Recipe
from lagrpo.data.prompts import PromptSource
from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import as_settings_error
from lagrpo.rollout.sync_check import CHECK_PROMPTS
from lagrpo.rollout.vllm.server import find_python
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import EvalSetSettings
from lagrpo.startup.build_policy import build_outline
from lagrpo.startup.build_tasks import (
    build_offline,
    build_prompts,
    check_training_prompts,
    load_tasks,
    read_offline_records,
    warn_of_trained_prompts,
)
from lagrpo.startup.explain import print_meaning
from lagrpo.startup.teacher import check_teacher, longest_sequence
from lagrpo.tasks import Task
from lagrpo.tasks.episodes import MAIN_TASK


def explain_run(settings: Settings, recipe: Recipe, task: Task | None) -> None:
    """Prints what the settings of a run mean. `task` replaces settings.task.

    Raises SettingsError where the run would, except for what only the weights, a server, or the
    reward workers show.
    """
    tasks = load_tasks(settings, task)
    warn_of_trained_prompts(settings, tasks)
    records = read_offline_records(settings, recipe)
    if settings.rollout.uses_vllm and not settings.vllm.urls:
        with as_settings_error("vllm"):
            find_python()
    longest = longest_sequence(settings, *tasks.values())
    check_teacher(settings, recipe, longest)
    outline = build_outline(settings.model, longest)
    with ExitStack() as undo:
        prompts = build_prompts(settings, tasks, outline, undo)
        check_training_prompts(settings, prompts[MAIN_TASK], outline, Ranks())
        prompts[MAIN_TASK].check_prompts(CHECK_PROMPTS)
        check_evaluation_prompts(settings, prompts)
        if records:
            build_offline(settings, recipe, outline, records)
    print_meaning(settings, recipe, {name: source.task for name, source in prompts.items()})


def check_evaluation_prompts(settings: Settings, prompts: Mapping[str, PromptSource]) -> None:
    """Raises SettingsError if a prompt of an evaluation does not fit.

    `prompts` are the prompts of each task of `load_tasks`.
    """
    if not settings.eval.takes_place:
        return
    for eval_set in settings.eval.sets or [EvalSetSettings(name="only")]:
        source = prompts.get(eval_set.name, prompts[MAIN_TASK])
        source.held_out(eval_set.num_prompts or settings.eval.num_prompts)
