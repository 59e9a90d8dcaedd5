"""Prompts and ends: which prompt stands where, what the model read, how a completion ended, what its text is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lagrpo.replay.findings import Report
from lagrpo.replay.groups import groups_of
from lagrpo.replay.source import Row, Source
from lagrpo.replay.weights import Weights
from lagrpo.tasks import Task, order_prompts


def check(source: Source, weights: Weights, task: Task | None, rows: Sequence[Row], report: Report) -> None:
    """Prompts against the task, ends and texts against the tokenizer."""
    try:
        tokenizer, eos_ids = weights.tokenizer(), weights.eos_ids()
    except (OSError, ValueError) as error:
        report.skip("prompts, ends and texts: completions", f"no tokenizer: {error}", len(rows))
        return
    if task is not None:
        check_prompts(source, tokenizer, task, rows, report)
    check_ends(source, tokenizer, eos_ids, rows, report)


def check_prompts(source: Source, tokenizer: Any, task: Task, rows: Sequence[Row], report: Report) -> None:
    """Which prompts a batch has, a function of the seed and the batch; their gold; their tokens by the template."""
    found = report.check("prompts", note="which, their gold, their tokens")
    size, seed = task.size("train"), source.settings.run.seed
    orders: dict[int, list[int]] = {}
    place: dict[int, int] = {}  # groups of a batch so far
    for first in (members[0] for members in groups_of(rows) if members[0]["source"] == "sampler"):
        batch, key = first["batch"], first["prompt_key"]
        nth = place[batch] = place.get(batch, -1) + 1
        if first["epoch"] >= 0:  # a negative one stands for another prompt, drawn in its place
            epoch, position = divmod((batch - 1) * source.fresh + nth, size)
            expected = orders.setdefault(epoch, order_prompts(seed, epoch, size))[position]
            found.equal(first.file, first.place, "epoch and prompt_key", [first["epoch"], key], [epoch, expected])
        if not 0 <= key < size:
            found.equal(first.file, first.place, "prompt_key", key, f"one of 0 .. {size - 1}")
            continue
        prompt = task.prompt("train", key)
        gold, tokens = json.dumps(prompt.gold, ensure_ascii=False), templated(tokenizer, prompt)
        found.equal(first.file, first.place, "gold", first["gold"], gold)
        found.equal(first.file, first.place, "prompt_token_ids", first["prompt_token_ids"], tokens)


def templated(tokenizer: Any, prompt: Any) -> list[int]:
    """A prompt as the model reads it: by the chat template, or as plain text where there is none."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in prompt.messages))["input_ids"])
    messages = [dict(message) for message in prompt.messages]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def check_ends(source: Source, tokenizer: Any, eos_ids: set[int], rows: Sequence[Row], report: Report) -> None:
    """A completion ends at its first end-of-sequence token, or at the limit; its text is its tokens decoded."""
    found = report.check("ends and texts")
    limit = source.settings.sampling.max_tokens
    own = [row for row in rows if row.generated]
    for row in own:
        tokens = row["token_ids"]
        ends = [t for t, token in enumerate(tokens) if token in eos_ids]
        stopped = ends[0] + 1 if ends else limit
        found.equal(row.file, row.place, "number of tokens", len(tokens), stopped)
        found.equal(row.file, row.place, "finished", row["finished"], bool(ends))
        found.equal(row.file, row.place, "text", row["text"], tokenizer.decode(tokens, skip_special_tokens=True))
    report.skip("ends and texts: completions", "failed, or offline data", len(rows) - len(own))
