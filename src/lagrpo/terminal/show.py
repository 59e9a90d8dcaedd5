"""Prints rollouts for `lagrpo view RUN --text`, and recipes for `lagrpo recipes`."""

from __future__ import annotations

import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table

from lagrpo.errors import as_settings_error, parse_json
from lagrpo.runs import reading
from lagrpo.runs.comparing import compare
from lagrpo.runs.directory import Run
from lagrpo.runs.rollouts import reward_columns
from lagrpo.terminal.text import ABSENT, MARKS, Text, count_of, formatted, unscored_text
from lagrpo.types import ExcludedReason, JsonObject, JsonView, OutcomeKind, Range, is_correct

Row = JsonObject

SEPARATOR = "  ·  "
ARROW = " → "
FILE_WIDTH = 200
"""Columns at which lines are wrapped in a file or a pipe. A terminal has its own width."""
COMPARISON_WIDTH = 100
"""The same for a comparison of runs, which is often pasted."""
COLUMN_GAP = 2
"""Spaces between two columns of a comparison."""
OVERVIEW_LAG = 64
"""The lag of the areas that the list of recipes shows."""


class PipeConsole(Console):
    """A console that raises BrokenPipeError if the reader of the output has gone, as `print` does.

    Console itself exits with code 1, but `lagrpo … | head` is no error.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(width: int = FILE_WIDTH) -> Console:
    """Returns the console for stdout, with `width` columns unless a terminal shows it."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return PipeConsole() if has_width else PipeConsole(width=width)


def show(
    run_dir: Run | Path | str, batch: int | None = None, console: Console | None = None
) -> None:
    """Prints the completions of one batch and the results of evaluation sets.

    The default is the last batch with a signal, or the last batch if none has one. Equal
    completions of a prompt are printed once, with their number.

    Raises RunNotFoundError if the run, its rollouts or the batch are not there, and SettingsError
    for rollouts of another schema or a damaged file.
    """
    console = console or make_console()
    run = reading.open_run(run_dir)
    batches = reading.rollout_batches(run)
    if not batches:
        problem = "has no rollouts yet: its first batch is not finished"
        raise reading.RunNotFoundError(f"{run.path} {problem}")
    with as_settings_error():
        note = ""
        if batch is None:
            batch = reading.last_batch_with_signal(run) or batches[-1]
            if batch != batches[-1]:
                note = "the last batch with a signal"
        rows = reading.load_rollouts(run, [batch])
        reward_range = reading.load_reward_range(run)
        summaries = reading.load_evaluations(run)
        results = [Text(line, style="dim") for line in result_lines(summaries)]
    console.print(_title(run, rows, batches, note), *results, "", sep="\n")
    for prompt_id, members in groupby(rows, key=lambda row: row["prompt_id"]):
        completions = list(members)
        _print_prompt(console, prompt_id, completions[0])
        for row, count in _merge_equal(completions, reward_range):
            console.print(render_completion(row, reward_range, count))


def _merge_equal(rows: Sequence[Row], reward_range: Range) -> list[tuple[Row, int]]:
    """Returns the completions that look different, in order, each with its number of copies."""
    merged: dict[tuple[str, str], tuple[Row, int]] = {}
    for row in rows:
        looks = (_render_head(row, reward_range).markup, _render_text(row).plain)
        first, count = merged.get(looks, (row, 0))
        merged[looks] = (first, count + 1)
    return list(merged.values())


def _print_prompt(console: Console, prompt_id: int, row: Row) -> None:
    """Prints the prompt of a completion, and its reference answer if it has one."""
    heading = Text(f"prompt {prompt_id}", style="bold")
    console.print(Rule(heading, align="left", style="dim"))
    console.print(Text(row["prompt_text"]))
    with as_settings_error(f"the answer of prompt {prompt_id}"):
        answer = parse_json(row["answer"])
    if answer is not None:
        # As JSON, unless it is a text.
        text = answer if isinstance(answer, str) else row["answer"]
        console.print(Text(f"answer: {text}", style="cyan"))
    console.print()


