"""lagrpo trains language models with GRPO, on samples as stale as you allow.

    lagrpo train demo              teach the embedded 135M model addition, on the CPU, in minutes
    lagrpo train FILE.toml         train with your settings; --section.name VALUE changes one,
                                   --dry-run explains them
    lagrpo train --resume RUN      resume a run from its newest checkpoint
    lagrpo eval MODEL --task NAME  measure pass@k of a model, with intervals
    lagrpo study FILE.toml         make the runs of a grid over seeds, and compare them
    lagrpo view RUN …              show runs as one HTML page, or with --text in the terminal
    lagrpo compare RUN …           print settings that differ, metrics and evaluations of runs
    lagrpo diagnose RUN            say why a run does not learn, and what to set
    lagrpo recipes [NAME]          list the losses, or print one with its code
    lagrpo vllm-serve MODEL        start a vLLM server for runs to attach to
    lagrpo verify RUN              replay a run with plain transformers and report differences
    lagrpo check-cluster [FILE]    check the ranks of a run under torchrun, before it starts
    lagrpo env                     print versions and hardware, for bug reports
    lagrpo --version

`lagrpo COMMAND --help` lists the options. With --debug, or LAGRPO_DEBUG=1, every command shows the
traceback of an error. Exit codes: 0 done, 1 the run failed or verify found a difference, 2 wrong
input, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP, 138 by SIGUSR1, 140 by SIGUSR2, 141
if the reader of the output has gone.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

from lagrpo import logs
from lagrpo.env import env
from lagrpo.errors import SettingsError, as_settings_error, explain_os_error, suggest
from lagrpo.interrupts import find_interruption, interruptible
from lagrpo.logs import print_text, redact
from lagrpo.runs.environment import naming_start
from lagrpo.settings.command_line import CommandParser, help_text, read_words, spell_out
from lagrpo.settings.load import PRESETS, load_settings
from lagrpo.settings.of_run import config_of_weights, settings_for_eval
from lagrpo.settings.run_code import TRUST_OPTION, check_run_code
from lagrpo.settings.schema import EVALUATION_DEFAULTS, Settings
from lagrpo.terminal.text import typed_command

HELP = {"-h", "--help"}

BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Environment variables of tqdm, huggingface_hub and datasets that turn off their progress bars."""

EVALUATED = ("run", "model", "task", "rollout", "vllm", "distributed", "eval")
"""Sections that `lagrpo eval` reads."""

CHECKED = ("run", "vllm", "distributed")
"""Sections that `lagrpo check-cluster` reads."""

UNUSED = (
    "report_to",
    "log_completions",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "strategy",
    "num_generations",
    "dynamic_sampling_rounds",
    "at_start",
    "every",
    "best_metric",
)
"""Settings of these sections that `lagrpo eval` does not read."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the `lagrpo` command. Returns the exit code, or exits with it.

    The codes are in the module's docstring.
    """
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # In an encoding without ✓, its number is printed.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, *rest = take_debug(words) or ["--help"]
    logs.print_records()
    if not sys.stderr.isatty():
        hide_progress_bars()
    try:
        try:
            with interruptible(), exit_on(SettingsError, FileNotFoundError, code=2):
                run_command(name, rest)
        finally:
            # What is still buffered is written here, where its errors are caught.
            if not sys.stdout.closed:
                print_text("", end="", flush=True)
    except BrokenPipeError as error:
        # The reader of our output has gone: `lagrpo … | head`.
        logs.print_traceback(error)
        close_stdout()
        return 128 + signal.SIGPIPE
    except BaseException as error:
        interruption = find_interruption(error)
        if interruption is None and isinstance(error, OSError):
            print_error(error)
            close_stdout()
            return 1
        if interruption is None:
            raise
        logs.print_traceback(error)
        print_text("\nlagrpo: interrupted", file=sys.stderr)
        # A KeyboardInterrupt has no signal: it is SIGINT, 2.
        sys.exit(128 + getattr(interruption, "signal", 2))
    return 0


