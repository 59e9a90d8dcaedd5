"""Options that are passed on to vLLM."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lagrpo.redaction import is_secret


def split_options(options: Sequence[str]) -> tuple[str, ...]:
    """Options of vLLM as a shell would split them, whether they came as one string or as several. Raises ValueError,
    without the value, for one that holds a secret, as every user can read a command line.

    >>> split_options(["--seed 3", "--dtype=float16"])
    ('--seed', '3', '--dtype=float16')
    """
    words = tuple(word for option in options for word in shlex.split(option))
    names = (word.partition("=")[0] for word in words if word.startswith("--"))
    if secret := next(filter(is_secret, names), None):
        raise ValueError(
            f"server_args: {secret!r} holds a secret, and every user can read a command line (ps): set an environment "
            "variable (HF_TOKEN, LAGRPO_VLLM_API_KEY), which servers inherit"
        )
    return words
