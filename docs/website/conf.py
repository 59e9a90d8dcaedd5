"""How Sphinx builds the site: `make docs`."""

import sys
from pathlib import Path

import ziamath

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "lagrpo"
html_title = "lagrpo"
extensions = ["myst_parser", "mathml"]

# GitHub's Markdown: formulas as $…$ and ```math, anchors of headings; a line that starts with % is text.
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 6
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]
myst_dmath_double_inline = True
suppress_warnings = ["ref.python"]  # annotations are not qualified: tasks have an Options each

html_theme = "furo"
html_static_path = [str(HERE / "style.css"), str(Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf")]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "tango"
pygments_dark_style = "monokai"
highlight_language = "text"
