"""Rollouts as Parquet: one row per completion, without padding. docs/run-files.md says what each column is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lagrpo.types import Completion, Group

SCHEMA_NAME = "lagrpo.rollouts/4"
SCHEMA_KEY = b"lagrpo.schema"
COLUMNS = """
    step:int32  source:string  epoch:int32
    prompt_id:int64  prompt_text:string  prompt_token_ids:int32[]  answer:string
    sample_index:int32  completion:string  messages:string[]
    token_ids:int32[]  rollout_logprobs:float[]  policy_versions:int32[]  loss_mask:bool[]
    policy_version:int32  staleness:int32  finished:bool  outcome:string  reward:double  reason:string
    advantage:double  excluded_reason:string  group_std:double  old_logprobs:float[]  entropy:float[]
"""
REWARD = "reward_"  # how the columns of several rewards begin


def rollout_schema(rewards: Sequence[str] = ()) -> Any:
    """The Arrow schema. Several `rewards` have a column each, and `correct` says what they decide."""
    import pyarrow as pa

    columns: list[tuple[str, Any]] = []
    several = [
        *(f"{REWARD}{name}:double" for name in rewards),
        *(["correct:bool"] if rewards else []),
    ]
    for name, _, kind in (column.partition(":") for column in [*COLUMNS.split(), *several]):
        value = pa.type_for_alias(kind.removesuffix("[]"))
        columns.append((name, pa.list_(value) if kind.endswith("[]") else value))
    return pa.schema(columns, metadata={SCHEMA_KEY: SCHEMA_NAME.encode()})


def reward_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The rewards of a row by their names; none if the task has a single one."""
    return {
        name.removeprefix(REWARD): value for name, value in row.items() if name.startswith(REWARD)
    }


def rollout_rows(
    groups: Sequence[Group],
    columns: Sequence[Sequence[Mapping[str, Any]]],
    *,
    step: int,
    policy_version: int,
    rewards: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """The rows of one batch. `columns` has more columns for each completion of each group (`completion_columns`), of
    which any may be absent; `rewards` are the names of several rewards."""
    for group, of_group in zip(groups, columns, strict=True):
        turns = [(m["role"], m.get("content") or "") for m in group.prompt.messages]
        texts = [content if len(turns) == 1 else f"{role}: {content}" for role, content in turns]
        place: dict[str, Any] = {"step": step, "source": group.source, "epoch": group.epoch}
        place |= {"prompt_id": group.prompt.key, "prompt_text": "\n".join(texts)}
        place |= {"prompt_token_ids": list(group.prompt.token_ids)}
        place |= {"answer": json.dumps(group.prompt.answer, ensure_ascii=False)}
        for index, (completion, known) in enumerate(zip(group.completions, of_group, strict=True)):
            row: dict[str, Any] = place | {"sample_index": index}
            row |= _completion_columns(completion, policy_version, rewards)
            row |= {name: known.get(name) for name in ("advantage", "group_std")}
            for name in ("old_logprobs", "entropy"):  # of sampled tokens; None for the others
                values = None if known.get(name) is None else iter(known[name].tolist())
                row[name] = values and [next(values) if own else None for own in row["loss_mask"]]
            reason = (
                known.get("excluded_reason", "") if row["outcome"] == "scored" else row["outcome"]
            )
            yield row | {"excluded_reason": reason}


def _completion_columns(
    completion: Completion, policy_version: int, rewards: Sequence[str]
) -> dict[str, Any]:
    outcome = completion.outcome  # None in a checkpoint: the completion was not scored yet
    versions = completion.versions[completion.sampled].tolist()
    return {
        "completion": completion.text,
        "messages": list(completion.turns),
        "token_ids": completion.token_ids.tolist(),
        "rollout_logprobs": [
            None if math.isnan(logp) else logp for logp in completion.logp_alpha.tolist()
        ],
        "policy_versions": completion.versions.tolist(),
        "loss_mask": completion.sampled.tolist(),
        "policy_version": policy_version,
        "staleness": policy_version - min(versions) if versions and min(versions) >= 0 else None,
        "finished": completion.finished,
        "outcome": outcome.kind if outcome else None,
        "reward": completion.reward,
        "reason": outcome.reason if outcome else None,
        **{f"{REWARD}{name}": outcome.parts.get(name) for name in rewards if outcome},
        **({"correct": outcome.correct} if rewards and outcome else {}),
    }
