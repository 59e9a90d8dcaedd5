"""The direction of dependencies, read from the imports, and what importing a part loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from each import each

SOURCES = Path(__file__).parent.parent / "src" / "lagrpo"

# What each room of the package may import of ours: the first names below lagrpo. The small ones are a page each, of
# numpy and the standard library.
SMALL = {"errors", "interrupts", "logs", "machine", "rng", "types"}
LEAVES = {*SMALL, "core"}
ALLOWED: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "errors": {"logs"},
    "rewards": {*SMALL},
    "tasks": {*SMALL, "rewards"},
    "runs": {*SMALL},
    "cpu": {"machine"},
    "model": {*LEAVES, "cpu"},
    "settings": {*SMALL, "rewards", "tasks"},
    "data": {*LEAVES, "model", "runs", "rollout", "tasks"},
    "rollout": {*LEAVES, "cpu", "model", "rewards", "settings", "tasks"},
    "terminal": {*SMALL, "core", "runs", "settings", "tasks"},
    "view": {*SMALL, "core", "model", "runs", "settings", "terminal"},  # model: where embedded models lie
    # What replays a run imports none of what made it: neither model, rollout, cpu nor the loop.
    "verify": {*SMALL, "core", "model", "runs", "rewards", "settings", "tasks"},
}
BELOW = set(ALLOWED)
ALLOWED |= {
    "training": BELOW - {"verify", "view"},
    "env": {*LEAVES, "cpu", "model", "runs"},
    "cli": BELOW | {"training", "env"},
    "__init__": {"machine", "training"},
    "__main__": {"cli", "interrupts"},
}
CORE_MAY_USE = {"torch"} | set(sys.stdlib_module_names)


def imported(source: str, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The dotted names that a module imports, wherever in it the import stands; `package` is what relative imports
    start from. `from lagrpo import x` counts as lagrpo.x."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*module, alias.name) for alias in node.names) if module == ("lagrpo",) else (module,)


def violations(part: str, source: str, package: tuple[str, ...] = ("lagrpo",)) -> list[str]:
    """The imports of a module of `part` that its place does not allow."""
    names = set(imported(source, package))
    wrong = {n for n in names if n[0] == "lagrpo" and (n[1:2] or ("__init__",))[0] not in ALLOWED[part] | {part}}
    if part == "core":
        wrong |= {name for name in names if name[0] not in CORE_MAY_USE | {"lagrpo"}}
    return sorted(".".join(name) for name in wrong)


def modules() -> list[Path]:
    return sorted(path.relative_to(SOURCES) for path in SOURCES.rglob("*.py"))


@each("path", modules())
def test_every_module_imports_only_what_stands_below_it(path):
    part = path.parts[0].removesuffix(".py")
    assert part in ALLOWED, f"{part} has no place in ALLOWED yet: say there what it may import"
    package = ("lagrpo", *path.parts[:-1])
    assert violations(part, (SOURCES / path).read_text(encoding="utf-8"), package) == []


def test_the_allowed_directions_have_no_circle():
    remaining = dict(ALLOWED)
    while remaining:
        free = {part for part, below in remaining.items() if not below & set(remaining)}
        assert free, f"these import each other in a circle: {sorted(remaining)}"
        remaining = {part: below for part, below in remaining.items() if part not in free}


def loaded(code: str) -> set[str]:
    """The top-level modules, and ours in full, that are loaded after `code` has run in a fresh interpreter."""
    script = f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = done.stderr.splitlines()[-1].split()
    return {name if name.startswith("lagrpo") else name.partition(".")[0] for name in names}


HEAVY = {"torch", "transformers", "datasets", "pyarrow", "matplotlib", "math_verify", "sympy", "pandas"}


# How OpenMP's threads wait must be said before PyTorch is loaded, so `import lagrpo` says it.
WITH_LAGRPO = {"lagrpo", "lagrpo.machine"}


def test_core_alone_loads_torch_and_nothing_of_ours_or_anybody_elses():
    files = [path for path in modules() if path.parts[0] == "core" and path.name != "__init__.py"]
    names = loaded("\n".join(f"import lagrpo.core.{path.stem}" for path in files))
    assert "torch" in names
    assert names & {"transformers", "datasets", "accelerate", "pydantic", "rich", "matplotlib", "vllm"} == set()
    ours = {name for name in names if name.startswith("lagrpo")}
    assert ours == WITH_LAGRPO | {"lagrpo.core", *(f"lagrpo.core.{path.stem}" for path in files)}


def test_the_package_itself_loads_what_must_come_before_pytorch_and_nothing_else():
    names = loaded("import lagrpo")
    assert {name for name in names if name.startswith("lagrpo")} == WITH_LAGRPO
    assert names & HEAVY == set()


@each(
    "module",
    [
        "settings.schema",
        "tasks",
        "terminal.display",
        "model.embedded",
        "rollout.schedule",
        "training.callbacks",
        "env",
    ],
)
def test_settings_and_display_load_nothing_heavy(module):
    assert loaded(f"import lagrpo.{module}") & HEAVY == set()


@each("command", ["train", "eval", "view", "vllm-serve"])
def test_help_loads_nothing_heavy(command):
    code = f"""
import sys
from lagrpo.cli import main
sys.argv = ["lagrpo", {command!r}, "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert loaded(code) & HEAVY == set()


def test_programs_outside_the_package_import_names_that_exist():
    root = SOURCES.parent.parent
    for path in (path for name in ("benchmarks", "conformance", "experiments") for path in (root / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "lagrpo":
                exec(ast.unparse(node))  # ImportError: cannot import name 'x' from 'lagrpo.y'
