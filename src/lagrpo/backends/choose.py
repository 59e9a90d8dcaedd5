"""The backend of a policy, chosen once: when the policy is built."""

from __future__ import annotations

from typing import Literal

import torch

from lagrpo.backends.backend import Backend
from lagrpo.backends.cpu import library
from lagrpo.backends.cpu.backend import DTYPES, CpuBackend
from lagrpo.backends.cpu.build import NoKernels
from lagrpo.backends.cuda import CudaBackend

Choice = Literal["auto", "c", "torch"]


def choose_backend(choice: Choice, device: torch.device | str, dtype: torch.dtype) -> Backend:
    """The best backend for a device and dtype (auto), on a CPU the C kernels without fail (c), or PyTorch's plain
    operations alone (torch; on a GPU without flex attention, too). Raises NoKernels for "c" where the
    kernels cannot be had, and where LAGRPO_CPU_ISA names no level of this processor, or another one than this process
    computes with."""
    device = torch.device(device)
    library.check_level()
    if choice == "c" and device.type != "cpu":
        raise NoKernels(f"the kernels are for the CPU, the model is on {device}")
    if choice == "torch":
        return Backend(device, dtype)
    if device.type == "cuda":
        return CudaBackend(device, dtype)
    if device.type != "cpu":
        return Backend(device, dtype, f"no kernels for {device.type}")
    if dtype not in DTYPES:
        return Backend(device, dtype, f"no C kernels for {str(dtype).removeprefix('torch.')}")
    if (reason := library.why_not()) is None:
        return CpuBackend(device, dtype)
    if choice == "c":
        raise NoKernels(f"the C kernels are unavailable here: {reason}")
    return Backend(device, dtype, f"no C kernels: {reason}")
