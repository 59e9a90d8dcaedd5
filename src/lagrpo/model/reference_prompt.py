"""The prompt of the reference, by a template of the user, for self-distillation.

The template renders to a text, which replaces the last message of the user. Then the policy's chat
template renders the messages, with the same checks as for the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lagrpo.errors import check_is_pulled, describe_error
from lagrpo.model.chat import Chat, Tools, limited_time
from lagrpo.types import JsonView, Prompt

BEST = "best_completion"
NAMES = ("prompt", "answer", "row", BEST)
"""The variables of a template: text of the last message of the user, reference answer, row, and
text of the group's best completion."""
EXAMPLE = "1"
"""A best completion to check a template with, before there is one."""


def is_text(setting: str) -> bool:
    """True if loss.reference_prompt is a template itself, False if it names a file.

    An empty text names no file.

    >>> is_text("{{ prompt }} Hint: {{ answer }}"), is_text("hint.jinja")
    (True, False)
    """
    return "{{" in setting or "{%" in setting or not setting.strip()


def find_best(rewards: Sequence[float | None], texts: Sequence[str], smallest: float) -> str:
    """Returns the text of the first completion of a group with the highest reward.

    Returns an empty text if no reward is above `smallest`, the lower end of the task's range. None
    is no reward.

    >>> find_best([0.0, 1.0, None, 1.0], ["a", "b", "c", "d"], smallest=0.0)
    'b'
    """
    highest = max((reward for reward in rewards if reward is not None), default=smallest)
    if highest <= smallest:
        return ""
    return texts[list(rewards).index(highest)]


class ReferencePrompt:
    """A Jinja template that reads NAMES. Raises ValueError for one that cannot be parsed.

    If it `reads_best`, what the reference sees is known when the group has its rewards.
    """

    def __init__(self, template: str) -> None:
        from jinja2 import StrictUndefined, TemplateError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            self._template: Any = environment.from_string(template)
            variables = meta.find_undeclared_variables(environment.parse(template))
        except TemplateError as error:
            raise ValueError(f"it is no Jinja template: {error}") from error
        self.reads_best = BEST in variables

    @staticmethod
    def read(setting: str) -> ReferencePrompt:
        """Returns the template of loss.reference_prompt: a text, or the name of a file.

        Raises ValueError or OSError.
        """
        if is_text(setting):
            return ReferencePrompt(setting)
        path = Path(setting).expanduser()
        check_is_pulled(path)
        return ReferencePrompt(path.read_text(encoding="utf-8"))

    def tokenize_with_best(
        self, chat: Chat, prompt: Prompt, best: str, limit: int, tools: Tools | None = None
    ) -> tuple[int, ...]:
        """Returns the tokens that the reference sees if `best` is the group's best completion.

        They are the tokens of the policy if `best` is empty, or if there are more than `limit`
        tokens. Raises ValueError as `fill` and `Chat.tokenize`.
        """
        if not best:
            return prompt.token_ids
        token_ids = chat.tokenize(self.fill(prompt, best), tools).token_ids
        return token_ids if len(token_ids) <= limit else prompt.token_ids

    def fill(self, prompt: Prompt, best: str = EXAMPLE) -> Prompt:
        """Returns the prompt with the rendered text as its last message of the user.

        `best` is the text of the group's best completion.

        Raises ValueError for a prompt without such a message, and for a template that fails or
        renders nothing.
        """
        messages = list(prompt.messages)
        of_user = [n for n, message in enumerate(messages) if message["role"] == "user"]
        if not of_user:
            raise ValueError("loss.reference_prompt replaces a message of the user; it has none")
        last = of_user[-1]
        variables: JsonView = {
            "prompt": messages[last].get("content") or "",
            "answer": prompt.answer,
            "row": prompt.row or {},
            BEST: best,
        }
        try:
            with limited_time():
                text = self._template.render(variables)
        except Exception as error:  # a template can raise anything
            raise ValueError(
                f"loss.reference_prompt cannot be rendered: {describe_error(error)}. "
                f"It may read {', '.join(NAMES)}"
            ) from error
        if not text.strip():
            raise ValueError("loss.reference_prompt renders to an empty text")
        messages[last] = {**messages[last], "content": text}
        return replace(prompt, messages=tuple(messages))
