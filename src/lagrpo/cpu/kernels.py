"""The C kernels as functions of tensors.

They compute norms, activation, rotary embedding, linear layers, attention, decoding, and softmax.

All tensors are on the CPU. They have one dtype, float32 or bfloat16, unless a docstring says
float32 or int64. Each struct here is one of kernels.h, field by field. A struct has only the
addresses of its tensors, so each function keeps them in a name until its call has returned.

Shapes: n rows of a packed row or of a step; H hidden size; Hq query heads, Hkv key-value heads, D
numbers in a head; N groups; S segments; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lagrpo.cpu.library import VECTOR, Arguments, call, struct

# The gradient of a norm's weight is a sum over rows. It is the sum of this many slices, whatever
# the number of threads, so that threads change no bit.
SLICES = 16
# softmax.c's BLOCK
SOFTMAX_BLOCK = 256


class Row(Protocol):
    """The segments of a packed row, as model/layout.py describes them."""

    @property
    def segments(self) -> Tensor:
        """int64 [S, 4]: first row, length, first row of the prompt, length of the prompt."""
        ...

    @property
    def groups(self) -> Tensor:
        """int64 [N + 1]: the number of segments before each group."""
        ...


def floats(*shape: int) -> Tensor:
    """Returns uninitialized float32 on the CPU, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _round_up(count: int) -> int:
    """Returns the smallest multiple of VECTOR that is not less than `count`."""
    return -(-count // VECTOR) * VECTOR


# Between matrix products and attention

_Norm = struct(counts="rows width", pointers="x delta weight total y rstd", floats="eps")
_NormBackward = struct(
    counts="rows width slices", pointers="x weight grad_y grad_total rstd grad_x grad_weight"
)
_Gated = struct(counts="rows width stride", pointers="gate up")
_Rotary = struct(counts="rows heads d stride", pointers="x cosine sine y", floats="sign")


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds `delta` to x, and computes the RMS norm of the sum, times `weight`.

    x and delta are [n, width], the weight is [width]. Returns x + delta [n, width], its norm
    [n, width], and 1 / rms, float32 [n]. Without a delta the first result is x.
    """
    rows, width = x.shape
    x = x.contiguous()
    total = x
    if delta is not None:
        delta = delta.contiguous()
        total = torch.empty_like(x)
    y = torch.empty_like(x)
    rstd = floats(rows)
    arguments = _Norm(
        rows=rows,
        width=width,
        x=x,
        delta=delta,
        weight=weight,
        total=total,
        y=y,
        rstd=rstd,
        eps=eps,
    )
    call("norm", arguments)
    return total, y, rstd


def norm_backward(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `norm`, whose first result is `x`.

    Returns the gradient of the sum [n, width], its own gradient `grad_total` included, and the
    gradient of the weight [width].
    """
    rows, width = x.shape
    slices = min(rows, SLICES)
    grad_y = grad_y.contiguous()
    if grad_total is not None:
        grad_total = grad_total.contiguous()
    grad_x = torch.empty_like(x)
    # The kernel adds up whole vectors.
    grad_weight = floats(slices, _round_up(width))
    arguments = _NormBackward(
        rows=rows,
        width=width,
        slices=slices,
        x=x,
        weight=weight,
        grad_y=grad_y,
        grad_total=grad_total,
        rstd=rstd,
        grad_x=grad_x,
        grad_weight=grad_weight,
    )
    call("norm_backward", arguments)
    return grad_x, grad_weight[:, :width].sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up [n, width].

    Both are [n, width], with the same distance between their rows.
    """
    y = gate.new_empty(gate.shape)
    arguments = _Gated(rows=len(y), width=y.shape[1], stride=gate.stride(0), gate=gate, up=up)
    call("swiglu", arguments, y)
    return y


def swiglu_backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result of `swiglu`, and the gradients of gate and up: [n, width] each."""
    y = gate.new_empty(gate.shape)
    grad_gate = gate.new_empty(gate.shape)
    grad_up = gate.new_empty(gate.shape)
    arguments = _Gated(rows=len(y), width=y.shape[1], stride=gate.stride(0), gate=gate, up=up)
    call("swiglu_backward", arguments, grad_y.contiguous(), y, grad_gate, grad_up)
    return y, grad_gate, grad_up


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool = False) -> Tensor:
    """Returns x [n, heads, D], turned by the angles whose cosines and sines are [n, D].

    With `back` it is turned the other way, which is the gradient. D is a multiple of 2 VECTOR.
    """
    rows, heads, d = x.shape
    y = x.new_empty(x.shape)
    arguments = _Rotary(
        rows=rows,
        heads=heads,
        d=d,
        stride=x.stride(0),
        x=x,
        cosine=cosine,
        sine=sine,
        y=y,
        sign=-1.0 if back else 1.0,
    )
    call("rotary", arguments)
    return y


