"""Compiles the Triton kernels for an H100, which needs no GPU, and prints what each one needs.

python tests/compile_kernels.py

Prints a line of JSON for each kernel: registers of a thread, bytes of local memory and of shared
memory, and the number of atomic operations. test_triton_compiled.py runs it in a process of its
own, where TRITON_INTERPRET is not set.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from lagrpo.gpu import keys, layers, softmax
from lagrpo.gpu.common import STRICT

HOPPER = GPUTarget("cuda", 90, 32)
PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Pointers of the kernels' arguments, and plain numbers.
BF16, F32, F64, I32, I64 = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
INT, FLOAT = "i32", "fp32"


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments that are no constants, in their order.

    `divisible` names numbers that are multiples of 16, as sizes of models are.
    """

    name: str
    kernel: Any
    types: list[str]
    constants: dict[str, Any]
    num_warps: int
    divisible: tuple[str, ...]


def cases() -> Iterator[Case]:
    block, warps = softmax.BLOCK, softmax.LAUNCH["num_warps"]
    vocabulary = ("vocabulary",)
    for with_entropy in (False, True):
        yield Case(
            f"token_logp, entropy {with_entropy}",
            softmax._token_logp_kernel,
            [BF16, I64, F32, F32, F32, INT, FLOAT],
            {"ENTROPY": with_entropy, "BLOCK": block},
            warps,
            vocabulary,
        )
        yield Case(
            f"token_logp_backward, entropy {with_entropy}",
            softmax._token_logp_backward_kernel,
            [BF16, I64, F32, F32, F32, F32, INT, FLOAT],
            {"ENTROPY": with_entropy, "BLOCK": block},
            warps,
            vocabulary,
        )
    # 38 blocks of Qwen's vocabulary.
    blocks = {"BLOCK": block, "BLOCKS": 64}
    yield Case(
        "block_sums",
        softmax._block_sums_kernel,
        [BF16, F32, F32, F64, INT, FLOAT],
        blocks,
        warps,
        vocabulary,
    )
    yield Case(
        "draw",
        softmax._draw_kernel,
        [BF16, F64, F32, F32, F64, I64, F32, INT, FLOAT],
        blocks,
        warps,
        vocabulary,
    )
    for width in (64, 128, 1536, 4096, 8192):
        tile = layers._norm_tile(width)
        shape = {"ROWS": tile["ROWS"], "BLOCK": tile["BLOCK"], "ADDS": True}
        yield Case(
            f"norm of {width}",
            layers._norm_kernel,
            [BF16, BF16, BF16, BF16, BF16, F32, INT, INT, FLOAT],
            shape,
            tile["num_warps"],
            ("width",),
        )
        yield Case(
            f"norm_backward of {width}",
            layers._norm_backward_kernel,
            [BF16, BF16, F32, BF16, BF16, BF16, F32, INT, INT, INT],
            shape,
            tile["num_warps"],
            ("width",),
        )
    strides = ("width", "gate_stride", "up_stride", "grad_stride")
    columns = {"BLOCK": layers.COLUMNS}
    yield Case("swiglu", layers._swiglu_kernel, [BF16] * 3 + [INT] * 3, columns, 4, strides)
    yield Case(
        "swiglu_backward",
        layers._swiglu_backward_kernel,
        [BF16] * 6 + [INT] * 4,
        columns,
        4,
        strides,
    )
    for heads, half in ((16, 64), (16, 32)):
        yield Case(
            f"rotary of {heads} heads of {2 * half}",
            layers._rotary_kernel,
            [BF16] * 4 + [INT] * 5 + [FLOAT],
            {"HEADS": heads, "HALF": half},
            4,
            ("half", "x_stride", "y_stride", "angle_stride"),
        )
    yield Case(
        "gather_keys_backward",
        keys._gather_backward_kernel,
        [BF16, I32, I32, I32, I32, BF16, INT],
        {"BLOCK": 256},
        1,
        ("width",),
    )


def compile_for_hopper(case: Case) -> dict[str, Any]:
    """Returns what the compiled kernel needs."""
    types = iter(case.types)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    for index, argument in enumerate(case.kernel.arg_names):
        if argument in case.constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = next(types)
        if signature[argument].startswith("*") or argument in case.divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=case.kernel, signature=signature, constexprs=case.constants, attrs=attributes
    )
    options = make_backend(HOPPER).parse_options({"num_warps": case.num_warps, **STRICT})
    compiled = triton.compile(source, target=HOPPER, options=options.__dict__)
    usage = resource_usage(compiled.asm["cubin"])
    return {
        "kernel": case.name,
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "local_memory": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_memory": compiled.metadata.shared,
        "atomics": len(re.findall(r"\b(?:atom|red)\.", compiled.asm["ptx"])),
    }


def resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [PROGRAMS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
    return done.stdout


if __name__ == "__main__":
    for case in cases():
        print(json.dumps(compile_for_hopper(case)), flush=True)
