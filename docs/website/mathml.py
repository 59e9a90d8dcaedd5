"""A Sphinx extension: formulas as MathML, which a browser shows without scripts, fonts or a network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator

BETTER = {
    "<mi>&#x0007E;</mi>": "<mo>&#x0223C;</mo>",  # \sim relates what stands beside it
    '<mn mathvariant="double-struck">1</mn>': "<mn>&#x1D7D9;</mn>",  # browsers know no mathvariant
    r"(<mi>(?:log|ln|exp)</mi>)(?=<m[inrsf])": r'\1<mspace width="0.17em"/>',
}
"""What latex2mathml writes, and what browsers show better."""


def to_mathml(formula: str, display: str = "inline") -> str:
    """The MathML of a formula. latex2mathml takes the letter of \\mathbb in braces only."""
    made = convert(re.sub(r"\\mathbb ?(\w)", r"\\mathbb{\1}", formula), display=display)
    for pattern, better in BETTER.items():
        made = re.sub(pattern, better, made)
    return made


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line."""
    self.body.append(to_mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    """A formula on lines of its own."""
    self.body.append(f'<div class="formula">{to_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    """Have Sphinx call these."""
    app.add_html_math_renderer("mathml", inline_renderers=(visit_math, None), block_renderers=(visit_math_block, None))
    app.config["html_math_renderer"] = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
