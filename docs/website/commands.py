"""Write docs/commands.md: each command of lagrpo with the output that it had, shortened.

    python docs/website/commands.py

It runs the commands in a temporary directory, two batches of the demo among them: some minutes.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lagrpo.cli import COMMANDS

DOCS = Path(__file__).parents[1]
WIDTH = 116
"""Columns of the terminal. Longer lines are cut."""

BEGINNING = """# Commands

Find the command for what you want to do, and see what it prints.

| to | command |
|---|---|
"""

END = """
`--help` after a command lists its options; `--debug` shows the traceback of an error. Exit codes:
0 done, 1 the run failed or verify found a difference, 2 wrong input, 130 Ctrl-C (128 + the signal).

The outputs are from a CPU with two cores; … stands for what was left out.
"""


@dataclass(frozen=True)
class Example:
    """A command, and the lines of its output that the page shows."""

    command: str
    """the words after `lagrpo`"""
    purpose: str
    lines: str = ""
    """pattern of lines that are shown; all by default"""
    count: int = 6
    """most lines that are shown"""
    note: str = ""
    before: str = ""
    """a command that must have run, which the page does not show"""


EXAMPLES = [
    Example(
        "train demo --dry-run",
        "see what settings mean",
        r"# (batch|schedule|run|memory) ",
        note="Samples, staleness and memory; then the settings that are not the defaults.",
    ),
    Example(
        "train demo --schedule.batches 2 --run.name first",
        "train",
        r"directory|  step|  +\d+  |  pass@1 after|  next ",
    ),
    Example(
        "train --resume runs/first",
        "resume a run",
        r"resumed|Finished",
        note="From its newest checkpoint. This run is finished, so nothing is left to do.",
    ),
    Example(
        "eval runs/first/weights/final --eval.num_samples 4",
        "evaluate a model",
        r".* on |  (pass@|per-prompt)",
        count=3,
        note="On the held-out prompts of the run, or with `--task NAME` on others.",
    ),
    Example(
        "compare runs/first runs/second",
        "compare runs",
        before="train demo --schedule.batches 2 --schedule.sync_every 2 --run.name second",
    ),
    Example(
        "diagnose runs/first",
        "find out why a run does not learn",
        r".*\S",
        count=3,
    ),
    Example(
        "view runs/first --text",
        "read completions",
        r".*\S",
    ),
    Example("view runs/first", "see curves and completions in a browser"),
    Example(
        "verify runs/first --rows 16",
        "check a run",
        r"check|texts|samples|\d+ differences",
        note="Replays the run with plain transformers, and counts the values that differ.",
    ),
    Example(
        "study experiments/papers/fig2-small.toml "
        "--results experiments/papers/results/fig2-small.json --report",
        "compare methods over seeds",
        count=2,
        note="A verdict for each claim of the study. Without `--report` it makes the missing runs.",
    ),
    Example(
        "recipes",
        "list the losses",
        r".*\S",
        count=4,
        note="*kept* is the area under the learning curve at a lag of 64 updates, on two tasks.",
    ),
    Example(
        "recipes dapo",
        "read one loss",
        r"formula |  .*epsilon_high =|def clipped",
        note="Formula, source, knobs, and the code of its functions.",
    ),
    Example("env", "report versions and hardware", r"(lagrpo|torch|kernels|dtype) "),
    Example(
        "check-cluster",
        "check the ranks of a cluster",
        note="Start it on every node, like the run: "
        "`torchrun … -m lagrpo check-cluster settings.toml`.",
    ),
    Example(
        "vllm-serve --help",
        "start a vLLM server",
        r"usage",
        note="Without `--help` it prints the settings to attach with, and starts the server, which "
        "ends with it.",
    ),
]


def run_commands() -> Iterator[tuple[Example, str]]:
    """Each example with its output. Skips commands that this version does not have."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "experiments").symlink_to(DOCS.parent / "experiments")
        for example in EXAMPLES:
            if example.command.split()[0] not in COMMANDS:
                continue
            if example.before:
                run(example.before, directory)
            yield example, run(example.command, directory)


def run(command: str, directory: str) -> str:
    """The output of a command in this directory, without the directories of this machine."""
    print(f"lagrpo {command}", file=sys.stderr)
    result = subprocess.run(
        [sys.executable, "-m", "lagrpo", *command.split()],
        cwd=directory,
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    text = result.stdout + result.stderr
    return text.replace(f"{Path(sys.executable).parent}/", "").replace(f"{directory}/", "")


def shorten(output: str, example: Example) -> Iterator[str]:
    """The lines that the page shows, with … for others."""
    pattern = re.compile(example.lines)
    shown, left_out = 0, False
    for line in output.splitlines():
        if not pattern.match(line) or shown == example.count:
            left_out = left_out or bool(line.strip())
            continue
        if left_out and shown:
            yield "…"
        left_out = False
        shown += 1
        yield line.rstrip() if len(line.rstrip()) <= WIDTH else f"{line[: WIDTH - 1].rstrip()}…"
    if left_out:
        yield "…"


def write_page(outputs: Sequence[tuple[Example, str]]) -> str:
    """The text of the page."""
    rows: list[str] = []
    sections: list[str] = []
    for example, output in outputs:
        heading = example.purpose[0].upper() + example.purpose[1:]
        anchor = re.sub(r"[^a-z ]", "", heading.lower()).replace(" ", "-")
        rows.append(f"| [{example.purpose}](#{anchor}) | `lagrpo {example.command}` |\n")
        lines = "\n".join(shorten(output, example))
        block = f"```console\n$ lagrpo {example.command}\n{lines}\n```\n"
        note = f"{example.note}\n\n" if example.note else ""
        sections.append(f"\n## {heading}\n\n{note}{block}")
    return "".join([BEGINNING, *rows, END, *sections])


if __name__ == "__main__":
    page = write_page(list(run_commands()))
    (DOCS / "commands.md").write_text(page, encoding="utf-8")
