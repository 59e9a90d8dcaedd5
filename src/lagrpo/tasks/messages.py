"""The messages of a prompt, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lagrpo.errors import parse_json
from lagrpo.types import JsonObject, JsonView

Message = JsonView
"""A message: "role", mostly "content" (a text, or parts), and what else the chat template reads."""

Messages = Sequence[Message]


def is_padded(row: object) -> bool:
    """True for a row of Parquet or of a dataset.

    There, all objects of a column have the same keys. A key that an object lacks is None.
    """
    path = getattr(row, "path", None)  # rows of datasets have none
    return path is None or str(path).endswith((".parquet", ".parquet.gz"))


def build_messages(
    question: str | Messages, system_prompt: str | None = None, *, padded: bool = False
) -> tuple[Message, ...]:
    """Returns the messages for the chat template, each as `plain_message` gives it.

    The system prompt comes first, if there is one. A text is a turn of the user. Raises ValueError
    for a question that is neither a text nor messages.
    """
    turns = _to_turns(question, padded=padded)
    if not turns or not isinstance(turns[-1].get("content"), str):
        raise ValueError(
            f"its prompt is {question!r:.80}: a prompt is a text, or a list of messages with role "
            "and content, the last of which has a text"
        )
    if turns[-1]["role"] == "assistant" and turns[-1].get("tool_calls"):
        raise ValueError(
            "its prompt ends with a call of the assistant: end it with the call's result, or with "
            "the user's message"
        )
    unknown_roles = {turn["role"] for turn in turns} & {"human", "gpt", "bot", "ai"}
    if unknown_roles:
        raise ValueError(
            f"its prompt has the role {min(unknown_roles)!r}: chat templates know user, assistant "
            "and system"
        )
    if not system_prompt:
        return tuple(turns)
    if turns[0]["role"] == "system":
        raise ValueError(
            "the prompt already has a system message: leave task.system_prompt unset for this data"
        )
    return ({"role": "system", "content": system_prompt}, *turns)


def _to_turns(question: object, *, padded: bool) -> list[JsonObject]:
    """Returns the question as messages; nothing if it is neither a text nor messages with roles."""
    if isinstance(question, str) and question.strip():
        question = [{"role": "user", "content": question}]
    if not isinstance(question, list | tuple):
        return []
    for message in question:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return []
    return [plain_message(message, padded=padded) for message in question]


def plain_message(message: Message, *, padded: bool = False) -> JsonObject:
    """Returns the message as chat templates take it.

    Keys that are None are left out, text parts are joined to one text, a `function_call` becomes
    one of the `tool_calls`, and the arguments of calls are objects. Arguments that are None stay,
    unless they are `padded` (see `is_padded`). Raises ValueError for a part that is not a text.
    """
    message = without_none(json.loads(json.dumps(message)))
    function_call = message.pop("function_call", None)  # of OpenAI's older API
    if function_call:
        message["tool_calls"] = [{"type": "function", "function": function_call}]
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [plain_call(call, padded=padded) for call in calls]
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise ValueError(
                f"a message has the part {part!r:.80}: only parts of type text are supported"
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def plain_call(call: Any, *, padded: bool) -> JsonObject:
    """Returns the call of a function in a message, as chat templates take it.

    Arguments as JSON text, as OpenAI's API has them, become an object. Other text stays as it
    is. Raises ValueError for a call without a name.
    """
    # Hermes has calls with name and arguments alone, without a key "function".
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"a message has the call {call!r:.80}: a call is "
            '{"function": {"name": ..., "arguments": {...}}}'
        )
    function = without_none(function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            parsed = parse_json(arguments or "{}")
            if isinstance(parsed, dict):
                function["arguments"] = parsed
    elif padded and arguments is not None:
        function["arguments"] = without_none_anywhere(arguments)
    if "function" not in call:
        return {"type": "function", "function": function}
    return without_none({**call, "function": function})


def read_tools(row: JsonView, *, padded: bool) -> tuple[JsonObject, ...]:
    """Returns the functions in the column `tools` of a row, as chat templates take them.

    The column, and each function, may be JSON text. Raises ValueError for anything else than a list
    of functions with names.
    """
    tools = _parse_json(row.get("tools"))
    if not tools:
        return ()
    functions = (
        [_parse_json(tool) for tool in tools] if isinstance(tools, list | tuple) else [tools]
    )
    for function in functions:
        table = function.get("function", function) if isinstance(function, Mapping) else None
        if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
            raise ValueError(
                f"its column 'tools' has {function!r:.80}: write a list of functions such as "
                '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            )
    if padded:
        functions = without_none_anywhere(functions)
    return tuple(functions)


def _parse_json(value: Any) -> Any:
    """Returns the value of JSON text; other values as they are."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value) if value.strip() else None
    return value


def without_none(table: Message) -> JsonObject:
    """Returns the table without keys that are None."""
    return {key: value for key, value in table.items() if value is not None}


def without_none_anywhere(value: Any) -> Any:
    """Returns the value without keys that are None in its objects, at any depth."""
    return json.loads(json.dumps(value), object_hook=without_none)
