"""Rollouts as Parquet: one row per completion, schema `lagrpo.rollouts/2`.

docs/run-directory.md says what each column is. Nothing is padded: token quantities are lists of the completion's own
length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.runs.files import write_table
from lagrpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    import pyarrow

SCHEMA_NAME = "lagrpo.rollouts/2"
SCHEMA_KEY = b"lagrpo.schema"


def rollout_schema() -> pyarrow.Schema:
    """The columns, in their order, with the schema's name in the metadata of the file."""
    import pyarrow as pa

    columns: list[tuple[str, Any]] = [
        ("batch", pa.int32()),
        ("stage", pa.int32()),
        ("source", pa.string()),
        ("epoch", pa.int32()),
        ("prompt_key", pa.int64()),
        ("prompt_text", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("gold", pa.string()),
        ("completion", pa.int32()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logp_alpha", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("sampled", pa.list_(pa.bool_())),
        ("pi_k_version", pa.int32()),
        ("lag", pa.int32()),
        ("finished", pa.bool_()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("reason", pa.string()),
        ("advantage", pa.float64()),
        ("masked", pa.string()),
        ("sigma", pa.float64()),
        ("log_ratio", pa.float64()),
        ("kl_alpha", pa.float64()),
    ]
    return pa.schema(columns, metadata={SCHEMA_KEY: SCHEMA_NAME.encode()})


def rollout_rows(
    groups: Sequence[Group],
    columns: Sequence[Sequence[Mapping[str, Any]]],
    *,
    batch: int,
    stage: int,
    pi_k_version: int,
) -> Iterator[dict[str, Any]]:
    """The rows of one batch. `columns` has further columns for each completion of each group: advantage, masked
    (whether its group was left out because its rewards are all equal), sigma, log_ratio, kl_alpha; each may be absent.

    Raises ValueError when groups and columns do not fit together.
    """
    for group, group_columns in zip(groups, columns, strict=True):
        prompt = _prompt_columns(group.prompt)
        for index, (completion, known) in enumerate(zip(group.completions, group_columns, strict=True)):
            yield {
                "batch": batch,
                "stage": stage,
                "source": group.source,
                "epoch": group.epoch,
                **prompt,
                "completion": index,
                **_completion_columns(completion, pi_k_version),
                **{name: known.get(name) for name in ("advantage", "sigma", "log_ratio", "kl_alpha")},
                "masked": _mask_reason(completion, bool(known.get("masked"))),
            }


def write_rollouts(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the rows of `rollout_rows`, whole or not at all."""
    return write_table(path, rows, rollout_schema())


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    texts = [m["content"] if len(prompt.messages) == 1 else f"{m['role']}: {m['content']}" for m in prompt.messages]
    return {
        "prompt_key": prompt.key,
        "prompt_text": "\n".join(texts),
        "prompt_token_ids": list(prompt.token_ids),
        "gold": json.dumps(prompt.gold, ensure_ascii=False),
    }


def _completion_columns(completion: Completion, pi_k_version: int) -> dict[str, Any]:
    if completion.outcome is None:
        raise ValueError("a completion without an outcome cannot be recorded: judge the groups first")
    versions = completion.versions[completion.sampled].tolist()
    return {
        "text": completion.text,
        "token_ids": completion.token_ids.tolist(),
        "logp_alpha": [None if math.isnan(logp) else logp for logp in completion.logp_alpha.tolist()],
        "versions": completion.versions.tolist(),
        "sampled": completion.sampled.tolist(),
        "pi_k_version": pi_k_version,
        "lag": pi_k_version - min(versions) if versions and min(versions) >= 0 else None,
        "finished": completion.finished,
        "outcome": completion.outcome.kind,
        "reward": completion.outcome.reward,
        "reason": completion.outcome.reason,
    }


def _mask_reason(completion: Completion, zero_variance: bool) -> str:
    if completion.outcome is not None and completion.outcome.kind != "scored":
        return completion.outcome.kind
    return "zero_variance" if zero_variance else ""
