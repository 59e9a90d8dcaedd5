"""The options of a launch and the exponential, which all kernels share."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# No product and sum are contracted to one rounding. So a formula that two kernels share gives the
# same bits in both, and the bits of PyTorch's separate operations.
STRICT: dict[str, Any] = {"enable_fp_fusion": False}

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """Returns e^x, and 0 below -87.3.

    One product and one instruction (ex2.approx.ftz). tl.exp keeps subnormal results, which takes
    three instructions more.
    """
    return tl.exp2(x * LOG2_E)
