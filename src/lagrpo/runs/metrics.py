"""Every metric of metrics.jsonl with its meaning: for docs/metrics.md, the page of `lagrpo view` and studies."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files

METRICS: dict[str, dict[str, str]] = tomllib.loads(
    files("lagrpo.runs").joinpath("metrics.toml").read_text("utf-8")
)


def describe_metrics(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The metrics under their headings, with the rewards and evaluation sets among `names` instead of templates."""
    names, found = list(dict.fromkeys(names)), dict[str, dict[str, str]]()
    for heading, metrics in METRICS.items():
        for template, meaning in metrics.items():
            pattern = re.sub("NAME|SET", r"\\w+", template)
            own = (
                [template]
                if pattern == template
                else [name for name in names if re.fullmatch(pattern, name)]
            )
            found.setdefault(heading, {}).update(dict.fromkeys(own, meaning))
    return found
