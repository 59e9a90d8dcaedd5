"""The evaluations of a run as lines for people: of each set its first result and its last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lagrpo.terminal.text import finite, formatted

Summary = Mapping[str, Any]


def by_set(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The summaries of each set by its name, in their order; "" where the run has a single evaluation.

    >>> by_set([{"name": "before.a", "set": "a"}, {"name": "after.a", "set": "a"}])
    {'a': [{'name': 'before.a', 'set': 'a'}, {'name': 'after.a', 'set': 'a'}]}
    """
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(str(summary.get("set") or ""), []).append(summary)
    return found


def headline(summary: Summary) -> dict[str, str]:
    """What to show of an evaluation first: pass@1, and the mean reward if it is another number.

    >>> headline({"pass_at_1": 0.5})
    {'pass@1': '50.0%'}
    """
    mean = finite(summary.get("reward_mean"))
    shown = {"pass@1": formatted(summary.get("pass_at_1"), ".1%")}
    return shown | ({} if mean in (None, summary.get("pass_at_1")) else {"mean reward": formatted(mean, ".3f")})


def result_lines(summaries: Sequence[Summary]) -> list[str]:
    """A line for each set: what its first and its last evaluation found, and after which batches; none for a run
    without sets."""
    lines = []
    for name, made in ((name, made) for name, made in by_set(summaries).items() if name):
        first, last = headline(made[0]), headline(made[-1])
        said = [f"{metric} {first.get(metric, '')} → {value}" for metric, value in last.items()]
        if len(made) == 1:
            said = [f"{metric} {value}" for metric, value in last.items()]
        batches = " → ".join(dict.fromkeys(f"{one.get('batch') or 0}" for one in (made[0], made[-1])))
        lines.append(f"evaluation {name}: {', '.join(said)} (batch {batches})")
    return lines
