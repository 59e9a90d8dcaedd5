"""Chat: from messages to token ids and back, by a model's tokenizer and chat template, for one turn and for several.

What an environment replies is in tokens what the template adds between the end of an assistant's turn and the next one.
It is tokenized once and appended; what the policy sampled is never tokenized again. The text of a reply is found with a
short conversation in which only the reply is real:

    render(user "1", assistant "2", reply)  =  render(user "1") + "2" + END + reply's text

This holds for the real conversation if the template only appends to what it has rendered. lagrpo rejects others: the
policy would have sampled after other tokens than the template shows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.types import Prompt

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


class TemplateError(ValueError):
    """A chat template fails on some messages."""


class RewritingError(ValueError):
    """The chat template cannot be used for several turns."""


def pin_date(template: str, moment: datetime) -> str:
    """A chat template that takes this moment for now: a run that resumes on another day keeps its prompts."""
    return re.sub(
        r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
        lambda call: repr(moment.strftime(call[2])),
        template,
    )


def end_with(text: str, said: str) -> str:
    """The rendered `text` that ends with what the assistant has `said`, with the white space after it that the template
    may have trimmed, and without the empty thought that Qwen3's template puts before a thought."""
    head, own = text.rstrip().removesuffix(said.strip()), said.lstrip()
    if head == text.rstrip():
        return text
    return (
        re.sub(r"<think>\s*</think>\s*$", "", head) if own.startswith("<think>") else head
    ) + own


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
            self.tokenizer.save_pretrained(directory)

    def tokenize(self, prompt: Prompt, tools: Tools | None = None) -> Prompt:
        """The prompt with its token ids, through the chat template, which gets `tools` as JSON schemas, or its plain
        text without a template. Raises TemplateError, ValueError for no token, or one that the model does not have."""
        if self.tokenizer.chat_template is None:
            ids = self.encode(
                text := "\n".join(message.get("content") or "" for message in prompt.messages)
            )
        else:
            ids = self.encode(text := self.render(prompt.messages, tools), add_special_tokens=False)
        if not ids:
            raise ValueError(f"it has no tokens: its text is {text!r:.80}")
        self.check_vocabulary(ids)
        return replace(
            prompt,
            token_ids=tuple(int(i) for i in ids),
            prefix=self._find_prefix(prompt.messages, text),
        )

    def render(self, messages: Messages, tools: Tools | None = None) -> str:
        """What the chat template makes of messages, with the header of the coming answer. Raises TemplateError."""
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        end = (
            "continue_final_message"
            if given and given[-1]["role"] == "assistant"
            else "add_generation_prompt"
        )
        options: dict[str, Any] = {end: True, "tokenize": False, "tools": list(tools or ()) or None}
        if isinstance(template := self.tokenizer.chat_template, str):  # else several, by name
            options["chat_template"] = pin_date(template, self.started)
        try:
            text = self.tokenizer.apply_chat_template(given, **options, **self.template_kwargs)
        except Exception as error:  # a template can raise anything
            kind = (
                "" if type(error).__name__.startswith("Template") else f"{type(error).__name__}: "
            )
            raise TemplateError(
                f"the chat template cannot render it: {one_line(f'{kind}{error}')}"
            ) from error
        return text if end == "add_generation_prompt" else end_with(text, given[-1]["content"])

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
        tag = re.search(r"<\w+>\s*$", text)
        return tag[0] if tag and tag[0].strip() not in self.special_tokens else ""

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The texts of special tokens, which `decode` leaves out, and their ids."""
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
        """The token that ends a turn of the assistant."""
        end = self.find_turn_end()
        return self.tokenizer.eos_token_id if end is None else end

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
        """The text of tokens as they are, without special tokens."""
        return self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
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
        ids = self.chat.encode(
            self._render_reply(OPENING, SAID, messages), add_special_tokens=False
        )
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
