"""Names of TRL and verl: where each leads, and what the message about one says."""

import re

import pytest

from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.settings.command_line import TABLES
from lagrpo.settings.load import list_settings, load_settings
from lagrpo.settings.other_trainers import NAMES_OF_TRAINERS, translate

ENTRIES = [
    (f"{trainer}:{name}", text)
    for trainer, headings in NAMES_OF_TRAINERS.items()
    for entries in headings.values()
    for name, text in entries.items()
]
NOT_SETTINGS = (
    "not available: ",
    "the argument ",
    "--resume",
    "torchrun ",
    "lagrpo ",
    "`callbacks`",
)


@pytest.mark.parametrize(("name", "text"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_every_name_leads_to_a_setting_or_says_why_there_is_none(name, text):
    known = list_settings()
    beginning = re.match(r"`([a-z_.]+)`", text)
    if beginning is None or beginning[1] == "callbacks":
        assert text.startswith(NOT_SETTINGS), name
    else:
        setting = beginning[1]
        is_entry = setting.startswith(tuple(f"{table}." for table in TABLES))
        assert is_entry or setting in known, name


@pytest.mark.parametrize(
    ("setting", "name_here"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("gradient_accumulation_steps", "schedule.prompts_per_batch"),
        ("loss.delta", "loss.overrides.dual_clip"),
        ("loss.scale_rewards", "loss.advantage"),
        ("reward_funcs", "task.rewards"),
        ("train_dataset", "task.data"),
        ("rollout.top_k", "not available"),
        ("rollout.n", "rollout.num_generations"),
        ("actor_rollout_ref.actor.clip_ratio_high", "loss.epsilon_high"),
    ],
)
def test_unknown_setting_of_another_trainer_is_explained(setting, name_here):
    with pytest.raises(SettingsError, match=rf"unknown setting '.*'; .* is {name_here}"):
        load_settings({setting: 1})


@pytest.mark.parametrize("setting", ["model.name", "eval.n", "run.nmae", "filter.enable"])
def test_name_that_several_settings_of_verl_end_with_is_not_explained(setting):
    assert translate(setting) is None


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("grpo_two_sided", {"dual_clip": 3.0}),
        ("grpo", {"filters": ["top_entropy"], "share": 0.5}),
        ("grpo", {"filters": ["opsm"], "delta": 0.1}),
        ("sapo", {"temperature_positive": 1.0, "temperature_negative": 1.1}),
        (
            "vespo",
            {"power_positive": 2, "decay_positive": 3, "power_negative": 3, "decay_negative": 2},
        ),
        ("grpo_tis", {"correction.level": "sequence", "correction.cap": 3, "correction.floor": 0}),
        ("grpo", {"ratio": "length_normalized"}),
        ("grpo_trl", {"kl": "k3_bias_corrected", "beta": 0.1, "advantage": "batch_scaled"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_knobs_that_the_table_names_belong_to_its_recipes(recipe, overrides):
    resolve(recipe, overrides)
    text = " ".join(text for _, text in ENTRIES)
    for knob in overrides:
        assert knob in {"filters", "advantage", "beta", "kl"} or f"loss.overrides.{knob}`" in text
