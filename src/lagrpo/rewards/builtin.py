"""Built-in rewards that need no task: equality, length, format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from lagrpo.rewards.reward import UnscorableError, accept_any
from lagrpo.rewards.texts import normal_form, read_answer

TAGS = ("think", "answer")
"""The tags of the reward `format` without options."""


@accept_any
def exact(completion: str, answer: object, prefix: str = "") -> float:
    """Returns 1.0 if the completion is the answer letter by letter, else 0.0.

    What the model thinks before </think> does not count, nor white space around either text. Both
    are compared in normal form (`lagrpo.rewards.texts`). An answer that is a float may be written
    in any way: 5.0 as 5, and 1e-05 as 0.00001. True may be written true. Raises UnscorableError for
    an answer that is empty or a whole row.
    """
    if answer is None or not str(answer).strip():
        raise UnscorableError("the reference answer is empty")
    if isinstance(answer, Mapping):
        raise UnscorableError("the reference answer is a whole row: set task.answer_column")
    text = read_answer(completion, prefix).strip()
    if isinstance(answer, float):
        return float(_names_number(text, answer))
    answer_text = normal_form(str(answer)).strip()
    accepted_texts = [answer_text]
    if isinstance(answer, bool):
        accepted_texts.append(answer_text.lower())
    return float(text in accepted_texts)


def _names_number(text: str, number: float) -> bool:
    """True if the text is the number that Python prints in the fewest digits, however written."""
    try:
        return Decimal(text) == Decimal(repr(float(number)))
    except InvalidOperation:
        return False


def length(
    completion: str,  # noqa: ARG001 - it tells the signature
    num_tokens: int,
    *,
    limit: int,
    target: int = 0,
    shape: str = "linear",
) -> float:
    """Returns a reward for short completions: 1 up to `target` tokens, 0 from `limit` tokens on.

    Between them, with x = (tokens - target) / (limit - target):

        shape linear   1 - x, the soft overlong punishment of DAPO (arXiv 2503.14476, Eq. 13) plus 1
        shape cosine   (1 + cos(pi x)) / 2, CosFn of Yeo et al. (arXiv 2502.03373) from 1 to 0
    """
    if not 0 <= target < limit:
        raise ValueError(f"target = {target}, limit = {limit}: set 0 <= target < limit")
    if shape not in ("linear", "cosine"):
        raise ValueError(f"shape = {shape!r}: use 'linear' or 'cosine'")
    x = min(1.0, max(0.0, (num_tokens - target) / (limit - target)))
    if shape == "linear":
        return 1 - x
    return (1 + math.cos(math.pi * x)) / 2


def format(
    completion: str,
    prefix: str = "",
    *,
    pattern: str | None = None,
    tags: Sequence[str] | None = None,
) -> float:
    """Returns 1 if the whole answer has the format, else 0.

    The answer is the completion after `prefix`, the text with which the prompt begins it. The
    format is a regular expression (`pattern`, in which . is any character), or `tags`: each once
    and in this order, with text inside and only white space around them. The default is
    <think>...</think> <answer>...</answer>, as in DeepSeek-R1 (arXiv 2501.12948).
    """
    text = prefix + completion
    if pattern is not None and tags is not None:
        raise ValueError("pattern and tags both define the format: set one of them")
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    names = TAGS if tags is None else tags
    if not names or "" in names or len(set(names)) < len(names):
        raise ValueError(f"tags = {list(names)}: name at least one tag, each once")
    for name in names:
        if text.count(f"<{name}>") != 1 or text.count(f"</{name}>") != 1:
            return 0.0
    # *+ does not backtrack: a block of nothing but white space fails in linear time.
    blocks = [rf"<{re.escape(name)}>\s*+\S.*?</{re.escape(name)}>" for name in names]
    spaced_blocks = r"\s*".join(["", *blocks, ""])
    return float(re.fullmatch(spaced_blocks, text, re.DOTALL) is not None)


def format_example(tags: Sequence[str] | None) -> str:
    """Returns a text that has the format of these tags, or of the default tags for None.

    >>> format_example(None)
    '<think>1</think> <answer>1</answer>'
    """
    names = TAGS if tags is None else tags
    return " ".join(f"<{name}>1</{name}>" for name in names)
