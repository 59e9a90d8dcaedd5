"""The page of `lagrpo view` in a real browser: what each click and key shows, and that nothing of a
run runs."""

from __future__ import annotations

import json
import threading

import pytest
from browser import Browser
from made_runs import evaluate, fill, group, make_run, metrics, row, save_tokenizer
from test_view import hostile_run

from lagrpo.view import data
from lagrpo.view.data import collect
from lagrpo.view.serve import Server, view

pytestmark = pytest.mark.browser

LISTENING = (
    "[...document.querySelectorAll('*')]"
    ".filter((n) => n.getAttributeNames().some((a) => a.startsWith('on'))).length"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def opened(browser, tmp_path):
    """A function that opens the page of runs; at the end every page must have been content and
    asked for nothing."""
    pages = []

    def open_page(*runs, address="", **options):
        file = view(
            [run.path for run in runs], tmp_path / "page.html", options.pop("completions", 10_000)
        )
        pages.append(browser.open(file.as_uri() + address, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.check("file://", "blob:")
        page.close()


@pytest.fixture
def run(tmp_path):
    filled = fill(make_run(tmp_path))
    save_tokenizer(filled)
    return filled


def tab(page, name: str) -> None:
    page.click(f"nav [data-tab={name}]")


# Trend


def test_click_on_the_trend_opens_the_batch(opened, run):
    page = opened(run)
    assert "made" in page.text("header")
    assert "batch 4 of 4" in page.text("header")
    assert "finished" in page.text("header")
    assert page.js("document.querySelectorAll('.chart canvas').length") == 1
    page.choose("metric", "rollout/kl")
    assert "KL(α‖π_k)" in page.text(".bar")
    page.choose("over", "seconds")
    assert "wall time" in page.text(".chart")
    page.choose("over", "batch")
    corner = "document.querySelector('.u-over').getBoundingClientRect()"
    x, y, width, height = (page.js(f"{corner}.{side}") for side in ("x", "y", "width", "height"))
    page.click_at(x + width * 0.66, y + height / 2)
    assert page.text(".summary").startswith("batch 3, π_k is version 2")


@pytest.fixture
def short_and_long(tmp_path):
    """Runs of 4 and of 40 batches, with rewards of 1 and 0, and rollouts in the opened batches."""
    runs = []
    for name, recipe, batches, reward in (("short", "grpo", 4, 1.0), ("long", "rloo", 40, 0.0)):
        run = make_run(tmp_path, name, loss={"recipe": recipe})
        for batch in range(1, batches + 1):
            run.record(metrics(batch, reward=reward))
            if batch in (3, 4, 30):
                rows = group(1, [1.0, 0.0], step=batch, policy_version=batch - 1)
                run.record_rollouts(batch, rows)
        runs.append(run)
    return runs


@pytest.mark.parametrize(
    ("batch", "reward", "opened_run"),
    [
        pytest.param(30, 1.0, "long", id="only the long run has the batch"),
        pytest.param(3, 1.0, "short", id="near the point of the short run"),
        pytest.param(3, 0.0, "long", id="near the point of the long run"),
    ],
)
@pytest.mark.parametrize("axis", ["batch", "num_tokens"])
def test_click_on_the_trend_opens_the_run_of_the_nearest_point(
    opened, short_and_long, axis, batch, reward, opened_run
):
    page = opened(*short_and_long, address=f"#x={axis}")
    corner = "document.querySelector('.u-over').getBoundingClientRect()"
    x, y, width, height = (page.js(f"{corner}.{side}") for side in ("x", "y", "width", "height"))
    # The margin is 1.5 % of the range on each side. Every batch has 60 tokens.
    share = 0.015 + (batch - 1) / 39
    page.click_at(x + width * share / 1.03, y + height * (0.95 - 0.9 * reward))
    assert page.text(".summary").startswith(f"batch {batch},")
    chosen = "document.querySelector('select[aria-label=run]').selectedOptions[0].innerText"
    assert page.js(chosen) == opened_run


def test_trend_of_many_batches_is_drawn(opened, tmp_path):
    """JavaScript functions take no more than some 120,000 arguments."""
    run = make_run(tmp_path)
    lines = [json.dumps({"step": batch, "reward": 0.5}) + "\n" for batch in range(1, 200_001)]
    run.metrics.write_text("".join(lines), encoding="utf-8")
    assert opened(run).texts(".small b") == ["reward"]


# Rollouts


def test_group_shows_its_completions_side_by_side(opened, run):
    page = opened(run, address="#tab=rollouts")
    page.click(".row", 1)
    assert "Question 3: what is 3 + 3?" in page.text(".prompt-text")
    cards = page.texts(".card")
    assert len(cards) == 4
    assert "✓ 1" in cards[0]
    assert "A +0.500" in cards[0]
    assert "? unscored" in cards[1]
    assert "no number in the answer" in cards[1]
    assert "cut at the limit" in cards[1]
    tops = page.js(
        "[...document.querySelectorAll('.card')].slice(0, 2)"
        ".map((card) => card.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    page.click(".card", 1)
    assert "σ of its group" in page.text(".opened")
    page.click(".opened button")
    assert page.text(".opened") == ""


def test_tokens_are_colored_and_show_their_numbers_on_hover(opened, run):
    page = opened(run, address="#tab=rollouts")
    page.hover(".card .token", 3)
    tip = page.text("#tip")
    assert "log α" in tip
    assert "−" in tip or "-1.000 nats" in tip
    assert "0.368" in tip
    color = "getComputedStyle(document.querySelectorAll('.card .token')[9]).backgroundColor"
    by_logp = page.js(color)
    page.choose("color", "version")
    by_version = page.js(color)
    assert len({by_logp, by_version, "rgba(0, 0, 0, 0)"}) == 3
    page.choose("color", "ratio")
    assert "blue: more likely" in page.text(".legend")
    assert page.js(color) not in (by_logp, "rgba(0, 0, 0, 0)")
    page.choose("color", "entropy")
    assert "not recorded: the loss need not compute it" in page.text(".legend")
    assert page.js(color) == "rgba(0, 0, 0, 0)"
    page.choose("color", "none")
    assert page.js("document.querySelectorAll('.token').length") == 0
    assert "answer 0 of 1" in page.text(".card")


@pytest.fixture
def mixed_run(tmp_path):
    """A batch of π_4 with completions of 2, 4 and 8 tokens; the last tokens of the long ones are of
    later versions: ages (3, 3), (3, 3, 2, 2) and (3, 3, 3, 2, 2, 1, 1, 1)."""
    run = make_run(tmp_path, "mixed")
    versions = [[1, 1], [1, 1, 2, 2], [1, 1, 1, 2, 2, 3, 3, 3]]
    rows = []
    for number, versions_T in enumerate(versions):
        text = "abcdefgh"[: len(versions_T)]
        identity = {"sample_index": number, "policy_version": 4, "staleness": 3}
        rows.append(row(text, 1.0, policy_versions=versions_T, **identity))
    run.record(metrics(1))
    run.record_rollouts(1, rows)
    return run


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tokens_of_a_later_version_than_the_first_are_marked(opened, mixed_run, theme):
    page = opened(mixed_run, address="#tab=rollouts&color=version")
    page.js(f"document.documentElement.dataset.theme = '{theme}'")
    assert page.texts(".version") == [
        "version 1: 7 tokens",
        "version 2: 4 tokens",
        "version 3: 3 tokens",
    ]
    later = (
        "[...document.querySelectorAll('.card')].map((c) => c.querySelectorAll('.later').length)"
    )
    assert page.js(later) == [0, 2, 5]
    assert "3 versions" in page.texts(".card")[2]
    line = (
        "getComputedStyle(document.querySelector('.card .later')).boxShadow"
        ".includes(getComputedStyle(document.body).color)"
    )
    assert page.js(line)


def test_age_is_plotted_against_length_if_completions_have_several_versions(opened, mixed_run, run):
    assert opened(run).js("document.querySelectorAll('.ages').length") == 0
    page = opened(mixed_run)
    assert "3 updates in the shortest third, 2 in the longest" in page.text("figcaption")
    bins = "[...document.querySelectorAll('.ages title')].map((n) => n.textContent)"
    assert [text.split(",")[0] for text in page.js(bins)] == [
        "1 completion of 2 tokens",
        "1 completion of 4 tokens",
        "1 completion of 8 tokens",
    ]


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"outcome": "wrong"}, "3 groups · 7 matching completions"),
        ({"staleness_high": "0"}, "0 groups · 0 matching completions"),
        ({"q": "question 3", "outcome": "correct"}, "1 group · 2 matching completions"),
    ],
)
def test_completions_are_filtered(opened, run, fields, matches):
    page = opened(run, address="#tab=rollouts")
    for name, value in fields.items():
        if name == "outcome":
            page.choose("outcome", value)
        else:
            page.type(f"input[name={name}]", value)
    assert matches in page.text(".summary")
    if "q" in fields:
        assert page.js("document.activeElement.name") == "q"
    assert ("No completions match this filter." in page.text(".pane")) == matches.startswith("0")
    page.js(
        "[...document.querySelectorAll('button')]"
        ".find((node) => node.innerText === 'clear').click()"
    )
    assert page.text(".summary").endswith("3 groups")


