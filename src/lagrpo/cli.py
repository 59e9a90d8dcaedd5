"""The command line.

    lagrpo train [demo | gsm8k | deepscaler | FILE.toml] [--section.name VALUE …]
                 [--resume RUN | auto] [--dry-run]
    lagrpo eval MODEL [--task gsm8k] [--eval.num_samples 50] …
    lagrpo view RUN … [--text] [--serve]
    lagrpo recipes [NAME]
    lagrpo vllm-serve MODEL [--port P] … [-- OPTIONS OF VLLM]
    lagrpo env
    lagrpo verify RUN
    lagrpo --version

--task NAME, --model PATH and --recipe NAME stand for --task.name, --model.path and --loss.recipe.
`lagrpo COMMAND --help` lists what each takes. Exit codes: 0 done, 1 the run failed (verify: something differs),
2 wrong input, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

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
from typing import Annotated, Literal

import tyro

from lagrpo import logs
from lagrpo.env import env
from lagrpo.errors import SettingsError, find_nearest
from lagrpo.interrupts import find_interruption, interruptible
from lagrpo.logs import redact
from lagrpo.settings.load import load_settings, read_words, to_toml
from lagrpo.settings.schema import Settings

HELP = {"-h", "--help"}
EVALUATED = ("run", "model", "task", "rollout", "vllm", "eval")  # sections that `lagrpo eval` reads


def main(arguments: Sequence[str] | None = None) -> None:
    """The `lagrpo` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # an encoding without ✓ prints its number
            stream.reconfigure(errors="backslashreplace")
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in HELP:
        return print((__doc__ or "").strip())
    if name == "--version":
        return print(f"lagrpo {version('lagrpo')}")
    logs.print_records()
    try:
        with interruptible(), failing(SettingsError, FileNotFoundError, code=2):
            if name not in COMMANDS:
                nearest = find_nearest(name, COMMANDS)
                raise SettingsError(f"there is no command {name!r}; did you mean {nearest!r}? (lagrpo --help)")
            COMMANDS[name](rest)
    except BrokenPipeError:  # the reader of our output has gone: `lagrpo … | head`
        sys.stderr.close()
    except BaseException as error:
        if (stop := find_interruption(error)) is None:
            raise
        print("\nlagrpo: interrupted", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))


@contextmanager
def failing(*errors: type[Exception], code: int = 1) -> Iterator[None]:
    """Inside, one of these errors prints its message, without a traceback, and exits."""
    try:
        yield
    except errors as error:
        among = f" (rank {os.environ.get('RANK')})" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        print(redact("\n".join([f"lagrpo{among}: {error}", *getattr(error, "__notes__", ())])), file=sys.stderr)
        sys.exit(code)


@dataclass(frozen=True)
class Train:
    """Train on the settings of a file or a packaged one (demo, gsm8k, deepscaler), changed by --section.name VALUE."""

    file: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="SETTINGS")]] = None
    """Settings file (TOML), or demo, gsm8k, deepscaler"""
    resume: str | None = None
    """Run to resume from its newest checkpoint, with its settings; auto: the run called run.name, if any"""
    dry_run: bool = False
    """Print the settings and what they mean: samples per update, staleness, memory"""


def train(words: list[str]) -> None:
    """Read the settings, train, and exit with the status."""
    sections = [*Settings.model_fields]
    given, _ = read_words([word for word in words if word not in HELP], Train, Settings(), sections)
    settings = load_settings(given.file, resume=given.resume)  # the values that words change, and the help shows
    given, changes = read_words(words, Train, settings, sections)
    settings = load_settings(given.file, changes, given.resume)
    from lagrpo.training.checks import check_settings

    recipe = check_settings(settings, resume=given.resume)
    if given.dry_run:
        from lagrpo.training.explain import meaning

        lines = meaning(settings, recipe)
        return print(redact(to_toml(settings)), *(f"# {line}" for line in lines), sep="\n")
    from lagrpo.training import run

    with failing(*run.FAILURES):
        stopped = run.train(settings, resume=given.resume).interrupted
    if stopped:
        sys.exit(128 + stopped)


