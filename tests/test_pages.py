"""Docs, README and reports: links resolve, and the settings and commands that they name exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from website.markdown import code
from website.pages import local_links

from lagrpo.cli import COMMANDS, EVALUATED, Eval, Train
from lagrpo.runs.metrics import METRICS
from lagrpo.runs.rollouts import rollout_schema
from lagrpo.settings.load import TABLES, list_settings, load_settings, read_words
from lagrpo.settings.schema import Settings

ROOT = Path(__file__).parent.parent
DOCS = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))
PAGES = [Path("README.md"), *DOCS]
LINKED = [
    *PAGES,
    *sorted(path.relative_to(ROOT) for name in ("reports", "benchmarks") for path in (ROOT / name).rglob("*.md")),
]
SECTIONS = "|".join(Settings.model_fields)


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", LINKED, ids=str)
def test_links_lead_to_files_and_headings(page):
    list(local_links(ROOT, page))


def test_all_docs_together_have_at_most_1500_lines():
    assert sum(text_of(page).count("\n") for page in DOCS) <= 1500


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_settings_named_in_a_page_exist(page):
    known = list_settings(Settings)
    for language, block in code(text_of(page)):
        if language == "inline" and re.fullmatch(rf"({SECTIONS})\.[a-z0-9_.]+[a-zA-Z0-9_]", block):
            entry = any(block.startswith(f"{name}.") for name in (*TABLES, "eval.sets"))
            assert entry or block in known, f"{page}: no setting {block}"
        if language == "toml":
            given = tomllib.loads(block)
            if given.keys() <= Settings.model_fields.keys():
                load_settings(given)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_named_in_a_page_exist(page):
    for words in commands(text_of(page)):
        if "lagrpo" in (words[0], *words[2:-1]):
            name, *rest = words[words.index("lagrpo") + 1 :]
            assert name in COMMANDS or name.startswith("-"), f"{page}: no command lagrpo {name}"
            check_settings(name, rest)
        if words[0] == "make":
            assert re.search(rf"^[\w -]*\b{words[1]}\b[\w -]*:", (ROOT / "Makefile").read_text(), re.M), words
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
    return [shlex.split(line) for line in lines if re.match(r"(lagrpo|torchrun|make|python) \S", line)]


def check_settings(name: str, words: list[str]) -> None:
    """Settings given as --section.key exist and take their values; other options belong to the command."""
    if name in ("train", "eval") and not {"…", "VALUE", "--help"} & {*words}:
        command, sections = (Train, [*Settings.model_fields]) if name == "train" else (Eval, list(EVALUATED))
        load_settings({}, read_words(words, command, Settings(), sections)[1])


def test_the_page_on_metrics_names_every_metric_and_column():
    page = text_of(Path("docs/metrics.md"))
    lines = [f"| `{name}` | {meaning} |" for metrics in METRICS.values() for name, meaning in metrics.items()]
    assert [line for line in lines if line not in page] == []
    assert set(rollout_schema(["NAME"]).names) - set(re.findall(r"`(\w+)`", page)) == set()