# Keys, address, theme


def test_keyboard_reaches_every_tab_group_and_completion(opened, run):
    page = opened(run)
    page.key("2")
    assert page.js("document.querySelectorAll('.rollouts').length") == 1
    page.key("j")
    assert "Prompt 3" in page.text(".group-head")
    page.key("ArrowDown")
    page.key("ArrowDown")
    assert "Prompt 2" in page.text(".group-head")
    page.key("k")
    page.key("l")
    page.key("l")
    assert "unscored" in page.text(".opened")
    page.key("h")
    assert "✓ 1" in page.text(".opened")
    page.key("Escape")
    assert page.text(".opened") == ""
    page.key("[")
    assert page.text(".summary").startswith("batch 3")
    page.key("]")
    assert page.text(".summary").startswith("batch 4")
    page.key("c")
    assert page.js("document.querySelector('select[aria-label=color]').value") == "ratio"
    page.key("/")
    assert page.js("document.activeElement.name") == "q"
    page.key("Escape")
    page.key("?")
    assert "next completion" in page.text("#keys")
    page.key("Escape")
    assert page.text("#keys") == ""
    page.key("3")
    assert "Prompt by prompt" in page.text("main")
    page.key("4")
    assert "schedule.sync_every" in page.text("main")


# Evaluations and settings


