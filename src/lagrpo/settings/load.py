"""Settings from TOML files and mappings, and back to TOML.

Errors name the file and the setting, and say what is wrong with its value.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lagrpo.errors import SettingsError, find_nearest, one_line
from lagrpo.settings.other_trainers import translate
from lagrpo.settings.schema import Settings
from lagrpo.settings.section import Table
from lagrpo.settings.sections import REMOVED, TaskSettings

Model = TypeVar("Model", bound=BaseModel)
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

PRESETS = Path(__file__).with_name("presets")

OVERRIDES = "loss.overrides."
"""The beginning of the names of knobs."""


TABLES = ("task.options", "loss.overrides", "model.chat_template_kwargs")
"""Settings that are tables with entries of any name."""

ARGUMENT_OF_SETTING = {
    "model.path": "model",
    "task.data": "data",
    "task.rewards": "rewards",
    "loss.recipe": "loss",
}
"""The argument of `lagrpo.train` for each setting that has one."""


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
    resume: str | None = None,
) -> Settings:
    """Loads settings from a TOML file, a packaged file of this name, or a mapping.

    `overrides` take precedence. The keys of mappings are sections, or names such as
    schedule.sync_every. `resume`: the directory of a run, whose settings are loaded; `source` may
    then only be a mapping, which changes them. Raises SettingsError.
    """
    changes = nest(overrides or {})
    if resume not in (None, "auto"):
        if source is not None and not isinstance(source, Mapping):
            raise SettingsError(f"--resume RUN takes the settings of the run: leave out {source}")
        changes = merged(nest(source or {}), changes)
        source = Path(resume).expanduser() / "config.toml"
        if not source.is_file():
            raise SettingsError(f"--resume: {resume!r} is not a run: it has no config.toml")
    if source is None or isinstance(source, Mapping):
        values = with_one_length(nest(source or {}), changes, "settings")
        values = without_options_of_another_task(values, changes)
        return validate(values, changes, "settings", Settings)
    file = Path(source).expanduser()
    packaged_file = PRESETS / f"{source}.toml"
    if not file.exists() and packaged_file.is_file():
        file = packaged_file
    values = with_one_length(read_toml(file), changes, str(source))
    values = without_options_of_another_task(values, changes)
    return validate(values, changes, str(source), Settings)


def with_one_length(
    values: Mapping[str, object], changes: Mapping[str, object], source: str
) -> Mapping[str, object]:
    """Returns the values without their schedule.epochs if the changes set schedule.batches.

    The length that was set last counts. Raises SettingsError if both were set in one place.
    """
    for table in values, changes:
        if _sets(table, "batches") and _sets(table, "epochs"):
            origin = source if table is values else "command line"
            raise SettingsError(
                f"{origin}: schedule.batches and schedule.epochs both set the length: remove one"
            )
    if _sets(changes, "batches") and _sets(values, "epochs"):
        return merged(values, {"schedule": {"epochs": None}})
    return values


def without_options_of_another_task(
    values: Mapping[str, object], changes: Mapping[str, object]
) -> Mapping[str, object]:
    """Returns the values without task.options if the changes name another task: they do not fit."""
    task = values.get("task")
    changed_task = changes.get("task")
    if not isinstance(task, Mapping) or not isinstance(changed_task, Mapping):
        return values
    name = task.get("name", TaskSettings().name)
    if changed_task.get("name", name) == name:
        return values
    kept = {key: value for key, value in task.items() if key != "options"}
    return {**values, "task": kept}


def _sets(table: Mapping[str, object], name: str) -> bool:
    """True if a table sets the key `name` of the section schedule."""
    schedule = table.get("schedule")
    return isinstance(schedule, Mapping) and schedule.get(name) is not None


def read_toml(path: Path) -> Table:
    """Reads a settings file. Raises SettingsError if there is none or it is not TOML."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError as error:
        packaged = ", ".join(sorted(file.stem for file in PRESETS.glob("*.toml")))
        raise SettingsError(
            f"{path}: no such settings file; packaged ones are {packaged}"
        ) from error
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read as a settings file: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text: save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        message = f"{path}: not valid TOML: {one_line(str(error))}"
        has_backslash_in_quotes = re.search(r'"[^"\n]*\\', text) is not None
        if has_backslash_in_quotes:
            message += "; write paths with / or in single quotes"
        raise SettingsError(message) from error