def open_missing_streams() -> None:
    """Opens the standard streams that the program was started without: `lagrpo … >&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end
            setattr(sys, name, stream)


def close_stdout() -> None:
    """Drops what cannot be written. At its end Python would try again, and complain."""
    with suppress(OSError):
        sys.stdout.close()


def hide_progress_bars() -> None:
    """Lets libraries show no progress bars, also in worker processes.

    In a file each step of a bar is a line. Call it before the libraries load, which read these
    variables then.
    """
    for name in BARS:
        os.environ.setdefault(name, "1")


def run_command(name: str, words: list[str]) -> None:
    """Runs the command of this name. Raises SettingsError if there is none."""
    if name in HELP:
        print_text((__doc__ or "").strip())
    elif name == "--version":
        print_text(f"lagrpo {version('lagrpo')}")
    elif name in COMMANDS:
        check_locale(words)
        COMMANDS[name](words)
    else:
        problem = f"no command {name!r}; lagrpo --help lists all."
        raise SettingsError(problem + suggest(name, COMMANDS))


def take_debug(words: list[str]) -> list[str]:
    """Returns the words without --debug, which is noted for this process and its workers."""
    own_words, foreign_words = split_words(words)
    if "--debug" in own_words:
        os.environ[logs.DEBUG] = "1"
    return [word for word in own_words if word != "--debug"] + foreign_words


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the words of lagrpo, and those from "--" on, which are for another program."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end:]


def check_locale(words: list[str]) -> None:
    """Raises SettingsError for a word that Python could not read in this locale.

    Such a text cannot be written to a file.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            problem = f"{word!r} cannot be read in this locale: set PYTHONUTF8=1"
            raise SettingsError(problem) from error


