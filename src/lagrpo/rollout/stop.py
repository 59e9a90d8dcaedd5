"""Texts that end a completion: `rollout.stop`."""

from __future__ import annotations

from collections.abc import Sequence

from lagrpo.model.chat import Chat


def completes_stop(chat: Chat, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """True if the last of these tokens completes one of the stop texts.

    `token_ids` are the tokens of a turn so far. None before the last completed a stop text, so it
    is enough to look at the end: a token in the text adds at least a byte, and a stop text of n
    bytes lies within the last n of them. One more is decoded, because some tokenizers drop the
    space before the first token of a text.
    """
    if not stop or not token_ids or token_ids[-1] in chat.silent_ids:
        return False
    longest = max(len(text.encode()) for text in stop)
    last_ids: list[int] = []  # from the last one backwards
    for token_id in reversed(token_ids):
        if token_id not in chat.silent_ids:
            last_ids.append(token_id)
        if len(last_ids) > longest:
            break
    end = chat.decode(last_ids[::-1])
    return any(text in end for text in stop)


def count_until_stop(chat: Chat, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
    """Counts the tokens up to and including the first that completes a stop text.

    None if no token does.
    """
    if not stop:
        return None
    for count in range(1, len(token_ids) + 1):
        if completes_stop(chat, token_ids[:count], stop):
            return count
    return None
