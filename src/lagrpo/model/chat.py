"""Chat: from messages to token ids and back, by a model's tokenizer and chat template, for one turn and for several.

What an environment replies is in tokens what the template adds between the end of an assistant's turn and the next one.
It is tokenized once and appended; what the policy sampled is never tokenized again. The text of a reply is found with a
short conversation in which only the reply is real:

    render(user "1", assistant "2", reply)  =  render(user "1") + "2" + END + reply's text

This holds for the real conversation if the template only appends to what it has rendered. lagrpo rejects others: the
policy would have sampled after other tokens than the template shows.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.model.files import TOKENIZER, find_source, save_tokenizer
from lagrpo.types import THOUGHT_END, Prompt

logger = logging.getLogger("lagrpo")
Tools = Sequence[Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]
OPENING = ({"role": "user", "content": "1"},)
SAID = "2"
THOUGHT = "<think>\n3\n</think>\n\n4"
ANSWER = "This is an answer"
WHAT_TO_DO = (
    "Set model.chat_template to a copy that keeps earlier turns unchanged, thinking included"
)
ROLES_IN_FRONT = ("system", "developer")
"""Messages of these roles may stand anywhere in a prompt: templates move them to the front or into a user's turn."""
SWITCHES = re.compile(r"/(?:no_?think|think|system_override)\b")
"""Switches of thinking in a message, which some templates act on and remove."""
TAG = re.compile(r"</?[\w:]{1,30}>")


class TemplateError(ValueError):
    """A chat template fails on some messages."""


class RewritingError(ValueError):
    """The chat template cannot be used for several turns."""


def end_with(text: str, said: str) -> str:
    """The rendered `text` that ends with what the assistant has `said`, with the white space after it that the template
    may have trimmed, and without the empty thought that Qwen3's template puts before a thought."""
    head, own = text.rstrip().removesuffix(said.strip()), said.lstrip()
    if head == text.rstrip():
        return text
    return (
        re.sub(r"<think>\s*</think>\s*$", "", head) if own.startswith("<think>") else head
    ) + own


# ---- what a rendered prompt must have ----


def check_rendered(messages: Messages, text: str) -> None:
    """Raise ValueError unless a rendered prompt has the texts of all messages, in their order."""
    end_of_previous = 0
    for number, message in enumerate(messages, start=1):
        is_in_front = message["role"] in ROLES_IN_FRONT
        end = 0 if is_in_front else end_of_previous
        for piece in required_pieces(message):
            end = find_end(piece, text, end)
            if end < 0:
                message_name = f"message {number} (role {message['role']!r})"
                cure = "Change the message, or set model.chat_template to a template that shows it"
                raise ValueError(
                    f"the rendered prompt lacks {one_line(piece, 80)!r} of its {message_name}. {cure}"
                )
        if not is_in_front:
            end_of_previous = end


