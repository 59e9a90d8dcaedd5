"""What an environment's reply is in tokens: what the chat template adds between the end of an assistant's turn and the
next one. It is tokenized once and appended; what the policy sampled is never tokenized again.

The text of a reply is what a short conversation gains by it, in which only the reply is real:

    render(user "1", assistant "2", reply)  =  render(user "1") + "2" + END + reply's text

That holds for the real conversation, too, if the template adds to what it has rendered and changes none of it.
Templates that change earlier turns exist: many drop the thinking of all but the last one. The policy would then have
sampled after other tokens than the template shows, so they are refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lagrpo.model.chat import Chat, TemplateError

Messages = Sequence[Mapping[str, Any]]
OPENING = ({"role": "user", "content": "1"},)
SAID = "2"
THOUGHT = "<think>\n3\n</think>\n\n4"
WHAT_TO_DO = (
    "Set model.chat_template to a copy of it that appends each turn and leaves the earlier ones as they are, thinking "
    "included, or take a model whose template does"
)


class RewritingError(ValueError):
    """The chat template cannot be used for several turns."""


class Replies:
    """The replies of environments in the tokens of a chat. Any thread may use it."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._lock = threading.Lock()  # one process renders
        self._known: dict[str, tuple[int, ...]] = {}
        self._checked: set[tuple[str, ...]] = set()

    @cached_property
    def end_id(self) -> int:
        """The token that ends a turn of the policy; after any other one the episode does not go on."""
        return self._read(OPENING, SAID, OPENING)[0]

    def check(self, messages: Messages) -> None:
        """Raise RewritingError where the template changes earlier turns when such messages follow (messages of the same
        roles), TemplateError where it has no place for them."""
        end, added = self._read(OPENING, SAID, messages)
        thoughtful = [*OPENING, {"role": "assistant", "content": THOUGHT}, *messages]
        for before, said in ((OPENING, THOUGHT), (thoughtful, SAID)):
            if self._read(before, said, messages) != (end, added):
                raise RewritingError(f"the chat template writes the same reply in several ways. {WHAT_TO_DO}")

    def tokens(self, messages: Messages) -> tuple[int, ...]:
        """The tokens that follow the end of a turn of the policy. Raises as `check`, and ValueError for a text that the
        tokenizer, or a token that the model, does not have."""
        with self._lock:
            if (key := json.dumps(messages)) not in self._known:
                if (roles := tuple(message["role"] for message in messages)) not in self._checked:
                    self.check(messages)
                    self._checked.add(roles)
                ids = self.chat.encode(self._read(OPENING, SAID, messages)[1], add_special_tokens=False)
                self.chat.check_vocabulary(ids)
                self._known = {key: tuple(ids)} if len(self._known) > 1000 else self._known | {key: tuple(ids)}
            return self._known[key]

    def _read(self, before: Messages, said: str, messages: Messages) -> tuple[int, str]:
        """The token that ends what was `said`, and the text that follows it when `messages` do."""
        if self.chat.tokenizer.chat_template is None:
            raise RewritingError("the tokenizer has no chat template, which tells turns apart: set model.chat_template")
        so_far = self.chat.render(before) + said
        longer = self.chat.render([*before, {"role": "assistant", "content": said}, *messages])
        if not longer.startswith(so_far):
            at = next(n for n, (a, b) in enumerate(zip(so_far, f"{longer}\0", strict=False)) if a != b)
            raise RewritingError(
                f"the chat template changes earlier turns when the conversation goes on: {so_far[at:][:40]!r} becomes "
                f"{longer[at:][:40]!r}. {WHAT_TO_DO}"
            )
        rest, tokenizer = longer[len(so_far) :], self.chat.tokenizer
        for end in sorted(self.chat.eos_ids):
            if rest.startswith(text := str(tokenizer.convert_ids_to_tokens(end))):
                return end, rest[len(text) :]
        ends = ", ".join(repr(tokenizer.convert_ids_to_tokens(end)) for end in sorted(self.chat.eos_ids))
        raise RewritingError(
            f"the chat template does not end an assistant's turn with a token that ends the model's ({ends}), but with "
            f"{rest[:20]!r}. {WHAT_TO_DO}"
        )


__all__ = ["Replies", "RewritingError", "TemplateError"]
