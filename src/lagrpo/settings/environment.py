"""What completions talk to, and for how long: section environment."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from lagrpo.settings.section import Section


class EnvironmentSettings(Section):
    name: str | None = None
    """package.module:function that is called for every completion and returns its environment, with reset(prompt,
    key) and step(text). The prompts are the task's. Without a name: the task's own environment, if it has one."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, as package.module:function, or calculator. An answer without a call goes to
    the task's reward function."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the policy in a completion; an episode that is not over by then is cut."""
    max_tokens: int = Field(default=512, ge=1)
    """Tokens that the environment says in a completion; an episode in which it says more is cut."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and ":" not in name:
            raise ValueError(f"{name!r} is not of the form 'package.module:function'; built-in ones belong to tasks")
        return name

    @model_validator(mode="after")
    def _check_tools(self) -> EnvironmentSettings:
        if self.name is not None and self.tools:
            raise ValueError(f"name = {self.name!r} and tools are two environments: set one of them")
        return self
