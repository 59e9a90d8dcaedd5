"""The weights of a model directory, matched with its config before one of them is read.

The names and shapes stand in the headers of the safetensors files. transformers itself matches them with the model of
the config, on a device without storage, so what it renames, joins, ties or ignores is so here; what it would make up at
random for want of a weight is refused by name. Nothing is ever unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lagrpo.model.configs import CONFIG, SIDES, blaming, file_of, read_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMED = 3  # names that an error gives
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.\d+\.")


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a safetensors file says of a weight: the file's name, the shape, the dtype in its spelling."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def model_class(config: Any) -> Any:
    """The class of transformers that computes the model of a config."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]


def read_tokenizer(path: str, config: Any) -> Any:
    """The tokenizer. Raises ValueError where it cannot be read, or ends with a token that the model does not know."""
    from transformers import AutoTokenizer

    with blaming("the tokenizer (tokenizer.json, tokenizer_config.json) cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer("1")  # reads model_max_length
    ends, vocabulary = tokenizer.eos_token_id, config.get_text_config().vocab_size
    if ends is not None and not 0 <= ends < vocabulary:
        raise ValueError(
            f"tokenizer_config.json: eos_token = {tokenizer.eos_token!r:.80} has the id {ends}, which is no token of "
            f"a vocabulary of vocab_size = {vocabulary}"
        )
    return tokenizer


def read_headers(path: str, config: Any) -> dict[str, Header]:
    """Name -> header of every weight. Raises ValueError where files are missing, damaged or pickled."""
    if getattr(config, "transformers_weights", None) is not None:
        raise ValueError(f"{CONFIG}: transformers_weights is set; weights are read from {WEIGHTS} or {INDEX} only")
    if (whole := file_of(path, WEIGHTS)) is not None:
        return _headers_of(whole)
    if (index := file_of(path, INDEX)) is not None:
        content = read_object(index)
        if not isinstance(content.get("metadata"), Mapping):  # transformers reads it
            raise ValueError(f"{INDEX}: metadata is no object")
        return _indexed(path, content.get("weight_map"))
    for name in PICKLED:
        if file_of(path, name) is not None:
            raise ValueError(
                f"{name} is no safetensors file, and lagrpo does not unpickle weights, as that may run code: have "
                f"transformers convert them (save_pretrained writes {WEIGHTS})"
            )
    raise ValueError(f"there is neither {WEIGHTS} nor {INDEX}")


def _indexed(path: str, weight_map: Any) -> dict[str, Header]:
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{INDEX}: weight_map is no object of names and files")
    shards: dict[str, dict[str, Header]] = {}
    for weight, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{INDEX}: weight_map: {weight} is in {shard!r:.80}, no name of a .safetensors file")
        if shard not in shards:
            if (file := file_of(path, shard)) is None:
                raise ValueError(f"{INDEX}: weight_map: {shard}, which has {weight}, is not there")
            shards[shard] = _headers_of(file)
        if weight not in shards[shard]:
            raise ValueError(f"{INDEX}: weight_map: {shard} lacks {weight}")
    return {name: header for headers in shards.values() for name, header in headers.items()}


def _headers_of(file: Path) -> dict[str, Header]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - no mapping
            return {n: Header(file.name, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file.name}: {error}") from error


def match_weights(config: Any, headers: Mapping[str, Header]) -> None:
    """Raise ValueError, by name, for weights missing, unexpected, of another shape, or of no floating dtype."""
    shown = {n: torch.empty(h.shape, dtype=FLOATS.get(h.dtype), device="meta") for n, h in headers.items()}
    options = {"device_map": {"": "meta"}, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with blaming(f"{CONFIG}: transformers cannot build a model of it"):
        model, found = model_class(config).from_pretrained(None, config=config, state_dict=shown, **options)
    files = {header.file for header in headers.values()}
    where = files.pop() if len(files) == 1 else INDEX
    if wrong := sorted(found["mismatched_keys"]):
        name, has, needs = wrong[0]
        raise ValueError(
            f"{where}: {_weights(len(wrong))} not of the shape that {CONFIG} says"
            f"{_having(config, set(needs) - set(has))}: {name} is {list(has)}, not {list(needs)}"
        )
    for key, verb, says in (("missing_keys", "lacks", "says"), ("unexpected_keys", "has", "does not say")):
        if names := found[key]:
            raise ValueError(f"{where} {verb} {_weights(len(names))} that {CONFIG} {says}{_named(names, config)}")
    for name in headers.keys() & {name for name, _ in model.named_parameters()}:
        if headers[name].dtype not in FLOATS:
            raise ValueError(f"{headers[name].file}: {name} is of dtype {headers[name].dtype}, not {', '.join(FLOATS)}")


def _weights(count: int) -> str:
    return f"{count} weight{'s' if count > 1 else ''}"


def _named(names: Iterable[str], config: Any) -> str:
    """The first of the names, after the field that decides about them where all are of layers."""
    ordered = sorted(names, key=lambda name: re.sub("[0-9]+", lambda digits: digits[0].zfill(9), name))
    layers = f" (num_hidden_layers = {config.get_text_config().num_hidden_layers})"
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return f"{layers if all(map(_LAYER.search, ordered)) else ''}: {', '.join(ordered[:NAMED])}{more}"


def _having(config: Any, sizes: set[int]) -> str:
    """The fields of the config that are sides of weights and have one of these sizes."""
    text = config.get_text_config()
    fields = [f"{name} = {value}" for name in SIDES if (value := getattr(text, name, None)) in sizes]
    return f" ({', '.join(fields)})" if fields else ""
