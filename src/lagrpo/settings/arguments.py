"""A command line's words: files, flags, and settings as `--section.name VALUE` or `--section.name=VALUE`.

Values stay text; the classes in settings/schema.py turn them into numbers and complain, as they do for a settings file.
`None` unsets a setting. Hyphens and underscores in names are the same.
"""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from lagrpo.errors import SettingsError
from lagrpo.settings.toml import list_settings

SHORT = {"task": "task.name", "model": "model.path", "recipe": "loss.recipe", "resume": "run.resume"}
"""Settings that are given so often that their section may be left out."""

TABLES = {"task.options", "loss.overrides"}
"""Settings that are tables of whatever names."""


@dataclass(slots=True)
class Arguments:
    """What a command line holds: the words outside of options, the flags, and the settings by section and name."""

    files: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    overrides: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, value: str | list[str]) -> None:
        """Keep the value of the setting `name`; that of task.options.NAME as the number, list or text that it is."""
        *sections, leaf = name.split(".")
        table = next((known for known in TABLES if name.startswith(f"{known}.")), None)
        if table is not None and isinstance(value, str):
            sections, leaf = table.split("."), name.removeprefix(f"{table}.")
            self._below(sections)[leaf] = read_value(value)
        else:
            self._below(sections)[leaf] = None if value in ("None", ["None"]) else value

    def _below(self, sections: Sequence[str]) -> dict[str, Any]:
        """The overrides of a section; nowhere that counts where a section was given a value itself."""
        below: Any = self.overrides
        for section in sections:
            below = below.setdefault(section, {}) if isinstance(below, dict) else below
        return below if isinstance(below, dict) else {}


def read_value(text: str) -> Any:
    """A word of the command line as TOML has it, or as it stands.

    >>> read_value("3"), read_value("[1, 2]"), read_value("true"), read_value("red")
    (3, [1, 2], True, 'red')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError, RecursionError):
        return text


def parse(kind: type[BaseModel], words: Sequence[str], flags: Collection[str] = ()) -> Arguments:
    """Sort the words. An option takes one value; where its setting is a list, all words up to the next option. Raises
    SettingsError for an option without its value, and a word that looks like an option and is none."""
    given, waiting = Arguments(), deque(words)
    lists = {name for name, field in list_settings(kind).items() if _is_list(field.annotation)}
    while waiting:
        word = waiting.popleft()
        if word in flags:
            given.flags.add(word)
        elif not word.startswith("-"):
            given.files.append(word)
        elif not word.startswith("--"):
            raise SettingsError(f"command line: {word} is no option; settings are given as --section.name VALUE")
        else:
            name, is_one_word, value = word[2:].partition("=")
            name = SHORT.get(name := name.replace("-", "_"), name)
            if not is_one_word:
                given.put(name, _take(waiting, name, name in lists))
            else:
                given.put(name, [part for part in value.split(",") if part] if name in lists else value)
    return given


def _take(waiting: deque[str], name: str, is_list: bool) -> str | list[str]:
    """Take the value of the option `name` from the words that wait."""
    values: list[str] = []
    while waiting and not waiting[0].startswith("--") and (is_list or not values):
        values.append(waiting.popleft())
    if not values:
        raise SettingsError(f"command line: --{name} needs a value: --{name} VALUE")
    return values if is_list else values[0]


def _is_list(annotation: Any) -> bool:
    """Whether a setting is a tuple, or a tuple or None."""
    return any(get_origin(option) is tuple for option in (annotation, *get_args(annotation)))
