"""Model directories that lagrpo writes: the files of the source, with what training changed.

transformers 5 writes other files than it reads: config.json without `rope_theta`, a rebuilt
tokenizer.json, and classes that older versions lack. Programs with an older transformers would
compute something else from them without an error.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lagrpo.errors import parse_json
from lagrpo.model.directory import GENERATION_CONFIG, naming_damage

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    TEMPLATE,
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)

Json = dict[str, Any]


def find_source(model: str, file: str) -> Path | None:
    """Returns the path of a file of a model; None if it is not there.

    `model` is a directory, or a hub id, whose copy in the cache is meant.
    """
    if not model:  # a model that was made in memory
        return None
    path = Path(model)
    if path.is_dir():
        return path / file if (path / file).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, file)
    except HFValidationError:  # a directory that has been removed
        return None
    return Path(cached) if isinstance(cached, str) else None


def load_tokenizer(model: str) -> Any:
    """Returns the tokenizer of a directory or hub id. Raises ValueError.

    If there is a tokenizer.json, it is the tokenizer of that file: some of the classes that
    AutoTokenizer picks take only the vocabulary from it, and split texts in their own way.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = None
    with naming_damage(model, "the tokenizer cannot be read"):
        # Also downloads the files of a hub id, tokenizer.json included.
        if find_source(model, TOKENIZER) is None:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if find_source(model, TOKENIZER) is not None:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
    return tokenizer


def save_model(lm: Any, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes a model's weights, or `weights` in their place, and its configs.

    The configs are the ones of the source.
    """
    lm.save_pretrained(directory, state_dict=weights)
    saved_config = read_json(directory / CONFIG)
    config = saved_config
    source_config = find_source(lm.name_or_path, CONFIG)
    if source_config is not None:
        config = read_json(source_config)
        # The two entries that are about the weights as they are saved.
        config["architectures"] = saved_config["architectures"]
        dtype_key = "dtype" if "dtype" in config else "torch_dtype"
        config[dtype_key] = saved_config["dtype"]
    write_json(directory / CONFIG, with_rope_theta(config))
    source_generation_config = find_source(lm.name_or_path, GENERATION_CONFIG)
    if source_generation_config is not None:
        shutil.copyfile(source_generation_config, directory / GENERATION_CONFIG)


def save_ends(directory: Path, eos_ids: Collection[int]) -> None:
    """Writes the ids that end a completion into the generation config of a saved model.

    Training also ends completions where the chat template ends a turn, which the source's config
    may lack. Other programs would generate beyond it. A directory with only an adapter has no
    generation config.
    """
    path = directory / GENERATION_CONFIG
    if not path.is_file():
        return
    config = read_json(path)
    ids = config.get("eos_token_id")
    known_ids = ids if isinstance(ids, list) else [ids]
    if set(eos_ids) - set(known_ids):
        write_json(path, config | {"eos_token_id": sorted(eos_ids)})


def with_rope_theta(config: Json) -> Json:
    """Returns a config that also has the names that transformers before 5 reads.

    They are the names of the rotary embedding's settings.
    """
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        return config
    older: Json = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return older | config


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Writes the files of the tokenizer's source, and the chat template if it has been replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    source_config = find_source(tokenizer.name_or_path, TOKENIZER_CONFIG)
    if source_config is None:
        tokenizer.save_pretrained(directory)
        return
    source_directory = source_config.parent
    for pattern in TOKENIZER_FILES:
        for source in source_directory.glob(pattern):
            target = directory / source.relative_to(source_directory)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)

    config = read_json(directory / TOKENIZER_CONFIG)
    new_config = with_older_names(config)
    template = tokenizer.chat_template
    if isinstance(template, str) and template != tokenizer.init_kwargs.get("chat_template"):
        (directory / TEMPLATE).write_text(template, encoding="utf-8")
        new_config.pop("chat_template", None)
    if new_config != config:
        write_json(directory / TOKENIZER_CONFIG, new_config)


def with_older_names(config: Json) -> Json:
    """Returns a copy of a tokenizer's config without names that transformers before 5 lacks."""
    config = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    # Before 5 this name was for a table.
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def read_json(path: Path) -> Json:
    """Returns the content of a JSON file in UTF-8."""
    return parse_json(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Json) -> None:
    """Writes a JSON file in UTF-8, indented by two spaces, with a newline at its end."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
