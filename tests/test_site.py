"""What the site is made of: links that lead somewhere, code that works, and a reference that has everything."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from study.spec import Study
from website import interface, markdown, pages, reference
from website.generate import generate

from lagrpo.cli import COMMANDS
from lagrpo.core.pieces import TABLES
from lagrpo.objective.recipes import PRESETS
from lagrpo.settings.arguments import SHORT, parse
from lagrpo.settings.arguments import TABLES as SETTINGS_TABLES
from lagrpo.settings.schema import ScheduleSettings, Settings
from lagrpo.settings.toml import entry_of, list_settings, load_settings, validate

ROOT = Path(__file__).parent.parent
PAGES = [Path("README.md"), *sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.md"))]


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", LINKED, ids=str)
def test_every_link_leads_to_a_file_and_a_heading(page):
    list(pages.local_links(ROOT, page))


def test_a_link_that_leads_nowhere_is_an_error(tmp_path):
    (tmp_path / "a.md").write_text("# A heading\n\n[here](#a-heading) and [there](b.md)\n")
    with pytest.raises(ValueError, match=r"a\.md: the link b\.md leads to no file"):
        list(pages.local_links(tmp_path, Path("a.md")))
    (tmp_path / "b.md").write_text("[here](a.md#a-heading) and [gone](a.md#another)\n")
    with pytest.raises(ValueError, match=r"b\.md: a\.md has no heading for the link a\.md#another"):
        list(pages.local_links(tmp_path, Path("b.md")))


def test_anchors_are_those_of_github():
    headings = "# k1, k2, k3\n## What `v` buys: *more*\n## Twice\n## Twice\n```\n# no heading\n```\n"
    assert markdown.anchors(headings) == {"k1-k2-k3", "what-v-buys-more", "twice", "twice-1"}


@pytest.mark.parametrize("module", [markdown, reference, interface])
def test_the_examples_in_the_docstrings(module):
    import doctest

    assert doctest.testmod(module).failed == 0


# Commands


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command on a page: lines of blocks without a language, and code that is one."""
    for language, block in markdown.code(text):
        if language in ("", "sh", "bash", "inline"):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"(?<=\s)(?:&&|&|;|\|)(?=\s|$)|\bdo\b", re.sub(r"\s#.*", "", line)):
                    words = re.sub(r"^(\s*[A-Z_]+=\S+)+\s", "", part.strip())
                    if re.match(r"(\S*/)?(lagrpo|torchrun|make|python|pytest)\s", words):
                        yield [each for word in shlex.split(words) for each in expand(word)]


def expand(word: str) -> list[str]:
    """A word with a list in braces as bash reads it."""
    if (found := re.fullmatch(r"(.*)\{([^{}]+,[^{}]+)\}(.*)", word)) is None:
        return [word]
    return [f"{found[1]}{each}{found[3]}" for each in found[2].split(",")]


def ours(words: list[str]) -> list[str] | None:
    """The words after `lagrpo`, also where torchrun starts it."""
    if words[0].endswith("lagrpo"):
        return words[1:]
    return words[words.index("-m") + 2 :] if words[0] == "torchrun" and "-m" in words else None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_of_a_page_is_one(page):
    for words in commands(text_of(page)):
        if (own := ours(words)) is not None:
            check_command(own)
        elif words[0] == "make":
            check_targets(words[1:])
        for word in words:
            if re.fullmatch(r"(experiments|examples|benchmarks|conformance|tests|docs)/\S+", word):
                assert (ROOT / word).exists(), f"{shlex.join(words)}: there is no {word}"


def check_command(words: list[str]) -> None:
    """The command exists, and so do its options; settings of a run have values that they take."""
    name, *rest = [word for word in words if word not in ("…", "...")]
    if name.startswith("-") or name == "COMMAND":
        return
    assert name in COMMANDS, f"there is no command: lagrpo {shlex.join(words)}"
    rest = rest[: rest.index("--")] if "--" in rest else rest
    help = reference.help_of(name) + (reference.help_of("train") if name == "plan" else "")
    known = set(re.findall(r"--([\w.-]+)", help)) | SHORT.keys() | {"help"}
    options = [option.split("=")[0].removeprefix("--") for option in rest if option.startswith("--")]
    for option in options:
        if option.rpartition(".")[0] in SETTINGS_TABLES:
            continue
        assert plain(option) in {plain(each) for each in known}, f"lagrpo {shlex.join(words)}: no option --{option}"
    if name == "recipes":
        assert {word for word in rest if re.fullmatch("[a-z_]+", word)} <= PRESETS.keys(), rest
    if name == "train" and "VALUE" not in rest:
        given = parse(Settings, rest, {"--dry-run", "--help"})
        validate(Settings, {}, {**given.overrides, "run": {}}, "command line")


def plain(name: str) -> str:
    return name.replace("-", "_")


