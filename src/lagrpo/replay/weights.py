"""The versions of a run that are on disk, each as a plain model of transformers.

Weights are rounded to the run's dtype, as the run had them, and computed with in float32: measured against bfloat16
arithmetic of transformers, that lies closer to the distributions that a bfloat16 run sampled from, since only one of
the two sides then rounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lagrpo import hub
from lagrpo.model.embedded import ALIASES, resolve_model
from lagrpo.replay.findings import UnreadableError
from lagrpo.replay.source import Source
from lagrpo.untrusted import read_text


class Weights:
    """Where the weights of each version are (`directories`); at most one model is in memory. Version 0 is the model of
    the settings, found from the directory that the run was started in (`absent` says why it was not found); weights/
    has the others."""

    def __init__(self, source: Source) -> None:
        settings = source.settings
        self.directories: dict[int, str] = {}
        self.absent = ""
        try:
            self.directories[0] = _base(source)
        except OSError as error:
            self.absent = str(error)
        for folder in sorted((source.path / "weights").glob("v[0-9]*")):
            if folder.name[1:].isdigit():
                self.directories[int(folder.name[1:])] = str(folder)
        final = source.path / "weights" / "final"
        after = next((summary.get("version") for summary in source.evaluations if summary["name"] == "after"), None)
        if final.is_dir() and after is not None:
            self.directories.setdefault(after, str(final))
        template = settings.model.chat_template
        self.chat_template = _seen_from(source, template).read_text("utf-8") if template else None
        self.dtype: torch.dtype = getattr(torch, source.dtype)
        self._loaded: tuple[int, Any] | None = None

    def tokenizer(self) -> tuple[Any, set[int]]:
        """The tokenizer of the run, and the ids that end a completion: the generation config's and the tokenizer's.
        Raises OSError where there is none on disk."""
        from transformers import AutoTokenizer, GenerationConfig

        if not self.directories:
            raise OSError(self.absent)
        directory = next(iter(self.directories.values()))
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = self.chat_template or tokenizer.chat_template
        configured = GenerationConfig.from_pretrained(directory).eos_token_id
        ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list | tuple) else [configured])]
        return tokenizer, {int(i) for i in ids if i is not None}

    @torch.no_grad()
    def scaled_logits(self, version: int, prompt_ids: list[int], token_ids: list[int], tau: float) -> Tensor:
        """logits / tau at the place of each completion token, float32 [t, V]: one sequence, without a cache."""
        sequence = torch.tensor([[*prompt_ids, *token_ids]])
        logits = self._model(version)(input_ids=sequence, use_cache=False, logits_to_keep=len(token_ids) + 1).logits
        return logits[0, :-1] / tau

    def _model(self, version: int) -> Any:
        if self._loaded is None or self._loaded[0] != version:
            self._loaded = None  # frees the last one first
            self._loaded = (version, _load(self.directories[version], self.dtype))
        return self._loaded[1]


def _load(directory: str, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    adapter = (Path(directory) / "adapter_config.json").is_file()
    try:
        named = (
            json.loads(read_text(Path(directory) / "adapter_config.json"))["base_model_name_or_path"] if adapter else ""
        )
        model: Any = AutoModelForCausalLM.from_pretrained(named or directory, dtype=dtype, attn_implementation="eager")
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, directory)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UnreadableError(f"{directory} is no whole model directory: {_first_line(error)}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.float().eval()


def _base(source: Source) -> str:
    """The directory or hub id of version 0. Raises OSError where it cannot be found."""
    name = source.settings.model.path
    path = _seen_from(source, name)
    directory = resolve_model(name) if name in ALIASES else str(path) if path.is_dir() else name
    from transformers import AutoConfig

    hub.limit_waits()
    try:
        AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise OSError(f"model.path = {name!r} is not at hand: {_first_line(error)}") from error
    return directory


def _seen_from(source: Source, name: str) -> Path:
    """A path of the settings, relative to the directory that the run was started in."""
    return Path(source.environment.get("directory") or ".") / Path(name).expanduser()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
