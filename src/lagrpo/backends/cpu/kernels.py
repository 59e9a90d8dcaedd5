"""The C kernels, as functions of tensors: the forward pass of learner and sampler on a CPU, its matrix products in
bfloat16 included, and the backward pass between its matrix products.

They are compiled for the machine at their first use (build.py here). Where that is not possible, and on a GPU,
PyTorch's own operations do the same; `describe` says which of the two run, `select` chooses. All tensors must be on the
CPU and, but for float32 and int64 ones where it says so, of one dtype: float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lagrpo.backends.cpu.build import ISA, NoKernels, isa_level, load_library

VECTOR = 16  # numbers in one vector of the kernels
BY_VECTORS, BY_TILES = 1, 2  # products.c's ways to compute
SLICES = 16  # of the rows that a weight's gradient is a sum over: whatever the number of threads, the same sums
Choice = Literal["auto", "c", "torch"]

_choice: Choice = "auto"
_library: Any = None
_reason: str | None = None  # why there is no library, once that is known
_compiler = ""
_level = ""  # of instructions, for which the library was compiled
_products: str | None = None  # what computes the products of bfloat16


def select(choice: Choice, device: str = "cpu", say: Callable[[str], None] | None = None) -> None:
    """For this process: the kernels where they can be had (auto), without fail (c), or PyTorch's plain operations alone
    (torch; on a GPU without flex attention and CUDA graphs, too). `say` is told of a compilation (default: standard
    error).

    Raises:
        NoKernels: "c" on a machine where they cannot be had, or for another device than the CPU.
    """
    global _choice
    level = isa_level()  # a wrong LAGRPO_CPU_ISA is an error whatever computes
    if _library is not None and level != _level:
        raise NoKernels(f"this process computes with the instructions {_level}; for {ISA} = {level} start another one")
    if choice == "c" and device != "cpu":
        raise NoKernels(f"the kernels are for the CPU, the model is on {device}")
    if choice == "c" and not _load(say):
        raise NoKernels(f"the kernels cannot be had here: {_reason}")
    _choice = choice


def chosen() -> Choice:
    """What `select` chose for this process."""
    return _choice


def describe() -> str:
    """What computes besides PyTorch's matrix products in this process, in words; compiles the kernels if they are to
    run."""
    if _choice == "torch":
        return "PyTorch (as chosen)"
    return f"C kernels ({_compiler})" if _load() else f"PyTorch (no C kernels: {_reason})"


def run_on(*tensors: Tensor) -> bool:
    """Whether the kernels run and take these tensors: on the CPU, all float32 or all bfloat16."""
    first = tensors[0]
    if first.dtype not in (torch.float32, torch.bfloat16) or _choice == "torch":
        return False
    return all(t.device.type == "cpu" and t.dtype == first.dtype for t in tensors) and _load()


def attend_on(query: Tensor, *others: Tensor) -> bool:
    """Whether the kernels attend with these: [rows, heads, D] each."""
    return query.shape[-1] % VECTOR == 0 and run_on(query, *others)


def _load(say: Callable[[str], None] | None = None) -> bool:
    global _library, _reason, _compiler, _products, _level
    if _library is None and _reason is None:
        say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        try:
            _level = isa_level()
            _library, _compiler = load_library(say)
            _library.pack_bytes.restype = ctypes.c_int64
            _products = _choose_products(say)
        except NoKernels as error:
            _reason = str(error)
    return _library is not None


def _call(name: str, half: bool, *arguments: Tensor | float | int | None) -> None:
    """A kernel for both dtypes: `half`, bfloat16, is its last argument."""
    getattr(_library, name)(*map(_as_c, arguments), ctypes.c_int(half))


def _call_only(name: str, *arguments: Tensor | float | int | None) -> None:
    """A kernel for bfloat16 alone, or for lanes of any kind."""
    getattr(_library, name)(*map(_as_c, arguments))


def _as_c(value: Tensor | float | int | None) -> Any:
    """Tensors as their addresses, int as int64, float as float32."""
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value or 0)


def floats(*shape: int) -> Tensor:
    """float32 on the CPU, with anything in it, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _half(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its root mean square norm times weight, 1 / rms): [n, width] twice and float32 [n]."""
    n, width = x.shape
    x, y, rstd = x.contiguous(), torch.empty_like(x), floats(n)
    total = x if delta is None else torch.empty_like(x)
    delta = delta if delta is None else delta.contiguous()
    _call("norm", _half(x), n, width, x, delta, weight, float(eps), total, y, rstd)
    return total, y, rstd


def norm_backward(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, grad_total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm`: of x + delta [n, width], the sum's own `grad_total` included, and of the weight [width]."""
    n, width = x.shape
    slices = min(n, SLICES)
    grad_x, grad_weight = torch.empty_like(x), floats(slices, width)
    grad_total = grad_total if grad_total is None else grad_total.contiguous()
    _call(
        "norm_backward", _half(x), n, width, x, weight, rstd, grad_y.contiguous(), grad_total, grad_x, grad_weight,
        slices,
    )  # fmt: skip
    return grad_x, grad_weight.sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [n, width] with the same distance between their rows."""
    n, width = gate.shape
    y = gate.new_empty(n, width)
    _call("swiglu", _half(gate), n, width, gate, up, gate.stride(0), y)
    return y


def swiglu_backward(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `swiglu`, both contiguous."""
    n, width = gate.shape
    grad_gate, grad_up = gate.new_empty(n, width), up.new_empty(n, width)
    _call("swiglu_backward", _half(gate), n, width, gate, up, gate.stride(0), grad_y.contiguous(), grad_gate, grad_up)
    return grad_gate, grad_up


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
    """x [n, heads, d] turned by the angles of [n, d], or turned `back`; d a multiple of 2 VECTOR."""
    n, heads, d = x.shape
    y = x.new_empty(n, heads, d)
    _call("rotary", _half(x), n, heads, d, x, x.stride(0), cosine, sine, -1.0 if back else 1.0, y)
    return y