def to_toml(settings: Settings) -> str:
    """Returns the settings as TOML, which `load_settings` reads back to the same settings.

    Settings that are unset are left out.
    """
    return tomli_w.dumps(settings.model_dump(exclude_none=True))


def validate(
    values: Mapping[str, object], overrides: Mapping[str, object], source: str, kind: type[Model]
) -> Model:
    """Returns the settings of `values`, which come from `source`, with `overrides` on top.

    Raises SettingsError with a line for each problem.
    """
    try:
        return kind.model_validate(merged(values, overrides))
    except ValidationError as error:
        overridden_names = list(flatten(overrides))
        lines: list[str] = []
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            is_overridden = any(_overlap(name, overridden) for overridden in overridden_names)
            # Without a file, everything is called settings.
            origin = "command line" if is_overridden and source != "settings" else source
            for described_name in _names_to_describe(name, problem):
                lines.append(f"{origin}: {_describe_problem(described_name, problem, kind)}")
        raise SettingsError("\n".join(lines)) from error


def _overlap(name: str, other: str) -> bool:
    """True if one name is the other one, or a section of it."""
    return f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}.")


def _names_to_describe(name: str, problem: ErrorDetails) -> list[str]:
    """Returns the settings that a problem is about.

    If another trainer has settings of an unknown section, returns these, else `name` alone.
    """
    if problem["type"] != "extra_forbidden" or not isinstance(problem["input"], Mapping):
        return [name]
    settings = flatten(problem["input"], f"{name}.")
    return [setting for setting in settings if translate(setting) is not None] or [name]


def _describe_problem(name: str, problem: ErrorDetails, kind: type[BaseModel]) -> str:
    """Returns pydantic's problem with the setting `name` as a line for the user."""
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; {suggest_setting(name, kind)}"
    if problem["type"] == "value_error":
        # The ValueError of a validator of ours.
        message = problem.get("ctx", {}).get("error")
        return f"{name}: {message}" if name else f"{message}"
    if problem["type"] == "missing":
        # Its "input" is the whole table that lacks it.
        return f"{name} is missing"
    value = one_line(repr(problem["input"]))
    if problem["type"] in ("model_type", "dict_type"):
        return f"{name} = {value}: {name} is a table of settings, not a single value"
    return f"{name} = {value}: {problem['msg']}"


def suggest_setting(name: str, kind: type[BaseModel]) -> str:
    """Returns advice for an unknown setting, such as "did you mean 'x'?".

    It explains a setting of an older version or another trainer, or else names the nearest setting.
    """
    if name in REMOVED:
        return REMOVED[name]
    translation = _explain_name_of_trainer(name, kind)
    if translation is not None:
        return translation
    nearest = _nearest_setting(name, kind)
    advice = f"did you mean {nearest!r}?" if nearest else "lagrpo train --help lists all."
    if name.startswith("loss.") and not (nearest or "").startswith(OVERRIDES):
        advice += " Other knobs of the recipe are loss.overrides.NAME."
    return advice


def _explain_name_of_trainer(name: str, kind: type[BaseModel]) -> str | None:
    """Returns a sentence about a name of another trainer; None if it means the same here."""
    translation = translate(name)
    if translation is None:
        return None
    is_same_name = any(setting in translation for setting in _settings_with_ending(name, kind))
    # A sentence that names the trainer again says what differs there.
    tells_difference = (
        "not available" in translation
        or "by default" in translation
        or translation.count("TRL") > 1
    )
    return translation if tells_difference or not is_same_name else None


