"""The command line: from words to changes of settings, and the help of commands that take settings.

Words stay text here. `load_settings` validates them together with the settings of a file.
"""

from __future__ import annotations

import argparse
import inspect
import re
import tomllib
from collections.abc import Sequence
from typing import NoReturn, get_args

from pydantic.fields import FieldInfo

from lagrpo.errors import SettingsError
from lagrpo.settings.load import TABLES, list_settings, suggest_setting
from lagrpo.settings.schema import Settings
from lagrpo.settings.section import Table, is_list

SHORT = {"--task": "--task.name", "--model": "--model.path", "--recipe": "--loss.recipe"}

ONLY_IN_FILES = "eval.sets"
"""A list of tables, which words cannot write."""


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's words. Raises SettingsError for wrong words."""

    def __init__(self) -> None:
        # A shortened name would become ambiguous with the next setting that begins like it.
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def read_words(
    parser: CommandParser, words: Sequence[str], sections: Sequence[str]
) -> tuple[Table, Table]:
    """Returns a command's own arguments, and the settings of these sections that the words change.

    `parser` has the command's own arguments. Raises SettingsError for wrong words.
    """
    other_words, tables = split_tables([spell_out(word) for word in words])
    fields = _fields_for_words(sections)
    for name, field in fields.items():
        nargs = "*" if is_list(field) else None
        parser.add_argument(f"--{name}", dest=name, nargs=nargs, default=argparse.SUPPRESS)
    namespace, unknown_words = parser.parse_known_args(other_words)
    if unknown_words:
        raise SettingsError(_describe_unknown(unknown_words[0]))
    arguments = vars(namespace)
    changes: Table = {}
    for name, field in fields.items():
        if name in arguments:
            changes[name] = _read_option(arguments.pop(name), field)
    return arguments, changes | tables


def spell_out(word: str) -> str:
    """Returns a word with the full name of its option, if it has one.

    >>> spell_out("--recipe=dapo"), spell_out("--run.output-dir"), spell_out("--dry_run")
    ('--loss.recipe=dapo', '--run.output_dir', '--dry-run')
    """
    option, equals, value = word.partition("=")
    # With a space it is a value, such as '--gpu-memory-utilization 0.3' for vLLM.
    if not option.startswith("--") or " " in option:
        return word
    name = SHORT.get(option, option).removeprefix("--")
    is_setting = "." in name
    name = name.replace("-", "_") if is_setting else name.replace("_", "-")
    return f"--{name}{equals}{value}"


def _fields_for_words(sections: Sequence[str]) -> dict[str, FieldInfo]:
    """Returns the settings of these sections that have an option, by their full names."""
    return {
        name: field
        for name, field in list_settings().items()
        if name.partition(".")[0] in sections
        and "." in name
        and name not in (*TABLES, ONLY_IN_FILES)
    }


def _read_option(value: str | list[str], field: FieldInfo) -> str | tuple[str, ...] | None:
    """Returns the value of a setting's option. None unsets the setting, and empties a list."""
    may_be_unset = type(None) in get_args(field.annotation)
    if may_be_unset and value in ("None", ["None"]):
        return None
    if value == ["None"]:
        return ()
    return tuple(value) if isinstance(value, list) else value


def _describe_unknown(word: str) -> str:
    """Returns what is wrong with a word that no argument takes."""
    if not word.startswith("--"):
        return f"{word!r} is neither an option nor the value of one"
    name = word.removeprefix("--").partition("=")[0]
    if name == ONLY_IN_FILES:
        return f"{name} is a list of tables: write it into a settings file"
    if name in list_settings():
        return f"--{name} is not an option of this command"
    # Settings of other trainers have underscores, which options of a command have not.
    return f"unknown option {word!r}; {suggest_setting(name.replace('-', '_'), Settings)}"


def split_tables(words: Sequence[str]) -> tuple[list[str], Table]:
    """Returns the words without the entries of TABLES, and these entries, with values as in TOML.

    >>> split_tables(["demo", "--task.options.digits", "2", "--loss.overrides.surrogate=clipped"])
    (['demo'], {'task.options.digits': 2, 'loss.overrides.surrogate': 'clipped'})
    """
    table_prefixes = tuple(f"{table}." for table in TABLES)
    other_words: list[str] = []
    entries: dict[str, list[str]] = {}
    entry = ""  # the entry that the next words are values of, if any
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            entry = name if name.startswith(table_prefixes) else ""
            if entry:
                entries[entry] = [value] if equals else []
                continue
        if entry:
            entries[entry].append(word)
        else:
            other_words.append(word)
    tables: Table = {}
    for name, entry_words in entries.items():
        values = [_read_value(word) for word in entry_words]
        # One word is a value; several, or none after the option, are a list.
        tables[name] = values[0] if len(values) == 1 else values
        if entry_words == ["None"]:
            tables[name] = None
    return other_words, tables


def _read_value(word: str) -> object:
    """Returns the value of a word in TOML, or in Python (True, .5), else the word."""
    if word in ("True", "False"):
        text = word.lower()
    else:
        text = re.sub(r"^-?(?=\.\d)", r"\g<0>0", word)  # TOML writes .5 as 0.5
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return word


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
            full_name = f"{section}.{name}"
            if full_name == ONLY_IN_FILES or name in unused:
                continue
            if full_name in TABLES:
                lines.append(f"  --{full_name + '.NAME':<32} {field.description}")
            else:
                value_text = _help_value(getattr(values, name))
                lines.append(f"  --{full_name:<32} {field.description}{value_text}")
    return "\n".join(lines)


def _help_value(value: object) -> str:
    """Returns a value as the help shows it, such as " [4]"; nothing if it is unset."""
    if value in (None, ()):
        return ""
    entries = value if isinstance(value, tuple) else [value]
    words = [getattr(entry, "name", str(entry)) for entry in entries]  # rewards have names
    return f" [{' '.join(words)}]"
