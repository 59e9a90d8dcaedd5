"""Policy: a causal language model of transformers, called on packed rows.

Loads a model with shared-prefix attention, refuses by name what that attention does not reproduce, and checks on a
small input that it computes what transformers computes. Gives hidden states and log-probs of completion tokens only:
the LM head never runs on prompt positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lagrpo.backends import attention, flex
from lagrpo.backends.cpu import kernels
from lagrpo.backends.cpu.fused import FusedDecoder
from lagrpo.backends.cpu.packs import Packing, Packs
from lagrpo.backends.layout import PackedLayout
from lagrpo.backends.logprobs import token_logp
from lagrpo.policy.checkpoint import match_weights, model_class, read_headers, read_tokenizer
from lagrpo.policy.configs import blaming, read_config
from lagrpo.policy.templates import Templates
from lagrpo.types import Prompt

OUTPUTS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""What a forward pass returns, whatever config.json says: it may be a tuple, or carry what nobody reads."""

ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}  # mean |Δ log-prob|, nats


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed row ready for the model: its layout, `input_ids` [rows] and the completion tokens `token_ids` [T]."""

    layout: PackedLayout
    input_ids: Tensor
    token_ids: Tensor

    @staticmethod
    def build(groups: Sequence[tuple[Sequence[int], Sequence[Tensor]]], device: torch.device | str = "cpu") -> Packed:
        """From (prompt token ids, [completion token ids int64 [t]]) of each group."""
        layout = PackedLayout.build([(len(p), [len(c) for c in cs]) for p, cs in groups], device)
        rows, tokens = [], []
        for prompt_ids, completions in groups:
            rows.append(torch.tensor(prompt_ids, dtype=torch.long))
            rows += [c[:-1] for c in completions]
            tokens += completions
        ids = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.long)
        return Packed(layout, torch.cat(rows).to(device), ids.to(device))


class Policy:
    """A model, its tokenizer, and the version of the weights in it (how many optimizer updates they have had)."""

    def __init__(
        self, model: Any, tokenizer: Any, tau: float = 1.0, version: int = 0, templates: Templates | None = None
    ) -> None:
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.tau = tau
        self.version = version
        self.templates = templates if templates is not None else Templates()
        self.decoder: nn.Module = model.get_decoder()
        self.head: nn.Linear = model.get_output_embeddings()
        self.fused = FusedDecoder.of(model)
        self._packing: Packing | None = None
        widths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
        self._in_pairs = all(width % 2 == 0 for width in widths)  # as products of bfloat16 take their inputs

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def runs_fused(self) -> bool:
        """Whether the kernels compute whole layers."""
        return self.fused is not None and kernels.run_on(self.head.weight)

    @property
    def own_products(self) -> bool:
        """Whether the kernels compute all matrix products of the forward pass too: in bfloat16, from packed weights."""
        fits = self.runs_fused and self.dtype == torch.bfloat16 and self._in_pairs
        return fits and kernels.products() is not None

    @property
    def packing(self) -> Packing:
        """Who packs this policy's weights, and lends them."""
        if self._packing is None:
            self._packing = Packing(self.decoder, self.head)
        return self._packing

    def packs(self) -> Packs | None:
        """The packed weights of this version, where own_products."""
        return self.packing.current() if self.own_products else None

    @property
    def computation(self) -> str:
        """What computes the forward pass besides PyTorch's products, in words; compiles the kernels if they are to
        run."""
        shape = attention.Shape.of(self.model.config.get_text_config())
        if self.device.type != "cpu":
            reason = flex.why_not(self.device, self.dtype, shape.heads, shape.kv_heads, shape.d)
            return f"PyTorch: attention in tiles (no flex attention: {reason})" if reason else "PyTorch: flex attention"
        if not kernels.run_on(self.head.weight):
            return kernels.describe()
        kind = self.model.config.model_type
        besides = "" if self.fused else f"; norms and activations of {kind!r} by transformers"
        if shape.d % kernels.VECTOR:
            besides += f"; attention by PyTorch (heads of {shape.d} numbers, no multiple of {kernels.VECTOR})"
        products = f", forward products by {kernels.products()}" if self.own_products else ""
        return kernels.describe() + products + besides

    @property
    def decoding(self) -> str:
        """How tokens are sampled from this policy, in words."""
        if self.device.type != "cpu" and kernels.chosen() != "torch":
            return "steps recorded as CUDA graphs"
        packs = self.packs()
        if packs is not None and self.fused is not None and self.fused.stack(packs) is not None:
            return f"one call through all layers, products by {kernels.products()}"
        if packs is not None:
            return f"layer by layer, products by {kernels.products()}"
        return f"layer by layer, PyTorch's matrix products in {str(self.dtype).removeprefix('torch.')}"

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a completion: the generation config's (one or several) and the tokenizer's."""
        ids = {self.tokenizer.eos_token_id} if self.tokenizer is not None else set()
        configured = self.model.generation_config.eos_token_id
        ids |= set(configured) if isinstance(configured, list | tuple) else {configured}
        return frozenset(int(i) for i in ids if i is not None)

    def twin(self) -> Policy:
        """A second policy of the same architecture with storage of its own and the same weights."""
        import copy

        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return Policy(model, self.tokenizer, self.tau, self.version)

    def weights(self) -> dict[str, Tensor]:
        """Name -> tensor of every parameter and buffer that a checkpoint has; tied weights once."""
        return {name: tensor.detach() for name, tensor in stored(self.model).items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy π_version into this policy's own storage.

        Raises:
            ValueError: names or shapes that are not this model's.
        """
        own = stored(self.model)
        self.check_weights(weights, {name: tensor.shape for name, tensor in own.items()}, version)
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self.version = version

    @staticmethod
    def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], version: int) -> None:
        """Raise ValueError for names or shapes of version `version` that are not those of `shapes`."""
        if shapes.keys() != weights.keys():
            odd = sorted(shapes.keys() ^ weights.keys())
            raise ValueError(
                f"weights of version {version} do not fit the model: {len(odd)} names differ, e.g. {odd[0]}"
            )
        for name, shape in shapes.items():
            if shape != weights[name].shape:
                raise ValueError(f"{name} is {tuple(weights[name].shape)} in version {version}, not {tuple(shape)}")

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: attention.Layout) -> Tensor:
        """Final hidden states of one packed row: input_ids and position_ids [rows] -> [rows, H]."""
        if self.fused is not None and self.runs_fused:
            return self.fused(input_ids, position_ids, layout, self.packs())
        out = self.decoder(
            input_ids=input_ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            layout=layout,
        )
        return out.last_hidden_state.squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, H] -> [rows, V], in the model's dtype, without a gradient."""
        packs = self.packs()
        return packs.head(hidden) if packs is not None else F.linear(hidden, self.head.weight, self.head.bias)

    def logp(self, packed: Packed, entropy_T: Tensor | None = None) -> Tensor:
        """log π(token | prompt, tokens before it) at the policy's tau, of every completion token: float32 [T], nats.
        `entropy_T` float32 [T] is filled with the entropy of the distribution that each token stands for, nats."""
        hidden = self.hidden(packed.input_ids, packed.layout.position_ids, packed.layout)
        rows = hidden.index_select(0, packed.layout.logit_rows)
        packs = self.packs()
        product = packs.head if packs is not None else None
        return token_logp(rows, self.head.weight, self.head.bias, packed.token_ids, self.tau, entropy_T, product)

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The prompt with its token ids: through the chat template, or its plain text where the tokenizer has none.

        Raises:
            TemplateError: the chat template makes no text of it.
            ValueError: no tokens, or one that the model does not have.
        """
        if self.tokenizer.chat_template is None:
            text = "\n".join(message.get("content") or "" for message in prompt.messages)
            ids = self.encode(text)
        else:
            given = [{k: v for k, v in message.items() if v is not None} for message in prompt.messages]
            template = self.tokenizer.get_chat_template()
            text = self.templates.render(template, self.tokenizer.special_tokens_map, given)
            ids = self.encode(text, add_special_tokens=False)
        if not ids:
            raise ValueError(f"it has no token: it is the text {text!r:.80}")
        if (largest := max(ids)) >= (vocabulary := self.head.weight.shape[0]):
            raise ValueError(f"token {largest} is outside the model's vocabulary of {vocabulary}")
        return replace(prompt, token_ids=tuple(int(i) for i in ids))

    def encode(self, text: str, **options: Any) -> list[int]:
        """The token ids of a text, by the tokenizer with these options. Raises ValueError for a text with half of a
        surrogate pair, which no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a surrogate pair"
            raise ValueError(f"its character {error.start} is {half}, which no tokenizer takes") from error
        return self.tokenizer(text, **options)["input_ids"]

    def save(self, directory: Path) -> None:
        """A Hugging Face model directory: weights as safetensors, config, tokenizer and generation config."""
        self.model.save_pretrained(directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)