@contextmanager
def exit_on(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """Prints the message of one of these errors, with --debug also its traceback, and exits."""
    try:
        yield
    except errors as error:
        # A run has notes on what it saved; for others `main` has the answer.
        if isinstance(error, BrokenPipeError) and not hasattr(error, "__notes__"):
            raise
        print_error(error)
        if getattr(error, "filename", None) == logs.OUTPUT:
            close_stdout()
        sys.exit(code)


def print_error(error: BaseException) -> None:
    """Prints the message of an error and its notes, with --debug also its traceback."""
    logs.print_traceback(error)
    rank = os.environ.get("RANK")
    has_ranks = os.environ.get("WORLD_SIZE", "1") != "1" and rank is not None
    program = f"lagrpo (rank {rank})" if has_ranks else "lagrpo"
    reason = explain_os_error(error) if isinstance(error, OSError) else str(error)
    notes = getattr(error, "__notes__", ())
    message = "\n".join([f"{program}: {reason}", *notes])
    print_text(redact(message), file=sys.stderr)


@dataclass(frozen=True)
class Train:
    """usage: lagrpo train [SETTINGS] [--resume RUN] [OPTIONS] [--section.name VALUE …]

    Train, and write metrics, rollouts, checkpoints and the model to a directory.

      SETTINGS      TOML file, or a packaged one (demo, gsm8k, deepscaler), before the options
      --resume RUN  resume a run from its newest checkpoint; auto: the run called run.name, if it
                    exists
      --dry-run     check the data, the prompts and the model's files, print what the settings mean
                    (samples per update, staleness, memory), and stop
      --measure     with --dry-run: make one batch after one that warms up, and print seconds by
                    phase, the time of the run, and both for other sync_every
      --trust-run-code
                    with --resume RUN: run the functions that the settings of RUN name

    Settings, with their values in brackets. --task, --model and --recipe are short for
    --task.name, --model.path and --loss.recipe; lists take several words, tables a value for each
    name; None unsets a value, empties a list, drops an entry of a table, and is none for a knob of
    loss.overrides.
    """

    file: str | None = None
    resume: str | None = None
    dry_run: bool = False
    measure: bool = False
    trust_run_code: bool = False


def read_train_words(words: Sequence[str]) -> tuple[Train, dict[str, Any]]:
    """Returns the arguments of `lagrpo train`, and the settings that its words change."""
    parser = CommandParser()
    parser.add_argument("file", nargs="?")
    parser.add_argument("--resume")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument(TRUST_OPTION, action="store_true")
    arguments, changes = read_words(parser, words, list(Settings.model_fields))
    if arguments["file"] is None:
        check_settings_go_first(changes)
    if arguments["measure"] and not arguments["dry_run"]:
        raise SettingsError("--measure is for a dry run: add --dry-run")
    return Train(**arguments), changes


def check_settings_go_first(changes: dict[str, Any]) -> None:
    """Raises SettingsError if an option with several words took the file of settings, too.

    A list ends only at the next option, so that a file behind it looks like its last word.
    """
    for name, value in changes.items():
        if not isinstance(value, tuple | list) or len(value) < 2:
            continue
        word = str(value[-1])
        if word.endswith(".toml") or (PRESETS / f"{word}.toml").is_file():
            raise SettingsError(
                f"--{name} takes {word!r} as one of its words: if it is the settings, write it "
                f"first: lagrpo train {word} --{name} …"
            )


def train(words: list[str]) -> None:
    """Reads the settings, trains, and exits with the status."""
    if not words:
        print_text(inspect.getdoc(Train) or "")
        raise SettingsError("train needs settings: lagrpo train demo, or a TOML file")
    arguments, changes = read_train_words([word for word in words if word not in HELP])
    if asks_for_help(words):
        # The help shows the values of the file or the run.
        settings = load_settings(arguments.file, resume=arguments.resume)
        print_text(help_text(Train, settings, list(Settings.model_fields)))
        return
    settings = load_settings(arguments.file, changes, arguments.resume)
    from lagrpo.resume.changes import find_run
    from lagrpo.startup.arguments import check_arguments
    from lagrpo.startup.checks import check_settings
    from lagrpo.startup.epochs import with_batches

    check_arguments(settings, arguments.resume, given=[])
    if arguments.resume not in (None, "auto") and not arguments.trust_run_code:
        config = Path(arguments.resume, "config.toml")
        check_run_code(settings, config, named=changes, advice=trusting("train", words))
    # `run.train` makes these checks, too: made here, they fail before all of torch has loaded.
    with naming_start(find_run(settings, arguments.resume)):
        settings = with_batches(settings)
        check_settings(settings, resume=arguments.resume)
    from lagrpo.lifecycle import run

    with exit_on(*run.FAILURES):
        dry_run = "measure" if arguments.measure else arguments.dry_run
        result = run.train(settings, resume=arguments.resume, dry_run=dry_run)
    if result.interrupted:
        sys.exit(128 + result.interrupted)


def asks_for_help(words: Sequence[str]) -> bool:
    """Returns True if -h or --help is among the words."""
    return not HELP.isdisjoint(words)


@dataclass(frozen=True)
class Eval:
    """usage: lagrpo eval MODEL [--trust-run-code] [--section.name VALUE …]

    Measure pass@1 and pass@k of a model on the test prompts of a task (--task NAME), with 95 %
    intervals.

      MODEL         directory of a model or an adapter, hub id, or smollm2 (embedded)

    Weights of a run (runs/NAME/weights/…) are evaluated on its task, with its template, dtype,
    limits, temperature and seed. With --trust-run-code, functions that the settings of that run
    name may run.

    Settings, with their default values in brackets. --task is short for --task.name.
    """

    path: str
    trust_run_code: bool = False


def read_eval_words(words: Sequence[str]) -> tuple[Eval, dict[str, Any]]:
    """Returns the arguments of `lagrpo eval`, and the settings that its words change."""
    parser = CommandParser()
    parser.add_argument("path", metavar="MODEL")
    parser.add_argument(TRUST_OPTION, action="store_true")
    arguments, changes = read_words(parser, words, EVALUATED)
    for name in changes:
        if name.partition(".")[2] in UNUSED:
            raise SettingsError(
                f"--{name} has no effect on an evaluation, only on training: remove it"
            )
    return Eval(**arguments), changes


def evaluate(words: list[str]) -> None:
    """Evaluates a model, by default on all test prompts."""
    base: dict[str, Any] = dict(EVALUATION_DEFAULTS)
    if asks_for_help(words):
        print_text(help_text(Eval, load_settings(base), EVALUATED, UNUSED))
        return
    arguments, changes = read_eval_words(words)
    config = config_of_weights(arguments.path)
    if config is not None:
        base |= settings_for_eval(config, task=changes.get("task.name"))
    settings = load_settings(base | {"model.path": arguments.path}, changes)
    if config is not None and not arguments.trust_run_code:
        check_run_code(settings, config, named=changes, advice=trusting("eval", words))
    from lagrpo.startup.checks import check_evaluation

    with naming_start(None if config is None else config.parent):
        check_evaluation(settings)
        if config is None and "task.name" not in changes:
            raise SettingsError("eval needs a task: add --task NAME, such as --task gsm8k")
        from lagrpo.lifecycle.evaluate_model import evaluate_model
        from lagrpo.lifecycle.run import FAILURES

        with exit_on(*FAILURES):
            evaluate_model(settings)


@dataclass(frozen=True)
class CheckCluster:
    """usage: torchrun … -m lagrpo check-cluster [SETTINGS] [--section.name VALUE …]

    Check all ranks of a run in seconds: that they share run.output_dir, the speed of their
    exchange, that versions and arithmetic are equal, and the versions of attached vLLM servers
    (vllm.urls). Prints a line for each check; the exit code is 1 if one fails.

      SETTINGS  TOML file of the run
    """

    file: str | None = None


def check_ranks_of_cluster(words: list[str]) -> None:
    """Checks the ranks of a run, and exits with the status."""
    if asks_for_help(words):
        print_text(help_text(CheckCluster, load_settings(None), CHECKED))
        return
    parser = CommandParser()
    parser.add_argument("file", nargs="?")
    arguments, changes = read_words(parser, words, list(Settings.model_fields))
    settings = load_settings(arguments["file"], changes)
    from lagrpo.lifecycle.check_cluster import check_cluster
    from lagrpo.lifecycle.run import FAILURES

    with exit_on(*FAILURES):
        passed = check_cluster(settings)
    if not passed:
        sys.exit(1)


def trusting(command: str, words: Sequence[str]) -> str:
    """Returns the end of a sentence: type the command with TRUST_OPTION, too."""
    return f"type {typed_command()} {shlex.join([command, *words, TRUST_OPTION])}"


def study(words: list[str]) -> None:
    """Makes the missing runs of a study, writes its report, and exits with the status."""
    from lagrpo.study.command import main

    sys.exit(main(words))


def add_view_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `view`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--batch", type=int)


def view(
    runs: Sequence[Path],
    *,
    text: bool,
    serve: bool,
    out: Path | None,
    open: bool,
    completions: int,
    port: int,
    batch: int | None,
) -> None:
    """Write one HTML page with the metrics, completions, tokens, evaluations and settings of runs.

    RUN …            directories of runs; the page draws the curves of several runs over each other
    --text           print the completions of one batch instead of writing a page
    --batch N        batch for --text; default: the last with a signal
    --serve          serve the page on 127.0.0.1 and update it with new batches, until Ctrl-C
    --port N         port for --serve; 0 takes a free one [0]
    --out FILE       file to write; default: view.html in the run, ./view.html for several runs
    --open           open the page in the browser
    --completions N  largest number of completions in the page: whole groups, evenly over the
                     batches [10000]
    """
    of_page = {"--out": out is not None, "--serve": serve, "--open": open}
    for option, is_set in of_page.items():
        if text and is_set:
            raise SettingsError(f"{option} is for the page, but --text prints: remove one of them")
    if batch is not None and not text:
        raise SettingsError("--batch is for --text: add --text, or remove --batch")
    from lagrpo.terminal.show import show
    from lagrpo.view import serve as pages

    if text:
        for run in runs:
            show(run, batch)
    else:
        pages.view(runs, out, completions, opens=open, port=port if serve else None)


def add_compare_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `compare`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--last", type=int)


def compare(runs: Sequence[Path], last: int | None) -> None:
    """Print one table of runs: the settings that differ, metrics, and evaluations with intervals.

    RUN …     directories of runs, a column each
    --last N  batches that the metrics are over; default: one cycle of weight syncs (sync_every), or
              10 with a sync before every batch
    """
    if last is not None and last < 1:
        raise SettingsError(f"--last = {last}: compare at least one batch")
    from lagrpo.terminal.show import show_comparison

    show_comparison(runs, last)


def add_diagnose_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `diagnose`."""
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--json", action="store_true", dest="as_json")


def diagnose(run: Path, *, as_json: bool) -> None:
    """Say why a run does not learn, with the completions that show it, and what to set.

    RUN     directory of a run, which may be finished, failed or still running
    --json  print the findings as a JSON object
    """
    from lagrpo.diagnosis.diagnose import diagnose
    from lagrpo.runs.files import to_json

    with as_settings_error():
        diagnosis = diagnose(run)
    print_text(to_json(diagnosis.to_json()) if as_json else str(diagnosis))


def add_verify_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `verify`."""
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--all", action="store_true", dest="everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(TRUST_OPTION, action="store_true")


def verify(
    run: Path,
    *,
    rows: int,
    everything: bool,
    seed: int,
    trust_run_code: bool,
) -> None:
    """Replay a run from its files with plain transformers, and report what differs.

    RUN       directory of the run
    --rows N  number of completions whose tokens and log-probs are recomputed [128]
    --all     recompute the tokens and log-probs of all completions
    --seed N  seed that chooses these completions [0]
    --trust-run-code
              run the functions that the settings of RUN name, and the loss in RUN/loss
    """
    if rows < 1:
        raise SettingsError(f"--rows = {rows}: recompute at least one completion")
    from lagrpo.verify import print_report, verify_run

    count = None if everything else rows
    report = verify_run(run, count, seed, trust_run_code=trust_run_code)
    print_report(report)
    if report.differences:
        sys.exit(1)


def add_vllm_serve_arguments(parser: CommandParser) -> None:
    """Adds the arguments of `vllm_serve`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1280)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--weight-transfer", choices=("directory", "nccl"), default="directory")
    parser.add_argument("--lora-r", type=int, default=0)
    parser.add_argument("--server-args", action="append", default=[])


def vllm_serve(
    model: str,
    host: str,
    port: int,
    dtype: Literal["bfloat16", "float32"],
    max_model_len: int,
    max_num_seqs: int,
    weight_transfer: Literal["directory", "nccl"],
    lora_r: int,
    server_args: Sequence[str],
) -> None:
    """Start a vLLM server for runs to attach to.

    All users of the machine can read the options after --.

    MODEL                   hub id or directory of a causal language model, or smollm2 (embedded)
    --host ADDRESS          address to listen on; others than 127.0.0.1 need
                            $LAGRPO_VLLM_API_KEY [127.0.0.1]
    --port N                port to listen on [8000]
    --dtype DTYPE           bfloat16 or float32, of weights and arithmetic [bfloat16]
    --max-model-len N       longest sequence in tokens: max_prompt_length +
                            max_completion_length [1280]
    --max-num-seqs N        completions decoded at a time [128]
    --weight-transfer HOW   the run's vllm.weight_transfer: directory or nccl [directory]
    --lora-r N              the run's model.lora_r; 0 for full training [0]
    --server-args OPTION    an option for vLLM, like those after --; repeatable
    """
    from lagrpo.rollout.vllm.server import serve

    code = serve(
        model,
        host,
        port,
        weight_transfer,
        lora_r,
        server_args,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    sys.exit(code)


def add_recipes_arguments(parser: CommandParser) -> None:
    """Adds the argument of `recipes`."""
    parser.add_argument("name", nargs="?", metavar="NAME")


def recipes(name: str | None) -> None:
    """List the recipes (losses), or print one with its source, settings and code."""
    from lagrpo.terminal.show import show_recipe, show_recipes

    if name is None:
        show_recipes()
    else:
        show_recipe(name)


def call(name: str, words: list[str]) -> None:
    """Calls a command without settings, or prints its docstring.

    Words after -- become values of --server-args. Raises SettingsError for wrong words.
    """
    command = SIMPLE_COMMANDS[name]
    own_words, foreign_words = split_words(words)
    if asks_for_help(own_words):
        print_text(f"usage: lagrpo {command.usage}\n\n{inspect.getdoc(command.function)}")
        return
    arguments = [spell_out(word) for word in own_words]
    for word in foreign_words[1:]:
        arguments.append(f"--server-args={shlex.quote(word)}")
    parser = CommandParser()
    command.add_arguments(parser)
    command.function(**vars(parser.parse_args(arguments)))


@dataclass(frozen=True)
class SimpleCommand:
    """A command without settings."""

    usage: str
    function: Callable[..., None]
    """called with the arguments by their names"""
    add_arguments: Callable[[CommandParser], None]


SIMPLE_COMMANDS = {
    "view": SimpleCommand("view RUN … [OPTIONS]", view, add_view_arguments),
    "compare": SimpleCommand("compare RUN … [--last N]", compare, add_compare_arguments),
    "diagnose": SimpleCommand("diagnose RUN [--json]", diagnose, add_diagnose_arguments),
    "verify": SimpleCommand("verify RUN [OPTIONS]", verify, add_verify_arguments),
    "recipes": SimpleCommand("recipes [NAME]", recipes, add_recipes_arguments),
    "env": SimpleCommand("env", env, lambda parser: None),
    "vllm-serve": SimpleCommand(
        "vllm-serve MODEL [OPTIONS] [-- OPTIONS OF VLLM]", vllm_serve, add_vllm_serve_arguments
    ),
}

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "eval": evaluate,
    "study": study,
    "check-cluster": check_ranks_of_cluster,
}
COMMANDS |= {name: partial(call, name) for name in SIMPLE_COMMANDS}
