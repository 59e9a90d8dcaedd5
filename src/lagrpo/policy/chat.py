"""Chat: from messages to token ids and back, by a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lagrpo.policy.templates import Templates
from lagrpo.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """A tokenizer, the model's `vocabulary` in tokens, and every id that ends a completion. `templates` renders the
    tokenizer's chat template, with `arguments` beside the messages (enable_thinking, say); whoever gives it closes
    it."""

    tokenizer: Any
    vocabulary: int
    eos_ids: frozenset[int]
    templates: Templates = field(default_factory=Templates)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(lm: Any, tokenizer: Any, templates: Templates | None = None) -> Chat:
        """The chat of a model of transformers. Its generation config and its tokenizer say what ends a completion."""
        ends = lm.generation_config.eos_token_id
        ids = {*ends} if isinstance(ends, list | tuple) else {ends}
        ids |= {tokenizer.eos_token_id} if tokenizer is not None else set()
        known = frozenset(int(i) for i in ids if i is not None)
        return Chat(tokenizer, lm.get_output_embeddings().weight.shape[0], known, templates or Templates())

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The prompt with its token ids: through the chat template, or its plain text where the tokenizer has none.

        Raises:
            TemplateError: the chat template makes no text of it.
            ValueError: no tokens, or one that the model does not have.
        """
        if self.tokenizer.chat_template is None:
            text = "\n".join(message.get("content") or "" for message in prompt.messages)
            ids = self.encode(text)
        else:
            messages = [{k: v for k, v in message.items() if v is not None} for message in prompt.messages]
            variables = {**self.tokenizer.special_tokens_map, **self.arguments}
            text = self.templates.render(self.tokenizer.get_chat_template(), variables, messages)
            ids = self.encode(text, add_special_tokens=False)
        if not ids:
            raise ValueError(f"it has no token: it is the text {text!r:.80}")
        if (largest := max(ids)) >= self.vocabulary:
            raise ValueError(f"token {largest} is outside the model's vocabulary of {self.vocabulary}")
        return replace(prompt, token_ids=tuple(int(i) for i in ids))

    def encode(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text, by the tokenizer with these options. Raises ValueError for a text with half of a
        surrogate pair, which no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a surrogate pair"
            raise ValueError(f"its character {error.start} is {half}, which no tokenizer takes") from error
        return self.tokenizer(text, **options)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
