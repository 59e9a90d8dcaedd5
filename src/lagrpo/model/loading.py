"""From a model directory or a hub id to a policy.

What transformers accepts in silence is checked here: weights that are missing or unknown, a head that should be tied
and is not, numbers that are not finite, and models whose forward pass shared-prefix attention does not reproduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lagrpo.errors import as_settings_error, one_line, one_line_errors
from lagrpo.model import attention
from lagrpo.model.backend import Backend, Choice
from lagrpo.model.directory import naming_damage
from lagrpo.model.embedded import is_adapter, resolve_model
from lagrpo.model.files import load_tokenizer
from lagrpo.model.layout import Packed
from lagrpo.model.lora import Lora, attach_lora, load_adapter_config, load_adapter_weights
from lagrpo.model.model import Policy, trained_weights

LOADING = {
    "use_safetensors": True,
    "trust_remote_code": False,
}  # neither pickled weights nor code of the model
LOADING |= {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}  # `check_loaded` names what differs
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
ATTENTION_TOLERANCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.15,
    torch.float16: 0.05,
}  # mean |Δ log-prob|, nats


def load_policy(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tau: float = 1.0,
    chat_template: str | None = None,
    backend: Backend | Choice = "auto",
    lora: Lora | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Policy:
    """Load a policy from a hub id or a directory. `lora`: the adapters that the model gets; a directory of adapters has
    its own. Raises ValueError or OSError."""
    if is_adapter(path):
        lm, tokenizer = load_adapted(Path(path), dtype, device)
    else:
        lm, tokenizer = load_model(path, dtype, device)
        if lora is not None:
            with as_settings_error("model.lora_r"):
                attach_lora(lm, lora)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    policy = Policy.from_model(lm, tokenizer, tau, backend=backend)
    check_attention(policy)
    if unread := [
        name for name in template_kwargs or () if name not in str(tokenizer.chat_template)
    ]:
        raise ValueError(
            f"model.chat_template_kwargs: its chat template does not read {unread[0]!r}"
        )
    return replace(policy, chat=replace(policy.chat, template_kwargs=template_kwargs or {}))


def load_model(
    path: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """The model of transformers, without adapters, and its tokenizer."""
    import transformers
    from transformers import AutoModelForCausalLM

    attention.register()
    tokenizer = check_files(path)
    with naming_damage(
        path,
        f"transformers {transformers.__version__} cannot load it; check config.json, or update transformers",
    ):
        given: Any = LOADING | {"dtype": dtype, "attn_implementation": attention.NAME}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **given)
    lm, found = loaded
    check_loaded(lm, found)
    check_finite(dict(lm.named_parameters()))
    lm.to(device)
    for (
        module
    ) in lm.modules():  # the engine and the trainer compute the same function of the weights
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return lm, tokenizer


def load_adapted(
    adapter: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """The model of a directory of adapters, with the adapters, and its tokenizer."""
    weights = load_adapter_weights(adapter)
    check_finite(weights)
    lora, base = load_adapter_config(adapter)
    with one_line_errors(f"{base}, the model of the adapter {adapter}, cannot be loaded"):
        lm, tokenizer = load_model(resolve_model(base), dtype, device)
    layers = tuple(sorted({name.rpartition(".lora_")[0] for name in weights}))
    with as_settings_error(f"the adapter {adapter}"):
        attach_lora(lm, replace(lora, targets=layers))
    trained_weights(lm).load(weights, 0)
    return lm, tokenizer


def check_files(path: str) -> Any:
    """The tokenizer of a supported model. Loads no weights."""
    config = load_config(path)
    check_supported(config)
    check_pad_token(config)
    return load_tokenizer(path)


def load_config(path: str) -> Any:
    """transformers' config of a model."""
    from transformers import AutoConfig

    with naming_damage(path, "config.json"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers prints errors only, and shows no bars while it loads or writes weights."""
    from transformers.utils import logging

    verbosity, before = (
        logging.get_verbosity(),
        logging.set_tqdm_hook(lambda f, a, k: logging.EmptyTqdm(*a, **k)),
    )
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(before)


# ---- checks ----


def check_loaded(lm: Any, found: Mapping[str, Any]) -> None:
    """Raise ValueError for weights that transformers left out, made up at random, or did not tie."""
    problems = {
        "the files lack {} weights of the model": found["missing_keys"],
        "the files have {} weights that the model does not have": found["unexpected_keys"],
        "{} weights have another shape than config.json implies": [
            name for name, *_ in found["mismatched_keys"]
        ],
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(f"{problem.format(len(names))}: {one_line(', '.join(sorted(names)))}")
    tied = getattr(lm.config.get_text_config(), "tie_word_embeddings", False)
    if tied and lm.get_output_embeddings().weight is not lm.get_input_embeddings().weight:
        raise ValueError(
            "config.json sets tie_word_embeddings, but the files have a different output head: untie it"
        )


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a weight with values that are not finite in the dtype that it was loaded in."""
    for name, weight in weights.items():
        if count := int((~weight.isfinite()).sum()):
            dtype = str(weight.dtype).removeprefix("torch.")
            raise ValueError(
                f"{count} of {weight.numel()} numbers in {name} are not finite in {dtype}"
            )


def check_supported(config: Any) -> None:
    """Raise ValueError for a model whose forward pass this package does not reproduce, with the reason."""
    from transformers import AutoModelForCausalLM

    text, mapping = config.get_text_config(), cast(Any, AutoModelForCausalLM._model_mapping)
    has = lambda name: getattr(text, name, None) or getattr(config, name, None)  # noqa: E731
    reasons = {
        "quantized weights, which cannot be trained": has("quantization_config"),
        "soft-capping": has("attn_logit_softcapping") or has("final_logit_softcapping"),
        "a scale on the logits": {has("logit_scale"), has("logits_scaling")} - {None, 0.0, 1.0},
        "an encoder": has("is_encoder_decoder"),
        "attention sinks": text.model_type == "gpt_oss",
        "latent attention": has("kv_lora_rank"),
        "layers that are not attention": {*(has("layer_types") or ())} - ATTENTION_LAYERS,
        "a mixture of experts": any(map(has, EXPERTS)),
        "image or audio inputs": has("vision_config") or has("audio_config"),
        "no causal language model in transformers": type(config) not in mapping,
        "attention outside the transformers registry": type(config) in mapping
        and not mapping[type(config)]._can_set_attn_implementation(),
    }
    for reason in filter(reasons.get, reasons):
        instead = (
            "use a dense text model: Llama, Qwen2, Qwen3, Mistral, Gemma (1) or their relatives"
        )
        raise ValueError(
            f"models of type {text.model_type!r} have {reason}, which lagrpo does not support; {instead}"
        )


def check_pad_token(config: Any) -> None:
    """Raise ValueError for a padding token that the embedding does not have. PyTorch counts negative ones from the
    end."""
    text = config.get_text_config()
    pad, vocabulary = getattr(text, "pad_token_id", None), text.vocab_size
    if pad is not None and not -vocabulary <= pad < vocabulary:
        raise ValueError(
            f"config.json: pad_token_id = {pad} is outside the vocabulary of {vocabulary}: "
            "set a token's id, or null"
        )


def check_context(config: Any, tokens: int) -> None:
    """Raise ValueError if prompts and completions of `tokens` tokens do not fit the model's window or positions, or
    would reach the length at which it turns positions by other factors."""
    text = config.get_text_config()
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ("sliding_attention",))
    slides = slides and getattr(text, "use_sliding_window", True)
    limits = {"longest position of this model": getattr(text, "max_position_embeddings", None)}
    if slides:
        limits["sliding window of this model"] = getattr(text, "sliding_window", None)
    limits["length at which this model switches to LongRoPE's long factors"] = longrope_switch(text)
    for what, limit in limits.items():
        if limit is not None and tokens > limit:
            lower = "lower rollout.max_prompt_length or max_completion_length"
            raise ValueError(
                f"sequences may have {tokens} tokens, but the {what} is {limit}: {lower}"
            )


