"""Adapters as directories that PEFT and vLLM load: adapter_config.json and adapter_model.safetensors.

PEFT (extra `lora`) writes and reads the config; the weights are written under the names that it gives them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lagrpo.model.configs import blaming

if TYPE_CHECKING:  # the settings are checked before PyTorch is loaded
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names
BEGINNINGS = (True, False, "gaussian", "orthogonal")
"""What adapters may have begun as: for others (pissa, olora, loftq …) PEFT changes the model's own weights, too."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of rank r, scaled by alpha / r, beside the linear layers of these names; "all-linear": all of the
    decoder's layers. They start at draws of `seed`."""

    r: int
    alpha: float
    targets: tuple[str, ...] = ("all-linear",)
    seed: int = 0


def check_installed() -> None:
    """Raise ValueError where PEFT is not installed; it is not loaded."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters need the package peft: pip install 'lagrpo[lora]'")


def is_adapter(path: str | Path) -> bool:
    """Whether a directory has an adapter, and no model."""
    return (Path(path) / CONFIG).is_file() and not (Path(path) / "config.json").is_file()


def save_adapter(lm: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write `weights`, of the adapters of `lm`, by their names in it."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    from lagrpo.backends.adapters import adapted

    layers = adapted(lm)
    first = next(iter(layers.values()))
    r = first.lora_A.shape[0]
    alpha, name = first.scale * r, Path(lm.name_or_path)
    config: Any = LoraConfig(
        r=r, lora_alpha=whole_or(alpha), lora_dropout=0.0, bias="none",
        target_modules=[layer.rpartition(".")[2] for layer in layers], task_type="CAUSAL_LM",
        base_model_name_or_path=str(name.absolute()) if name.is_dir() else lm.name_or_path, inference_mode=True,
    )  # fmt: skip
    config.target_modules = sorted({*config.target_modules})  # PEFT's own set has another order in each process
    config.save_pretrained(directory)
    save_file(named(weights), directory / WEIGHTS, metadata={"format": "pt"})


def named(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of adapters by their names in the model, on the CPU and under PEFT's names."""
    return {f"{PREFIX}{name}.weight": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of a directory by their names in the model. Raises ValueError for a file that cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory / WEIGHTS} cannot be read: {error}") from error
    return {name.removeprefix(PREFIX).removesuffix(".weight"): tensor for name, tensor in found.items()}


def layers_of(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The linear layers that adapters are beside, by the names of their weights."""
    return tuple(sorted({name.rpartition(".lora_")[0] for name in weights}))


def read_config(directory: Path) -> tuple[Lora, str]:
    """What a directory says of its adapters, and the name or directory of the model that they are for. Raises
    ValueError for kinds of adapters that are not plain LoRA."""
    check_installed()
    from peft import PeftConfig

    with blaming(f"{directory / CONFIG} cannot be read"):
        config: Any = PeftConfig.from_pretrained(str(directory))
    _check_plain(config, directory / CONFIG)
    base = config.base_model_name_or_path
    if not base:
        raise ValueError(f"{directory / CONFIG} does not name its model (base_model_name_or_path)")
    if is_adapter(base):
        raise ValueError(f"{directory / CONFIG}: base_model_name_or_path is {base!r}, which is an adapter, not a model")
    of = config.target_modules
    targets = (of,) if isinstance(of, str) else tuple(sorted(of))
    return Lora(config.r, config.lora_alpha, targets), base


def _check_plain(config: Any, place: Path) -> None:
    """Raises ValueError for kinds of adapters that are not plain LoRA, and for numbers that none can have."""
    unlike = {
        "peft_type": str(getattr(config.peft_type, "value", config.peft_type)) != "LORA",
        "init_lora_weights": getattr(config, "init_lora_weights", True) not in BEGINNINGS,
        "use_dora": getattr(config, "use_dora", False),
        "use_rslora": getattr(config, "use_rslora", False),
        "bias": getattr(config, "bias", "none") != "none",
        "modules_to_save": getattr(config, "modules_to_save", None),
        "rank_pattern": getattr(config, "rank_pattern", None),
        "alpha_pattern": getattr(config, "alpha_pattern", None),
        "layer_replication": getattr(config, "layer_replication", None),
        "alora_invocation_tokens": getattr(config, "alora_invocation_tokens", None),
        "use_qalora": getattr(config, "use_qalora", False),
        "target_modules": not config.target_modules,
    }
    if odd := [name for name, differs in unlike.items() if differs]:
        raise ValueError(f"{place}: {odd[0]} is {getattr(config, odd[0])!r}: lagrpo reads plain LoRA alone")
    r, alpha = config.r, config.lora_alpha
    if not isinstance(r, int) or r < 1:
        raise ValueError(f"{place}: r is {r!r}, not a whole number above 0")
    if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise ValueError(f"{place}: lora_alpha is {alpha!r}, not a number above 0")


def whole_or(number: float) -> Any:
    """An integer where the number is one, as files of PEFT have it."""
    return int(number) if number == int(number) else number
