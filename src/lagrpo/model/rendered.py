"""Checks of a rendered prompt: a chat template may drop what it is given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from lagrpo.errors import one_line
from lagrpo.types import THOUGHT_END, JsonView

Tools = Sequence[JsonView]
Messages = Sequence[JsonView]
# Messages of these roles may stand anywhere in a prompt: templates move them to the front or into a
# user's turn.
ROLES_IN_FRONT = ("system", "developer")
# Switches of thinking in a message, which some templates act on and remove.
SWITCHES = re.compile(r"/(?:no_?think|think|system_override)\b")
TAG = re.compile(r"</?[\w:]{1,30}>")
# Keys of a message in which chat templates find a thought.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")


def check_rendered(messages: Messages, text: str) -> None:
    """Raises ValueError unless a rendered prompt has the texts of all messages, in their order."""
    end_of_previous = 0
    for number, message in enumerate(messages, start=1):
        is_in_front = message["role"] in ROLES_IN_FRONT
        end = 0 if is_in_front else end_of_previous
        for piece in required_pieces(message):
            end = find_end(piece, text, end)
            if end < 0:
                raise ValueError(
                    f"the rendered prompt lacks {one_line(piece, 80)!r} of its message {number} "
                    f"(role {message['role']!r}). "
                    "Change the message, or set model.chat_template to a template that shows it"
                )
        if not is_in_front:
            end_of_previous = end


def required_pieces(message: JsonView) -> Iterator[str]:
    """Yields the texts of a message that no chat template may drop, in order.

    They are its content without the white space around it, its refusal, and the names of the
    functions that it calls. Templates drop the thinking of earlier turns, and some drop the tags of
    an answer and the switches of thinking.
    """
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    separator = SWITCHES
    if message["role"] == "assistant":
        text = THOUGHT_END.split(text)[-1]
        separator = TAG
    yield from filter(None, map(str.strip, separator.split(text)))
    if message.get("refusal"):
        yield str(message["refusal"]).strip()
    for call in message.get("tool_calls") or ():
        yield call.get("function", call)["name"]


def check_tools(tools: Tools, text: str) -> None:
    """Raises ValueError unless a rendered prompt has the names of its tools."""
    for tool in tools:
        name = tool.get("function", tool)["name"]
        if name not in text:
            raise ValueError(
                f"the rendered prompt lacks the function {name!r} of its column 'tools'. Set "
                "model.chat_template to a template that shows tools, or remove the column"
            )


def check_shown(message: JsonView, text: str) -> None:
    """Raises ValueError unless the rendered `text` has all that a message says.

    It is for messages that are learned: their thoughts, the arguments of their calls, and their
    other keys must be there, too.
    """
    content_pieces = map(str.strip, TAG.split(message.get("content") or ""))
    pieces = [("content", piece) for piece in content_pieces if piece]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        call_pieces = [function["name"], *texts_of(function.get("arguments"))]
        pieces += [("tool_calls", piece) for piece in call_pieces]
    for key in extra_keys(message):
        value = message[key]
        pieces += [(key, piece) for piece in texts_of(value) or [json.dumps(value)]]
    for key, piece in pieces:
        if find_end(piece, text, 0) < 0:
            raise ValueError(
                f"the chat template does not show the {key} {one_line(piece, 80)!r} of its message "
                f"with role {message['role']!r}. Remove it, or set model.chat_template to a "
                "template that shows it"
            )


def find_hidden_key(messages: Messages, text: str) -> str | None:
    """Returns a key of a message whose texts are not in the rendered `text`; None if all are.

    Templates leave out earlier thoughts.
    """
    for message in messages:
        for key in extra_keys(message):
            is_thought = key in THOUGHT_KEYS
            pieces = texts_of(message[key])
            if not is_thought and not all(find_end(piece, text, 0) >= 0 for piece in pieces):
                return key
    return None


def extra_keys(message: JsonView) -> list[str]:
    """Returns the keys of a message that have a value, beside its text and its calls.

    Ids, and the names of tools, do not count: templates show them only where a model needs them.
    """
    known_keys = ["role", "content", "tool_calls", "tool_call_id", "id"]
    if message["role"] not in ("user", "assistant"):
        known_keys.append("name")
    return [key for key, value in message.items() if key not in known_keys and not is_empty(value)]


def is_empty(value: object) -> bool:
    """True for null, false, and empty texts, lists and tables; not for 0."""
    return value is None or value is False or value in ("", [], {})


def texts_of(value: object) -> list[str]:
    """Returns the texts in a value, and the keys of its tables."""
    if isinstance(value, str):
        return [value.strip()] if value.strip() else []
    texts: list[str] = []
    if isinstance(value, Mapping):
        for key, entry in value.items():
            texts += [key, *texts_of(entry)]
    elif isinstance(value, list | tuple):
        for entry in value:
            texts += texts_of(entry)
    return texts


def find_end(piece: str, text: str, start: int) -> int:
    """Returns the end of the first occurrence of a piece in a text, from `start` on; -1 if none.

    The text may have the piece as it is or as JSON.
    """
    forms = {
        piece,
        json.dumps(piece)[1:-1],
        json.dumps(piece, ensure_ascii=False)[1:-1],
    }
    ends: list[int] = []
    for form in forms:
        position = text.find(form, start)
        if position >= 0:
            ends.append(position + len(form))
    return min(ends, default=-1)
