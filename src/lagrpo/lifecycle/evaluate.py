"""`lagrpo.evaluate`: an evaluation of a model outside of a run, from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lagrpo.errors import SettingsError, as_settings_error, without_own_frames
from lagrpo.interrupts import interruptible
from lagrpo.lifecycle.evaluate_model import evaluate_model
from lagrpo.lifecycle.evaluation import Evaluation
from lagrpo.lifecycle.run import FAILURES, names_of_passed
from lagrpo.runs.environment import naming_start
from lagrpo.settings.load import explains_arguments, load_settings
from lagrpo.settings.of_run import config_of_weights, settings_for_eval
from lagrpo.settings.run_code import ARGUMENTS, TRUST_ARGUMENT, check_run_code
from lagrpo.settings.schema import EVALUATION_DEFAULTS
from lagrpo.startup.arguments import as_settings, build_task, name_rewards
from lagrpo.tasks import Task
from lagrpo.tasks.data import find_splits


@without_own_frames(*FAILURES, KeyboardInterrupt)
@explains_arguments
def evaluate(
    model: str | os.PathLike[str],
    data: Any = None,
    rewards: Sequence[Any] | None = None,
    *,
    task: Task | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_run_code: bool = False,
) -> Evaluation:
    """Measures pass@k of a model, prints it, and writes it to evaluations/MODEL-TASK.

    model, data, rewards, task, settings: as for `lagrpo.train`. All rows of `data` are evaluated,
    unless it has a split "test". `settings` may change eval.num_samples, eval.temperature and
    others. Weights of a run (runs/NAME/weights/…) are evaluated with its task, rewards, limits and
    seed, unless the arguments say otherwise; trust_run_code lets functions run that only
    its settings name.

    Returns `summary`, such as summary["pass@1"] with summary["pass@1_low"] and
    summary["pass@1_high"], and `records`, one dict per prompt. Raises SettingsError, and
    RewardError if too many completions could not be scored.
    """
    if rewards is not None and not isinstance(rewards, list | tuple):
        rewards = [rewards]
    changes = as_settings(model, data, rewards)
    if data is not None and not _has_test_split(data):
        changes["task.options.test_split"] = "train"
    changes |= settings or {}
    replaced = names_of_passed(task=task, data=data, rewards=rewards)
    config = config_of_weights(os.fspath(model))
    values: dict[str, Any] = dict(EVALUATION_DEFAULTS)
    if config is not None:
        other_task = "custom" if data is not None or task is not None else None
        values |= settings_for_eval(config, task=changes.get("task.name", other_task))
    elif data is None and task is None and "task.name" not in changes:
        raise SettingsError(
            "evaluate: name what the model is evaluated on: pass data and rewards, or "
            "settings={'task.name': 'gsm8k'}"
        )
    loaded = load_settings(values, changes)
    if config is not None and not trust_run_code:
        check_run_code(
            loaded,
            config,
            named=changes,
            advice=f"pass {TRUST_ARGUMENT}",
            unused=[setting for name in replaced for setting in ARGUMENTS[name]],
        )
    with naming_start(None if config is None else config.parent), interruptible():
        with as_settings_error():
            task = task or build_task(loaded, data, rewards)
        return evaluate_model(name_rewards(loaded, task), task)


def _has_test_split(data: Any) -> bool:
    """True if the data has a split for testing. Raises SettingsError for missing data."""
    with as_settings_error():
        if isinstance(data, str | os.PathLike):
            data = os.fspath(cast("str | os.PathLike[str]", data))
        return "test" in find_splits(data, hub="openai/gsm8k:main")
