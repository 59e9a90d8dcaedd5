"""Settings from TOML files, mappings and the command line, and back to TOML.

Errors say where the wrong setting is, and what is wrong with it.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import tomli_w
import tyro
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lagrpo.errors import SettingsError, find_nearest, one_line
from lagrpo.settings.other_trainers import translate
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import Section

Command = TypeVar("Command")
PRESETS = Path(__file__).with_name("presets")
SHORT = {"--task": "--task.name", "--model": "--model.path", "--recipe": "--loss.recipe"}

TABLES = ("task.options", "loss.overrides", "model.chat_template_kwargs")
"""Settings that are tables with any names: --task.options.NAME VALUE."""

OVERRIDES = "loss.overrides."
"""The beginning of the names of knobs."""


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
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
        return validate(nest(source or {}), changes, "settings")
    file = Path(source).expanduser()
    packaged_file = PRESETS / f"{source}.toml"
    if not file.exists() and packaged_file.is_file():
        file = packaged_file
    return validate(read_toml(file), changes, str(source))


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a settings file. Raises SettingsError if there is none or it is not TOML."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.toml")))
        raise SettingsError(f"{path}: no such settings file; packaged ones are {known}") from error
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
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    source: str,
    kind: type[BaseModel] = Settings,
) -> Any:
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
            place = "command line" if is_overridden and source != "settings" else source
            for described_name in _names_to_describe(name, problem):
                lines.append(f"{place}: {_describe_problem(described_name, problem, kind)}")
        raise SettingsError("\n".join(lines)) from error


def _overlap(name: str, other: str) -> bool:
    """True if one name is the other one, or a section of it."""
    return f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}.")


def _names_to_describe(name: str, problem: Any) -> list[str]:
    """Returns the settings that a problem is about.

    They are those of an unknown section that another trainer has, else `name` alone.
    """
    if problem["type"] != "extra_forbidden" or not isinstance(problem["input"], Mapping):
        return [name]
    settings = flatten(problem["input"], f"{name}.")
    return [setting for setting in settings if translate(setting) is not None] or [name]


def _describe_problem(name: str, problem: Any, kind: type[BaseModel]) -> str:
    """Returns pydantic's problem with the setting `name` as a line for the user."""
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; {suggest_setting(name, kind)}"
    if problem["type"] == "value_error":
        message = problem["ctx"]["error"]
        return f"{name}: {message}" if name else f"{message}"
    value = one_line(repr(problem["input"]))
    if problem["type"] in ("model_type", "dict_type"):
        return f"{name} = {value}: {name} is a table of settings, not a single value"
    return f"{name} = {value}: {problem['msg']}"


def suggest_setting(name: str, kind: type[BaseModel]) -> str:
    """Returns advice for an unknown setting, such as "did you mean 'x'?".

    It explains a setting of another trainer, names the setting of that name in another section, or
    else names the nearest one.
    """
    known_names = list(list_settings(kind))
    last_part = name.rpartition(".")[2]
    same_names = [known for known in known_names if known.endswith(f".{last_part}")]
    translation = translate(name)
    if translation is not None and not any(known in translation for known in same_names):
        return translation
    if same_names:
        nearest = same_names[0]
    else:
        same_depth = [known for known in known_names if known.count(".") == name.count(".")]
        nearest = find_nearest(name, same_depth, likeness=0.5)
    advice = f"did you mean {nearest!r}?" if nearest else "lagrpo train --help lists all."
    if name.startswith("loss."):
        advice += " Other knobs of the recipe are loss.overrides.NAME."
    return advice


