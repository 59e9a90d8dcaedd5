"""The C kernels as functions of tensors: norms, activation, rotary embedding, attention, decoding, softmax.

All tensors are on the CPU and of one dtype, float32 or bfloat16, unless a docstring says float32 or int64. Each struct
here is one of kernels.h, field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lagrpo.cpu.library import VECTOR, Arguments, call, struct

SLICES = 16  # of the rows that a weight's gradient is a sum over: whatever the number of threads, the same sums
SOFTMAX_BLOCK = 256  # softmax.c's BLOCK


def floats(*shape: int) -> Tensor:
    """float32 on the CPU, with anything in it, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


# ---- between matrix products and attention ----

_Norm = struct("rows width", "x delta weight total y rstd", "eps")
_NormBackward = struct("rows width slices", "x weight grad_y grad_total rstd grad_x grad_weight")
_Gated = struct("rows width stride", "gate up")
_Rotary = struct("rows heads d stride", "x cosine sine y", "sign")


def norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its RMS norm times weight, 1 / rms): [n, width] twice and float32 [n]."""
    rows, width = x.shape
    x, delta = x.contiguous(), None if delta is None else delta.contiguous()
    total, y, rstd = x if delta is None else torch.empty_like(x), torch.empty_like(x), floats(rows)
    call(
        "norm",
        _Norm(
            rows=rows,
            width=width,
            x=x,
            delta=delta,
            weight=weight,
            total=total,
            y=y,
            rstd=rstd,
            eps=eps,
        ),
    )
    return total, y, rstd


def norm_backward(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm`: of x + delta [n, width], the sum's own `grad_total` included, and of the weight [width]."""
    rows, width = x.shape
    slices = min(rows, SLICES)
    grad_x, grad_weight = torch.empty_like(x), floats(slices, -(-width // VECTOR) * VECTOR)
    grad_y, grad_total = (
        grad_y.contiguous(),
        None if grad_total is None else grad_total.contiguous(),
    )
    call(
        "norm_backward",
        _NormBackward(
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
        ),
    )
    return grad_x, grad_weight[:, :width].sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [n, width] with the same distance between their rows."""
    y = gate.new_empty(gate.shape)
    call(
        "swiglu", _Gated(rows=len(y), width=y.shape[1], stride=gate.stride(0), gate=gate, up=up), y
    )
    return y


def swiglu_backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `swiglu` gave, and its gradients of gate and up; all contiguous."""
    y, grad_gate, grad_up = (gate.new_empty(gate.shape) for _ in range(3))
    given = _Gated(rows=len(y), width=y.shape[1], stride=gate.stride(0), gate=gate, up=up)
    call("swiglu_backward", given, grad_y.contiguous(), y, grad_gate, grad_up)
    return y, grad_gate, grad_up


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    """x [n, heads, d] turned by the angles of [n, d], or turned `back`; d a multiple of 2 VECTOR."""
    rows, heads, d = x.shape
    y, sign = x.new_empty(x.shape), -1.0 if back else 1.0
    call(
        "rotary",
        _Rotary(
            rows=rows,
            heads=heads,
            d=d,
            stride=x.stride(0),
            x=x,
            cosine=cosine,
            sine=sine,
            y=y,
            sign=sign,
        ),
    )
    return y


# ---- attention along a packed row ----


_Attention = struct("count heads kv_heads d stride", "segments q k_t v out lse", "scaling")
_AttentionBackward = struct(
    "n_groups heads kv_heads d stride",
    "groups segments q k k_t v_t out grad_out lse grad_q grad_k grad_v",
    "scaling",
)


def numbers_in_a_lane(dtype: torch.dtype) -> int:
    """A lane is 32 bits: one float32, or a pair of bfloat16 that are neighbors in a sum."""
    return 4 // dtype.itemsize


def transposed(x: Tensor) -> Tensor:
    """[rows, heads, d] -> lanes [heads, d or half of it, rows and at least VECTOR more]."""
    rows, heads, d = x.shape
    d //= numbers_in_a_lane(x.dtype)
    y = floats(heads, d, -(-rows // VECTOR) * VECTOR + VECTOR)
    call("transpose", rows, heads, d, x, y, y.shape[2])
    return y


def paired(x: Tensor) -> Tensor:
    """[rows, heads, d] as lanes of the same shape: in bfloat16 the pairs of each row and the next one."""
    if x.dtype != torch.bfloat16:
        return x
    y = floats(*x.shape)
    call("pair_rows", len(x), x.shape[1] * x.shape[2], x, y)
    return y


def attention(
    row: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Shared-prefix attention of a packed row (model/layout.py): out [rows, Hq, D] and log-sum-exps float32 [rows, Hq].
    D a multiple of VECTOR. All contiguous."""
    rows, heads, d = query.shape
    out, lse, keys, values = (
        torch.empty_like(query),
        floats(rows, heads),
        transposed(key),
        paired(value),
    )
    call(
        "attention",
        _Attention(
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
        ),
    )
    return out, lse


def attention_backward(
    row: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of `attention`, from what it was given and returned."""
    (_, heads, d), kv_heads = query.shape, key.shape[1]
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (
        torch.zeros(t.shape, dtype=torch.float32, device="cpu") for t in (key, value)
    )
    pairs, keys, values = paired(key), transposed(key), transposed(value)
    call(
        "attention_backward",
        _AttentionBackward(
            n_groups=len(row.groups) - 1,
            heads=heads,
            kv_heads=kv_heads,
            d=d,
            stride=keys.shape[2],
            groups=row.groups,
            segments=row.segments,
            q=query,
            k=pairs,
            k_t=keys,
            v_t=values,
            out=out,
            grad_out=grad_out,
            lse=lse,
            grad_q=grad_query,
            grad_k=grad_key,
            grad_v=grad_value,
            scaling=scaling,
        ),
    )
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


# ---- decoding ----

_Active = struct(
    "n_groups own_batch own_capacity prompt_capacity",
    "groups members prompts lengths caches own_keys own_values prompt_keys prompt_values",
    half="",
)
_NewTokens = struct("heads kv_heads d v_stride", "q k v out", "scaling")
_Stack = struct("count width inner heads kv_heads d rank", "layers", "scaling eps", half="")


@dataclass(frozen=True, slots=True)
class Active:
    """The rows of a decoding step and their caches. The caches are in lanes (see `numbers_in_a_lane`), of rows (own) or
    of groups (prompt); their capacity is in tokens, a multiple of VECTOR."""

    longest: int  # tokens of the longest sequence
    groups: Tensor  # int64 [N + 1]: the number of members before each group
    members: Tensor  # int64 [rows]: the rows, group after group
    prompts: Tensor  # int64 [N]: tokens of each group's prompt
    lengths: Tensor  # int64 [rows]: tokens before this one in the row's own cache
    caches: Tensor  # int64 [rows]: the number of that cache; several tokens of one sequence have the same
    own_keys: Tensor  # [layers, caches, Hkv, D or half of it, capacity]
    own_values: Tensor  # [layers, caches, Hkv, capacity or half of it, D]
    prompt_keys: Tensor  # [layers, N, Hkv, D or half of it, capacity]
    prompt_values: Tensor  # [layers, N, Hkv, capacity or half of it, D]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        return decode(self, layer, query, key, value, scaling)

    def in_c(self, layer: int = 0) -> Arguments:
        """With the caches from `layer` on."""
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
    """Attend with one query per row, [rows, Hq, D], to the prompt of its group and to its own tokens. The new key and
    value [rows, Hkv, D] are put in the caches first."""
    query, key = query.contiguous(), key.contiguous()
    heads, d = query.shape[1:]
    value = value if value.stride()[1:] == (d, 1) else value.contiguous()
    out = torch.empty_like(query)
    call(
        "decode",
        active.in_c(layer),
        _NewTokens(
            heads=heads,
            kv_heads=key.shape[1],
            d=d,
            v_stride=value.stride(0),
            q=query,
            k=key,
            v=value,
            out=out,
            scaling=scaling,
        ),
    )
    return out


class Stack:
    """A decoder's layers, all alike, with packed weights, as `decode_step` takes them."""

    def __init__(self, layers: Sequence[Sequence[Tensor | int | None]], **numbers: float) -> None:
        """For each layer the fields of kernels.h's Layer in their order, None for what a family lacks; the numbers of
        its Stack by their names."""
        self._held = layers  # C has only their addresses
        fields = [
            field or 0 if not isinstance(field, Tensor) else field.data_ptr()
            for of in layers
            for field in of
        ]
        self._addresses = torch.tensor(fields)
        self.in_c = _Stack(count=len(layers), layers=self._addresses, **numbers)


def decode_step(
    stack: Stack, active: Active, x: Tensor, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one token per row through all layers: its embedding x [rows, H] -> the residual stream before the last
    addition (in x's place), and what is to be added. bfloat16; cosine and sine [rows, D] contiguous."""
    delta = torch.empty_like(x)
    call("decode_step", stack.in_c, active.in_c(), len(x), cosine, sine, x, delta)
    return x, delta


# ---- linear layers ----

_Linear = struct("rank", "weights bias down up", half="")


def linear(
    x: Tensor, n: int, fields: Sequence[Tensor | int | None], out: Tensor | None = None
) -> Tensor:
    """Linear layers: x [rows, k] -> [rows, n], in `out` if it is given. `fields` are those of kernels.h's Linear."""
    y = x.new_empty(len(x), n) if out is None else out
    layers = _Linear(**dict(zip(("rank", "weights", "bias", "down", "up"), fields, strict=True)))
    call(
        "linear", len(x), n, x.shape[1], x.contiguous(), layers, x.new_empty(len(x), layers.rank), y
    )
    return y


# ---- the softmax over the vocabulary ----

_Logits = struct("rows width", "x", "over_tau")


def _logits(logits: Tensor, tau: float) -> Arguments:
    rows, vocabulary = logits.shape
    return _Logits(rows=rows, width=vocabulary, x=logits, over_tau=1.0 / tau)


def token_logp(
    logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / tau)[token] and the log-sum-exp of each row: logits [rows, V] -> float32 [rows] twice.
    `entropy` float32 [rows] is filled with the entropy of each softmax, in nats."""
    lse, logp = floats(len(logits)), floats(len(logits))
    call("token_logp", _logits(logits, tau), token_ids, lse, logp, entropy)
    return logp, lse


def token_logp_backward(
    logits: Tensor, token_ids: Tensor, tau: float, lse: Tensor, grad: Tensor
) -> Tensor:
    """Overwrite `logits` by their gradient grad / tau (onehot - softmax), and return them."""
    call("token_logp_backward", _logits(logits, tau), token_ids, lse, grad)
    return logits


def sample_tokens(logits: Tensor, tau: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] sampled from softmax(logits / tau) by inverting its cumulative distribution at uniform
    float64 [rows], and their log-probs float32 [rows], the same as `token_logp` gives."""
    rows, vocabulary = logits.shape
    tokens, logp = torch.empty(rows, dtype=torch.long, device="cpu"), floats(rows)
    ends = torch.empty(rows, -(-vocabulary // SOFTMAX_BLOCK), dtype=torch.float64, device="cpu")
    call("sample_tokens", _logits(logits, tau), uniform, ends, tokens, logp)
    return tokens, logp
