"""The command line: parse, build, call.

    lagrpo train [SETTINGS.toml] [--dry-run] [--section.name VALUE …]
    lagrpo eval MODEL [--task gsm8k] [--samples 50] …
    lagrpo show RUN [--batch B] [--only right|wrong|unscored] …
    lagrpo verify RUN [--rows N | --all]
    lagrpo serve MODEL [--port P] [--weight-sync directory|nccl|ipc] … [-- OPTIONS OF VLLM]
    lagrpo recipes [NAME]

--task NAME, --model PATH and --recipe NAME stand for --task.name, --model.path and --objective.recipe.
`lagrpo COMMAND --help` lists what each takes. Exit codes: 0 done, 1 the run failed (verify: something differs), 2 wrong
input, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from pydantic import BaseModel

from lagrpo.errors import SettingsError
from lagrpo.settings.arguments import parse
from lagrpo.settings.schema import EvalSettings, SamplingSettings, Settings, VllmSettings
from lagrpo.settings.toml import load_settings, to_toml, validated

SAMPLING, VLLM = SamplingSettings(), VllmSettings()


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
    from lagrpo.training.checks import check_settings

    recipe = check_settings(settings)
    if "--dry-run" in given.flags:
        from lagrpo.training.explain import explained

        return print(explained(settings, recipe, to_toml(settings)))
    from lagrpo.training.run import FAILURES
    from lagrpo.training.run import train as run

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
    from lagrpo.training.checks import check_evaluation

    check_evaluation(settings)
    from lagrpo.training.evaluate import evaluate_model
    from lagrpo.training.run import FAILURES

    try:
        evaluate_model(settings)
    except FAILURES as error:
        fail(error, 1)


def show(
    run: tyro.conf.Positional[Path],
    batch: int | None = None,
    count: int = 8,
    prompt: int | None = None,
    only: Literal["all", "right", "wrong", "unscored"] = "all",
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


def verify(
    run: tyro.conf.Positional[Path],
    rows: int = 128,
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    seed: int = 0,
) -> None:
    """Replay a run from its files with plain transformers: samples, log-probs, rewards, advantages, metrics.

    Prints what was checked, what differs (with file, row and value) and what could not be checked. The exit code is 0
    if nothing differs, 1 if something does, 2 where the run cannot be read.

    Args:
        run: Directory of the run.
        rows: Completions whose samples and log-probs are recomputed, spread over the versions on disk.
        everything: Recompute those of all completions.
        seed: Of the choice of these completions.
    """
    if rows < 1:
        raise SettingsError(f"--rows is {rows}: at least one completion is recomputed")
    from lagrpo.replay import verify_run
    from lagrpo.replay.findings import UnreadableError
    from lagrpo.replay.report import print_report

    try:
        report = verify_run(run, rows, everything, seed)
    except UnreadableError as error:
        fail(error, 2)
    print_report(report)
    if report.differences:
        sys.exit(1)


def serve(
    model: tyro.conf.Positional[str],
    port: int = 8000,
    python: str = VLLM.python,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_model_len: int = SAMPLING.max_prompt_tokens + SAMPLING.max_tokens + 1,
    max_num_seqs: int = SAMPLING.max_num_seqs,
    weight_sync: Literal["directory", "nccl", "ipc"] = VLLM.weight_sync,
    failures: int = VLLM.failures,
    deadline: float = VLLM.start_deadline,
    log: Path | None = None,
    options: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
) -> None:
    """Start a vLLM server on 127.0.0.1 for trainers to attach to, and keep it up until Ctrl-C.

    It prints the URL, the API key (that of $LAGRPO_VLLM_API_KEY where it is set) and the settings that attach to it.
    What follows -- goes to vLLM as it is: lagrpo serve MODEL -- --data-parallel-size 7

    Args:
        model: Hub id or directory of a causal language model, or smollm2.
        port: Where it listens.
        python: Python of the environment that has vLLM; `make vllm-env` makes one.
        dtype: Of its weights and arithmetic.
        max_model_len: Longest sequence; a run needs sampling.max_prompt_tokens + sampling.max_tokens + 1.
        max_num_seqs: Completions decoded at a time.
        weight_sync: How weights will travel (vllm.weight_sync of the run).
        failures: How often it is started again when it dies.
        deadline: Seconds for it to get ready.
        log: File that gets its output; vllm-PORT.log here by default.
        options: Further options of `vllm serve`: --options="--tensor-parallel-size 2", or behind --.
    """
    from lagrpo.sampling.vllm.server import SamplerError
    from lagrpo.sampling.vllm.serving import serve as run

    try:
        run(
            model,
            port=port,
            python=python,
            dtype=dtype,
            longest=max_model_len,
            max_num_seqs=max_num_seqs,
            weight_sync=weight_sync,
            failures=failures,
            deadline=deadline,
            log=log,
            options=options,
        )
    except SamplerError as error:
        fail(error, 1)


def rest_as_options(words: list[str]) -> list[str]:
    """The words behind -- as values of --options.

    >>> rest_as_options(["model", "--", "--seed", "3"])
    ['model', '--options=--seed', '--options=3']
    """
    own = words[: words.index("--")] if "--" in words else words
    return [*own, *(f"--options={shlex.quote(word)}" for word in words[len(own) + 1 :])]


def recipes(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the recipes, or explain one.

    Args:
        name: Recipe to explain.
    """
    from lagrpo.terminal.recipes import show_recipe, show_recipes

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
    "verify": lambda words: tyro.cli(verify, args=words, prog="lagrpo verify"),
    "serve": lambda words: tyro.cli(serve, args=rest_as_options(words), prog="lagrpo serve"),
    "recipes": lambda words: tyro.cli(recipes, args=words, prog="lagrpo recipes"),
}
