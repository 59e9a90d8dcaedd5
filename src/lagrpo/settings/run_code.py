"""The code that settings name, and whether the settings of a run's directory may run it.

A user who names a settings file, or a function on the command line, has chosen the code. A
directory of a run may come from somebody else, together with the weights that the user wanted. Its
config.toml may name any installed function, with any options, so its code needs a flag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from lagrpo.core.references import is_reference
from lagrpo.errors import SettingsError
from lagrpo.rewards.entries import REWARDS
from lagrpo.settings.loss import name_setting
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import TaskSettings

TRUST_OPTION = "--trust-run-code"
TRUST_ARGUMENT = "trust_run_code=True"

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "task": ("task.name", "task.rewards"),
    "data": ("task.name",),
    "rewards": ("task.rewards",),
    "loss": ("loss.recipe",),
}
"""The settings that each argument of `lagrpo.train` replaces."""


def find_code(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yields the name of each setting that runs code, and the code: "module:function", mostly."""
    for setting, name in _find_names(settings):
        # A task "gym:module:function" calls the function, too.
        is_code = is_reference(name.removeprefix("gym:"))
        # A run that got its rewards in Python records lagrpo's own by these names.
        if is_code and name not in REWARDS.values():
            yield setting, name
    # Options of vLLM load plugins and remote code; vLLM's versions differ in which ones.
    if settings.rollout.uses_vllm:
        for option in settings.vllm.server_args:
            yield "vllm.server_args", option


def _find_names(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yields the values of all settings that may name a function, after the setting's name."""
    yield from _find_names_of_task("task", settings.task)
    for evaluation_set in settings.eval.sets:
        if evaluation_set.task is not None:
            yield from _find_names_of_task("eval.sets.task", evaluation_set.task)
    yield "rollout.engine", settings.rollout.engine
    yield "loss.recipe", settings.loss.recipe
    for knob, value in settings.loss.knobs.items():
        entries = value if isinstance(value, list | tuple) else [value]
        for entry in entries:
            yield name_setting(knob), str(entry)


def _find_names_of_task(section: str, task: TaskSettings) -> Iterator[tuple[str, str]]:
    yield f"{section}.name", task.name
    for reward in task.rewards:
        yield f"{section}.rewards", reward.reward
    for tool in task.tools:
        yield f"{section}.tools", tool


def check_run_code(
    settings: Settings,
    config: Path,
    *,
    named: object,
    advice: str,
    unused: Collection[str] = (),
) -> None:
    """Raises SettingsError if settings name code that only config.toml of a run has chosen.

    config: the file, for the message
    named: settings that the user wrote, as mappings; functions that they name may run
    advice: what lets the code run, for the message
    unused: beginnings of settings whose code does not run
    """
    chosen_names = set(_find_texts(named))
    code = [
        f"{name} ({setting})"
        for setting, name in find_code(settings)
        if name not in chosen_names and not setting.startswith(tuple(unused))
    ]
    if code:
        raise SettingsError(
            f"{config} names code that would run: {', '.join(dict.fromkeys(code))}. "
            f"If you trust it, {advice}"
        )


def _find_texts(value: object) -> Iterator[str]:
    """Yields all texts in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _find_texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _find_texts(entry)