def result_lines(summaries: Sequence[JsonView]) -> list[str]:
    """Returns a line for each evaluation set: its first and last result, and after which batches.

    The list is empty if the run has no sets.
    """
    summaries_by_set: dict[str, list[JsonView]] = {}
    for summary in summaries:
        if summary.get("set"):
            summaries_by_set.setdefault(summary["set"], []).append(summary)
    return [_result_line(name, of_set) for name, of_set in summaries_by_set.items()]


def _result_line(set_name: str, summaries: Sequence[JsonView]) -> str:
    """Returns the line of a set with these evaluations, in the order of their steps."""
    first_and_last = [summaries[0]]
    if len(summaries) > 1:
        first_and_last.append(summaries[-1])
    passes = []
    rewards = []
    batches = []
    unscored = []
    for summary in first_and_last:
        passes.append(formatted(summary.get("pass@1"), ".1%"))
        rewards.append(formatted(summary.get("reward"), ".3f"))
        batches.append(str(summary.get("step") or 0))
        unscored.append(unscored_text(summary) or "all scored")
    # A set that was evaluated before and after 0 batches has one number.
    batches = list(dict.fromkeys(batches))
    results = f"pass@1 {ARROW.join(passes)}, mean reward {ARROW.join(rewards)}"
    line = f"evaluation {set_name}: {results} (batch {ARROW.join(batches)})"
    if any(summary.get("unscored") for summary in first_and_last):
        line += f", {ARROW.join(unscored)}"
    return line


def render_completion(row: Row, reward_range: Range, count: int = 1) -> Group:
    """Returns one completion: a line of facts, and its text or its turns.

    `count` is how many completions of its group are equal to it.
    """
    head = _render_head(row, reward_range)
    if count > 1:
        head = Text.assemble((f"{count} × ", "bold"), head)
    return Group(head, Padding(_render_text(row), (0, 0, 1, 2), expand=False))


def _render_head(row: Row, reward_range: Range) -> Text:
    """Returns the line of facts of a completion, its reward first."""
    verdict = None
    reward = row["outcome"]
    if row["outcome"] == OutcomeKind.SCORED:
        # Rows of several rewards say what is correct.
        has_decision = "correct" in row
        verdict = row["correct"] if has_decision else is_correct(row["reward"], reward_range)
        reward = f"{row['reward']:g}"
    parts = [f"{name} {formatted(value, 'g')}" for name, value in reward_columns(row).items()]
    if parts:
        reward += f" ({', '.join(parts)})"
    mark, style = MARKS[verdict]
    facts = "".join(f"{SEPARATOR}{fact}" for fact in _facts(row))
    head = Text.assemble((f"{mark} {reward}", f"bold {style}"), (facts, "dim"))
    if row["reason"]:
        head.append(f"{SEPARATOR}{row['reason']}", "yellow")
    return head


def _facts(row: Row) -> Iterator[str]:
    """Yields what there is to say about a completion besides its reward."""
    yield count_of(sum(row["loss_mask"]), "token")
    if row["messages"]:
        policy_turns = row["messages"][::2]
        yield count_of(len(policy_turns), "turn")
    elif not row["finished"]:
        yield "cut at the limit"
    versions = [
        version
        for version, is_sampled in zip(row["policy_versions"], row["loss_mask"], strict=True)
        if is_sampled
    ]
    if row["source"] == "file":
        yield "offline data"
    elif versions:
        first = min(versions)
        last = max(versions)
        if first == last:
            yield f"generated by version {first}"
        else:
            yield f"generated by versions {first} to {last}"
        yield f"staleness {row['staleness']}"
    if row["advantage"] is not None:
        yield f"advantage {row['advantage']:+.3f}"
    if row["excluded_reason"] == ExcludedReason.ZERO_VARIANCE:
        yield "no signal: all rewards of its group are equal"