def longrope_switch(text: Any) -> int | None:
    """Tokens beyond which a model with LongRoPE uses its long factors, for all positions of a call: then log-probs
    depend on what is computed together, and sampler and trainer differ. None if nothing changes there."""
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" or rope["short_factor"] == rope["long_factor"]:
        return None
    return rope["original_max_position_embeddings"]


@torch.no_grad()
def check_attention(policy: Policy) -> float:
    """Mean |Δ| of log-probs on a packed row to transformers' own attention on sequences, nats. Raises ValueError if it
    is beyond the dtype's tolerance."""
    rng, vocabulary, model = (
        torch.Generator().manual_seed(0),
        policy.chat.vocabulary,
        policy.model.lm,
    )
    prompt, *completions = (torch.randint(vocabulary, (n,), generator=rng) for n in (9, 5, 12))
    ours = policy.model(
        Packed.build([(prompt.tolist(), completions)], policy.device), tau=1.0
    ).cpu()
    model.set_attn_implementation("eager")
    theirs = []
    for completion in completions:
        row = torch.cat([prompt, completion]).to(policy.device)
        logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float()
        theirs.append(
            logits.log_softmax(-1)[len(prompt) - 1 : -1]
            .gather(1, row[len(prompt) :, None])
            .squeeze(1)
            .cpu()
        )
    model.set_attn_implementation(attention.NAME)
    difference = (ours - torch.cat(theirs)).abs().mean().item()
    if not difference <= (tolerance := ATTENTION_TOLERANCE[policy.dtype]):
        said = f"log-probs differ from transformers' by {difference:.3g} on average (tolerance {tolerance})"
        raise ValueError(f"{type(model).__name__} is not supported: {said}")
    return difference
