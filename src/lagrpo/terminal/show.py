"""What `lagrpo show RUN` prints: completions with their reward, advantage, versions and lag."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from lagrpo.errors import visible
from lagrpo.runs.directory import Run
from lagrpo.runs.reading import RunNotFoundError, load_reward_range, load_rollouts, open_run, rollout_batches
from lagrpo.types import is_right

Only = Literal["all", "right", "wrong", "rejected"]


def show(
    run_dir: Run | Path | str,
    batch: int | None = None,
    count: int = 8,
    prompt: int | None = None,
    only: Only = "all",
    console: Console | None = None,
) -> None:
    """Prints up to `count` completions of one batch (default: the last), of the prompt with key `prompt` only if given.

    `only`: "right" are those with the greatest reward of the run's task.reward_range, "wrong" the other scored ones,
    "rejected" those without a reward (rejected or failed). Raises RunNotFoundError when the run, its rollouts or the
    batch are not there.
    """
    console = console or Console()
    run = open_run(run_dir)
    batches = rollout_batches(run)
    if not batches:
        raise RunNotFoundError(f"{run.path} has no rollouts yet: its first batch is not finished")
    rows = load_rollouts(run, [batches[-1] if batch is None else batch])
    scale = load_reward_range(run)
    chosen = [row for row in rows if (prompt is None or row["prompt_key"] == prompt) and is_kind(row, only, scale)]
    console.print(_title(run, rows, batches, min(count, len(chosen)), len(chosen)))
    if not chosen:
        console.print(Text(_nothing(rows, prompt, only)))
    for key, group in groupby(chosen[:count], key=lambda row: row["prompt_key"]):
        completions = list(group)
        console.print(_prompt(key, completions[0]))
        for row in completions:
            console.print(render_completion(row, scale))


def is_kind(row: dict[str, Any], only: Only, reward_range: tuple[float, float]) -> bool:
    """Whether a row of the rollouts is of the kind that `only` names; see `show`."""
    if only == "all":
        return True
    if only == "rejected":
        return row["outcome"] != "scored"
    return row["outcome"] == "scored" and is_right(row["reward"], reward_range) == (only == "right")


def render_completion(row: dict[str, Any], reward_range: tuple[float, float]) -> Group:
    """One completion: a line of facts, and its text."""
    scored = row["outcome"] == "scored"
    right = scored and is_right(row["reward"], reward_range)
    mark, style = ("✓", "green") if right else ("✗", "red") if scored else ("?", "yellow")
    facts = [f"{row['reward']:g}" if scored else row["outcome"], f"{sum(row['sampled'])} tokens"]
    facts += [] if row["finished"] else ["cut at the limit"]
    facts += _versions(row)
    facts += [f"advantage {row['advantage']:+.3f}"] if row["advantage"] is not None else []
    facts += ["no signal: all rewards of its group are equal"] if row["masked"] == "zero_variance" else []
    head = Text.assemble((f"{mark} {facts[0]}", f"bold {style}"), ("  ·  ".join(["", *facts[1:]]), "dim"))
    if row["reason"]:
        head.append(f"  ·  {visible(row['reason'])}", "yellow")
    return Group(head, Padding(Text(visible(row["text"]) or "(empty)"), (0, 0, 1, 2)))


def _versions(row: dict[str, Any]) -> list[str]:
    versions = [version for version, own in zip(row["versions"], row["sampled"], strict=True) if own]
    if not versions:
        return []
    first, last = min(versions), max(versions)
    drawn = f"drawn by version {first}" if first == last else f"drawn by versions {first} to {last}"
    return [drawn, f"lag {row['lag']}"]


def _title(run: Run, rows: list[dict[str, Any]], batches: list[int], shown: int, of: int) -> Text:
    facts = [f"{len(rows)} completions", f"rollouts of batches {batches[0]} to {batches[-1]} are on disk"]
    if scored := [row["reward"] for row in rows if row["outcome"] == "scored"]:
        facts.insert(1, f"mean reward {sum(scored) / len(scored):.3f}")
    if rows:
        facts.insert(0, f"batch {rows[0]['batch']}, π_k is version {rows[0]['pi_k_version']}")
    return Text.assemble((str(run.path), "bold"), "\n" + "  ·  ".join(facts), f"\nshowing {shown} of {of}\n")


def _prompt(key: int, row: dict[str, Any]) -> Group:
    gold = json.loads(row["gold"])
    head = Rule(Text(f"prompt {key}", style="bold"), align="left", style="dim")
    question = Text(visible(row["prompt_text"]))
    return Group(
        head, question, Text(f"gold: {visible(gold if isinstance(gold, str) else row['gold'])}\n", style="cyan")
    )


def _nothing(rows: list[dict[str, Any]], prompt: int | None, only: Only) -> str:
    keys = sorted({row["prompt_key"] for row in rows})
    if prompt is not None and prompt not in keys:
        return f"Prompt {prompt} is not in this batch; its prompts are {', '.join(map(str, keys))}."
    return f"No completion here is {only}."
