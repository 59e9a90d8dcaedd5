"""Detectors of completions that are cut, repeat themselves, or are all the same."""

from __future__ import annotations

import zlib
from collections import Counter

from lagrpo.diagnosis.finding import (
    Finding,
    lower_rate,
    percent,
    places_of,
    show_completion,
)
from lagrpo.diagnosis.record import ALL_WRONG, RunRecord, groups_of, mean, scored_rows
from lagrpo.terminal.text import count_of

END = 1000
"""Characters at the end of a completion in which repetition is looked for."""

SHORTEST = 200
"""Characters that such an end must have: shorter texts may repeat themselves by chance."""

COMPRESSION = 3.5
"""Bytes by compressed byte: solutions of GSM8K have at most 2.7, code 2.9, sampled loops 3.8."""

RARE = 0.05
"""Share of completions that end by themselves from which their rewards say what an answer gets."""

COLD = 0.7
"""Temperature below which copies come from the temperature, even if they are right."""


def find_cut(record: RunRecord, threshold: float) -> Finding | None:
    """Many completions are cut at the limit, and are worth less than those that end."""
    rows = scored_rows(record.recent_rows)
    cut = [row for row in rows if not row["finished"]]
    if not rows or len(cut) < threshold * len(rows):
        return None
    share = len(cut) / len(rows)
    early_rows = scored_rows(record.first_rows)
    early_share = sum(not row["finished"] for row in early_rows) / max(1, len(early_rows))
    # A policy that has broken down does not end, whatever the limit is.
    if record.has_collapsed and early_share < share / 2:
        return None
    cut_reward = record.height(mean([row["reward"] for row in cut]) or 0.0)
    finished = [row["reward"] for row in rows if row["finished"]]
    hardly_any_ends = len(finished) < RARE * len(rows)
    is_learning = len(record.metrics) < record.window or record.rises()
    if is_learning and not hardly_any_ends:
        # A policy learns quickly to end in time.
        return None
    advice = ""
    if hardly_any_ends:
        # The whole range stands for what an answer might get.
        reward = 1.0
        others = f"and {percent(len(finished) / len(rows))} end by themselves"
        advice = (
            "If texts go on behind their answer, the model does not sample its end token: use its "
            "own chat template, or set rollout.stop."
        )
    else:
        reward = record.height(mean(finished) or 0.0)
        others = f"the others {mean(finished):.2f}"
    # With more than half of the others' reward, little is lost.
    if cut_reward > reward / 2 or reward <= 0:
        return None
    limit = record.settings.get("rollout.max_completion_length")
    return Finding(
        f"{percent(share)} of the completions are cut at the limit of "
        f"{count_of(limit or 0, 'token')}; they have a mean reward of "
        f"{mean([row['reward'] for row in cut]):.2f}, {others}.",
        # If hardly any ends, the limit explains all that is missing.
        cost=1.0 if hardly_any_ends else share * (1 - max(0.0, cut_reward) / reward),
        places=places_of(cut),
        settings={"rollout.max_completion_length": 2 * limit} if limit else {},
        advice=advice,
        example=show_completion(cut[-1]),
    )


def find_length_drift(record: RunRecord, threshold: float) -> Finding | None:
    """Completions have grown, and the longest tenth is near the limit."""
    limit = record.settings.get("rollout.max_completion_length")
    first = record.first("completions/mean_length")
    last = record.last("completions/mean_length")
    if not limit or not first or last is None or len(record.metrics) < 2 * record.window:
        return None
    if record.has_collapsed:
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
        f"at most {limit}: {percent(cut)} of them are cut.",
        # The tenth near the limit will be cut. find_cut says what a cut costs now.
        cost=0.1 + 0.3 * cut,
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
        reward = mean([row["reward"] for row in scored_rows(loops)]) or 0.0
        if reward > (record.first("reward") or 0.0):
            advice = "The reward pays for it: let it give a loop less than an answer that ends."
        else:
            settings = lower_rate(record)
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
        settings = lower_rate(record)
        advice = "The policy has lost its variety: go back to an earlier one."
    return Finding(
        f"In {percent(share)} of the groups nearly all completions are the same text "
        f"(temperature {temperature:g}).",
        cost=share,
        places=places_of(group[0] for group in stuck),
        settings=settings,
        advice=advice,
        example=repr(stuck[-1][0]["completion"][-80:]),
    )