# Attention along a packed row


_Attention = struct(
    counts="count heads kv_heads d stride",
    pointers="segments q k_t v out lse",
    floats="scaling",
)
_AttentionBackward = struct(
    counts="n_groups heads kv_heads d stride",
    pointers="groups segments q k k_t v_t out grad_out lse grad_q grad_k grad_v",
    floats="scaling",
)


def numbers_in_a_lane(dtype: torch.dtype) -> int:
    """Returns the numbers in a lane of 32 bits.

    A lane is one float32, or a pair of bfloat16 that are neighbors in a sum.
    """
    return 4 // dtype.itemsize


def transposed(x: Tensor) -> Tensor:
    """Transposes [n, heads, D] to lanes [heads, D / lane, n + padding]: rows are neighbors.

    One vector then has the same numbers of 16 keys, and a product with a query gives 16 scores. The
    padding is at least VECTOR lanes: the kernels read whole vectors, beyond the last row too.
    """
    rows, heads, d = x.shape
    lanes = d // numbers_in_a_lane(x.dtype)
    y = floats(heads, lanes, _round_up(rows) + VECTOR)
    call("transpose", rows, heads, lanes, x, y, y.shape[2])
    return y


def paired(x: Tensor) -> Tensor:
    """Returns [n, heads, D] as lanes of the same shape.

    In bfloat16 a lane is the pair of a number and the same number of the next row, so that sums
    over rows take two rows at a time. Every row has its pair, because a segment may begin anywhere.
    """
    if x.dtype != torch.bfloat16:
        return x
    y = floats(*x.shape)
    call("pair_rows", len(x), x.shape[1] * x.shape[2], x, y)
    return y


