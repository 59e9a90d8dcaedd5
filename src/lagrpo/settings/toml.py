"""Settings from a TOML file, a mapping and the command line, with errors that say where and what; and back to TOML.

Whatever the source, one validation: that of the classes in settings/schema.py.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lagrpo.errors import SettingsError
from lagrpo.settings.schema import Settings

M = TypeVar("M", bound=BaseModel)

COMMAND_LINE = "command line"


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Settings from a TOML file or a mapping (section -> name -> value), those of `overrides` taking precedence.

    Raises:
        SettingsError: no such file, not TOML, an unknown name (with the nearest valid one), a value out of its range.
    """
    if source is None or isinstance(source, Mapping):
        return validated(Settings, source or {}, overrides or {}, "settings")
    return validated(Settings, read_toml(Path(source)), overrides or {}, str(source))


def read_toml(path: Path) -> dict[str, Any]:
    """What a settings file says. Raises SettingsError where there is none or it is not TOML."""
    if not path.exists():
        raise SettingsError(f"{path}: no such settings file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read as a settings file: {error.strerror}") from error


def validated(kind: type[M], values: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> M:
    """The settings of `values` with `overrides` on top. Raises SettingsError, one line per complaint."""
    merged = dict(values)
    for section, change in overrides.items():
        below = values.get(section)
        both = isinstance(change, Mapping) and isinstance(below, Mapping)
        merged[section] = {**below, **change} if both else change  # type: ignore[dict-item]
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        lines = (_complaint(kind, item, _origin(item["loc"], values, overrides, source)) for item in error.errors())
        raise SettingsError("\n".join(lines)) from error


def _origin(where: tuple[Any, ...], values: Mapping[str, Any], overrides: Mapping[str, Any], source: str) -> str:
    """Whose fault it is: the command line's where it set what is complained about, or where nothing else was given."""
    found: Any = overrides
    for part in where[:2]:
        found = found.get(part) if isinstance(found, Mapping) else None
    if not overrides or found is None:
        return source
    return COMMAND_LINE if len(where) > 1 or not values else f"{source} and {COMMAND_LINE}"


def _complaint(kind: type[BaseModel], item: Any, origin: str) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{origin}: unknown setting {where!r}; {nearest(kind, where)}"
    if item["type"] == "value_error":
        return f"{origin}: {where + ': ' if where else ''}{item['ctx']['error']}"
    if item["type"] == "model_type":
        return f"{origin}: {where} is a section, not a setting: set {_and_so_on(kind, where)}"
    return f"{origin}: {where} = {item['input']!r}: {item['msg']}"


def _and_so_on(kind: type[BaseModel], section: str) -> str:
    names = [name for name in setting_names(kind) if name.startswith(f"{section}.")]
    return ", ".join(names[:3]) + " …" * (len(names) > 3)


def nearest(kind: type[BaseModel], name: str) -> str:
    """ "did you mean 'x'?" for the setting most like `name`: of that name in another section, spelt like it, or ending
    like it."""
    names = list(setting_names(kind))
    leaf = name.rsplit(".", 1)[-1]
    elsewhere = [n for n in names if n.endswith("." + leaf)]
    by_leaf = {n.rsplit(".", 1)[-1]: n for n in names}
    close = elsewhere or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    close = close or [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.0)]
    return f"did you mean {close[0]!r}?"


def setting_names(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every section and setting, as section.name."""
    for name, field in kind.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")


def to_toml(settings: Settings) -> str:
    """The settings as a TOML file that `load_settings` reads back to the same settings; what is unset is left out."""
    lines = []
    for section, values in settings.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is a TOML basic string, but for one control character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
