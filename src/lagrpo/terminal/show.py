"""What `lagrpo show RUN` prints: completions with their reward, advantage, versions and lag."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from lagrpo.errors import refusing, visible
from lagrpo.runs.directory import Run
from lagrpo.runs.reading import (
    RunNotFoundError,
    load_evaluations,
    load_reward_range,
    load_rollouts,
    open_run,
    rollout_batches,
)
from lagrpo.runs.rollouts import reward_columns
from lagrpo.terminal.text import MARKS, count_of, formatted
from lagrpo.types import Range, is_correct

Only = Literal["all", "correct", "wrong", "unscored"]
KINDS = {True: "correct", False: "wrong", None: "unscored"}
Row = dict[str, Any]


def show(
    run_dir: Run | Path | str,
    batch: int | None = None,
    count: int = 8,
    prompt: int | None = None,
    only: Only = "all",
    console: Console | None = None,
) -> None:
    """Print up to `count` completions of one batch (default: the last), for the prompt with key `prompt` if given.

    `only`: "correct" have the largest reward of the run's task.reward_range, "wrong" are the other scored ones,
    "unscored" have no reward. Raises RunNotFoundError if the run, its rollouts or the batch are not there,
    SettingsError for rollouts of another schema or a damaged file.
    """
    console, run = console or Console(), open_run(run_dir)
    if not (batches := rollout_batches(run)):
        raise RunNotFoundError(f"{run.path} has no rollouts yet: its first batch is not finished")
    with refusing():
        rows = load_rollouts(run, [batches[-1] if batch is None else batch])
        scale = load_reward_range(run)
        results = [Text(line, style="dim") for line in result_lines(load_evaluations(run))]
    keys = sorted({row["prompt_id"] for row in rows})
    chosen = [row for row in rows if prompt in (None, row["prompt_id"])]
    chosen = [row for row in chosen if only in ("all", KINDS[_is_right(row, scale)])]
    console.print(_title(run, rows, batches), *results, sep="\n")
    console.print(f"showing {min(count, len(chosen))} of {len(chosen)}\n")
    if prompt is not None and prompt not in keys:
        console.print(f"Prompt {prompt} is not in this batch; its prompts are {', '.join(map(str, keys))}.")
    for key, group in groupby(chosen[:count], key=lambda row: row["prompt_id"]):
        completions = list(group)
        console.print(_prompt(key, completions[0]), *(render_completion(row, scale) for row in completions))


def result_lines(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each evaluation set: its first and its last result, and after which batches; none without sets."""
    lines = []
    for name in dict.fromkeys(summary["set"] for summary in summaries if summary.get("set")):
        made = [summary for summary in summaries if summary.get("set") == name]
        ends, said = [made[0], made[-1]] if len(made) > 1 else made, []
        for what, key, form in (("pass@1", "pass@1", ".1%"), ("mean reward", "reward", ".3f")):
            said.append(f"{what} {' → '.join(formatted(summary.get(key), form) for summary in ends)}")
        batches = " → ".join(dict.fromkeys(f"{summary.get('step') or 0}" for summary in ends))
        lines.append(f"evaluation {name}: {', '.join(said)} (batch {batches})")
    return lines


def _is_right(row: Row, reward_range: Range) -> bool | None:
    """None for a completion that was not scored."""
    return is_correct(row["reward"], reward_range, row.get("correct")) if row["outcome"] == "scored" else None


def render_completion(row: Row, reward_range: Range) -> Group:
    """One completion: a line of facts, and its text or its turns."""
    mark, style = MARKS[_is_right(row, reward_range)]
    reward = f"{row['reward']:g}" if row["outcome"] == "scored" else row["outcome"]
    if parts := reward_columns(row):
        found = [f"{name} {formatted(value, 'g')}" for name, value in parts.items()]
        reward += f" ({', '.join(found)})"
    head = Text.assemble((f"{mark} {reward}", f"bold {style}"), ("  ·  ".join(["", *_facts(row)]), "dim"))
    if row["reason"]:
        head.append(f"  ·  {visible(row['reason'])}", "yellow")
    return Group(head, Padding(_said(row), (0, 0, 1, 2)))


def _facts(row: Row) -> list[str]:
    facts = [count_of(sum(row["loss_mask"]), "token")]
    facts += [count_of(len(row["messages"][::2]), "turn")] if row["messages"] else []
    facts += [] if row["finished"] or row["messages"] else ["cut at the limit"]
    versions = [version for version, own in zip(row["policy_versions"], row["loss_mask"], strict=True) if own]
    if row["source"] == "file":
        facts.append("offline data")
    elif versions:
        first, last = min(versions), max(versions)
        by = f"version {first}" if first == last else f"versions {first} to {last}"
        facts += [f"generated by {by}", f"staleness {row['staleness']}"]
    facts += [f"advantage {row['advantage']:+.3f}"] if row["advantage"] is not None else []
    return facts + (
        ["no signal: all rewards of its group are equal"] if row["excluded_reason"] == "zero_variance" else []
    )


def _said(row: Row) -> Text:
    """The text of a completion; for an episode, what the policy and its environment said, one after the other."""
    if not row["messages"]:
        return Text(visible(row["completion"]) or "(empty)")
    said = Text()
    for number, text in enumerate(row["messages"]):
        who, style = (("environment", "cyan"), ("policy", "bold"))[number % 2 == 0]
        said.append(f"{who}: ", style).append(f"{visible(text) or '(empty)'}\n")
    said.rstrip()
    return said


def _title(run: Run, rows: list[Row], batches: list[int]) -> Text:
    facts = [f"batch {rows[0]['step']}, π_k is version {rows[0]['policy_version']}"] if rows else []
    facts.append(f"{len(rows)} completions")
    if scored := [row["reward"] for row in rows if row["outcome"] == "scored"]:
        facts.append(f"mean reward {sum(scored) / len(scored):.3f}")
    facts.append(f"rollouts of batches {batches[0]} to {batches[-1]} are on disk")
    return Text.assemble((str(run.path), "bold"), "\n" + "  ·  ".join(facts))


def _prompt(key: int, row: Row) -> Group:
    answer = json.loads(row["answer"])
    text = Text(f"answer: {visible(answer if isinstance(answer, str) else row['answer'])}\n", style="cyan")
    head = Rule(Text(f"prompt {key}", style="bold"), align="left", style="dim")
    return Group(head, Text(visible(row["prompt_text"])), text)
