"""Loading: from a model directory or a hub id to a policy.

What transformers accepts in silence is checked here: weights that are missing or unknown, a head
that should be tied and is not, numbers that are not finite, and models whose forward pass
shared-prefix attention does not reproduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lagrpo.errors import as_settings_error, describe_error, one_line, one_line_errors
from lagrpo.model import attention
from lagrpo.model.attention import Shape
from lagrpo.model.backend import Backend, Choice
from lagrpo.model.chat import Chat
from lagrpo.model.directory import check_weights, naming_damage
from lagrpo.model.embedded import is_adapter
from lagrpo.model.files import TOKENIZER_CONFIG, find_source, load_tokenizer
from lagrpo.model.layout import Packed
from lagrpo.model.lora import Lora, attach_lora, check_fits, find_base, load_adapter
from lagrpo.model.model import Policy, trained_weights
from lagrpo.model.stored import StoredWeights, find_weight_files

LOADING = {
    # Neither pickled weights nor code of the model.
    "use_safetensors": True,
    "trust_remote_code": False,
    # `check_loaded` names what differs.
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Their layers attend more than once in a forward pass. The sampler's cache has room for one time.
ATTENDING_TWICE = {"diffllama", "hrm_text"}
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Mean |Δ log-prob|, nats.
ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# Values of a config's scale on the logits that change nothing.
NO_SCALE = {None, 0.0, 1.0}


def load_policy(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tau: float = 1.0,
    chat_template: str | None = None,
    backend: Backend | Choice = "auto",
    lora: Lora | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    teaches: Chat | None = None,
) -> Policy:
    """Loads a policy from a hub id or a directory.

    The model gets the adapters `lora`, unless the directory has adapters itself. With `teaches` it
    is the teacher of a policy with this chat: see `_make_teacher`. Raises ValueError or OSError.
    """
    if is_adapter(path):
        lm, tokenizer = load_adapted(Path(path), dtype, device)
    else:
        lm, tokenizer = load_model(path, dtype, device)
        if lora is not None:
            with as_settings_error("model.lora_r"):
                attach_lora(lm, lora)
    if teaches is not None:
        policy = _make_teacher(lm, teaches, tau, backend)
    else:
        policy = _make_policy(lm, tokenizer, tau, chat_template, backend, template_kwargs)
    check_attention(policy)
    return policy


def open_policy(
    path: str,
    dtype: torch.dtype,
    backend: Backend,
    tau: float = 1.0,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    teaches: Chat | None = None,
) -> Policy | None:
    """Opens a policy from a hub id or a directory, and leaves its weights in the files.

    Its model is on the meta device, and `weights` are `StoredWeights`. `check_finite` and
    `check_attention` are left to the caller. Returns None if the files do not have the weights as
    the model has them; `load_policy` converts these, or says what is wrong. `teaches` is as in
    `load_policy`. Raises ValueError or OSError.
    """
    tokenizer = check_files(path)
    with naming_damage(path, _advice()):
        lm = make_empty_model(path, dtype)
        if teaches is not None:
            cut_vocabulary(lm, teaches.vocabulary)
        weights = StoredWeights(lm, find_weight_files(path))
    # With this entry, transformers reads another file.
    names_other_file = getattr(lm.config, "transformers_weights", None) is not None
    if names_other_file or not weights.fit(has_more_rows=teaches is not None):
        return None
    if teaches is not None:
        policy = _make_teacher(lm, teaches, tau, backend)
    else:
        policy = _make_policy(lm, tokenizer, tau, chat_template, backend, template_kwargs)
    return replace(policy, weights=weights)


def outline_policy(
    path: str,
    dtype: torch.dtype,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Policy:
    """Returns the policy of a hub id or a directory, with its weights on the meta device.

    It renders prompts as `load_policy` does. Raises ValueError or OSError, also for files of
    weights that are missing or damaged.
    """
    tokenizer = check_files(path)
    with naming_damage(path, _advice()):
        lm = make_empty_model(path, dtype)
    names_other_file = getattr(lm.config, "transformers_weights", None) is not None
    if Path(path).is_dir() and not names_other_file:
        check_weights(Path(path))
    backend = Backend(torch.device("meta"), dtype)
    return _make_policy(lm, tokenizer, 1.0, chat_template, backend, template_kwargs)


def _make_policy(
    lm: Any,
    tokenizer: Any,
    tau: float,
    chat_template: str | None,
    backend: Backend | Choice,
    template_kwargs: Mapping[str, Any] | None,
) -> Policy:
    """Returns the policy of a model and its tokenizer, with the settings of its chat template."""
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    _check_shape(lm)
    policy = Policy.from_model(lm, tokenizer, tau, backend=backend)
    template_kwargs = template_kwargs or {}
    for name in template_kwargs:
        if name not in str(tokenizer.chat_template):
            raise ValueError(
                f"model.chat_template_kwargs: its chat template does not read {name!r}"
            )
    return replace(policy, chat=replace(policy.chat, template_kwargs=template_kwargs))


def _make_teacher(lm: Any, chat: Chat, tau: float, backend: Backend | Choice) -> Policy:
    """Returns the policy of a model that only computes log-probs of the tokens of a policy's chat.

    Its logits end with the policy's. More rows of its head are padding, which the softmax must not
    count.
    """
    _check_shape(lm)
    cut_vocabulary(lm, chat.vocabulary)
    lm.requires_grad_(requires_grad=False)
    return Policy.from_model(lm, chat.tokenizer, tau, backend=backend, chat=chat)


def _check_shape(lm: Any) -> None:
    """Raises ValueError for sizes that differ between layers: the caches have one size."""
    text_config = lm.config.get_text_config()
    with one_line_errors(f"models of type {text_config.model_type!r} are not supported"):
        Shape.of(text_config)


def cut_vocabulary(lm: Any, vocabulary: int) -> None:
    """Removes the rows of embedding and head beyond a vocabulary."""
    if len(lm.get_output_embeddings().weight) > vocabulary:
        lm.resize_token_embeddings(vocabulary)


def load_model(
    path: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """Returns the model of transformers, without adapters, and its tokenizer."""
    from transformers import AutoModelForCausalLM

    attention.register()
    tokenizer = check_files(path)
    options: Any = LOADING | {"dtype": dtype, "attn_implementation": attention.NAME}
    with naming_damage(path, _advice()):
        model_and_info: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    lm, loading_info = model_and_info
    check_loaded(lm, loading_info)
    check_finite(dict(lm.named_parameters()))
    lm.to(device)
    _remove_dropout(lm)
    return lm, tokenizer


def make_empty_model(path: str, dtype: torch.dtype) -> Any:
    """Returns the model of transformers as `load_model` does, with its weights on the meta device.

    Buffers have their numbers: no file has them.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    attention.register()
    with init_empty_weights(include_buffers=False):
        lm: Any = AutoModelForCausalLM.from_config(
            load_config(path),
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=False,
        )
    # init_empty_weights makes one parameter for each name of a tied weight.
    lm.tie_weights()
    # Without the file, the model has made a generation config from config.json.
    with suppress(OSError):
        lm.generation_config = GenerationConfig.from_pretrained(path, trust_remote_code=False)
    _remove_dropout(lm)
    return lm


