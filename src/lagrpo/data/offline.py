"""Pre-generated (offline) completions: JSONL or Parquet files as groups, for the methods that allow them.

One row per completion. Columns:

    prompt             a question or a list of chat messages, put through the chat template;
                       or prompt_token_ids, used as they are
    completion         its text, tokenized here and ended with the end-of-sequence token where `finished` is true;
                       or a list of chat messages, of which the assistant's count as sampled (turns.py);
                       or token_ids, used as they are
    reward             a finite number; null or absent: the task's judge decides, against `answer`
    rollout_logprobs   log-probs of token_ids under the policy that generated them, nats (optional; null: unknown)
    loss_mask          for each of token_ids whether a policy sampled it; the others are context (optional; all were)
    finished, answer   optional

The rollouts of a run (schema lagrpo.rollouts/4) are read too: there the prompt is called prompt_text, and answer is
JSON. Of these a file is a batch, and its groups stay groups; completions that failed are left out. Elsewhere rows of
the same prompt form groups of at most G, in the order of the files. A completion without log-probs (no
`rollout_logprobs`, or null for a sampled token) carries NaN, and only recipes that never read log α may use it; for the
others it is left out where some have them. `left_out` counts.
Its version is -1, of no policy of this run: versions that the file names belong to another run, whose policy 3 is not
this run's.

`read_records` refuses what can be refused without a model: syntax, columns, types. `OfflineData` makes tokens of the
rest, and refuses what the model does not have.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from lagrpo.data.turns import Messages, read_turns, texts_of, tokenize_turns
from lagrpo.model.chat import Replies
from lagrpo.model.model import Policy
from lagrpo.runs.reading import completion_files
from lagrpo.tasks import build_messages, order_prompts
from lagrpo.tasks.tables import Table, format_of, read_table
from lagrpo.types import Completion, Group, Kind, Outcome, Prompt

UNKNOWN_VERSION = -1
LOWEST = torch.finfo(torch.float32).min
ROUNDING = 1e-3  # nats above 0 at which a log-prob is still taken: some samplers round probabilities up to 1


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file, as far as no model is needed to read it. `prompt` has token ids where the row has;
    `token_ids` is None for a text that is to be tokenized, and rows of one `batch` were drawn together."""

    place: str
    prompt: Prompt
    failed: bool
    text: str | None
    token_ids: list[int] | None
    logp_alpha: torch.Tensor | None
    sampled: torch.Tensor | None
    finished: bool
    outcome: Outcome | None
    batch: tuple[Any, ...]
    turns: Messages = ()
    """messages in place of a text"""
    said: tuple[str, ...] = ()
    """what a run recorded turn by turn, beside the tokens"""


@dataclass(frozen=True, slots=True)
class Records:
    """The records of `files`, which were named by `names`."""

    names: Sequence[str | Path]
    files: Sequence[Path]
    records: Sequence[Record]


def read_records(data: str | Path | Sequence[str | Path], system_prompt: str | None = None) -> Records:
    """The records of the files that `data` names (see `runs.reading.completion_files`). Raises FileNotFoundError for a
    file that is missing, OSError for one that cannot be read; ValueError, with file and line, for one that is
    malformed."""
    names = [data] if isinstance(data, str | Path) else data
    files = completion_files(names)
    return Records(names, files, [record for file in files for record in _read(file, system_prompt)])


class OfflineData:
    """The groups of files, visited epoch after epoch in an order that is a function of (seed, epoch). `found` are the
    files' records; `reads_logp`: the recipe reads log α. `left_out` is how many rows are not in the groups, by reason.
    Raises ValueError, with file and line, for a record that the model has no tokens for or that has a prompt of more
    than `max_prompt_tokens`, and where no completions are left."""

    def __init__(
        self,
        found: Records,
        policy: Policy,
        G: int,
        seed: int,
        *,
        max_prompt_tokens: int | None = None,
        reads_logp: bool = False,
    ) -> None:
        self.seed, self.left_out, self.files = seed, Counter[str](), found.files
        replies = Replies(policy.chat)
        rows = [_tokenized(record, policy, replies, max_prompt_tokens) for record in found.records]
        rows = self._only(rows, "failed", lambda row: row.completion is not None)
        if reads_logp and any(_knows_alpha(row.completion) for row in rows):
            rows = self._only(rows, "without log-probs", lambda row: _knows_alpha(row.completion))
        self._groups = _grouped(rows, G)
        if not self._groups:
            raise ValueError(f"{', '.join(map(str, found.names))}: no completions in it{self._left_out(' ({})')}")

    def _only(self, rows: list[_Row], reason: str, fits: Callable[[_Row], bool]) -> list[_Row]:
        kept = [row for row in rows if fits(row)]
        self.left_out += Counter({reason: len(rows) - len(kept)})  # without zeros
        return kept

    def _left_out(self, form: str) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return form.format(f"left out: {counts}") if counts else ""

    def __len__(self) -> int:
        return len(self._groups)

    def __str__(self) -> str:
        numbers = {"completion": len(self._completions), "group": len(self._groups), "file": len(self.files)}
        completions, groups, files = (f"{n:,} {what}{'s' * (n != 1)}" for what, n in numbers.items())
        return f"{completions} of {groups} in {files}{self._left_out('; {}')}"

    @property
    def _completions(self) -> list[Completion]:
        return [completion for group in self._groups for completion in group.completions]

    @property
    def has_logp(self) -> bool:
        """Whether every completion carries the log-probs of the policy that sampled it."""
        return all(map(_knows_alpha, self._completions))

    @property
    def longest(self) -> int:
        """Sampled tokens of the longest completion."""
        return max(completion.length for completion in self._completions)

    def batch(self, b: int, count: int) -> list[Group]:
        """`count` groups for batch b = 1, 2, …"""
        N = len(self._groups)
        places = (divmod(place, N) for place in range((b - 1) * count, b * count))
        return [replace(self._groups[order_prompts(self.seed, epoch, N)[n]], epoch=epoch) for epoch, n in places]


