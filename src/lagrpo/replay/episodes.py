"""Completions of several turns: the environment starts anew and hears what the policy said; what it replies, and the
reward, must be what was recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from lagrpo.replay.findings import Check, Report
from lagrpo.replay.source import Row, Source
from lagrpo.tasks.base import Make, Task
from lagrpo.tasks.environments import load_environment
from lagrpo.types import Outcome, Prompt
from lagrpo.verify import Environments


def check_turns(tokenizer: Any, rows: Sequence[Row], found: Check) -> None:
    """The texts of the policy's turns are its tokens decoded, and each but the last ends with the same token."""
    for row in rows:
        spans = spans_of(row)
        own = [tokens for sampled, tokens in spans if sampled]
        found.equal(row.file, row.place, "turns", row["turns"][::2], [_decoded(tokenizer, tokens) for tokens in own])
        found.equal(
            row.file, row.place, "ends of turns", len({tokens[-1] for tokens in own[:-1]}), min(1, len(own) - 1)
        )
        found.equal(row.file, row.place, "text", row["text"], _decoded(tokenizer, row["token_ids"]))


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def spans_of(row: Row) -> list[tuple[bool, list[int]]]:
    """The tokens of each turn, and whether the policy sampled them."""
    pairs = zip(row["sampled"], row["token_ids"], strict=True)
    return [(sampled, [token for _, token in span]) for sampled, span in groupby(pairs, lambda pair: pair[0])]


def check_episodes(source: Source, make: Make, task: Task, rows: Sequence[Row], report: Report) -> None:
    """Every episode once more, turn by turn. One that could not be scored is not tried again: that may depend on the
    machine."""
    found = report.check("episodes", note="replies, ends, rewards")
    scored = [row for row in rows if row.scored]
    report.skip("episodes", "they could not be scored", len(rows) - len(scored))
    with Environments(make, **source.settings.verifier.of_an_environment) as environments:
        for row in scored:
            _check_episode(source, environments, task.prompt("train", row["prompt_key"]), row, found)


def _check_episode(source: Source, environments: Environments, prompt: Prompt, row: Row, found: Check) -> None:
    seed = source.settings.run.seed
    opened = environments.open(prompt, (seed, "opening", "train", prompt.key))
    begun, address = replace(prompt, messages=opened, asked=prompt.messages), (seed, "sample", *row.address)
    state: bytes | None = None
    turns, replies, outcome = row["turns"], list[str](), Outcome.unscored("it did not end")
    for text in turns[::2]:
        kind, said = environments.result(environments.submit(state, begun, address, text))
        if kind != "turn":
            outcome = Outcome.scored(said[0]) if kind == "final" else Outcome.unscored(str(said))
            break
        messages, worth, state = said
        outcome = Outcome.scored(worth)
        replies.append("\n".join(str(message.get("content") or "") for message in messages))
    found.equal(row.file, row.place, "replies", turns[1::2], replies[: len(turns) // 2])
    found.near(row.file, row.place, "reward", row["reward"], outcome.reward, 0.0)
    found.equal(row.file, row.place, "gold", json.loads(row["gold"]), prompt.gold)


def environment_of(source: Source, task: Task) -> Make | None:
    """What made the environments of a run's completions; None where they had one turn."""
    return load_environment(source.settings.environment, task)
