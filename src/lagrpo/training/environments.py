"""From settings to the environment that completions talk to: which one, in which processes, by which chat template."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from lagrpo.errors import refusing
from lagrpo.model.chat import Chat, TemplateError
from lagrpo.model.replies import OPENING, Replies
from lagrpo.rollout.episodes import Episodes, Limits
from lagrpo.settings.environment import EnvironmentSettings
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.task import TaskSettings
from lagrpo.tasks import Task
from lagrpo.tasks.base import Make, TaskWithEnvironment
from lagrpo.tasks.environments import load_environment
from lagrpo.tasks.tools import Tools, system_text
from lagrpo.verify import Environments

OF_RUN = ""
"""Name of the environment of the run's own task; that of an evaluation set has the set's name."""
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
            schemas = make.schemas() if isinstance(make, Tools) else []
            if not isinstance(make, Tools) or not schemas:
                return Talk(make) if make is not None else None
            said = chat.render(OPENING, schemas)
            taken = all(f'"{schema["function"]["name"]}"' in said for schema in schemas)
            return Talk(
                make if taken else replace(make, system=system_text(schemas)), "tool", schemas if taken else None
            )

    def start(self, settings: Settings | EvalSettings, chat: Chat, undo: ExitStack) -> Episodes:
        """Episodes, their processes started. Raises SettingsError for an environment that cannot be sent to them, and a
        chat template that changes earlier turns."""
        replies, limits = Replies(chat), settings.environment
        sampled = settings.sampling.max_tokens if isinstance(settings, Settings) else settings.max_tokens
        with refusing("environment", TypeError, TemplateError):
            replies.check([{"role": self.role, "content": EXAMPLE}])
            environments = undo.enter_context(Environments(self.make, **settings.verifier.of_an_environment))
        return Episodes(environments, replies, Limits(limits.max_turns, sampled, limits.max_tokens))

    def asking(self, episodes: Episodes) -> dict[str, Any]:
        """What the prompts need (`PromptSource`) whose completions are these episodes."""
        return {"tools": self.tools, "opening": episodes.environments.open}


def find_talks(settings: Settings, task: Task, of_sets: Mapping[str, Task], chat: Chat) -> dict[str, Talk]:
    """What the completions of the run, and of evaluation sets with tasks of their own, talk to, by name; nothing for
    those of one turn. What section environment names is for the run's task. Raises as Talk.find."""
    alone = settings.environment.model_copy(update={"name": None, "tools": ()})
    found = {OF_RUN: Talk.find(settings.environment, task, chat)}
    found |= {name: Talk.find(alone, other, chat) for name, other in of_sets.items()}
    return {name: talk for name, talk in found.items() if talk is not None}


def check_environment(settings: Settings, make: Make | None, task: TaskSettings) -> None:
    """Raise ValueError for settings that completions of several turns cannot be combined with; `task` is asked."""
    if make is None:
        return
    if task.rewards:
        raise ValueError("the environment gives the rewards of its completions: leave out task.rewards")
    if settings.evaluation.sampler == "vllm":
        raise ValueError("evaluation.sampler = 'vllm' evaluates completions of one turn: take 'local'")


def replied(settings: Settings | EvalSettings, *tasks: Task) -> int:
    """Tokens that an environment says in a completion of these tasks at the most; 0 without one."""
    talking = any(isinstance(task, TaskWithEnvironment) for task in tasks)
    return settings.environment.max_tokens if talking else settings.replied