def _render_text(row: Row) -> Text:
    """Returns the text of a completion; of an episode, the turns of policy and environment."""
    if not row["messages"]:
        return Text(row["completion"] or "(empty)")
    turns = Text()
    for number, text in enumerate(row["messages"]):
        if number:
            turns.append("\n")
        is_policy = number % 2 == 0
        turns.append(*(("policy: ", "bold") if is_policy else ("environment: ", "cyan")))
        turns.append(text or "(empty)")
    return turns


def _title(run: Run, rows: list[Row], batches: list[int], note: str) -> Text:
    """Returns the heading: the run, and facts about the batch and the batches on disk.

    `note` says why this batch is shown, if not only because it is the last.
    """
    facts = []
    if rows:
        first = rows[0]
        facts.append(f"batch {first['step']}, π_k is version {first['policy_version']}")
    if note:
        facts.append(note)
    facts.append(f"{len(rows)} completions")
    rewards = [row["reward"] for row in rows if row["outcome"] == OutcomeKind.SCORED]
    if rewards:
        facts.append(f"mean reward {sum(rewards) / len(rewards):.3f}")
    if len(rewards) < len(rows):
        facts.append(f"{len(rows) - len(rewards)} of {len(rows)} not scored")
    facts.append(f"rollouts of batches {batches[0]} to {batches[-1]} are on disk")
    return Text.assemble((str(run.path), "bold"), "\n" + SEPARATOR.join(facts))


def show_comparison(
    runs: Sequence[Path], last: int | None = None, console: Console | None = None
) -> None:
    """Prints the table of `lagrpo.compare`, with a column for each run.

    The ends of an interval stand below its value. If the names of the runs are too long for the
    line, the columns have numbers instead. Raises as `compare`, and SettingsError for damaged
    files.
    """
    console = console or make_console(COMPARISON_WIDTH)
    with as_settings_error():
        comparison = compare(runs, last)
    names = [str(name) for name in comparison.index]
    row_names = [_row_name(str(column)) for column in comparison.columns]
    rows = [[_cell(value) for value in comparison[column]] for column in comparison.columns]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    headings = names
    if max(map(len, row_names)) + sum(widths) + COLUMN_GAP * len(names) > console.width:
        headings = [str(number) for number in range(1, len(names) + 1)]
        for number, name in zip(headings, names, strict=True):
            console.print(Text(f"{number}  {name}"), soft_wrap=True)
        console.print()
    table = Table("", box=None, padding=(0, COLUMN_GAP, 0, 0))
    table.columns[0].no_wrap = True
    for heading in headings:
        table.add_column(Text(heading), overflow="fold")
    for name, cells in zip(row_names, rows, strict=True):
        table.add_row(Text(name, "dim"), *map(Text, cells))
    console.print(table)


def _row_name(column: str) -> str:
    """Returns the name of a row: the ends of an interval are indented below its value."""
    if column.endswith(("_low", "_high")) and column.startswith("eval/"):
        name, _, end = column.rpartition("_")
        return f"  {name.rpartition('/')[2]} {end}"
    return column


