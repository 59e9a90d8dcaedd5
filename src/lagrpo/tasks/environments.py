"""Turns of environments in worker processes, and tools.

With tools, the policy may call functions before it answers a task's question. A call has the
name of a function and its arguments, in the formats of four families:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>       Qwen, Hermes; one block for each call
    <tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>  SmolLM2
    <tool_call><function=NAME><parameter=KEY>VALUE</parameter> …</function></tool_call>  Qwen3-Coder
    {"name": …, "parameters": {…}}                             Llama 3: the whole turn is the call

The environment answers a turn with calls by their results, or by what is wrong with them, each in a
message of the role "tool". A turn without calls is the answer, which the task's reward functions
score. Calls that a policy drafts while it thinks do not count.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lagrpo.errors import parse_json, suggest
from lagrpo.rewards import worker
from lagrpo.rewards.entries import load_function
from lagrpo.rewards.texts import text_after_thinking
from lagrpo.tasks import (
    Environment,
    Key,
    Make,
    StepResult,
    Task,
    build_messages,
    environment_of,
)
from lagrpo.tasks.messages import Message, Messages, plain_message
from lagrpo.types import JsonObject, Outcome, Prompt

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
PYTHON_TAG = "<|python_tag|>"  # before some of Llama 3's calls
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')
SYSTEM = (
    "You can call functions:\n<tools>{tools}</tools>\nTo call one, answer with nothing but a call, "
    "such as\n<tool_call>[{example}]</tool_call>\nand you get its result."
)
TOOLS = {"calculator": "lagrpo.tasks.calculator:calculate"}

Tool = Callable[..., Any]
"""A function that the policy may call, with arguments by name."""

Call = tuple[str, Mapping[str, object]]
"""The name of a function, and its arguments."""

Turn = tuple[StepResult, bytes]
"""An environment's reply, and its pickled state: empty after the last turn."""


# Turns in worker processes


def take_turn(
    make: Make,
    state: bytes | None,
    prompt: Prompt | None,
    key: Key | None,
    text: str | None,
    prefix: str = "",
) -> Turn | Outcome:
    """Runs `run_turn` in a worker process. Returns an unscored Outcome if it failed."""
    try:
        return run_turn(make, state, prompt, key, text, prefix)
    except BaseException as error:  # noqa: BLE001 - costs this completion only
        return worker.to_outcome(error, "the environment")


def run_turn(
    make: Make,
    state: bytes | None,
    prompt: Prompt | None,
    key: Key | None,
    text: str | None,
    prefix: str = "",
) -> Turn:
    """Lets an environment reply to `text`, or begin if `text` is None.

    prefix: the beginning of the turn, before `text`, that the prompt or the last reply ends with.

    The environment is the one in `state`. Without a state it is a new one, which begins with the
    prompt and the key. Raises ValueError or TypeError for replies that cannot be used, and what the
    environment raises.
    """
    if state is not None:
        environment = pickle.loads(state)
    else:
        assert prompt is not None
        assert key is not None
        environment = make()
        task_prompt = replace(
            prompt, messages=prompt.task_messages or prompt.messages, task_messages=()
        )
        opening = _to_json(environment.reset(task_prompt, key))
        if text is None:
            return StepResult(opening), b""
        # The prompt has the messages with which the first environment of the group began.
        if opening != _to_json(prompt.messages):
            raise ValueError(
                "reset returned other messages than for the other completions of this prompt"
            )
    step = take_step(environment, str(text), prefix)
    if not isinstance(step, StepResult):
        raise TypeError(f"step returned a {type(step).__name__}, not a StepResult")
    reward = worker.to_outcome(step.reward).reward
    if reward is None:
        raise ValueError(f"its reward is {step.reward!r:.40}, not a finite number")
    if step.done or step.is_answer:
        reason = worker.clean(step.reason)
        return StepResult((), reward, done=True, reason=reason, is_answer=step.is_answer), b""
    return StepResult(_to_json(step.messages), reward), pickle.dumps(environment)


def take_step(environment: Environment, text: str, prefix: str) -> StepResult:
    """Passes the policy's turn to an environment, with the prefix if `step` takes it."""
    step: Any = environment.step
    if "prefix" in inspect.signature(step).parameters:
        return step(text, prefix=prefix)
    return step(text)


