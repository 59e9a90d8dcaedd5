"""Completions of several turns in files: a list of chat messages, the policy's with the role assistant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from lagrpo.model.chat import Replies

Messages = tuple[Mapping[str, Any], ...]


def read_turns(value: Any) -> Messages:
    """The messages of a completion. Raises ValueError for what cannot be one."""
    messages = tuple(value) if isinstance(value, list) else ()
    whole = all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    own = [message["role"] == "assistant" for message in messages] if whole else []
    if not own or not own[0] or not own[-1] or any(a and b for a, b in pairwise(own)):
        raise ValueError(
            f"its completion is {value!r:.80}: a text, or a list of messages ({{'role': 'assistant', 'content': '…'}}) "
            "that begins and ends with one of the assistant, no two of which follow each other"
        )
    return messages


def tokenize_turns(messages: Messages, replies: Replies, finished: bool) -> tuple[list[int], torch.Tensor]:
    """Token ids, and which of them are the assistant's: its texts, each with the token that ends a turn (the last only
    where it is `finished`), and what the chat template adds for the messages between. Raises ValueError where it
    cannot."""
    ids, sampled = list[int](), list[bool]()
    for own, turn in groupby(messages, lambda message: message["role"] == "assistant"):
        given = list(turn)
        added = _own(given[0]["content"], replies) if own else [*replies.tokens(given)]
        ids += added
        sampled += [own] * len(added)
    cut = 0 if finished else 1
    return ids[: len(ids) - cut], torch.tensor(sampled[: len(sampled) - cut], dtype=torch.bool)


def _own(text: str, replies: Replies) -> list[int]:
    return [*replies.chat.encode(text, add_special_tokens=False), replies.end_id]


def texts_of(messages: Messages) -> Sequence[str]:
    """What was said, turn by turn."""
    turns = groupby(messages, lambda message: message["role"] == "assistant")
    return ["\n".join(message["content"] for message in turn) for _, turn in turns]
