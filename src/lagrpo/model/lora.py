"""LoRA (arXiv:2106.09685): linear layers with adapters, y = W x + b + s B (A x), and their files.

W and b are frozen. All copies of a model share them, so a version of the policy is A and B alone. A
starts at random numbers keyed by (seed, "lora", name), uniform between ±1/√inputs as PEFT's, and B
at 0: π_0 is the model itself, to the bit. Adapters have no dropout: with it, engine and trainer
would compute two policies. The files are the ones that PEFT and vLLM load: adapter_config.json and
adapter_model.safetensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.errors import one_line_errors, parse_json
from lagrpo.model.embedded import ADAPTER_CONFIG, is_adapter, resolve_model
from lagrpo.rng import uniforms

# PEFT's names of the parameters, in front of them, and of all layers.
A = "lora_A"
B = "lora_B"
PREFIX = "base_model.model."
ALL = "all-linear"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Values of PEFT's config that mean plain LoRA; the first one is PEFT's default. With other
# initializations, such as pissa and olora, PEFT changes W, too.
PLAIN_VALUES: dict[str, tuple[str | bool, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}
# Options of PEFT's config that plain LoRA does not have.
OTHER_OPTIONS = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    # PEFT would import the module that the adapter names.
    "megatron_config",
)


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters for linear layers of a model.

    - `r`: the rank
    - `alpha`: the scale s is alpha / r
    - `targets`: the ends of the names of the layers; ALL for every layer of the decoder
    - `seed`: keys the random numbers that A starts at
    """

    r: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)
    seed: int = 0


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter of rank r, which starts at 0; `scale` is s.

    It shares the weight and the bias of the layer that it is made from.
    """

    def __init__(self, linear: nn.Linear, r: int, scale: float) -> None:
        # On "meta" nothing is allocated for the weight, which is replaced at once.
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight = linear.weight
        self.bias = linear.bias
        self.scale = scale
        self.lora_A = nn.Parameter(linear.weight.new_zeros(r, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, r))

    def forward(self, input: Tensor) -> Tensor:
        # The order of these products is the order in which the input's gradient adds up.
        frozen = super().forward(input)  # [..., outputs]
        low = F.linear(input, self.lora_A)  # [..., r]
        return frozen + F.linear(low, self.lora_B * self.scale)


def adapted(lm: nn.Module) -> dict[str, AdaptedLinear]:
    """Returns the layers of a model that have adapters, by name."""
    return {
        name: module for name, module in lm.named_modules() if isinstance(module, AdaptedLinear)
    }


def copy_trained(lm: Any) -> Any:
    """Returns a copy of a model that does not learn.

    If the model has adapters, only they are copied, and the rest is shared. Else all is copied.
    """
    # deepcopy keeps the objects with these ids.
    shared: dict[int, Any] = {}
    if adapted(lm):
        for parameter in lm.parameters():
            if not parameter.requires_grad:
                shared[id(parameter)] = parameter
    return copy.deepcopy(lm, shared).requires_grad_(requires_grad=False)


def find_targets(lm: Any, lora: Lora) -> dict[str, nn.Linear]:
    """Returns the layers that get adapters, by name.

    A target is the end of a name, as in PEFT. Raises ValueError for a target that no layer has.
    """
    linear_layers = _decoder_linears(lm)
    chosen_names: set[str] = set()
    for target in lora.targets:
        names = {
            name for name in linear_layers if target == ALL or f".{name}".endswith(f".{target}")
        }
        if not names:
            last_parts = {name.rpartition(".")[2] for name in linear_layers}
            available = ", ".join(sorted(last_parts)) or "none"
            raise ValueError(
                f"targets: this model's decoder has no linear layer {target!r}; it has {available}"
            )
        chosen_names |= names
    return {name: layer for name, layer in linear_layers.items() if name in chosen_names}


def _decoder_linears(lm: Any) -> dict[str, nn.Linear]:
    """Returns the linear layers inside a model's decoder layers, by name."""
    layers = getattr(lm.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return {}
    ids_in_layers = {id(module) for module in layers.modules()}
    return {
        name: module
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and id(module) in ids_in_layers
    }


def count_parameters(lm: Any, lora: Lora) -> int:
    """Returns how many numbers the adapters of a model will have."""
    total = 0
    for layer in find_targets(lm, lora).values():
        total += lora.r * (layer.in_features + layer.out_features)
    return total


@torch.no_grad()
def attach_lora(lm: Any, lora: Lora) -> None:
    """Adds adapters to the layers of a transformers model, and freezes everything else."""
    targets = find_targets(lm, lora)
    lm.requires_grad_(requires_grad=False)
    for name, linear in targets.items():
        layer = AdaptedLinear(linear, lora.r, lora.alpha / lora.r)
        draws = torch.from_numpy(
            uniforms(layer.lora_A.numel(), lora.seed, "lora", f"{name}.{A}")
        )  # float64 in [0, 1)
        draws = draws.view(layer.lora_A.shape)
        layer.lora_A.copy_((2 * draws - 1) / linear.in_features**0.5)
        layer.train(linear.training)
        parent, _, last_part = name.rpartition(".")
        setattr(lm.get_submodule(parent), last_part, layer)


# Files


def save_adapter(lm: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Writes PEFT's config of the adapters of `lm`, and their `weights` by their names in it."""
    from safetensors.torch import save_file

    layers = adapted(lm)
    first_layer = next(iter(layers.values()))
    r = len(first_layer.lora_A)
    # A relative path would mean another directory in another working directory.
    base = lm.name_or_path
    if Path(base).is_dir():
        base = str(Path(base).absolute())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "base_model_name_or_path": base,
        "r": r,
        "lora_alpha": first_layer.scale * r,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {
        f"{PREFIX}{name}.weight": tensor.detach().cpu().contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def load_adapter_weights(directory: Path) -> dict[str, Tensor]:
    """Returns the weights of a directory by their names in the model.

    Raises ValueError for a file that cannot be read.
    """
    from safetensors.torch import load_file

    path = directory / ADAPTER_WEIGHTS
    with one_line_errors(f"{path} cannot be read"):
        tensors = load_file(path)
    return {
        name.removeprefix(PREFIX).removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
    }


def load_adapter_config(directory: Path) -> tuple[Lora, str]:
    """Returns the adapters of a directory, and the name of their model.

    Raises ValueError for a file that cannot be read, and for adapters that are not plain LoRA.
    """
    path = directory / ADAPTER_CONFIG
    with one_line_errors(f"{path} cannot be read"):
        config = parse_json(path.read_text(encoding="utf-8"))
        r = config["r"]
        alpha = config["lora_alpha"]
        base = config["base_model_name_or_path"]
    targets = config.get("target_modules")

    unsupported: list[str] = []
    for name, plain_values in PLAIN_VALUES.items():
        default = plain_values[0]
        if config.get(name, default) not in plain_values:
            unsupported.append(name)
    unsupported += [name for name in OTHER_OPTIONS if config.get(name)]
    if not targets:
        unsupported.append("target_modules")
    if unsupported:
        name = unsupported[0]
        raise ValueError(
            f"{path}: {name} is {config.get(name)!r}, but lagrpo reads plain LoRA only"
        )
    target_names = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    return Lora(r, alpha, target_names), base


def load_adapter(directory: Path) -> tuple[Lora, dict[str, Tensor]]:
    """Returns the adapters of a directory, with their layers as targets, and their weights.

    Raises ValueError as `load_adapter_weights` and `load_adapter_config`.
    """
    weights = load_adapter_weights(directory)
    lora, _ = load_adapter_config(directory)
    # A weight's name is its layer's name, then ".lora_…".
    layers = tuple(sorted({name.rpartition(".lora_")[0] for name in weights}))
    return replace(lora, targets=layers), weights


def find_base(path: str) -> str:
    """Returns what `from_pretrained` takes for the whole model of a directory of adapters.

    It is `path` for everything else. Raises ValueError as `load_adapter_config`, and for adapters
    of adapters.
    """
    if not is_adapter(path):
        return path
    base = resolve_model(load_adapter_config(Path(path))[1])
    if is_adapter(base):
        raise ValueError(
            f"{path}: its model {base} is an adapter, too: merge that one with PEFT's "
            "merge_and_unload"
        )
    return base


def check_fits(lm: Any, lora: Lora, weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless adapters have the shapes that the layers of a model need.

    The targets of `lora` are the names of the layers, and `weights` has the names in the model.
    """
    for name, linear in find_targets(lm, lora).items():
        expected_shapes = {A: (lora.r, linear.in_features), B: (linear.out_features, lora.r)}
        for part, expected in expected_shapes.items():
            weight = weights.get(f"{name}.{part}")
            shape = None if weight is None else tuple(weight.shape)
            if shape != expected:
                raise ValueError(
                    f"{name}.{part} has shape {shape}, and the model needs {expected}: take "
                    "adapters of this model"
                )