def attention(
    row: Row, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attends along a packed row, with shared prefixes.

    The query is [n, Hq, D], key and value are [n, Hkv, D], all contiguous; D is a multiple of
    VECTOR. Returns the output [n, Hq, D] and the log-sum-exp of each softmax, float32 [n, Hq].
    """
    rows, heads, d = query.shape
    out = torch.empty_like(query)
    lse = floats(rows, heads)
    keys = transposed(key)  # lanes [Hkv, D / lane, n + padding]
    values = paired(value)  # lanes [n, Hkv, D]
    arguments = _Attention(
        count=len(row.segments),
        heads=heads,
        kv_heads=key.shape[1],
        d=d,
        stride=keys.shape[2],
        segments=row.segments,
        q=query,
        k_t=keys,
        v=values,
        out=out,
        lse=lse,
        scaling=scaling,
    )
    call("attention", arguments)
    return out, lse


def attention_backward(
    row: Row,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `attention` from its arguments and results; all contiguous.

    Returns the gradients of query [n, Hq, D], key [n, Hkv, D] and value [n, Hkv, D].
    """
    heads = query.shape[1]
    kv_heads = key.shape[1]
    d = query.shape[2]
    grad_query = torch.empty_like(query)
    # The kernel adds up the gradients of keys and values over their queries, in float32.
    grad_key = torch.zeros(key.shape, dtype=torch.float32, device="cpu")
    grad_value = torch.zeros(value.shape, dtype=torch.float32, device="cpu")
    paired_keys = paired(key)  # lanes [n, Hkv, D]
    keys = transposed(key)  # lanes [Hkv, D / lane, n + padding]
    values = transposed(value)
    arguments = _AttentionBackward(
        n_groups=len(row.groups) - 1,
        heads=heads,
        kv_heads=kv_heads,
        d=d,
        stride=keys.shape[2],
        groups=row.groups,
        segments=row.segments,
        q=query,
        k=paired_keys,
        k_t=keys,
        v_t=values,
        out=out,
        grad_out=grad_out,
        lse=lse,
        grad_q=grad_query,
        grad_k=grad_key,
        grad_v=grad_value,
        scaling=scaling,
    )
    call("attention_backward", arguments)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


# Decoding

_Active = struct(
    counts="n_groups own_batch own_capacity prompt_capacity",
    pointers=(
        "groups members prompts lengths caches own_keys own_values prompt_keys prompt_values"
    ),
    half="",
)
_NewTokens = struct(counts="heads kv_heads d v_stride", pointers="q k v out", floats="scaling")
_Stack = struct(
    counts="count width inner heads kv_heads d rank",
    pointers="layers",
    floats="scaling eps",
    half="",
)


@dataclass(frozen=True, slots=True)
class Active:
    """The n tokens of a decoding step, and the caches that they read and extend.

    The caches are in lanes (see `numbers_in_a_lane`). There is one cache for each row of the
    rollout engine (own), and one for each group (prompt). Their capacity is in tokens, a multiple
    of VECTOR. Keys have the tokens side by side, as `transposed` has them; values have pairs of
    tokens.
    """

    longest: int  # tokens of the longest sequence
    groups: Tensor  # int64 [N + 1]: the number of members before each group
    members: Tensor  # int64 [n]: the tokens, group after group
    prompts: Tensor  # int64 [N]: the length of each group's prompt
    lengths: Tensor  # int64 [n]: the number of tokens before this one in its row's own cache
    caches: Tensor  # int64 [n]: the index of that cache; tokens of one sequence share it
    own_keys: Tensor  # [layers, caches, Hkv, D / lane, capacity]
    own_values: Tensor  # [layers, caches, Hkv, capacity / lane, D]
    prompt_keys: Tensor  # [layers, N, Hkv, D / lane, capacity]
    prompt_values: Tensor  # [layers, N, Hkv, capacity / lane, D]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        return decode(self, layer, query, key, value, scaling)

    def in_c(self, layer: int = 0) -> Arguments:
        """Returns the struct for C, with the caches from `layer` on."""
        return _Active(
            n_groups=len(self.prompts),
            own_batch=self.own_keys.shape[1],
            own_capacity=self.own_keys.shape[4],
            prompt_capacity=self.prompt_keys.shape[4],
            groups=self.groups,
            members=self.members,
            prompts=self.prompts,
            lengths=self.lengths,
            caches=self.caches,
            own_keys=self.own_keys[layer],
            own_values=self.own_values[layer],
            prompt_keys=self.prompt_keys[layer],
            prompt_values=self.prompt_values[layer],
        )


def decode(
    active: Active, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Attends with one query for each token, to its group's prompt and its row's own tokens.

    The query is [n, Hq, D]; the new key and value, [n, Hkv, D], are first put into the caches.
    Returns [n, Hq, D].
    """
    query = query.contiguous()
    key = key.contiguous()
    heads, d = query.shape[1:]
    # The rows of a value may be apart, as in the joint product of query, key and value.
    if value.stride()[1:] != (d, 1):
        value = value.contiguous()
    out = torch.empty_like(query)
    new_tokens = _NewTokens(
        heads=heads,
        kv_heads=key.shape[1],
        d=d,
        v_stride=value.stride(0),
        q=query,
        k=key,
        v=value,
        out=out,
        scaling=scaling,
    )
    call("decode", active.in_c(layer), new_tokens)
    return out


class LinearWeights(NamedTuple):
    """The fields of kernels.h's Linear: packed weights, float32 biases, and packed adapters."""

    rank: int
    weights: Tensor
    bias: Tensor | None
    down: Tensor | None
    up: Tensor | None


class LayerWeights(NamedTuple):
    """The fields of kernels.h's Layer. The norms of queries and keys are None in most families."""

    input_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights

    def in_c(self) -> list[int]:
        """Returns the struct as C has it: every field is an address or a number of 8 bytes."""
        fields: list[Tensor | int | None] = [
            self.input_norm,
            self.query_norm,
            self.key_norm,
            self.mlp_norm,
            *self.qkv,
            *self.output,
            *self.gate_up,
            *self.down,
        ]
        return [
            field.data_ptr() if isinstance(field, Tensor) else field or 0  # None: NULL
            for field in fields
        ]


class Stack:
    """A decoder's layers, all alike, with packed weights, as `decode_step` takes them."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        *,
        width: int,
        inner: int,
        heads: int,
        kv_heads: int,
        d: int,
        rank: int,
        scaling: float,
        eps: float,
    ) -> None:
        """Takes the weights of each layer, and the numbers of kernels.h's Stack."""
        # C has only the addresses of the weights.
        self._layers = layers
        self._addresses = torch.tensor([layer.in_c() for layer in layers])  # int64 [layers, fields]
        self.in_c = _Stack(
            count=len(layers),
            layers=self._addresses,
            width=width,
            inner=inner,
            heads=heads,
            kv_heads=kv_heads,
            d=d,
            rank=rank,
            scaling=scaling,
            eps=eps,
        )


def decode_step(
    stack: Stack, active: Active, x: Tensor, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """Takes n tokens through all layers, in bfloat16.

    x [n, H] are their embeddings, cosine and sine [n, D] the angles of their positions; all
    contiguous. Overwrites x with the residual stream before its last addition. Returns x and the
    term that is still to be added, [n, H] each.
    """
    delta = torch.empty_like(x)
    call("decode_step", stack.in_c, active.in_c(), len(x), cosine, sine, x, delta)
    return x, delta


# Linear layers

_Linear = struct(counts="rank", pointers="weights bias down up", half="")


def linear(x: Tensor, n: int, weights: LinearWeights, out: Tensor | None = None) -> Tensor:
    """Computes linear layers of x [rows, k]: [rows, n], in `out` if it is given. bfloat16."""
    y = out
    if y is None:
        y = x.new_empty(len(x), n)
    # Room for the inputs of the adapters' second products.
    low = x.new_empty(len(x), weights.rank)
    call("linear", len(x), n, x.shape[1], x.contiguous(), _Linear(**weights._asdict()), low, y)
    return y


# The softmax over the vocabulary

_Logits = struct(counts="rows width", pointers="x", floats="over_tau")


def _logits(logits: Tensor, tau: float) -> Arguments:
    rows, vocabulary = logits.shape
    return _Logits(rows=rows, width=vocabulary, x=logits, over_tau=1.0 / tau)


def token_logp(
    logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes log softmax(logits / tau)[token] of logits [n, V] and tokens int64 [n].

    Returns the log-probs and the log-sum-exp of each row, float32 [n] each, nats. `entropy`,
    float32 [n], is filled with the entropy of each softmax, nats.
    """
    lse = floats(len(logits))
    logp = floats(len(logits))
    call("token_logp", _logits(logits, tau), token_ids, lse, logp, entropy)
    return logp, lse


def token_logp_backward(
    logits: Tensor,
    token_ids: Tensor,
    tau: float,
    lse: Tensor,
    grad: Tensor,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """Overwrites `logits` [n, V] by their gradient grad / tau (onehot - softmax). Returns them.

    `lse` is the log-sum-exp of each row, `grad` the gradient of its log-prob: float32 [n] each.
    `entropy` and `grad_entropy`, its gradient, come together: they add -grad_entropy / tau
    softmax (log softmax + entropy).
    """
    call(
        "token_logp_backward",
        _logits(logits, tau),
        token_ids,
        lse,
        grad,
        entropy if grad_entropy is not None else None,
        grad_entropy,
    )
    return logits


def sample_tokens(logits: Tensor, tau: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples tokens from softmax(logits / tau), logits [n, V], by inverse CDF.

    `uniform` is float64 [n] in [0, 1). Returns the tokens, int64 [n], and their log-probs, float32
    [n], which equal the result of `token_logp` to the bit.
    """
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.long, device="cpu")
    logp = floats(rows)
    # Room for the cumulative sums at the ends of blocks of the vocabulary.
    num_blocks = -(-vocabulary // SOFTMAX_BLOCK)
    block_ends = torch.empty(rows, num_blocks, dtype=torch.float64, device="cpu")
    call("sample_tokens", _logits(logits, tau), uniform, block_ends, tokens, logp)
    return tokens, logp
