"""From an adapter's directory to that of a whole model."""

from __future__ import annotations

from pathlib import Path

import torch

from lagrpo.model.adapter_files import CONFIG, is_adapter
from lagrpo.model.loading import load_model
from lagrpo.model.lora import save_merged


def merge_adapter(adapter: Path, out: Path, dtype: str = "auto") -> None:
    """Write the model of the adapter with the adapter added to its weights, and its tokenizer. The sum is computed in
    float32 and rounded once, to `dtype` ("auto": that of the model's files). Raises ValueError for a directory that is
    no adapter, and one that is there already; as load_policy for a model that cannot be loaded."""
    if not is_adapter(adapter):
        raise ValueError(f"{adapter} is no adapter: it has no {CONFIG}")
    if out.exists():
        raise ValueError(f"{out} is there already: name another directory")
    lm, tokenizer = load_model(str(adapter), "auto" if dtype == "auto" else getattr(torch, dtype))
    save_merged(lm, out)
    tokenizer.save_pretrained(out)
