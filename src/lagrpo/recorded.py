"""Completions that somebody else drew: a JSONL or Parquet file as groups, for the methods that allow it.

One row per completion. Columns:

    prompt             a question or a list of chat messages, put through the chat template;
                       or prompt_token_ids, used as they are
    completion         its text, tokenised here and ended with the end-of-sequence token where `finished` is true;
                       or token_ids, used as they are
    reward             a finite number; null or absent: the task's judge decides, against `gold`
    logp_alpha         log-probs of token_ids under the policy that drew them, nats (optional; null: unknown)
    finished, gold     optional

The rollouts of a run (schema lagrpo.rollouts/1) are read too: there prompt and completion are called prompt_text and
text, and gold is JSON.
Rows of the same prompt form groups of at most G, in the order of the file. Without `logp_alpha` a completion carries
NaN, and only recipes that never read log α may use it. Its version is -1, of no policy of this run: versions that the
file may name are those of another run, whose policy 3 is not this one's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lagrpo.policy.model import Policy
from lagrpo.tasks import chat, prompt_order
from lagrpo.types import Completion, Group, Outcome, Prompt

UNKNOWN_VERSION = -1
ROUNDING = 1e-3  # nats above 0 at which a log-prob is still taken: some samplers round probabilities up to 1


class RecordedError(ValueError):
    """A file of completions that cannot be used, with the row and what is wrong with it."""


class Recorded:
    """The groups of a file, visited epoch after epoch in an order that is a function of (seed, epoch)."""

    def __init__(self, path: str | Path, policy: Policy, G: int, seed: int, system_prompt: str | None = None) -> None:
        self.path, self.seed = Path(path), seed
        self._groups = _grouped(_completions(self.path, policy, system_prompt), G)
        if not self._groups:
            raise RecordedError(f"{path}: no completions in it")

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def has_logp(self) -> bool:
        """Whether every completion carries the log-probs of the policy that drew it."""
        completions = (c for group in self._groups for c in group.completions)
        return not any(bool(c.logp_alpha.isnan().any()) for c in completions)

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(len(c.token_ids) for group in self._groups for c in group.completions)

    def batch(self, b: int, count: int) -> list[Group]:
        """`count` groups for batch b = 1, 2, …"""
        groups = []
        for place in range((b - 1) * count, b * count):
            epoch, position = divmod(place, len(self._groups))
            group = self._groups[prompt_order(self.seed, epoch, len(self._groups))[position]]
            groups.append(replace(group, epoch=epoch))
        return groups


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a .jsonl or .parquet file. Raises RecordedError where there is no such file or it is neither."""
    if not path.is_file():
        raise RecordedError(f"{path}: no such file of completions")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
    elif path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise RecordedError(f"{path}, line {number}: not valid JSON: {error}") from error
    else:
        raise RecordedError(f"{path}: completions are read from .jsonl or .parquet files")


def _completions(path: Path, policy: Policy, system_prompt: str | None) -> Iterator[tuple[Prompt, Completion]]:
    for number, row in enumerate(read_rows(path), start=1):
        if not isinstance(row, Mapping):
            raise RecordedError(f"{path}, row {number}: it is a {type(row).__name__}, not an object with columns")
        try:
            yield _prompt(row, policy, system_prompt), _completion(row, policy)
        except (ValueError, TypeError, KeyError) as error:
            raise RecordedError(f"{path}, row {number}: {error}") from error


def _prompt(row: Mapping[str, Any], policy: Policy, system_prompt: str | None) -> Prompt:
    question, gold = row.get("prompt"), row.get("gold")
    if "prompt_text" in row:
        question, gold = row["prompt_text"], json.loads(gold or "null")
    if row.get("prompt_token_ids"):
        messages = chat(question if question is not None else "")
        return Prompt(0, messages, gold, tuple(int(i) for i in row["prompt_token_ids"]))
    if not question:
        raise ValueError("it has neither prompt nor prompt_token_ids")
    return policy.tokenize(Prompt(0, chat(question, system_prompt), gold))


def _completion(row: Mapping[str, Any], policy: Policy) -> Completion:
    text = row["text"] if "text" in row else row.get("completion")
    finished = bool(row.get("finished", True))
    ids = row.get("token_ids")
    if ids is None and text is None:
        raise ValueError("it has neither completion nor token_ids")
    if ids is None:
        ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = [*ids, policy.tokenizer.eos_token_id] if finished else ids
    if len(ids) == 0:
        raise ValueError("its completion has no tokens")
    vocabulary = policy.head.weight.shape[0]
    if strange := [i for i in ids if not 0 <= i < vocabulary]:
        raise ValueError(f"token {strange[0]} is outside the model's vocabulary of {vocabulary}")
    logp = row.get("logp_alpha")
    if logp is not None and row.get("token_ids") is None:
        raise ValueError("logp_alpha needs token_ids: the text may be tokenised otherwise than it was drawn")
    return Completion(
        token_ids=torch.tensor(ids, dtype=torch.long),
        logp_alpha=_logp_alpha(logp, len(ids)),
        versions=torch.full((len(ids),), UNKNOWN_VERSION),
        finished=finished,
        text=text if text is not None else policy.tokenizer.decode(ids, skip_special_tokens=True),
        outcome=_outcome(row),
    )


def _logp_alpha(values: Any, count: int) -> torch.Tensor:
    """One log-prob per token, NaN where it is unknown: null in the file. Raises ValueError for what cannot be one."""
    if values is None:
        return torch.full((count,), math.nan)
    if not isinstance(values, list):
        raise ValueError(f"logp_alpha is {values!r}, not a list with a number for each token")
    if len(values) != count:
        raise ValueError(f"logp_alpha has {len(values)} entries for {count} tokens")
    for n, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and (math.isnan(value) or -math.inf < value <= ROUNDING)):
            said = f"{value:g}" if number else repr(value)
            raise ValueError(
                f"logp_alpha[{n}] is {said}: the log-prob of a token that was drawn is a number of at most 0, or null "
                "where nobody knows it"
            )
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64).float()


def _outcome(row: Mapping[str, Any]) -> Outcome | None:
    """The recorded outcome; None where the judge is still to decide."""
    kind, reward = row.get("outcome", "scored"), row.get("reward")
    if kind != "scored":
        return Outcome(kind, reason=str(row.get("reason") or "recorded so"))
    if reward is None:
        return None
    if not math.isfinite(float(reward)):
        raise ValueError(f"its reward is {reward}")
    return Outcome.scored(float(reward))


def _grouped(pairs: Iterator[tuple[Prompt, Completion]], G: int) -> list[Group]:
    together: dict[tuple[int, ...], list[tuple[Prompt, Completion]]] = {}
    for prompt, completion in pairs:
        together.setdefault(prompt.token_ids, []).append((prompt, completion))
    groups = []
    for members in together.values():
        for first in range(0, len(members), G):
            chosen = members[first : first + G]
            prompt = Prompt(len(groups), chosen[0][0].messages, chosen[0][0].gold, chosen[0][0].token_ids)
            groups.append(Group(prompt, tuple(completion for _, completion in chosen), source="file"))
    return groups
