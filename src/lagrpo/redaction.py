"""Secrets are left out of what is written and printed: logs, errors, environment.json, the reasons of judges.

A secret is the value of an environment variable whose name says so (HF_TOKEN, OPENAI_API_KEY), what stands before the @
of a URL, and the value of an option or a parameter with such a name (--api-key X, ?token=X)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

HIDDEN = "***"
WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}
SHORTEST = 8  # characters of an environment variable's value that is looked for: shorter ones stand in any text
_NAME = rf"[\w.-]*(?<![A-Za-z0-9])(?:{'|'.join(sorted(WORDS))})(?![A-Za-z0-9])[\w.-]*"
_OPTION = re.compile(rf"""(--{_NAME}\s+)('[^']*'|"[^"]*"|[^\s'"]+)""", re.IGNORECASE)
_ASSIGNED = re.compile(rf"""({_NAME}=)('[^']*'|"[^"]*"|[^\s&'"#,;)]+)""", re.IGNORECASE)
_USER = re.compile(r"""(\w+:/{1,2})[^\s/@'"]+@""")


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


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """The text with *** in place of secrets.

    >>> redact("lagrpo --api-key abc http://me:pw@host/?token=abc&n=1 key", {})
    'lagrpo --api-key *** http://***@host/?token=***&n=1 key'
    """
    values = {value for name, value in environment.items() if is_secret(name) and len(value) >= SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    for pattern in (_OPTION, _ASSIGNED):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text
