"""What a task or a reward of the settings means by its name: something built in, or a function of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from lagrpo.errors import suggest

JUDGES = {
    "arithmetic": "lagrpo.tasks.arithmetic:judge",
    "countdown": "lagrpo.tasks.countdown:judge",
    "guess_number": "lagrpo.tasks.guess_number:judge",
    "number": "lagrpo.tasks.gsm8k:judge",
    "math": "lagrpo.tasks.math:judge",
    "exact": "lagrpo.tasks.custom:judge",
}
"""The built-in judges that the setting `reward` can name."""
SHAPED = {
    "length": "lagrpo.tasks.shaped:Length",
    "format": "lagrpo.tasks.shaped:Format",
    "llm_judge": "lagrpo.tasks.llm_judge:LlmJudge",
}
"""The built-in rewards that an entry of `rewards` can name beside the judges: classes, whose fields are the options."""
OWN = "task"
"""How an entry of `rewards` names the task's own judge."""
GYM = "reasoning_gym"
GYMNASIUM = "gym:"
"""How the names of tasks begin whose environments are in the style of Gymnasium."""
ENVIRONMENTS = {
    "calculator": "lagrpo.tasks.calculator:ENVIRONMENT",
    "guess_number": "lagrpo.tasks.guess_number:GuessNumber",
}
"""Tasks of several turns, and what makes their environments."""
TOOLS = {"calculator": "lagrpo.tasks.calculator:calculate"}
"""The built-in functions that environment.tools can name."""


def load_judge(reward: str | None, default: Any) -> Any:
    """The judge that the setting `reward` names (built in, or "package.module:function"), else the task's own."""
    if reward is None:
        return default
    require_installed(reward)
    return load_function(JUDGES.get(reward, reward))


def require_installed(name: str) -> None:
    """Raise ImportError, saying what to install, where a task or reward needs a missing package."""
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ImportError("judging mathematics needs math-verify: pip install 'lagrpo[math]'")
    if name == GYM and importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError("the tasks of reasoning_gym need that package: pip install 'lagrpo[gym]'")


def is_reference(name: str) -> bool:
    """Whether a name in the settings is a "package.module:function", not something built in."""
    return ":" in name and kind_of(name) != GYM


def kind_of(name: str) -> str:
    """Which of the built-in tasks a name means: of "reasoning_gym:chain_sum" what stands before the colon."""
    kind = name.partition(":")[0]
    return kind if kind == GYM else name


def load_function(reference: str) -> Callable[..., Any]:
    """The function that "package.module:function" names.

    This finds modules in the current directory, too, though Python puts a console script's own directory on the path.
    They come last, so that no file there can shadow the standard library. Worker processes inherit the path.

    Raises ValueError for a name of another form, a missing module or attribute (with the nearest one), and an attribute
    that cannot be called. An import that fails inside the module raises its own error."""
    module_name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ValueError(f"{reference!r} is not of the form 'package.module:function'")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    module = _import(module_name, reference)
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or module_name
        raise ValueError(f"{reference!r}: {where} has no attribute {attribute!r}.{suggest(attribute, vars(module))}")
    if not callable(function := getattr(module, attribute)):
        raise ValueError(f"{reference!r} is a {type(function).__name__}, not a function")
    return function


def _import(module_name: str, reference: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, but something that it imports was not
        raise ValueError(
            f"{reference!r}: there is no module {error.name!r}. Looked in the current directory ({os.getcwd()}) and "
            "where installed packages are; is the name right, and is there a file of that name?"
        ) from error
