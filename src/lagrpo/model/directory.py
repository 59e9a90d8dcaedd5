"""The files of a model directory, looked at without loading the model.

Libraries say "header too large" of a file that is no model, and do not name it. These checks do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lagrpo.errors import check_is_pulled, describe_error

GENERATION_CONFIG = "generation_config.json"  # transformers ignores a damaged one without a word
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
TEXTS = ("*.json", "*.jinja")
AGAIN = "copy or download it again"


def check_directory(directory: Path) -> None:
    """Raise ValueError if a file of the model is a Git LFS pointer, or its generation config is damaged. Files that are
    never read may be pointers."""
    patterns = [*WEIGHTS, *TEXTS]
    if not (directory / "tokenizer.json").exists():
        patterns.append("tokenizer.model")
    for file in _files(directory, *patterns):
        check_is_pulled(file)
    _check_text(directory / GENERATION_CONFIG)


@contextmanager
def naming_damage(directory: str | Path, what: str) -> Iterator[None]:
    """Turn any exception inside into a ValueError of one line: the file of the directory that is missing or damaged and
    the cure, or else `what` and the exception."""
    try:
        yield
    except Exception as error:
        if Path(directory).is_dir():
            check_whole(Path(directory))
        raise ValueError(f"{what}: {describe_error(error)}") from error


def check_whole(directory: Path) -> None:
    """Raise ValueError for the first file of a model directory that is missing or damaged."""
    for file in _files(directory, *TEXTS):
        _check_text(file)
    weights = list(_files(directory, *WEIGHTS))
    if not weights:
        pickled = next(_files(directory, "*.bin", "*.pt", "*.pth"), None)
        if pickled is not None:
            raise ValueError(
                f"{pickled} has pickled weights, which lagrpo does not load: "
                "save the model with safetensors"
            )
        raise ValueError(f"{directory} has no model.safetensors: {AGAIN}")
    for file in weights:
        _check_safetensors(file)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_bytes()).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{index} has no weight_map: {AGAIN}")
        for shard in sorted({*shards.values()}):
            if not (directory / shard).exists():
                raise ValueError(
                    f"{directory / shard}, which {index.name} names, is missing: {AGAIN}"
                )
    if not any(_files(directory, "tokenizer.json", "tokenizer.model", "vocab.*")):
        raise ValueError(f"{directory} has no tokenizer.json: copy it from the model's source")


def _files(directory: Path, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        yield from (file for file in sorted(directory.glob(pattern)) if file.is_file())


def _check_text(file: Path) -> None:
    """Raise ValueError for a file that is not UTF-8, or whose name ends in .json and that is not a JSON object."""
    if not file.is_file():
        return
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text) if file.suffix == ".json" else {}
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({describe_error(error)}): {AGAIN}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file} is damaged (a {type(value).__name__}, not a JSON object): {AGAIN}"
        )


def _check_safetensors(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({describe_error(error)}): {AGAIN}") from error
