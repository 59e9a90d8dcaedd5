"""Settings from TOML files, mappings and the command line, with errors that say where and what; and back to TOML."""

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
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import Section

Command = TypeVar("Command")
PRESETS = Path(__file__).with_name("presets")
SHORT = {"--task": "--task.name", "--model": "--model.path", "--recipe": "--loss.recipe"}
TABLES = (
    "task.options",
    "loss.overrides",
    "model.chat_template_kwargs",
)  # with any names: --task.options.NAME VALUE
OVERRIDES = "loss.overrides."  # before the paths of knobs


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | None = None,
) -> Settings:
    """Settings from a TOML file, the name of a packaged one, or a mapping; `overrides` take precedence. The keys of
    mappings are sections or names such as schedule.sync_every. A run that is resumed by its directory has its own
    settings, which mappings change. Raises SettingsError."""
    changes = nest(overrides or {})
    if resume not in (None, "auto"):
        if source is not None and not isinstance(source, Mapping):
            raise SettingsError(f"--resume RUN takes the settings of the run: leave out {source}")
        source, changes = (
            Path(resume).expanduser() / "config.toml",
            merged(nest(source or {}), changes),
        )
        if not source.is_file():
            raise SettingsError(f"--resume: {resume!r} is not a run: it has no config.toml")
    if source is None or isinstance(source, Mapping):
        return validate(nest(source or {}), changes, "settings")
    path, packaged = Path(source).expanduser(), PRESETS / f"{source}.toml"
    file = packaged if not path.exists() and packaged.is_file() else path
    return validate(read_toml(file), changes, str(source))


def read_toml(path: Path) -> dict[str, Any]:
    """What a settings file says. Raises SettingsError if there is none or it is not TOML."""
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
    except (ValueError, RecursionError) as error:
        cure = "; write paths with / or in single quotes" if re.search(r'"[^"\n]*\\', text) else ""
        raise SettingsError(f"{path}: not valid TOML: {one_line(str(error))}{cure}") from error


