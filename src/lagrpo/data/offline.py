"""Pre-generated (offline) completions: JSONL or Parquet files as groups, for the methods that allow them.

One row per completion. Columns:

    prompt             a question or a list of chat messages, put through the chat template;
                       or prompt_token_ids, used as they are
    completion         its text, tokenized here and ended with the end-of-sequence token where `finished` is true;
                       or token_ids, used as they are
    reward             a finite number; null or absent: the task's judge decides, against `gold`
    logp_alpha         log-probs of token_ids under the policy that generated them, nats (optional; null: unknown)
    sampled            for each of token_ids whether a policy sampled it; the others are context (optional; all were)
    finished, gold     optional

The rollouts of a run (schema lagrpo.rollouts/2, or 1, which has no `sampled`) are read too: there prompt and completion
are called prompt_text and text, and gold is JSON. Of these a file is a batch, and its groups stay groups; completions
that failed are left out. Elsewhere rows of the same prompt form groups of at most G, in the order of the files. A
completion without log-probs (no `logp_alpha`, or null for a sampled token) carries NaN, and only recipes that never
read log α may use it; for the others it is left out where some have them. `left_out` counts. Its version is -1, of no
policy of this run: versions that the file names belong to another run, whose policy 3 is not this run's.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from lagrpo.policy.model import Policy
from lagrpo.runs.reading import completion_files
from lagrpo.tasks import build_messages, order_prompts
from lagrpo.tasks.files import read_jsonl
from lagrpo.types import Completion, Group, Kind, Outcome, Prompt

UNKNOWN_VERSION = -1
ROUNDING = 1e-3  # nats above 0 at which a log-prob is still taken: some samplers round probabilities up to 1


class OfflineData:
    """The groups of files, visited epoch after epoch in an order that is a function of (seed, epoch). `data` names the
    files (see `runs.reading.completion_files`); `reads_logp`: the recipe reads log α. `left_out` is how many rows are
    not in the groups, by reason. Raises FileNotFoundError for a file that is missing; ValueError, with file and row,
    for one that cannot be used or has a prompt of more than `max_prompt_tokens`, and where no completions are left."""

    def __init__(
        self,
        data: str | Path | Sequence[str | Path],
        policy: Policy,
        G: int,
        seed: int,
        system_prompt: str | None = None,
        *,
        max_prompt_tokens: int | None = None,
        reads_logp: bool = False,
    ) -> None:
        self.seed, self.left_out = seed, Counter[str]()
        names = [data] if isinstance(data, str | Path) else data
        self.files = completion_files(names)
        rows = [row for file in self.files for row in _read(file, policy, system_prompt, max_prompt_tokens)]
        rows = self._only(rows, "failed", lambda row: row.completion is not None)
        if reads_logp and any(_knows_alpha(row.completion) for row in rows):
            rows = self._only(rows, "without log-probs", lambda row: _knows_alpha(row.completion))
        self._groups = _grouped(rows, G)
        if not self._groups:
            raise ValueError(f"{', '.join(map(str, names))}: no completions in it{self._left_out(' ({})')}")

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


def _read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(f"{path}: completions are read from .jsonl or .parquet files")
    return read_jsonl(path)


class _Row(NamedTuple):
    """A row of a file; `completion` None for one that failed. Rows of one `group` stand for draws of one batch."""

    prompt: Prompt
    completion: Completion | None
    group: tuple[Any, ...]


def _knows_alpha(completion: Completion | None) -> bool:
    """Whether all its log-probs are known."""
    return completion is not None and not bool((completion.logp_alpha.isnan() & completion.sampled).any())


def _read(path: Path, policy: Policy, system_prompt: str | None, max_prompt_tokens: int | None) -> Iterator[_Row]:
    for number, row in enumerate(_read_rows(path), start=1):
        try:
            prompt = _prompt(row, policy, system_prompt)
            if max_prompt_tokens is not None and (count := len(prompt.token_ids)) > max_prompt_tokens:
                limit = f"sampling.max_prompt_tokens is {max_prompt_tokens}"
                raise ValueError(f"its prompt has {count} tokens; {limit}")
            failed = row.get("outcome") == "failed"
            batch = (path, row.get("epoch")) if "prompt_text" in row else ()
            yield _Row(prompt, None if failed else _completion(row, policy), (*batch, prompt.token_ids))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, row {number}: {error}") from error


def _prompt(row: Mapping[str, Any], policy: Policy, system_prompt: str | None) -> Prompt:
    question, gold = row.get("prompt"), row.get("gold")
    if "prompt_text" in row:
        question, gold = row["prompt_text"], json.loads(gold or "null")
    if ids := row.get("prompt_token_ids"):
        messages = build_messages(question if question is not None else "")
        return Prompt(0, messages, gold, tuple(_token_ids("prompt_token_ids", ids, policy)))
    if not question:
        raise ValueError("it has neither prompt nor prompt_token_ids")
    return policy.chat.tokenize(Prompt(0, build_messages(question, system_prompt), gold))


def _completion(row: Mapping[str, Any], policy: Policy) -> Completion:
    text = row["text"] if "text" in row else row.get("completion")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"its completion is {text!r:.80}, not a text")
    finished, ids = _finished(row), row.get("token_ids")
    if ids is None:
        if text is None:
            raise ValueError("it has neither completion nor token_ids")
        ids = [*policy.chat.encode(text, add_special_tokens=False), *[policy.chat.tokenizer.eos_token_id] * finished]
    if not _token_ids("token_ids", ids, policy):
        raise ValueError("its completion has no tokens")
    for column in ("logp_alpha", "sampled"):
        if row.get(column) is not None and row.get("token_ids") is None:
            raise ValueError(f"{column} needs token_ids: the text may be tokenized otherwise than it was sampled")
    return Completion(
        token_ids=torch.tensor(ids, dtype=torch.long),
        logp_alpha=_logp_alpha(row.get("logp_alpha"), len(ids)),
        versions=torch.full((len(ids),), UNKNOWN_VERSION),
        finished=finished,
        text=text if text is not None else policy.chat.decode(ids),
        outcome=_outcome(row),
        sampled=_sampled(row.get("sampled"), len(ids)),
    )


def _token_ids(column: str, ids: Any, policy: Policy) -> list[int]:
    """The ids as they are. Raises ValueError for what is no list of tokens of the model."""
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"{column} is {ids!r:.80}, not a list of whole numbers")
    vocabulary = policy.chat.vocabulary
    if strange := [i for i in ids if not 0 <= i < vocabulary]:
        raise ValueError(f"token {strange[0]} of {column} is outside the model's vocabulary of {vocabulary}")
    return ids


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
        raise ValueError(f"logp_alpha is {values!r}, not a list with a number for each token")
    if len(values) != count:
        raise ValueError(f"logp_alpha has {len(values)} entries for {count} tokens")
    for n, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and (math.isnan(value) or -math.inf < value <= ROUNDING)):
            said = f"{value:g}" if number else repr(value)
            raise ValueError(
                f"logp_alpha[{n}] is {said}: the log-prob of a token that was sampled is a number of at most 0, or "
                "null where nobody knows it"
            )
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64).float()


def _sampled(values: Any, count: int) -> torch.Tensor:
    """Whether each token was sampled; all were where the file does not say. Raises ValueError for another list."""
    if values is None:
        return torch.ones(count, dtype=torch.bool)
    if not isinstance(values, list) or len(values) != count or any(value not in (True, False) for value in values):
        raise ValueError(f"sampled is {values!r:.80}, not a list with true or false for each of the {count} tokens")
    if not any(values):
        raise ValueError("none of its tokens was sampled: there is nothing to learn from")
    return torch.tensor(values, dtype=torch.bool)


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
