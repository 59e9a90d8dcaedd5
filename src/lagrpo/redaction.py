"""Secrets are left out of what is written and printed: logs, errors, environment.json, the reasons of judges.

A secret is the value of an environment variable whose name says so (HF_TOKEN, OPENAI_API_KEY), what stands before the @
of a URL, and the value of an option or a parameter with such a name (--api-key X, ?token=X)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HIDDEN = "***"
WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}
SHORTEST = 8  # characters of an environment variable's value that is looked for: shorter ones stand in any text
PARTS = 256  # characters: a secret that a cut may have left without what tells that it is one is shorter
_OPTION = re.compile(r"(?<![\w.-])([\w.-]++)\s++")
_ASSIGNED = re.compile(r"(?<![\w.-])([\w.-]++)=")
_WORD = re.compile(r"""'[^']*(?:'|\Z)|"[^"]*(?:"|\Z)|[^\s'"]+""")
_PARAMETER = re.compile(r"""'[^']*(?:'|\Z)|"[^"]*(?:"|\Z)|[^\s&'"#,;)]+""")
_USER = re.compile(r"""(?<!\w)(\w++:/{1,2})[^\s/@'"]++@""")


def is_secret(name: str) -> bool:
    """Whether a variable, an option or a parameter of that name holds a secret.

    >>> [is_secret(name) for name in ("HF_TOKEN", "--api-key", "max_tokens", "--tokenizer")]
    [True, True, False, False]
    """
    return not WORDS.isdisjoint(re.split(r"[^a-z0-9]+", name.lower()))


def find_secret_option(words: Iterable[str]) -> str | None:
    """The first option on a command line whose value is a secret."""
    names = (word.partition("=")[0] for word in words if word.startswith("--"))
    return next(filter(is_secret, names), None)


def find_secret(table: Any, prefix: str = "") -> str | None:
    """The name of the first text in a table, or the tables in it, that is a secret by its name; that of an environment
    variable is none.

    >>> find_secret({"url": "x", "body": {"api_key": "sk-1", "max_tokens": 3}}), find_secret({"api_key_env": "KEY"})
    ('body.api_key', None)
    """
    if isinstance(table, list | tuple):
        return next(filter(None, (find_secret(part, prefix) for part in table)), None)
    for name, value in table.items() if isinstance(table, Mapping) else ():
        if isinstance(value, str) and is_secret(str(name)) and not str(name).endswith("_env"):
            return f"{prefix}{name}"
        if found := find_secret(value, f"{prefix}{name}."):
            return found
    return None


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with *** in place of secrets.

    >>> redact("lagrpo --api-key abc http://me:pw@host/?token=abc&n=1 key", {})
    'lagrpo --api-key *** http://***@host/?token=***&n=1 key'
    """
    for value in _values(environment):
        text = text.replace(value, HIDDEN)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _hide(text, _OPTION, _WORD, lambda word: is_secret(word.partition("--")[2]))
    return _hide(text, _ASSIGNED, _PARAMETER, is_secret)


def redact_start(text: str, most: int, environment: Mapping[str, str] = os.environ) -> str:
    """About the first `most` characters of a text of any length, with *** in place of secrets and without a part of one
    at the end."""
    shown = redact(text[:most], environment)
    return shown if len(text) <= most else shown[: -max(map(len, [*_values(environment), " " * PARTS]))]


def _values(environment: Mapping[str, str]) -> list[str]:
    """The secrets of an environment, the longest first."""
    values = {value for name, value in environment.items() if is_secret(name) and len(value) >= SHORTEST}
    return sorted(values, key=len, reverse=True)


def _hide(text: str, name: re.Pattern[str], value: re.Pattern[str], hides: Callable[[str], bool]) -> str:
    """The text with *** in place of each value that stands right behind a name that hides it. In linear time."""
    pieces, end = [], 0
    for found in name.finditer(text):
        if found.start() >= end and hides(found[1]) and (hidden := value.match(text, found.end())):
            pieces += [text[end : found.end()], HIDDEN]
            end = hidden.end()
    return "".join([*pieces, text[end:]])
