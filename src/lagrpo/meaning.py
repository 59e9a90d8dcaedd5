"""What the settings of a run mean, in numbers: printed at the start of every run and by --dry-run."""

from __future__ import annotations

from typing import Any

from lagrpo.compose import Recipe
from lagrpo.config import Settings
from lagrpo.policy.model import Policy
from lagrpo.sampling.schedule import Schedule, largest_lag

BYTES = {"bfloat16": 2, "float32": 4}


def meaning(settings: Settings, recipe: Recipe, policy: Policy | None = None) -> list[str]:
    """One line for each thing that people get wrong about a run. Without a policy the model's sizes are read from its
    config (no weights are loaded)."""
    s, sampling = settings.schedule, settings.sampling
    lag = largest_lag(Schedule(s.kind, s.v), s.stages, s.batches, s.i)
    per_batch = s.prompts * sampling.G
    deliveries = "before every batch" if s.kind == "lagged" or s.v == 1 else f"every {s.v} batches"
    config, parameters = (policy.model.config, _count(policy.model)) if policy else _sizes(settings)
    memory = expected_memory(settings, recipe, config.get_text_config(), parameters)
    return [
        f"recipe      {recipe.name}: {recipe.formula}",
        f"batch       {s.prompts} prompts x {sampling.G} completions = {per_batch} samples, used for {s.i} "
        f"update{'s' * (s.i > 1)} (i = {s.i})",
        f"schedule    {s.kind}({s.v}): new weights {deliveries}, {_number(s.v * s.i)} updates per delivery; "
        f"largest lag {lag} updates",
        f"run         {s.stages} stage{'s' * (s.stages > 1)} x {s.batches} batches = {s.stages * s.batches * s.i:,} "
        f"updates, {s.stages * s.batches * per_batch:,} samples",
        f"tokens      at most {per_batch * sampling.max_tokens:,} sampled per batch, "
        f"{settings.optimizer.tokens:,} in a micro-batch",
        f"memory      about {sum(memory.values()) / 2**30:.1f} GiB: "
        + ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items()),
        f"arithmetic  {settings.model.dtype} on {policy.device if policy else settings.model.device}"
        + (", float32 masters in the optimizer" if settings.model.dtype == "bfloat16" else ""),
    ]


def expected_memory(settings: Settings, recipe: Recipe, config: Any, parameters: int) -> dict[str, int]:
    """Bytes by purpose, at the most: π, α (and π_ref) in the working dtype; masters, gradients and AdamW's two moments
    in float32; activations of one micro-batch; keys and values of the sampler."""
    size = BYTES[settings.model.dtype]
    copies = 3 if recipe.needs_pi_ref else 2
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * size
    sampling = settings.sampling
    tokens_held = sampling.rows * sampling.max_tokens + sampling.rows // sampling.G * sampling.max_prompt_tokens
    return {
        "weights": copies * parameters * size,
        "optimizer": parameters * (12 + (4 if settings.model.dtype == "bfloat16" else 0)),
        "activations": settings.optimizer.tokens * activation_bytes(settings, config, size),
        "sampler cache": tokens_held * per_token,
    }


def activation_bytes(settings: Settings, config: Any, size: int) -> int:
    """Bytes that one token leaves for the backward pass: per layer about 16 rows of the hidden size and 5 of the MLP's
    in the working dtype; with checkpointing one row per layer and those of a single layer."""
    layer = (16 * config.hidden_size + 5 * config.intermediate_size) * size
    if settings.optimizer.activation_checkpointing:
        return config.num_hidden_layers * config.hidden_size * size + layer
    return config.num_hidden_layers * layer


def _sizes(settings: Settings) -> tuple[Any, int]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lagrpo.embedded import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(settings.model.path))
    with torch.device("meta"):
        return config, _count(AutoModelForCausalLM.from_config(config))


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _number(value: float) -> str:
    return f"{value:,}"
