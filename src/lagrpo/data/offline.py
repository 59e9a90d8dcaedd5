"""Pre-generated (offline) completions: files as groups, for recipes that allow them.

docs/off-policy.md says what the columns mean. A completion without log-probs carries NaN: for
recipes that read log α it is left out if others have them. Its version is -1, of no policy of this
run.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch

from lagrpo.errors import one_line_errors, parse_json
from lagrpo.model.chat import check_thought, without_repetition
from lagrpo.model.model import Policy
from lagrpo.model.rendered import extra_keys, find_hidden_key
from lagrpo.model.replies import Replies
from lagrpo.rng import permutation
from lagrpo.runs.reading import completion_files
from lagrpo.tasks import order_prompts
from lagrpo.tasks.columns import parse_messages, plain
from lagrpo.tasks.files import Row, format_of, read_rows
from lagrpo.tasks.messages import Messages, build_messages, is_padded, plain_message, read_tools
from lagrpo.types import Completion, Group, JsonObject, JsonView, Outcome, OutcomeKind, Prompt

UNKNOWN_VERSION = -1

MAX_LOGP = 1e-3
"""Nats above 0 that a log-prob may be: some samplers round probabilities up to 1."""

# What describes a completion. The other columns are the row of the data that rewards get.
COMPLETION_COLUMNS = frozenset(
    ("completion", "token_ids", "rollout_logprobs", "loss_mask", "messages", "reward", "finished")
)

WITHOUT_LOGP = "without log-probs"  # a reason for leaving a row out


def read_records(data: str | Path | Sequence[str | Path]) -> list[Row]:
    """Reads the rows of the files that `data` names.

    Raises FileNotFoundError, and ValueError with file and line.
    """
    paths = [data] if isinstance(data, str | Path) else data
    rows: list[Row] = []
    for file in completion_files(paths):
        if format_of(file) not in (".jsonl", ".json", ".parquet"):
            raise ValueError(f"{file}: files of completions end in .jsonl or .parquet")
        # Log-probs and rewards are used as they are stored.
        rows += read_rows(file, marked_columns=("answer",))
    if data and not rows:
        raise ValueError("the files have no completions")
    return rows


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """A row of a file. Rows with the same `group_key` were sampled together."""

    group_key: Hashable
    prompt: Prompt
    completion: Completion


class OfflineData:
    """The groups of files, visited epoch after epoch.

    The order is a function of (seed, epoch). A group has about G completions (`_make_groups`).
    `left_out` counts the rows that are in no group, by reason. `reads_logp`: the recipe reads
    log α.

    Raises ValueError, with file and line, for a row that cannot be used, and if no completions are
    left.
    """

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
        self.seed = seed
        self.files = len({record.path for record in records})
        self.left_out: Counter[str] = Counter()
        replies = Replies(policy.chat)
        has_warned = False
        rows: list[OfflineRow] = []
        for record in records:
            with one_line_errors(record.place):
                prompt = _read_prompt(record, replies, system_prompt)
                num_tokens = len(prompt.token_ids)
                if num_tokens > max_prompt_tokens:
                    raise ValueError(
                        f"its prompt has {num_tokens} tokens; rollout.max_prompt_length is "
                        f"{max_prompt_tokens}"
                    )
                if record.get("outcome") == OutcomeKind.FAILED:
                    self.left_out["failed"] += 1
                    continue
                completion = _read_completion(record, prompt, replies)
                num_tokens = completion.length
                if num_tokens > max_completion_tokens:
                    raise ValueError(
                        f"its completion has {num_tokens} tokens; rollout.max_completion_length is "
                        f"{max_completion_tokens}"
                    )
            # One warning is enough. Recorded token ids are used as they are, rendered or not.
            if record.get("prompt_token_ids") is None and not has_warned:
                has_warned = policy.chat.warn_if_unusual(prompt, record.place)
            rows.append(OfflineRow(_group_key(record, prompt), prompt, completion))
        if reads_logp:
            rows = self._leave_out_unknown_logp(rows)
        self._completions = [row.completion for row in rows]
        self._groups = _make_groups(rows, G, seed)
        # Some prompts have more completions than a group.
        self._num_prompts = len({row.group_key for row in rows})
        if not self._groups:
            raise ValueError(f"the files have {self}")

    def _leave_out_unknown_logp(self, rows: list[OfflineRow]) -> list[OfflineRow]:
        """Returns the rows with log-probs. If none has them, all rows stay."""
        known = [row for row in rows if row.completion.has_logp]
        if not known or len(known) == len(rows):
            return rows
        self.left_out[WITHOUT_LOGP] = len(rows) - len(known)
        return known

    def __len__(self) -> int:
        return len(self._groups)

    def __str__(self) -> str:
        groups = _count_text(len(self._groups), "group")
        if self._num_prompts < len(self._groups):
            groups += f" and {_count_text(self._num_prompts, 'prompt')}"
        description = (
            f"{_count_text(len(self._completions), 'completion')} of {groups} in "
            f"{_count_text(self.files, 'file')}"
        )
        if self.left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
            description += f"; left out: {reasons}"
        return description

    @property
    def has_comparisons(self) -> bool:
        """True if a group has two completions or more, so that their rewards can be compared."""
        return any(len(group.completions) > 1 for group in self._groups)

    @property
    def has_logp(self) -> bool:
        """True if every completion has the log-probs of the policy that sampled it."""
        return all(completion.has_logp for completion in self._completions)

    def batch(self, b: int, count: int) -> list[Group]:
        """Returns the `count` groups of batch b = 1, 2, …"""
        num_groups = len(self._groups)
        groups = []
        for position in range((b - 1) * count, b * count):
            epoch, position_in_epoch = divmod(position, num_groups)
            index = order_prompts(self.seed, epoch, num_groups)[position_in_epoch]
            groups.append(replace(self._groups[index], epoch=epoch))
        return groups


def _count_text(count: int, noun: str) -> str:
    """Returns a count with its noun, such as "1 file" or "1,000 files"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# Groups


