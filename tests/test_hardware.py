"""The device and the dtype of a run, from what processor, GPU and environment say."""

from __future__ import annotations

import pytest
import torch

from lagrpo.backends import hardware
from lagrpo.backends.cpu import build
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.errors import SettingsError

CPU = torch.device("cpu")
BF16 = frozenset({"avx512f", "avx512_bf16"})


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    for name in (*hardware.ONEDNN, build.ISA):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("flags", "dtype", "why"),
    [
        (BF16, "bfloat16", "the processor has avx512_bf16"),
        (BF16 | {"amx_bf16"}, "bfloat16", "the processor has amx_bf16 and avx512_bf16"),
        (frozenset({"avx512f", "avx2"}), "float32", "this processor lists neither avx512_bf16 nor amx_bf16"),
        (frozenset(), "float32", "this processor lists neither avx512_bf16 nor amx_bf16"),
    ],
)
def test_auto_is_what_the_processor_multiplies(flags, dtype, why, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: flags)
    assert pick_dtype("auto", CPU) == (dtype, why)
    assert pick_dtype("bfloat16", CPU) == ("bfloat16", "as set" if dtype == "bfloat16" else f"as set, although {why}")
    assert pick_dtype("float32", CPU) == ("float32", "as set")


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("ONEDNN_MAX_CPU_ISA", "avx512_core", "float32"),
        ("DNNL_MAX_CPU_ISA", "AVX2", "float32"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "bfloat16"),
        ("ONEDNN_MAX_CPU_ISA", "ALL", "bfloat16"),
        (build.ISA, "avx2", "float32"),
        (build.ISA, "avx512_bf16", "bfloat16"),
    ],
)
def test_instructions_that_are_left_out_do_not_count(name, value, dtype, monkeypatch):
    flags = BF16 | build.V4
    monkeypatch.setattr(hardware, "cpu_flags", lambda: flags)
    monkeypatch.setattr(build, "cpu_flags", lambda: flags)
    monkeypatch.setenv(name, value)
    assert pick_dtype("auto", CPU)[0] == dtype
    assert (name in pick_dtype("auto", CPU)[1]) == (dtype == "float32")


def test_arm_and_other_devices_compute_in_float32_until_somebody_has_tried(monkeypatch):
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"bf16", "asimd"}))
    monkeypatch.setattr(hardware.platform, "machine", lambda: "aarch64")
    assert pick_dtype("auto", CPU) == ("float32", "bfloat16 has not been tried on aarch64")
    assert pick_dtype("auto", torch.device("mps")) == ("float32", "bfloat16 has not been tried on mps")


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_a_gpu_computes_in_bfloat16_from_ampere_on(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pick_dtype("auto", torch.device("cuda"))[0] == dtype


def test_a_device_that_is_none_or_not_there_is_refused():
    with pytest.raises(SettingsError, match=r"model.device = 'gpu' is no device: use auto, cpu, cuda or cuda:N"):
        pick_device("gpu")
    with pytest.raises(SettingsError, match=r"model.device = 'cuda:97', but PyTorch sees \d+ CUDA devices"):
        pick_device("cuda:97")
    assert pick_device("cpu") == CPU
