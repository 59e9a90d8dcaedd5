"""`lagrpo env`: what a bug report needs to say about a machine, and how to get what is missing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from lagrpo import logs
from lagrpo.errors import one_line
from lagrpo.machine import read_quota, usable_cores
from lagrpo.runs.environment import cpu_model, package_version

NEEDED = ("lagrpo", "torch", "transformers", "datasets", "numpy")
EXTRAS = {
    "math-verify": "math",
    "gguf": "demo",
    "peft": "demo",
    "reasoning-gym": "gym",
}  # package -> lagrpo's extra
EXTRAS |= {name: name for name in ("tensorboard", "wandb", "trackio")}
GET_VLLM = (
    "make vllm-env, or install vllm==0.32.0 into its own environment and set LAGRPO_VLLM_PYTHON"
)
INSTRUCTIONS = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16"}

Lines = Iterator[tuple[str, str]]  # what is looked at, what was found


def env() -> None:
    """Print versions, hardware, kernels and vLLM for a bug report, and the command that gets what is missing."""
    for look in (look_at_packages, look_at_machine, look_at_kernels, look_at_vllm):
        try:
            for name, found in look():
                print(f"{name:<14} {found}")
        except Exception as error:  # noqa: BLE001 - a broken package can raise anything
            logs.print_traceback(error)
            print(f"{look.__name__:<14} failed: {type(error).__name__}: {one_line(str(error))}")


def look_at_packages() -> Lines:
    yield "python", f"{platform.python_version()}, {sys.executable}"
    for name in (*NEEDED, *EXTRAS):
        get = (
            f"pip install 'lagrpo[{EXTRAS[name]}]'"
            if name in EXTRAS
            else "pip install --upgrade lagrpo"
        )
        yield name, package_version(name) or f"missing: {get}"


def look_at_machine() -> Lines:
    import torch

    from lagrpo.cpu.library import cpu_flags

    yield "system", platform.platform()
    yield "cpu", f"{cpu_model()} ({', '.join(sorted(INSTRUCTIONS & cpu_flags()))})"
    yield (
        "cores",
        f"{os.cpu_count()} logical, {usable_cores()} usable, container quota {read_quota() or 'none'}",
    )
    yield "threads", str(torch.get_num_threads())
    yield "memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f} GB"
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    yield (
        "gpu",
        "; ".join(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus)
        or "none that PyTorch sees",
    )


def look_at_kernels() -> Lines:
    """Compiles the kernels the first time, in 6 to 16 seconds."""
    from lagrpo.cpu import library
    from lagrpo.cpu.library import isa_level
    from lagrpo.cpu.panels import chosen_products
    from lagrpo.model.backend import pick_device, pick_dtype

    if (reason := library.why_not()) is not None:
        yield (
            "kernels",
            f"missing: {reason}" + (": apt-get install gcc" if "no C compiler" in reason else ""),
        )
    else:
        products = (
            chosen_products()
            or "PyTorch (the kernels' are wrong on this processor; update the C compiler)"
        )
        yield (
            "kernels",
            f"{library.describe()}, instructions {isa_level()}, bfloat16 products by {products}",
        )
    yield "dtype", " because ".join(pick_dtype("auto", pick_device()))


def look_at_vllm() -> Lines:
    pythons = (os.environ.get("LAGRPO_VLLM_PYTHON"), ".venv-vllm/bin/python", sys.executable)
    for python in (Path(name).expanduser().absolute() for name in pythons if name):
        for found in python.parent.parent.glob("lib/python3*/site-packages/vllm*.dist-info"):
            yield "vllm", f"{found.name.removesuffix('.dist-info')}: LAGRPO_VLLM_PYTHON={python}"
            return
    yield "vllm", f"missing: {GET_VLLM}"
