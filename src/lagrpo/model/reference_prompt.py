"""The prompt of the reference, by a template of the user, for self-distillation.

The template renders to a text, which replaces the last message of the user. Then the policy's chat
template renders the messages, with the same checks as for the policy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lagrpo.errors import check_is_pulled, describe_error
from lagrpo.model.chat import limited_time
from lagrpo.types import JsonView, Prompt

NAMES = ("prompt", "answer", "row")
"""The variables of a template: text of the last message of the user, reference answer, row."""


def is_text(setting: str) -> bool:
    """True if loss.reference_prompt is a template itself, False if it names a file.

    >>> is_text("{{ prompt }} Hint: {{ answer }}"), is_text("hint.jinja")
    (True, False)
    """
    return "{{" in setting or "{%" in setting


class ReferencePrompt:
    """A Jinja template that reads NAMES. Raises ValueError for one that cannot be parsed."""

    def __init__(self, template: str) -> None:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        try:
            self._template: Any = environment.from_string(template)
        except TemplateError as error:
            raise ValueError(f"it is no Jinja template: {error}") from error

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

    def fill(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the rendered text as its last message of the user.

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
