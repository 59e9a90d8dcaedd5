"""Sphinx's configuration: `make docs` builds the site from the Markdown pages, README.md first."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

project = html_title = "lagrpo"
extensions = ["myst_parser"]
html_math_renderer = "mathml"  # needs no script and no network
root_doc = "README"
include_patterns = [
    "*.md",
    "docs/*.md",
    "reports/*.md",
    "benchmarks/**.md",
    "examples/**.md",
    "experiments/*.md",
    "experiments/lag/results/*.md",
    "conformance/*.md",
]
exclude_patterns = [".*", "build", "runs", "site", "src", "tests"]

# GitHub's Markdown: formulas as $…$ and ```math, anchors of headings; a line that starts with % is
# text.
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 6
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]
# GitHub shows a heading whose level skips one as any other.
suppress_warnings = ["toc.not_included", "myst.header"]

html_theme = "furo"
html_copy_source = html_show_sourcelink = html_show_sphinx = html_show_copyright = False
highlight_language = "text"

NAVIGATION = {
    "Start": [
        "quickstart",
        "from-trl",
        "from-verl",
        "data-and-rewards",
        "off-policy",
        "staleness",
        "algorithms",
        "own-loss",
        "distillation",
        "elsewhere",
        "extending",
        "multi-turn",
    ],
    "Runs": ["evaluation", "checkpoints", "inspect", "diagnose", "studies", "verify"],
    "Hardware": ["gpus", "vllm", "lora", "precision"],
    "Reference": ["commands", "settings", "metrics", "run-files", "architecture", "papers"],
}


def add_navigation(_app: Any, page: str, source: list[str]) -> None:
    """Add the table of contents of the sidebar to the start page."""
    for part, names in NAVIGATION.items() if page == root_doc else ():
        lines = [
            "",
            "```{toctree}",
            ":hidden:",
            f":caption: {part}",
            "",
            *(f"docs/{name}" for name in names),
            "```",
        ]
        source[0] += "\n".join([*lines, ""])


def add_formula(page: Any, node: Any) -> None:
    """Write a formula as MathML. latex2mathml wants the letter of \\mathbb in braces."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    page.body.append(
        convert(re.sub(r"\\mathbb ?(\w)", r"\\mathbb{\1}", node.astext()), display=display)
    )
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.add_html_math_renderer("mathml", (add_formula, None), (add_formula, None))
