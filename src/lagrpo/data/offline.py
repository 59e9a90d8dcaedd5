"""Pre-generated (offline) completions: JSONL or Parquet files as groups, for recipes that allow them.

docs/off-policy.md says what the columns mean. A completion without log-probs carries NaN: for recipes that
read log α it is left out if others have them. Its version is -1, of no policy of this run.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch

from lagrpo.errors import one_line_errors
from lagrpo.model.chat import Replies
from lagrpo.model.model import Policy
from lagrpo.runs.reading import completion_files
from lagrpo.tasks import Messages, build_messages, is_padded, order_prompts, plain_message
from lagrpo.tasks.data import Row, format_of, parse_messages, plain, read_rows
from lagrpo.types import Completion, Group, Outcome, Prompt

UNKNOWN_VERSION = -1
ROUNDING = 1e-3  # nats above 0 at which a log-prob is still taken: some samplers round probabilities up to 1


def read_records(data: str | Path | Sequence[str | Path]) -> list[Row]:
    """The rows of the files that `data` names. Raises FileNotFoundError, and ValueError with file and line."""
    rows = list[Row]()
    for file in completion_files([data] if isinstance(data, str | Path) else data):
        if format_of(file) not in (".jsonl", ".json", ".parquet"):
            raise ValueError(f"{file}: files of completions end in .jsonl or .parquet")
        rows += read_rows(file)
    if data and not rows:
        raise ValueError("the files have no completions")
    return rows


class OfflineData:
    """The groups of files, visited epoch after epoch in an order that is a function of (seed, epoch). `reads_logp`: the
    recipe reads log α. `left_out` counts rows that are not in the groups, by reason. Raises ValueError, with file and
    line, for a row that cannot be used, and if no completions are left."""

    def __init__(
        self,
        records: Sequence[Row],
        policy: Policy,
        G: int,
        seed: int,
        *,
        system_prompt: str | None = None,
        max_prompt_tokens: int = 10**9,
        max_completion_tokens: int = 10**9,
        reads_logp: bool = False,
    ) -> None:
        self.seed, self.left_out, self.files = (
            seed,
            Counter[str](),
            len({row.path for row in records}),
        )
        replies, warned = Replies(policy.chat), False
        rows = list[
            tuple[Any, Prompt, Completion]
        ]()  # the first is the same for rows that were sampled together
        for record in records:
            with one_line_errors(record.place):
                prompt = _read_prompt(record, replies, system_prompt)
                if (count := len(prompt.token_ids)) > max_prompt_tokens:
                    raise ValueError(
                        f"its prompt has {count} tokens; rollout.max_prompt_length is {max_prompt_tokens}"
                    )
                if record.get("outcome") == "failed":
                    self.left_out["failed"] += 1
                    continue
                completion = _read_completion(record, replies)
                if (count := completion.length) > (most := max_completion_tokens):
                    raise ValueError(
                        f"its completion has {count} tokens; rollout.max_completion_length is {most}"
                    )
            if record.get("prompt_token_ids") is None:
                warned = warned or policy.chat.warn_if_rendered(prompt, record.place)
            batch = (record.path, record.get("epoch")) if "prompt_text" in record else ()
            rows.append(((batch, prompt.token_ids, json.dumps(prompt.answer)), prompt, completion))
        known = [row for row in rows if row[2].has_logp]
        if reads_logp and 0 < len(known) < len(rows):
            self.left_out["without log-probs"], rows = len(rows) - len(known), known
        together = defaultdict[Any, list[tuple[Prompt, Completion]]](list)
        for place, prompt, completion in rows:
            together[place].append((prompt, completion))
        chosen = [
            members[first : first + G]
            for members in together.values()
            for first in range(0, len(members), G)
        ]
        self._groups = [
            Group(
                replace(some[0][0], key=key),
                tuple(completion for _, completion in some),
                source="file",
            )
            for key, some in enumerate(chosen)
        ]
        self._completions = [completion for _, _, completion in rows]
        if not self._groups:
            raise ValueError(f"the files have {self}")

    def __len__(self) -> int:
        return len(self._groups)

    def __str__(self) -> str:
        numbers = {
            "completion": len(self._completions),
            "group": len(self._groups),
            "file": self.files,
        }
        completions, groups, files = (
            f"{n:,} {what}{'s' * (n != 1)}" for what, n in numbers.items()
        )
        left_out = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{completions} of {groups} in {files}" + (
            f"; left out: {left_out}" if left_out else ""
        )

    @property
    def has_logp(self) -> bool:
        """Whether every completion carries the log-probs of the policy that sampled it."""
        return all(completion.has_logp for completion in self._completions)

    def batch(self, b: int, count: int) -> list[Group]:
        """`count` groups for batch b = 1, 2, …"""
        N = len(self._groups)
        places = (divmod(place, N) for place in range((b - 1) * count, b * count))
        return [
            replace(self._groups[order_prompts(self.seed, epoch, N)[n]], epoch=epoch)
            for epoch, n in places
        ]


def _read_prompt(row: Row, replies: Replies, system_prompt: str | None) -> Prompt:
    """The prompt with its token ids."""
    question, answer = parse_messages(row.get("prompt")), plain(row.get("answer"))
    if "prompt_text" in row:
        question = row["prompt_text"]
        with one_line_errors(f"its answer {answer!r:.40} is not JSON"):
            answer = json.loads(answer or "null")
    if ids := read_list(row, "prompt_token_ids", (int,)):
        replies.chat.check_vocabulary(ids)
        return Prompt(
            0, build_messages(question or [{"role": "user", "content": ""}]), answer, tuple(ids)
        )
    if not question:
        raise ValueError(
            f"it has neither prompt nor prompt_token_ids; the columns are {', '.join(row)}"
        )
    return replies.chat.tokenize(
        Prompt(0, build_messages(question, system_prompt, is_padded(row)), answer)
    )


def _read_completion(row: Row, replies: Replies) -> Completion:
    """The completion, with NaN for log-probs that are unknown."""
    said = parse_messages(row.get("completion"))
    finished = row.get("finished", True)
    if isinstance(said, str) and row.get("token_ids") is None:
        said = replies.chat.without_end(said)
    ids, sampled, turns = _tokenize(row, said, finished is not False, replies)
    if not ids:
        raise ValueError("its completion has no tokens")
    replies.chat.check_vocabulary(ids)
    return Completion(
        token_ids=torch.tensor(ids, dtype=torch.long),
        logp_alpha=read_logp(row, len(ids)),
        versions=torch.full((len(ids),), UNKNOWN_VERSION),
        finished=finished is not False,
        text=said if isinstance(said, str) else replies.chat.decode(ids),
        outcome=read_outcome(row),
        sampled=torch.tensor(sampled or [True] * len(ids)),
        turns=tuple(turns),
    )


def _tokenize(
    row: Row, said: Any, finished: bool, replies: Replies
) -> tuple[Any, Any, Sequence[str]]:
    """The token ids of a completion; which were sampled (None: all); and the text of each of several turns."""
    if (ids := read_list(row, "token_ids", (int,))) is not None:
        sampled = read_list(row, "loss_mask", (bool,), len(ids))
        if sampled is not None and not any(sampled):
            raise ValueError(
                "loss_mask leaves out all of its tokens: there is nothing to learn from"
            )
        return ids, sampled, read_list(row, "messages", (str,)) or []
    if column := next(
        (name for name in ("rollout_logprobs", "loss_mask") if row.get(name) is not None), None
    ):
        raise ValueError(
            f"{column} needs token_ids: tokenizing the text may give other tokens than were sampled"
        )
    if isinstance(said, list):
        return tokenize_turns(said, replies, finished)
    if not isinstance(said, str):
        raise ValueError(f"its completion is {said!r:.80}, not a text, messages, or token_ids")
    ids = replies.chat.encode(said, add_special_tokens=False)
    if finished:
        ids.append(replies.end_id)
    return ids, None, []


def read_list(
    row: Mapping[str, Any], column: str, kinds: tuple[type, ...], count: int | None = None
) -> Any:
    """The list in a column; None without one. Raises ValueError for values of other types, and another length."""
    values = row.get(column)
    if values is None:
        return None
    if not isinstance(values, list) or not {*map(type, values)} <= {*kinds}:
        raise ValueError(f"{column} is {values!r:.80}, not a list of {kinds[0].__name__}")
    if count not in (None, len(values)):
        raise ValueError(f"{column} has {len(values)} entries for {count} tokens")
    return values


def read_logp(row: Mapping[str, Any], count: int) -> torch.Tensor:
    """One log-prob per token, NaN if it is unknown: null in the file."""
    values = read_list(row, "rollout_logprobs", (float, int, type(None)), count) or [None] * count
    logp = torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float64
    ).float()
    if len(wrong := (logp.isinf() | (logp > ROUNDING)).nonzero()):
        n = int(wrong[0])
        raise ValueError(
            f"rollout_logprobs[{n}] is {values[n]:g}: a log-prob is at most 0, or null if it is unknown"
        )
    return logp


def read_outcome(row: Mapping[str, Any]) -> Outcome | None:
    """The recorded outcome; None if the task's reward function is still to decide."""
    reward = row.get("reward")
    if row.get("outcome") == "unscored":
        return Outcome.unscored(str(row.get("reason") or "recorded so"))
    if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
        raise ValueError(f"its reward is {reward!r:.80}, not a finite number")
    return None if reward is None else Outcome.scored(float(reward))


