"""The evaluations of a run, for the page: their summaries, and what they found for each prompt.

Each completion's text is in the page once. Where there are more completions than fit, the first and the last evaluation
keep their texts, then the newest of the others; the counts of all are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.runs.directory import Run
from lagrpo.runs.reading import load_evaluation_records, load_evaluations
from lagrpo.runs.rollouts import reward_columns
from lagrpo.view.payload import Table

NEEDED = ("prompt_key", "prompt", "samples", "scored", "right", "completions", "rewards")


def read_evaluations(run: Run, most: int) -> dict[str, Any]:
    """Summaries, prompts and at most `most` completions. Raises ValueError for files that are damaged."""
    summaries = load_evaluations(run)
    records = [_read(run, summary["name"]) for summary in summaries]
    prompts, texts, made = Table(), Table(), [[] for _ in summaries]
    for index in _by_importance(len(summaries)):
        count = sum(len(record["completions"]) for record in records[index])
        keeps = count <= most
        most -= count if keeps else 0
        made[index] = [_row(record, prompts, texts, keeps) for record in records[index]]
    return {
        "summaries": [_facts(summary) for summary in summaries],
        "rows": made,
        "prompts": [list(prompt) for prompt in prompts.entries],
        "texts": texts.entries,
    }


def _read(run: Run, name: str) -> list[dict[str, Any]]:
    records = load_evaluation_records(run, name)
    if records and (missing := [column for column in NEEDED if column not in records[0]]):
        raise ValueError(f"{run.path}/evaluations/{name}.parquet has no column {missing[0]}")
    return records


def _by_importance(count: int) -> Sequence[int]:
    order = list(range(count))
    return [*order[:1], *order[:0:-1]]


def _row(record: Mapping[str, Any], prompts: Table, texts: Table, keeps: bool) -> dict[str, Any]:
    key, text, gold = record["prompt_key"], record["prompt"] or "", str(record.get("gold") or "")
    row = {name: record[name] for name in ("samples", "scored", "right")}
    row |= {"prompt": prompts.number((key, text, gold)), "reward": record.get("reward_mean")}
    if keeps:
        row |= {"texts": [texts.number(text or "") for text in record["completions"]], "rewards": record["rewards"]}
        parts = {name: values for name, values in reward_columns(record).items() if isinstance(values, list)}
        row |= ({"parts": parts} if parts else {}) | ({"decided": record["is_right"]} if record.get("is_right") else {})
    return row


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
    kept |= {"reward_range": summary["reward_range"]} if isinstance(summary.get("reward_range"), list) else {}
    return kept | {"batch": summary.get("batch") or 0}
