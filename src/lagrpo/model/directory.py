"""The files of a model directory, checked without loading the model.

Libraries say "header too large" of a file that is not a model, and do not name it. These checks do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lagrpo.errors import check_is_pulled, describe_error, parse_json, parse_json_object

# transformers ignores a damaged one without a word.
GENERATION_CONFIG = "generation_config.json"
WHOLE_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
WEIGHTS = ("model*.safetensors", "adapter_model.safetensors")
TEXTS = ("*.json", "*.jinja")
PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.*")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
)
AGAIN = "copy or download it again"


def check_directory(directory: Path) -> None:
    """Raises ValueError for files of the model that are Git LFS pointers.

    Files that are never read may be pointers. Also raises it for weights that are only there as
    pickles, if the generation config is damaged, and for a config with sizes that are too large
    for the weights.
    """
    patterns = [*WEIGHTS, *TEXTS]
    if not (directory / "tokenizer.json").exists():
        patterns.append("tokenizer.model")
    for file in _files(directory, *patterns):
        check_is_pulled(file)
    _check_not_pickled(directory, *WEIGHTS)
    if (directory / "adapter_config.json").is_file():
        # transformers falls back to a pickled adapter, even with use_safetensors.
        _check_not_pickled(directory, "adapter_model.safetensors")
    _check_text(directory / GENERATION_CONFIG)
    _check_sizes(directory)


def has_whole_weights(directory: Path) -> bool:
    """True if a directory has the weights of a model, not only of an adapter."""
    return any(_files(directory, *WHOLE_WEIGHTS))


@contextmanager
def naming_damage(directory: str | Path, what: str) -> Iterator[None]:
    """Turns any exception inside into a ValueError of one line.

    It names the file of the directory that is missing or damaged, and the advice. If no file is, it
    has `what` and the exception.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{directory} brings its own code (auto_map in its config), which lagrpo does "
                "not run: use a model whose code is in transformers"
            ) from error
        if Path(directory).is_dir():
            check_whole(Path(directory))
        raise ValueError(f"{what}: {describe_error(error)}") from error


def check_whole(directory: Path) -> None:
    """Raises ValueError for the first file of a model directory that is missing or damaged."""
    for file in _files(directory, *TEXTS):
        _check_text(file)
    check_weights(directory)
    if not any(_files(directory, *TOKENIZERS)):
        raise ValueError(f"{directory} has no tokenizer.json: copy it from the model's source")


def check_weights(directory: Path) -> None:
    """Raises ValueError for files of weights that are missing or damaged."""
    weights = list(_files(directory, *WEIGHTS))
    if not weights:
        _check_not_pickled(directory, *WEIGHTS)
        raise ValueError(f"{directory} has no model.safetensors: {AGAIN}")
    for file in weights:
        _check_safetensors(file)
    _check_shards(directory)


def _check_not_pickled(directory: Path, *weights: str) -> None:
    """Raises ValueError if the directory has pickled weights instead of these safetensors."""
    pickled = next(_files(directory, *PICKLED_WEIGHTS), None)
    if pickled is not None and not any(_files(directory, *weights)):
        raise ValueError(
            f"{pickled} has pickled weights, which lagrpo does not load: "
            "save the model with safetensors"
        )


def _check_shards(directory: Path) -> None:
    """Raises ValueError if a file of weights is missing that the index names."""
    index = directory / "model.safetensors.index.json"
    # transformers reads a whole file rather than shards.
    if not index.exists() or (directory / "model.safetensors").exists():
        return
    shard_of_weight = parse_json_object(index.read_bytes()).get("weight_map")
    if not isinstance(shard_of_weight, dict):
        raise ValueError(f"{index} has no weight_map: {AGAIN}")
    for shard in sorted(set(shard_of_weight.values())):
        if not (directory / shard).exists():
            raise ValueError(f"{directory / shard}, which {index.name} names, is missing: {AGAIN}")


def _check_sizes(directory: Path) -> None:
    """Raises ValueError for sizes in config.json that no model with these weights has.

    Such a model would take forever to build, or fill the memory.
    """
    config = directory / "config.json"
    shapes = _weight_shapes(directory)
    if not config.is_file() or not shapes:
        return
    try:
        entries = parse_json_object(config.read_bytes())
    except ValueError:  # loading the model names the damage
        return
    num_tensors = len(shapes)
    limits = dict.fromkeys(LAYER_COUNTS, num_tensors)
    limits |= dict.fromkeys(SIZES, max(num_tensors, *map(math.prod, shapes)))
    for section in (entries, entries.get("text_config")):
        if not isinstance(section, dict):
            continue
        for name, limit in limits.items():
            size = section.get(name)
            if isinstance(size, int) and size > limit:
                check_whole(directory)  # a missing file is the better reason
                raise ValueError(f"{config}: {name} = {size} is too large for its weights: {AGAIN}")


def _weight_shapes(directory: Path) -> list[list[int]]:
    """Returns the shapes of a model's weights, leaving out damaged files."""
    from safetensors import SafetensorError, safe_open

    shapes: list[list[int]] = []
    for file in _files(directory, WEIGHTS[0]):
        with suppress(SafetensorError), safe_open(file, framework="np") as tensors:
            shapes += [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    return shapes


def _files(directory: Path, *patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        for file in sorted(directory.glob(pattern)):
            if file.is_file():
                yield file


def _check_text(file: Path) -> None:
    """Raises ValueError unless a file is UTF-8, and a JSON object if its name ends in .json."""
    if not file.is_file():
        return
    try:
        text = file.read_text(encoding="utf-8")
        value = parse_json(text) if file.suffix == ".json" else {}
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