def _advice() -> str:
    import transformers

    return (
        f"transformers {transformers.__version__} cannot load it; "
        "check config.json, or update transformers"
    )


def _remove_dropout(lm: nn.Module) -> None:
    """Makes the engine and the trainer compute the same function of the weights.

    Some families have modules for dropout; others have a rate, which their forward pass reads.
    """
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or name == "layerdrop"
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)


def load_adapted(
    adapter: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """Returns the model of a directory of adapters, with the adapters, and its tokenizer.

    A tokenizer in the directory replaces the model's: it has the chat template of the training.
    """
    lora, weights = load_adapter(adapter)
    check_finite(weights)
    with one_line_errors(f"the model of the adapter {adapter} cannot be loaded"):
        lm, tokenizer = load_model(find_base(str(adapter)), dtype, device)
    if find_source(str(adapter), TOKENIZER_CONFIG) is not None:
        tokenizer = load_tokenizer(str(adapter))
    with as_settings_error(f"the adapter {adapter}"):
        check_fits(lm, lora, weights)
        attach_lora(lm, lora)
    trained_weights(lm).load(weights, 0)
    return lm, tokenizer


def check_files(path: str) -> Any:
    """Returns the tokenizer of a supported model. Loads no weights."""
    config = load_config(path)
    check_supported(config)
    check_pad_token(config)
    return load_tokenizer(path)


def load_config(path: str) -> Any:
    """Returns transformers' config of a model."""
    from transformers import AutoConfig

    with naming_damage(path, "config.json"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Lets transformers print errors only, and show no bars, while it loads or writes weights."""
    from transformers.utils import logging

    def without_bar(_: Any, args: Any, kwargs: Any) -> Any:
        return logging.EmptyTqdm(*args, **kwargs)

    verbosity = logging.get_verbosity()
    previous_hook = logging.set_tqdm_hook(without_bar)
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.set_tqdm_hook(previous_hook)


# Checks


def check_loaded(lm: Any, loading_info: Mapping[str, Any]) -> None:
    """Raises ValueError for weights that transformers left out, made up at random, or did not tie.

    `loading_info` is transformers'.
    """
    problems = {
        "the files lack weights of the model": loading_info["missing_keys"],
        "the files have weights that the model does not have": loading_info["unexpected_keys"],
        "weights have another shape than config.json implies": [
            name for name, *_ in loading_info["mismatched_keys"]
        ],
    }
    messages = [
        f"{problem}: {one_line(', '.join(sorted(names)))} ({len(names)} in all)"
        for problem, names in problems.items()
        if names
    ]
    if messages:
        # Together they show a weight that has another name in the files.
        raise ValueError("; ".join(messages))
    should_be_tied = getattr(lm.config.get_text_config(), "tie_word_embeddings", False)
    is_tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    if should_be_tied and not is_tied:
        raise ValueError(
            "config.json sets tie_word_embeddings, but the files have a different output head: "
            "untie it"
        )


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a weight with values that are not finite in its dtype."""
    for name, weight in weights.items():
        raise_if_not_finite(name, count_not_finite(weight), weight.numel(), weight.dtype)


def count_not_finite(weight: Tensor) -> int:
    """Returns how many numbers of a weight are infinite or NaN."""
    return int((~weight.isfinite()).sum())


def raise_if_not_finite(name: str, count: int, numbers: int, dtype: torch.dtype) -> None:
    """Raises ValueError if `count`, of the `numbers` of a weight, is not 0."""
    if count > 0:
        dtype_name = str(dtype).removeprefix("torch.")
        raise ValueError(f"{count} of {numbers} numbers in {name} are not finite in {dtype_name}")


def check_supported(config: Any) -> None:
    """Raises ValueError, with the reason, for a forward pass that lagrpo does not reproduce."""
    from transformers import AutoModelForCausalLM

    text_config = config.get_text_config()
    model_classes = cast(Any, AutoModelForCausalLM._model_mapping)
    is_known = type(config) in model_classes

    def read(name: str) -> Any:
        return getattr(text_config, name, None) or getattr(config, name, None)

    # True for each reason that holds; the first one is reported.
    reasons = {
        "quantized weights, which cannot be trained": read("quantization_config"),
        "soft-capping": read("attn_logit_softcapping") or read("final_logit_softcapping"),
        "a scale on the logits": {read("logit_scale"), read("logits_scaling")} - NO_SCALE,
        "an encoder": read("is_encoder_decoder"),
        "attention sinks": text_config.model_type == "gpt_oss",
        "layers that attend more than once": text_config.model_type in ATTENDING_TWICE,
        "latent attention": read("kv_lora_rank"),
        "layers that are not attention": set(read("layer_types") or ()) - ATTENTION_LAYERS,
        "a mixture of experts": any(read(name) for name in EXPERTS),
        "image or audio inputs": read("vision_config") or read("audio_config"),
        "no causal language model in transformers": not is_known,
        "attention outside the transformers registry": is_known
        and not model_classes[type(config)]._can_set_attn_implementation(),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"models of type {text_config.model_type!r} have {reason}, which lagrpo does not "
                "support; use a dense text model: Llama, Qwen2, Qwen3, Mistral, Gemma (1 or 3) or "
                "their relatives"
            )


def check_pad_token(config: Any) -> None:
    """Raises ValueError for a padding token that the embedding does not have."""
    text_config = config.get_text_config()
    pad = getattr(text_config, "pad_token_id", None)
    vocabulary = text_config.vocab_size
    # PyTorch counts negative ids from the end.
    if pad is not None and not -vocabulary <= pad < vocabulary:
        raise ValueError(
            f"config.json: pad_token_id = {pad} is outside the vocabulary of {vocabulary}: "
            "set a token's id, or null"
        )


def check_context(config: Any, tokens: int) -> None:
    """Raises ValueError if prompts and completions of `tokens` tokens are too long for the model.

    They must fit its window and its positions, and stay below the length at which the model turns
    positions by other factors.
    """
    text_config = config.get_text_config()
    limits = {"longest position of this model": longest_position(text_config)}
    # Without `layer_types` all layers slide if there is a window.
    layer_types = getattr(text_config, "layer_types", None) or ("sliding_attention",)
    uses_window = getattr(text_config, "use_sliding_window", True)
    if "sliding_attention" in layer_types and uses_window:
        limits["sliding window of this model"] = getattr(text_config, "sliding_window", None)
    switch = longrope_switch(text_config)
    limits["length at which this model switches to LongRoPE's long factors"] = switch
    for name, limit in limits.items():
        if limit is not None and tokens > limit:
            raise ValueError(
                f"sequences may have {tokens} tokens, but the {name} is {limit}: "
                "lower rollout.max_prompt_length or max_completion_length"
            )


def longest_position(text: Any) -> int | None:
    """Returns the number of positions of a model; None if its config does not limit them.

    YaRN stretches the original positions by a factor. Some configs with YaRN still have the
    original number in `max_position_embeddings`.
    """
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("factor")
    if positions is None or factor is None or rope.get("rope_type") != "yarn":
        return positions
    return max(positions, int(factor * rope["original_max_position_embeddings"]))


def longrope_switch(text: Any) -> int | None:
    """Returns the number of tokens beyond which a model with LongRoPE uses its long factors.

    It then uses them for all positions of a call, so log-probs depend on what is computed together,
    and sampler and trainer differ. Returns None if nothing changes at any length.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" or rope["short_factor"] == rope["long_factor"]:
        return None
    return rope["original_max_position_embeddings"]


@torch.no_grad()
def check_attention(policy: Policy) -> float:
    """Compares log-probs on a packed row with transformers' own attention on sequences.

    Returns the mean |Δ|, nats. Raises ValueError if it is beyond the dtype's tolerance. Collective
    if layers are sharded.
    """
    lm = policy.model.lm
    # transformers' attention may have dropout when it trains.
    was_training = lm.training
    lm.eval()
    rng = torch.Generator().manual_seed(0)
    # The lengths of a prompt and of two completions.
    prompt, *completions = (
        torch.randint(policy.chat.vocabulary, (length,), generator=rng) for length in (9, 5, 12)
    )
    # Behind any other first token, the numbers of some models are far off in bfloat16.
    bos: Any = getattr(policy.chat.tokenizer, "bos_token_id", None)
    prompt[0] = bos if bos in range(policy.chat.vocabulary) else prompt[0]
    packed = Packed.build([(prompt.tolist(), completions)], policy.device)
    try:
        ours_T = policy.model(packed, tau=1.0).cpu()
    except (AttributeError, LookupError, TypeError) as error:
        # Its modules are not the ones that other models have.
        model_type = lm.config.get_text_config().model_type
        problem = f"models of type {model_type!r} are not supported: {describe_error(error)}"
        raise ValueError(problem) from error

    lm.set_attn_implementation("eager")
    theirs: list[Tensor] = []
    for completion in completions:
        sequence = torch.cat([prompt, completion]).to(policy.device)  # int64 [P + t]
        logits = lm(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0].float()
        # The logits of a token predict the next one.
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]  # [t, V]
        theirs.append(logp.cpu().gather(1, completion[:, None]).squeeze(1))
    lm.set_attn_implementation(attention.NAME)
    lm.train(was_training)

    difference = (ours_T - torch.cat(theirs)).abs().mean().item()
    tolerance = ATTENTION_TOLERANCE[policy.dtype]
    # Not `difference > tolerance`, which is False for NaN.
    if not difference <= tolerance:
        raise ValueError(
            f"{type(lm).__name__} is not supported: log-probs differ from transformers' by "
            f"{difference:.3g} on average (tolerance {tolerance})"
        )
    return difference
