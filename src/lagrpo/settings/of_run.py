"""The settings of the run that wrote some weights, for an evaluation of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lagrpo.settings.load import flatten, load_settings

KEPT_FOR_EVAL = (
    "run.seed",
    "task.",
    "model.dtype",
    "model.chat_template",  # and chat_template_kwargs
    "rollout.temperature",
    "rollout.max_prompt",
    "rollout.max_completion",
    "rollout.overlong_prompts",
    "rollout.stop",
    "eval.temperature",
    "eval.top_p",
)
"""Beginnings of the settings that `lagrpo eval` takes from the run that wrote the weights."""


def config_of_weights(weights: str) -> Path | None:
    """Returns config.toml of the run that wrote these weights; None for other models."""
    folder = Path(weights).expanduser().absolute().parent
    config = folder.parent / "config.toml"
    return config if folder.name == "weights" and config.is_file() else None


def settings_for_eval(config: Path, task: str | None = None) -> dict[str, Any]:
    """Returns the settings in KEPT_FOR_EVAL of a run, without its task's if `task` is another.

    The seed decides which rows of the data are test rows.
    """
    settings = flatten(load_settings(config).model_dump(exclude_none=True))
    kept = {name: value for name, value in settings.items() if name.startswith(KEPT_FOR_EVAL)}
    if task in (None, kept["task.name"]):
        return kept
    return {name: value for name, value in kept.items() if not name.startswith("task.")}
