"""LoRA: low-rank adapters beside the linear layers of a decoder, and their files, which PEFT and vLLM load.

A starts at random numbers keyed by (seed, "lora", name), uniform between ±1/√inputs as PEFT's, and B at 0: π_0 is the
model itself, to the bit. Adapters have no dropout: engine and trainer would compute two policies.

PEFT (extra `lora`) writes and reads adapter_config.json; adapter_model.safetensors has the weights under PEFT's names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lagrpo.errors import one_line_errors
from lagrpo.model.adapters import A, AdaptedLinear, B, adapted
from lagrpo.model.embedded import ADAPTER_CONFIG, is_adapter
from lagrpo.rng import uniforms

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names
ALL = "all-linear"
PLAIN_STARTS = (
    True,
    False,
    "gaussian",
    "orthogonal",
)  # with others (pissa, olora …) PEFT changes the model's weights too


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of rank r, scaled by alpha / r, beside the linear layers of these names; "all-linear": all of the
    decoder's layers. `seed` keys their random start."""

    r: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)
    seed: int = 0


def check_installed() -> None:
    """Raise ValueError if PEFT is not installed; does not load it."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters need the package peft: pip install 'lagrpo[lora]'")


def find_targets(lm: Any, lora: Lora) -> dict[str, nn.Linear]:
    """The layers that get adapters, by name: a target is the end of a name, as PEFT reads it. Raises ValueError for a
    target that is not the name of a linear layer of the decoder."""
    layers = getattr(lm.get_decoder(), "layers", None)
    within = {id(module) for module in layers.modules()} if isinstance(layers, nn.ModuleList) else set()
    linear = {name: m for name, m in lm.named_modules() if isinstance(m, nn.Linear) and id(m) in within}
    by_target = {target: {n for n in linear if n == target or n.endswith(f".{target}")} for target in lora.targets}
    by_target |= {ALL: {*linear}} if ALL in lora.targets else {}
    for target, names in by_target.items():
        if not names:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none that can have an adapter"
            raise ValueError(f"targets: {target!r} is not a linear layer of this model's decoder; it has {known}")
    chosen = set[str]().union(*by_target.values())
    return {name: m for name, m in linear.items() if name in chosen}


def count_parameters(lm: Any, lora: Lora) -> int:
    """How many numbers the adapters of a model will have."""
    return sum(lora.r * (m.in_features + m.out_features) for m in find_targets(lm, lora).values())


def count_of_adapters(lm: Any) -> int:
    """How many numbers the adapters of a model have."""
    return sum(m.lora_A.numel() + m.lora_B.numel() for m in adapted(lm).values())


@torch.no_grad()
def attach_lora(lm: Any, lora: Lora) -> None:
    """Put adapters beside the layers of a model of transformers, and freeze everything else. Raises as
    `find_targets`."""
    found = find_targets(lm, lora)
    lm.requires_grad_(False)
    for name, linear in found.items():
        made = AdaptedLinear(linear, lora.r, lora.alpha / lora.r)
        numbers = torch.from_numpy(uniforms(made.lora_A.numel(), lora.seed, "lora", f"{name}.{A}"))
        made.lora_A.copy_((2 * numbers.view(made.lora_A.shape) - 1) / linear.in_features**0.5)
        parent, _, own = name.rpartition(".")
        setattr(lm.get_submodule(parent), own, made.train(linear.training))


@torch.no_grad()
def merge_weights(lm: Any, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes the same up to rounding: W + s B A in float32, rounded to
    the dtype of W once, which loses what is below half a spacing of W. `weights` stand in for the model's own."""
    found = dict(lm.state_dict() if weights is None else weights)
    for name, m in adapted(lm).items():
        weight, low, high = (found.pop(f"{name}.{part}") for part in ("weight", A, B))
        delta = high.float() @ low.float()
        found[f"{name}.weight"] = torch.add(weight.float(), delta, alpha=m.scale).to(weight.dtype)
    return found


def save_merged(lm: Any, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the Hugging Face model directory of `merge_weights`, without a tokenizer."""
    lm.save_pretrained(directory, state_dict=merge_weights(lm, weights))


# Files


def save_adapter(lm: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write `weights`, of the adapters of `lm` by their names in it, with PEFT's config."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    layers, name = adapted(lm), Path(lm.name_or_path)
    first = next(iter(layers.values()))
    r = first.lora_A.shape[0]
    alpha: Any = first.scale * r
    config: Any = LoraConfig(
        r=r, lora_alpha=int(alpha) if alpha == int(alpha) else alpha, lora_dropout=0.0, bias="none",
        target_modules=[layer.rpartition(".")[2] for layer in layers], task_type="CAUSAL_LM",
        base_model_name_or_path=str(name.absolute()) if name.is_dir() else lm.name_or_path, inference_mode=True,
    )  # fmt: skip
    config.target_modules = sorted({*config.target_modules})  # PEFT's own set has another order in each process
    config.save_pretrained(directory)
    save_file(peft_weights(weights), directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def peft_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of adapters by their names in the model, on the CPU and under PEFT's names."""
    return {f"{PREFIX}{name}.weight": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def load_adapter_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of a directory by their names in the model. Raises ValueError for a file that cannot be read."""
    from safetensors.torch import load_file

    with one_line_errors(f"{directory / ADAPTER_WEIGHTS} cannot be read"):
        found = load_file(directory / ADAPTER_WEIGHTS)
    return {name.removeprefix(PREFIX).removesuffix(".weight"): tensor for name, tensor in found.items()}


def name_layers(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The linear layers that adapters are beside, from the names of the adapters' weights."""
    return tuple(sorted({name.rpartition(".lora_")[0] for name in weights}))


def load_adapter_config(directory: Path) -> tuple[Lora, str]:
    """The adapters that a directory describes, and the name or directory of their model. Raises ValueError for kinds of
    adapters that are not plain LoRA."""
    check_installed()
    from peft import PeftConfig

    place = directory / ADAPTER_CONFIG
    with one_line_errors(f"{place} cannot be read"):
        config: Any = PeftConfig.from_pretrained(str(directory))
    check_plain(config, place)
    base, of = config.base_model_name_or_path, config.target_modules
    if not base or is_adapter(base):
        raise ValueError(f"{place}: base_model_name_or_path is {base!r}, which is not a model")
    return Lora(config.r, config.lora_alpha, (of,) if isinstance(of, str) else tuple(sorted(of))), base


def check_plain(config: Any, place: Path) -> None:
    """Raise ValueError for adapters that compute something else than plain LoRA."""
    extras = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication")
    extras += ("alora_invocation_tokens", "use_qalora")
    differs = {
        "peft_type": str(getattr(config.peft_type, "value", config.peft_type)) != "LORA",
        "init_lora_weights": getattr(config, "init_lora_weights", True) not in PLAIN_STARTS,
        "bias": getattr(config, "bias", "none") != "none",
        "target_modules": not config.target_modules,
        **{name: getattr(config, name, None) for name in extras},
    }
    for name, odd in differs.items():
        if odd:
            raise ValueError(f"{place}: {name} is {getattr(config, name)!r}: lagrpo reads plain LoRA alone")
