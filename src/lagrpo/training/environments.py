"""From settings to the environment that completions talk to: which one, in which processes, by which chat template."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from lagrpo.errors import refusing
from lagrpo.policy.chat import Chat, TemplateError
from lagrpo.policy.replies import OPENING, Replies
from lagrpo.sampling.episodes import Episodes, Limits
from lagrpo.settings.environment import EnvironmentSettings
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.tasks import Task
from lagrpo.tasks.base import Make, TaskWithEnvironment
from lagrpo.tasks.environments import load_environment
from lagrpo.tasks.tools import Tools, system_text
from lagrpo.tasks.verifiers import Verifiers
from lagrpo.verify import Environments

EXAMPLE = "5"  # what is said to see whether the chat template can say it


@dataclass(frozen=True, slots=True)
class Talk:
    """What completions talk to: `make` makes an environment for each, `role` is who replies, and `tools` are JSON
    schemas for the chat template, None where there are none or it does not take them."""

    make: Make
    role: str = "user"
    tools: list[dict[str, Any]] | None = None

    @staticmethod
    def find(settings: EnvironmentSettings, task: Task, chat: Chat) -> Talk | None:
        """What the settings or the task name; None where completions have one turn. Raises SettingsError for functions
        that are not there or do not say how they are called."""
        with refusing("environment", TemplateError):
            make = load_environment(settings, task)
            schemas = make.schemas() if isinstance(make, Tools | Verifiers) else []
            if not isinstance(make, Tools | Verifiers) or not schemas:
                return Talk(make) if make is not None else None
            said = chat.render(OPENING, schemas)
            taken = all(f'"{schema["function"]["name"]}"' in said for schema in schemas)
            return Talk(
                make if taken else replace(make, system=system_text(schemas)), "tool", schemas if taken else None
            )

    def start(self, settings: Settings | EvalSettings, chat: Chat, sampled: int, undo: ExitStack) -> Episodes:
        """Episodes of at most so many sampled tokens, their processes started. Raises SettingsError for an environment
        that cannot be sent to them, and a chat template that changes earlier turns."""
        replies, limits = Replies(chat), settings.environment
        with refusing("environment", TypeError, TemplateError):
            replies.check([{"role": self.role, "content": EXAMPLE}])
            environments = undo.enter_context(Environments(self.make, **settings.verifier.of_an_environment))
        return Episodes(environments, replies, Limits(limits.max_turns, sampled, limits.max_tokens))


def check_environment(settings: Settings, make: Make | None) -> None:
    """Raise ValueError for settings that completions of several turns cannot be combined with."""
    evaluation = settings.evaluation
    if make is None:
        return
    if settings.task.rewards:
        raise ValueError("the environment gives the rewards of its completions: leave out task.rewards")
    if evaluation.sets or evaluation.sampler == "vllm":
        name = "evaluation.sets" if evaluation.sets else "evaluation.sampler = 'vllm'"
        raise ValueError(f"{name} evaluates completions of one turn: leave it out, and the held-out prompts are played")


def replied(settings: Settings | EvalSettings, task: Task) -> int:
    """Tokens that an environment says in a completion at the most; 0 without one."""
    return settings.environment.max_tokens if isinstance(task, TaskWithEnvironment) else settings.replied
