"""The benchmark of losses against staleness, as users see it: advice, notes, a page's table."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
import tiny
from rich.console import Console

from experiments.lag.language_model import (
    at_best_rates,
    at_both_rates,
    language_model_agreement,
    language_model_table,
    load_cells,
)
from experiments.lag.methods import Table, load_methods
from experiments.lag.publish import BLOCKS_OF_PAGES, package_table, page_blocks, with_block
from experiments.lag.records import RESULTS, load_records
from experiments.lag.report import find_cells
from experiments.lag.verdicts import NOT_RUN
from lagrpo.settings import lag_table
from lagrpo.settings.lag_table import (
    FOLLOWS_KL,
    TASKS,
    Measured,
    advice_for,
    kept_text,
    nearest_lag,
    rate_text,
)
from lagrpo.settings.schema import Settings
from lagrpo.startup.checks import check_settings
from lagrpo.startup.explain import meaning
from lagrpo.terminal.show import show_recipe, show_recipes
from lagrpo.types import JsonObject


def measured(chain: float, gamble: float) -> dict[str, Measured]:
    """Living up to f on chain, at no rate on gamble."""
    return {
        "chain": Measured(chain, 0.02, 0.98, 1e-3, 0.031),
        "gamble": Measured(gamble, None, 0.5, None, None),
    }


BY_HAND = {
    "grpo": {16: measured(0.9, 0.8), 64: measured(0.82, 0.291)},
    "prime_rl": {16: measured(0.92, 0.75), 64: measured(0.9, 0.6)},
    "topr": {16: measured(0.9, 0.9)},
}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(lag_table, "load_table", lambda: BY_HAND)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("staleness", "recipes", "rate"),
    [
        (0, ("grpo",), "f"),
        (4, ("grpo",), "f"),
        (5, ("prime_rl",), FOLLOWS_KL),
        (64, ("prime_rl", "rec_one_side_nois_wide"), FOLLOWS_KL),
        (65, ("rec_one_side_nois_wide", "prime_rl"), FOLLOWS_KL),
    ],
)
def test_advice_is_that_of_the_oldest_samples(staleness, recipes, rate):
    advice = advice_for(staleness)
    assert (advice.recipes, advice.rate) == (recipes, rate)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("recipe", "staleness", "lag"),
    [("grpo", 3, 16), ("grpo", 17, 64), ("grpo", 100, 64), ("topr", 17, 16), ("dapo", 3, None)],
    ids=["below all", "between two", "beyond all", "fewer lags", "not measured"],
)
def test_nearest_lag_is_the_smallest_that_is_not_below(recipe, staleness, lag):
    assert nearest_lag(recipe, staleness) == lag


@pytest.mark.usefixtures("table")
def test_kept_areas_have_their_intervals_if_there_is_one():
    assert kept_text("grpo", 64) == "82 ± 2 % on chain, 29 % on gamble"


@pytest.mark.parametrize(
    ("rate", "text"), [(1e-4, "f / 10"), (3e-4, "f / 3"), (1e-3, "f"), (3e-3, "3 f")]
)
def test_learning_rates_are_shares_of_the_best_fresh_one(rate, text):
    assert rate_text(rate) == text


def dry_run(model: Path, loss: JsonObject, constant_lag: int) -> str:
    settings = Settings.model_validate(
        {
            "model": {"path": str(model)},
            "rollout": {"max_prompt_length": 64},
            "loss": loss,
            "schedule": {"constant_lag": constant_lag},
        }
    )
    return "\n".join(meaning(settings, check_settings(settings)))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("loss", "constant_lag", "recipes", "lag"),
    [
        ({"recipe": "grpo"}, 20, "prime_rl or rec_one_side_nois_wide", "64 updates"),
        ({"recipe": "grpo"}, 80, "rec_one_side_nois_wide or prime_rl", None),
        ({"recipe": "topr"}, 9, "prime_rl", "16 updates"),
        ({"recipe": "prime_rl"}, 9, "prime_rl", None),
        ({"recipe": "grpo", "epsilon_high": 0.3}, 9, "prime_rl", None),
        ({"recipe": "dapo"}, 9, "prime_rl", None),
    ],
    ids=[
        "another recipe is advised",
        "the advised one was not measured",
        "measured at the nearest lag",
        "the advised recipe",
        "another loss",
        "not measured",
    ],
)
def test_dry_run_advises_a_recipe_and_a_rate_for_stale_samples(
    model, loss, constant_lag, recipes, lag
):
    lines = dry_run(model, loss, constant_lag).splitlines()
    (advice,) = [line for line in lines if "start with" in line]
    assert f"up to {constant_lag} updates old: start with {recipes} and" in advice
    assert "docs/off-policy.md#which-loss" in advice
    comparisons = [line for line in lines if "docs/staleness.md" in line]
    assert [lag is not None and lag in line for line in comparisons] == [True] * (lag is not None)


@pytest.mark.usefixtures("table")
def test_dry_run_advises_nothing_for_nearly_fresh_samples(model):
    assert "updates old" not in dry_run(model, {"recipe": "grpo"}, 4)


@pytest.mark.usefixtures("table")
def test_dry_run_advises_no_loss_of_rewards_for_distillation(model):
    loss = {"recipe": "opd", "reference": str(model)}
    assert "start with" not in dry_run(model, loss, 9)


def test_dry_run_says_that_the_run_is_shorter_than_the_lag(model):
    text = "all samples come from the first weights, because the run has only 100 batches"
    assert text in dry_run(model, {"recipe": "grpo"}, 99)
    assert text not in dry_run(model, {"recipe": "grpo"}, 98)


@pytest.mark.usefixtures("table")
def test_recipes_show_what_they_keep_and_where_they_live():
    text = StringIO()
    console = Console(file=text, width=200)
    show_recipes(console)
    columns = {line.split()[0]: line.split()[1:3] for line in text.getvalue().splitlines() if line}
    assert columns["grpo"] == ["82", "29"]
    assert columns["topr"][0] == "α"  # not measured at that lag
    show_recipe("grpo", console)
    assert (
        "lag 64: keeps 82 ± 2 % on chain, 29 % on gamble, ends at 98 and 50 %; "
        "lives up to f (KL 0.031) and no rate" in " ".join(text.getvalue().split())
    )


@pytest.fixture(scope="module")
def methods():
    return load_methods("published")


@pytest.fixture(scope="module")
def records(methods):
    return load_records(RESULTS, {table: load_methods(table) for table in get_args(Table)})


@pytest.mark.experiments
def test_tables_of_the_package_and_the_pages_are_those_of_the_records(records, methods):
    cells = {task: find_cells(records, "published", task) for task in TASKS}
    file = Path(lag_table.__file__).parent / lag_table.FILE
    assert file.read_text(encoding="utf-8") == package_table(cells, methods)
    blocks = page_blocks(records, methods)
    for page, names in BLOCKS_OF_PAGES.items():
        text = page.read_text(encoding="utf-8")
        for name in names:
            assert f"<!-- {name} of experiments/lag -->" in text
            assert f"<!-- end of the {name} -->" in text
            assert text == with_block(text, name, blocks[name])


def language_model_run(run: str, lr: str, mean_reward: float) -> JsonObject:
    measures = {
        "mean reward": mean_reward,
        "end reward": 0.9,
        "fall reward": 0.3,
        "pass@1": mean_reward,
        "mean rollout/kl": 0.05,
    }
    return {"cell": {"run": run, "lr": lr}, "measures": measures}


@pytest.fixture
def language_model_record(tmp_path):
    """A record of a study with three losses at lag 64 and one at lag 16."""
    record = tmp_path / "study.json"
    runs = [
        language_model_run("grpo, lag 64", "lr 2e-5", 0.4),
        language_model_run("grpo, lag 64", "lr 2e-5", 0.6),
        language_model_run("topr, lag 64", "lr 2e-5", 0.1),
        language_model_run("topr, lag 64", "lr 6e-6", 0.7),
        language_model_run("stale_reinforce, lag 64", "lr 2e-5", 0.2),
        language_model_run("grpo, lag 16", "lr 2e-5", 0.8),
    ]
    record.write_text(json.dumps({"runs": runs}), encoding="utf-8")
    return record


@pytest.mark.experiments
def test_language_model_cells_have_their_best_learning_rate(language_model_record):
    cells = at_best_rates(load_cells(language_model_record))
    assert [(cell.lag, cell.recipe, cell.rate) for cell in cells] == [
        (64, "topr", "6e-6"),
        (64, "grpo", "2e-5"),
        (64, "stale_reinforce", "2e-5"),
        (16, "grpo", "2e-5"),
    ]
    assert cells[1].mean("mean reward") == pytest.approx(0.5)


@pytest.mark.experiments
@pytest.mark.parametrize(
    ("recipe", "text"),
    [("topr", "70 / 10"), ("grpo", "– / 50"), ("vespo", "–")],
    ids=["both rates", "one rate", "not run"],
)
def test_measure_of_a_language_model_is_shown_at_both_rates(language_model_record, recipe, text):
    cells = load_cells(language_model_record)
    assert at_both_rates(cells, recipe, 64, "mean reward") == text


@pytest.mark.experiments
def test_order_of_a_language_model_is_compared_lag_by_lag(language_model_record, records, methods):
    rows = language_model_agreement(records, methods, (16, 64), language_model_record)
    # Both order the three losses alike at lag 64 on `chain`; one loss at lag 16 makes no order.
    assert rows[0] == [
        "`chain` and SmolLM2-135M on addition, mean reward",
        NOT_RUN,
        "1.00 (3)",
    ]
    table = language_model_table(records, methods, language_model_record)
    assert (
        "| 64 | `grpo` | 2e-5 | 50 (40, 60) | 30 | 90 (90, 90) | 50 (40, 60) | 0.050 | 2 |" in table
    )
    assert "| 64 | `topr` | 6e-6 | 70 |" in table
    assert "| 64 | `topr` | 2e-5 | 10 |" in table
