"""Device, dtype and backend of a run, from what processor, GPU and environment say."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from tiny import computed_by, tiny_policy

from lagrpo.cpu import library
from lagrpo.errors import SettingsError
from lagrpo.gpu import exactness
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
    with pytest.raises(SettingsError, match="rank 2"):
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


def test_gpu_takes_the_triton_kernels_if_they_run(monkeypatch):
    """None is compiled here: what Triton says is replaced."""
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda dtype: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for choice in ("auto", "triton"):
        gpu_backend = choose_backend(choice, "cuda", torch.bfloat16)
        assert (gpu_backend.triton, gpu_backend.kernels) == (True, False)
    assert not choose_backend("torch", "cuda", torch.bfloat16).triton
    assert not choose_backend("auto", "cuda", torch.float16).triton
    with pytest.raises(library.NoKernels, match="no Triton kernels for float16"):
        choose_backend("triton", "cuda", torch.float16)
    with pytest.raises(library.NoKernels, match="on cpu"):
        choose_backend("triton", "cpu", torch.bfloat16)


def test_gpu_without_triton_computes_by_pytorch(monkeypatch):
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda dtype: "no compiler")
    gpu_backend = choose_backend("auto", "cuda", torch.bfloat16)
    assert str(gpu_backend) == "PyTorch (no Triton kernels: no compiler)"
    assert gpu_backend.softmax is None
    with pytest.raises(library.NoKernels, match="no compiler"):
        choose_backend("triton", "cuda", torch.bfloat16)


def test_products_on_a_hopper_gpu_are_exact_unless_a_variable_forbids_it(monkeypatch):
    """No product is computed here: what the GPU says is replaced."""
    forbidden = []
    monkeypatch.setattr(backend.gpu_library, "why_not", lambda dtype: None)
    monkeypatch.setattr(backend.exactness, "forbid_split_k", lambda: forbidden.append(True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not choose_backend("auto", "cuda", torch.bfloat16).exact_products
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not choose_backend("auto", "cuda", torch.float32).exact_products
    monkeypatch.setenv("LAGRPO_EXACT", "0")
    assert not choose_backend("auto", "cuda", torch.bfloat16).exact_products
    assert forbidden == []
    monkeypatch.delenv("LAGRPO_EXACT")
    assert choose_backend("auto", "cuda", torch.bfloat16).exact_products
    assert forbidden == [True]
    monkeypatch.setenv("LAGRPO_EXACT", "no")
    with pytest.raises(SettingsError, match="LAGRPO_EXACT"):
        choose_backend("auto", "cuda", torch.bfloat16)


def test_a_model_is_exact_only_if_its_own_products_are(monkeypatch):
    """Products of this machine's CPU may be either; the function under them is replaced."""
    lm = tiny_policy(dtype=torch.bfloat16).model.lm
    cpu = torch.device("cpu")

    def sum_in_order(x, weight, bias):
        assert bias is None
        terms = x.float().unsqueeze(1) * weight.float()  # [rows, outputs, inputs]
        return reduce(torch.add, terms.unbind(-1)).bfloat16()

    def split_with_few_rows(x, weight, bias):
        if len(x) > 16:
            return sum_in_order(x, weight, bias)
        halves = (x.float().unsqueeze(1) * weight.float()).tensor_split(2, dim=-1)
        sums = [reduce(torch.add, terms.unbind(-1)) for terms in halves]
        return (sums[0] + sums[1]).bfloat16()

    monkeypatch.setattr(exactness, "MOST_ROWS", 20)
    for multiply, is_exact in ((sum_in_order, True), (split_with_few_rows, False)):
        exactness._is_exact.cache_clear()
        monkeypatch.setattr(exactness.F, "linear", multiply)
        assert exactness.rows_are_independent(lm, cpu) is is_exact
    exactness._is_exact.cache_clear()