def to_toml(settings: Settings) -> str:
    """The settings as a TOML file that `load_settings` reads back to the same settings; what is unset is left out."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))


def validate(
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    source: str,
    kind: type[BaseModel] = Settings,
) -> Any:
    """The settings of `values`, which come from `source`, with `overrides` on top. Raises SettingsError."""
    try:
        return kind.model_validate(merged(values, overrides))
    except ValidationError as error:
        given, lines = flatten(overrides), list[str]()
        complaint: Any
        for complaint in error.errors():
            name = ".".join(map(str, complaint["loc"]))
            by_user = any(
                f"{own}.".startswith(f"{name}.") or f"{name}.".startswith(f"{own}.")
                for own in given
            )
            place = "command line" if by_user and source != "settings" else source
            text = f"{name} = {one_line(repr(complaint['input']))}: {complaint['msg']}"
            if complaint["type"] == "extra_forbidden":
                text = f"unknown setting {name!r}; {suggest_setting(name, kind)}"
            elif complaint["type"] == "value_error":
                text = f"{name + ': ' if name else ''}{complaint['ctx']['error']}"
            lines.append(f"{place}: {text}")
        raise SettingsError("\n".join(lines)) from error


def suggest_setting(name: str, kind: type[BaseModel]) -> str:
    """ "did you mean 'x'?": the setting of that name in another section, else the nearest."""
    known = list(list_settings(kind))
    same = [each for each in known if each.endswith(f".{name.rpartition('.')[2]}")]
    alike = [each for each in known if each.count(".") == name.count(".")]
    near = same[0] if same else find_nearest(name, alike, likeness=0.5)
    knobs = (
        " Other knobs of the recipe are loss.overrides.NAME." if name.startswith("loss.") else ""
    )
    return f"did you mean {near!r}?{knobs}" if near else f"lagrpo train --help lists all.{knobs}"


def nest(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Names such as schedule.sync_every as tables; `path` is that of the table itself. Paths of knobs stay whole: a
    mask has a name and knobs, which one table cannot hold under one key.

    >>> nest({"loss": {"overrides": {"mask": "ring", "mask.outer_high": 3.0}}, "run.seed": 1})
    {'loss': {'overrides': {'mask': 'ring', 'mask.outer_high': 3.0}}, 'run': {'seed': 1}}
    """
    nested: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{path}{name}"
        sections = name.split(".")
        if path.startswith(OVERRIDES):
            sections = [name]
        elif full.startswith(OVERRIDES):
            tables = OVERRIDES.removeprefix(path).rstrip(".")
            sections = [*tables.split("."), full.removeprefix(OVERRIDES)]
        *sections, leaf = sections
        table = {leaf: nest(value, f"{full}.") if isinstance(value, Mapping) else value}
        for section in reversed(sections):
            table = {section: table}
        nested = merged(nested, table)
    return nested


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Both, table by table; `overrides` win."""
    found = dict(values)
    for name, change in overrides.items():
        below = values.get(name)
        found[name] = (
            merged(below, change)
            if isinstance(change, Mapping) and isinstance(below, Mapping)
            else change
        )
    return found


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.name -> value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return flat


def list_settings(kind: type[BaseModel] = Settings, prefix: str = "") -> dict[str, FieldInfo]:
    """Every section and setting by its name, section.name."""
    found = {}
    for name, field in kind.model_fields.items():
        found[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= list_settings(field.annotation, f"{prefix}{name}.")
    return found


# The command line


def read_words(
    words: Sequence[str], command: type[Command], settings: Settings, sections: Sequence[str]
) -> tuple[Command, dict[str, Any]]:
    """The arguments of a command, a dataclass, and the settings of these sections that the words change. Wrong words
    end the program."""
    parts = [word.partition("=") for word in words]
    rest, tables = split_tables(
        [f"{SHORT.get(name, name)}{equals}{value}" for name, equals, value in parts]
    )
    rest = [
        re.sub(r"(?<![^=])(True|False)$", lambda found: found[0].lower(), word) for word in rest
    ]  # as Python says
    shown = [(name, _options(name, getattr(settings, name))) for name in sections]
    fields = [(name, type(own), own) for name, own in shown]
    made: Any = make_dataclass(command.__name__, fields, bases=(command,), frozen=True)
    own_tables = [name for name in TABLES if name.partition(".")[0] in sections]
    helps = [f"--{name}.NAME VALUE: {list_settings()[name].description}" for name in own_tables]
    shown_as: dict[str, Any] = {
        "prog": f"lagrpo {command.__name__.lower()}",
        "config": (tyro.conf.FlagCreatePairsOff,),
    }
    text = "\n".join([f"{inspect.getdoc(command)}\n", *helps])
    given = tyro.cli(made, args=rest, description=text, use_underscores=True, **shown_as)
    changed = {
        f"{section}.{name}": value
        for section, own in shown
        for name, value in vars(getattr(given, section)).items()
        if value != getattr(own, name)
    }
    return given, changed | tables


def help_text(
    command: type, settings: Settings, sections: Sequence[str], unused: Sequence[str] = ()
) -> str:
    """The help of a command: its docstring, and a line with the value for each setting that it uses."""
    lines = [inspect.getdoc(command) or ""]
    for section in sections:
        values = getattr(settings, section)
        lines.append("")
        for name, field in type(values).model_fields.items():
            key, value = f"{section}.{name}", getattr(values, name)
            words = [
                getattr(each, "name", str(each))
                for each in (value if isinstance(value, tuple) else [value])
            ]
            shown = f" [{' '.join(words)}]" if value not in (None, ()) else ""
            if key in TABLES:
                key, shown = f"{key}.NAME", ""
            if name not in ("sets", *unused):  # evaluation sets are a list of tables, for files
                lines.append(f"  --{key:<32} {field.description}{shown}")
    return "\n".join(lines)


def _options(section: str, values: Section) -> Any:
    """The settings of a section as a dataclass for tyro, which only turns words into values."""
    fields = []
    for name, field in type(values).model_fields.items():
        kind, value = field.annotation, getattr(values, name)
        if f"{section}.{name}" in (*TABLES, "eval.sets"):  # lists of tables are for files
            continue
        if isinstance(value, bool):
            kind, value = Literal["true", "false"], str(value).lower()
        elif f"{section}.{name}" == "task.rewards":
            kind, value = tuple[str, ...], tuple(each.name for each in value)
        fields.append((name, kind, value))
    return make_dataclass(type(values).__name__, fields, frozen=True)()


def split_tables(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words without the entries of TABLES, and these entries, with values as TOML has them.

    >>> split_tables(["demo", "--task.options.digits", "2", "--loss.overrides.surrogate=clipped", "--run.seed", "1"])
    (['demo', '--run.seed', '1'], {'task.options.digits': 2, 'loss.overrides.surrogate': 'clipped'})
    """
    rest, found, entry = list[str](), dict[str, list[Any]](), ""
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
            if entry := name if name.startswith(tuple(f"{table}." for table in TABLES)) else "":
                found[entry] = [_read_value(value)] if equals else []
                continue
        found[entry].append(_read_value(word)) if entry else rest.append(word)
    return rest, {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _read_value(word: str) -> Any:
    """A word as TOML or Python has it (True, .5), or as it stands."""
    text = word.lower() if word in ("True", "False") else re.sub(r"^-?(?=\.\d)", r"\g<0>0", word)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return word
