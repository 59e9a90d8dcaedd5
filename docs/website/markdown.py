"""What a Markdown page says: its links, the anchors of its headings, its code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token

PARSER = MarkdownIt("commonmark").enable("table")
OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def inline(text: str) -> Iterator[Token]:
    """The tokens inside paragraphs, headings and cells."""
    for token in PARSER.parse(text):
        yield from token.children or ()


def links(text: str) -> list[str]:
    """The targets of links and images that lie in the repository: a path, an anchor or both."""
    found = [token.attrs.get("href", token.attrs.get("src")) for token in inline(text)]
    return [str(target) for target in found if target and not OUTSIDE.match(str(target))]


@cache
def code(text: str) -> list[tuple[str, str]]:
    """Blocks of code as (language, text); what stands in a line of its paragraph has the language "inline"."""
    blocks = [(token.info.strip(), token.content) for token in PARSER.parse(text) if token.type == "fence"]
    return blocks + [("inline", token.content) for token in inline(text) if token.type == "code_inline"]


@cache
def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page, and those that it sets itself."""
    found: set[str] = set(re.findall(r'<a id="([^"]+)">', text))
    tokens = PARSER.parse(text)
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            slug = slugify("".join(token.content for token in content.children or ()))
            repeated = (f"{slug}-{n}" for n in range(1, len(found) + 1))
            found.add(slug if slug not in found else next(name for name in repeated if name not in found))
    return found


def slugify(heading: str) -> str:
    """The anchor of a heading.

    >>> slugify("k1, k2, k3"), slugify("What `v` buys: more")
    ('k1-k2-k3', 'what-v-buys-more')
    """
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def escape(text: str) -> str:
    """Plain text as Markdown that shows it as it is; `code` stays code and *words* stay marked.

    >>> print(escape("sum_{i<j} of `a_i` * b, *all*"))
    sum\\_{i\\<j} of `a_i` \\* b, *all*
    """
    parts = re.split(r"(`[^`]+`|(?<!\w)\*[A-Za-z][\w ,'-]*\*(?!\w))", text)
    return "".join(part if n % 2 else re.sub(r"([\\*_$<>\[\]|~])", r"\\\1", part) for n, part in enumerate(parts))