def _group_key(record: Row, prompt: Prompt) -> Hashable:
    """Returns a key that is equal for rows that were sampled together.

    These have the same prompt and reference answer. In records of a run, where a prompt may come
    again, they are also of the same file and epoch.
    """
    is_of_run = "prompt_text" in record
    epoch_of_file = (record.path, record.get("epoch")) if is_of_run else ()
    return epoch_of_file, prompt.token_ids, json.dumps(prompt.answer)


def _make_groups(rows: Sequence[OfflineRow], G: int, seed: int) -> list[Group]:
    """Returns groups of about G completions. The keys of their prompts are 0, 1, …

    The seed shuffles the rows of a prompt that has more than G: files are often sorted by reward,
    and a group of equal rewards teaches nothing.
    """
    rows_by_group: defaultdict[Hashable, list[OfflineRow]] = defaultdict(list)
    for row in rows:
        rows_by_group[row.group_key].append(row)
    groups: list[Group] = []
    for number, members in enumerate(rows_by_group.values()):
        sizes = _split_sizes(len(members), G)
        if len(sizes) > 1:
            order = permutation(len(members), seed, "offline group", number).tolist()
            members = [members[index] for index in order]
        start = 0
        for size in sizes:
            chunk = members[start : start + size]
            start += size
            prompt = replace(chunk[0].prompt, key=len(groups))
            completions = tuple(row.completion for row in chunk)
            groups.append(Group(prompt, completions, source="file"))
    return groups


