"""Triton kernels where there is no GPU: Triton's interpreter runs them with NumPy.

A test that imports this module runs the kernels on DEVICE: compiled on a GPU, else interpreted
(conftest.py sets TRITON_INTERPRET). Without Triton its file is skipped, and the summary says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="these tests need Triton: make test-triton installs it")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def round_as_a_gpu_does() -> None:
    """Corrects two things in Triton's interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float
    patch: Any = interpreter._patch_lang_tensor

    def convert_as_a_gpu_does(data: Any, source: Any, target: Any, mode: Any) -> Any:
        """Rounds float32 to the nearest bfloat16. The interpreter cuts the digits off."""
        if source == tl.float32 and target == tl.bfloat16:
            flat = torch.from_numpy(np.array(data, dtype=np.float32).reshape(-1))
            bits = flat.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
            return bits.reshape(np.shape(data))
        if source == tl.bfloat16 and target == tl.float32:
            return (np.asarray(data).astype(np.uint32) << 16).reshape(np.shape(data))
        return convert(data, source, target, mode)

    def patch_for_numpy(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 makes no integer of an array [1], which is the interpreter's scalar. range()
        needs one."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float = convert_as_a_gpu_does
    interpreter._patch_lang_tensor = patch_for_numpy


if DEVICE == "cpu":
    round_as_a_gpu_does()
