"""Detectors of completions that are cut, repeat themselves, or are all the same."""

from __future__ import annotations

import zlib
from collections import Counter

from lagrpo.diagnosis.finding import Finding, percent, places_of
from lagrpo.diagnosis.record import ALL_WRONG, RunRecord, groups_of, mean, scored_rows
from lagrpo.terminal.text import count_of

END = 1000
"""Characters at the end of a completion in which repetition is looked for."""

SHORTEST = 200
"""Characters that such an end must have: shorter texts may repeat themselves by chance."""

COMPRESSION = 5
"""Repeated text is compressed to less than a fifth; prose and proofs to a half or a third."""

COLD = 0.7
"""Temperature below which copies come from the temperature, even if they are right."""


def find_cut(record: RunRecord, threshold: float) -> Finding | None:
    """Many completions are cut at the limit, and are worth less than those that end."""
    rows = scored_rows(record.recent_rows)
    cut = [row for row in rows if not row["finished"]]
    if not rows or len(cut) < threshold * len(rows):
        return None
    cut_reward = record.height(mean([row["reward"] for row in cut]) or 0.0)
    # If none ends, the whole range stands for what an answer might get.
    reward = 1.0
    others = "and none ends by itself"
    finished = [row["reward"] for row in rows if row["finished"]]
    if finished:
        reward = record.height(mean(finished) or 0.0)
        others = f"the others {mean(finished):.2f}"
    # With more than half of the others' reward, little is lost.
    if cut_reward > reward / 2 or reward <= 0:
        return None
    share = len(cut) / len(rows)
    limit = record.settings.get("rollout.max_completion_length")
    return Finding(
        f"{percent(share)} of the completions are cut at the limit of "
        f"{count_of(limit or 0, 'token')}; they have a mean reward of "
        f"{mean([row['reward'] for row in cut]):.2f}, {others}.",
        # If none ends, the limit explains all that is missing.
        cost=share * (1 - max(0.0, cut_reward) / reward) if finished else share,
        places=places_of(cut),
        settings={"rollout.max_completion_length": 2 * limit} if limit else {},
    )


def find_length_drift(record: RunRecord, threshold: float) -> Finding | None:
    """Completions have grown, and the longest tenth is near the limit."""
    limit = record.settings.get("rollout.max_completion_length")
    first = record.first("completions/mean_length")
    last = record.last("completions/mean_length")
    if not limit or not first or last is None or len(record.metrics) < 2 * record.window:
        return None
    # A quarter more is more than batches differ by chance.
    if last < 1.25 * first:
        return None
    lengths = sorted(row["length"] for row in record.recent_rows)
    longest = lengths[int(0.9 * len(lengths))] if lengths else 0
    if longest < threshold * limit:
        return None
    cut = record.last("completions/clipped_ratio") or 0.0
    return Finding(
        f"Completions grew from {first:.0f} to {last:.0f} tokens, and one in ten has {longest} of "
        f"at most {limit}: soon more than {percent(cut)} of them are cut.",
        # What is cut is lost, and the tenth near the limit will be.
        cost=max(0.1, cut),
        places=places_of(row for row in record.recent_rows if row["length"] >= longest),
        settings={"rollout.max_completion_length": 2 * limit},
    )


def find_repetition(record: RunRecord, threshold: float) -> Finding | None:
    """Completions end in loops of the same text."""
    rows = record.recent_rows
    loops = [row for row in rows if _repeats_itself(row["completion"])]
    if len(loops) <= threshold * len(rows):
        return None
    share = len(loops) / len(rows)
    early = [row for row in record.first_rows if _repeats_itself(row["completion"])]
    before = len(early) / max(1, len(record.first_rows))
    settings: dict[str, float] = {}
    advice = ""
    if before < share / 2:
        # The run has learned it.
        rate = record.settings.get("optimizer.learning_rate") or 0.0
        settings = {"optimizer.learning_rate": rate / 3}
        advice = "The policy is breaking down: go back to an earlier one."
    return Finding(
        f"{percent(share)} of the completions end in a loop of the same text; in the first batches "
        f"{percent(before)} did.",
        cost=share,
        places=places_of(loops),
        settings=settings,
        advice=advice,
        example=repr(loops[-1]["completion"][-80:]),
    )


def _repeats_itself(text: str) -> bool:
    end = text[-END:].encode()
    return len(end) >= SHORTEST and len(end) > COMPRESSION * len(zlib.compress(end))


def find_equal_completions(record: RunRecord, threshold: float) -> Finding | None:
    """Groups consist of one completion, many times: by a low temperature, or all wrong."""
    groups = [group for group in groups_of(record.recent_rows) if len(group) > 1]
    temperature = record.settings.get("rollout.temperature") or 1.0
    stuck = []
    for group in groups:
        (_, copies), *_ = Counter(row["completion"] for row in group).most_common(1)
        is_suspect = temperature < COLD or record.kind(group) == ALL_WRONG
        if is_suspect and copies > 0.8 * len(group):
            stuck.append(group)
    if not groups or len(stuck) < threshold * len(groups):
        return None
    share = len(stuck) / len(groups)
    settings: dict[str, float] = {}
    advice = ""
    if temperature < 1:
        settings = {"rollout.temperature": 1.0}
    else:
        advice = (
            "The policy has lost its variety: go back to an earlier one, with a third of the "
            "learning rate."
        )
    return Finding(
        f"In {percent(share)} of the groups nearly all completions are the same text "
        f"(temperature {temperature:g}).",
        cost=share,
        places=places_of(group[0] for group in stuck),
        settings=settings,
        advice=advice,
        example=repr(stuck[-1][0]["completion"][-80:]),
    )
