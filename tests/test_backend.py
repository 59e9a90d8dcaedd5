"""Device, dtype and backend of a run, from what processor, GPU and environment say."""

from __future__ import annotations

import pytest
import torch
from tiny import computed_by, tiny_policy

from lagrpo.cpu import library
from lagrpo.errors import SettingsError
from lagrpo.model import backend
from lagrpo.model.backend import choose_backend, chosen_kernels, pick_device, pick_dtype
from lagrpo.model.layout import Packed

CPU = torch.device("cpu")
BF16 = frozenset({"avx512f", "avx512_bf16"}) | library.V4


@pytest.fixture(autouse=True)
def no_limits(monkeypatch):
    monkeypatch.delenv(library.ISA, raising=False)
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("flags", "level", "dtype", "reason"),
    [
        (BF16 | {"amx_bf16"}, None, "bfloat16", "the processor has amx_bf16 and avx512_bf16"),
        (BF16, "avx512_bf16", "bfloat16", "the processor has avx512_bf16"),
        (BF16, "avx2", "float32", f"{library.ISA} = avx2 turns off the processor's avx512_bf16"),
        (
            frozenset({"avx512f", "avx2"}),
            None,
            "float32",
            "this processor lists neither avx512_bf16 nor amx_bf16",
        ),
    ],
)
def test_auto_dtype_is_bfloat16_if_the_processor_multiplies_it(
    flags, level, dtype, reason, monkeypatch
):
    monkeypatch.setattr(backend, "cpu_flags", lambda: flags)
    monkeypatch.setattr(library, "cpu_flags", lambda: flags)
    if level:
        monkeypatch.setenv(library.ISA, level)
    assert pick_dtype("auto", CPU) == (dtype, reason)
    reason_if_set = "as set" if dtype == "bfloat16" else f"as set, although {reason}"
    assert pick_dtype("bfloat16", CPU) == ("bfloat16", reason_if_set)
    assert pick_dtype("float32", CPU) == ("float32", "as set")


def test_auto_dtype_on_other_devices(monkeypatch):
    monkeypatch.setattr(backend, "cpu_flags", lambda: frozenset({"bf16", "asimd"}))
    monkeypatch.setattr(backend.platform, "machine", lambda: "aarch64")
    assert pick_dtype("auto", CPU) == ("float32", "bfloat16 has not been tried on aarch64")
    assert pick_dtype("auto", torch.device("mps")) == (
        "float32",
        "bfloat16 has not been tried on mps",
    )
    for capability, dtype in (((7, 5), "float32"), ((8, 0), "bfloat16")):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, answer=capability: answer
        )
        assert pick_dtype("auto", torch.device("cuda"))[0] == dtype


def test_device_is_a_gpu_if_there_is_one_and_each_rank_has_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device() == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device() == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SettingsError, match="rank 2 of this host has no GPU: PyTorch sees 2"):
        pick_device()


def test_kernels_are_chosen_by_an_environment_variable(monkeypatch):
    monkeypatch.setenv("LAGRPO_KERNELS", "torch")
    assert chosen_kernels() == "torch"
    monkeypatch.setenv("LAGRPO_KERNELS", "cuda")
    with pytest.raises(SettingsError, match="LAGRPO_KERNELS = 'cuda'"):
        chosen_kernels()


def test_two_policies_in_one_process_keep_their_backends():
    """On the same weights."""
    ours = tiny_policy(dtype=torch.bfloat16, backend="c")
    theirs = computed_by(ours, "torch")
    packed = Packed.build([([5, 6, 7, 8], [torch.tensor([4, 9, 11])])])
    with torch.no_grad():
        before = ours.logp(packed)
        # The two round differently: equal bits would mean that one computes both.
        assert not torch.equal(theirs.logp(packed), before)
        assert torch.equal(ours.logp(packed), before)
    assert (ours.model.exact, theirs.model.exact) == (True, False)


def test_gpu_takes_the_triton_kernels_if_they_are_chosen_and_run(monkeypatch):
    """Neither is compiled here: what Triton says is replaced."""
    monkeypatch.delenv("LAGRPO_KERNELS", raising=False)
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda: None)
    assert not choose_backend("auto", "cuda", torch.bfloat16).triton
    gpu_backend = choose_backend("triton", "cuda", torch.bfloat16)
    assert (gpu_backend.triton, gpu_backend.kernels) == (True, False)
    with pytest.raises(library.NoKernels, match="no Triton kernels for float16"):
        choose_backend("triton", "cuda", torch.float16)
    with pytest.raises(library.NoKernels, match="run on an NVIDIA GPU, but the model is on cpu"):
        choose_backend("triton", "cpu", torch.bfloat16)
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda: "no compiler")
    with pytest.raises(library.NoKernels, match="unavailable here: no compiler"):
        choose_backend("triton", "cuda", torch.bfloat16)


def test_gpu_takes_the_triton_kernels_by_default_once_they_were_measured(monkeypatch):
    monkeypatch.setattr(backend.gpu_library, "MEASURED_ON_A_GPU", True)
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda: None)
    assert choose_backend("auto", "cuda", torch.bfloat16).triton
    assert not choose_backend("torch", "cuda", torch.bfloat16).triton
    assert not choose_backend("auto", "cuda", torch.float16).triton
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda: "no compiler")
    gpu_backend = choose_backend("auto", "cuda", torch.bfloat16)
    assert str(gpu_backend) == "PyTorch (no Triton kernels: no compiler)"
    assert gpu_backend.softmax is None


def test_products_are_exact_on_a_hopper_gpu_once_it_was_shown(monkeypatch):
    """No product is computed here: what the GPU says is replaced."""
    forbidden = []
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda: None)
    monkeypatch.setattr(backend.exactness, "forbid_split_k", lambda: forbidden.append(True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not choose_backend("triton", "cuda", torch.bfloat16).exact_products
    monkeypatch.setattr(backend.exactness, "EXACT_ON_HOPPER", True)
    assert not choose_backend("triton", "cuda", torch.float32).exact_products
    assert forbidden == []
    assert choose_backend("triton", "cuda", torch.bfloat16).exact_products
    assert forbidden == [True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not choose_backend("triton", "cuda", torch.bfloat16).exact_products


def test_backend_of_a_device_and_a_dtype(monkeypatch):
    assert choose_backend("auto", "cpu", torch.bfloat16).kernels
    assert str(choose_backend("torch", "cuda", torch.bfloat16)) == "PyTorch (as chosen)"
    assert str(choose_backend("auto", "cpu", torch.float64)) == "PyTorch (no C kernels for float64)"
    assert str(choose_backend("auto", "xpu", torch.bfloat16)) == "PyTorch (on xpu)"
    with pytest.raises(
        library.NoKernels, match="the C kernels run on a CPU, but the model is on cuda"
    ):
        choose_backend("c", "cuda", torch.bfloat16)
    monkeypatch.setattr(library, "why_not", lambda: "no compiler")
    assert (
        str(choose_backend("auto", "cpu", torch.float32)) == "PyTorch (no C kernels: no compiler)"
    )
    with pytest.raises(library.NoKernels, match="unavailable here: no compiler"):
        choose_backend("c", "cpu", torch.float32)
