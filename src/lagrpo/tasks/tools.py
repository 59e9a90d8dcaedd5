"""Tools: an environment in which the policy may call functions before it answers a task's question.

A call is JSON with the name of a function and its arguments, in the formats of three families:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>       Qwen, Hermes; one block for each call
    <tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>  SmolLM2
    {"name": …, "parameters": {…}}                             Llama 3: the whole turn is the call

A turn with calls is answered with their results, each in a message of the role "tool". A turn without one is the
answer, which the task's judge scores. A call that cannot be read or carried out is answered with what is wrong with it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagrpo.tasks.base import Address, Final, Judge, Turn, build_messages
from lagrpo.types import Prompt

BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OPEN = "<tool_call>"
MISTAKES = (ValueError, TypeError, ArithmeticError, LookupError)
"""What a function raises because of its arguments: the policy is told. Anything else leaves the completion unscored."""
SYSTEM = (
    "You can call functions:\n<tools>{tools}</tools>\nTo call one, answer with nothing but a call, such as\n"
    "<tool_call>[{example}]</tool_call>\nand you get its result."
)
"""Says so where the chat template does not."""


class MalformedError(ValueError):
    """A call that cannot be read."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


def find_calls(text: str) -> list[Call]:
    """The calls in a turn, in order; none where it is an answer. Raises MalformedError.

    >>> find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    [Call(name='f', arguments={'x': 1})]
    >>> find_calls("The answer is 4.")
    []
    """
    if OPEN in text:
        blocks = BLOCK.findall(text)
        if len(blocks) != text.count(OPEN):
            raise MalformedError("a <tool_call> has no </tool_call>")
        read = [_parse(block) for block in blocks]
        return [_read(call) for block in read for call in (block if isinstance(block, list) else [block])]
    if text.lstrip().startswith("{") and '"name"' in text:
        return [_read(_parse(text))]
    return []


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the call is no JSON: {error}") from error


def _read(call: Any) -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedError('a call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise MalformedError(f"the arguments of {call['name']!r} are no JSON object")
    return Call(call["name"], arguments)


@dataclass(frozen=True, slots=True)
class Tools:
    """Makes episodes with these functions, by their names. `system` tells the policy of them, "" where its chat
    template does."""

    functions: Mapping[str, Callable[..., Any]]
    judge: Judge
    system: str = ""

    def __call__(self) -> Talking:
        return Talking(self)

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the functions. Raises ValueError where one does not say how it is called."""
        return [describe(function, function.__name__) for function in self.functions.values()]


class Talking:
    """One episode."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def start(self, prompt: Prompt, address: Address) -> Turn:
        self.gold = prompt.gold
        return Turn(told(prompt.messages, self.tools.system))

    def reply(self, text: str) -> Turn | Final:
        try:
            calls = find_calls(text)
        except MalformedError as error:
            return Turn(({"role": "tool", "content": f"Error: {error}"},))
        if not calls:
            return Final(self.tools.judge(text, self.gold))
        return Turn(tuple(self.carry_out(call) for call in calls))

    def carry_out(self, call: Call) -> dict[str, str]:
        """The message with what a call gives."""
        if (function := self.tools.functions.get(call.name)) is None:
            known = ", ".join(self.tools.functions)
            return {
                "role": "tool",
                "name": call.name,
                "content": f"Error: there is no function {call.name!r}, but {known}",
            }
        try:
            given = inspect.signature(function).bind(**call.arguments)
            content = _shown(function(*given.args, **given.kwargs))
        except MISTAKES as error:
            content = f"Error: {error}"
        return {"role": "tool", "name": call.name, "content": content}


def _shown(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def told(messages: Sequence[Mapping[str, Any]], system: str) -> tuple[Mapping[str, Any], ...]:
    """The messages with `system` in their system turn, and the calls of earlier turns written out."""
    if not system:
        return tuple(messages)
    messages = [_written_out(message) for message in messages]
    if messages[0]["role"] != "system":
        return build_messages(messages, system)
    return ({"role": "system", "content": f"{messages[0]['content']}\n\n{system}"}, *messages[1:])


def _written_out(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    content = f"{message.get('content') or ''}{OPEN}{json.dumps(calls)}</tool_call>"
    return {"role": message["role"], "content": content}


def describe(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function, from its signature and docstring. Raises ValueError where these do not say it."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    parameters = inspect.signature(function).parameters.values()
    if unnamed := [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
        raise ValueError(f"tool {name!r} takes {unnamed[0]!r} by its place alone, and a call names its arguments")
    try:
        return json.loads(json.dumps(get_json_schema(function)))
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ValueError(
            f"tool {name!r} does not say how it is called: {error}. Give every parameter a type, and a line under "
            "'Args:' in the docstring"
        ) from error


def system_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What tells a policy of functions whose chat template does not."""
    functions = [schema["function"] for schema in schemas]
    first = functions[0]
    example = {"name": first["name"], "arguments": dict.fromkeys(first["parameters"]["properties"], "...")}
    return SYSTEM.format(tools=json.dumps(functions), example=json.dumps(example))
