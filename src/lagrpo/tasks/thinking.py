"""The thinking that a model writes before its answer, as in <think> … </think>."""

from __future__ import annotations

import re

from lagrpo.types import THOUGHT_END

THOUGHT_BEGIN = re.compile(r"\s*(?:<[\w:]*(?:think|thought|reason)\w*>|\[THINK\])")


def text_after_thinking(text: str) -> str:
    """Returns a turn without the thinking that it begins with; empty if the thinking has no end.

    Many chat templates begin the thinking in the prompt, so a turn may have its end alone.
    """
    end = THOUGHT_END.search(text)
    if end is not None:
        return text[end.end() :]
    return "" if THOUGHT_BEGIN.match(text) else text