def _to_json(messages: Messages) -> tuple[Message, ...]:
    """Returns messages as JSON has them. Raises TypeError or ValueError for unfit messages."""
    plain_messages = [plain_message(dict(message)) for message in messages]
    have_roles = all(isinstance(message.get("role"), str) for message in plain_messages)
    if not plain_messages or not have_roles:
        raise ValueError(
            f"its messages are {plain_messages!r:.80}: it needs at least one, each with a role"
        )
    return tuple(plain_messages)


# Tools


@dataclass
class Tools:
    """An episode in which the policy may call functions, and the factory of such episodes."""

    functions: Mapping[str, Tool]
    system: str = ""  # tells the policy of the functions; empty if its chat template does

    def __call__(self) -> Tools:
        return replace(self)

    def schemas(self) -> list[JsonObject]:
        """Returns JSON schemas of the functions.

        Raises ValueError if a function does not say how it is called.
        """
        return [describe(function) for function in self.functions.values()]

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        if not self.system:
            return prompt.messages
        return add_system(prompt.messages, self.system)

    def step(self, text: str, prefix: str = "") -> StepResult:
        try:
            calls = find_calls(text, self.functions, prefix)
        except ValueError as error:
            return StepResult([{"role": "tool", "content": f"Error: {error}"}])
        if not calls:
            return StepResult(done=True, is_answer=True)
        results = [
            {"role": "tool", "name": name, "content": self.call(name, arguments)}
            for name, arguments in calls
        ]
        return StepResult(results)

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Returns the result of a call, or its error, as the policy reads it."""
        function = self.functions.get(name)
        if function is None:
            return f"Error: no function {name!r}; functions: {', '.join(self.functions)}"
        try:
            result = function(**arguments)
        # Other exceptions leave the completion unscored.
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            return f"Error: {error}"
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)


def make_tools(names: Sequence[str], task: Task) -> Tools:
    """Returns the environment in which the policy may call these functions.

    Raises ValueError for a task that takes no tools, and for unfit tools.
    """
    if environment_of(task) is not None:
        raise ValueError(
            f"task.tools: the task {task.name!r} has an environment and takes no tools; unset them"
        )
    functions: dict[str, Tool] = {}
    for name in names:
        function = _load_tool(name)
        # A function may be named twice, but the calls of two functions must differ.
        if functions.setdefault(function.__name__, function) is not function:
            raise ValueError(
                f"task.tools: two tools are named {function.__name__!r}: rename one of them"
            )
    return Tools(functions)


def _load_tool(name: str) -> Tool:
    """Loads a tool of TOOLS, or "package.module:function". Raises ValueError."""
    if ":" not in name and name not in TOOLS:
        raise ValueError(
            f"task.tools: no tool {name!r}; there are {', '.join(TOOLS)} and "
            f"'package.module:function'.{suggest(name, TOOLS)}"
        )
    function = load_function(TOOLS.get(name, name))
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"task.tools: {name!r} is not a plain function with a name to call")
    return function


def find_calls(
    text: str, functions: Mapping[str, Tool] | None = None, prefix: str = ""
) -> list[Call]:
    """Returns the names and arguments of the calls in a turn, in order; none if it is an answer.

    functions: by name; the types of their parameters tell how an argument in Qwen3-Coder's format
        is read.
    prefix: the beginning of the turn, before `text`, that the prompt or the last reply ends with.

    Raises ValueError for a call that cannot be read.

    >>> find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    [('f', {'x': 1})]
    >>> find_calls("<think>I could write <tool_call>...</tool_call></think>The answer is 4.")
    []
    """
    text = text_after_thinking(text, prefix)
    _, *parts = text.split(OPEN)
    if not parts:
        return _find_bare_call(text)
    calls: list[Call] = []
    for part in parts:
        block, close, _ = part.partition(CLOSE)
        if not close:
            raise ValueError(f"a {OPEN} has no {CLOSE}")
        if block.lstrip().startswith(FUNCTION):
            calls += _read_tagged_calls(block, functions or {})
        else:
            content = _parse_call(block)
            block_calls = content if isinstance(content, list) else [content]
            calls += [_read_call(call) for call in block_calls]
    return calls


def _find_bare_call(text: str) -> list[Call]:
    """Returns the call that a whole turn is, in Llama 3's format; nothing if it is an answer.

    Other JSON is an answer: {"name": "Ann", "age": 5} calls nothing. Raises ValueError.
    """
    content = text.strip().removeprefix(PYTHON_TAG).lstrip()
    if not content.startswith("{") or '"name"' not in content or not _ARGUMENTS.search(content):
        return []
    call = _parse_call(content)
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str)
    if not is_call or not isinstance(call.get("arguments", call.get("parameters")), dict):
        return []
    return [_read_call(call)]


def _parse_call(text: str) -> Any:
    """Parses the JSON of a call. Raises ValueError."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"the call is not JSON: {error}") from error


