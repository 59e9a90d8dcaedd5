"""Built-in rewards that need no task: equality, length, format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.rewards.reward import UnscorableError, accept_any

TAGS = ("think", "answer")
"""The tags of the reward `format` without options."""


@accept_any
def exact(completion: str, answer: Any) -> float:
    """1.0 if the completion is the answer letter by letter, except for white space around either; else 0.0. The answer
    5.0 is also 5, and True is also true."""
    if answer is None or not str(answer).strip():
        raise UnscorableError("the reference answer is empty")
    if isinstance(answer, Mapping):
        raise UnscorableError("the reference answer is a whole row: set task.answer_column")
    text = str(answer).strip()
    same = (
        text.lower()
        if isinstance(answer, bool)
        else text.removesuffix(".0")
        if isinstance(answer, float)
        else text
    )
    return float(completion.strip() in (text, same))


def length(
    completion: str, num_tokens: int, *, limit: int, target: int = 0, shape: str = "linear"
) -> float:
    """The shorter, the better: 1 up to `target` tokens, 0 from `limit` tokens on. Between them, with
    x = (tokens - target) / (limit - target), shape linear gives 1 - x: the soft overlong punishment of DAPO (arXiv
    2503.14476, Eq. 13) plus 1. Shape cosine gives (1 + cos(pi x)) / 2: CosFn of Yeo et al. (arXiv 2502.03373) from 1
    to 0."""
    if not 0 <= target < limit:
        raise ValueError(f"target = {target}, limit = {limit}: set 0 <= target < limit")
    if shape not in ("linear", "cosine"):
        raise ValueError(f"shape = {shape!r}: use 'linear' or 'cosine'")
    x = min(1.0, max(0.0, (num_tokens - target) / (limit - target)))
    return 1 - x if shape == "linear" else (1 + math.cos(math.pi * x)) / 2


def format(
    completion: str,
    prefix: str = "",
    *,
    pattern: str | None = None,
    tags: Sequence[str] | None = None,
) -> float:
    """1 if the whole answer has the format, else 0. The answer is the completion after `prefix`, what the prompt begins
    it with. The format is a regular expression (`pattern`, in which . is any character), or these tags in this order,
    each once, with something between them and only white space around them: by default <think>...</think>
    <answer>...</answer>, as in DeepSeek-R1 (arXiv 2501.12948)."""
    text = prefix + completion
    if pattern is not None and tags is not None:
        raise ValueError("pattern and tags both define the format: set one of them")
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    names = TAGS if tags is None else tags
    if not names or "" in names or len(set(names)) < len(names):
        raise ValueError(f"tags = {list(names)}: name at least one tag, each once")
    if any(text.count(tag) != 1 for name in names for tag in (f"<{name}>", f"</{name}>")):
        return 0.0
    blocks = [rf"<{re.escape(name)}>\s*+\S.*?</{re.escape(name)}>" for name in names]
    return float(re.fullmatch(r"\s*".join(["", *blocks, ""]), text, re.DOTALL) is not None)


def format_example(tags: Sequence[str] | None) -> str:
    """A text with the format of these tags.

    >>> format_example(None)
    '<think>1</think> <answer>1</answer>'
    """
    return " ".join(f"<{tag}>1</{tag}>" for tag in (TAGS if tags is None else tags))