def required_pieces(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message that no chat template may drop, in order: its content without the white space around it,
    and the names of the functions that it calls.

    Templates drop the thinking of earlier turns, and some drop the tags of an answer and the switches of thinking."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    separator = SWITCHES
    if message["role"] == "assistant":
        text = THOUGHT_END.split(text)[-1]
        separator = TAG
    yield from filter(None, map(str.strip, separator.split(text)))
    for call in message.get("tool_calls") or ():
        yield call.get("function", call)["name"]


def find_end(piece: str, text: str, start: int) -> int:
    """The end of the first place from `start` on where a text has a piece, as it is or as JSON; -1 without one."""
    forms = {
        piece,
        json.dumps(piece)[1:-1],
        json.dumps(piece, ensure_ascii=False)[1:-1],
    }
    ends = [text.find(form, start) + len(form) for form in forms if text.find(form, start) >= 0]
    return min(ends, default=-1)


def write_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if not isinstance(function.get("arguments"), str):
            arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


@dataclass(frozen=True, eq=False)
class Chat:
    """A tokenizer, the model's `vocabulary` in tokens, every id that ends a completion, `template_kwargs` for the chat
    template, and the time that templates with a date show: the start of the run."""

    tokenizer: Any
    vocabulary: int
    eos_ids: frozenset[int]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    @staticmethod
    def from_model(lm: Any, tokenizer: Any) -> Chat:
        """The chat of a model: its generation config, tokenizer and chat template say what ends a completion."""
        ends = lm.generation_config.eos_token_id
        ids = {
            *(ends if isinstance(ends, list | tuple) else [ends]),
            getattr(tokenizer, "eos_token_id", None),
        }
        chat = Chat(
            tokenizer, lm.get_output_embeddings().weight.shape[0], frozenset(ids - {None})
        ).with_turn_end()
        if added := chat.eos_ids - ids:
            text = "completions also end at %s, which ends turns in the chat template but not in the generation config"
            logger.warning(text, tokenizer.convert_ids_to_tokens([*added])[0])
        if not chat.eos_ids:
            logger.warning(
                "no token ends a completion: every one gets as long as it may. "
                "Set eos_token in the model's tokenizer_config.json"
            )
        end = chat.find_turn_end()
        if end is not None and chat.render(OPENING).rstrip().endswith(
            token := tokenizer.convert_ids_to_tokens(end)
        ):
            logger.warning(
                "the chat template opens no turn for the assistant: completions begin after %s",
                token,
            )
        return chat

    def with_turn_end(self) -> Chat:
        """The chat in which the token that ends a turn in the chat template ends completions, too."""
        return replace(self, eos_ids=self.eos_ids | ({self.find_turn_end()} - {None}))

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files."""
        if self.tokenizer is not None:
            save_tokenizer(self.tokenizer, directory)

    def tokenize(self, prompt: Prompt, tools: Tools | None = None) -> Prompt:
        """The prompt with its token ids, through the chat template, which gets `tools` as JSON schemas, or its plain
        text without a template. Raises TemplateError, and ValueError for a message that the template leaves out, for
        no token, one that the model does not have, and others than the model's tokenizer.json gives."""
        is_chat = self.tokenizer.chat_template is not None
        if is_chat:
            text = self.render(prompt.messages, tools)
        else:
            text = "\n".join(message.get("content") or "" for message in prompt.messages)
        check_rendered(prompt.messages, text)
        ids = self.encode(text, add_special_tokens=not is_chat)
        if not ids:
            raise ValueError(f"it has no tokens: its text is {text!r:.80}")
        self.check_vocabulary(ids)
        self._check_file(text, ids, add_special_tokens=not is_chat)
        return replace(
            prompt,
            token_ids=tuple(int(i) for i in ids),
            prefix=self._find_prefix(prompt.messages, text),
        )

    def render(self, messages: Messages, tools: Tools | None = None) -> str:
        """What the chat template makes of messages, with the header of the coming answer. Raises TemplateError."""
        try:
            return self._render(messages, tools)
        except TemplateError:
            with_text = [write_arguments(message) for message in messages]
            if with_text != list(messages):
                with suppress(TemplateError):  # DeepSeek's template takes arguments as JSON text
                    return self._render(with_text, tools)
            raise

    def _render(self, messages: Messages, tools: Tools | None) -> str:
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        for message in given:
            if message.get("tool_calls"):  # OpenAI's API has null for the text of a call
                message.setdefault("content", "")
        end = (
            "continue_final_message"
            if given and given[-1]["role"] == "assistant"
            else "add_generation_prompt"
        )
        options: dict[str, Any] = {end: True, "tokenize": False, "tools": list(tools or ()) or None}
        try:
            options["chat_template"] = self._template_of_run(options["tools"])
            text = self.tokenizer.apply_chat_template(given, **options, **self.template_kwargs)
        except Exception as error:  # a template can raise anything
            kind = (
                "" if type(error).__name__.startswith("Template") else f"{type(error).__name__}: "
            )
            raise TemplateError(
                f"the chat template cannot render it: {one_line(f'{kind}{error}')}"
            ) from error
        return text if end == "add_generation_prompt" else end_with(text, given[-1]["content"])

    def _template_of_run(self, tools: Tools | None) -> str:
        """The chat template, whose `strftime_now` gives the start of the run: a run that resumes on another day keeps
        its prompts. A comment makes it another template than the tokenizer's in the cache of transformers."""
        from transformers.utils import chat_template_utils

        template = self.tokenizer.get_chat_template(tools=tools)
        template = f"{{# of the run that began at {self.started.isoformat()} +#}}{template}"
        compiled = chat_template_utils._compile_jinja_template(template)
        compiled.globals["strftime_now"] = self.started.strftime
        return template

    def _check_file(self, text: str, ids: Sequence[int], add_special_tokens: bool) -> None:
        """Raise ValueError if the model's tokenizer.json gives other ids for a text."""
        if self._file_tokenizer is None:
            return
        encoding = self._file_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if encoding.ids != list(ids):
            counts = f"{len(ids)} tokens, not to the {len(encoding.ids)}"
            cure = "Make tokenizer_config.json agree with it"
            raise ValueError(f"transformers reads it as {counts} of tokenizer.json. {cure}")

    @cached_property
    def _file_tokenizer(self) -> Any:
        """The tokenizer that tokenizer.json describes, without transformers; None for a model without this file."""
        from tokenizers import Tokenizer

        path = find_source(self.tokenizer.name_or_path, TOKENIZER)
        if path is None:
            return None
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # some files have the lengths of their training
        tokenizer.no_padding()
        return tokenizer

    def warn_if_rendered(self, prompt: Prompt, where: str) -> bool:
        """Whether the messages have a special token: then they may have been rendered before, and a warning says so."""
        text = "\n".join(str(message.get("content") or "") for message in prompt.messages)
        token = next((token for token in self.special_tokens if token in text), None)
        if token is not None and (asked := self.tokenizer.decode(prompt.token_ids)) != text:
            cure = "If it was rendered before, set model.chat_template to a file with {{ messages[-1].content }} to ask"
            given = where, token, asked, cure, text
            logger.warning("%s has the special token %s, and is asked as %.300r. %s %.300r", *given)
        return token is not None

    def _find_prefix(self, messages: Messages, text: str) -> str:
        """What the prompt begins the answer with: the last message of the assistant, or a tag of the template."""
        if messages[-1]["role"] == "assistant":
            return str(messages[-1]["content"])
        tag = re.search(r"<(\w+)>\s*$", text)
        if tag is None:
            return ""
        is_header = (  # such as <assistant>: a special token without a closing one
            f"<{tag[1]}>" in self.special_tokens and f"</{tag[1]}>" not in self.special_tokens
        )
        return "" if is_header else tag[0]

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The texts of special tokens, and their ids."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {str(token): number for number, token in added.items() if token.special}

    def find_turn_end(self) -> int | None:
        """The special token with which the chat template ends an assistant's turn; None if it has none."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            return None
        try:
            text = self.render([*OPENING, {"role": "assistant", "content": ANSWER}, *OPENING])
        except TemplateError:
            return None
        rest = text.rpartition(ANSWER)[2].lstrip(" ")
        return next(
            (number for token, number in self.special_tokens.items() if rest.startswith(token)),
            None,
        )

    @property
    def end_id(self) -> int:
        """The token that ends a turn of the assistant: the chat template's, else the tokenizer's, else the generation
        config's. Raises ValueError if none of them has one."""
        candidates = [self.find_turn_end(), self.tokenizer.eos_token_id, *sorted(self.eos_ids)]
        for candidate in candidates:
            if candidate is not None:
                return candidate
        raise ValueError(
            "no token ends a completion: set eos_token in the model's tokenizer_config.json"
        )

    @cached_property
    def silent_ids(self) -> frozenset[int]:
        """The tokens that are not in texts: those that end completions, and the one that pads."""
        padding = getattr(self.tokenizer, "pad_token_id", None)
        return self.eos_ids if padding is None else self.eos_ids | {padding}

    def as_completion(self, text: str) -> str:
        """What is left of a text if a policy samples it: a completion ends at its first end token."""
        ids = self.encode(text, add_special_tokens=False)
        ends = [place for place, number in enumerate(ids) if number in self.eos_ids]
        return self.decode(ids[: ends[0]] if ends else ids)

    def without_end(self, text: str) -> str:
        """A completion's text without the tokens that end or pad it, and the white space between and after them.
        Raises ValueError for a text that goes on after an end token."""
        silent = [
            token for token, number in self.special_tokens.items() if number in self.silent_ids
        ]
        while text.rstrip().endswith(tuple(silent)):
            last = max((token for token in silent if text.rstrip().endswith(token)), key=len)
            text = text.rstrip().removesuffix(last)
        for token in silent:
            if self.special_tokens[token] in self.eos_ids and token in text:
                raise ValueError(f"its completion goes on after {token!r}, which ends a completion")
        return text

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise ValueError for a token that the model does not have."""
        if strange := [i for i in ids if not 0 <= i < self.vocabulary]:
            raise ValueError(
                f"token {strange[0]!s:.40} is outside the model's vocabulary of {self.vocabulary}"
            )

    def encode(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text. Raises ValueError for half of a surrogate pair, which no tokenizer takes."""
        text.encode()
        return self.tokenizer(text, **options)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens as they are, special ones such as <think> included, without those that end or pad."""
        spoken_ids = [int(number) for number in token_ids if int(number) not in self.silent_ids]
        return self.tokenizer.decode(
            spoken_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


class Replies:
    """The replies of environments in the tokens of a chat. Any thread may use it."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._checked: set[tuple[str, ...]] = set()

    @cached_property
    def end_id(self) -> int:
        """The token that ends a turn of the policy; after any other one the rollout ends."""
        return self.chat.end_id

    def check(self, messages: Messages) -> None:
        """Raise RewritingError if the template changes earlier turns when messages of these roles follow, and
        TemplateError."""
        thoughtful = [*OPENING, {"role": "assistant", "content": THOUGHT}, *messages]
        asked = ((OPENING, SAID), (OPENING, THOUGHT), (thoughtful, SAID))
        if len({self._render_reply(before, said, messages) for before, said in asked}) > 1:
            raise RewritingError(
                f"the chat template renders a reply differently after other turns. {WHAT_TO_DO}"
            )

    def tokens(self, messages: Messages) -> tuple[int, ...]:
        """The tokens that follow the end of a turn of the policy. Raises as `check`, and ValueError."""
        if (roles := tuple(message["role"] for message in messages)) not in self._checked:
            self.check(messages)
            self._checked.add(roles)
        text = self._render_reply(OPENING, SAID, messages)
        check_rendered(messages, text)
        ids = self.chat.encode(text, add_special_tokens=False)
        self.chat.check_vocabulary(ids)
        return tuple(ids)

    def _render_reply(self, before: Messages, said: str, messages: Messages) -> str:
        """The text that follows the end of what was `said` when `messages` do."""
        if self.chat.tokenizer.chat_template is None:
            raise RewritingError(
                "the tokenizer has no chat template to separate turns: set model.chat_template"
            )
        so_far = self.chat.render(before) + said
        longer = self.chat.render([*before, {"role": "assistant", "content": said}, *messages])
        if not longer.startswith(so_far):
            at = next(
                n for n, (a, b) in enumerate(zip(so_far, f"{longer}\0", strict=False)) if a != b
            )
            change = f"{so_far[at:][:40]!r} becomes {longer[at:][:40]!r}. {WHAT_TO_DO}"
            raise RewritingError(
                f"the chat template changes earlier turns when the conversation continues: {change}"
            )
        rest, end = (
            longer[len(so_far) :],
            str(self.chat.tokenizer.convert_ids_to_tokens(self.end_id)),
        )
        if not rest.startswith(end):
            wrong = f"the chat template ends an assistant turn with {rest[:20]!r}, not with {end!r}"
            raise RewritingError(f"{wrong}. {WHAT_TO_DO}")
        return rest[len(end) :]
