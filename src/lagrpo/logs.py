"""Handlers of the logger "lagrpo", and the masking of secrets in printed and recorded text.

The command line prints log records; a run shows them in its display. A program that uses lagrpo as
a library decides by its own handlers.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("lagrpo")

HIDDEN = "***"

# The name of an option or variable that holds a secret: api_key, HF_TOKEN …
_NAME = r"(?:[\w.-]*[_.-])?(?:api)?(?:key|token|secret|password|credentials?)"
# A value, in quotes or up to a separator.
_VALUE = r"""(?:'[^']*'?|"[^"]*"?|[^\s&'"#,;)]+)"""
# --token X, token=X or Bearer X; the group is the part before the secret.
_OPTION = re.compile(rf"(?<![\w.-])((?=--){_NAME}\s+|{_NAME}=|bearer\s+){_VALUE}", re.IGNORECASE)
# The user and password of a URL; the group is the part before them.
_USER = re.compile(r"""(?<!\w)(\w++:/{1,2})[^\s/@'"]++@""")


def is_secret(name: str) -> bool:
    """Returns True if a setting, option or variable of that name holds a secret.

    HF_TOKEN and --api-key do, max_tokens does not.
    """
    return re.fullmatch(_NAME, name, re.IGNORECASE) is not None


def redact(text: str) -> str:
    """Returns the text with *** for secrets.

    They are the values of --token X, token=X and Bearer X, and the user of a URL.
    """
    without_users = _USER.sub(rf"\1{HIDDEN}@", text)
    return _OPTION.sub(rf"\1{HIDDEN}", without_users)


def redact_values(value: Any, name: str = "") -> Any:
    """Returns the value in types of JSON, with *** for secrets in texts and under names of secrets.

    A date or a path becomes a text.
    """
    if isinstance(value, Mapping):
        return {str(key): redact_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if value and is_secret(name):
        return HIDDEN
    return redact(str(value))


DEBUG = "LAGRPO_DEBUG"
"""The environment variable that `--debug` sets. Worker processes inherit it."""


def is_debugging() -> bool:
    """True if errors show their tracebacks, not only their messages."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def print_traceback(error: BaseException) -> None:
    """Prints the traceback of an error, with its causes, to standard error, if debugging is on."""
    if is_debugging():
        text = "".join(traceback.format_exception(error))
        print(redact(text), file=sys.stderr, end="", flush=True)


def print_line(text: str) -> None:
    """Prints a line of lagrpo to standard error."""
    print(f"lagrpo: {text}", file=sys.stderr, flush=True)


class Lines(logging.Handler):
    """A handler that passes each record from a level upwards to `show`, as a line of text."""

    def __init__(self, show: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(redact(self.format(record)))


def print_records() -> None:
    """Prints every record from INFO upwards to standard error from now on."""
    logger.handlers = [*_handlers_of_others(), Lines(print_line, logging.INFO)]
    logger.setLevel(logging.INFO)


@contextmanager
def shown_by(show: Callable[[str], None], level: int = logging.INFO) -> Iterator[None]:
    """Passes every record from a level upwards to `show` inside, as a line.

    Standard error gets none.
    """
    handlers_before = logger.handlers
    level_before = logger.level
    logger.handlers = [*_handlers_of_others(), Lines(show, level)]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = handlers_before
        logger.setLevel(level_before)


def _handlers_of_others() -> list[logging.Handler]:
    """Returns the handlers that the program around lagrpo has set."""
    return [handler for handler in logger.handlers if not isinstance(handler, Lines)]
