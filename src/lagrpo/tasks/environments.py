"""Turns of environments in worker processes, and tools.

With tools, the policy may call functions before it answers a task's question. A call is JSON with the name of a
function and its arguments, in the formats of three families:

    <tool_call>{"name": …, "arguments": {…}}</tool_call>       Qwen, Hermes; one block for each call
    <tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>  SmolLM2
    {"name": …, "parameters": {…}}                             Llama 3: the whole turn is the call

The environment answers a turn with calls by their results, or by what is wrong with them, each in a message of the role
"tool". A turn without calls is the answer, which the task's reward function scores. Calls that a policy drafts while it
thinks do not count.
"""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lagrpo.errors import suggest
from lagrpo.rewards import worker
from lagrpo.rewards.reward import OURS, Rewards, load_function
from lagrpo.tasks import (
    Key,
    Make,
    Messages,
    StepResult,
    Task,
    build_messages,
    environment_of,
    plain_message,
)
from lagrpo.types import THOUGHT_END, Outcome, Prompt

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT_BEGIN = re.compile(r"\s*(?:<[\w:]*(?:think|thought|reason)\w*>|\[THINK\])")
SYSTEM = (
    "You can call functions:\n<tools>{tools}</tools>\nTo call one, answer with nothing but a call, such as\n"
    "<tool_call>[{example}]</tool_call>\nand you get its result."
)
TOOLS = {"calculator": "lagrpo.tasks.calculator:calculate"}
Turn = tuple[StepResult, bytes]  # what an environment says, and its pickled state


def take_turn(state: bytes | None, prompt: Any, key: Any, text: str | None) -> Turn | Outcome:
    """`run_turn` in a worker process; an unscored Outcome if it failed."""
    make = worker.get_loaded()
    try:
        return run_turn(make, state, prompt, key, text)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it concerns this completion only
        return worker.to_outcome(error, "the environment")


def run_turn(make: Make, state: bytes | None, prompt: Any, key: Any, text: str | None) -> Turn:
    """Have an environment reply to `text`: the one in `state`, else a new one, which begins with the prompt and the
    key. Without a text it only begins."""
    environment = make() if state is None else pickle.loads(state)
    if state is None:
        asked = replace(prompt, messages=prompt.asked or prompt.messages, asked=())
        opening = _to_json(environment.reset(asked, key))
        if text is None:
            return StepResult(opening), b""
        if opening != _to_json(prompt.messages):
            raise ValueError(
                "reset returned other messages than for the other completions of this prompt"
            )
    said = environment.step(str(text))
    if not isinstance(said, StepResult):
        raise TypeError(f"step returned a {type(said).__name__}, not a StepResult")
    reward = worker.to_outcome(said.reward).reward
    if reward is None:
        raise ValueError(f"its reward is {said.reward!r:.40}, not a finite number")
    if said.done:
        return StepResult((), reward, True, worker.clean(said.reason)), b""
    return StepResult(_to_json(said.messages), reward), pickle.dumps(environment)


def _to_json(messages: Any) -> tuple[Mapping[str, Any], ...]:
    """Messages as JSON has them. Raises TypeError or ValueError for what cannot be one."""
    plain = [plain_message(dict(message)) for message in messages]
    if not plain or not all(isinstance(message.get("role"), str) for message in plain):
        raise ValueError(f"its messages are {plain!r:.80}: it needs at least one, each with a role")
    return tuple(plain)


# ---- tools ----


@dataclass
class Tools:
    """An episode with these functions, and what makes such episodes. reward(completion, answer) scores an answer.
    `system` tells the policy of the functions, "" if its chat template does."""

    functions: Mapping[str, Callable[..., Any]]
    reward: Callable[[str, Any], Any]
    system: str = ""
    answer: Any = None

    def __call__(self) -> Tools:
        return replace(self)

    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the functions. Raises ValueError if one does not say how it is called."""
        return [describe(function) for function in self.functions.values()]

    def reset(self, prompt: Prompt, key: Key) -> Messages:
        self.answer = prompt.answer
        return add_system(prompt.messages, self.system) if self.system else prompt.messages

    def step(self, text: str) -> StepResult:
        try:
            calls = find_calls(text)
        except ValueError as error:
            return StepResult([{"role": "tool", "content": f"Error: {error}"}])
        if not calls:
            return StepResult(reward=self.reward(text, self.answer), done=True)
        return StepResult(
            [
                {"role": "tool", "name": name, "content": self.call(name, given)}
                for name, given in calls
            ]
        )

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call, as the policy reads it."""
        if (function := self.functions.get(name)) is None:
            return f"Error: no function {name!r}; functions: {', '.join(self.functions)}"
        try:
            result = function(**arguments)
        except (
            ValueError,
            TypeError,
            ArithmeticError,
            LookupError,
        ) as error:  # others leave the completion unscored
            return f"Error: {error}"
        return (
            result
            if isinstance(result, str)
            else json.dumps(result, ensure_ascii=False, default=str)
        )


