"""The pages of the site from those of the repository: the README, docs/, and every file that they link to.

They keep their places, so that their links hold. A linked file that is no Markdown becomes a page that shows it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from website.markdown import anchors, links

HOME_ENDS = "\n## Stop it, and go on\n"
"""Where the home page ends and the guide begins: both are the README."""
USE = (
    *("quickstart", "data-and-rewards", "multi-turn", "off-policy", "algorithms", "evaluation", "checkpoints"),
    *("inspect", "vllm", "scaling", "lora", "settings", "metrics", "verify"),
)
"""Pages of docs/ for who uses the program, in their order; the others explain it."""
IMAGES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".json": "json"}


def write_pages(root: Path, site: Path) -> None:
    """Write the pages of the repository `root` into `site`, and all that they link to. Raises ValueError for a link
    to nothing."""
    waiting = [Path("README.md"), *(path.relative_to(root) for path in sorted((root / "docs").glob("*.md")))]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for target, _ in local_links(root, page):
            if target not in known and (root / target).is_file():
                known.add(target)
                waiting.append(target)
        _write(root, page, site)


def local_links(root: Path, page: Path) -> Iterator[tuple[Path, str]]:
    """The links of a page as (file or directory below `root`, anchor). Raises ValueError for one that leads to no file
    or to no heading."""
    for link in links((root / page).read_text(encoding="utf-8")) if page.suffix == ".md" else ():
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if target.is_absolute() or ".." in target.parts or not (root / target).exists():
            raise ValueError(f"{page}: the link {link} leads to no file of the repository")
        if anchor and target.suffix == ".md" and anchor not in anchors((root / target).read_text(encoding="utf-8")):
            raise ValueError(f"{page}: {target} has no heading for the link {link}")
        yield target, anchor


def _write(root: Path, page: Path, site: Path) -> None:
    if page.suffix in IMAGES:
        _put(site / page, None, root / page)
    elif page == Path("README.md"):
        _write_readme(root, site)
    elif page.suffix == ".md":
        header = "" if page.parent == Path("docs") else "---\norphan: true\n---\n\n"
        _put(site / page, header + relinked(root, page))
    else:
        text, language = (root / page).read_text(encoding="utf-8"), LANGUAGES.get(page.suffix, "text")
        _put(site / f"{page}.md", f"---\norphan: true\n---\n\n# {page}\n\n````{language}\n{text}````\n")


def relinked(root: Path, page: Path) -> str:
    """The text of a page, with the links that the site has elsewhere: to files that became pages and to directories,
    which it does not have."""
    text = (root / page).read_text(encoding="utf-8")
    for link in set(links(text)):
        path = link.partition("#")[0]
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if (root / target).is_dir():
            text = re.sub(rf"\[([^\]]*)\]\({re.escape(link)}\)", r"\1", text)
        elif target == Path("README.md"):
            text = text.replace(f"]({link})", f"]({os.path.relpath('index.md', page.parent)})")
        elif target.suffix not in {".md", *IMAGES}:
            text = text.replace(f"]({link})", f"]({path}.md)")
    return text


def _write_readme(root: Path, site: Path) -> None:
    home, found, guide = relinked(root, Path("README.md")).partition(HOME_ENDS)
    if not found:
        raise ValueError(f"README.md: no heading {HOME_ENDS.strip()!r}, where the home page ends")
    _put(site / "index.md", f"{home}\n{contents(root)}")
    _put(site / "guide.md", "# Guide\n" + HOME_ENDS + guide)


def contents(root: Path) -> str:
    """The navigation. A new page of docs/ comes with those that explain."""
    explain = sorted({path.stem for path in (root / "docs").glob("*.md")} - set(USE), key=_by_rank)
    parts = {
        "Use it": ["guide", *(f"docs/{name}" for name in USE)],
        "Understand it": [f"docs/{name}" for name in explain],
        "Reference": ["reference/settings", "reference/recipes", "reference/commands", "reference/python"],
    }
    trees = (["```{toctree}", ":hidden:", f":caption: {name}", *pages, "```", ""] for name, pages in parts.items())
    return "\n".join(line for tree in trees for line in tree)


def _by_rank(name: str) -> tuple[bool, str]:
    return name != "theory", name


def _put(target: Path, text: str | None, source: Path | None = None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source:
        shutil.copyfile(source, target)
    else:
        target.write_text(text or "", encoding="utf-8")