def _read_call(call: object) -> Call:
    """Returns the name and the arguments of a call. Raises ValueError."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('a call is {"name": ..., "arguments": {...}}')
    name = call["name"]
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name!r} are not a JSON object")
    return name, arguments


def _read_tagged_calls(block: str, functions: Mapping[str, Tool]) -> list[Call]:
    """Returns the calls of a block in Qwen3-Coder's format. Raises ValueError."""
    calls: list[Call] = []
    _, *parts = block.split(FUNCTION)
    for part in parts:
        name, _, rest = part.partition(">")
        body, end, _ = rest.partition("</function>")
        if not end:
            raise ValueError(f"a {FUNCTION}...> has no </function>")
        name = name.strip()
        types = _parameter_types(functions.get(name))
        arguments: dict[str, object] = {}
        _, *parameters = body.split(PARAMETER)
        for parameter in parameters:
            key, _, rest = parameter.partition(">")
            value, end, _ = rest.partition("</parameter>")
            if not end:
                raise ValueError(f"a {PARAMETER}...> has no </parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = _read_argument(value, types.get(key.strip(), frozenset()))
        calls.append((name, arguments))
    return calls


def _parameter_types(function: Tool | None) -> dict[str, frozenset[type]]:
    """Returns the types that each parameter of a tool may have; nothing for an unknown tool."""
    if function is None:
        return {}
    return {name: frozenset(_types_of(hint)) for name, hint in get_type_hints(function).items()}


def _types_of(hint: Any) -> Iterator[type]:
    """Yields the types that a type hint allows: int and NoneType for int | None."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for member in get_args(hint):
            yield from _types_of(member)
    elif origin is Literal:
        yield from map(type, get_args(hint))
    else:
        yield origin or hint


def _read_argument(text: str, types: frozenset[type]) -> object:
    """Returns an argument that is written as text, for a parameter of these types.

    Texts stay as they are, anything else is JSON. What is neither is left to the tool as a text.
    """
    word = text.strip()
    is_null = word.lower() in ("null", "none") and NoneType in types
    if str in types and not is_null:
        return text
    try:
        # Templates write an argument that is no table as Python does.
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except (ValueError, RecursionError):
        return text


def add_system(messages: Messages, system: str) -> Messages:
    """Returns the messages with `system` in their system turn.

    The calls of earlier turns are written out as text.
    """
    turns: list[Message] = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if calls:
            content = f"{message.get('content') or ''}{OPEN}{json.dumps(calls)}{CLOSE}"
            turns.append({"role": message["role"], "content": content})
        else:
            turns.append(message)
    if turns[0]["role"] != "system":
        return build_messages(turns, system)
    return [{"role": "system", "content": f"{turns[0]['content']}\n\n{system}"}, *turns[1:]]


def describe(function: Tool) -> JsonObject:
    """Returns the JSON schema of a function, from its signature and docstring.

    Raises ValueError if these do not say how the function is called.
    """
    from transformers.utils import chat_template_utils as utils

    try:
        schema = utils.get_json_schema(function)
    except (utils.DocstringParsingException, utils.TypeHintParsingException, NameError) as error:
        raise ValueError(
            f"tool {function.__name__!r} has no usable signature: {error}. Give every parameter a "
            "type, and a line under 'Args:' in the docstring"
        ) from error
    return json.loads(json.dumps(schema))


def system_text(schemas: Sequence[JsonObject]) -> str:
    """Returns a system prompt that tells a policy of functions, if its chat template does not."""
    functions = [schema["function"] for schema in schemas]
    first = functions[0]
    example = {
        "name": first["name"],
        "arguments": dict.fromkeys(first["parameters"]["properties"], "..."),
    }
    return SYSTEM.format(tools=json.dumps(functions), example=json.dumps(example))
