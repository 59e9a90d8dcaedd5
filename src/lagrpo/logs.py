"""Where records of the logger "lagrpo" go, and what is masked in all that lagrpo prints and records.

The command line prints records; a run shows them in its display. A program that uses lagrpo as a library decides by its
own handlers.
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
_NAME = r"(?:[\w.-]*[_.-])?(?:api)?(?:key|token|secret|password|credentials?)"
_VALUE = r"""(?:'[^']*'?|"[^"]*"?|[^\s&'"#,;)]+)"""
_OPTION = re.compile(rf"(?<![\w.-])((?=--){_NAME}\s+|{_NAME}=|bearer\s+){_VALUE}", re.IGNORECASE)
_USER = re.compile(r"""(?<!\w)(\w++:/{1,2})[^\s/@'"]++@""")


def is_secret(name: str) -> bool:
    """Whether a setting, option or variable of that name holds a secret: HF_TOKEN, --api-key; not max_tokens."""
    return re.fullmatch(_NAME, name, re.IGNORECASE) is not None


def redact(text: str) -> str:
    """The text with *** for the values of --token X, token=X and Bearer X, and for the user of a URL."""
    return _OPTION.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def redact_values(value: Any, name: str = "") -> Any:
    """The value as JSON has it, a date or a path as text, without the secrets in texts and under names of secrets."""
    if isinstance(value, Mapping):
        return {str(key): redact_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return HIDDEN if value and is_secret(name) else redact(str(value))


DEBUG = "LAGRPO_DEBUG"  # environment variable that `--debug` sets; worker processes inherit it


def is_debugging() -> bool:
    """True if errors show their tracebacks, not only their messages."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def print_traceback(error: BaseException) -> None:
    """Print the traceback of an error, with its causes, to standard error if the user wants to see it."""
    if is_debugging():
        print(
            redact("".join(traceback.format_exception(error))), file=sys.stderr, end="", flush=True
        )


def print_line(text: str) -> None:
    """Print to standard error."""
    print(f"lagrpo: {text}", file=sys.stderr, flush=True)


class Lines(logging.Handler):
    """Hands each record from a level upwards to `show`, as a line of text."""

    def __init__(self, show: Callable[[str], None], level: int) -> None:
        super().__init__(level)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(redact(self.format(record)))


def print_records() -> None:
    """From now on, print every record from INFO upwards to standard error."""
    logger.handlers = [*_handlers_of_others(), Lines(print_line, logging.INFO)]
    logger.setLevel(logging.INFO)


@contextmanager
def shown_by(show: Callable[[str], None], level: int = logging.INFO) -> Iterator[None]:
    """Inside, `show` gets every record from a level upwards as a line; standard error gets none."""
    before = logger.handlers, logger.level
    logger.handlers = [*_handlers_of_others(), Lines(show, level)]
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers = before[0]
        logger.setLevel(before[1])


def _handlers_of_others() -> list[logging.Handler]:
    return [handler for handler in logger.handlers if not isinstance(handler, Lines)]
