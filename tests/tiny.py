"""Tiny random models and their tokenizer, so that tests run the real code in milliseconds."""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

# For types alone: transformers takes seconds to load, and not every test needs it.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from lagrpo.model.backend import Backend, Choice
    from lagrpo.model.lora import Lora
    from lagrpo.model.model import Policy

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
TURNS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}assistant: "
)
"""A chat template for several turns, each of which ends with <eos>."""
BACKEND: Choice = "auto"
"""What computes tiny policies; the fixture either_computation sets it."""

# Families differ in how many queries share a key, and in the size of a head.
SHAPES: dict[str, dict[str, object]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 32},
    "qwen2": {"num_key_value_heads": 1, "hidden_size": 64, "num_attention_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 64},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16, "hidden_act": "gelu_pytorch_tanh"},
    # A sliding layer and a full one, which turn positions by other angles.
    "gemma3_text": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
    },
    "mistral": {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": None},
    # One product for queries, keys and values, so none of them is contiguous.
    "phi3": {"num_key_value_heads": 2, "hidden_size": 64},
    # Its configuration has other names for the sizes.
    "gpt2": {"tie_word_embeddings": False},
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, three specials in front: <pad>, <eos>, <stop>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    token_texts = ["<pad>", "<eos>", "<stop>", *string.printable]
    vocabulary = {text: token_id for token_id, text in enumerate(token_texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    fast.chat_template = CHAT
    return fast


def tiny_model(kind: str = "llama", seed: int = 0, spread: float = 0.6, **changes: Any) -> Any:
    """A random model of two layers.

    `spread` scales its weights: .6 makes distributions that are far from uniform, so that a wrong
    row, position or key shows in the log-probs.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from lagrpo.model import attention

    attention.register()
    sizes = {
        "vocab_size": len(string.printable) + 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "eos_token_id": [1, 2],
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(kind, **sizes | SHAPES.get(kind, {}) | changes)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, spread / parameter.shape[1] ** 0.5)
            else:
                # Biases of 0 and scales of 1 would hide that a kernel leaves them out.
                parameter += torch.randn(parameter.shape) * 0.1
    return model


def tiny_policy(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    tau: float = 1.0,
    backend: Backend | Choice | None = None,
    device: str = "cpu",
    lora: Lora | None = None,
    **changes: Any,
) -> Policy:
    """A policy of `tiny_model(kind, **changes)`, computed by `backend`, BACKEND by default."""
    from lagrpo.model.lora import attach_lora
    from lagrpo.model.model import Policy

    model = tiny_model(kind, **changes).to(device, dtype)
    if lora is not None:
        attach_lora(model, lora)
    return Policy.from_model(model, tiny_tokenizer(), tau, backend=backend or BACKEND)


def save_tiny(directory: Path, kind: str = "llama", **changes: Any) -> Path:
    """The directory of a model of one layer, which a run takes half of the time with."""
    tiny_model(kind, **{"num_hidden_layers": 1} | changes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def computed_by(policy: Policy, backend: Choice) -> Policy:
    """The same weights, computed by another backend."""
    from dataclasses import replace

    from lagrpo.model.backend import choose_backend
    from lagrpo.model.model import Model

    new_backend = choose_backend(backend, policy.device, policy.dtype)
    return replace(policy, model=Model(policy.model.lm, new_backend))
