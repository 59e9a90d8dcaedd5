"""Rewards of an answer's shape, whatever it says: its length and its format."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from lagrpo.tasks.rewards import Answer


@dataclass(frozen=True)
class Length:
    """The shorter, the better: 1 up to `target` tokens, 0 from `limit` tokens on. Between them, with
    x = (tokens - target) / (limit - target), `linear` gives 1 - x: the soft overlong punishment of DAPO (Yu et al.,
    arXiv 2503.14476, Eq. 13) plus 1. `cosine` gives (1 + cos(pi x)) / 2: CosFn of Yeo et al. (arXiv 2502.03373) from 1
    to 0, which is flat at both ends. Like every constant, that 1 drops out of a group's advantages. A completion that
    was cut at the token limit counts with the tokens that it has."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic's name for how options are checked
    takes = "answer"

    limit: int
    target: int = 0
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if not 0 <= self.target < self.limit:
            raise ValueError(f"target = {self.target} and limit = {self.limit}: 0 <= target < limit is needed")

    def __call__(self, answer: Answer) -> float:
        x = min(1.0, max(0.0, (answer.tokens - self.target) / (self.limit - self.target)))
        return 1 - x if self.shape == "linear" else (1 + math.cos(math.pi * x)) / 2


@dataclass(frozen=True)
class Format:
    """1 where the whole answer has the format, else 0. The format is a regular expression (`pattern`, in which . is
    any character, a newline too), or these tags in this order, each once, with something between them and nothing but
    white space around them: by default <think>...</think> <answer>...</answer>, as in DeepSeek-R1 (arXiv 2501.12948).
    Special tokens are not a part of the text."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - as above
    takes = "text"

    pattern: str | None = None
    tags: tuple[str, ...] = ("think", "answer")

    def __post_init__(self) -> None:
        if self.pattern is not None and self.tags != ("think", "answer"):
            raise ValueError("pattern and tags are two ways to say the format: set one of them")
        if self.pattern is None and not self.tags:
            raise ValueError("tags is empty: name at least one, or set pattern")
        if "" in self.tags or len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags = {list(self.tags)}: each has a name of its own, as each stands there once")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern = {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, text: str, gold: Any) -> float:
        if self.pattern is not None:
            return float(re.fullmatch(self.pattern, text, re.DOTALL) is not None)
        if any(text.count(tag) != 1 for name in self.tags for tag in (f"<{name}>", f"</{name}>")):
            return 0.0
        rest = text.strip()
        for name in self.tags:
            inside, _, behind = rest.removeprefix(f"<{name}>").partition(f"</{name}>")
            if not rest.startswith(f"<{name}>") or not inside.strip():
                return 0.0
            rest = behind.lstrip()
        return float(not rest)
