"""Chat: from messages to token ids and back, by a model's tokenizer and chat template, for one turn and for several.

transformers renders the template in its sandbox. What an environment replies is in tokens what the template adds
between the end of an assistant's turn and the next one. It is tokenized once and appended; what the policy sampled is
never tokenized again. The text of a reply is found with a short conversation in which only the reply is real:

    render(user "1", assistant "2", reply)  =  render(user "1") + "2" + END + reply's text

This holds for the real conversation if the template only appends to what it has rendered. Many templates drop the
thinking of earlier turns. The policy would then have sampled after other tokens than the template shows, so lagrpo
rejects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lagrpo.errors import one_line
from lagrpo.types import Prompt

Tools = Sequence[Mapping[str, Any]]
Messages = Sequence[Mapping[str, Any]]
OPENING = ({"role": "user", "content": "1"},)
SAID = "2"
THOUGHT = "<think>\n3\n</think>\n\n4"
WHAT_TO_DO = (
    "Set model.chat_template to a copy of it that appends each turn and leaves the earlier ones as they are, thinking "
    "included, or take a model whose template does"
)


class TemplateError(ValueError):
    """A chat template fails on some messages; `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the chat template cannot render it: {reason}")


class RewritingError(ValueError):
    """The chat template cannot be used for several turns."""


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A tokenizer, the model's `vocabulary` in tokens, every id that ends a completion, and `template_kwargs` for the
    chat template (enable_thinking, say)."""

    tokenizer: Any
    vocabulary: int
    eos_ids: frozenset[int]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_model(lm: Any, tokenizer: Any) -> Chat:
        """The chat of a model of transformers. Its generation config and its tokenizer say what ends a completion."""
        ends = lm.generation_config.eos_token_id
        ids = {*(ends if isinstance(ends, list | tuple) else [ends]), getattr(tokenizer, "eos_token_id", None)}
        known = frozenset(int(i) for i in ids if i is not None)
        return Chat(tokenizer, lm.get_output_embeddings().weight.shape[0], known)

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def tokenize(self, prompt: Prompt, tools: Tools | None = None) -> Prompt:
        """The prompt with its token ids, through the chat template, which gets `tools` as JSON schemas, or its plain
        text if the tokenizer has no template. Raises TemplateError if the template fails, ValueError for a prompt
        without tokens, or with a token that the model does not have."""
        if self.tokenizer.chat_template is None:
            ids = self.encode(text := "\n".join(message.get("content") or "" for message in prompt.messages))
        else:
            ids = self.encode(text := self.render(prompt.messages, tools), add_special_tokens=False)
        if not ids:
            raise ValueError(f"it has no token: it is the text {text!r:.80}")
        self.check_vocabulary(ids)
        return replace(prompt, token_ids=tuple(int(i) for i in ids))

    def render(self, messages: Messages, tools: Tools | None = None) -> str:
        """The text that the chat template makes of messages, with the header of the coming answer, which continues a
        last message of the assistant. Raises TemplateError."""
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        end = "continue_final_message" if given and given[-1]["role"] == "assistant" else "add_generation_prompt"
        options = {end: True, "tokenize": False, "tools": list(tools or ()) or None}
        try:
            return self.tokenizer.apply_chat_template(given, **options, **self.template_kwargs)
        except Exception as error:  # a template can raise anything
            kind = "" if type(error).__name__.startswith("Template") else f"{type(error).__name__}: "
            raise TemplateError(one_line(f"{kind}{error}")) from error

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Raise ValueError for a token that the model does not have."""
        if (largest := max(ids)) >= self.vocabulary:
            raise ValueError(f"token {largest} is outside the model's vocabulary of {self.vocabulary}")

    def encode(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text. Raises ValueError for half of a surrogate pair, which no tokenizer takes."""
        text.encode()
        return self.tokenizer(text, **options)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


class Replies:
    """The replies of environments in the tokens of a chat. Any thread may use it."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._checked: set[tuple[str, ...]] = set()

    @cached_property
    def end_id(self) -> int:
        """The token that ends a turn of the policy; after any other one the rollout ends."""
        return self._render_reply(OPENING, SAID, OPENING)[0]

    def check(self, messages: Messages) -> None:
        """Raise RewritingError if the template changes earlier turns when messages of these roles follow, TemplateError
        if it has no place for them."""
        reply = self._render_reply(OPENING, SAID, messages)
        thoughtful = [*OPENING, {"role": "assistant", "content": THOUGHT}, *messages]
        for before, said in ((OPENING, THOUGHT), (thoughtful, SAID)):
            if self._render_reply(before, said, messages) != reply:
                raise RewritingError(f"the chat template writes the same reply in several ways. {WHAT_TO_DO}")

    def tokens(self, messages: Messages) -> tuple[int, ...]:
        """The tokens that follow the end of a turn of the policy. Raises as `check`, and ValueError for a text that the
        tokenizer, or a token that the model, does not have."""
        if (roles := tuple(message["role"] for message in messages)) not in self._checked:
            self.check(messages)
            self._checked.add(roles)
        ids = self.chat.encode(self._render_reply(OPENING, SAID, messages)[1], add_special_tokens=False)
        self.chat.check_vocabulary(ids)
        return tuple(ids)

    def _render_reply(self, before: Messages, said: str, messages: Messages) -> tuple[int, str]:
        """The token that ends what was `said`, and the text that follows it when `messages` do."""
        if self.chat.tokenizer.chat_template is None:
            raise RewritingError("the tokenizer has no chat template, which tells turns apart: set model.chat_template")
        so_far = self.chat.render(before) + said
        longer = self.chat.render([*before, {"role": "assistant", "content": said}, *messages])
        if not longer.startswith(so_far):
            at = next(n for n, (a, b) in enumerate(zip(so_far, f"{longer}\0", strict=False)) if a != b)
            raise RewritingError(
                f"the chat template changes earlier turns when the conversation continues: {so_far[at:][:40]!r} "
                f"becomes {longer[at:][:40]!r}. {WHAT_TO_DO}"
            )
        rest = longer[len(so_far) :]
        ends = {end: str(self.chat.tokenizer.convert_ids_to_tokens(end)) for end in sorted(self.chat.eos_ids)}
        for end, text in ends.items():
            if rest.startswith(text):
                return end, rest[len(text) :]
        raise RewritingError(
            "the chat template does not end an assistant's turn with a token that ends the model's "
            f"({', '.join(map(repr, ends.values()))}), but with {rest[:20]!r}. {WHAT_TO_DO}"
        )