def _settings_with_ending(name: str, kind: type[BaseModel]) -> list[str]:
    """Returns the settings with the last part of this name, in any section."""
    last_part = name.rpartition(".")[2]
    return [setting for setting in list_settings(kind) if setting.endswith(f".{last_part}")]


def _nearest_setting(name: str, kind: type[BaseModel]) -> str | None:
    """Returns the setting most like a name, if any is.

    It is one of that name in another section, an entry of a table with a similar name, or one with
    as many parts and a similar name.
    """
    same_names = _settings_with_ending(name, kind)
    if same_names:
        return same_names[0]
    *table_parts, entry = name.split(".")
    table = find_nearest(".".join(table_parts), TABLES, likeness=0.8)
    if table is not None:
        return f"{table}.{entry}"
    all_names = list_settings(kind)
    same_depth = [setting for setting in all_names if setting.count(".") == name.count(".")]
    return find_nearest(name, same_depth, likeness=0.5)


def explains_arguments(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Lets a function explain arguments that it does not have, such as TRL's reward_funcs.

    Such a call raises SettingsError, as a setting of that name does.
    """
    known_names = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        for name in kwargs:
            if name not in known_names:
                translation = _explain_name_of_trainer(name, Settings)
                advice = translation or _suggest_argument(name, known_names)
                raise SettingsError(f"{function.__name__} has no argument {name!r}; {advice}")
        return function(*args, **kwargs)

    return call


def _suggest_argument(name: str, known_names: Collection[str]) -> str:
    """Returns advice for an unknown argument of a function with these arguments."""
    setting = _nearest_setting(name, Settings)
    argument = find_nearest(name, known_names, likeness=0.7)
    if argument is None and setting is not None:
        argument = ARGUMENT_OF_SETTING.get(setting)
    if argument in known_names:
        return f"did you mean {argument!r}?"
    if setting is not None:
        return f"did you mean settings={{{setting!r}: …}}?"
    return f"its arguments are {', '.join(known_names)}"


def nest(values: Mapping[str, object], path: str = "") -> Table:
    """Returns names such as schedule.sync_every as tables. `path` is the path of the table itself.

    Paths of knobs stay whole: a mask has a name and knobs, which one table cannot hold under one
    key.

    >>> nest({"loss": {"overrides": {"mask": "ring", "mask.outer_high": 3.0}}, "run.seed": 1})
    {'loss': {'overrides': {'mask': 'ring', 'mask.outer_high': 3.0}}, 'run': {'seed': 1}}
    """
    nested: Table = {}
    for name, value in values.items():
        full_name = f"{path}{name}"
        parts = name.split(".")
        if path.startswith(OVERRIDES):
            parts = [name]
        elif full_name.startswith(OVERRIDES):
            tables_to_overrides = OVERRIDES.removeprefix(path).rstrip(".").split(".")
            parts = [*tables_to_overrides, full_name.removeprefix(OVERRIDES)]
        *sections, leaf = parts
        if isinstance(value, Mapping):
            value = nest(value, f"{full_name}.")
        table: Table = {leaf: value}
        for section in reversed(sections):
            table = {section: table}
        nested = merged(nested, table)
    return nested


def merged(values: Mapping[str, object], overrides: Mapping[str, object]) -> Table:
    """Returns both mappings as one, table by table; `overrides` win."""
    result: Table = dict(values)
    for name, change in overrides.items():
        value = values.get(name)
        if isinstance(change, Mapping) and isinstance(value, Mapping):
            result[name] = merged(value, change)
        else:
            result[name] = change
    return result


def flatten(settings: Mapping[str, object], prefix: str = "") -> Table:
    """Returns the values of nested tables by their full names, section.name."""
    flat: Table = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def list_settings(kind: type[BaseModel] = Settings, prefix: str = "") -> dict[str, FieldInfo]:
    """Returns every section and setting by its full name, section.name."""
    fields: dict[str, FieldInfo] = {}
    for name, field in kind.model_fields.items():
        fields[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields |= list_settings(field.annotation, f"{prefix}{name}.")
    return fields
