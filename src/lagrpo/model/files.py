"""Model directories that lagrpo writes: the files of the source, with what training changed.

transformers 5 writes other files than it reads: config.json without `rope_theta`, a rebuilt tokenizer.json, classes
that older versions lack. Programs with an older transformers would compute something else from them in silence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lagrpo.model.directory import naming_damage

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
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


def find_source(model: str, file: str) -> Path | None:
    """A file of a model directory, or of a hub id's copy in the cache; None if it is not there."""
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
    """The tokenizer of a directory or hub id. Raises ValueError.

    If there is a tokenizer.json, it is what that file describes: some of the classes that AutoTokenizer picks take the
    vocabulary alone from it, and split texts in their own way."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = None
    with naming_damage(model, "the tokenizer cannot be read"):
        if find_source(model, TOKENIZER) is None:
            tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)  # downloads
        if find_source(model, TOKENIZER) is not None:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    return tokenizer


def save_model(lm: Any, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a model's weights (or `weights` in their place), and its configs as the source has them."""
    lm.save_pretrained(directory, state_dict=weights)
    saved_config = read_json(directory / CONFIG)
    config = saved_config
    if source := find_source(lm.name_or_path, CONFIG):
        config = read_json(source)
        config["architectures"] = saved_config["architectures"]
        dtype_key = "dtype" if "dtype" in config else "torch_dtype"
        config[dtype_key] = saved_config["dtype"]
    write_json(directory / CONFIG, with_rope_theta(config))
    if source := find_source(lm.name_or_path, GENERATION_CONFIG):
        shutil.copyfile(source, directory / GENERATION_CONFIG)


def with_rope_theta(config: dict[str, Any]) -> dict[str, Any]:
    """A config that also has the rotary embeddings' settings by the names that transformers before 5 reads."""
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        return config
    older: dict[str, Any] = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return older | config


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write the files of the tokenizer's source, and the chat template if it is another one now."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer_config = find_source(tokenizer.name_or_path, TOKENIZER_CONFIG)
    if tokenizer_config is None:
        tokenizer.save_pretrained(directory)
        return
    for pattern in TOKENIZER_FILES:
        for source in tokenizer_config.parent.glob(pattern):
            target = directory / source.relative_to(tokenizer_config.parent)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
    config = read_json(directory / TOKENIZER_CONFIG)
    changed = with_older_names(config)
    template = tokenizer.chat_template
    if isinstance(template, str) and template != tokenizer.init_kwargs.get("chat_template"):
        (directory / TEMPLATE).write_text(template, encoding="utf-8")
        changed.pop("chat_template", None)
    if changed != config:
        write_json(directory / TOKENIZER_CONFIG, changed)


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tokenizer's config without names that transformers before 5 does not know."""
    config = dict(config)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):  # a table before 5
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