def check_targets(words: list[str]) -> None:
    """The targets of a make command are in the Makefile."""
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text().replace("\\\n", ""), re.M))
    targets = {name for group in targets for name in group.split()}
    assert {word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)} <= targets, words


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trian", "a.toml"], "there is no command"),
        (["show", "runs/NAME", "--bach", "3"], "no option --bach"),
        (["recipes", "dappo"], "dappo"),
        (["train", "a.toml", "--schedule.w", "3"], "no option --schedule.w"),
    ],
)
def test_a_command_that_is_none_is_found(words, error):
    with pytest.raises(AssertionError, match=error):
        check_command(words)


# Blocks of code


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_toml_is_settings_or_a_study(page):
    for language, block in markdown.code(text_of(page)):
        if language == "toml":
            given = tomllib.loads(block)
            if "grid" in given:
                validate(Study, given, {}, str(page))
            elif given.keys() <= Settings.model_fields.keys():
                load_settings(given)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_compiles_and_what_it_imports_exists(page):
    for language, block in markdown.code(text_of(page)):
        if language == "python" and ">>>" not in block:
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lagrpo"):
                    module = import_module(node.module)
                    assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_every_reason_on_the_page_on_choices_has_its_evidence():
    text = text_of(Path("docs/choose.md"))
    rows = re.findall(r"^\| (?!---)(.+) \|$", text, re.M)
    items = re.findall(r"^- (.+?)(?=^- |^#|\n\n|\Z)", text, re.M | re.S)
    reasons = [row for row in rows if not re.search(r"\| (why|know that|set|take)\b", row)] + items
    assert len(reasons) > 40
    assert [reason for reason in reasons if not re.search(r"\]\([\w-]+\.md", reason)] == []
    for section, name in re.findall(r"`([a-z]+)\.([a-z_v]+)\b(?!\.)", text):
        assert f"{section}.{name}" in list_settings(Settings), f"{section}.{name}"
    leaves = {name.rpartition(".")[2] for name in list_settings(Settings)}
    pieces = {name for table in TABLES.values() for name in table}
    kinds = set(get_args(ScheduleSettings.model_fields["kind"].annotation))
    known = {*PRESETS, *leaves, *pieces, *kinds, *re.findall(r"`(\w+)`", text_of(Path("docs/run-directory.md")))}
    assert set(re.findall(r"`([a-z]\w*)`", text)) <= known


# The reference


def is_section(field: Any) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def test_the_settings_have_all_settings_with_their_descriptions():
    page = reference.settings()
    documented = re.findall(r"^```\{confval\} (\S+)$", page, re.M)
    known = list_settings(Settings)
    lists = {name: of for name, field in known.items() if (of := entry_of(field.annotation))}
    entries = [f"{name}.{each}" for name, of in lists.items() for each in of.model_fields]
    assert sorted(documented) == sorted([*entries, *(name for name in known if not is_section(known[name]))])
    for name, field in list_settings(Settings).items():
        assert is_section(field) or field.description, name
    assert ":type: integer, at least 1\n:default: `16`\n\nCompletions per prompt" in page
    assert ':type: `"local"` or `"vllm"`\n:default: `"local"`' in page
    assert "[precision.md](../docs/precision.md)" in page


def test_the_recipes_have_all_recipes_with_their_code():
    page = reference.recipes()
    assert re.findall(r"^## (\w+)$", page, re.M) == list(PRESETS)
    for name in PRESETS:
        assert f"def {name}(" in page
    assert "[arXiv 2505.22257](https://arxiv.org/abs/2505.22257)" in page


def test_the_commands_have_all_commands():
    page = reference.commands()
    assert re.findall(r"^## lagrpo (\S+)$", page, re.M) == list(COMMANDS)
    assert "--schedule.v" in page


def test_the_interface_has_what_is_public():
    made = interface.pages(ROOT / "src")
    import lagrpo

    for name in lagrpo.__all__:
        assert f".{name}" in made["python/lagrpo"]
    assert "{py:function} lagrpo.core.advantages.normalized(rewards: FloatG, eps" in made["python/lagrpo.core"]
    assert "{py:function} lagrpo.runs.load_metrics(" in made["python/lagrpo.runs"]
    assert "_scaled" not in made["python/lagrpo.core"]
    assert "| `lagrpo.training.loop` |" in made["python"]


def test_the_sources_of_the_site(tmp_path):
    generate(tmp_path / "site")
    site = tmp_path / "site"
    home, guide = (site / "index.md").read_text(), (site / "guide.md").read_text()
    assert "## Train" in home
    assert "## Glossary" in guide
    assert "src/lagrpo/training/loop.py.md" in (site / "docs" / "theory.md").read_text()
    assert (site / "src/lagrpo/training/loop.py.md").read_text().startswith("---\norphan: true")
    assert (site / "benchmarks/results/memory.md").exists()
    assert (site / "docs/images/bandit.png").exists()
    for page in PAGES[1:]:
        assert (site / page).exists()
