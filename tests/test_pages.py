"""Docs, README and reports: links resolve, and the settings and commands that they name exist."""

import doctest
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lagrpo.cli import COMMANDS, read_eval_words, read_train_words
from lagrpo.runs.rollouts import rollout_schema
from lagrpo.settings.load import TABLES, list_settings, load_settings
from lagrpo.settings.schema import Settings

ROOT = Path(__file__).parent.parent
DOCS = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))
PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), Path("SECURITY.md"), *DOCS]
LINKED = [
    *PAGES,
    *sorted(
        path.relative_to(ROOT)
        for name in ("reports", "benchmarks")
        for path in (ROOT / name).rglob("*.md")
    ),
]
SECTIONS = "|".join(Settings.model_fields)
PARSER = MarkdownIt("commonmark").enable("table")


@cache
def parse(text: str) -> list[Token]:
    """The blocks of a page, which many tests read."""
    return PARSER.parse(text)


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def links(text: str) -> Iterator[str]:
    """The targets of links and images that lie in the repository."""
    for token in (child for block in parse(text) for child in block.children or ()):
        target = str(token.attrs.get("href", token.attrs.get("src", "")))
        if target and not re.match(r"[a-z][a-z0-9+.-]*:|//", target, re.IGNORECASE):
            yield target


def code(text: str) -> list[tuple[str, str]]:
    """Blocks of code as (language, text), and code inside a line with the language "inline"."""
    tokens = parse(text)
    blocks = [(token.info.strip(), token.content) for token in tokens if token.type == "fence"]
    inner = (child for token in tokens for child in token.children or ())
    return blocks + [("inline", child.content) for child in inner if child.type == "code_inline"]


@cache
def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page, and those that the page sets."""
    anchor_names: set[str] = set(re.findall(r'<a id="([^"]+)">', text))
    for opening, heading in pairwise(parse(text)):
        if opening.type == "heading_open":
            words = (
                "".join(child.content for child in heading.children or ()).replace("`", "").lower()
            )
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            repeated = (f"{slug}-{n}" for n in range(1, len(anchor_names) + 1))
            anchor_names.add(
                slug
                if slug not in anchor_names
                else next(name for name in repeated if name not in anchor_names)
            )
    return anchor_names


@pytest.mark.parametrize("page", LINKED, ids=str)
def test_links_lead_to_files_and_headings(page):
    for link in links(text_of(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page.parent / path).resolve() if path else ROOT / page
        assert target.is_relative_to(ROOT), f"{page}: {link} leads out of the repository"
        assert target.exists(), f"{page}: {link} leads to no file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), (
                f"{page}: {link} leads to no heading"
            )


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_settings_named_in_a_page_exist(page):
    setting_names = list_settings(Settings)
    for language, block in code(text_of(page)):
        if language == "inline" and re.fullmatch(rf"({SECTIONS})\.[a-z0-9_.]+[a-zA-Z0-9_]", block):
            entry = any(block.startswith(f"{name}.") for name in (*TABLES, "eval.sets"))
            assert entry or block in setting_names, f"{page}: no setting {block}"
        if language == "toml":
            sections = tomllib.loads(block)
            if sections.keys() <= Settings.model_fields.keys():
                load_settings(sections)


@pytest.mark.parametrize("page", LINKED, ids=str)
def test_commands_named_in_a_page_exist(page):
    for words in commands(text_of(page)):
        if "lagrpo" in (words[0], *words[2:-1]):
            name, *arguments = words[words.index("lagrpo") + 1 :]
            assert name in COMMANDS or name.startswith("-"), f"{page}: no command lagrpo {name}"
            check_settings(name, arguments)
        if words[0] == "make":
            assert re.search(
                rf"^[\w -]*\b{words[1]}\b[\w -]*:",
                (ROOT / "Makefile").read_text(encoding="utf-8"),
                re.M,
            ), words
        for word in words:
            if re.fullmatch(r"(experiments|examples|benchmarks|tests)/\S+", word):
                assert (ROOT / word).exists(), f"{page}: no file {word}"


def commands(text: str) -> list[list[str]]:
    """The words of every command in blocks without a language and in code inside a line."""
    lines = [
        re.sub(r"\s#.*", "", line).strip()
        for language, block in code(text)
        if language in ("", "inline")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    lines = [re.sub(r"^([A-Z_]+=\S+\s+)+", "", line) for line in lines]
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    return [
        shlex.split(line) for line in lines if re.match(r"(lagrpo|torchrun|make|python) \S", line)
    ]


def check_settings(name: str, words: list[str]) -> None:
    """Settings given as --section.key exist and take their values; other options belong to the
    command."""
    if name in ("train", "eval") and not {"…", "VALUE", "--help"} & {*words}:
        read_words = read_train_words if name == "train" else read_eval_words
        load_settings({}, read_words(words)[1])


def test_tables_of_settings_and_metrics_match_the_code():
    for name, text in runpy.run_path(str(ROOT / "docs/website/reference.py"))[
        "fill_pages"
    ]().items():
        assert text_of(Path(f"docs/{name}.md")) == text, (
            "write it again: python docs/website/reference.py"
        )


@pytest.mark.parametrize("report", ["theory.md", "precision.md"])
def test_python_in_a_report_prints_what_the_page_shows(report):
    outcome = doctest.testfile(str(ROOT / "reports" / report), module_relative=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_page_of_commands_shows_every_command():
    page = text_of(Path("docs/commands.md"))
    assert COMMANDS.keys() <= set(re.findall(r"^\$ lagrpo ([a-z-]+)", page, re.MULTILINE))


def test_columns_of_rollouts_are_documented():
    assert set(rollout_schema(["NAME"]).names) <= set(
        re.findall(r"`(\w+)`", text_of(Path("docs/run-files.md")))
    )
