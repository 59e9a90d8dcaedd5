"""Rollouts as Parquet: one row per completion, without padding.

docs/run-files.md has the columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lagrpo.types import Completion, ExcludedReason, Group, JsonObject, JsonView, OutcomeKind

if TYPE_CHECKING:
    import torch

SCHEMA_NAME = "lagrpo.rollouts/4"
SCHEMA_KEY = b"lagrpo.schema"
COLUMNS = """
    step:int32  source:string  epoch:int32
    prompt_id:int64  prompt_text:string  prompt_token_ids:int32[]  answer:string
    sample_index:int32  completion:string  messages:string[]
    token_ids:int32[]  rollout_logprobs:float[]  policy_versions:int32[]  loss_mask:bool[]
    policy_version:int32  staleness:int32  finished:bool
    outcome:string  reward:double  reason:string
    advantage:double  excluded_reason:string  group_std:double
    old_logprobs:float[]  entropy:float[]
"""
REFERENCE_COLUMNS = {"ref_logprobs": "float[]", "ref_prompt_token_ids": "int32[]"}
"""Columns of runs whose loss reads log π_ref; the prompt if the reference sees another one."""
REWARD = "reward_"
"""The beginning of the columns of several rewards."""


def rollout_schema(rewards: Sequence[str] = (), reference: Sequence[str] = ()) -> Any:
    """Returns the Arrow schema.

    Several `rewards` have a column each, and `correct` says what they decide. `reference` names
    the REFERENCE_COLUMNS that the run has.
    """
    import pyarrow as pa

    entries = COLUMNS.split()
    entries += [f"{name}:{REFERENCE_COLUMNS[name]}" for name in reference]
    entries += [f"{REWARD}{name}:double" for name in rewards]
    if rewards:
        entries.append("correct:bool")
    columns: list[tuple[str, Any]] = []
    for entry in entries:
        name, _, kind = entry.partition(":")
        value_type = pa.type_for_alias(kind.removesuffix("[]"))
        columns.append((name, pa.list_(value_type) if kind.endswith("[]") else value_type))
    return pa.schema(columns, metadata={SCHEMA_KEY: SCHEMA_NAME.encode()})


def reward_columns(row: JsonView) -> JsonObject:
    """Returns the rewards of a row by their names; none if the task has a single one."""
    rewards = {}
    for column, value in row.items():
        if column.startswith(REWARD):
            rewards[column.removeprefix(REWARD)] = value
    return rewards


def rollout_rows(
    groups: Sequence[Group],
    columns: Sequence[Sequence[JsonView]],
    *,
    step: int,
    policy_version: int,
    rewards: Sequence[str] = (),
) -> Iterator[JsonObject]:
    """Yields the rows of one batch.

    `columns` has more columns for each completion of each group (`completion_columns`), of which
    any may be absent. `rewards` are the names of several rewards.
    """
    for group, columns_of_group in zip(groups, columns, strict=True):
        prompt = _prompt_columns(group, step)
        members = zip(group.completions, columns_of_group, strict=True)
        for index, (completion, more) in enumerate(members):
            row: JsonObject = prompt | {"sample_index": index}
            row |= _completion_columns(completion, policy_version, rewards)
            row["advantage"] = more.get("advantage")
            row["group_std"] = more.get("group_std")
            for name in ("old_logprobs", "entropy", "ref_logprobs"):
                if name in more or name not in REFERENCE_COLUMNS:
                    row[name] = _spread(more.get(name), row["loss_mask"])
            if group.prompt.reference_token_ids:
                row["ref_prompt_token_ids"] = list(group.prompt.reference_token_ids)
            reason = row["outcome"]
            if reason == OutcomeKind.SCORED:
                reason = more.get("excluded_reason", ExcludedReason.NOT_EXCLUDED.value)
            row["excluded_reason"] = reason
            yield row


def _prompt_columns(group: Group, step: int) -> JsonObject:
    """Returns the columns that the completions of a group share."""
    messages = group.prompt.messages
    texts = []
    for message in messages:
        content = message.get("content") or ""
        texts.append(content if len(messages) == 1 else f"{message['role']}: {content}")
    return {
        "step": step,
        "source": group.source,
        "epoch": group.epoch,
        "prompt_id": group.prompt.key,
        "prompt_text": "\n".join(texts),
        "prompt_token_ids": list(group.prompt.token_ids),
        "answer": json.dumps(group.prompt.answer, ensure_ascii=False),
    }


def _spread(values: torch.Tensor | None, loss_mask: Sequence[bool]) -> list[float | None] | None:
    """Returns values of the sampled tokens as a column of all tokens; the others have None.

    None stays None.
    """
    if values is None:
        return None
    remaining = iter(values.tolist())
    return [next(remaining) if is_sampled else None for is_sampled in loss_mask]


def _completion_columns(
    completion: Completion, policy_version: int, rewards: Sequence[str]
) -> JsonObject:
    # In a checkpoint, completions that are not scored yet have no outcome.
    outcome = completion.outcome
    versions = completion.versions[completion.sampled].tolist()
    # The version is -1 for tokens of offline data; a failed completion may have no token.
    is_version_known = bool(versions) and min(versions) >= 0
    columns = {
        "completion": completion.text,
        "messages": list(completion.turns),
        "token_ids": completion.token_ids.tolist(),
        "rollout_logprobs": [
            None if math.isnan(logp) else logp for logp in completion.rollout_logp.tolist()
        ],
        "policy_versions": completion.versions.tolist(),
        "loss_mask": completion.sampled.tolist(),
        "policy_version": policy_version,
        # The oldest token decides: vLLM may sync weights in the middle of a completion.
        "staleness": policy_version - min(versions) if is_version_known else None,
        "finished": completion.finished,
        "outcome": outcome.kind.value if outcome else None,
        "reward": completion.reward,
        "reason": outcome.reason if outcome else None,
    }
    if outcome and rewards:
        for name in rewards:
            columns[f"{REWARD}{name}"] = outcome.parts.get(name)
        columns["correct"] = outcome.correct
    return columns
