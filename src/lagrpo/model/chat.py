"""Chat: from messages to token ids and back, by a model's tokenizer and chat template."""

from __future__ import annotations

import json
import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.model.files import TOKENIZER, find_source, save_ends, save_tokenizer
from lagrpo.model.rendered import (
    Messages,
    Tools,
    check_rendered,
    check_shown,
    check_tools,
    extra_keys,
    find_hidden_key,
)
from lagrpo.types import THOUGHT_BEGIN, THOUGHT_END, JsonView, Prompt

logger = logging.getLogger("lagrpo")
# The shortest conversation, to see what a template writes around messages.
OPENING = ({"role": "user", "content": "1"},)
ANSWER = "This is an answer"
EMPTY_THOUGHT_AT_END = re.compile(r"<think>\s*</think>\s*$")
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")
# A template renders in milliseconds. Other threads of the process spend CPU time, too.
RENDERING_SECONDS = 30.0
# A tag at the end of a rendered prompt, such as <think> or [THINK]. Group 1 is the name of a tag
# that may be the header of a turn.
OPENED_TAG = re.compile(rf"(?:<(\w+)>|{THOUGHT_BEGIN.pattern})\s*$")


class TemplateError(ValueError):
    """A chat template fails on some messages."""


@contextmanager
def limited_time() -> Iterator[None]:
    """Raises TimeoutError inside, in the main thread, after RENDERING_SECONDS of CPU time.

    Nothing else ends the loops of a template.
    """

    def end(_signum: int, _frame: object) -> None:
        raise TimeoutError(f"it takes more than {RENDERING_SECONDS:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, end)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, RENDERING_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def end_with(text: str, turn: str) -> str:
    """Returns the rendered `text` so that it ends with exactly the text of the assistant's `turn`.

    The template may have trimmed the white space after it, and Qwen3's template puts an empty
    thought before a thought. The white space comes back, and the empty thought is removed.
    """
    trimmed_text = text.rstrip()
    head = trimmed_text.removesuffix(turn.strip())
    if head == trimmed_text:
        return text
    answer = turn.lstrip()
    if answer.startswith("<think>"):
        head = EMPTY_THOUGHT_AT_END.sub("", head)
    return head + without_repetition(head, answer)


def without_repetition(before: str, answer: str) -> str:
    """Returns an answer without the tag, or the empty thought, with which the text `before` ends.

    >>> without_repetition("assistant: <think>\\n", "<think>\\nhm</think>5")
    'hm</think>5'
    """
    empty_thought = EMPTY_THOUGHT_AT_END.search(before)
    opened_tag = OPENED_TAG.search(before)
    if empty_thought is not None:
        repeated = EMPTY_THOUGHT.match(answer)
    elif opened_tag is not None:
        repeated = re.match(rf"\s*{re.escape(opened_tag[0].rstrip())}", answer)
    else:
        return answer
    if repeated is None:
        return answer
    rest = answer[repeated.end() :]
    space_before = before[len(before.rstrip()) :]
    while not rest.startswith(space_before):
        space_before = space_before[:-1]
    return rest.removeprefix(space_before)


def check_thought(before: str, answer: str, *, finished: bool) -> None:
    """Raises ValueError unless a completion's thought fits the end of the text `before`.

    Behind an empty thought it may have none, and it must close an open one if it is `finished`.
    """
    if EMPTY_THOUGHT_AT_END.search(before) and answer.lstrip().startswith("<think>"):
        raise ValueError(
            "its completion begins with <think>, but the prompt ends with an empty thought: "
            "remove the thought, or enable_thinking = false in model.chat_template_kwargs"
        )
    opened_tag = OPENED_TAG.search(before)
    if opened_tag is None or not finished:
        return
    tag = opened_tag[0].rstrip()
    if THOUGHT_BEGIN.fullmatch(tag) and not THOUGHT_END.search(answer):
        raise ValueError(
            f"the prompt ends with {tag}, but its completion does not close it: add the end of the "
            "thought, or set finished = false if the completion was cut"
        )


def write_arguments(message: JsonView) -> JsonView:
    """Returns the message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str):
            arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
            function = {**function, "arguments": arguments}
        if "function" in call:
            calls.append({**call, "function": function})
        else:
            calls.append(function)
    return {**message, "tool_calls": calls}


@dataclass(frozen=True, eq=False)
class Chat:
    """A tokenizer and its chat template, for one model and one run.

    - `vocabulary`: the number of tokens that the model has
    - `eos_ids`: every id that ends a completion
    - `template_kwargs`: arguments for the chat template
    - `started`: the start of the run, the time that templates with a date show
    """

    tokenizer: Any
    vocabulary: int
    eos_ids: frozenset[int]
    template_kwargs: JsonView = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    @staticmethod
    def from_model(lm: Any, tokenizer: Any) -> Chat:
        """Returns the chat of a model.

        Completions end with a token that the generation config, the tokenizer or the chat template
        names. Warns about differences between them, and about a template that is unusual.
        """
        ids_of_config = lm.generation_config.eos_token_id
        if not isinstance(ids_of_config, list | tuple):
            ids_of_config = [ids_of_config]
        end_ids = {*ids_of_config, getattr(tokenizer, "eos_token_id", None)}
        vocabulary = lm.get_output_embeddings().weight.shape[0]
        chat = Chat(tokenizer, vocabulary, frozenset(end_ids - {None})).with_turn_end()

        added_ids = chat.eos_ids - end_ids
        if added_ids:
            logger.warning(
                "completions also end at %s, which ends turns in the chat template "
                "but not in the generation config",
                tokenizer.convert_ids_to_tokens([*added_ids])[0],
            )
        if not chat.eos_ids:
            logger.warning(
                "no token ends a completion: every one gets as long as it may. "
                "Set eos_token in the model's tokenizer_config.json"
            )
        turn_end = chat.find_turn_end()
        if turn_end is not None:
            turn_end_token = tokenizer.convert_ids_to_tokens(turn_end)
            if chat.render(OPENING).rstrip().endswith(turn_end_token):
                logger.warning(
                    "the chat template opens no turn for the assistant: completions begin after %s",
                    turn_end_token,
                )
        return chat

    def with_turn_end(self) -> Chat:
        """Returns a chat in which the template's end of a turn also ends completions."""
        turn_end = self.find_turn_end()
        if turn_end is None:
            return replace(self)
        return replace(self, eos_ids=self.eos_ids | {turn_end})

    def save(self, directory: Path) -> None:
        """Writes the tokenizer's files, and the ends of completions to a model's config."""
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, directory)
        save_ends(directory, self.eos_ids)

    def tokenize(self, prompt: Prompt, tools: Tools | None = None) -> Prompt:
        """Returns the prompt with its token ids.

        The chat template renders it, and gets `tools`, else the prompt's own, as JSON schemas.
        Without a template, the prompt is its plain text. A token that the tokenizer appends to end
        a text is left out. Raises TemplateError. Raises ValueError for a message or a tool of the
        prompt that the template leaves out, for a prompt without tokens, for a token that the model
        does not have, and if the model's tokenizer.json gives other tokens.
        """
        is_chat = self.tokenizer.chat_template is not None
        if is_chat:
            text = self.render(prompt.messages, tools or prompt.tools)
        else:
            text = "\n".join(message.get("content") or "" for message in prompt.messages)
        check_rendered(prompt.messages, text)
        if not tools:
            check_tools(prompt.tools, text)
        ids = self.encode(text, add_special_tokens=not is_chat)
        self._check_file(text, ids, add_special_tokens=not is_chat)
        if not is_chat:
            ids = self._without_added_end(ids, text)
        if not ids:
            raise ValueError(f"it has no tokens: its text is {text!r:.80}")
        self.check_vocabulary(ids)
        return replace(
            prompt,
            token_ids=tuple(int(token_id) for token_id in ids),
            prefix=self.find_prefix(prompt.messages, text),
        )

    def _without_added_end(self, ids: Sequence[int], text: str) -> Sequence[int]:
        """Returns the tokens of a text without the end tokens that the tokenizer appends.

        Behind such a token, a model begins another text.
        """
        if self._count_ends(ids) == 0:
            return ids
        own_ids = self.encode(text, add_special_tokens=False)
        num_added = self._count_ends(ids) - self._count_ends(own_ids)
        return ids[: len(ids) - num_added]

    def _count_ends(self, ids: Sequence[int]) -> int:
        """Returns the number of end tokens at the end of these tokens."""
        return sum(1 for _ in takewhile(self.eos_ids.__contains__, reversed(ids)))

    def render_turn(self, before: Messages, message: JsonView, tools: Tools | None = None) -> str:
        """Returns the text of an assistant's turn as the chat template writes it.

        It begins behind the header of the answer to the messages `before`, and has the token that
        ends the turn. Raises TemplateError. Raises ValueError if the template leaves out anything
        of the message, or begins its turn in another way than an answer.
        """
        header = self.render(before, tools)
        text = self.render([*before, message], tools, is_complete=True)
        if before[-1]["role"] == "assistant" or not text.startswith(header):
            raise ValueError(
                "the chat template begins the assistant's message in another way than the prompt "
                f"begins an answer, which is {header[-40:]!r}"
            )
        turn = text.removeprefix(header)
        check_shown(message, turn)
        empty_thought = EMPTY_THOUGHT.match(turn)
        if empty_thought is not None and not EMPTY_THOUGHT.match(str(message.get("content"))):
            # As Qwen3's template does. A message without a thought is learned without one.
            turn = turn[empty_thought.end() :].lstrip()
        return turn.rstrip()

    def render(
        self, messages: Messages, tools: Tools | None = None, *, is_complete: bool = False
    ) -> str:
        """Returns the text that the chat template makes of messages.

        It ends with the header of the coming answer, or with the last message if that is the
        assistant's, without its end. If the conversation `is_complete`, it ends with the end of the
        last message. Raises TemplateError.
        """
        try:
            return self._render(messages, tools, is_complete=is_complete)
        except TemplateError:
            # DeepSeek's template takes the arguments of calls as JSON text.
            with_text = [write_arguments(message) for message in messages]
            if with_text != list(messages):
                with suppress(TemplateError):
                    return self._render(with_text, tools, is_complete=is_complete)
            raise

    def _render(self, messages: Messages, tools: Tools | None, *, is_complete: bool) -> str:
        plain_messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        for message in plain_messages:
            # OpenAI's API has null for the text of a call.
            if message["role"] == "assistant":
                message.setdefault("content", "")
        is_last_of_assistant = bool(plain_messages) and plain_messages[-1]["role"] == "assistant"
        begins_answer = is_last_of_assistant and not is_complete
        end_option = "continue_final_message" if begins_answer else "add_generation_prompt"
        tool_list = list(tools or ()) or None
        try:
            with limited_time():
                text = self.tokenizer.apply_chat_template(
                    plain_messages,
                    chat_template=self._template_of_run(tool_list),
                    tokenize=False,
                    tools=tool_list,
                    **{end_option: not is_complete},
                    **self.template_kwargs,
                )
        except Exception as error:  # a template can raise anything
            # The names of Jinja's own errors say nothing that their texts do not say.
            kind = type(error).__name__
            text = str(error) if kind.startswith("Template") else f"{kind}: {error}"
            raise TemplateError(f"the chat template cannot render it: {one_line(text)}") from error
        if begins_answer:
            return end_with(text, plain_messages[-1]["content"])
        return text

    def render_call(self, name: str, arguments: JsonView, tools: Tools) -> str:
        """Returns the assistant's turn in which the chat template writes a call of a function.

        It is as a policy samples it: up to its end token, without the header. Raises TemplateError.
        """
        call_id = "call00000"  # Mistral's templates take nothing but nine letters and digits
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "id": call_id, "function": function}
        conversation = [
            *OPENING,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "name": name, "tool_call_id": call_id, "content": ANSWER},
        ]
        prompt = self.render(OPENING, tools)
        header = prompt.removesuffix(self.find_opened_tag(prompt))
        turn, _, _ = self.render(conversation, tools).removeprefix(header).rpartition(ANSWER)
        return self.as_completion(turn)

    def _template_of_run(self, tools: Tools | None) -> str:
        """Returns the chat template, in which `strftime_now` gives the start of the run.

        So a run that resumes on another day keeps its prompts. A comment in the template makes it
        another one than the tokenizer's in the cache of transformers.
        """
        from transformers.utils import chat_template_utils

        template = self.tokenizer.get_chat_template(tools=tools)
        template = f"{{# of the run that began at {self.started.isoformat()} +#}}{template}"
        compiled = chat_template_utils._compile_jinja_template(template)
        compiled.globals["strftime_now"] = self.started.strftime
        return template

    def _check_file(self, text: str, ids: Sequence[int], *, add_special_tokens: bool) -> None:
        """Raises ValueError if the model's tokenizer.json gives other ids for a text."""
        if self._file_tokenizer is None:
            return
        encoding = self._file_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if encoding.ids != list(ids):
            raise ValueError(
                f"transformers reads it as {len(ids)} tokens, not to the {len(encoding.ids)} of "
                "tokenizer.json. Make tokenizer_config.json agree with it"
            )

    @cached_property
    def _file_tokenizer(self) -> Any:
        """The tokenizer of tokenizer.json, without transformers; None if this file is missing."""
        from tokenizers import Tokenizer

        path = find_source(self.tokenizer.name_or_path, TOKENIZER)
        if path is None:
            return None
        tokenizer = Tokenizer.from_file(str(path))
        # Some files have the lengths of their training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def warn_if_unusual(self, prompt: Prompt, where: str) -> bool:
        """Warns of messages that may have been rendered before, and of keys that are not shown.

        Returns True if it warns.
        """
        text = "\n".join(str(message.get("content") or "") for message in prompt.messages)
        token = next((token for token in self.special_tokens if token in text), None)
        if token is None and not any(map(extra_keys, prompt.messages)):
            return False
        rendered_text = self.tokenizer.decode(prompt.token_ids)
        hidden_key = find_hidden_key(prompt.messages, rendered_text)
        if hidden_key is not None:
            logger.warning(
                "%s has a message with %r, which the chat template does not show", where, hidden_key
            )
        if token is None:
            return hidden_key is not None
        if rendered_text != text:
            logger.warning(
                "%s has the special token %s; its prompt is %.300r. If it was rendered before, "
                "set model.chat_template to a file with {{ messages[-1].content }} to ask %.300r",
                where,
                token,
                rendered_text,
                text,
            )
        return True

    def find_prefix(self, messages: Messages, text: str) -> str:
        """Returns the beginning of the answer that a rendered prompt ends with; "" without one.

        It is the assistant's last message, or a tag of the template, such as <think>.
        """
        if messages[-1]["role"] == "assistant":
            return str(messages[-1]["content"])
        return self.find_opened_tag(text)

    def find_opened_tag(self, text: str) -> str:
        """Returns the tag that a rendered text ends with, and that opens an answer; "" without one.

        White space after it is a part of it.
        """
        tag = OPENED_TAG.search(text)
        if tag is None:
            return ""
        name = tag[1]
        # A header, such as <assistant>, is a special token without a closing one.
        is_header = f"<{name}>" in self.special_tokens and f"</{name}>" not in self.special_tokens
        return "" if is_header else tag[0]

    def find_later_prefixes(self, token_ids: Sequence[int], sampled: Sequence[bool]) -> list[str]:
        """Returns the beginnings of the policy's turns after its first, with which replies end.

        token_ids, sampled: of a completion, one entry per token.
        """
        prefixes: list[str] = []
        start = 0
        for is_sampled, run in groupby(sampled):
            end = start + len(list(run))
            if not is_sampled:
                prefixes.append(self.find_opened_tag(self.decode(token_ids[start:end])))
            start = end
        return prefixes

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The texts of special tokens, and their ids."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {str(token): token_id for token_id, token in added.items() if token.special}

    def find_turn_end(self) -> int | None:
        """Returns the special token that ends an assistant's turn in the chat template.

        Returns None if there is none.
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return None
        try:
            text = self.render([*OPENING, {"role": "assistant", "content": ANSWER}, *OPENING])
        except TemplateError:
            return None
        # A template of the last message alone leaves the answer out: then nothing is behind it.
        _, answer, text_behind = text.rpartition(ANSWER)
        for token, token_id in self.special_tokens.items():
            if answer and text_behind.lstrip(" ").startswith(token):
                return token_id
        return None

    @property
    def end_id(self) -> int:
        """The token that ends a turn of the assistant.

        It is the chat template's, else the tokenizer's, else the generation config's. Raises
        ValueError if none of them has one.
        """
        candidates = [self.find_turn_end(), self.tokenizer.eos_token_id, *sorted(self.eos_ids)]
        for candidate in candidates:
            if candidate is not None:
                return candidate
        raise ValueError(
            "no token ends a completion: set eos_token in the model's tokenizer_config.json"
        )

    @cached_property
    def silent_ids(self) -> frozenset[int]:
        """The tokens that are in no text: the end tokens of completions, and the padding token."""
        padding = getattr(self.tokenizer, "pad_token_id", None)
        return self.eos_ids if padding is None else self.eos_ids | {padding}

    def as_completion(self, text: str) -> str:
        """Returns what is left of a text if a policy samples it.

        A completion ends at its first end token.
        """
        token_ids = self.encode(text, add_special_tokens=False)
        for index, token_id in enumerate(token_ids):
            if token_id in self.eos_ids:
                return self.decode(token_ids[:index])
        return self.decode(token_ids)

    def find_end(self, text: str) -> int | None:
        """Returns the token with which a text ends a completion; None if it has none at its end."""
        end_tokens = [
            token
            for token, token_id in self.special_tokens.items()
            if token_id in self.eos_ids and text.rstrip().endswith(token)
        ]
        if not end_tokens:
            return None
        # The longest, because one token may end with another.
        return self.special_tokens[max(end_tokens, key=len)]

    def without_end(self, text: str) -> str:
        """Returns a completion's text without the tokens that end or pad it.

        Also removes white space between and after these tokens. Raises ValueError if text follows
        an end token.
        """
        silent_tokens = [
            token for token, token_id in self.special_tokens.items() if token_id in self.silent_ids
        ]
        while text.rstrip().endswith(tuple(silent_tokens)):
            text = text.rstrip()
            # The longest, because one token may end with another.
            last_token = max(filter(text.endswith, silent_tokens), key=len)
            text = text.removesuffix(last_token)
        for token in silent_tokens:
            if self.special_tokens[token] in self.eos_ids and token in text:
                raise ValueError(f"its completion goes on after {token!r}, which ends a completion")
        return text

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raises ValueError for a token that the model does not have."""
        for token_id in ids:
            if not 0 <= token_id < self.vocabulary:
                raise ValueError(
                    f"token {token_id!s:.40} is outside the model's vocabulary of {self.vocabulary}"
                )

    def encode(self, text: str, **options: Any) -> list[int]:
        """Returns the token ids of a text.

        Raises ValueError for half of a surrogate pair, which no tokenizer takes.
        """
        text.encode()
        return self.tokenizer(text, **options)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, without the tokens that end or pad a completion.

        Other special tokens, such as <think>, are in the text.
        """
        ids = map(int, token_ids)
        spoken_ids = [token_id for token_id in ids if token_id not in self.silent_ids]
        return self.tokenizer.decode(
            spoken_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
