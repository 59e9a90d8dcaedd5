"""Rollouts as Parquet: one row per completion. docs/metrics.md says what each column is. Nothing is padded: token
quantities are lists of the completion's own length."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lagrpo.types import Completion, Group, Prompt

if TYPE_CHECKING:
    import pyarrow
    import torch

SCHEMA_NAME = "lagrpo.rollouts/3"
SCHEMA_KEY = b"lagrpo.schema"
COLUMNS = """
    batch:int32  stage:int32  source:string  epoch:int32
    prompt_key:int64  prompt_text:string  prompt_token_ids:int32[]  gold:string
    completion:int32  text:string  turns:string[]
    token_ids:int32[]  logp_alpha:float[]  versions:int32[]  sampled:bool[]
    pi_k_version:int32  lag:int32  finished:bool  outcome:string  reward:double  reason:string
    advantage:double  masked:string  sigma:double  log_ratio:double  kl_alpha:double  logp_k:float[]  entropy:float[]
"""
REWARD = "reward_"  # how the columns of the rewards of a task with several of them begin


def rollout_schema(rewards: Sequence[str] = ()) -> pyarrow.Schema:
    """The columns, in their order, with the schema's name in the metadata of the file. Several `rewards` have a column
    each, and one says what is right."""
    further = [*(f"{REWARD}{name}:double" for name in rewards), *(["right:bool"] if rewards else [])]
    return table_schema(" ".join([COLUMNS, *further]), {SCHEMA_KEY: SCHEMA_NAME.encode()})


def reward_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The rewards of a row by their names; none if the task has a single one."""
    return {name.removeprefix(REWARD): value for name, value in row.items() if name.startswith(REWARD)}


def table_schema(described: str, metadata: Mapping[bytes, bytes] | None = None) -> pyarrow.Schema:
    """The schema of columns that are written as `name:type`, or `name:type[]` for lists, with spaces between."""
    import pyarrow as pa

    columns: list[tuple[str, Any]] = []
    for name, _, kind in (column.partition(":") for column in described.split()):
        value = pa.type_for_alias(kind.removesuffix("[]"))
        columns.append((name, pa.list_(value) if kind.endswith("[]") else value))
    return pa.schema(columns, metadata=metadata)


def rollout_rows(
    groups: Sequence[Group],
    columns: Sequence[Sequence[Mapping[str, Any]]],
    *,
    batch: int,
    stage: int,
    pi_k_version: int,
    rewards: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """The rows of one batch. `columns` has further columns for each completion of each group: advantage, masked
    (whether its group was left out because its rewards are all equal), sigma, log_ratio, kl_alpha, and for its sampled
    tokens logp_k and entropy; each may be absent. `rewards` are the names of several rewards. Raises ValueError if
    groups and columns do not fit together."""
    for group, group_columns in zip(groups, columns, strict=True):
        place = {"batch": batch, "stage": stage, "source": group.source, "epoch": group.epoch}
        prompt = _prompt_columns(group.prompt)
        for index, (completion, known) in enumerate(zip(group.completions, group_columns, strict=True)):
            row = place | prompt | {"completion": index} | _completion_columns(completion, pi_k_version, rewards)
            row |= {name: known.get(name) for name in ("advantage", "sigma", "log_ratio", "kl_alpha")}
            row |= {name: _for_all_tokens(completion, known.get(name)) for name in ("logp_k", "entropy")}
            mask = "zero_variance" if known.get("masked") else ""
            yield row | {"masked": mask if row["outcome"] == "scored" else row["outcome"]}


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    turns = [(m["role"], m.get("content") or "") for m in prompt.messages]
    texts = [content if len(turns) == 1 else f"{role}: {content}" for role, content in turns]
    return {
        "prompt_key": prompt.key,
        "prompt_text": "\n".join(texts),
        "prompt_token_ids": list(prompt.token_ids),
        "gold": json.dumps(prompt.gold, ensure_ascii=False),
    }


def _completion_columns(completion: Completion, pi_k_version: int, rewards: Sequence[str]) -> dict[str, Any]:
    outcome = completion.outcome  # None in a checkpoint: the completion was not scored yet
    versions = completion.versions[completion.sampled].tolist()
    return {
        "text": completion.text,
        "turns": list(completion.turns),
        "token_ids": completion.token_ids.tolist(),
        "logp_alpha": [None if math.isnan(logp) else logp for logp in completion.logp_alpha.tolist()],
        "versions": completion.versions.tolist(),
        "sampled": completion.sampled.tolist(),
        "pi_k_version": pi_k_version,
        "lag": pi_k_version - min(versions) if versions and min(versions) >= 0 else None,
        "finished": completion.finished,
        "outcome": outcome.kind if outcome else None,
        "reward": completion.reward,
        "reason": outcome.reason if outcome else None,
        **{f"{REWARD}{name}": outcome.parts.get(name) for name in rewards if outcome},
        **({"right": outcome.right} if rewards and outcome else {}),
    }


def _for_all_tokens(completion: Completion, of_sampled_T: torch.Tensor | None) -> list[float | None] | None:
    """A value for each token of a completion: None for tokens that no policy sampled."""
    if of_sampled_T is None:
        return None
    values = iter(of_sampled_T.tolist())
    return [next(values) if sampled else None for sampled in completion.sampled.tolist()]
