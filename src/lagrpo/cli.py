"""The command line: parse, build, call.

    lagrpo train [SETTINGS.toml] [--dry-run] [--section.name VALUE …]
    lagrpo eval MODEL [--task.name gsm8k] [--samples 50] …
    lagrpo show RUN [--batch B] [--only right|wrong|rejected] …
    lagrpo recipes [NAME]

`lagrpo COMMAND --help` lists what each takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from pydantic import BaseModel, ValidationError

from lagrpo.config import EvalSettings, Settings, SettingsError, explain, load_settings, to_toml

T = TypeVar("T", bound=BaseModel)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `lagrpo` command. Exits with 2 for wrong input, 1 for a run that failed, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(__doc__.strip())
        return
    if name == "--version":
        from importlib.metadata import version

        print(f"lagrpo {version('lagrpo')}")
        return
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
        _fail(f"there is no command {name!r}; did you mean {close!r}? (lagrpo --help)")
    try:
        COMMANDS[name](arguments[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except ValidationError as error:
        _fail(explain(error, "command line"))
    except BrokenPipeError:  # the reader of our output has gone: `lagrpo … | head`
        sys.stderr.close()
    except EXPECTED as error:
        _fail(str(error))


EXPECTED = (SettingsError, ValueError, OSError, ImportError)
"""Errors that speak for themselves: their message is shown without a traceback."""


def _fail(message: str) -> None:
    print(f"lagrpo: {message}", file=sys.stderr)
    sys.exit(2)


def train(arguments: list[str]) -> None:
    """Train on settings from a file, overridden from the command line."""
    settings, dry_run = parse_train(arguments)
    if dry_run:
        from lagrpo.build import check_settings
        from lagrpo.meaning import meaning

        recipe = check_settings(settings)
        print(to_toml(settings))
        print("\n".join(f"# {line}" for line in meaning(settings, recipe)))
        return
    from lagrpo.training import train as run

    if run(settings).interrupted:
        sys.exit(130)


def parse_train(arguments: list[str]) -> tuple[Settings, bool]:
    """Settings and whether --dry-run was given: the file first, then the overrides."""
    dry_run = "--dry-run" in arguments
    rest = [argument for argument in arguments if argument != "--dry-run"]
    base = Settings()
    if rest and not rest[0].startswith("-"):
        base = load_settings(rest.pop(0))
    description = "Train on SETTINGS.toml (before all options; defaults without it). --dry-run prints and explains."
    return _parse(Settings, rest, "lagrpo train [SETTINGS.toml]", description, base), dry_run


def evaluate(arguments: list[str]) -> None:
    """pass@k of a model on the test prompts of a task."""
    if not arguments or arguments[0].startswith("-"):
        if not {"-h", "--help"} & set(arguments):
            _fail("eval needs a model: lagrpo eval MODEL [--task.name NAME] …")
        settings = _parse(EvalSettings, arguments, "lagrpo eval MODEL", evaluate.__doc__ or "")
    task = ["--task.name" if a == "--task" else a for a in arguments[1:]]
    settings = _parse(EvalSettings, task, "lagrpo eval MODEL", evaluate.__doc__ or "")
    from lagrpo.evaluate import evaluate_model

    evaluate_model(arguments[0], settings)


def show(
    run: tyro.conf.Positional[Path],
    batch: int | None = None,
    count: int = 8,
    prompt: int | None = None,
    only: Literal["all", "right", "wrong", "rejected"] = "all",
) -> None:
    """Print completions of a run with their rewards, versions and lag.

    Args:
        run: Directory of the run.
        batch: Batch to show; the last one by default.
        count: How many completions.
        prompt: Only completions of the prompt with this key.
        only: Which completions.
    """
    from lagrpo.runs import show as show_run

    show_run(run, batch=batch, count=count, prompt=prompt, only=only)


def recipes(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the recipes, or explain one.

    Args:
        name: Recipe to explain.
    """
    from lagrpo.recipes import print_recipes

    print_recipes(name)


def _parse(kind: type[T], arguments: list[str], prog: str, description: str, base: T | None = None) -> T:
    config = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)
    return tyro.cli(kind, args=arguments, prog=prog, description=description, default=base or kind(), config=config)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "show": lambda arguments: tyro.cli(show, args=arguments, prog="lagrpo show"),
    "recipes": lambda arguments: tyro.cli(recipes, args=arguments, prog="lagrpo recipes"),
}