def tokenize_turns(
    messages: Messages, replies: Replies, finished: bool
) -> tuple[list[int], list[bool], list[str]]:
    """Token ids of a completion of several turns, with what the chat template adds between them; which are the
    assistant's, each turn with the token that ends it (the last only if it is `finished`); and the turns' texts."""
    messages = [
        plain_message(message) if isinstance(message, Mapping) else {} for message in messages
    ]
    whole = all(isinstance(message.get("content"), str) for message in messages)
    own = [message.get("role") == "assistant" for message in messages] if whole else []
    if not own or not own[0] or not own[-1] or any(a and b for a, b in pairwise(own)):
        form = "messages that begin and end with the assistant, without two assistant messages in a row"
        raise ValueError(f"its completion is {messages!r:.80}, not a text, or {form}")
    ids, sampled, texts = list[int](), list[bool](), list[str]()
    for is_own, turn in groupby(messages, lambda message: message["role"] == "assistant"):
        given = list(turn)
        text = "\n".join(message["content"] for message in given)
        texts.append(replies.chat.without_end(text) if is_own else text)
        own_ids = replies.chat.encode(texts[-1], add_special_tokens=False) if is_own else []
        added = [*own_ids, replies.end_id] if is_own else replies.tokens(given)
        ids += added
        sampled += [is_own] * len(added)
    end = len(ids) if finished else -1
    return ids[:end], sampled[:end], texts
