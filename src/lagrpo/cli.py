"""lagrpo trains language models with GRPO, on samples as stale as you allow.

    lagrpo train demo              teach the embedded 135M model addition, on the CPU, in minutes
    lagrpo train FILE.toml         train with your settings; --section.name VALUE changes one, --dry-run explains them
    lagrpo train --resume RUN      resume a run from its newest checkpoint
    lagrpo eval MODEL --task NAME  measure pass@k of a model, with intervals
    lagrpo view RUN …              show runs as one HTML page, or with --text in the terminal
    lagrpo recipes [NAME]          list the losses, or print one with its code
    lagrpo vllm-serve MODEL        start a vLLM server for runs to attach to
    lagrpo verify RUN              replay a run with plain transformers and report differences
    lagrpo env                     print versions and hardware, for bug reports
    lagrpo --version

`lagrpo COMMAND --help` lists the options. With --debug, or LAGRPO_DEBUG=1, every command shows the traceback of an
error. Exit codes: 0 done, 1 the run failed or verify found a difference, 2 wrong input, 130 stopped by Ctrl-C, 143 by
SIGTERM, 138 by SIGUSR1, 140 by SIGUSR2.
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from lagrpo import logs
from lagrpo.env import env
from lagrpo.errors import SettingsError, suggest
from lagrpo.interrupts import find_interruption, interruptible
from lagrpo.logs import redact
from lagrpo.settings.load import flatten, help_text, load_settings, read_words, to_toml
from lagrpo.settings.schema import Settings

HELP = {"-h", "--help"}
EVALUATED = (
    "run",
    "model",
    "task",
    "rollout",
    "vllm",
    "eval",
)  # sections that `lagrpo eval` reads, without UNUSED
UNUSED = (
    "report_to",
    "log_completions",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "num_generations",
)
UNUSED += ("dynamic_sampling_rounds", "on_weight_sync", "at_start", "every", "best_metric")


def main(arguments: Sequence[str] | None = None) -> None:
    """The `lagrpo` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an encoding without ✓ prints its number
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, *rest = take_debug(words) or ["--help"]
    logs.print_records()
    try:
        with interruptible(), exit_on(SettingsError, FileNotFoundError, code=2):
            run_command(name, rest)
    except BrokenPipeError:  # the reader of our output has gone: `lagrpo … | head`
        sys.stderr.close()
    except BaseException as error:
        if (stop := find_interruption(error)) is None:
            raise
        logs.print_traceback(error)
        print("\nlagrpo: interrupted", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))


def run_command(name: str, words: list[str]) -> None:
    """Run the command of this name. Raises SettingsError if there is none."""
    if name in HELP:
        print((__doc__ or "").strip())
    elif name == "--version":
        print(f"lagrpo {version('lagrpo')}")
    elif name in COMMANDS:
        check_locale(words)
        COMMANDS[name](words)
    else:
        raise SettingsError(
            f"no command {name!r}; lagrpo --help lists all.{suggest(name, COMMANDS)}"
        )


def take_debug(words: list[str]) -> list[str]:
    """The words without --debug, which is noted for this process and its workers. Words after -- are not ours."""
    end = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:end] if word != "--debug"]
    if len(own) < end:
        os.environ[logs.DEBUG] = "1"
    return own + words[end:]


