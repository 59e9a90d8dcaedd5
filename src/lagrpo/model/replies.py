"""Replies of an environment, in the tokens of a chat.

A reply's tokens are what the template adds between the end of an assistant's turn and the next
one. A reply is tokenized once and appended; what the policy sampled is never tokenized again. The
text of a reply is found with a short conversation in which only the reply is real:

    render(user "1", assistant "2", reply)  =  render(user "1") + "2" + END + reply's text

This holds for the real conversation if the template only appends to what it has rendered. lagrpo
rejects other templates: the policy would have sampled after other tokens than the template shows.
"""

from __future__ import annotations

from functools import cached_property

from lagrpo.model.chat import OPENING, Chat
from lagrpo.model.rendered import Messages, check_rendered

# The text of an assistant's turn, without and with a thought.
TURN = "2"
THOUGHT = "<think>\n3\n</think>\n\n4"
WHAT_TO_DO = (
    "Set model.chat_template to a copy that keeps earlier turns unchanged, thinking included"
)


class RewritingError(ValueError):
    """The chat template cannot be used for several turns."""


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
        """Raises RewritingError if messages of these roles make the template change earlier turns.

        Also raises TemplateError.
        """
        thoughtful = [*OPENING, {"role": "assistant", "content": THOUGHT}, *messages]
        texts = {
            self._render_reply(OPENING, TURN, messages),
            self._render_reply(OPENING, THOUGHT, messages),
            self._render_reply(thoughtful, TURN, messages),
        }
        if len(texts) > 1:
            raise RewritingError(
                f"the chat template renders a reply differently after other turns. {WHAT_TO_DO}"
            )

    def tokens(self, messages: Messages) -> tuple[int, ...]:
        """Returns the tokens that follow the end of a turn of the policy.

        Raises as `check`, and ValueError.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._checked:
            self.check(messages)
            self._checked.add(roles)
        text = self._render_reply(OPENING, TURN, messages)
        check_rendered(messages, text)
        # Some tokenizers strip white space after the end token, or mark the beginning of a text.
        ids = self.chat.encode(self._turn_end + text, add_special_tokens=False)
        if ids[:1] == [self.end_id]:
            ids = ids[1:]
        else:
            # The tokenizer joins the end with what follows. The policy has sampled the end alone.
            ids = self.chat.encode(text, add_special_tokens=False)
        self.chat.check_vocabulary(ids)
        return tuple(ids)

    @property
    def _turn_end(self) -> str:
        """The text of the token that ends a turn."""
        return str(self.chat.tokenizer.convert_ids_to_tokens(self.end_id))

    def _render_reply(self, before: Messages, turn: str, messages: Messages) -> str:
        """Returns the text of `messages` behind the end of an assistant's turn.

        The conversation is `before`, then a turn of the assistant with the text `turn`, then
        `messages`.
        """
        if self.chat.tokenizer.chat_template is None:
            raise RewritingError(
                "the tokenizer has no chat template to separate turns: set model.chat_template"
            )
        so_far = self.chat.render(before) + turn
        longer = self.chat.render([*before, {"role": "assistant", "content": turn}, *messages])
        if not longer.startswith(so_far):
            start = 0
            while so_far[start : start + 1] == longer[start : start + 1]:
                start += 1
            before_change = so_far[start:][:40]
            after_change = longer[start:][:40]
            raise RewritingError(
                "the chat template changes earlier turns when the conversation continues: "
                f"{before_change!r} becomes {after_change!r}. {WHAT_TO_DO}"
            )
        text_behind = longer[len(so_far) :]
        if not text_behind.startswith(self._turn_end):
            raise RewritingError(
                f"the chat template ends an assistant turn with {text_behind[:20]!r}, "
                f"not with {self._turn_end!r}. {WHAT_TO_DO}"
            )
        return text_behind.removeprefix(self._turn_end)
