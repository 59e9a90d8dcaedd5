"""The command line's words: files, flags, and settings as `--section.name VALUE` or `--section.name=VALUE`.

Values stay text; settings/schema.py's classes turn them into numbers and complain, as they do for a settings file.
`None` unsets a setting. Hyphens and underscores in names are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from lagrpo.errors import SettingsError

SHORT = {"task": "task.name", "model": "model.path", "recipe": "objective.recipe"}
"""What is set so often that its section may be left out."""


@dataclass(slots=True)
class Arguments:
    """What a command line holds: what belongs to no option, the flags given, and the settings (by section and name)."""

    files: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    overrides: dict[str, Any] = field(default_factory=dict)


def parse(kind: type[BaseModel], words: Sequence[str], flags: Collection[str] = ()) -> Arguments:
    """Sort the words. Options take one value, those that are lists all words up to the next option.

    Raises:
        SettingsError: an option without its value, a word that looks like an option and is none.
    """
    given, waiting = Arguments(), list(words)
    while waiting:
        word = waiting.pop(0)
        if word in flags:
            given.flags.add(word)
        elif not word.startswith("-"):
            given.files.append(word)
        elif not word.startswith("--"):
            raise SettingsError(f"command line: {word} is no option; settings are given as --section.name VALUE")
        else:
            name, is_one_word, value = word[2:].partition("=")
            name = name.replace("-", "_")
            name = SHORT.get(name, name)
            is_list = _is_list(kind, name)
            if is_one_word:
                _put(given.overrides, name, [part for part in value.split(",") if part] if is_list else value)
            else:
                _put(given.overrides, name, _values(waiting, name, is_list))
    return given


def _values(waiting: list[str], name: str, is_list: bool) -> Any:
    """Takes the value of the option `name` from the words that wait."""
    values = []
    while waiting and not waiting[0].startswith("--") and (is_list or not values):
        values.append(waiting.pop(0))
    if not values:
        raise SettingsError(f"command line: --{name} needs a value: --{name} VALUE")
    return values if is_list else values[0]


def _put(overrides: dict[str, Any], name: str, value: Any) -> None:
    section, dot, leaf = name.partition(".")
    value = None if value in ("None", ["None"]) else value
    if not dot:
        overrides[section] = value
    elif isinstance(overrides.setdefault(section, {}), dict):
        overrides[section][leaf] = value


def _is_list(kind: type[BaseModel], name: str) -> bool:
    """Whether a setting is a tuple, or a tuple or None."""
    annotation: Any = kind
    for part in name.split("."):
        known = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, BaseModel) else {}
        annotation = known[part].annotation if part in known else None
    return any(get_origin(option) is tuple for option in (annotation, *get_args(annotation)))