def make_tools(names: Sequence[str], task: Task) -> Tools:
    """The environment in which the policy may call these functions, and the task's reward function scores the answer.
    Raises ValueError."""
    if environment_of(task) is not None:
        raise ValueError(
            f"task.tools: the task {task.name!r} has an environment and takes no tools; unset them"
        )
    reward, *others = Rewards.from_reward(task.reward).parts
    if others or reward.style != OURS:
        raise ValueError("task.tools: tools need exactly one reward function f(completion, answer)")
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        if ":" not in name and name not in TOOLS:
            known = (
                f"there are {', '.join(TOOLS)} and 'package.module:function'.{suggest(name, TOOLS)}"
            )
            raise ValueError(f"task.tools: no tool {name!r}; {known}")
        function = load_function(TOOLS.get(name, name))
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
            raise ValueError(f"task.tools: {name!r} is not a plain function with a name to call")
        if found.setdefault(function.__name__, function) is not function:
            raise ValueError(
                f"task.tools: two tools are named {function.__name__!r}: rename one of them"
            )
    return Tools(found, reward.function)


def find_calls(text: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and arguments of the calls in a turn, in order; none if it is an answer. Raises ValueError for a call that
    cannot be read.

    >>> find_calls('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    [('f', {'x': 1})]
    >>> find_calls("<think>I could write <tool_call>...</tool_call></think>The answer is 4.")
    []
    """
    text = text_after_thinking(text)
    blocks = re.findall(f"{OPEN}(.*?){CLOSE}", text, re.DOTALL)
    if len(blocks) != text.count(OPEN):
        raise ValueError(f"a {OPEN} has no {CLOSE}")
    if not blocks and text.lstrip().startswith("{") and '"name"' in text:
        blocks = [text]
    try:
        read = [json.loads(block) for block in blocks]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not JSON: {error}") from error
    calls = list[tuple[str, Mapping[str, Any]]]()
    for call in [
        each for block in read for each in (block if isinstance(block, list) else [block])
    ]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError('a call is {"name": ..., "arguments": {...}}')
        calls.append((call["name"], call.get("arguments", call.get("parameters", {}))))
        if not isinstance(calls[-1][1], dict):
            raise ValueError(f"the arguments of {call['name']!r} are not a JSON object")
    return calls


def text_after_thinking(text: str) -> str:
    """A turn without the thinking that it begins with; empty if the thinking has no end."""
    if end := THOUGHT_END.search(text):
        return text[end.end() :]
    return "" if THOUGHT_BEGIN.match(text) else text


def add_system(messages: Messages, system: str) -> Messages:
    """The messages with `system` in their system turn, and the calls of earlier turns written out."""
    written = list[Mapping[str, Any]]()
    for message in messages:
        if calls := [call["function"] for call in message.get("tool_calls") or ()]:
            said = f"{message.get('content') or ''}{OPEN}{json.dumps(calls)}{CLOSE}"
            message = {"role": message["role"], "content": said}
        written.append(message)
    if written[0]["role"] != "system":
        return build_messages(written, system)
    return [{"role": "system", "content": f"{written[0]['content']}\n\n{system}"}, *written[1:]]


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, from its signature and docstring. Raises ValueError if they do not say it."""
    from transformers.utils import chat_template_utils as utils

    try:
        return json.loads(json.dumps(utils.get_json_schema(function)))
    except (utils.DocstringParsingException, utils.TypeHintParsingException, NameError) as error:
        cure = "Give every parameter a type, and a line under 'Args:' in the docstring"
        raise ValueError(
            f"tool {function.__name__!r} has no usable signature: {error}. {cure}"
        ) from error


def system_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What tells a policy of functions whose chat template does not."""
    functions = [schema["function"] for schema in schemas]
    first = functions[0]
    example = {
        "name": first["name"],
        "arguments": dict.fromkeys(first["parameters"]["properties"], "..."),
    }
    return SYSTEM.format(tools=json.dumps(functions), example=json.dumps(example))
