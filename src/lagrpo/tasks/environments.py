"""Which environment the settings name: one of the user's, the task's own, or functions that the policy may call."""

from __future__ import annotations

import inspect
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
        if settings.tools:
            raise ValueError(f"the task {task.name!r} has an environment of its own: leave out environment.tools")
        return task.environment
    functions, judge = load_tools(settings.tools), cast(Judge, task.judge)  # several rewards are refused with tools
    return Tools({function.__name__: function for function in functions}, judge, system) if functions else None


def load_tools(names: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions of these names. Raises ValueError for one that is not there, is called as another one, or is no
    plain function."""
    for name in names:
        if ":" not in name and name not in TOOLS:
            raise ValueError(
                f"there is no tool {name!r}; there are {', '.join(TOOLS)}, and functions of your own as "
                f"'package.module:function'.{suggest(name, TOOLS)}"
            )
    found = {name: load_function(TOOLS.get(name, name)) for name in names}
    called = {name: getattr(function, "__name__", None) for name, function in found.items()}
    for name, function in found.items():
        if called[name] is None or inspect.iscoroutinefunction(function):
            what = "has no name of its own" if called[name] is None else "is a coroutine function"
            raise ValueError(f"tool {name!r} {what}: make it a plain function, whose name the policy calls")
        if other := next((each for each in found if each != name and called[each] == called[name]), None):
            raise ValueError(f"the tools {name!r} and {other!r} are both called {called[name]!r}: rename one of them")
    return [*found.values()]