class _Row(NamedTuple):
    """A row of a file; `completion` None for one that failed. Rows of one `group` stand for draws of one batch."""

    prompt: Prompt
    completion: Completion | None
    group: tuple[Any, ...]


def _knows_alpha(completion: Completion | None) -> bool:
    """Whether all its log-probs are known."""
    return completion is not None and not bool((completion.logp_alpha.isnan() & completion.sampled).any())


def _read(path: Path, system_prompt: str | None) -> list[Record]:
    if format_of(path) not in (".jsonl", ".json", ".parquet"):
        raise ValueError(f"{path}: completions are read from .jsonl or .parquet files")
    table = read_table(path)
    return [_record(table, index, row, system_prompt) for index, row in enumerate(table.rows)]


def _record(table: Table, index: int, row: Mapping[str, Any], system_prompt: str | None) -> Record:
    place = table.place(index)
    try:
        prompt, failed = _prompt(row, system_prompt), row.get("outcome") == "failed"
        turns = read_turns(said) if not failed and isinstance(said := row.get("completion"), list) else ()
        text, ids = (None, None) if failed or turns else (_text(row), _completion_ids(row))
        if not turns and not failed and text is None and ids is None:
            raise ValueError("it has neither completion nor token_ids")
        logp_alpha = _logp_alpha(row.get("rollout_logprobs"), len(ids)) if ids else None
        sampled = _sampled(row.get("loss_mask"), len(ids)) if ids else None
        ends, batch = (_finished(row), _outcome(row)), _batch(table.path, row)
        recorded = _recorded_turns(row.get("messages")) if ids else ()
        return Record(place, prompt, failed, text, ids, logp_alpha, sampled, *ends, batch, turns, recorded)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error


def _prompt(row: Mapping[str, Any], system_prompt: str | None) -> Prompt:
    """The prompt of a row, without token ids where the chat template is to make them."""
    question, answer = row.get("prompt"), row.get("answer")
    if "prompt_text" in row:
        question, answer = row["prompt_text"], json.loads(answer or "null")
    _check_answer(answer)
    if ids := row.get("prompt_token_ids"):
        messages = build_messages(question if question is not None else "")
        return Prompt(0, messages, answer, tuple(_token_ids("prompt_token_ids", ids)))
    if not question:
        raise ValueError("it has neither prompt nor prompt_token_ids")
    return Prompt(0, build_messages(question, system_prompt), answer)


def _check_answer(answer: Any) -> None:
    try:
        json.dumps(answer)
    except TypeError as error:
        raise ValueError(f"its answer cannot be written as JSON: {error}") from error


