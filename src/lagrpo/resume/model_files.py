"""The model and the data that a run began with: a change stops a resume.

The files of a model beside its weights decide the forward pass, where a completion ends, and the
text of its tokens. Chat templates are not here: sources.py has their digest, and they count by the
tokens of the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from lagrpo.data.fingerprint import Digests, digest, value_text
from lagrpo.errors import parse_json
from lagrpo.model.directory import GENERATION_CONFIG
from lagrpo.model.embedded import ADAPTER_CONFIG
from lagrpo.model.files import CONFIG, TOKENIZER, TOKENIZER_CONFIG, find_source

ModelFile = Mapping[str, Any]
"""The entries of a file by key. An entry with a long text is a digest of it: LONG, 16 digits."""
ModelFiles = Mapping[str, ModelFile]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The model and the data of a run, by digests: a run that resumes must have the same."""

    model_path: str
    model: str  # the fingerprint of the initial weights
    model_files: ModelFiles  # the entries of the model's other files
    data: Digests
    """the digests of all rows (`places`) and of the prompts that the run visits (`visited`)"""
    teacher: str | None = None  # the fingerprint of the model of loss.reference
    teacher_files: ModelFiles = field(default_factory=dict[str, ModelFile])  # its configs


FILES = (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
)
VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model")
"""Files that are read only if there is no tokenizer.json."""
IGNORED = {
    CONFIG: ("transformers_version", "dtype", "torch_dtype", "use_cache"),  # model.dtype decides
    GENERATION_CONFIG: ("transformers_version", "use_cache"),
    TOKENIZER_CONFIG: ("chat_template", "name_or_path"),
    TOKENIZER: ("truncation", "padding"),
}
"""Keys that change nothing in a run; neither do keys that begin with an underscore."""
LONGEST_TEXT = 200
"""Characters of an entry as JSON, up to which a checkpoint has it as it is."""
LONG = "digest "
MOST_CHANGES = 5
"""Changes that a message names."""


def read_model_files(model: str) -> ModelFiles:
    """Returns the entries of the files of a model, which is a directory or a hub id."""
    has_tokenizer = find_source(model, TOKENIZER) is not None
    names = (*FILES, TOKENIZER) if has_tokenizer else (*FILES, *VOCABULARIES)
    model_files: dict[str, ModelFile] = {}
    for name in names:
        path = find_source(model, name)
        if path is not None:
            model_files[name] = _read_entries(path)
    return model_files


def read_forward_files(model: str) -> ModelFiles:
    """Returns the entries of the files that decide the forward pass of a model or an adapter."""
    paths = {name: find_source(model, name) for name in (CONFIG, ADAPTER_CONFIG)}
    return {name: _read_entries(path) for name, path in paths.items() if path is not None}


def _read_entries(path: Path) -> dict[str, Any]:
    """Returns the entries of a JSON file, or the content of another file as a single entry."""
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    content: Any = parse_json(text) if path.suffix == ".json" else text
    if not isinstance(content, dict):
        return {"content": _shorten(content)}
    table = cast("dict[str, Any]", content)
    ignored = IGNORED.get(path.name, ())
    return {
        key: _shorten(value)
        for key, value in table.items()
        if key not in ignored and not key.startswith("_")
    }


def _shorten(value: Any) -> Any:
    """Returns a value of JSON, or its digest if its text is long."""
    text = value_text(value)
    return value if len(text) <= LONGEST_TEXT else LONG + digest(text)


def check_model_files(before: ModelFiles, now: ModelFiles) -> None:
    """Raises ValueError, with files and keys, if the files of the model have changed."""
    changes: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        old_entries = before.get(name, {})
        new_entries = now.get(name, {})
        for key in sorted(old_entries.keys() | new_entries.keys()):
            was_there = key in old_entries
            # Values are compared, not their texts: 10000 and 10000.0 are equal.
            if was_there != (key in new_entries) or old_entries.get(key) != new_entries.get(key):
                change = f"{_describe(old_entries, key)}, now {_describe(new_entries, key)}"
                changes.append(f"{name}: {key} was {change}")
    if changes:
        more = "" if len(changes) <= MOST_CHANGES else f"; and {len(changes) - MOST_CHANGES} more"
        raise ValueError(
            "the files of the model have changed since the run started: "
            f"{'; '.join(changes[:MOST_CHANGES])}{more}. Restore them, or start a new run"
        )


def _describe(entries: ModelFile, key: str) -> str:
    if key not in entries:
        return "missing"
    value = entries[key]
    return value if str(value).startswith(LONG) else value_text(value)
