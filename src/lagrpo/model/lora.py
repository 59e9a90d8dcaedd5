"""Adapters beside the linear layers of a decoder: where they go, where they start, how many numbers they have.

A starts at draws addressed by (seed, "lora", name), uniform between ±1/√inputs as PEFT's, and B at 0: π_0 is the model
itself, to the bit. A dropout in front of the adapters is not there: sampler and learner would be two policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.backends.adapters import A, AdaptedLinear, B, adapted
from lagrpo.model.adapter_files import Lora
from lagrpo.rng import uniforms

ALL = "all-linear"


def targets(lm: Any, lora: Lora) -> dict[str, nn.Linear]:
    """The layers that get adapters, by name: a target is the end of a name, as PEFT reads it. Raises ValueError for a
    target that no linear layer of the decoder is called by."""
    layers = getattr(lm.get_decoder(), "layers", None)
    within = {id(module) for module in layers.modules()} if isinstance(layers, nn.ModuleList) else set()
    linear = {name: m for name, m in lm.named_modules() if isinstance(m, nn.Linear) and id(m) in within}
    known = {name.rpartition(".")[2] for name in linear}
    by_target = {target: {n for n in linear if n == target or n.endswith(f".{target}")} for target in lora.targets}
    by_target |= {ALL: {*linear}} if ALL in lora.targets else {}
    if unknown := sorted(target for target, names in by_target.items() if not names):
        raise ValueError(
            f"targets: {unknown[0]!r} is no linear layer of this model's decoder; it has "
            f"{', '.join(sorted(known)) or 'none that can have an adapter'}"
        )
    chosen = set[str]().union(*by_target.values())
    found = {name: m for name, m in linear.items() if name in chosen}
    if not found:
        raise ValueError("targets: this model's decoder has no linear layers that can have an adapter")
    return found


def count_parameters(lm: Any, lora: Lora) -> int:
    """How many numbers the adapters of a model have."""
    return sum(lora.r * (m.in_features + m.out_features) for m in targets(lm, lora).values())


@torch.no_grad()
def attach(lm: Any, lora: Lora) -> None:
    """Put adapters beside the layers of a model of transformers, and freeze all else. Raises as `targets`."""
    found = targets(lm, lora)
    lm.requires_grad_(False)
    for name, linear in found.items():
        made = AdaptedLinear(linear, lora.r, lora.alpha / lora.r)
        numbers = torch.from_numpy(uniforms(made.lora_A.numel(), lora.seed, "lora", f"{name}.{A}")).view(
            made.lora_A.shape
        )
        made.lora_A.copy_((2 * numbers - 1) / linear.in_features**0.5)
        parent, _, own = name.rpartition(".")
        setattr(lm.get_submodule(parent), own, made.train(linear.training))


@torch.no_grad()
def merged(lm: Any, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes the same up to rounding: W + s B A in float32, rounded to
    the dtype of W once. What of s B A is below half a spacing of W is lost there. `weights`: those of the model, where
    it does not have them itself."""
    found = dict(lm.state_dict() if weights is None else weights)
    for name, m in adapted(lm).items():
        weight, low, high = (found.pop(f"{name}.{part}") for part in ("weight", A, B))
        delta = high.float() @ low.float()
        found[f"{name}.weight"] = torch.add(weight.float(), delta, alpha=m.scale).to(weight.dtype)
    return found


def save_merged(lm: Any, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the Hugging Face model directory of `merged`, without a tokenizer."""
    lm.save_pretrained(directory, state_dict=merged(lm, weights))


def count_of_adapters(lm: Any) -> int:
    """How many numbers the adapters that a model has have."""
    return sum(m.lora_A.numel() + m.lora_B.numel() for m in adapted(lm).values())
