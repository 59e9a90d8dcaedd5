"""Rewards as Python users give them: functions, names, lagrpo.Reward, or tables as in TOML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

from pydantic import ValidationError

from lagrpo.rewards.entries import bind_options, load_reward
from lagrpo.rewards.reward import Reward
from lagrpo.settings.sections import RewardSettings

Table: TypeAlias = Mapping[str, Any]
"""An entry of task.rewards as in TOML, whose `reward` may be a function."""

LONGEST_NAME = 36
"""Characters of a reward's name, which leave room for the number of one that is given twice."""


def is_setting(reward: Any) -> bool:
    """True for a reward that settings can hold: a name, or a table without a function."""
    if isinstance(reward, Mapping):
        return not callable(cast(Table, reward).get("reward"))
    return isinstance(reward, str)


def function_of(reward: Any) -> Callable[..., Any]:
    """Returns the function of a reward that settings cannot hold."""
    if isinstance(reward, Reward):
        return reward.function
    if isinstance(reward, Mapping):
        return cast(Table, reward)["reward"]
    return reward


def as_reward(given: Any) -> Reward:
    """Returns a reward with a name. Raises ValueError."""
    if is_setting(given):
        return load_reward(RewardSettings.model_validate(given), None)
    if isinstance(given, Mapping):
        reward = _read_table(cast(Table, given))
    elif isinstance(given, Reward):
        reward = given
    elif callable(given):
        reward = _read_table({"reward": given})
    else:
        raise ValueError(
            f"rewards: {given!r} is neither a function nor a name nor a table; "
            "lagrpo.Reward(function, weight=0.2) gives a function a weight"
        )
    if reward.name:
        return reward
    function = getattr(reward.function, "func", reward.function)  # of a partial
    name = getattr(function, "__name__", type(function).__name__)
    return replace(reward, name=name.strip("_<>")[:LONGEST_NAME])


def _read_table(table: Table) -> Reward:
    """Returns the reward of a table with a function or a class.

    Raises ValueError for keys that TOML has not, and for options that it does not take.
    """
    function = table["reward"]
    title = getattr(function, "__name__", type(function).__name__)
    try:
        # The settings check everything but the function, in whose place they get a name.
        entry = RewardSettings.model_validate({"name": "x", **table, "reward": "exact"})
        function = bind_options(function, entry.options)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise ValueError(f"rewards, {title}: {key}: {problem['msg']}") from error
    except TypeError as error:
        advice = "set its arguments in the options of a table"
        raise ValueError(f"rewards, {title}: {error}: {advice}") from error
    return Reward(function, weight=entry.weight, range=entry.range, name=table.get("name", ""))
