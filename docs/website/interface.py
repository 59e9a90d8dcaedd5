"""The Python interface from the sources: signatures and docstrings, read and not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from website.markdown import escape
from website.reference import link_pages, link_papers

UP = "../.."
PUBLIC = ("lagrpo", "lagrpo.runs", "lagrpo.verify", "lagrpo.types", "lagrpo.tasks", "lagrpo.core",
          "lagrpo.rollout.schedule")  # fmt: skip
"""What a page is about: a module, or a package with its modules. All others are in the table of modules."""
DOORS = ("lagrpo", "lagrpo.runs", "lagrpo.verify")
"""Packages whose own names are public, wherever they are defined, and not their modules."""
Definition = ast.FunctionDef | ast.ClassDef


def pages(sources: Path) -> dict[str, str]:
    """A page for each public module or package, and `python`, the list of all modules."""
    made = {f"python/{name}": page(sources, name) for name in PUBLIC}
    entries = "\n".join(f"python/{name}" for name in PUBLIC)
    return {**made, "python": f"# Python interface\n\n```{{toctree}}\n{entries}\n```\n\n{table_of_modules(sources)}"}


def page(sources: Path, name: str) -> str:
    """The page of a module; that of a package has its public modules, too."""
    path = sources / Path(*name.split("."))
    files = [_file(sources, name)]
    if path.is_dir() and name not in DOORS:
        files += sorted(file for file in path.glob("[!_]*.py"))
    parts = [_module(sources, file, 1 if n == 0 else 2) for n, file in enumerate(files)]
    return "\n\n".join(parts) + "\n"


def table_of_modules(sources: Path) -> str:
    """Every module with the first sentence of its docstring."""
    rows = ["## All modules", "", "| module | |", "|---|---|"]
    for file in sorted((sources / "lagrpo").rglob("*.py")):
        if text := ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))):
            first = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
            rows.append(f"| `{module_name(sources, file)}` | {escape(first)} |")
    return "\n".join(rows) + "\n"


def module_name(sources: Path, file: Path) -> str:
    """The dotted name of a file."""
    parts = file.relative_to(sources).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file(sources: Path, name: str) -> Path:
    path = sources / Path(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _module(sources: Path, file: Path, level: int) -> str:
    tree, name = ast.parse(file.read_text(encoding="utf-8")), module_name(sources, file)
    lines = [f"{'#' * level} {name}", "", *_docstring(tree), ""]
    for definition in public(sources, tree):
        lines += [*_definition(definition, name), ""]
    return "\n".join(lines)


def public(sources: Path, tree: ast.Module) -> list[Definition]:
    """The public functions and classes of a module. A door, whose `__all__` names those of modules that have no page,
    has them, too."""
    names = _listed(tree) or set()
    found = [node for node in _definitions(tree) if not names or node.name in names]
    for node in ast.walk(tree) if names else ():
        if isinstance(node, ast.ImportFrom) and not _has_page(sources, node.module or ""):
            found += [made for each in node.names if each.name in names and (made := find(sources, node, each.name))]
    return found


def find(sources: Path, importing: ast.ImportFrom, name: str) -> Definition | None:
    """The definition of an imported name, through modules that import it from others."""
    file = _file(sources, importing.module or "")
    if not (importing.module or "").startswith("lagrpo") or not file.exists():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if own := [node for node in _definitions(tree) if node.name == name]:
        return own[0]
    others = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return next((find(sources, each, name) for each in others if name in {alias.name for alias in each.names}), None)


def _definitions(tree: ast.Module) -> list[Definition]:
    return [node for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")]


def _has_page(sources: Path, name: str) -> bool:
    parent = name.rpartition(".")[0]
    return name in PUBLIC or (parent in PUBLIC and parent not in DOORS)


def _listed(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return None


def _definition(node: Definition, place: str) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        kind, signature = "function", f"({ast.unparse(node.args)}){returns}"
    else:
        kind, signature = "class", ""
    lines = [f"````{{py:{kind}}} {place}.{node.name}{signature}", "", *_docstring(node), ""]
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        lines += _member(member)
    return [*lines, "````"]


def _member(node: ast.stmt) -> list[str]:
    """A public field, property or method of a class."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
        default = f" = {ast.unparse(node.value)}" if node.value else ""
        return [f"- `{node.target.id}: {ast.unparse(node.annotation)}{default}`"]
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return []
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list):
        head = f"- `{node.name}{returns.replace(' ->', ':')}`"
    else:
        head = f"- `{node.name}({re.sub('^(self|cls)(, )?', '', ast.unparse(node.args))}){returns}`"
    said = link_pages(escape(" ".join((ast.get_docstring(node) or "").split())), UP)
    return [f"{head}  ", f"  {said}"] if said else [head]


def _docstring(node: ast.Module | Definition) -> list[str]:
    text = ast.get_docstring(node)
    return [line for part in _paragraphs(text) for line in ("", *part)] if text else []


def _paragraphs(text: str) -> Iterator[list[str]]:
    """The paragraphs of a docstring as Markdown: what is aligned or indented stays as it is."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        head, rest = lines[0], lines[1:]
        if head.lstrip().startswith(">>>"):
            yield ["```python", *lines, "```"]
        elif re.fullmatch(r"\w+:", head) and rest:
            yield [f"*{head}*", "", "```text", *(line.removeprefix("    ") for line in rest), "```"]
        elif any(line.startswith("- ") for line in lines):
            yield [link_pages(link_papers(re.sub(r"\n- ", "\n\n- ", escape(paragraph))), UP)]
        elif any(re.search(r"\S {2,}\S|^ {2,}", line) for line in lines):
            yield ["```text", *lines, "```"]
        else:
            yield [link_pages(link_papers(escape(paragraph)), UP)]
