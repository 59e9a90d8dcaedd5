"""What can be refused before anything heavy is loaded: after the settings' own classes (config.py), everything that
needs a look at the recipes, the tasks and the disk. transformers and the task's data are not touched here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lagrpo.compose import Recipe
from lagrpo.config import EvalSettings, ModelSettings, Settings, SettingsError
from lagrpo.embedded import ALIASES, resolve_model
from lagrpo.recipes import resolve
from lagrpo.runs.reading import completion_files
from lagrpo.tasks import Task, check_options

LARGEST_EXPONENT = 80.0  # float32 ends at e^88.7; the rest is for the factors beside it
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@contextmanager
def refusing(what: str = "", *further: type[Exception]) -> Iterator[None]:
    """Inside, a ValueError, OSError or ImportError (or one of `further`) says what is wrong with the settings: it
    becomes a SettingsError, whose message begins with `what`."""
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError, ImportError, *further) as error:
        raise SettingsError(f"{what}: {error}" if what else str(error)) from error


def check_settings(settings: Settings, task: Task | None = None) -> Recipe:
    """The resolved recipe of settings that can be run; `task` stands in for settings.task.

    Raises:
        SettingsError: an unknown recipe or piece, a contradictory composition, options that the task does not take, a
            model or a chat template that is not there, a run that exists already or cannot be written.
    """
    with refusing():
        if task is None:
            check_options(settings.task)
    check_model(settings.model)
    with refusing("offline.data"):
        completion_files(settings.offline.data or ())
    with refusing("run"):
        from lagrpo.runs.directory import check_new

        check_new(Path(settings.run.directory), settings.run.name)
    with refusing("objective"):
        recipe = resolve(settings.objective.recipe, settings.objective.overrides)
        _check_exponential(recipe, settings)
    return recipe


def _check_exponential(recipe: Recipe, settings: Settings) -> None:
    """Raises ValueError where e^(A / weight_temperature) overflows for rewards of task.reward_range."""
    made, (low, high) = recipe.composition, settings.task.reward_range
    if made.weight != "exp_advantage":
        return
    G, of_range = settings.sampling.G, f"task.reward_range = ({low:g}, {high:g})"
    if G == 1:
        largest, given = high, of_range
    elif made.advantage in ("whitened", "whitened_unbiased"):
        largest, given = math.sqrt(G - 1), f"sampling.G = {G}"
    else:
        largest, given = high - low, of_range
    if largest > LARGEST_EXPONENT * made.weight_temperature:
        raise ValueError(
            f"weight 'exp_advantage' is e^(A / {made.weight_temperature:g}), and with {given} A may reach "
            f"{largest:.3g}: above {LARGEST_EXPONENT:g} it overflows; scale the rewards, or set "
            f"objective.weight_temperature to {largest / LARGEST_EXPONENT:g} or more"
        )


def check_evaluation(settings: EvalSettings) -> None:
    """The same for the settings of an evaluation."""
    with refusing():
        check_options(settings.task)
    check_model(settings.model)


def check_model(model: ModelSettings) -> None:
    """Raises SettingsError for a model that is nowhere: no alias, no directory with a model, no name that the Hugging
    Face hub could have; and for a chat template that cannot be read."""
    path = Path(model.path).expanduser()
    with refusing("model.path"):
        if model.path not in ALIASES:
            resolve_model(model.path)
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError(f"{model.path!r} is no model directory: it has no config.json")
        if path.is_file():
            raise ValueError(f"{model.path!r} is a file; a model is a directory or the name of one on the hub")
        if not path.is_dir() and not _HUB_ID.fullmatch(model.path):
            raise ValueError(f"there is no directory {model.path!r} (seen from {Path.cwd()}), and it is no hub id")
    with refusing("model.chat_template"):
        chat_template(model)


def chat_template(model: ModelSettings) -> str | None:
    """The chat template that the settings put in place of the tokenizer's own."""
    return Path(model.chat_template).expanduser().read_text(encoding="utf-8") if model.chat_template else None