def test_evaluations_show_the_prompts_that_changed(opened, run):
    page = opened(run, address="#tab=evaluations")
    assert "50.0 %" in page.text(".numbers")
    assert "66.7 %" in page.text(".numbers")
    rows = page.texts(".prompts tbody tr")
    assert len(rows) == 2
    assert "+100 points" in rows[0]
    assert "−50 points" in rows[1]
    page.choose("show", "worse")
    page.click(".prompts tbody tr")
    assert page.texts(".samples li") == [
        "✓ 1\nbefore 2: 1.0",
        "✗ 0\nbefore 2: 0.0",
        "✗ 0\nafter 2: 0.0",
        "✗ 0\nafter 2: 0.0",
    ]
    page.choose("show", "all")
    assert len(page.texts(".clickable")) == 3


# Several runs


@pytest.fixture
def methods(tmp_path):
    """Two seeds of one method, with different rewards, and a run of another method."""
    seeds = []
    for seed in (0, 1):
        run = make_run(tmp_path, f"plain-seed{seed}", run={"seed": seed})
        for batch in range(1, 61):
            run.record_event("weight_sync", batch, policy_version=batch - 1, reason="schedule")
            run.record(metrics(batch, reward=float(seed)))
        evaluate(run, "before", 0, {1: [0.0, 0.0], 2: [0.0, 0.0]})
        evaluate(run, "after", 60, {1: [1.0, 1.0], 2: [float(seed), float(seed)]})
        seeds.append(run)
    return [*seeds, fill(make_run(tmp_path, "other", loss={"recipe": "rloo"}))]


def test_seeds_of_a_method_are_one_curve_and_one_column(opened, methods):
    page = opened(*methods)
    assert page.texts(".chip b") == ["plain", "other"]
    assert "2 seeds" in page.texts(".chip")[0]
    assert page.texts(".small .last")[:2] == ["plain\n0.5", "other\n0.35"]
    assert page.js("document.querySelector('[aria-label=\"mean of\"]').value") == "5"
    assert page.js("document.querySelectorAll('.u-series').length") == 1 + 3 + 1
    page.click(".bar .check", 1)
    assert page.texts(".small .last")[:2] == ["plain-seed0\n0", "plain-seed1\n1"]
    assert page.js("document.querySelectorAll('.u-series').length") == 1 + 3
    tab(page, "settings")
    assert [row.split("\t")[0] for row in page.texts("tbody tr")][:2] == ["run.seed", "loss.recipe"]


def test_chart_explains_only_the_marks_that_it_has(opened, methods):
    assert "weight sync" not in opened(methods[0]).text(".key")
    assert "│ weight sync   ▲ warning" in opened(methods[2]).text(".key")


