"""The JSON files of a model directory, read before anything is built from them.

They come from strangers: every number that decides how much is built is bounded here, and every name that transformers
looks up is looked up first, so a config with 10^9 layers is one line of error and neither hangs nor fills the memory.
transformers reads what these checks let through; whatever it then raises is one line too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lagrpo.errors import visible
from lagrpo.untrusted import read_text

CONFIG, GENERATION = "config.json", "generation_config.json"
SIDES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**20),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "vocab_size"), 2**24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 2**32),
}
"""Sizes that are sides of weights, and the largest that is believed."""
LARGEST = {
    **SIDES,
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads"), 2**14),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "head_dim"), 2**14),
    "num_labels": 2**20,
}
"""All sizes and the largest that is believed: beyond any model there is, and quickly built without storage."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
ROPES = ("rope_parameters", "rope_scaling")
ROPE_NUMBERS = ("rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings")
ROPE_NUMBERS += ("low_freq_factor", "high_freq_factor")
DTYPES = ("float64", "float32", "float16", "bfloat16", "auto")
IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


@contextmanager
def blaming(what: str) -> Iterator[None]:
    """Whatever transformers raises inside becomes a ValueError of one line that begins with `what`."""
    try:
        yield
    except Exception as error:  # KeyError, AssertionError, …: the library does not say which it raises
        said = visible(" ".join(str(error).split())[:300])
        raise ValueError(f"{what}: {said or type(error).__name__}") from error


def file_of(path: str, name: str, needed: bool = False) -> Path | None:
    """The file of that name in a model directory, or of a model on the hub (downloaded if need be); None where there is
    none. Raises OSError where there is no such model, the hub cannot be reached, or a needed file is missing."""
    from transformers.utils.hub import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=needed)
    return Path(found) if found is not None else None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError for anything else."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} is a {type(content).__name__}, not an object with fields")
    return content


def read_config(path: str) -> Any:
    """transformers' config of a model. Raises ValueError for a field of config.json that makes no sense, by file and
    name, OSError where there is none."""
    from transformers import AutoConfig, GenerationConfig

    check_plain(Path(path))
    file = file_of(path, CONFIG, needed=True)
    assert file is not None
    check_fields(read_object(file))
    with blaming(CONFIG):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    check_ids(CONFIG, {name: getattr(text, name, None) for name in IDS}, text.vocab_size)
    if (generation := file_of(path, GENERATION)) is not None:
        check_ids(GENERATION, read_object(generation), text.vocab_size)
        with blaming(GENERATION):
            GenerationConfig.from_pretrained(path)
    return config


def check_plain(directory: Path) -> None:
    """Raise ValueError for pipes and devices in a model directory: who reads them may wait for ever."""
    for file in directory.iterdir() if directory.is_dir() else ():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ValueError(f"{file.name} is a pipe or a device, not a file")


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise ValueError for the first field of config.json that cannot be so."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        code = "; the code that it brings (auto_map) is never run" if "auto_map" in config else ""
        raise ValueError(f"{CONFIG}: model_type = {kind!r:.80} is no causal language model of transformers{code}")
    for name, value in _fields(config):
        check = _CHECKS.get(name) if value is not None else None
        if check is not None and (reason := check(name, value)):
            raise ValueError(f"{CONFIG}: {name} = {value!r:.80} is {reason}")
    text = config.get("text_config") or config
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise ValueError(f"{CONFIG}: num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")


def check_ids(file: str, ids: Mapping[str, Any], vocabulary: int) -> None:
    """Raise ValueError for ids of special tokens that no token of the vocabulary has; a pad_token_id of -1 is none."""
    for name in IDS:
        given = ids.get(name)
        for value in given if isinstance(given, list) else [given]:
            if value is None or (name == "pad_token_id" and value == -1):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{file}: {name} = {value!r:.80} is no token id, which is a whole number")
            if not 0 <= value < vocabulary:
                raise ValueError(f"{file}: {name} = {value} is no token of a vocabulary of vocab_size = {vocabulary}")


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a config and of the configs in it; the fields of a rope by their path (by layer type or not)."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, Mapping) and name in ROPES:
            for parameters in (value, *(inner for inner in value.values() if isinstance(inner, Mapping))):
                yield from ((f"{name}.{inner}", number) for inner, number in parameters.items())
        elif isinstance(value, Mapping) and name.endswith("_config"):
            yield from _fields(value)


def _size(name: str, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return "no whole number"
    return None if 1 <= value <= LARGEST[name] else f"not from 1 to {LARGEST[name]}"


def _number(_: str, value: Any, below: float = math.inf) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "no number"
    return None if 0 < value < below else f"not above 0 and below {below:g}"


def _activation(_: str, value: Any) -> str | None:
    from transformers.activations import ACT2FN

    return None if isinstance(value, str) and value in ACT2FN else "not an activation that transformers has"


def _rope_type(_: str, value: Any) -> str | None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = dict.fromkeys(("default", *ROPE_INIT_FUNCTIONS))
    return None if isinstance(value, str) and value in known else f"not one of {', '.join(known)}"


def _quantized(name: str, value: Any) -> NoReturn:
    method = value.get("quant_method") if isinstance(value, Mapping) else value
    raise ValueError(
        f"{CONFIG}: {name} (quant_method {method!r:.40}): quantized weights cannot be trained here; use the checkpoint "
        "that they were made from"
    )


# What is wrong with the value of a field, if anything.
_CHECKS: dict[str, Callable[[str, Any], str | None]] = {
    **dict.fromkeys(LARGEST, _size),
    **dict.fromkeys(EPSILONS, partial(_number, below=1.0)),
    **dict.fromkeys((f"{rope}.{name}" for rope in ROPES for name in ROPE_NUMBERS), _number),
    **dict.fromkeys((f"{rope}.{name}" for rope in ROPES for name in ("rope_type", "type")), _rope_type),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), _number),
    **dict.fromkeys(IDS, lambda name, value: check_ids(CONFIG, {name: value}, LARGEST["vocab_size"])),
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys(
        ("torch_dtype", "dtype"), lambda _, value: None if value in DTYPES else f"not one of {', '.join(DTYPES)}"
    ),
    **dict.fromkeys((*ROPES, "text_config"), lambda _, value: None if isinstance(value, Mapping) else "no object"),
    **dict.fromkeys(("quantization_config", "compression_config"), _quantized),
}
