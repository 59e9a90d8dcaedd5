"""The device of a run, what it multiplies in hardware, and so the dtype that it computes in where none is set."""

from __future__ import annotations

import os
import platform
from typing import Literal

import torch

from lagrpo.backends.cpu.build import ISA, LEVELS, NoKernels, cpu_flags, isa_level
from lagrpo.errors import SettingsError, refusing

Dtype = Literal["bfloat16", "float32"]
ONEDNN = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
BEFORE_BF16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of oneDNN's variable that leave it, and so the backward pass, no products of bfloat16 on servers."""


def pick_device(name: str) -> torch.device:
    """The device of a setting; of the ranks of one host each has a GPU of its own. Raises SettingsError for a device
    that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"model.device = {name!r} is no device: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise SettingsError(f"model.device = {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def pick_dtype(dtype: Literal["auto", "bfloat16", "float32"], device: torch.device) -> tuple[Dtype, str]:
    """The dtype of a setting on a device, and why: bfloat16 where the device has products of it, else float32. Raises
    SettingsError where LAGRPO_CPU_ISA names no level of this processor."""
    if dtype == "float32":
        return dtype, "as set"
    with refusing("", NoKernels):
        multiplies, why = multiplies_bfloat16(device)
    if dtype == "bfloat16":
        return dtype, "as set" if multiplies else f"as set, although {why}"
    return ("bfloat16" if multiplies else "float32"), why


def multiplies_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Whether a device has instructions for products of bfloat16, and how we know."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"compute capability {major}.{minor}, bfloat16 from 8.0 on"
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False, f"bfloat16 has not been tried on {platform.machine() if device.type == 'cpu' else device.type}"
    found = sorted({"avx512_bf16", "amx_bf16"} & cpu_flags())
    if not found:
        return False, "this processor lists neither avx512_bf16 nor amx_bf16"
    if not LEVELS[isa_level()].bf16:
        return False, f"{ISA} = {os.environ[ISA]} leaves out the processor's {' and '.join(found)}"
    for name in ONEDNN:
        if (value := os.environ.get(name, "").upper()) in BEFORE_BF16:
            return False, f"{name} = {value} leaves out the processor's {' and '.join(found)}"
    return True, f"the processor has {' and '.join(found)}"