def _batch(path: Path | str, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells apart the rows of a run that ask the same prompt: of these a file is a batch."""
    epoch = row.get("epoch")
    if epoch is not None and not isinstance(epoch, int):
        raise ValueError(f"its epoch is {epoch!r:.80}, not a whole number")
    return (path, epoch) if "prompt_text" in row else ()


def _text(row: Mapping[str, Any]) -> str | None:
    text = row.get("completion")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"its completion is {text!r:.80}, not a text")
    return text


def _completion_ids(row: Mapping[str, Any]) -> list[int] | None:
    """The token ids of a row that has some. Raises ValueError where other columns need them."""
    if (ids := row.get("token_ids")) is not None:
        if not _token_ids("token_ids", ids):
            raise ValueError("its completion has no tokens")
        return ids
    for column in ("rollout_logprobs", "loss_mask"):
        if row.get(column) is not None:
            raise ValueError(f"{column} needs token_ids: the text may be tokenized otherwise than it was sampled")
    return None


def _token_ids(column: str, ids: Any) -> list[int]:
    """The ids as they are. Raises ValueError for what is no list of token ids."""
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"{column} is {ids!r:.80}, not a list of whole numbers")
    return ids


def _tokenized(record: Record, policy: Policy, replies: Replies, max_prompt_tokens: int | None) -> _Row:
    try:
        if record.prompt.token_ids:
            prompt = record.prompt
            _check_vocabulary("prompt_token_ids", prompt.token_ids, policy)
        else:
            prompt = policy.chat.tokenize(record.prompt)
        if max_prompt_tokens is not None and (count := len(prompt.token_ids)) > max_prompt_tokens:
            limit = f"rollout.max_prompt_length is {max_prompt_tokens}"
            raise ValueError(f"its prompt has {count} tokens; {limit}")
        completion = None if record.failed else _completion(record, policy, replies)
        return _Row(prompt, completion, (*record.batch, prompt.token_ids))
    except ValueError as error:
        raise ValueError(f"{record.place}: {error}") from error


def _completion(record: Record, policy: Policy, replies: Replies) -> Completion:
    text, ids, sampled = record.text, record.token_ids, record.sampled
    if record.turns:
        ids, sampled = tokenize_turns(record.turns, replies, record.finished)
    if ids is None:
        ends = [policy.chat.tokenizer.eos_token_id] * record.finished
        ids = [*policy.chat.encode(text or "", add_special_tokens=False), *ends]
        if not ids:
            raise ValueError("its completion has no tokens")
    _check_vocabulary("token_ids", ids, policy)
    return Completion(
        token_ids=torch.tensor(ids, dtype=torch.long),
        logp_alpha=record.logp_alpha if record.logp_alpha is not None else torch.full((len(ids),), math.nan),
        versions=torch.full((len(ids),), UNKNOWN_VERSION),
        finished=record.finished,
        text=text if text is not None else policy.chat.decode(ids),
        outcome=record.outcome,
        sampled=sampled if sampled is not None else torch.ones(len(ids), dtype=torch.bool),
        turns=tuple(texts_of(record.turns)) or record.said,
    )


def _check_vocabulary(column: str, ids: Sequence[int], policy: Policy) -> None:
    vocabulary = policy.chat.vocabulary
    if strange := [i for i in ids if not 0 <= i < vocabulary]:
        raise ValueError(f"token {strange[0]!s:.40} of {column} is outside the model's vocabulary of {vocabulary}")


def _finished(row: Mapping[str, Any]) -> bool:
    """Whether the completion ended by itself; true where the row does not say."""
    finished = row.get("finished")
    if finished not in (True, False, None):
        raise ValueError(f"finished is {finished!r:.80}, neither true nor false")
    return finished is None or bool(finished)


def _logp_alpha(values: Any, count: int) -> torch.Tensor:
    """One log-prob per token, NaN where it is unknown: null in the file. Raises ValueError for what cannot be one."""
    if values is None:
        return torch.full((count,), math.nan)
    if not isinstance(values, list):
        raise ValueError(f"rollout_logprobs is {values!r}, not a list with a number for each token")
    if len(values) != count:
        raise ValueError(f"rollout_logprobs has {len(values)} entries for {count} tokens")
    for n, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and (value != value or LOWEST <= value <= ROUNDING)):
            said = f"{value:g}" if isinstance(value, float) else f"{value!r:.40}"
            raise ValueError(
                f"rollout_logprobs[{n}] is {said}: the log-prob of a sampled token is a number of at most 0, "
                "or null if it is unknown"
            )
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64).float()


def _sampled(values: Any, count: int) -> torch.Tensor:
    """Whether each token was sampled; all were where the file does not say. Raises ValueError for another list."""
    if values is None:
        return torch.ones(count, dtype=torch.bool)
    if not isinstance(values, list) or len(values) != count or any(value not in (True, False) for value in values):
        raise ValueError(f"loss_mask is {values!r:.80}, not a list with true or false for each of the {count} tokens")
    if not any(values):
        raise ValueError("none of its tokens was sampled: there is nothing to learn from")
    return torch.tensor(values, dtype=torch.bool)


def _recorded_turns(values: Any) -> tuple[str, ...]:
    """The texts of a completion's turns, the policy's and the environment's in turn. Raises ValueError for others."""
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise ValueError(f"messages is {values!r:.80}, not a list of texts")
    return tuple(values)


def _outcome(row: Mapping[str, Any]) -> Outcome | None:
    """The recorded outcome; None where the judge is still to decide."""
    kind, reward, value = row.get("outcome") or "scored", row.get("reward"), math.nan
    if kind not in (known := get_args(Kind)):
        raise ValueError(f"its outcome is {kind!r:.80}, which is not one of {', '.join(known)}")
    if kind != "scored":
        return Outcome(kind, reason=str(row.get("reason") or "recorded so"))
    if reward is None:
        return None
    with suppress(TypeError, OverflowError):
        value = value if isinstance(reward, str) else float(reward)
    if not math.isfinite(value):
        raise ValueError(f"its reward is {reward!r:.80}, not a finite number")
    return Outcome.scored(value)


def _grouped(rows: Iterable[_Row], G: int) -> list[Group]:
    together: defaultdict[tuple[Any, ...], list[_Row]] = defaultdict(list)
    for row in rows:
        together[row.group].append(row)
    chosen = [members[first : first + G] for members in together.values() for first in range(0, len(members), G)]
    return [
        Group(replace(some[0].prompt, key=key), tuple(c for _, c, _ in some if c is not None), source="file")
        for key, some in enumerate(chosen)
    ]
