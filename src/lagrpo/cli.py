"""The command line: parse, build, call.

    lagrpo train [SETTINGS.toml] [--dry-run] [--section.name VALUE …]
    lagrpo eval MODEL [--task gsm8k] [--samples 50] …
    lagrpo show RUN [--batch B] [--only right|wrong|rejected] …
    lagrpo recipes [NAME]
    lagrpo figure bernoulli|amplification|bandit [--output PATH]

--task NAME, --model PATH and --recipe NAME stand for --task.name, --model.path and --objective.recipe.
`lagrpo COMMAND --help` lists what each takes. Exit codes: 0 done, 1 the run failed, 2 wrong input, 130 stopped by
Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from pydantic import BaseModel

from lagrpo.arguments import parse
from lagrpo.config import EvalSettings, Settings, SettingsError
from lagrpo.parsing import load_settings, to_toml, validated


def main(arguments: Sequence[str] | None = None) -> None:
    """The `lagrpo` command."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "help" and rest:
        name, *rest = [*rest, "--help"]
    if name in ("help", "-h", "--help"):
        print((__doc__ or "").strip())
        return
    if name == "--version":
        from importlib.metadata import version

        print(f"lagrpo {version('lagrpo')}")
        return
    try:
        command(name)(rest)
    except KeyboardInterrupt as stop:
        print("\nlagrpo: interrupted", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))
    except BrokenPipeError:  # the reader of our output has gone: `lagrpo … | head`
        sys.stderr.close()
    except (SettingsError, FileNotFoundError) as error:
        fail(error, 2)


def command(name: str) -> Callable[[list[str]], None]:
    """The function of a command."""
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
        raise SettingsError(f"there is no command {name!r}; did you mean {close!r}? (lagrpo --help)")
    return COMMANDS[name]


def fail(error: Exception, code: int) -> NoReturn:
    """Show what an error says, without a traceback, and end."""
    print("\n".join([f"lagrpo: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    sys.exit(code)


def train(words: list[str]) -> None:
    """Train on the settings of a file (the defaults without one), overridden by --section.name VALUE.

    --dry-run prints the settings as resolved and what they mean, and stops."""
    given = parse(Settings, words, FLAGS)
    if len(given.files) > 1:
        raise SettingsError(f"one settings file, not {len(given.files)}: {' '.join(given.files)}")
    settings = load_settings(given.files[0] if given.files else None, given.overrides)
    if given.flags & HELP:
        return show_help(settings, "lagrpo train [SETTINGS.toml]", train)
    from lagrpo.checks import check_settings

    recipe = check_settings(settings)
    if "--dry-run" in given.flags:
        from lagrpo.meaning import explained

        return print(explained(settings, recipe, to_toml(settings)))
    from lagrpo.training import FAILURES
    from lagrpo.training import train as run

    try:
        stopped = run(settings).interrupted
    except FAILURES as error:
        fail(error, 1)
    if stopped:
        sys.exit(128 + stopped)


def evaluate(words: list[str]) -> None:
    """pass@1 and pass@k of a model (directory, hub id or smollm2) on the test prompts of a task."""
    given = parse(EvalSettings, words, FLAGS)
    if given.flags & HELP:
        return show_help(EvalSettings(), "lagrpo eval MODEL", evaluate)
    if len(given.files) != 1:
        raise SettingsError("eval needs one model: lagrpo eval MODEL [--task NAME] …")
    given.overrides.setdefault("model", {})["path"] = given.files[0]
    settings = validated(EvalSettings, {}, given.overrides, "command line")
    from lagrpo.checks import check_evaluation

    check_evaluation(settings)
    from lagrpo.evaluate import evaluate_model
    from lagrpo.training import FAILURES

    try:
        evaluate_model(settings)
    except FAILURES as error:
        fail(error, 1)


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
    from lagrpo.runs.show import show as show_run

    show_run(run, batch=batch, count=count, prompt=prompt, only=only)


def figure(
    name: tyro.conf.Positional[Literal["bernoulli", "amplification", "bandit"]], output: Path | None = None
) -> None:
    """Draw a figure of the theory; the ending of the path (png, svg, pdf) is its format.

    Args:
        name: Which one.
        output: Where to; NAME.png here by default.
    """
    from lagrpo.checks import refusing
    from lagrpo.figures import figure as draw

    with refusing("--output"):
        print(draw(name, output))


def recipes(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the recipes, or explain one.

    Args:
        name: Recipe to explain.
    """
    from lagrpo.show_recipes import show_recipe, show_recipes

    show_recipe(name) if name else show_recipes()


def show_help(settings: BaseModel, prog: str, function: Callable[..., Any]) -> None:
    """Every setting with its description and its present value."""
    tyro.cli(
        type(settings),
        args=["--help"],
        default=settings,
        prog=prog,
        description=inspect.getdoc(function),
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        use_underscores=True,
    )


HELP = {"-h", "--help"}
FLAGS = HELP | {"--dry-run"}
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "show": lambda words: tyro.cli(show, args=words, prog="lagrpo show"),
    "figure": lambda words: tyro.cli(figure, args=words, prog="lagrpo figure"),
    "recipes": lambda words: tyro.cli(recipes, args=words, prog="lagrpo recipes"),
}
