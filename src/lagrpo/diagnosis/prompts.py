"""Detectors of prompts that are wrong."""

from __future__ import annotations

import json
import re
from collections import defaultdict

from lagrpo.diagnosis.finding import Finding, percent, places_of
from lagrpo.diagnosis.record import RunRecord
from lagrpo.terminal.text import count_of
from lagrpo.types import JsonView

SHORTEST_ANSWER = 4
"""Characters of an answer that is in a prompt hardly by chance, as a number may be."""

LABELS = r"(?:answer|solution|result|####|boxed\{)\s*(?:is|:|=)?\s*"
"""Words before an answer that is given away, whatever its length."""


def find_answer_in_prompt(record: RunRecord, threshold: float) -> Finding | None:
    """The reference answer is in the prompt."""
    rows = {row["prompt_id"]: row for row in record.rollouts}
    shown = [row for row in rows.values() if _shows_answer(row)]
    if not rows or len(shown) < threshold * len(rows):
        return None
    share = len(shown) / len(rows)
    return Finding(
        f"The reference answer is in {percent(share)} of the prompts ({len(shown)} of "
        f"{len(rows)}): the policy may learn to copy it.",
        cost=share / 2,
        places=places_of(shown),
    )


def find_equal_prompts(record: RunRecord, threshold: float) -> Finding | None:
    """Prompts of different rows are the same, and so are their answers."""
    rows = {row["prompt_id"]: row for row in record.rollouts}
    ids_by_content: dict[tuple[str, str], list[int]] = defaultdict(list)
    for prompt_id, row in rows.items():
        ids_by_content[row["prompt_text"], row["answer"]].append(prompt_id)
    copies = [prompt_id for ids in ids_by_content.values() for prompt_id in ids[1:]]
    if not copies or len(copies) < threshold * len(rows):
        return None
    share = len(copies) / len(rows)
    return Finding(
        f"{percent(share)} of the {count_of(len(rows), 'prompt')} repeat another prompt and its "
        "answer.",
        cost=share / 2,
        places=places_of(rows[prompt_id] for prompt_id in copies),
    )


def _shows_answer(row: JsonView) -> bool:
    answer = json.loads(row["answer"])
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        return False
    text = str(answer).strip()
    if not text:
        return False
    # As a whole word: 18 is not in 180.
    word = rf"(?<![\w.]){re.escape(text)}(?!\w)"
    if len(text) < SHORTEST_ANSWER:
        word = LABELS + word
    return re.search(word, row["prompt_text"], re.IGNORECASE) is not None
