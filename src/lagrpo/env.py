"""`lagrpo env`: facts about a machine for bug reports, and how to get what is missing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from lagrpo import logs
from lagrpo.errors import one_line
from lagrpo.logs import print_text
from lagrpo.machine import VLLM_PYTHON, read_quota, usable_cores
from lagrpo.runs.environment import cpu_model, package_version

NEEDED = ("lagrpo", "torch", "transformers", "datasets", "numpy")
EXTRAS = {
    "math-verify": "math",
    "gguf": "demo",
    "peft": "demo",
    "reasoning-gym": "gym",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""Optional packages, with the extra of lagrpo that installs each."""

GET_VLLM = (
    "make vllm-env, or install vllm==0.32.0 into its own environment and set LAGRPO_VLLM_PYTHON"
)

INSTRUCTIONS = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16"}
"""Instruction sets that the kernels can use."""

Lines = Iterator[tuple[str, str]]
"""Lines of the output: the name of a thing, and the facts about it."""


def env() -> None:
    """Print versions, hardware, kernels and vLLM for a bug report, and how to get missing parts."""
    # Each in its own try: the rest still appears if a broken package raises.
    for describe in (describe_packages, describe_machine, describe_kernels, describe_vllm):
        try:
            for name, facts in describe():
                print_text(f"{name:<14} {facts}")
        except Exception as error:  # noqa: BLE001 - a broken package can raise anything
            logs.print_traceback(error)
            print_text(
                f"{describe.__name__:<14} failed: {type(error).__name__}: {one_line(str(error))}"
            )


def describe_packages() -> Lines:
    """Yields the version of Python and of each package."""
    yield "python", f"{platform.python_version()}, {sys.executable}"
    for name in (*NEEDED, *EXTRAS):
        command = "pip install --upgrade lagrpo"
        if name in EXTRAS:
            command = f"pip install 'lagrpo[{EXTRAS[name]}]'"
        yield name, package_version(name) or f"missing: {command}"


def describe_machine() -> Lines:
    """Yields the operating system, processor, memory and GPUs."""
    import torch

    from lagrpo.cpu.library import cpu_flags

    yield "system", platform.platform()
    instructions = sorted(INSTRUCTIONS & cpu_flags())
    yield "cpu", f"{cpu_model()} ({', '.join(instructions)})"
    quota = read_quota() or "none"
    cores = f"{os.cpu_count()} logical, {usable_cores()} usable, container quota {quota}"
    yield "cores", cores
    yield "threads", str(torch.get_num_threads())
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{memory_bytes / 1e9:.1f} GB"
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        gpus.append(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB")
    yield "gpu", "; ".join(gpus) or "none that PyTorch sees"


def describe_kernels() -> Lines:
    """Yields the state of the kernels, and the dtype that a run would choose.

    Compiles the kernels the first time, in 6 to 16 seconds.
    """
    from lagrpo.cpu import library
    from lagrpo.cpu.library import isa_level
    from lagrpo.cpu.panels import chosen_products
    from lagrpo.gpu import library as gpu_library
    from lagrpo.model.backend import pick_device, pick_dtype

    reason = library.why_not()
    if reason is None:
        products = chosen_products()
        if not products:
            problem = "the kernels' are wrong on this processor; update the C compiler"
            products = f"PyTorch ({problem})"
        instructions = f"instructions {isa_level()}"
        yield "kernels", f"{library.describe()}, {instructions}, bfloat16 products by {products}"
    elif "no C compiler" in reason:
        yield "kernels", f"missing: {reason}: apt-get install gcc"
    else:
        yield "kernels", f"missing: {reason}"
    if pick_device().type == "cuda":
        reason = gpu_library.why_not()
        yield (
            "gpu kernels",
            "Triton" if reason is None else f"PyTorch only, because Triton fails: {reason}",
        )
    yield "dtype", " because ".join(pick_dtype("auto", pick_device()))


def describe_vllm() -> Lines:
    """Yields the first vLLM of the environments of $LAGRPO_VLLM_PYTHON, .venv-vllm and this one."""
    pythons = [os.environ.get("LAGRPO_VLLM_PYTHON"), VLLM_PYTHON, sys.executable]
    for name in pythons:
        if not name:
            continue
        python = Path(name).expanduser().absolute()
        environment = python.parent.parent
        # Another environment's packages cannot be imported here; the folder's name has the version.
        for info in environment.glob("lib/python3*/site-packages/vllm*.dist-info"):
            package = info.name.removesuffix(".dist-info")
            yield "vllm", f"{package}: LAGRPO_VLLM_PYTHON={python}"
            return
    yield "vllm", f"missing: {GET_VLLM}"
