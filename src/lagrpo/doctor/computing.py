"""How a run would compute here: device, dtype, kernels, backend, and the grade of agreement between its two sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lagrpo.doctor.findings import Finding

if TYPE_CHECKING:
    import torch

COMPILER = "apt-get install gcc    # or dnf, apk, … install gcc"
FASTER = "several times faster sampling and learning; in bfloat16 the same arithmetic on both sides, to the bit"


def look_at_training() -> Iterator[Finding]:
    """What model.device, model.dtype and model.kernels = "auto" choose. Compiles the kernels where need be."""
    import torch

    from lagrpo.backends.backend import Backend
    from lagrpo.backends.choose import choose_backend
    from lagrpo.backends.cpu.backend import CpuBackend
    from lagrpo.backends.cpu.build import ISA, NoKernels
    from lagrpo.backends.hardware import pick_device, pick_dtype
    from lagrpo.errors import SettingsError

    device = pick_device("auto")
    yield _device(device)
    try:
        name, why = pick_dtype("auto", device)
        backend: Backend = choose_backend("auto", device, getattr(torch, name))
    except (NoKernels, SettingsError) as error:
        yield Finding("instructions", str(error), "broken", "computing on this processor", f"unset {ISA}")
        return
    yield Finding("dtype", f"{name} ({why})")
    if device.type == "cpu":
        yield from _kernels()
    if type(backend) is not CpuBackend:
        yield Finding("backend", str(backend))
    yield Finding("agreement", grade(backend))


def _device(device: torch.device) -> Finding:
    import shutil

    import torch

    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return Finding(
            "device", f"{torch.cuda.get_device_name(device)}, {memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
        )
    if shutil.which("nvidia-smi") is None:
        return Finding("device", f"{device}: PyTorch {torch.__version__} sees no GPU")
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
    found = f"{device}, though there is a GPU: PyTorch {torch.__version__} {built}"
    return Finding("device", found, "absent", "training on the GPU", "pip install --force-reinstall torch")


def _kernels() -> Iterator[Finding]:
    from lagrpo.backends.cpu import library
    from lagrpo.backends.cpu.panels import chosen_products

    if (reason := library.why_not()) is not None:
        remedy = (
            COMPILER
            if "no C compiler" in reason
            else "export LAGRPO_CACHE=DIRECTORY"
            if "LAGRPO_CACHE" in reason
            else ""
        )
        yield Finding("kernels", f"none: {reason}", "absent", FASTER, remedy)
    elif (products := chosen_products()) is None:
        wrong = f"{library.describe()}, but their matrix products are not right on this processor, and not used"
        yield Finding("kernels", wrong, "absent", FASTER, "update the C compiler, then: rm -r ~/.cache/lagrpo/kernels")
    else:
        yield Finding("kernels", f"{library.describe()}; products by {products}, equal to sums number by number")


def grade(backend: object) -> str:
    """How sampler and learner will agree with this backend: exact or close, and why."""
    import torch

    from lagrpo.backends.cpu.backend import CpuBackend

    if not isinstance(backend, CpuBackend):
        return f"close: {backend} computes, which rounds by what lies beside a row; the difference is measured"
    if backend.products is None or backend.dtype != torch.bfloat16:
        return "close: PyTorch multiplies, which rounds by what lies beside a row; the difference is measured"
    return "exact, to the bit, for models whose layers the kernels compute (Llama, Mistral, Qwen2, Qwen3); else close"
