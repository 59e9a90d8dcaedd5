"""Settings from a TOML file, a mapping and the command line, with errors that say where and what; and back to TOML."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lagrpo.errors import SettingsError, find_nearest, one_line
from lagrpo.settings.schema import Settings

M = TypeVar("M", bound=BaseModel)

COMMAND_LINE = "command line"
PRESETS = Path(__file__).with_name("presets")


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Settings from a TOML file, the name of a packaged one (demo), or a mapping; `overrides` take precedence. Keys are
    sections, or names such as schedule.sync_every. Where these
    name a run to go on with and there is no file, its config.toml is the file. Raises SettingsError for a file that is
    missing or not TOML, an unknown name (with the nearest) and an unfit value."""
    if source is None or isinstance(source, Mapping):
        source, overrides = nest(source or {}), nest(overrides or {})
        if (run := _named_run(overrides) or _named_run(source)) is None:
            return validate(Settings, source, overrides, "settings")
        config = Path(run).expanduser() / "config.toml"
        if not config.is_file():
            raise SettingsError(f"run.resume = {run!r}: there is no run in that directory (no config.toml)")
        return validate(Settings, read_toml(config), merged(source, overrides), str(config))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"settings are a Settings, a mapping or the path of a TOML file, not {source!r:.80}")
    return validate(Settings, read_toml(find_file(source)), nest(overrides or {}), str(source))


def find_file(source: str | os.PathLike[str]) -> Path:
    """The settings file, or the packaged one of that name, such as demo."""
    path, packaged = Path(source), PRESETS / f"{source}.toml"
    return packaged if not path.exists() and packaged.is_file() else path


def read_toml(path: Path) -> dict[str, Any]:
    """What a settings file says. Raises SettingsError where there is none or it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        known = ", ".join(sorted(file.stem for file in PRESETS.glob("*.toml")))
        raise SettingsError(f"{path}: no such settings file; packaged ones are {known}") from error
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read as a settings file: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{path}: not valid TOML: {one_line(str(error))}") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: not valid TOML: lists or tables are nested too deeply") from error


def validate(kind: type[M], values: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> M:
    """The settings of `values`, which come from `source`, with `overrides` on top. Raises SettingsError, one line per
    complaint."""
    try:
        return kind.model_validate(merged(values, overrides))
    except ValidationError as error:
        lines = (f"{_blame(e['loc'], values, overrides, source)}: {_complain(kind, e)}" for e in error.errors())
        raise SettingsError("\n".join(lines)) from error


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Both, table by table; `overrides` win."""
    found = dict(values)
    for name, change in overrides.items():
        below = values.get(name)
        found[name] = merged(below, change) if isinstance(change, Mapping) and isinstance(below, Mapping) else change
    return found


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Names such as schedule.sync_every as tables.

    >>> nest({"schedule.sync_every": 4, "schedule": {"batches": 9}})
    {'schedule': {'sync_every': 4, 'batches': 9}}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, leaf = name.split(".")
        table = {leaf: value}
        for section in reversed(sections):
            table = {section: table}
        found = merged(found, table)
    return found


def _named_run(settings: Mapping[str, Any]) -> str | None:
    """The directory of the run to go on with, where one is named."""
    section = settings.get("run")
    resume = section.get("resume") if isinstance(section, Mapping) else None
    return resume if isinstance(resume, str) and resume != "auto" else None


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.name -> value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _blame(where: tuple[Any, ...], values: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> str:
    """The source of what is complained about: the command line where it set that, or where nothing else was given."""
    found: Any = overrides
    for depth, part in enumerate(where):
        if depth > 1 and not isinstance(found, Mapping):
            break
        if not isinstance(found, Mapping) or part not in found:
            return source
        found = found[part]
    if not overrides:
        return source
    return COMMAND_LINE if len(where) > 1 or not values else f"{source} and {COMMAND_LINE}"


def _complain(kind: type[BaseModel], error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        entry = _entry_at(kind, error["loc"])
        return f"unknown setting {where!r}; {suggest_setting(entry or kind, error['loc'][-1] if entry else where)}"
    if error["type"] == "value_error":
        return f"{where + ': ' if where else ''}{error['ctx']['error']}"
    if error["type"] == "model_type":
        names = [name for name in list_settings(kind) if name.startswith(f"{where}.")]
        return f"{where} is a section, not a setting: set {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
    return f"{where} = {_shown(error['input'])}: {error['msg']}"


def _entry_at(kind: type[BaseModel], where: tuple[Any, ...]) -> type[BaseModel] | None:
    """The class of the entry of a list, such as task.rewards, in which a complaint has its place; None for none."""
    if not any(isinstance(part, int) for part in where):
        return None
    for name in (part for part in where[:-1] if isinstance(part, str)):
        if field := kind.model_fields.get(name):
            kind = section_in(field.annotation) or kind
    return kind


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation such as Section, Section | None or tuple[Section, ...]."""
    found = (section_in(part) for part in get_args(annotation))
    own = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return own or next(filter(None, found), None)


def entry_of(annotation: Any) -> type[BaseModel] | None:
    """The section that each entry of a list of tables is; None for other settings."""
    return section_in(annotation) if get_origin(annotation) is tuple else None


def _shown(value: Any) -> str:
    try:
        return one_line(repr(value))
    except (ValueError, RecursionError):  # Python writes no integer of more than 4,300 digits
        return f"a {type(value).__name__} too large to show"


def suggest_setting(kind: type[BaseModel], name: str) -> str:
    """ "did you mean 'x'?" for the setting most like `name`: the one of that name in another section, else one of its
    section that begins or ends so or is spelled like it. Without one, the settings of its section, or the sections."""
    section, _, leaf = name.rpartition(".")
    named = {known.rpartition(".")[2]: known for known in reversed(list_settings(kind))}
    beside = {own.rpartition(".")[2].lower(): own for own in list_settings(kind) if own.rpartition(".")[0] == section}
    longer = next((own for word, own in beside.items() if section and word.startswith(leaf)), None)
    longer = longer or next((own for word, own in beside.items() if section and word.endswith(leaf)), None)
    if close := named.get(leaf) or longer or beside.get(find_nearest(leaf.lower(), beside, likeness=0.6) or ""):
        return f"did you mean {close!r}?"
    here = f"[{section}] has" if section and beside else "there are"
    return f"{here} {', '.join(beside.values() or kind.model_fields)}"


def list_settings(kind: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every section and setting by its name, section.name."""
    found = {}
    for name, field in kind.model_fields.items():
        found[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= list_settings(field.annotation, f"{prefix}{name}.")
    return found


def to_toml(settings: Settings) -> str:
    """The settings as a TOML file that `load_settings` reads back to the same settings; what is unset is left out."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))