def check_locale(words: list[str]) -> None:
    """Raise SettingsError for a word that Python could not read in this locale; no file takes such a text."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise SettingsError(
                f"{word!r} cannot be read in this locale: set PYTHONUTF8=1"
            ) from error


@contextmanager
def exit_on(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """One of these errors inside prints its message, with --debug also its traceback, and exits."""
    try:
        yield
    except errors as error:
        logs.print_traceback(error)
        rank = os.environ.get("RANK")
        has_ranks = os.environ.get("WORLD_SIZE", "1") != "1" and rank is not None
        who = f"lagrpo (rank {rank})" if has_ranks else "lagrpo"
        message = "\n".join([f"{who}: {error}", *getattr(error, "__notes__", ())])
        print(redact(message), file=sys.stderr)
        sys.exit(code)


@dataclass(frozen=True)
class Train:
    """usage: lagrpo train [SETTINGS] [--resume RUN] [--dry-run] [--section.name VALUE …]

    Train, and write metrics, rollouts, checkpoints and the model to a directory.

      SETTINGS      TOML file, or a packaged one: demo, gsm8k, deepscaler
      --resume RUN  resume a run from its newest checkpoint; auto: the run called run.name, if it exists
      --dry-run     print the settings and what they mean (samples per update, staleness, memory), and stop

    Settings, with their values in brackets. --task, --model and --recipe are short for --task.name, --model.path
    and --loss.recipe; None unsets a value; lists take several words, tables a value for each name.
    """

    file: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="SETTINGS")]] = None
    resume: str | None = None
    dry_run: bool = False


def train(words: list[str]) -> None:
    """Read the settings, train, and exit with the status."""
    sections = [*Settings.model_fields]
    given, _ = read_words([word for word in words if word not in HELP], Train, Settings(), sections)
    settings = load_settings(
        given.file, resume=given.resume
    )  # the values that words change, and the help shows
    if HELP & {*words}:
        return print(help_text(Train, settings, sections))
    given, changes = read_words(words, Train, settings, sections)
    settings = load_settings(given.file, changes, given.resume)
    from lagrpo.training.checks import check_arguments, check_settings

    check_arguments(settings, given.resume, given=[])

    recipe = check_settings(settings, resume=given.resume)
    if given.dry_run:
        from lagrpo.training.explain import meaning

        lines = meaning(settings, recipe)
        return print(redact(to_toml(settings)), *(f"# {line}" for line in lines), sep="\n")
    from lagrpo.training import run

    with exit_on(*run.FAILURES):
        stopped = run.train(settings, resume=given.resume).interrupted
    if stopped:
        sys.exit(128 + stopped)


@dataclass(frozen=True)
class Eval:
    """usage: lagrpo eval MODEL [--section.name VALUE …]

    Measure pass@1 and pass@k of a model on the test prompts of a task (--task NAME), with 95 % intervals.

      MODEL         directory of a model or an adapter, hub id, or smollm2 (embedded)

    Weights of a run (runs/NAME/weights/…) are evaluated on its task, with its template, limits and seed.

    Settings, with their default values in brackets. --task is short for --task.name.
    """

    path: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]


def evaluate(words: list[str]) -> None:
    """Evaluate a model, by default on all test prompts."""
    base: dict[str, Any] = {
        "run.output_dir": "evaluations",
        "eval.num_prompts": 0,
        "rollout.num_generations": 1,
    }
    if HELP & {*words}:
        return print(help_text(Eval, load_settings(base), EVALUATED, UNUSED))
    given, _ = read_words(words, Eval, load_settings(base), EVALUATED)
    base |= settings_of_run(given.path)
    given, changes = read_words(words, Eval, load_settings(base), EVALUATED)
    if "task.name" in changes:
        base = {name: value for name, value in base.items() if not name.startswith("task.")}
    settings = load_settings(base | {"model.path": given.path}, changes)
    from lagrpo.training.checks import check_evaluation

    check_evaluation(settings)
    from lagrpo.training.evaluation import evaluate_model
    from lagrpo.training.run import FAILURES

    with exit_on(*FAILURES):
        evaluate_model(settings)


def settings_of_run(weights: str) -> dict[str, Any]:
    """How the run that wrote these weights asked and sampled, and the seed that held out its test rows; nothing for
    other models."""
    folder = Path(weights).expanduser().absolute().parent
    if folder.name != "weights" or not (folder.parent / "config.toml").is_file():
        return {}
    limits = (
        "rollout.temperature",
        "rollout.max_prompt",
        "rollout.max_completion",
        "rollout.overlong_prompts",
    )
    kept = "run.seed", "task.", "model.chat_template", *limits
    settings = load_settings(folder.parent / "config.toml").model_dump(exclude_none=True)
    return {name: value for name, value in flatten(settings).items() if name.startswith(kept)}


def view(
    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN …")]],
    text: bool = False,
    serve: bool = False,
    out: Path | None = None,
    open: bool = False,
    completions: int = 10_000,
    port: int = 0,
    batch: int | None = None,
) -> None:
    """Write one HTML page with the metrics, completions, tokens, evaluations and settings of runs.

    RUN …            directories of runs; the page draws the curves of several runs over each other
    --text           print the completions of one batch instead of writing a page
    --batch N        batch for --text; default: the last
    --serve          serve the page on 127.0.0.1 and update it with new batches, until Ctrl-C
    --port N         port for --serve; 0 takes a free one [0]
    --out FILE       file to write; default: view.html in the run, ./view.html for several runs
    --open           open the page in the browser
    --completions N  largest number of completions in the page: whole groups, evenly over the batches [10000]
    """
    from lagrpo.terminal.show import show
    from lagrpo.view import serve as pages

    if text:
        for run in runs:
            show(run, batch)
    else:
        pages.view(runs, out, completions, open, port if serve else None)


def verify(
    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]],
    rows: int = 128,
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    seed: int = 0,
) -> None:
    """Replay a run from its files with plain transformers, and report what differs.

    RUN       directory of the run
    --rows N  number of completions whose tokens and log-probs are recomputed [128]
    --all     recompute the tokens and log-probs of all completions
    --seed N  seed that chooses these completions [0]
    """
    if rows < 1:
        raise SettingsError(f"--rows = {rows}: recompute at least one completion")
    from lagrpo.verify import print_report, verify_run

    report = verify_run(run, None if everything else rows, seed)
    print_report(report)
    if report.differences:
        sys.exit(1)


def vllm_serve(
    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]],
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_model_len: int = 1281,
    max_num_seqs: int = 128,
    weight_transfer: Literal["directory", "nccl"] = "directory",
    lora_r: int = 0,
    server_args: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
) -> None:
    """Start a vLLM server for runs to attach to. All users of the machine can read the options after --.

    MODEL                   hub id or directory of a causal language model, or smollm2 (embedded)
    --host ADDRESS          address to listen on; others than 127.0.0.1 need $LAGRPO_VLLM_API_KEY [127.0.0.1]
    --port N                port to listen on [8000]
    --dtype DTYPE           bfloat16 or float32, of weights and arithmetic [bfloat16]
    --max-model-len N       longest sequence in tokens: max_prompt_length + max_completion_length + 1 [1281]
    --max-num-seqs N        completions decoded at a time [128]
    --weight-transfer HOW   the run's vllm.weight_transfer: directory or nccl [directory]
    --lora-r N              the run's model.lora_r; 0 for full training [0]
    --server-args OPTION    an option for vLLM, like those after --; repeatable
    """
    from lagrpo.rollout.vllm.server import serve

    sizes = {"dtype": dtype, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    serve(model, host, port, weight_transfer, lora_r, server_args, **sizes)


def recipes(
    name: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[NAME]")]] = None,
) -> None:
    """List the recipes (losses), or print one with its source, settings and code."""
    from lagrpo.terminal.show import show_recipe, show_recipes

    show_recipes() if name is None else show_recipe(name)


def call(usage: str, function: Callable[..., None], words: list[str]) -> None:
    """Call a command by its signature, or print its docstring; words after -- become values of --server-args."""
    own = words[: words.index("--")] if "--" in words else words
    if HELP & {*own}:
        return print(f"usage: lagrpo {usage}\n\n{inspect.getdoc(function)}")
    given = [*own, *(f"--server-args={shlex.quote(word)}" for word in words[len(own) + 1 :])]
    tyro.cli(
        function,
        args=given,
        prog=f"lagrpo {usage.split()[0]}",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


SIGNATURES = {
    "view RUN … [OPTIONS]": view,
    "verify RUN [OPTIONS]": verify,
    "recipes [NAME]": recipes,
    "env": env,
}
SIGNATURES |= {"vllm-serve MODEL [OPTIONS] [-- OPTIONS OF VLLM]": vllm_serve}
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    **{"train": train, "eval": evaluate},
    **{usage.split()[0]: partial(call, usage, function) for usage, function in SIGNATURES.items()},
}
