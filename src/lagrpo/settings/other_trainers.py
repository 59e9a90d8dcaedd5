"""Translates the settings of TRL and verl, and the bounds on staleness of other trainers.

Messages about unknown settings use the table, and so do docs/from-trl.md and docs/from-verl.md.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files

NAMES_OF_TRAINERS: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    files("lagrpo.settings").joinpath("other_trainers.toml").read_text("utf-8")
)
"""Trainer -> heading -> name there -> text about the setting here, in Markdown.

The text begins with the setting, argument or option that takes the value, or with "not available".
"""

TITLES = {"trl": "TRL", "verl": "verl", "prime-rl": "prime-rl", "areal": "AReaL", "skyrl": "SkyRL"}
WITH_PAGE = ("trl", "verl")


def translate(name: str) -> str | None:
    """Returns a sentence about a setting that another trainer has, such as optim.lr; else None.

    verl's names have many parts, of which users remember the last ones. So the last parts of `name`
    count: the longest ending with a single entry.

    >>> translate("loss.delta")
    "TRL's delta is loss.overrides.dual_clip, as in recipe grpo_two_sided"
    """
    parts = name.split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        for trainer, headings in NAMES_OF_TRAINERS.items():
            texts: dict[str, str] = {}  # text -> name there: the same text may have several names
            for entries in headings.values():
                for other_name, text in entries.items():
                    if f".{other_name}".endswith(f".{ending}"):
                        texts.setdefault(text, other_name)
            if len(texts) == 1:
                text, other_name = texts.popitem()
                return f"{TITLES[trainer]}'s {other_name} is {text.replace('`', '')}"
    return None