def _split_sizes(count: int, G: int) -> list[int]:
    """Returns the sizes of the groups of `count` completions: at most G, and as equal as possible.

    No completion is left alone, because it would have nothing to be compared with: with G = 2, one
    of an odd number of completions makes a group of 3.

    >>> _split_sizes(9, 8), _split_sizes(5, 2), _split_sizes(2, 1)
    ([5, 4], [3, 2], [1, 1])
    """
    num_groups = -(-count // G)  # rounded up
    if G > 1:
        num_groups = max(1, min(num_groups, count // 2))
    size, num_larger = divmod(count, num_groups)
    return [size + 1] * num_larger + [size] * (num_groups - num_larger)


# One row


def _read_prompt(row: Row, replies: Replies, system_prompt: str | None) -> Prompt:
    """Returns the prompt of a row, with its token ids. Raises ValueError."""
    question = parse_messages(row.get("prompt"))
    answer = plain(row.get("answer"))
    if "prompt_text" in row:  # a record of a run, which has its answer as JSON
        question = row["prompt_text"]
        with one_line_errors(f"its answer {answer!r:.40} is not JSON"):
            answer = parse_json(answer or "null")
    token_ids = _read_list(row, "prompt_token_ids", (int,))
    if token_ids:
        replies.chat.check_vocabulary(token_ids)
        messages = build_messages(question or [{"role": "user", "content": ""}])
        prefix = replies.chat.find_prefix(messages, replies.chat.decode(token_ids))
        return Prompt(0, messages, answer, tuple(token_ids), prefix=prefix)
    if not question:
        raise ValueError(
            f"it has neither prompt nor prompt_token_ids; the columns are {', '.join(row)}"
        )
    padded = is_padded(row)
    messages = build_messages(question, system_prompt, padded=padded)
    tools = read_tools(row, padded=padded)
    columns = None
    if "prompt_text" not in row:
        columns = {name: value for name, value in row.items() if name not in COMPLETION_COLUMNS}
    prompt = Prompt(0, messages, answer, row=columns, place=row.place, tools=tools)
    return replies.chat.tokenize(prompt)


@dataclass(frozen=True, slots=True)
class CompletionTokens:
    """The tokens of a completion, and the text of each turn if it has several."""

    token_ids: list[int]
    sampled: list[bool] | None = None  # per token; None: the policy sampled all of them
    turns: Sequence[str] = ()


def _read_completion(row: Row, prompt: Prompt, replies: Replies) -> Completion:
    """Returns the completion of a row, with NaN for unknown log-probs. Raises ValueError."""
    content = parse_messages(row.get("completion"))
    finished = _read_finished(row)
    if isinstance(content, str) and row.get("token_ids") is None:
        content = replies.chat.without_end(content)
        prompt_text = replies.chat.tokenizer.decode(prompt.token_ids)
        content = _continue_prompt(prompt_text, content, finished=finished)
    tokens = _read_tokens(row, content, prompt, finished=finished, replies=replies)
    token_ids = tokens.token_ids
    if not token_ids:
        raise ValueError("its completion has no tokens")
    replies.chat.check_vocabulary(token_ids)
    num_tokens = len(token_ids)
    sampled = tokens.sampled or [True] * num_tokens
    later_prefixes = replies.chat.find_later_prefixes(token_ids, sampled)
    # Tensors of shape [t], one entry per token.
    return Completion(
        token_ids=torch.tensor(token_ids, dtype=torch.long),
        rollout_logp=_read_logp(row, num_tokens),
        versions=torch.full((num_tokens,), UNKNOWN_VERSION),
        finished=finished,
        text=content if isinstance(content, str) else replies.chat.decode(token_ids),
        outcome=_read_outcome(row),
        sampled=torch.tensor(sampled),
        turns=tuple(tokens.turns),
        prefix=later_prefixes[-1] if later_prefixes else None,
    )


def _continue_prompt(prompt_text: str, text: str, *, finished: bool) -> str:
    """Returns the text of an answer without the tag with which the prompt has begun it.

    Raises ValueError for a thought that does not fit the end of the prompt.
    """
    text = without_repetition(prompt_text, text)
    check_thought(prompt_text, text, finished=finished)
    return text


def _read_finished(row: Row) -> bool:
    """Returns True if the completion was not cut, or without the column. Raises ValueError."""
    finished = row.get("finished")
    if finished is None:
        return True
    if not isinstance(finished, bool):
        raise ValueError(f"finished = {finished!r:.40}: write true or false")
    return finished


def _read_tokens(
    row: Row, content: Any, prompt: Prompt, *, finished: bool, replies: Replies
) -> CompletionTokens:
    """Returns a row's recorded tokens, or tokenizes its text or messages. Raises ValueError."""
    token_ids = _read_list(row, "token_ids", (int,))
    if token_ids is not None:
        sampled = _read_list(row, "loss_mask", (bool,), len(token_ids))
        if sampled is not None and not any(sampled):
            raise ValueError(
                "loss_mask leaves out all of its tokens: there is nothing to learn from"
            )
        turns = _read_list(row, "messages", (str,)) or []
        return CompletionTokens(token_ids, sampled, turns)
    for column in ("rollout_logprobs", "loss_mask"):
        if row.get(column) is not None:
            raise ValueError(
                f"{column} needs token_ids: tokenizing the text may give other tokens than were "
                "sampled"
            )
    if isinstance(content, list):
        messages = _read_turns(content, padded=is_padded(row))
        return _tokenize_turns(messages, prompt, replies, finished=finished)
    if not isinstance(content, str):
        raise ValueError(f"its completion is {content!r:.80}, not a text, messages, or token_ids")
    token_ids = replies.chat.encode(content, add_special_tokens=False)
    if finished:
        token_ids.append(replies.end_id)
    return CompletionTokens(token_ids)


def _read_list(
    row: JsonView, column: str, types: tuple[type, ...], count: int | None = None
) -> Any:
    """Returns the list in a column; None without one.

    Raises ValueError for values of other types, and for a length other than `count`.
    """
    values = row.get(column)
    if values is None:
        return None
    # isinstance(True, int) is true, but a bool is not a token id, so the types are compared.
    if not isinstance(values, list) or not {type(value) for value in values} <= set(types):
        raise ValueError(f"{column} is {values!r:.80}, not a list of {types[0].__name__}")
    if count is not None and len(values) != count:
        raise ValueError(f"{column} has {len(values)} entries for {count} tokens")
    return values


def _read_logp(row: JsonView, count: int) -> torch.Tensor:
    """Returns one log-prob per token, float32 [count]: NaN if it is unknown, which is null."""
    recorded = _read_list(row, "rollout_logprobs", (float, int, type(None)), count)
    values = recorded or [None] * count
    numbers = [math.nan if value is None else value for value in values]
    logp = torch.tensor(numbers, dtype=torch.float64).float()  # [count]
    wrong = (logp.isinf() | (logp > MAX_LOGP)).nonzero()  # [number of wrong log-probs, 1]
    if len(wrong):
        index = int(wrong[0])
        raise ValueError(
            f"rollout_logprobs[{index}] is {values[index]:g}: a log-prob is at most 0, or null if "
            "it is unknown"
        )
    return logp


def _read_outcome(row: JsonView) -> Outcome | None:
    """Returns the recorded outcome; None if the task's reward function is still to decide."""
    reward = row.get("reward")
    if row.get("outcome") == OutcomeKind.UNSCORED:
        return Outcome.unscored(str(row.get("reason") or "recorded so"))
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"its reward is {reward!r:.80}, not a finite number")
    return Outcome.scored(float(reward))


# Several turns


def _read_turns(content: Sequence[object], *, padded: bool) -> list[JsonObject]:
    """Returns the messages of a completion, as chat templates take them. Raises ValueError."""
    messages = [
        plain_message(message, padded=padded) if isinstance(message, Mapping) else {}
        for message in content
    ]
    if not _is_conversation(messages):
        raise ValueError(
            f"its completion is {messages!r:.80}, not a text, or messages that begin and end with "
            "the assistant, without two assistant messages in a row"
        )
    return messages


def _tokenize_turns(
    messages: Messages, prompt: Prompt, replies: Replies, *, finished: bool
) -> CompletionTokens:
    """Tokenizes a completion of several turns.

    The assistant's turns are sampled, each with the token that ends it: the last one only if the
    completion is `finished`. Other turns are what the chat template adds between them. It also
    writes turns of the assistant that have more than a text, such as calls. Raises ValueError for
    what it does not show.
    """
    chat = replies.chat
    conversation: list[JsonView] = list(prompt.messages)
    text_before = chat.tokenizer.decode(prompt.token_ids)
    token_ids: list[int] = []
    sampled: list[bool] = []
    texts: list[str] = []
    for is_assistant, group in groupby(messages, lambda message: message["role"] == "assistant"):
        turns = list(group)
        if is_assistant:
            (message,) = turns
            is_cut = message is messages[-1] and not finished
            text, end_id = _write_turn(message, conversation, prompt, replies)
            text = _continue_prompt(text_before, text, finished=not is_cut)
            added_ids = chat.encode(text, add_special_tokens=False)
            added_ids.append(end_id)
        else:
            text = "\n".join(message["content"] for message in turns)
            added_ids = replies.tokens(turns)
            text_before = chat.tokenizer.decode(added_ids)
            hidden_key = find_hidden_key(turns, text_before)
            if hidden_key is not None:
                raise ValueError(
                    f"its completion has a message with {hidden_key!r}, which the chat template "
                    "does not show: remove it"
                )
        conversation += turns
        texts.append(text)
        token_ids += added_ids
        sampled += [is_assistant] * len(added_ids)
    if not finished:  # the end token of the last turn was not sampled
        token_ids.pop()
        sampled.pop()
    return CompletionTokens(token_ids, sampled, texts)


def _write_turn(
    message: JsonView, before: Messages, prompt: Prompt, replies: Replies
) -> tuple[str, int]:
    """Returns the text of a turn of the assistant, and the token that ends it.

    A message that has only a text is that text. Any other one is what the chat template makes of it
    behind the messages `before`. Raises ValueError.
    """
    chat = replies.chat
    if not message.get("tool_calls") and not extra_keys(message):
        return chat.without_end(message["content"]), replies.end_id
    turn = chat.render_turn(before, message, prompt.tools)
    end_id = chat.find_end(turn)
    return chat.without_end(turn), replies.end_id if end_id is None else end_id


def _is_conversation(messages: Sequence[JsonView]) -> bool:
    """True if the assistant begins and ends, never speaks twice in a row, and all say something."""
    if not messages or not all(map(_says_something, messages)):
        return False
    is_assistant = [message["role"] == "assistant" for message in messages]
    speaks_twice = any(first and second for first, second in pairwise(is_assistant))
    return is_assistant[0] and is_assistant[-1] and not speaks_twice


def _says_something(message: JsonView) -> bool:
    """True if a message has a role and a text, or as the assistant's, a call or a thought."""
    if not isinstance(message.get("role"), str):
        return False
    if isinstance(message.get("content"), str):
        return True
    has_more = bool(message.get("tool_calls")) or bool(extra_keys(message))
    return message["role"] == "assistant" and "content" not in message and has_more
