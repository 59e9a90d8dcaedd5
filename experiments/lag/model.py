"""A small Llama, as many times as there are runs:

S runs are stacked, and each product is one of S pairs of matrices.

A run's numbers do not depend on the other runs of its stack, to the bit: each operation is on one
run, or on elements whose place does not matter (sizes are multiples of 32, so that no vector
instruction has a remainder).

Shapes: S runs, B prompts of P tokens each, G completions per prompt of L tokens each, V tokens in
the vocabulary, d numbers per position, H heads of h numbers each. The last token of a completion
has no successor, so a pass through the model computes K = L - 1 tokens of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
"""The weights of S runs by name, each [S, ...], matrices as [S, inputs, outputs]."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a model, which ties its output to its embedding."""

    vocabulary: int
    width: int = 32
    inner: int = 128
    layers: int = 1
    heads: int = 2
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of a run, by name, in the order in which `unpack` finds them."""
        d = self.width
        shapes: dict[str, tuple[int, ...]] = {"embedding": (self.vocabulary, d), "norm": (d,)}
        for layer in range(self.layers):
            shapes[f"{layer}.attention_norm"] = (d,)
            shapes[f"{layer}.qkv"] = (d, 3 * d)
            shapes[f"{layer}.attention_output"] = (d, d)
            shapes[f"{layer}.mlp_norm"] = (d,)
            shapes[f"{layer}.gate_up"] = (d, 2 * self.inner)
            shapes[f"{layer}.down"] = (self.inner, d)
        return shapes

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())


def initial_weights(architecture: Architecture, seed: int) -> Tensor:
    """Random weights of one run, [1, parameters]: matrices with a deviation of .02, norms of 1."""
    random = np.random.default_rng(seed)
    flat = []
    for shape in architecture.shapes.values():
        is_norm = len(shape) == 1
        values = np.ones(shape) if is_norm else 0.02 * random.standard_normal(shape)
        flat.append(torch.from_numpy(values).float().flatten())
    return torch.cat(flat)[None]


def unpack(architecture: Architecture, flat: Tensor) -> Weights:
    """The weights in [S, parameters], as views."""
    shapes = architecture.shapes
    columns = flat.split([prod(shape) for shape in shapes.values()], dim=1)
    return {
        name: column.view(-1, *shape)
        for (name, shape), column in zip(shapes.items(), columns, strict=True)
    }


class Samples(NamedTuple):
    """Completions that a policy sampled, each [S, B, G, L].

    After the end of a completion: padding, 0, 0.
    """

    tokens: Tensor
    logp: Tensor
    entropy: Tensor


class Cache(NamedTuple):
    """Keys and values that completions attend to while they are sampled, one tensor a layer."""

    prompt_keys: list[Tensor]
    """[S B H, h, P]"""
    prompt_values: list[Tensor]
    """[S B H, P, h]"""
    own_keys: list[Tensor]
    """[S B H G, L, h]; 0 after the latest token"""
    own_values: list[Tensor]
    """[S B H G, L, h]; 0 after the latest token"""


class StackedLlama:
    """Log-probs and samples of stacked runs.

    Prompts have one length, completions have another at most.
    """

    def __init__(self, architecture: Architecture, prompt_length: int, completion_length: int):
        self.architecture = architecture
        self.P = prompt_length
        self.L = completion_length
        self._cosine, self._sine = _rotations(architecture, prompt_length + completion_length)
        K = completion_length - 1
        self._mask_own = torch.cat([torch.zeros(K, prompt_length), _causal_mask(K)], dim=1)

    def compile(self) -> None:
        """Makes log-probs and samples a third faster, and their numbers differ by rounding.

        Each number of runs takes a minute at first. It needs a C++ compiler.
        """
        self.log_probs = torch.compile(self.log_probs, dynamic=False)
        self.next_log_probs = torch.compile(self.next_log_probs, dynamic=False)

    def log_probs(self, weights: Weights, prompts: Tensor, completions: Tensor) -> Tensor:
        """The log-prob of each token [S, B, G, L], nats.

        prompts [S, B, P], completions [S, B, G, L]. Each prompt is computed once, and its
        completions attend to it.
        """
        S, B, G, _ = completions.shape
        P = self.P
        own = completions[..., :-1]
        x, _, _ = self._read(weights, prompts, own)
        log_p = self._log_softmax(weights, x).view(S, B, P + G * own.shape[-1], -1)
        # The last position of the prompt predicts the first token of each of its completions.
        first = log_p[:, :, P - 1, None].expand(-1, -1, G, -1)[:, :, :, None]
        log_p = torch.cat([first, log_p[:, :, P:].reshape(*own.shape, -1)], dim=3)
        return log_p.gather(-1, completions[..., None])[..., 0]

    def _read(
        self, weights: Weights, prompts: Tensor, own: Tensor, *, only_keys: bool = False
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Reads prompts [S, B, P] and K tokens of each of their completions, own [S, B, G, K].

        Returns the last hidden states [S, B M, d], and for each layer keys and values, each [S B,
        M, H, h]. M = P + G K positions per prompt: its own, then its completions one after the
        other. With `only_keys` the states are those before the last layer.
        """
        S, B, G, K = own.shape
        P = self.P
        M = P + G * K
        tokens = torch.cat([prompts, own.reshape(S, B, -1)], dim=-1)
        positions = torch.cat([torch.arange(P), (P + torch.arange(K)).repeat(G)])
        x = _embed(weights["embedding"], tokens.view(S, B * M))
        keys = []
        values = []
        for layer in range(self.architecture.layers):
            q, k, v = self._project(weights, layer, x, S * B, positions)  # each [S B, M, H, h]
            keys.append(k)
            values.append(v)
            if only_keys and layer == self.architecture.layers - 1:
                break
            prompt_attended = F.scaled_dot_product_attention(
                q[:, :P].transpose(1, 2),
                k[:, :P].transpose(1, 2),
                v[:, :P].transpose(1, 2),
                is_causal=True,
            ).transpose(1, 2)  # [S B, P, H, h]
            q_own = q[:, P:].reshape(S * B * G, K, *q.shape[2:]).transpose(1, 2)
            completions_attended = F.scaled_dot_product_attention(
                q_own,
                self._with_prompt(k, G),
                self._with_prompt(v, G),
                self._mask_own[:K, : P + K],
            )  # [S B G, H, K, h]
            completions_attended = completions_attended.transpose(1, 2).reshape(
                S * B, G * K, *q.shape[2:]
            )
            attended = torch.cat([prompt_attended, completions_attended], dim=1)
            x = self._finish_layer(weights, layer, x, attended.reshape(S, B * M, -1))
        return x, keys, values

    @torch.no_grad()
    def sample(
        self,
        policies: Sequence[Weights],
        prompts: Tensor,
        uniform: Tensor,
        end: int,
        padding: int,
    ) -> Samples:
        """Draws completions of prompts [S, B, P] by inversion.

        `policies` has the weights for each position, or one for all. Where they change, keys and
        values are computed again. `uniform` [S, B, G, L] has the random numbers, in [0, 1).
        """
        S, B, _ = prompts.shape
        G, L = uniform.shape[2:]
        weights = policies[0]
        log_p, prompt_keys, prompt_values = self._read_prompts(weights, prompts)
        log_p = log_p.view(S, B, 1, -1).expand(-1, -1, G, -1)  # [S, B, G, V]
        sequences = S * B * self.architecture.heads * G
        layers = range(self.architecture.layers)
        own_shape = sequences, L, self.architecture.head_width
        cache = Cache(
            prompt_keys=prompt_keys,
            prompt_values=prompt_values,
            own_keys=[torch.zeros(own_shape) for _ in layers],
            own_values=[torch.zeros(own_shape) for _ in layers],
        )
        samples = Samples(
            torch.full(uniform.shape, padding), torch.zeros_like(uniform), torch.zeros_like(uniform)
        )
        is_done = torch.zeros(S, B, G, dtype=torch.bool)
        for t in range(L):
            p = log_p.exp()
            token = (p.cumsum(dim=-1) <= uniform[..., t, None]).sum(dim=-1)
            # Rounding may leave the sum of all probabilities below `uniform`.
            token = token.clamp(max=self.architecture.vocabulary - 1)
            token = torch.where(is_done, padding, token)
            logp = log_p.gather(-1, token[..., None])[..., 0]
            samples.tokens[..., t] = token
            samples.logp[..., t] = logp.masked_fill(is_done, 0.0)
            samples.entropy[..., t] = -(p * log_p).sum(dim=-1).masked_fill(is_done, 0.0)
            is_done = is_done | (token == end)
            if t == L - 1 or bool(is_done.all()):
                break
            if len(policies) > 1 and policies[t + 1] is not weights:
                weights = policies[t + 1]
                cache = self._read_again(weights, prompts, samples.tokens[..., :t])
            log_p = self.next_log_probs(weights, token, torch.tensor([t]), cache)
        return samples

    def _read_again(self, weights: Weights, prompts: Tensor, own: Tensor) -> Cache:
        """The keys and values of prompts [S, B, P] and of the tokens `own` [S, B, G, K] so far."""
        _, _, G, K = own.shape
        P = self.P
        _, keys, values = self._read(weights, prompts, own, only_keys=True)
        cache = Cache([], [], [], [])
        for k, v in zip(keys, values, strict=True):
            cache.prompt_keys.append(k[:, :P].permute(0, 2, 3, 1).flatten(0, 1))
            cache.prompt_values.append(v[:, :P].transpose(1, 2).flatten(0, 1))
            for all_heads, own_heads in (k, cache.own_keys), (v, cache.own_values):
                by_completion = all_heads[:, P:].unflatten(1, (G, K))  # [S B, G, K, H, h]
                by_head = by_completion.permute(0, 3, 1, 2, 4).flatten(0, 2)  # [S B H G, K, h]
                own_heads.append(F.pad(by_head, (0, 0, 0, self.L - K)))
        return cache

    def next_log_probs(self, weights: Weights, token: Tensor, t: Tensor, cache: Cache) -> Tensor:
        """Log-probs of the token after `token` [S, B, G], which is number t of its completion.

        Returns [S, B, G, V] and writes the keys and values of `token` into the cache. All shapes
        are the same at each t, a tensor [1], so that it compiles once.
        """
        S, B, G = token.shape
        H = self.architecture.heads
        h = self.architecture.head_width
        x = _embed(weights["embedding"], token.view(S, B * G))
        for layer in range(self.architecture.layers):
            q, k, v = self._project(weights, layer, x, S * B, self.P + t)
            q, k, v = (heads.transpose(1, 2).reshape(-1, h) for heads in (q, k, v))  # [S B H G, h]
            own_keys = cache.own_keys[layer].index_copy_(1, t, k[:, None])
            own_values = cache.own_values[layer].index_copy_(1, t, v[:, None])
            attended = _attend_to_prompt_and_own(
                q * h**-0.5,
                cache.prompt_keys[layer],
                cache.prompt_values[layer],
                own_keys,
                own_values,
                is_future=torch.arange(self.L) > t,
            )
            attended = attended.view(S, B, H, G, h).transpose(2, 3).reshape(S, B * G, -1)
            x = self._finish_layer(weights, layer, x, attended)
        return self._log_softmax(weights, x).view(S, B, G, -1)

    def _read_prompts(
        self, weights: Weights, prompts: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Reads the prompts [S, B, P].

        Returns log-probs of the first token after each prompt [S, B, V], and what completions
        attend to: for each layer the prompts' keys [S B H, h, P] and values [S B H, P, h].
        """
        S, B, P = prompts.shape
        H = self.architecture.heads
        h = self.architecture.head_width
        keys = []
        values = []
        x = _embed(weights["embedding"], prompts.view(S, B * P))
        for layer in range(self.architecture.layers):
            q, k, v = self._project(weights, layer, x, S * B, torch.arange(P))
            q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # each [S B, H, P, h]
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = self._finish_layer(weights, layer, x, attended.reshape(S, B * P, -1))
            keys.append(k.reshape(S * B * H, P, h).transpose(1, 2))
            values.append(v.reshape(S * B * H, P, h))
        last = x.view(S, B, P, -1)[:, :, -1]  # [S, B, d]
        return self._log_softmax(weights, last), keys, values

    def _project(
        self, weights: Weights, layer: int, x: Tensor, sequences: int, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [sequences, positions, H, h].

        Queries and keys are rotated by their positions.
        """
        H = self.architecture.heads
        h = self.architecture.head_width
        normed = self._norm(x, weights[f"{layer}.attention_norm"])
        qkv = torch.bmm(normed, weights[f"{layer}.qkv"])
        qkv = qkv.view(sequences, -1, 3 * H, h)
        qk = qkv[:, :, : 2 * H]
        v = qkv[:, :, 2 * H :]
        half = h // 2
        swapped = torch.cat([qk[..., half:], qk[..., :half]], dim=-1)
        qk = qk * self._cosine[positions] + swapped * self._sine[positions]
        return qk[:, :, :H], qk[:, :, H:], v

    def _with_prompt(self, heads: Tensor, G: int) -> Tensor:
        """Keys or values [S B, M, H, h] as each completion sees them: [S B G, H, P + K, h]."""
        sequences, _, H, h = heads.shape
        prompt_heads = heads[:, None, : self.P].expand(-1, G, -1, -1, -1)  # [S B, G, P, H, h]
        completion_heads = heads[:, self.P :].reshape(sequences, G, -1, H, h)  # [S B, G, K, H, h]
        all_heads = torch.cat([prompt_heads, completion_heads], dim=2)
        return all_heads.flatten(0, 1).transpose(1, 2)

    def _finish_layer(self, weights: Weights, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        x = x + torch.bmm(attended, weights[f"{layer}.attention_output"])
        normed = self._norm(x, weights[f"{layer}.mlp_norm"])
        gate, up = torch.bmm(normed, weights[f"{layer}.gate_up"]).chunk(2, dim=-1)
        return x + torch.bmm(F.silu(gate) * up, weights[f"{layer}.down"])

    def _log_softmax(self, weights: Weights, x: Tensor) -> Tensor:
        x = self._norm(x, weights["norm"])
        return torch.bmm(x, weights["embedding"].transpose(1, 2)).log_softmax(dim=-1)

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        """RMSNorm of x [S, positions, d] with scale [S, d]."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.architecture.norm_epsilon) * scale[:, None]


def _embed(embedding: Tensor, tokens: Tensor) -> Tensor:
    """The rows [S, positions, d] of tokens [S, positions] in the embeddings [S, V, d]."""
    return torch.bmm(F.one_hot(tokens, embedding.shape[1]).to(embedding.dtype), embedding)


def _attend_to_prompt_and_own(
    q: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    is_future: Tensor,
) -> Tensor:
    """Attention of one new token per completion, [S B H G, h].

    q [S B H G, h] is scaled. prompt_keys [S B H, h, P] and prompt_values [S B H, P, h] are those of
    the prompt; own_keys and own_values [S B H G, L, h] those of the completion, of which those that
    are future [L] count nothing.
    """
    sequences, h, P = prompt_keys.shape
    to_prompt = torch.bmm(q.view(sequences, -1, h), prompt_keys).view(-1, P)
    to_own = torch.bmm(own_keys, q[:, :, None])[..., 0].masked_fill(is_future, float("-inf"))
    share = torch.cat([to_prompt, to_own], dim=-1).softmax(dim=-1)
    from_prompt = torch.bmm(share[:, :P].view(sequences, -1, P), prompt_values).view(-1, h)
    from_own = torch.bmm(share[:, None, P:], own_values)[:, 0]
    return from_prompt + from_own


def _causal_mask(length: int) -> Tensor:
    """0 on and below the diagonal, -inf above, [length, length]."""
    return torch.full((length, length), float("-inf")).triu(1)


def _rotations(architecture: Architecture, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of rotary embedding, each [length, 1, h].

    As in transformers, element i of a head is rotated with element i + h / 2.
    """
    h = architecture.head_width
    frequency = architecture.rope_theta ** (-torch.arange(0, h, 2).float() / h)
    angle = torch.arange(length).float()[:, None] * frequency
    cosine = torch.cat([angle.cos(), angle.cos()], dim=-1)
    sine = torch.cat([-angle.sin(), angle.sin()], dim=-1)
    return cosine[:, None], sine[:, None]