@dataclass(frozen=True)
class Eval:
    """pass@1 and pass@k of a model on the test prompts of a task, with intervals."""

    path: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Directory of a model or an adapter, hub id, or smollm2"""


def evaluate(words: list[str]) -> None:
    """Evaluate a model, by default on all test prompts."""
    base = {"run.output_dir": "evaluations", "eval.num_prompts": 0, "rollout.num_generations": 1}
    given, changes = read_words(words, Eval, load_settings(base), EVALUATED)
    settings = load_settings(base | {"model.path": given.path}, changes)
    from lagrpo.training.checks import check_evaluation

    check_evaluation(settings)
    from lagrpo.training.evaluation import evaluate_model
    from lagrpo.training.run import FAILURES

    with failing(*FAILURES):
        evaluate_model(settings)


def view(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    text: bool = False,
    serve: bool = False,
    out: Path | None = None,
    open: bool = False,
    completions: int = 10_000,
    port: int = 0,
    batch: int | None = None,
) -> None:
    """Show runs: metrics, groups, completions, tokens, evaluations and settings, as one HTML file or as text.

    Args:
        runs: Directories of runs; several are laid over each other.
        text: Print completions of one batch instead of writing a page.
        serve: Serve the page on 127.0.0.1 and follow the runs until Ctrl-C.
        out: File to write; default: view.html in the run, ./view.html for several runs.
        open: Open the page in the browser.
        completions: Completions that the page holds; of more, whole groups evenly over the batches.
        port: Port of --serve; 0: a free one.
        batch: Batch that --text prints; default: the last.
    """
    from lagrpo.terminal.show import show
    from lagrpo.view import serve as pages

    if text:
        for run in runs:
            show(run, batch)
    else:
        pages.view(runs, out, completions, open, port if serve else None)


def verify(
    run: tyro.conf.Positional[Path],
    rows: int = 128,
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    seed: int = 0,
) -> None:
    """Replay a run from its files with plain transformers: samples, log-probs, rewards, advantages, metrics.

    Args:
        run: Directory of the run.
        rows: Completions to recompute (samples and log-probs).
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


def vllm_serve(
    model: tyro.conf.Positional[str],
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_model_len: int = 1281,
    max_num_seqs: int = 128,
    weight_transfer: Literal["directory", "nccl"] = "directory",
    lora_r: int = 0,
    server_args: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
) -> None:
    """Start a vLLM server for runs to attach to. Words after -- go to vLLM: lagrpo vllm-serve MODEL -- --seed 3

    Args:
        model: Hub id or directory of a causal language model, or smollm2.
        host: Address; one that other machines can reach needs $LAGRPO_VLLM_API_KEY.
        port: Port.
        dtype: dtype of weights and arithmetic.
        max_model_len: Tokens of the longest sequence: max_prompt_length + max_completion_length + 1 of the runs.
        max_num_seqs: Completions decoded at a time.
        weight_transfer: How weights reach the server, as vllm.weight_transfer of the run.
        lora_r: Largest rank of adapters, as model.lora_r of the run; 0: none.
        server_args: More options of vllm serve; none that hold a secret.
    """
    from lagrpo.rollout.vllm.server import serve

    sizes = {"dtype": dtype, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    serve(model, host, port, weight_transfer, lora_r, server_args, **sizes)


def recipes(name: Annotated[str | None, tyro.conf.Positional] = None) -> None:
    """List the recipes, or print one with the source code of its functions.

    Args:
        name: Recipe to print.
    """
    from lagrpo.terminal.show import show_recipe, show_recipes

    show_recipes() if name is None else show_recipe(name)


def call(name: str, function: Callable[..., None], words: list[str]) -> None:
    """Call a command by its signature; words after -- become values of --server-args."""
    own = words[: words.index("--")] if "--" in words else words
    given = [*own, *(f"--server-args={shlex.quote(word)}" for word in words[len(own) + 1 :])]
    tyro.cli(function, args=given, prog=f"lagrpo {name}")


SIGNATURES = {"view": view, "recipes": recipes, "vllm-serve": vllm_serve, "env": env, "verify": verify}
COMMANDS: dict[str, Callable[[list[str]], None]] = {
    **{"train": train, "eval": evaluate},
    **{name: partial(call, name, function) for name, function in SIGNATURES.items()},
}
