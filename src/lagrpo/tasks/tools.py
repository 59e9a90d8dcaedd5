"""Tools: an environment in which the policy may call functions before it answers a task's question.

A call is JSON with the name of a function and its arguments, in the formats of three families:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>       Qwen, Hermes; one block for each call
    <tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>  SmolLM2
    {"name": …, "parameters": {…}}                             Llama 3: the whole turn is the call

The environment answers a turn with calls by their results, each in a message of the role "tool". A turn without calls
is the answer, which the task's reward function scores. If a call cannot be read or carried out, the reply says why.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagrpo.tasks.base import Key, Messages, StepResult, build_messages
from lagrpo.types import Prompt

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MISTAKES = (ValueError, TypeError, ArithmeticError, LookupError)
"""What a function raises because of its arguments: the policy sees it. Anything else leaves the completion unscored."""
SYSTEM = (
    "You can call functions:\n<tools>{tools}</tools>\nTo call one, answer with nothing but a call, such as\n"
    "<tool_call>[{example}]</tool_call>\nand you get its result."
)
"""Tells the policy of functions if the chat template does not."""


class MalformedError(ValueError):
    """A call that cannot be read."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Any]


def find_calls(text: str) -> list[Call]:
    """The calls in a turn, in order; none if it is an answer. Raises MalformedError.

    >>> find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    [Call(name='f', arguments={'x': 1})]
    >>> find_calls("The answer is 4.")
    []
    """
    if OPEN in text:
        blocks = re.findall(f"{OPEN}(.*?){CLOSE}", text, re.DOTALL)
        if len(blocks) != text.count(OPEN):
            raise MalformedError(f"a {OPEN} has no {CLOSE}")
        read = [_parse(block) for block in blocks]
        return [_read(call) for block in read for call in (block if isinstance(block, list) else [block])]
    if text.lstrip().startswith("{") and '"name"' in text:
        return [_read(_parse(text))]
    return []


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the call is not JSON: {error}") from error


def _read(call: Any) -> Call:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedError('a call is {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise MalformedError(f"the arguments of {call['name']!r} are not a JSON object")
    return Call(call["name"], arguments)


@dataclass(frozen=True, slots=True)
class Tools:
    """Makes episodes with these functions, by their names. `reward` scores an answer, called as reward(completion,
    answer). `system` tells the policy of the functions, "" if its chat template does."""

    functions: Mapping[str, Callable[..., Any]]
    reward: Callable[[str, Any], Any]
    system: str = ""

    def __call__(self) -> Talking:
        return Talking(self)

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the functions. Raises ValueError if one does not say how it is called."""
        return [describe(function, function.__name__) for function in self.functions.values()]


class Talking:
    """One episode."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.answer = prompt.answer
        return add_system(prompt.messages, self.tools.system)

    def step(self, text: str) -> StepResult:
        try:
            calls = find_calls(text)
        except MalformedError as error:
            return StepResult([{"role": "tool", "content": f"Error: {error}"}])
        if not calls:
            return StepResult(reward=self.tools.reward(text, self.answer), done=True)
        return StepResult([{"role": "tool", "name": call.name, "content": self.carry_out(call)} for call in calls])

    def carry_out(self, call: Call) -> str:
        """The result of a call, as the policy reads it."""
        if (function := self.tools.functions.get(call.name)) is None:
            return f"Error: there is no function {call.name!r}, but {', '.join(self.tools.functions)}"
        try:
            given = inspect.signature(function).bind(**call.arguments)
            result = function(*given.args, **given.kwargs)
        except MISTAKES as error:
            return f"Error: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def add_system(messages: Messages, system: str) -> Messages:
    """The messages with `system` in their system turn, and the calls of earlier turns written out."""
    if not system:
        return messages
    messages = [_written_out(message) for message in messages]
    if messages[0]["role"] != "system":
        return build_messages(messages, system)
    return [{"role": "system", "content": f"{messages[0]['content']}\n\n{system}"}, *messages[1:]]


def _written_out(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    return {"role": message["role"], "content": f"{message.get('content') or ''}{OPEN}{json.dumps(calls)}{CLOSE}"}


def describe(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The JSON schema of a function, from its signature and docstring. Raises ValueError if they do not say it."""
    from transformers.utils import chat_template_utils as utils

    parameters = inspect.signature(function).parameters.values()
    if unnamed := [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
        raise ValueError(f"tool {name!r} takes {unnamed[0]!r} by position, and a call names its arguments")
    try:
        return json.loads(json.dumps(utils.get_json_schema(function)))
    except (utils.DocstringParsingException, utils.TypeHintParsingException, NameError) as error:
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
