"""The direction of dependencies, read from the imports, and what importing a part loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent / "src" / "lagrpo"

# What each room of the package may import of ours: the first names below lagrpo. The small ones are
# a page each, of numpy and the standard library.
SMALL = {"errors", "interrupts", "logs", "machine", "rng", "threads", "types"}
LEAVES = {*SMALL, "core"}
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "errors": {"logs"},
    "rewards": {*SMALL, "core"},
    "tasks": {*SMALL, "core", "model", "rewards"},
    "runs": {*SMALL},
    "cpu": {"machine"},
    "gpu": {"machine"},
    "model": {*LEAVES, "cpu", "gpu"},
    "settings": {*SMALL, "core", "rewards"},
    "data": {*LEAVES, "model", "runs", "tasks"},
    "distributed": {*SMALL},
    "rollout": {*LEAVES, "cpu", "distributed", "gpu", "model", "rewards", "settings", "tasks"},
    "terminal": {*SMALL, "core", "runs", "settings", "tasks"},
    "diagnosis": {*SMALL, "core", "runs", "settings", "terminal"},
    "view": {
        *SMALL,
        "core",
        "diagnosis",
        "model",
        "runs",
        "settings",
        "terminal",
    },  # model: where embedded models lie
    # What replays a run imports none of what made it: neither model, rollout, cpu nor the loop.
    "verify": {*SMALL, "core", "model", "runs", "rewards", "settings", "tasks"},
}
BELOW = set(ALLOWED)
ALLOWED |= {
    "training": {
        *LEAVES,
        *("cpu", "data", "distributed", "model", "rewards", "rollout", "settings", "tasks"),
    },
    "resume": {
        *LEAVES,
        *("data", "distributed", "model", "rewards", "runs", "settings", "tasks", "training"),
    },
    "startup": BELOW - {"verify", "view", "diagnosis"} | {"training", "resume"},
    "lifecycle": BELOW - {"verify", "view"} | {"training", "resume", "startup"},
    "study": {*SMALL, "core", "runs", "settings", "terminal", "startup", "lifecycle"},
    "env": {*LEAVES, "cpu", "gpu", "model", "runs"},
    "cli": BELOW | {"startup", "resume", "lifecycle", "study", "env"},
    "__init__": {"core", "diagnosis", "machine", "rewards", "runs", "lifecycle"},
    "__main__": {"cli", "interrupts", "logs"},
    # Imported inside other people's trainers.
    "trl": {"core"},
    "verl": {"core"},
}
CORE_MAY_USE = {"torch"} | set(sys.stdlib_module_names)


def imported(source: str, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The dotted names that a module imports, wherever in it the import stands; `package` is what
    relative imports start from. `from lagrpo import x` counts as lagrpo.x."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from (
                ((*module, alias.name) for alias in node.names)
                if module == ("lagrpo",)
                else (module,)
            )


def violations(part: str, source: str, package: tuple[str, ...] = ("lagrpo",)) -> list[str]:
    """The imports of a module of `part` that its place does not allow."""
    names = set(imported(source, package))
    wrong = {
        n
        for n in names
        if n[0] == "lagrpo" and (n[1:2] or ("__init__",))[0] not in ALLOWED[part] | {part}
    }
    if part == "core":
        wrong |= {name for name in names if name[0] not in CORE_MAY_USE | {"lagrpo"}}
    return sorted(".".join(name) for name in wrong)


def modules() -> list[Path]:
    return sorted(path.relative_to(SOURCES) for path in SOURCES.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=str)
def test_every_module_imports_only_allowed_packages(path):
    part = path.parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} has no place in ALLOWED yet: say there what it may import"
    package = ("lagrpo", *path.parts[:-1])
    assert violations(part, (SOURCES / path).read_text(encoding="utf-8"), package) == []


@pytest.mark.experiments
def test_drawing_of_the_packages_shows_their_imports():
    from experiments.figures import IMAGES, draw_rooms

    assert (IMAGES / "rooms.svg").read_text(encoding="utf-8") == draw_rooms()


def test_allowed_imports_have_no_cycle():
    remaining = dict(ALLOWED)
    while remaining:
        free = {part for part, below in remaining.items() if not below & set(remaining)}
        assert free, f"these import each other in a circle: {sorted(remaining)}"
        remaining = {part: below for part, below in remaining.items() if part not in free}


def loaded(code: str) -> list[set[str]]:
    """The top-level modules, and ours in full, that are loaded at each `loaded()` of `code` in a
    fresh interpreter."""
    script = f"import sys\ndef loaded(): print(*sys.modules, file=sys.stderr)\n{code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return [
        {name if name.startswith("lagrpo") else name.partition(".")[0] for name in line.split()}
        for line in done.stderr.splitlines()
    ]


HEAVY = {
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "matplotlib",
    "math_verify",
    "sympy",
    "pandas",
}
LIGHT = [
    "settings.schema",
    "tasks",
    "terminal.display",
    "model.embedded",
    "rollout.schedule",
    "lifecycle.callbacks",
]
LIGHT += ["env"]

# How OpenMP's threads wait must be said before PyTorch is loaded, so `import lagrpo` says it.
WITH_LAGRPO = {"lagrpo", "lagrpo.machine"}


def test_core_loads_only_torch():
    files = [path for path in modules() if path.parts[0] == "core" and path.name != "__init__.py"]
    (names,) = loaded("\n".join(f"import lagrpo.core.{path.stem}" for path in files) + "\nloaded()")
    assert "torch" in names
    assert (
        names & {"transformers", "datasets", "accelerate", "pydantic", "rich", "matplotlib", "vllm"}
        == set()
    )
    ours = {name for name in names if name.startswith("lagrpo")}
    assert ours == WITH_LAGRPO | {"lagrpo.core", *(f"lagrpo.core.{path.stem}" for path in files)}


def test_package_settings_display_and_help_load_nothing_heavy():
    """One after the other, in one process. The package itself loads what must come before PyTorch
    and nothing else."""
    by_package, by_modules, by_help = loaded(f"""
import lagrpo
loaded()
import {", ".join(f"lagrpo.{name}" for name in LIGHT)}
loaded()
from lagrpo.cli import main
for command in ("train", "eval", "view", "vllm-serve"):
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code, end.code
loaded()
""")
    assert {name for name in by_package if name.startswith("lagrpo")} == WITH_LAGRPO
    assert [names & HEAVY for names in (by_package, by_modules, by_help)] == [set()] * 3
