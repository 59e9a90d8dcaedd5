"""Detectors of rewards and reference answers that do not fit the completions."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence

from lagrpo.diagnosis.finding import Finding, percent, places_of, show_completion
from lagrpo.diagnosis.record import RunRecord, groups_of, scored_rows
from lagrpo.terminal.text import count_of
from lagrpo.types import JsonView

FEWEST = 30
"""Completions of a kind from which their share is more than chance."""

TAIL = 300
"""Characters at the end of a completion in which its answer is looked for."""


def find_rejected_answers(record: RunRecord, threshold: float) -> Finding | None:
    """Completions that end with the reference answer count as wrong."""
    # Of the whole run: a policy that is paid for wrong answers soon gives no right one.
    with_answer = [
        row
        for row in scored_rows(record.rollouts)
        if ends_with(row["completion"], read_answer(row))
    ]
    rejected = [
        row
        for row in with_answer
        if not record.is_correct(row) and record.height(row["reward"]) < 0.5
    ]
    if len(rejected) < FEWEST or len(rejected) < threshold * len(with_answer):
        return None
    share = len(rejected) / len(with_answer)
    return Finding(
        f"{percent(share)} of the {count_of(len(with_answer), 'completion')} that end with the "
        "reference answer count as wrong.",
        # Below what is hopeless from the start: a policy may still learn a form that it lacks.
        cost=0.85 * share,
        places=places_of(rejected),
        example=show_completion(rejected[-1]),
    )


def find_unrelated_answers(record: RunRecord, threshold: float) -> Finding | None:
    """Completions end with the reference answer of another prompt as often as with their own."""
    own, foreign = _count_answers(record.rollouts)
    early_own, early_foreign = _count_answers(record.first_rows)
    # A policy that knew answers at the start has forgotten them: the data are right.
    if record.rises() or record.has_collapsed or early_own > 2 * early_foreign:
        return None
    if foreign < FEWEST or own > threshold * foreign:
        return None
    last = record.rollouts[-1]
    return Finding(
        "Completions end with the reference answer of another prompt as often as with their own: "
        f"{foreign:,} and {own:,} of {count_of(len(record.rollouts), 'completion')}.",
        cost=0.8,
        places=places_of([last]),
        example=show_completion(last),
    )


def _count_answers(rows: Sequence[JsonView]) -> tuple[int, int]:
    """Returns the completions that end with their own answer, and with the next group's answer.

    Groups of which both have the same answer are left out.
    """
    own = 0
    foreign = 0
    groups_by_batch: dict[int, list[list[JsonView]]] = defaultdict(list)
    for group in groups_of(rows):
        groups_by_batch[group[0]["step"]].append(group)
    for groups in groups_by_batch.values():
        for group, other in zip(groups, [*groups[1:], groups[0]], strict=True):
            own_answer = read_answer(group[0])
            other_answer = read_answer(other[0])
            if own_answer != other_answer:
                own += sum(ends_with(row["completion"], own_answer) for row in group)
                foreign += sum(ends_with(row["completion"], other_answer) for row in group)
    return own, foreign


def find_random_reward(record: RunRecord, threshold: float) -> Finding | None:
    """Equal completions of a group get different rewards."""
    low, high = record.reward_range
    copied: list[list[JsonView]] = []
    for group in groups_of(scored_rows(record.recent_rows)):
        rows_by_text: dict[tuple[str, int, bool], list[JsonView]] = defaultdict(list)
        for row in group:
            rows_by_text[row["completion"], row["length"], row["finished"]].append(row)
        copied += [rows for rows in rows_by_text.values() if len(rows) > 1]
    unequal = []
    for rows in copied:
        rewards = [row["reward"] for row in rows]
        # A judge gives nearly the same grade again.
        if max(rewards) - min(rewards) > 0.1 * (high - low):
            unequal.append(rows)
    if len(unequal) < FEWEST or len(unequal) < threshold * len(copied):
        return None
    share = len(unequal) / len(copied)
    return Finding(
        f"{percent(share)} of the {count_of(len(copied), 'text')} that came more than once in "
        "their group got different rewards.",
        # Of two texts with a reward by chance, at most half differ.
        cost=min(1.0, 2 * share),
        places=places_of(rows[-1] for rows in unequal),
        example=show_completion(unequal[-1][-1]),
    )


def read_answer(row: JsonView) -> str:
    """Returns the reference answer as `ends_with` compares it; "" if it is no text or number."""
    answer = json.loads(row["answer"])
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return ""
    return _without_ending(str(answer))


def ends_with(completion: str, answer: str) -> bool:
    """True if an answer of `read_answer` is the last word of a completion, or its last words.

    >>> ends_with("It is **42**.", "42"), ends_with("142", "42"), ends_with("-42", "42")
    (True, False, False)
    """
    text = _without_ending(completion[-TAIL:])
    if not answer or not text.endswith(answer):
        return False
    # The answer is not a part of a longer number or word.
    before = text[: -len(answer)][-1:]
    return not (before.isalnum() or before in tuple("-.,/_"))


def _without_ending(text: str) -> str:
    """Returns a text in lower case, without the signs and spaces around it."""
    return re.sub(r"\W+$", "", text).lstrip().casefold()
