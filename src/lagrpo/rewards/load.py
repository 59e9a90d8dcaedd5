"""From the settings task.reward and task.rewards (settings/rewards.py) to reward functions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lagrpo.errors import suggest
from lagrpo.redaction import is_secret
from lagrpo.rewards.reward import Reward, Rewards

REWARDS = {
    "exact": "lagrpo.rewards.builtin:exact",
    "length": "lagrpo.rewards.builtin:length",
    "format": "lagrpo.rewards.builtin:format",
    "llm_judge": "lagrpo.rewards.llm_judge:LlmJudge",
    "number": "lagrpo.tasks.gsm8k:score",
    "math": "lagrpo.tasks.math:score",
    "arithmetic": "lagrpo.tasks.arithmetic:score",
    "countdown": "lagrpo.tasks.countdown:score",
    "guess_number": "lagrpo.tasks.guess_number:score",
}
"""The built-in rewards."""
WITH_OPTIONS = ("length", "format", "llm_judge")
OWN = "task"
"""How an entry of `rewards` names the task's own reward."""


def check_rewards(reward: str | None, rewards: Sequence[Any]) -> None:
    """Raise ValueError for rewards that do not exist or contradict each other, and for wrong options of built-in ones.
    The user's functions are not loaded."""
    check_name("task.reward", reward or OWN)
    if rewards and reward is not None:
        raise ValueError("task.reward and task.rewards are both set: make task.reward an entry of task.rewards")
    names = [each.name for each in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"task.rewards: two entries have the name {twice[0]!r}")
    for each in rewards:
        where = f"task.rewards, {each.name!r}"
        check_name(where, each.reward)
        if secret := next(filter(is_secret, each.options), None):
            raise ValueError(f"{where}: options.{secret} would be on the disk; use an environment variable")
        if each.reward in WITH_OPTIONS:
            load_reward(each, None)
        elif each.options and ":" not in each.reward:
            raise ValueError(f"{where}: the reward {each.reward!r} takes no options")


def check_name(where: str, reward: str) -> None:
    """Raise ValueError for a name that is neither built in nor a package.module:function."""
    if ":" not in reward and reward not in (known := (OWN, *REWARDS)):
        raise ValueError(
            f"{where}: no built-in reward {reward!r}; there are {', '.join(known)}, and functions as "
            f"'package.module:function'.{suggest(reward, known)}"
        )


def load_rewards(reward: str | None, rewards: Sequence[Any], own: Any) -> Any:
    """What the settings name: one function, or several Rewards; `own` is the task's own reward."""
    if not rewards:
        return own if reward is None else load_builtin(reward)
    if isinstance(own, Rewards) and any(each.reward == OWN for each in rewards):
        raise ValueError(f"task.rewards: the task has several rewards, and {OWN!r} names a single one")
    return Rewards(tuple(load_reward(each, own) for each in rewards))


def load_reward(settings: Any, own: Any) -> Reward:
    """One entry. Raises ValueError for options that its function does not take."""
    function: Any = own if settings.reward == OWN else load_builtin(settings.reward)
    try:
        inspect.signature(function).bind_partial(**settings.options)
        if inspect.isclass(function):
            function = function(**settings.options)
        elif settings.options:
            function = partial(function, **settings.options)
        if settings.reward in ("length", "format"):  # they check their options
            function("", *[0] * (settings.reward == "length"))
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(f"task.rewards, {settings.name!r}, options: {settings.reward}: {error}") from error
    given = {"weight": settings.weight, "range": settings.range, "deadline": settings.deadline}
    return Reward(settings.name, function, decides=settings.right, **given)


def load_builtin(reward: str) -> Callable[..., Any]:
    """The function of a built-in reward, or of "package.module:function"."""
    require_installed(reward)
    return load_function(REWARDS.get(reward, reward))


def require_installed(name: str) -> None:
    """Raise ImportError, saying what to install, if a task or reward needs a missing package."""
    for needs, package, extra in (("math", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "gym")):
        if name == needs and importlib.util.find_spec(package) is None:
            raise ImportError(f"{name} needs the package {package}: pip install 'lagrpo[{extra}]'")


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, also in a module of the current directory. Worker processes
    inherit the path. Raises ValueError for another form, a missing module or attribute, and what cannot be called."""
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"{reference!r} is not of the form 'package.module:function'")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last, so that no file there can shadow the standard library
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, but something that it imports was not
        raise ValueError(
            f"{reference!r}: no module {error.name!r} in the current directory ({here}) or among installed packages"
        ) from error
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{reference!r}: {where} has no attribute {attribute!r}.{suggest(attribute, vars(module))}")
    if not callable(function := getattr(module, attribute)):
        raise ValueError(f"{reference!r} is a {type(function).__name__}, not a function")
    return function
