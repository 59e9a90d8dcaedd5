"""LoRA (arXiv:2106.09685): frozen linear layers with low-rank adapters, y = W x + b + s B (A x), and their files.

All copies of a model share W and b, so a version of the policy is A and B alone. A starts at random numbers keyed by
(seed, "lora", name), uniform between ±1/√inputs as PEFT's, and B at 0: π_0 is the model itself, to the bit. Adapters
have no dropout: engine and trainer would compute two policies. The files are those that PEFT and vLLM load:
adapter_config.json, and adapter_model.safetensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.errors import one_line_errors
from lagrpo.model.embedded import ADAPTER_CONFIG
from lagrpo.rng import uniforms

A, B = "lora_A", "lora_B"  # PEFT's names
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names
ALL = "all-linear"
PLAIN: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none",)}
PLAIN["init_lora_weights"] = (
    True,
    False,
    "gaussian",
    "orthogonal",
)  # with others (pissa, olora …) PEFT changes W, too
NOT_PLAIN = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
)
NOT_PLAIN += ("alora_invocation_tokens", "use_qalora")


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of rank r, scaled by alpha / r, for the linear layers of these names; `seed` keys their start."""

    r: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)  # all of the decoder's layers
    seed: int = 0


class AdaptedLinear(nn.Linear):
    """The linear layer given, with an adapter of rank r that starts at 0; `scale` is s."""

    def __init__(self, linear: nn.Linear, r: int, scale: float) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale  # type: ignore[assignment]
        self.lora_A = nn.Parameter(linear.weight.new_zeros(r, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, r))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + F.linear(
            F.linear(input, self.lora_A), self.lora_B * self.scale
        )


def adapted(lm: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers of a model that have adapters, by name."""
    return {
        name: module for name, module in lm.named_modules() if isinstance(module, AdaptedLinear)
    }


def copy_trained(lm: Any) -> Any:
    """A copy of a model that does not learn: of its adapters if it has any, and all else is shared; else of all."""
    shared = {id(p): p for p in lm.parameters() if not p.requires_grad} if adapted(lm) else {}
    return copy.deepcopy(lm, shared).requires_grad_(False)


def find_targets(lm: Any, lora: Lora) -> dict[str, nn.Linear]:
    """The layers that get adapters, by name: a target is the end of a name, as in PEFT. Raises ValueError."""
    layers = getattr(lm.get_decoder(), "layers", None)
    within = (
        {id(module) for module in layers.modules()} if isinstance(layers, nn.ModuleList) else set()
    )
    linear = {
        name: m for name, m in lm.named_modules() if isinstance(m, nn.Linear) and id(m) in within
    }
    chosen = set[str]()
    for target in lora.targets:
        names = {name for name in linear if target == ALL or f".{name}".endswith(f".{target}")}
        if not names:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ValueError(
                f"targets: this model's decoder has no linear layer {target!r}; it has {known}"
            )
        chosen |= names
    return {name: m for name, m in linear.items() if name in chosen}


def count_parameters(lm: Any, lora: Lora) -> int:
    """How many numbers the adapters of a model will have."""
    return sum(lora.r * (m.in_features + m.out_features) for m in find_targets(lm, lora).values())


@torch.no_grad()
def attach_lora(lm: Any, lora: Lora) -> None:
    """Add adapters to the layers of a transformers model, and freeze everything else."""
    found = find_targets(lm, lora)
    lm.requires_grad_(False)
    for name, linear in found.items():
        made = AdaptedLinear(linear, lora.r, lora.alpha / lora.r)
        numbers = torch.from_numpy(uniforms(made.lora_A.numel(), lora.seed, "lora", f"{name}.{A}"))
        made.lora_A.copy_((2 * numbers.view(made.lora_A.shape) - 1) / linear.in_features**0.5)
        parent, _, own = name.rpartition(".")
        setattr(lm.get_submodule(parent), own, made.train(linear.training))


# ---- files ----


def save_adapter(lm: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write `weights`, of the adapters of `lm` by their names in it, and PEFT's config."""
    from safetensors.torch import save_file

    layers, base = adapted(lm), Path(lm.name_or_path)
    first = next(iter(layers.values()))
    r = first.lora_A.shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "base_model_name_or_path": str(base.absolute()) if base.is_dir() else lm.name_or_path,
        "r": r,
        "lora_alpha": first.scale * r,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    given = {
        f"{PREFIX}{name}.weight": tensor.detach().cpu().contiguous()
        for name, tensor in weights.items()
    }
    save_file(given, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of a directory by their names in the model. Raises ValueError for a file that cannot be read."""
    from safetensors.torch import load_file

    with one_line_errors(f"{directory / ADAPTER_WEIGHTS} cannot be read"):
        found = load_file(directory / ADAPTER_WEIGHTS)
    return {
        name.removeprefix(PREFIX).removesuffix(".weight"): tensor for name, tensor in found.items()
    }


def load_adapter_config(directory: Path) -> tuple[Lora, str]:
    """The adapters of a directory, and the name of their model. Raises ValueError if they are not plain LoRA."""
    place = directory / ADAPTER_CONFIG
    with one_line_errors(f"{place} cannot be read"):
        config = json.loads(place.read_text(encoding="utf-8"))
        r, alpha, base = config["r"], config["lora_alpha"], config["base_model_name_or_path"]
    targets = config.get("target_modules")
    odd = [name for name, plain in PLAIN.items() if config.get(name, plain[0]) not in plain]
    odd += [*filter(config.get, NOT_PLAIN), *([] if targets else ["target_modules"])]
    if odd:
        raise ValueError(
            f"{place}: {odd[0]} is {config.get(odd[0])!r}, but lagrpo reads plain LoRA only"
        )
    return Lora(r, alpha, (targets,) if isinstance(targets, str) else tuple(sorted(targets))), base