def _cell(value: Any) -> str:
    """Returns a setting, or a number with four digits; "–" for a missing one."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return ABSENT if math.isnan(value) else f"{value:.4g}"
    return ABSENT if value is None else str(value)


def show_recipes(console: Console | None = None) -> None:
    """Every recipe by family: its name, what it needs, its paper, and what it maximizes.

    A legend explains the symbols.
    """
    # imports torch, which `view --text` need not load
    from lagrpo.core.recipes import needs_of
    from lagrpo.core.rows import FAMILIES, RECIPES, SYMBOLS

    console = console or make_console()
    for family, rows in FAMILIES.items():
        table = Table("", "kept", "needs", "arXiv", "formula", box=None, header_style="dim")
        for column in table.columns[:4]:
            column.no_wrap = True
        table.columns[0].min_width = max(map(len, RECIPES))
        table.columns[1].min_width = len("100 100")
        table.columns[2].min_width = len("α π_k π_ref")
        table.columns[3].min_width = len("2505.22257")
        for name in rows:
            recipe = RECIPES[name]
            paper = recipe.source.partition("arXiv ")[2][: len("2505.22257")]
            needs = " ".join(needs_of(recipe))
            table.add_row(
                Text(name, "bold"),
                _kept(name),
                needs,
                Text(paper, "dim"),
                Text(recipe.formula),
            )
        console.print(Text(family[0].upper() + family[1:], "italic"))
        console.print(table)
        console.print()
    legend = [
        SYMBOLS,
        f"kept: area under the learning curve at lag {OVERVIEW_LAG} and f / 3, on chain and gamble",
        "in percent of the best recipe with fresh samples; empty: not measured",
        "needs: log-probs of α, π_k or π_ref; "
        "lag: the staleness of each token; step: a second pass",
        "over the step",
        "",
        "lagrpo recipes NAME prints its code; lagrpo train --recipe NAME uses it.",
        "NAME may also be your own loss: module:function",
    ]
    console.print(Text("\n".join(legend)))


def _kept(name: str) -> str:
    """The area that a recipe keeps on each task at OVERVIEW_LAG, in percent; empty: unmeasured."""
    from lagrpo.settings.lag_table import load_table

    by_task = load_table().get(name, {}).get(OVERVIEW_LAG, {})
    return " ".join(f"{100 * measured.kept:3.0f}" for measured in by_task.values())


def _measured_staleness(name: str) -> list[str]:
    """A line for each constant lag at which a recipe was measured, and what the numbers mean."""
    from lagrpo.settings.lag_table import kept_text, load_table, measured_lags, rate_text

    lines: list[str] = []
    for lag in measured_lags(name):
        by_task = load_table()[name][lag].values()
        finals = " and ".join(f"{100 * measured.final:.0f}" for measured in by_task)
        lives: list[str] = []
        for measured in by_task:
            if measured.living_rate is None or measured.kl is None:
                lives.append("no rate")
            else:
                lives.append(f"{rate_text(measured.living_rate)} (KL {measured.kl:.3f})")
        lines.append(
            f"lag {lag}: keeps {kept_text(name, lag)}, ends at {finals} %; "
            f"lives up to {' and '.join(lives)}"
        )
    if not lines:
        return ["not measured"]
    lines += [
        "All at f / 3; f is the best learning rate with fresh samples. 100 % is the best recipe",
        "with fresh samples: the area under its curve, and its score at the end. At each rate up",
        "to the last one no run collapsed; KL: the mean of rollout/kl there, in nats per token.",
        "docs/off-policy.md (Which loss?) says what to do with them.",
    ]
    return lines


def show_recipe(name: str, console: Console | None = None) -> None:
    """One recipe: formula, source, settings, code. Raises SettingsError for an unknown one."""
    from lagrpo.core.recipes import needs_of, resolve

    with as_settings_error():
        recipe = resolve(name)
    console = console or make_console()
    settings = []
    for path, value in recipe.settings.items():
        shown = str(value).lower() if isinstance(value, bool) or value is None else value
        settings.append(f"{path} = {shown}")
    lines = {
        "recipe": name,
        "formula": recipe.formula,
        "source": recipe.source,
        "needs": ", ".join(needs_of(recipe)) or "nothing but the trainer's log-probs",
        "staleness": "\n".join(_measured_staleness(name)),
        "made of": "\n".join(settings),
    }
    head = Table.grid(padding=(0, 2, 0, 0))
    for label, text in lines.items():
        head.add_row(Text(label, "dim"), Text(text, "bold" if label == "recipe" else ""))
    console.print(head)
    console.print(
        Text(
            "--loss.overrides.PATH VALUE replaces one of them; a short path does if it is unique.\n"
        )
    )
    code = "\n\n".join(map(_source, recipe.functions))
    console.print(Text(code), soft_wrap=True)


def _source(function: Callable[..., object]) -> str:
    """Returns the code of a function, or of the class of an object that can be called."""
    if isinstance(function, partial):
        function = function.func
    is_object = not hasattr(function, "__code__") and not inspect.ismethod(function)
    try:
        return inspect.getsource(type(function) if is_object else function)
    except OSError:
        return "# its code is in no file"