def result_rows(page) -> list[list[str]]:
    """The cells of the table of all runs."""
    return page.js(
        "[...document.querySelector('.numbers tbody').rows]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )


def test_results_of_all_runs_are_in_one_table(opened, methods):
    page = opened(*methods, address="#tab=evaluations")
    assert [row[:3] + row[4:6] for row in result_rows(page)] == [
        [
            "plain 2 seeds",
            "0.0 %",
            "75.0 %",
            "seeds 50.0 % to 100.0 %",
            "+75.0 points (seeds +50.0 to +100.0)",
        ],
        ["other", "50.0 %", "66.7 %", "46.7 % to 86.7 %", "–"],
    ]


@pytest.mark.parametrize(
    ("solved_by_batch_of_seeds", "row"),
    [
        pytest.param(
            [{0: 0, 20: 1, 40: 2}, {0: 0, 20: 0}],
            ["plain 2 seeds, 1 unfinished", "0.0 %", "25.0 %", "20"],
            id="one seed is at an earlier batch",
        ),
        pytest.param(
            [{0: 0, 40: 2}, {0: 1}],
            ["plain 2 seeds, 1 unfinished", "–", "25.0 %", "0"],
            id="one seed has only the evaluation before training",
        ),
        pytest.param(
            [{40: 2}, {}],
            ["plain 2 seeds, 1 unfinished", "no batch is evaluated by all seeds yet"],
            id="one seed has no evaluation",
        ),
    ],
)
def test_result_of_a_method_is_of_the_last_batch_that_all_seeds_have_evaluated(
    opened, tmp_path, solved_by_batch_of_seeds, row
):
    """The seeds solve so many of two prompts, by batch."""
    runs = []
    for seed, solved_by_batch in enumerate(solved_by_batch_of_seeds):
        run = make_run(tmp_path, f"plain-seed{seed}", run={"seed": seed})
        for batch, solved in solved_by_batch.items():
            rewards = {1: [float(solved >= 1)] * 2, 2: [float(solved >= 2)] * 2}
            evaluate(run, f"batch-{batch:06d}", batch, rewards)
        runs.append(run)
    (cells,) = result_rows(opened(*runs, address="#tab=evaluations"))
    assert cells[:3] + cells[6:7] == row


def test_two_runs_are_compared_prompt_by_prompt(opened, methods):
    page = opened(methods[0], methods[1], address="#tab=evaluations")
    assert "+50.0 points over 2 prompts" in page.text(".change")
    assert page.texts(".prompts tbody tr") == [
        "#2\tHeld-out question 2\t0 of 2\t2 of 2\t+100 points"
    ]
    page.choose("compare", "1:0")
    assert "+100.0 points over 2 prompts" in page.text(".change")


def test_notes_of_several_runs_are_one_banner(opened, tmp_path):
    runs = [make_run(tmp_path, name) for name in ("a", "b")]
    assert opened(*runs).texts(".notes li") == [
        "No metrics yet: the first batch is not finished.",
        "No rollouts yet.",
        "No evaluations.",
    ]
    fill(runs[0])
    assert opened(*runs).texts(".notes li")[1] == "No rollouts yet. (b)"


@pytest.mark.parametrize(
    ("completions", "most_tokens", "advice"),
    [
        pytest.param(8, 4_000_000, "For more: lagrpo view --completions N.", id="completions"),
        pytest.param(
            10_000,
            100,
            "A page has at most 100 tokens; lagrpo view RUN --text --batch N prints any batch.",
            id="tokens",
        ),
    ],
)
def test_page_names_the_limit_that_left_completions_out(
    opened, run, monkeypatch, completions, most_tokens, advice
):
    monkeypatch.setattr(data, "MOST_TOKENS", most_tokens)
    (note,) = opened(run, completions=completions).texts(".notes li")
    assert note.startswith("This page holds ")
    assert note.endswith(f" batches. {advice}")


# Small screens and symbols


@pytest.mark.parametrize("width", [400, 1280, 2200])
@pytest.mark.parametrize("name", ["trend", "rollouts", "evaluations", "settings"])
def test_page_is_no_wider_than_the_screen(opened, methods, name, width):
    page = opened(*methods, address=f"#tab={name}&run=2", width=width)
    assert page.js("document.documentElement.scrollWidth") == width


def test_filter_is_folded_on_a_phone(opened, run):
    is_shown = "document.querySelector('input[name=q]').offsetParent !== null"
    assert opened(run, address="#tab=rollouts").js(is_shown)
    page = opened(run, address="#tab=rollouts", width=400)
    assert not page.js(is_shown)
    page.click(".fold")
    assert page.js(is_shown)
    page.type("input[name=q]", "question")
    page.click(".fold")
    assert not page.js(is_shown)
    assert page.text(".fold") == "filter (1)"


def test_symbols_explain_themselves(opened, run):
    page = opened(run, address="#tab=rollouts")
    page.hover(".card [data-term=A]")
    assert "advantage" in page.text("#tip")
    page.hover(".group-head [data-term=σ]")
    assert "standard deviation" in page.text("#tip")
    page.hover(".card [data-term='π_k/α']")
    assert "sampled it (α)" in page.text("#tip")


def test_tap_explains_a_symbol_and_opens_no_card(opened, run):
    page = opened(run, address="#tab=rollouts", width=400)
    page.tap(".card [data-term=A]")
    assert "advantage" in page.text("#tip")
    assert page.text(".opened") == ""
    page.tap(".card .strip")
    assert page.js("document.getElementById('tip').hidden")
    assert "σ of its group" in page.text(".opened")


# Texts of strangers


def test_text_of_a_run_is_never_executed(opened, tmp_path):
    run = hostile_run(tmp_path)
    for name, selector in (
        ("trend", ".events"),
        ("rollouts", ".detail"),
        ("evaluations", "main"),
        ("settings", "main"),
    ):
        page = opened(
            run, address=f"#tab={name}&changes=all&prompt=0&setting=task&group=1:1:0:0&completion=0"
        )
        assert "<script>" in page.text(selector), name
        assert "⟨U+202E⟩" in page.text(selector), name
        assert page.js("window.planted") is None
        assert page.js("document.querySelectorAll('img, main script, iframe, object').length") == 0
        assert page.js(LISTENING) == 0
    assert page.js("document.title") == "a<b>&'\"<script> · lagrpo view"


# The server


def test_served_page_follows_its_run_and_keeps_its_place(browser, run):
    server = Server([run.path], lambda: collect([run.path], 1000))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        page = browser.open(server.url + "#tab=rollouts&batch=2")
        page.key("j")
        page.type("input[name=q]", "answer")
        before = page.text(".group-head")
        run.record(metrics(5))
        run.record_rollouts(5, [row | {"step": 5} for row in group(1, [1.0, 0.0])])
        page.wait("document.querySelector('header').innerText.includes('batch 5 of')")
        assert page.text(".group-head") == before
        assert page.js("document.querySelector('input[name=q]').value") == "answer"
        assert page.text(".summary").startswith("batch 2")
        page.check(f"http://127.0.0.1:{server.server_port}/", "blob:")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    page.wait("document.body.innerText.includes('The server does not answer')")
    page.close()


@pytest.mark.parametrize(
    ("sync_every", "label", "largest"),
    [(1, "largest of the last 10 batches", "9"), (4, "largest of the last 4 batches", "3")],
    ids=["on-policy", "a cycle of 4"],
)
def test_tiles_cover_a_cycle_of_weight_syncs(opened, tmp_path, sync_every, label, largest):
    """Batch b of 60 has the staleness (b - 1) mod 4, but 9 in batch 54; the last one is fresh."""
    run = make_run(tmp_path, "one", schedule={"sync_every": sync_every})
    for b in range(61):
        run.record(metrics(b + 1, **{"staleness/max": 9 if b == 53 else b % 4}))
    page = opened(run)
    tiles = page.texts(".small")
    (tile,) = [text for text in tiles if text.startswith("staleness/max")]
    assert tile.split("\n")[1:] == [largest, label]
    # Smoothing over five batches, which is on for 60 batches, would show many other heights.
    (points,) = page.js(
        "[...document.querySelectorAll('.small')].filter((e) => e.innerText.startsWith('stale'))"
        ".map((e) => e.querySelector('polyline').getAttribute('points'))"
    )
    assert len({point.split(",")[1] for point in points.split()}) == 5  # of 0, 1, 2, 3 and 9


def test_page_rounds_a_share_as_the_terminal_does(opened, run):
    evaluate(run, "before", 0, {1: [1.0] * 97 + [0.0] * 303})
    page = opened(run)
    tab(page, "evaluations")
    assert f"{97 / 400:.1%}".replace("%", " %") in page.js("document.body.innerText")


def test_finding_links_to_the_completion_that_shows_it(opened, run):
    """All of prompt 2 is wrong in every batch of `fill`, and a third of the others, too."""
    page = opened(run, address="#tab=diagnosis")
    assert "were never solved" in page.text(".findings")
    page.click(".findings .places button")
    assert "Prompt 2 in batch" in page.text(".group-head h2")
    assert page.js("document.querySelectorAll('.opened').length") == 1


def test_run_without_findings_says_so(opened, tmp_path):
    page = opened(make_run(tmp_path), address="#tab=diagnosis")
    assert "Nothing to diagnose" in page.text(".diagnosis")
