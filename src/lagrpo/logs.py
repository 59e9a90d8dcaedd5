"""Printing: text that is safe to show, handlers of the logger "lagrpo", and masked secrets.

The command line prints log records; a run shows them in its display. A program that uses lagrpo as
a library decides by its own handlers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import IO, Any

logger = logging.getLogger("lagrpo")

HIDDEN = "***"

# By name

# The last word of a name that holds a secret: DB_PASSWORD, PGPASSWORD, clientSecret.
_SECRET_WORD = re.compile(
    r"\w*(?:password|passwd|secret|apikey|authtoken|accesstoken)s?"
    r"|passphrase|pwd|credentials?|auth|authorization|cookies?|jwt"
)
# The last word of a name that holds a secret, unless an ordinary word stands before it.
_OPENING_WORD = re.compile(r"key|token|pass")
# stop_token, answer_key, public_key, first_pass
_ORDINARY_WORD = re.compile(
    r"""
      stop|eos|bos|pad|unk|sep|cls|mask|end|start|begin|eot|eom|fim|prefix|suffix|middle|special
    | image|audio|video|think|tool|boundary|separator|next|last|first|previous|prev|new|per
    | max|min|num|mean|total|cached|generated|reserved|forward|backward|second|single|one|two
    | prompt|question|answer|solution|completion|response|text|label|reward|score|row|column
    | input|output|reference|gold|messages?|system|user|assistant|metric|field|record
    | sort|group|primary|foreign|partition|index|cache|map|dict|id|name|json|lookup|rng|public
    """,
    re.VERBOSE,
)
# Plurals hold secrets only behind such a word: api_keys, but not max_tokens.
_SECRET_PLURAL = re.compile(r"(?:api|access|auth|secret|private|refresh|bearer|hf) (?:keys|tokens)")

# By form

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# The user and password of a URL; the group is the part before them.
_USER = re.compile(r"""(?<!\w)(\w++:/{1,2})[^\s/'"]+@""")
# The group is the part before the secret.
_HEADER = re.compile(
    r"""
    (?i: ( authorization \\*["']? \s*[:=]\s* \\*["']?
           (?: basic|bearer|token|digest|negotiate|apikey|key ) \s+ ) [^\s'",;)\\]+
       | ( cookie \\*["']? \s*:\s* \\*["']? ) [\w.-]+ = [^\r\n'"\\]+ )
    # Prose has words here: the form has to look like a token.
    | ( \b Bearer \s+ ) (?! (?i: token|auth|scheme|certificate ) ) [^\s'",;)\\]{6,}
    | ( \b (?i: bearer ) \s+ ) (?= [^\s]*\d ) [^\s'",;)\\]{6,}
    | ( \b Basic \s+ ) (?= \S* (?: = | [a-z][A-Z] ) ) [A-Za-z0-9+/]{8,}={0,2}
    """,
    re.VERBOSE,
)
_TOKEN = re.compile(
    r"""
    (?<![\w-]) (?:
        hf_[A-Za-z0-9]{16,}
      | sk-[A-Za-z0-9]{20,}
      | sk-(?=[\w-]*\d)[\w-]{16,}
      | [sr]k_(?:live|test)_[A-Za-z0-9]{16,}
      | gh[opsur]_[A-Za-z0-9]{16,} | github_pat_\w{20,} | glpat-[\w-]{16,}
      | xox[abeoprs]-[\w-]{10,}
      | (?:AKIA|ASIA)[A-Z0-9]{16}
      | AIza[\w-]{30,} | ya29\.[\w-]{16,}
      | gsk_[A-Za-z0-9]{20,} | nvapi-[\w-]{20,} | xai-[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{20,}
      | npm_[A-Za-z0-9]{20,} | pypi-[\w-]{16,}
      | eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?   # JWT
    )
    """,
    re.VERBOSE,
)
# A name and what separates it from its value: token=, "token": , api_key = , --token .
_NAME = re.compile(
    r"""
    (?<![\w.-])
    (?: (?P<option> --[\w.-]{1,100}+ ) \s+ (?! --)
      | (?P<name> -{0,2} [A-Za-z_] [\w.-]{0,100}+ ) (?P<quote> \\*["'] )? (?P<sign> \s*+[:=]\s*+ ) )
    """,
    re.VERBOSE,
)
# In quotes, in brackets, or up to a separator.
_VALUE = re.compile(
    r"""(?P<mark>\\*["']).*?(?:(?P=mark)|\Z)|\[[^][]*]?|\{[^{}]*}?|[^\s&'"#,;)}\]\\]+""", re.DOTALL
)
_NOT_A_SECRET = re.compile(
    r"(?i)null|none|true|false|str|string|bytes|optional|any|[\"'\\]*(?:\*{3})?[\"'\\]*"
)


@lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Returns True if a setting, option or variable of that name holds a secret.

    HF_TOKEN, --api-key and task.options.auth.user do; max_tokens and stop_token do not.
    """
    return any(_is_secret(_split_words(part)) for part in name.split("."))


def _split_words(name: str) -> list[str]:
    """Returns the words of a name in lower case: x-api-key and apiKey have the last word key."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return [word.lower() for word in words]


def _is_secret(words: Sequence[str]) -> bool:
    last_word = words[-1] if words else ""
    word_before = words[-2] if len(words) > 1 else ""
    if _OPENING_WORD.fullmatch(last_word):
        return _ORDINARY_WORD.fullmatch(word_before) is None
    is_plural = _SECRET_PLURAL.fullmatch(f"{word_before} {last_word}") is not None
    return is_plural or _SECRET_WORD.fullmatch(last_word) is not None


def redact(text: str) -> str:
    """Returns the text with *** for secrets.

    They are values behind names of secrets (--token X, token=X, "token": "X"), and texts in the
    form of a secret: the user and the signature of a URL, an Authorization header, tokens of
    well-known services, private keys. Prose that only speaks of passwords stays.
    """
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(lambda match: f"{match[match.lastindex or 0]}{HIDDEN}", text)
    text = _TOKEN.sub(HIDDEN, text)
    return _redact_named(text)


def _redact_named(text: str) -> str:
    """Returns the text with *** for values behind names of secrets."""
    parts: list[str] = []
    end = 0
    for match in _NAME.finditer(text):
        name = match["option"] or match["name"]
        is_signature = name.lower().endswith(("sig", "signature"))
        if match.start() < end or not (is_signature or is_secret(name)):
            continue
        value = _VALUE.match(text, match.end())
        if value is None or _NOT_A_SECRET.fullmatch(value[0]):
            continue
        if _is_secret_value(match, value):
            parts += [text[end : match.end()], HIDDEN]
            end = value.end()
    return "".join([*parts, text[end:]])


def _is_secret_value(match: re.Match[str], value: re.Match[str]) -> bool:
    """True if the value behind a name of a secret, `match`, is a secret, not prose or code."""
    if match["option"]:
        return True
    character_before = match.string[match.start() - 1 : match.start()]
    is_end_of_quote = not match["quote"] and value["mark"] == character_before
    if is_end_of_quote:
        # print("token:", 5)
        return False
    name = match["name"]
    if not is_secret(name):
        # The signature of a URL, or of a function.
        return match["sign"] == "=" and (character_before in ("?", "&") or len(value[0]) >= 16)
    words = _split_words(name)
    is_opening_word = _OPENING_WORD.fullmatch(words[-1]) is not None
    if value["mark"]:
        return True
    if match["quote"] and value[0].isdecimal():
        return not is_opening_word
    if value[0][0] in "[{":
        return bool(match["quote"]) or not is_opening_word
    # A header or an assignment. Behind the names of settings, messages have prose.
    is_assigned = match["sign"] == "=" or (len(words) > 1 and "." not in name)
    if is_assigned and not match["quote"]:
        return True
    # "password: hunter2", but not "The password: choose a long one".
    return re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z]).{7,}", value[0]) is not None


