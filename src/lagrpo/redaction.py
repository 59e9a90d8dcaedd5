"""Secrets are kept out of what a run records and prints: a value behind a name that looks like a token is masked."""

from __future__ import annotations

import re

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