def numbers_in_a_lane(dtype: torch.dtype) -> int:
    """A lane is 32 bits: one float32, or a pair of bfloat16 that are neighbors in a sum."""
    return 4 // dtype.itemsize


def transposed(x: Tensor) -> Tensor:
    """[rows, heads, d] -> lanes [heads, d or half of it, rows and at least VECTOR more]."""
    rows, heads, d = x.shape
    d //= numbers_in_a_lane(x.dtype)
    y = floats(heads, d, -(-rows // VECTOR) * VECTOR + VECTOR)
    _call_only("transpose", rows, heads, d, x, y, y.shape[2])
    return y


def paired(x: Tensor) -> Tensor:
    """[rows, heads, d] as lanes of the same shape: of each row and the next one in bfloat16."""
    if not _half(x):
        return x
    y = floats(*x.shape)
    _call_only("pair_rows", len(x), x.shape[1] * x.shape[2], x, y)
    return y


def attention(segments: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Shared-prefix attention of a packed row: out [rows, Hq, D] and log-sum-exps float32 [rows, Hq]. segments int64
    [S, 4]: first row, length, first row of the prefix, its length. D a multiple of VECTOR. All contiguous."""
    rows, heads, d = query.shape
    out, lse, turned = torch.empty_like(query), floats(rows, heads), transposed(key)
    _call(
        "attention", _half(query), len(segments), segments, heads, key.shape[1], d, query, turned, turned.shape[2],
        paired(value), float(scaling), out, lse,
    )  # fmt: skip
    return out, lse


def attention_backward(
    groups: Tensor, segments: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float,
    out: Tensor, lse: Tensor, grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value. groups int64 [N + 1]: which segments share no rows with others."""
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros(t.shape, dtype=torch.float32, device="cpu") for t in (key, value))
    keys, values = transposed(key), transposed(value)
    _call(
        "attention_backward", _half(query), len(groups) - 1, groups, segments, query.shape[1], key.shape[1],
        query.shape[2], query, paired(key), keys, keys.shape[2], values, out, lse, grad_out, float(scaling),
        grad_query, grad_key, grad_value,
    )  # fmt: skip
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


@dataclass(frozen=True, slots=True)
class Active:
    """The rows of a decoding step: who belongs to whom, and caches. groups int64 [N + 1] counts members, int64 [rows];
    prompts [N] and lengths [rows] in tokens. In lanes (see `numbers_in_a_lane`), for rows (own) or groups (prompt):
    keys [layers, ., Hkv, D or half of it, room] and values [layers, ., Hkv, room or half of it, D]; the room, in
    tokens, a multiple of VECTOR."""

    groups: Tensor
    members: Tensor
    prompts: Tensor
    lengths: Tensor
    own_keys: Tensor
    own_values: Tensor
    prompt_keys: Tensor
    prompt_values: Tensor


def decode(active: Active, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """One query per row, [rows, Hq, D], over the prompt of its group and its own tokens, the new one included, which is
    put in the caches."""
    query, key = query.contiguous(), key.contiguous()
    heads, d = query.shape[1:]
    value = value if value.stride()[1:] == (d, 1) else value.contiguous()
    out = torch.empty_like(query)
    _call(
        "decode", _half(query), len(active.prompts), active.groups, active.members, active.prompts, active.lengths,
        heads, key.shape[1], d, query, key, value, value.stride(0), active.own_keys[layer], active.own_values[layer],
        active.own_keys.shape[4], active.prompt_keys[layer], active.prompt_values[layer], active.prompt_keys.shape[4],
        float(scaling), out,
    )  # fmt: skip
    return out


class Stack:
    """A decoder's layers, all alike, with packed weights, as `decode_step` takes them. For each layer the fields of
    kernels.c's Layer in their order, None for what a family lacks: they stay where they are in memory as long as this
    lives. `sizes` those of its Sizes, `scaling` of the attention's scores, `eps` of the norms."""

    def __init__(self, layers: Sequence[Sequence[Tensor | None]], sizes: Sequence[int], scaling: float, eps: float):
        self._held = layers
        self.addresses = torch.tensor([0 if t is None else t.data_ptr() for layer in layers for t in layer])
        self.sizes, self.scaling, self.eps = torch.tensor(sizes), float(scaling), float(eps)


def decode_step(stack: Stack, active: Active, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row through all layers: its embedding x [rows, H] -> the residual stream before the last addition
    (in x's place), and what is to be added. bfloat16; cosine and sine [rows, D] contiguous."""
    delta = torch.empty_like(x)
    _call_only(
        "decode_step", stack.sizes, stack.addresses, len(x), len(active.prompts), active.groups, active.members,
        active.prompts, active.lengths, active.own_keys, active.own_values, active.own_keys.shape[1],
        active.own_keys.shape[4], active.prompt_keys, active.prompt_values, active.prompt_keys.shape[4], stack.scaling,
        stack.eps, cosine, sine, x, delta,
    )  # fmt: skip
    return x, delta


class Panels:
    """Linear layers with the same input [rows, k], k even, as one product of bfloat16: y [rows, n] with the outputs of
    one layer behind those of another. A row's numbers depend on that row alone: see products.c."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.widths = [m.out_features for m in layers]
        self.n, self.k = sum(self.widths), layers[0].in_features
        if self.k % 2:
            raise ValueError(f"a product of {self.k} inputs cannot be packed: pairs of bfloat16 need an even number")
        self.packed = torch.zeros(_library.pack_bytes(*map(_as_c, (self.n, self.k))), dtype=torch.uint8, device="cpu")
        width = _library.panel_width()
        biased = any(m.bias is not None for m in layers)
        self.bias = torch.zeros(-(-self.n // width) * width, device="cpu", dtype=torch.float32) if biased else None
        self.fill(layers)

    @torch.no_grad()
    def fill(self, layers: Sequence[nn.Linear]) -> None:
        """Take over the weights [out, k] and biases of these layers, in the place of those before."""
        first = 0
        for layer in layers:
            _call_only("pack", first, layer.out_features, self.k, layer.weight.bfloat16().contiguous(), self.packed)
            if self.bias is not None:
                self.bias[first : first + layer.out_features] = 0 if layer.bias is None else layer.bias
            first += layer.out_features

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, k] -> [rows, n], in `out` where it is given."""
        y = x.new_empty(len(x), self.n) if out is None else out
        _call_only("product", len(x), self.n, self.k, x.contiguous(), self.packed, self.bias, y)
        return y


CHECKED = ((1, 5, 2), (3, 49, 30), (17, 33, 576), (33, 97, 1030))
"""Rows, outputs and inputs of the products that are compared with their plain form before any other is computed."""


def _choose_products(say: Callable[[str], None]) -> str | None:
    """Let the library compute products by the first of its ways that this processor grants and that is right here; its
    name, or None where there is none."""
    tiles = "AMX emulated in C" if isa_level() == "emulated_tiles" else "AMX"
    ways = ((BY_TILES, tiles), (BY_VECTORS, "AVX512-BF16" if _library.has_dot_products() else "vectors"))
    for way, name in ways:
        if not _library.products_by(ctypes.c_int64(way)):
            continue
        if products_are_right():
            return name
        say(f"matrix products by {name} do not give the numbers they should on this processor: they are not used")
    return None


@torch.no_grad()
def products_are_right() -> bool:
    """Whether products give, to the bit, what one number after another gives; a few milliseconds."""
    numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, device="cpu", dtype=torch.float32)

    for m, n, k in CHECKED:
        x, layer = normal(m, k).bfloat16(), nn.Linear(k, n, device="meta").to_empty(device="cpu").bfloat16()
        layer.weight.copy_(normal(n, k))
        layer.bias.copy_(normal(n))
        plain = x.new_empty(m, n)
        _call_only("plain_product", m, n, k, x, layer.weight, layer.bias.float(), plain)
        if not torch.equal(Panels([layer])(x), plain):
            return False
    return True


def products() -> str | None:
    """What computes the forward products of bfloat16 in this process: AMX, AVX512-BF16, vectors (bfloat16 without
    instructions for it); None where PyTorch's do."""
    return _products if _choice != "torch" and _load() else None


def token_logp(logits: Tensor, token_ids: Tensor, tau: float, entropy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log softmax(logits / tau)[token] and the log-sum-exp of each row: logits [rows, V] -> float32 [rows] twice.
    `entropy` float32 [rows] is filled with that of each softmax, in nats."""
    rows, vocabulary = logits.shape
    lse, logp = floats(rows), floats(rows)
    _call("token_logp", _half(logits), rows, vocabulary, logits, token_ids, 1.0 / tau, lse, logp, entropy)
    return logp, lse


def token_logp_backward(logits: Tensor, token_ids: Tensor, tau: float, lse: Tensor, grad: Tensor) -> Tensor:
    """`logits` themselves, overwritten by their gradient grad / tau (onehot - softmax)."""
    rows, vocabulary = logits.shape
    _call("token_logp_backward", _half(logits), rows, vocabulary, logits, token_ids, 1.0 / tau, lse, grad)
    return logits


def sample_tokens(logits: Tensor, tau: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] sampled from softmax(logits / tau) by inverting its cumulative distribution at uniform
    float64 [rows], and their log-probs float32 [rows], those of `token_logp`."""
    rows, vocabulary = logits.shape
    tokens, logp = torch.empty(rows, dtype=torch.long, device="cpu"), floats(rows)
    ends = torch.empty(rows, -(-vocabulary // 256), dtype=torch.float64, device="cpu")
    _call("sample_tokens", _half(logits), rows, vocabulary, logits, 1.0 / tau, uniform, ends, tokens, logp)
    return tokens, logp
