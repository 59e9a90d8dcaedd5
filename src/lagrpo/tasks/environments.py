"""Which environment the settings name: one of the user's, the task's own, or functions that the policy may call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from lagrpo.errors import suggest
from lagrpo.tasks import Task
from lagrpo.tasks.base import Judge, Make, TaskWithEnvironment
from lagrpo.tasks.names import TOOLS, load_function
from lagrpo.tasks.tools import Tools


class Named(Protocol):
    """The settings that are read here."""

    @property
    def name(self) -> str | None: ...
    @property
    def tools(self) -> Sequence[str]: ...


def load_environment(settings: Named, task: Task, system: str = "") -> Make | None:
    """What makes an environment for each completion; None where completions have one turn. `system` is what tells the
    policy of functions. Raises ValueError for a function that is not there."""
    if settings.name is not None:
        return load_function(settings.name)
    if isinstance(task, TaskWithEnvironment):
        return task.environment
    functions, judge = load_tools(settings.tools), cast(Judge, task.judge)  # several rewards are refused with tools
    return Tools({function.__name__: function for function in functions}, judge, system) if functions else None


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions of these names. Raises ValueError for one that is not there."""
    for name in names:
        if ":" not in name and name not in TOOLS:
            raise ValueError(
                f"there is no tool {name!r}; there are {', '.join(TOOLS)}, and functions of your own as "
                f"'package.module:function'.{suggest(name, TOOLS)}"
            )
    return [load_function(TOOLS.get(name, name)) for name in names]