def nest(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Returns names such as schedule.sync_every as tables. `path` is the path of the table itself.

    Paths of knobs stay whole: a mask has a name and knobs, which one table cannot hold under one
    key.

    >>> nest({"loss": {"overrides": {"mask": "ring", "mask.outer_high": 3.0}}, "run.seed": 1})
    {'loss': {'overrides': {'mask': 'ring', 'mask.outer_high': 3.0}}, 'run': {'seed': 1}}
    """
    nested: dict[str, Any] = {}
    for name, value in values.items():
        full_name = f"{path}{name}"
        parts = name.split(".")
        if path.startswith(OVERRIDES):
            parts = [name]
        elif full_name.startswith(OVERRIDES):
            tables_to_overrides = OVERRIDES.removeprefix(path).rstrip(".").split(".")
            parts = [*tables_to_overrides, full_name.removeprefix(OVERRIDES)]
        *sections, leaf = parts
        table = {leaf: nest(value, f"{full_name}.") if isinstance(value, Mapping) else value}
        for section in reversed(sections):
            table = {section: table}
        nested = merged(nested, table)
    return nested


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both mappings as one, table by table; `overrides` win."""
    result = dict(values)
    for name, change in overrides.items():
        value = values.get(name)
        if isinstance(change, Mapping) and isinstance(value, Mapping):
            result[name] = merged(value, change)
        else:
            result[name] = change
    return result


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested tables by their full names, section.name."""
    flat: dict[str, Any] = {}
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


# ---- The command line ----


def read_words(
    words: Sequence[str], command: type[Command], settings: Settings, sections: Sequence[str]
) -> tuple[Command, dict[str, Any]]:
    """Returns a command's arguments, and the settings of these sections that the words change.

    `command` is the dataclass of the arguments. Wrong words end the program.
    """
    words, tables = split_tables([_spell_out(word) for word in words])
    # As Python says True, tyro says true.
    words = [
        re.sub(r"(?<![^=])(True|False)$", lambda match: match[0].lower(), word) for word in words
    ]
    options = {name: _options(name, getattr(settings, name)) for name in sections}
    fields = [(name, type(values), values) for name, values in options.items()]
    arguments_type: Any = make_dataclass(command.__name__, fields, bases=(command,), frozen=True)
    table_help = [
        f"--{name}.NAME VALUE: {list_settings()[name].description}"
        for name in TABLES
        if name.partition(".")[0] in sections
    ]
    presentation: dict[str, Any] = {
        "prog": f"lagrpo {command.__name__.lower()}",
        "config": (tyro.conf.FlagCreatePairsOff,),
    }
    description = "\n".join([f"{inspect.getdoc(command)}\n", *table_help])
    arguments = tyro.cli(
        arguments_type, args=words, description=description, use_underscores=True, **presentation
    )
    changed: dict[str, Any] = {}
    for section, defaults in options.items():
        for name, value in vars(getattr(arguments, section)).items():
            if value != getattr(defaults, name):
                changed[f"{section}.{name}"] = value
    return arguments, changed | tables


def _spell_out(word: str) -> str:
    """Returns a word with the full name of an option that has a short one."""
    name, equals, value = word.partition("=")
    return f"{SHORT.get(name, name)}{equals}{value}"


def help_text(
    command: type, settings: Settings, sections: Sequence[str], unused: Sequence[str] = ()
) -> str:
    """Returns the help of a command: its docstring, and a line with the value of each setting.

    Settings in `unused` are left out.
    """
    lines = [inspect.getdoc(command) or ""]
    for section in sections:
        values = getattr(settings, section)
        lines.append("")
        for name, field in type(values).model_fields.items():
            if name in ("sets", *unused):  # evaluation sets are a list of tables, for files
                continue
            full_name = f"{section}.{name}"
            if full_name in TABLES:
                lines.append(f"  --{full_name + '.NAME':<32} {field.description}")
            else:
                value_text = _help_value(getattr(values, name))
                lines.append(f"  --{full_name:<32} {field.description}{value_text}")
    return "\n".join(lines)


def _help_value(value: Any) -> str:
    """Returns a value as it stands in the help, such as " [4]"; nothing if it is unset."""
    if value in (None, ()):
        return ""
    entries = value if isinstance(value, tuple) else [value]
    words = [getattr(entry, "name", str(entry)) for entry in entries]  # rewards have names
    return f" [{' '.join(words)}]"


def _options(section: str, values: Section) -> Any:
    """Returns a section's settings as a dataclass for tyro, which only turns words into values."""
    fields = []
    for name, field in type(values).model_fields.items():
        full_name = f"{section}.{name}"
        if full_name in (*TABLES, "eval.sets"):  # lists of tables are for files
            continue
        kind = field.annotation
        value = getattr(values, name)
        if isinstance(value, bool):
            kind = Literal["true", "false"]
            value = str(value).lower()
        elif full_name == "task.rewards":
            kind = tuple[str, ...]
            value = tuple(reward.name for reward in value)
        fields.append((name, kind, value))
    return make_dataclass(type(values).__name__, fields, frozen=True)()


def split_tables(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Returns the words without the entries of TABLES, and these entries, with values as in TOML.

    >>> split_tables(["demo", "--task.options.digits", "2", "--loss.overrides.surrogate=clipped"])
    (['demo'], {'task.options.digits': 2, 'loss.overrides.surrogate': 'clipped'})
    """
    table_prefixes = tuple(f"{table}." for table in TABLES)
    other_words: list[str] = []
    entries: dict[str, list[Any]] = {}
    entry = ""  # the entry that the next words are values of, if any
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            entry = name if name.startswith(table_prefixes) else ""
            if entry:
                entries[entry] = [_read_value(value)] if equals else []
                continue
        if entry:
            entries[entry].append(_read_value(word))
        else:
            other_words.append(word)
    tables = {name: values[0] if len(values) == 1 else values for name, values in entries.items()}
    return other_words, tables


def _read_value(word: str) -> Any:
    """Returns the value of a word in TOML, or in Python (True, .5), else the word."""
    if word in ("True", "False"):
        text = word.lower()
    else:
        text = re.sub(r"^-?(?=\.\d)", r"\g<0>0", word)  # TOML writes .5 as 0.5
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return word
