"""The meaning of every metric of metrics.jsonl, for docs/metrics.md and `lagrpo view`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files

METRICS: dict[str, dict[str, str]] = tomllib.loads(
    files("lagrpo.runs").joinpath("metrics.toml").read_text("utf-8")
)


def is_lagrpos(name: str) -> bool:
    """True if lagrpo has a metric of this name."""
    return any(name in metrics for metrics in describe_metrics([name]).values())


def describe_metrics(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the metrics under their headings, each with its meaning.

    The metrics of rewards and evaluation sets are those among `names`, instead of their templates
    such as `rewards/NAME/mean`.
    """
    names = list(dict.fromkeys(names))
    descriptions: dict[str, dict[str, str]] = {}
    for heading, metrics in METRICS.items():
        below_heading = descriptions.setdefault(heading, {})
        for template, meaning in metrics.items():
            pattern = re.sub("NAME|SET", r"\\w+", template)
            if pattern == template:
                below_heading[template] = meaning
                continue
            for name in names:
                if re.fullmatch(pattern, name):
                    below_heading[name] = meaning
    return descriptions