def stored(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has of a model: every parameter, tied ones once, and the buffers that are not made anew."""
    names = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in names}


def load_policy(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tau: float = 1.0,
    chat_template: str | None = None,
    templates: Templates | None = None,
) -> Policy:
    """A policy from a hub id or a directory, with shared-prefix attention. `templates` renders its prompts; whoever
    gives it closes it.

    Raises:
        ValueError: files that are damaged or do not fit together, by file and field (policy/checkpoint.py); a model
            that shared-prefix attention does not reproduce (named, with the reason).
        OSError: nothing that transformers can load is at `path`.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    if templates is not None:
        templates.start()  # gets ready while the model is loaded
    tokenizer = check_files(path)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    with blaming("transformers cannot load it"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.NAME, use_safetensors=True, trust_remote_code=False,
            **OUTPUTS,
        )  # fmt: skip
    check_finite(model)
    model.to(device)
    switch_off_dropout(model)
    policy = Policy(model, tokenizer, tau, templates=templates)
    check_attention(policy)
    return policy


def check_finite(model: nn.Module) -> None:
    """Raise ValueError for a weight that has no finite value in the dtype that it was loaded in."""
    for name, weight in model.named_parameters():
        if count := int((~weight.isfinite()).sum()):
            dtype = str(weight.dtype).removeprefix("torch.")
            raise ValueError(f"{name} has {count} of {weight.numel()} numbers that are not finite in {dtype}")


def check_files(path: str) -> Any:
    """The tokenizer of a model whose files fit together and that shared-prefix attention reproduces; no weight is read.

    Raises:
        ValueError, OSError: as `load_policy`.
    """
    config = read_config(path)
    check_supported(config)
    tokenizer = read_tokenizer(path, config)
    match_weights(config, read_headers(path, config))
    return tokenizer


def check_supported(config: Any) -> None:
    """Raise for a model whose forward pass this package does not reproduce, by name and with the reason."""
    text = config.get_text_config()
    name = text.model_type
    reasons = {
        "attention soft-capping (attn_logit_softcapping)": getattr(text, "attn_logit_softcapping", None),
        "soft-capping of the logits (final_logit_softcapping)": getattr(text, "final_logit_softcapping", None),
        "a scale on the logits (logit_scale)": getattr(text, "logit_scale", 1.0) not in (None, 1.0),
        "a scale on the logits (logits_scaling)": getattr(text, "logits_scaling", 1.0) not in (None, 1.0),
        "an encoder (is_encoder_decoder)": getattr(config, "is_encoder_decoder", False),
        "attention sinks": name == "gpt_oss",
        "latent attention (kv_lora_rank)": getattr(text, "kv_lora_rank", None),
        "layers that are not attention": set(getattr(text, "layer_types", None) or ())
        - {"full_attention", "sliding_attention"},
        "an attention of their own, outside transformers' registry": not _in_registry(config),
    }
    for reason, present in reasons.items():
        if present:
            raise ValueError(
                f"models of type {name!r} have {reason}, which lagrpo's shared-prefix attention does not reproduce; "
                "Llama, Qwen2, Qwen3, Mistral, Gemma (1) and their relatives are supported"
            )


def _in_registry(config: Any) -> bool:
    """Whether the model takes its attention from the registry; of a model that is no causal language model, True."""
    from transformers import AutoModelForCausalLM

    return type(config) not in AutoModelForCausalLM._model_mapping or model_class(config)._can_set_attn_implementation()


def check_context(policy: Policy, tokens: int) -> None:
    """Raise ValueError if prompts and completions of `tokens` tokens do not fit the model's window or positions."""
    text = policy.model.config.get_text_config()
    sliding = "sliding_attention" in (getattr(text, "layer_types", None) or ("sliding_attention",))
    window = getattr(text, "sliding_window", None) if sliding and getattr(text, "use_sliding_window", True) else None
    for limit, what in (
        (window, "sliding window"),
        (getattr(text, "max_position_embeddings", None), "longest position"),
    ):
        if limit is not None and tokens > limit:
            raise ValueError(
                f"a prompt and its completion may be {tokens} tokens long, but the {what} of this {text.model_type} "
                f"model is {limit}; lower sampling.max_prompt_tokens or sampling.max_tokens"
            )


def switch_off_dropout(model: nn.Module) -> None:
    """No randomness inside the policy: sampler and learner are the same function of the weights."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


@torch.no_grad()
def check_attention(policy: Policy) -> float:
    """Compare log-probs on a packed row with transformers' own attention on whole sequences; returns mean |Δ|, nats.

    Raises:
        ValueError: a difference beyond ATTENTION_TOLERANCE of the dtype: this model does something else than attend.
    """
    vocabulary = policy.head.weight.shape[0]
    rng = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(vocabulary, (n,), generator=rng)  # noqa: E731
    prompt, completions = ids(9), [ids(5), ids(12)]
    tau, policy.tau = policy.tau, 1.0
    ours = policy.logp(Packed.build([(prompt.tolist(), completions)], policy.device)).cpu()
    policy.tau = tau
    model: Any = policy.model
    model.set_attn_implementation("eager")
    theirs = []
    for completion in completions:
        row = torch.cat([prompt, completion]).to(policy.device)
        logits = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float()
        theirs.append(logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, row[len(prompt) :, None]).squeeze(1).cpu())
    model.set_attn_implementation(attention.NAME)
    difference = (ours - torch.cat(theirs)).abs().mean().item()
    if not difference <= ATTENTION_TOLERANCE[policy.dtype]:
        raise ValueError(
            f"{type(model).__name__}: log-probs with shared-prefix attention differ from transformers' by "
            f"{difference:.3g} on average (tolerance {ATTENTION_TOLERANCE[policy.dtype]} in {policy.dtype}); this "
            "model is not supported"
        )
    return difference