def redact_values(value: Any, name: str = "") -> Any:
    """Returns the value in types of JSON, with *** for secrets in texts and under names of secrets.

    Everything below a name of a secret is one, also in a text of JSON. A date or a path becomes a
    text.
    """
    if isinstance(value, Mapping):
        return _redact_table(value, name)
    if isinstance(value, list | tuple):
        return _redact_list(value, name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        # Under `token` and `key` a number is an id or an index.
        is_number_of_secret = is_secret(name) and not _OPENING_WORD.fullmatch(
            _split_words(name)[-1]
        )
        return HIDDEN if is_number_of_secret else value
    if value and is_secret(name):
        return HIDDEN
    return _redact_json(str(value))


def _redact_table(table: Mapping[Any, Any], name: str) -> dict[str, Any]:
    if is_secret(name):
        return {str(key): redact_values(item, name) for key, item in table.items()}
    redacted = {str(key): redact_values(item, str(key)) for key, item in table.items()}
    # An entry such as {"name": "x-api-key", "value": "…"}.
    title = table.get("name", table.get("key"))
    if "value" in table and isinstance(title, str):
        redacted["value"] = redact_values(table["value"], title)
    return redacted


def _redact_list(items: Sequence[Any], name: str) -> list[Any]:
    """Returns the items, in which the words behind an option such as --token are secrets, too."""
    redacted: list[Any] = []
    option = ""
    for item in items:
        if isinstance(item, str) and item.startswith("--"):
            option = item
            redacted.append(redact_values(item, name))
        elif is_secret(option) and "=" not in option:
            redacted.append(redact_values(item, option))
        else:
            redacted.append(redact_values(item, name))
    is_pair = len(items) == 2 and isinstance(items[0], str)
    if is_pair and len(_split_words(items[0])) > 1 and is_secret(items[0]):
        # A header, ["x-api-key", "…"].
        redacted[1] = redact_values(items[1], items[0])
    return redacted


def _redact_json(text: str) -> str:
    """Returns a text, in which JSON is read, so that secrets at any depth are found."""
    if text.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            redacted = redact_values(value)
            return redact(text) if redacted == value else json.dumps(redacted, ensure_ascii=False)
    return redact(text)


def find_secret(value: Any, name: str) -> str | None:
    """Returns the name of the first entry, at any depth, that holds a secret; None without one.

    `name` is the name of the value itself.
    """
    if isinstance(value, Mapping) and not is_secret(name):
        for key, item in value.items():
            found = find_secret(item, f"{name}.{key}")
            if found is not None:
                return found
        return None
    # Both as texts, in which a date is equal to itself as text, and NaN to NaN.
    is_hidden = json.dumps(redact_values(value, name)) != json.dumps(value, default=str)
    return name if is_hidden else None


# Control characters other than newline and tab can move the cursor, recolor the terminal or set
# its title. Bidirectional controls reorder a line, and zero-width characters and tags hide text.
# The joiners U+200C and U+200D and the marks U+200E and U+200F stay: scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Returns a text of any origin, safe to print.

    ASCII control characters other than newline and tab become their pictures (ESC is ␛). Other
    characters that act on the text around them, or cannot be seen, become their codes.

    >>> visible("a\\x1b[31mb\\u202ec")
    'a␛[31mb\\\\u202ec'
    """
    return _UNSEEN.sub(_show_character, text)


def _show_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


OUTPUT = "the output"
"""The name of standard output and standard error in errors."""


def print_text(
    text: str, *, file: IO[str] | None = None, end: str = "\n", flush: bool = False
) -> None:
    """Prints a text that may have parts from anywhere, as `visible` shows it.

    Everything that lagrpo prints passes here, or is a `Text` of terminal/text.py. Raises
    BrokenPipeError if the reader has gone, and OSError for a full disk.
    """
    try:
        print(visible(text), file=file, end=end, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, OUTPUT) from error


DEBUG = "LAGRPO_DEBUG"
"""The environment variable that `--debug` sets. Worker processes inherit it."""


def is_debugging() -> bool:
    """True if errors show their tracebacks, not only their messages."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def print_traceback(error: BaseException) -> None:
    """Prints the traceback of an error, with its causes, to standard error, if debugging is on."""
    if is_debugging():
        text = "".join(traceback.format_exception(error))
        print_text(redact(text), file=sys.stderr, end="", flush=True)


def print_line(text: str) -> None:
    """Prints a line of lagrpo to standard error."""
    print_text(f"lagrpo: {text}", file=sys.stderr, flush=True)


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
