"""From a model directory to a policy: load it, refuse by name what shared-prefix attention does not reproduce, and
check on a small input that it computes what transformers computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lagrpo.backends import attention
from lagrpo.backends.backend import Backend
from lagrpo.backends.choose import Choice
from lagrpo.errors import refusing
from lagrpo.model.adapter_files import Lora, is_adapter, layers_of, read_config, read_weights
from lagrpo.model.chat import Templates
from lagrpo.model.checkpoint import match_weights, model_class, read_headers, read_tokenizer
from lagrpo.model.configs import blaming
from lagrpo.model.configs import read_config as read_model_config
from lagrpo.model.embedded import resolve_model
from lagrpo.model.lora import attach
from lagrpo.model.model import Packed, Policy, weights_of

LOADING = {"use_safetensors": True, "trust_remote_code": False}
LOADING |= {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""No stranger's code, and what a forward pass returns, whatever config.json says: a tuple, or what nobody reads."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}  # mean |Δ log-prob|, nats


def load_policy(
    path: str, dtype: torch.dtype, device: torch.device | str = "cpu", tau: float = 1.0,
    chat_template: str | None = None, templates: Templates | None = None, backend: Backend | Choice = "auto",
    lora: Lora | None = None,
) -> Policy:  # fmt: skip
    """Load a policy from a hub id or a directory, with shared-prefix attention. `templates` renders its prompts; its
    giver closes it. `backend`: what computes, or how to choose it. `lora`: the adapters that it gets; a directory of
    adapters has its own.

    Raises ValueError for files that are damaged or do not fit together, by file and field, and for a model that
    shared-prefix attention does not reproduce, with the reason; OSError where there is nothing that transformers can
    load."""
    if templates is not None:
        templates.start()  # gets ready while the model is loaded
    lm, tokenizer = load_model(path, dtype, device, lora)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    policy = Policy.of(lm, tokenizer, tau, backend=backend, templates=templates)
    check_attention(policy)
    return policy


def load_model(
    path: str, dtype: torch.dtype | Literal["auto"], device: torch.device | str = "cpu", lora: Lora | None = None
) -> tuple[Any, Any]:
    """The model of transformers, with its adapters if it gets or has any, and its tokenizer. Raises as `load_policy`;
    "auto" is the dtype of the files."""
    from transformers import AutoModelForCausalLM

    attention.register()
    weights, whose = None, "model.lora"
    if is_adapter(path):
        weights = read_weights(adapter := Path(path))
        check_finite(weights)
        lora, path = read_config(adapter)
        lora, whose = replace(lora, targets=layers_of(weights)), f"the adapter {adapter}"
        with blaming(f"{path}, the model of the adapter {adapter}, cannot be loaded"):
            tokenizer = check_files(path := resolve_model(path))
    else:
        tokenizer = check_files(path)
    with blaming("transformers cannot load it"):
        lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention.NAME, **LOADING)
    check_finite(dict(lm.named_parameters()))
    lm.to(device)
    for module in lm.modules():  # no randomness inside the policy: sampler and learner are one function of the weights
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if lora is not None:
        with refusing(whose):
            attach(lm, lora)
    if weights is not None:
        weights_of(lm).load(weights, 0)
    return lm, tokenizer


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a weight that has no finite value in the dtype that it was loaded in."""
    for name, weight in weights.items():
        if count := int((~weight.isfinite()).sum()):
            dtype = str(weight.dtype).removeprefix("torch.")
            raise ValueError(f"{name} has {count} of {weight.numel()} numbers that are not finite in {dtype}")


def check_files(path: str) -> Any:
    """The tokenizer of a model whose files fit together and that is supported. Raises as `load_policy`; loads no
    weight."""
    config = read_model_config(path)
    check_supported(config)
    tokenizer = read_tokenizer(path, config)
    match_weights(config, read_headers(path, config))
    return tokenizer


def check_supported(config: Any) -> None:
    """Raise ValueError for a model whose forward pass this package does not reproduce, by name and with the reason."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    name, known = text.model_type, type(config) in AutoModelForCausalLM._model_mapping
    reasons = {
        "attention soft-capping (attn_logit_softcapping)": getattr(text, "attn_logit_softcapping", None),
        "soft-capping of the logits (final_logit_softcapping)": getattr(text, "final_logit_softcapping", None),
        "a scale on the logits (logit_scale)": getattr(text, "logit_scale", 1.0) not in (None, 1.0),
        "a scale on the logits (logits_scaling)": getattr(text, "logits_scaling", 1.0) not in (None, 1.0),
        "an encoder (is_encoder_decoder)": getattr(config, "is_encoder_decoder", False),
        "attention sinks": name == "gpt_oss",
        "latent attention (kv_lora_rank)": getattr(text, "kv_lora_rank", None),
        "layers that are not attention": {*(getattr(text, "layer_types", None) or ())} - ATTENTION_LAYERS,
        "experts that a router chooses": any(getattr(text, name, 0) for name in EXPERTS),
        "pictures or sound to look at": any(getattr(config, f"{kind}_config", None) for kind in ("vision", "audio")),
        "an attention of their own, outside transformers' registry": known
        and not model_class(config)._can_set_attn_implementation(),
    }
    for reason, present in reasons.items():
        if present:
            raise ValueError(
                f"models of type {name!r} have {reason}, which lagrpo does not support; take one of Llama, Qwen2, "
                "Qwen3, Mistral, Gemma (1) or their relatives, dense and for text"
            )


def check_context(policy: Policy, tokens: int) -> None:
    """Raise ValueError if prompts and completions of `tokens` tokens do not fit the model's window or positions."""
    text = policy.model.config.get_text_config()
    sliding = "sliding_attention" in (getattr(text, "layer_types", None) or ("sliding_attention",))
    window = getattr(text, "sliding_window", None) if sliding and getattr(text, "use_sliding_window", True) else None
    positions = getattr(text, "max_position_embeddings", None)
    for limit, what in ((window, "sliding window"), (positions, "longest position")):
        if limit is not None and tokens > limit:
            raise ValueError(
                f"a prompt and its completion may be {tokens} tokens long, but the {what} of this {text.model_type} "
                f"model is {limit}; lower sampling.max_prompt_tokens, sampling.max_tokens or environment.max_tokens"
            )


@torch.no_grad()
def check_attention(policy: Policy) -> float:
    """Compare log-probs on a packed row with transformers' own attention on whole sequences; returns mean |Δ|, nats.
    Raises ValueError for a difference beyond the dtype's tolerance: the model does something else than attend."""
    vocabulary = policy.chat.vocabulary
    rng = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(vocabulary, (n,), generator=rng)  # noqa: E731
    prompt, completions = ids(9), [ids(5), ids(12)]
    ours = policy.model(Packed.build([(prompt.tolist(), completions)], policy.device), tau=1.0).cpu()
    model = policy.model.lm
    model.set_attn_implementation("eager")
    theirs = []
    for completion in completions:
        row = torch.cat([prompt, completion]).to(policy.device)
        logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float()
        theirs.append(logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, row[len(prompt) :, None]).squeeze(1).cpu())
    model.set_attn_implementation(attention.NAME)
    difference = (ours - torch.cat(theirs)).abs().mean().item()
    if not difference <= (tolerance := ATTENTION_TOLERANCE[policy.dtype]):
        raise ValueError(
            f"{type(model).__name__}: log-probs with shared-prefix attention differ from transformers' by "
            f"{difference:.3g} on average (tolerance {tolerance} in {policy.dtype}); this model is not supported"
        )
    return difference
