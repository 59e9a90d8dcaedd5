"""Names of TRL and verl: where each leads, and what the message about one says."""

import re
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losses import inputs
from page_code import python_blocks

from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.settings.command_line import CommandParser, read_words
from lagrpo.settings.load import TABLES, list_settings, load_settings
from lagrpo.settings.other_trainers import NAMES_OF_TRAINERS, translate
from lagrpo.settings.schema import Settings

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
    setting_names = list_settings()
    beginning = re.match(r"`([a-z_.]+)`", text)
    if beginning is None or beginning[1] == "callbacks":
        assert text.startswith(NOT_SETTINGS), name
    else:
        setting = beginning[1]
        is_entry = setting.startswith(tuple(f"{table}." for table in TABLES))
        assert is_entry or setting in setting_names, name


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
        ("rollout.top_p", "eval.top_p in evaluations; not available in training"),
        ("rollout.n", "rollout.num_generations"),
        ("actor_rollout_ref.actor.clip_ratio_high", "loss.epsilon_high"),
        ("async_training.staleness_threshold", "schedule.max_staleness"),
        ("orchestrator.max_off_policy_steps", "schedule.max_staleness"),
    ],
)
def test_unknown_setting_of_another_trainer_is_explained(setting, name_here):
    with pytest.raises(SettingsError, match=rf"unknown setting '.*'; .* is {name_here}"):
        load_settings({setting: 1})


@pytest.mark.parametrize(
    "word", ["--per_device_train_batch_size", "--per-device-train-batch-size=8", "--learning_rate"]
)
def test_unknown_option_of_another_trainer_is_explained(word):
    with pytest.raises(
        SettingsError, match=r"schedule\.prompts_per_batch|optimizer\.learning_rate"
    ):
        read_words(CommandParser(), [word, "8"], list(Settings.model_fields))


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


# TRL: 4 GPUs with 8 completions each, accumulated over 4 steps, make an update of 128 completions,
# 16 prompts of 8. verl: the 512 prompts of a step make 4 updates of 128.
WORKED: dict[str, tuple[dict[str, int], str, int]] = {
    "trl:per_device_train_batch_size": (
        {"this": 8, "GPUs": 4, "gradient_accumulation_steps": 4, "num_generations": 8},
        "prompts_per_batch",
        16,
    ),
    # A generation serves 8 micro-batches, which are two updates.
    "trl:steps_per_generation": ({"this": 8, "gradient_accumulation_steps": 4}, "sync_every", 2),
    "trl:generation_batch_size": (
        {"this": 256, "completions of an update": 128},
        "sync_every",
        2,
    ),
    # 100 updates, two on each batch.
    "trl:max_steps": ({"this": 100, "num_iterations": 2}, "batches", 50),
    "verl:data.train_batch_size": ({"this": 512, "prompts_per_batch": 128}, "sync_every", 4),
    # Each of the 4 updates of a step is a batch of lagrpo.
    "verl:trainer.total_training_steps": ({"this": 100, "sync_every": 4}, "batches", 400),
}
"""The values of an entry's names, the setting that they decide, and its value."""


@pytest.mark.parametrize(
    "name", [name for name, text in ENTRIES if re.search(r" [x/] ", text.replace("`", ""))]
)
def test_formula_of_a_translated_value_gives_the_worked_number(name):
    values, setting, expected = WORKED[name]
    assert solve(dict(ENTRIES)[name], values, setting) == expected


def solve(text: str, values: dict[str, int], setting: str) -> float:
    """The value of a setting by the equation of an entry; a product alone equals "this"."""
    parts = re.split("[:;,] ", text.replace("`", ""))
    equation = next(part for part in parts if " x " in part or " / " in part)
    left, _, right = equation.partition(" = ")
    factor = compute(left, values | {setting: 1})
    return compute(right or "this", values) / factor


def compute(expression: str, values: dict[str, int]) -> float:
    """Products and quotients of names, from left to right."""
    first, *others = re.split(r" ([x/]) ", expression)
    result = float(values[first.rpartition(".")[2]])
    for operator, name in zip(others[::2], others[1::2], strict=True):
        number = values[name.rpartition(".")[2]]
        result = result * number if operator == "x" else result / number
    return result


DEFAULT = re.compile(r"^`([a-z_.]+)`, (\S+) (?:by default|in both)")


@pytest.mark.parametrize(
    ("setting", "text"),
    sorted({(found[1], found[2]) for _, text in ENTRIES if (found := DEFAULT.match(text))}),
)
def test_default_of_a_translated_setting_is_the_one_here(setting, text):
    """A knob of the loss has the default of recipe grpo. A dual clip at infinity is off."""
    names = list_settings()
    default: Any = names[setting].default if setting in names else None
    if default is None:
        knobs = resolve("grpo", {}).settings.items()
        knob = setting.rpartition(".")[2]
        (default,) = (value for name, value in knobs if name.rpartition(".")[2] == knob)
    if default is False or default == inf:
        default = "off"
    assert text == default or float(text) == default


def test_cap_of_cispo_is_one_more_than_its_setting():
    """TRL's epsilon_high = 5 is lagrpo's 4: a ratio of e^3 = 20 counts as 5."""
    recipe = resolve("cispo", {"epsilon_high": 4.0})
    x = inputs([0.0], rollout=[-3.0])
    assert recipe.differentiate(x, torch.ones(1)).gradient_T.tolist() == pytest.approx([-5.0])


def test_script_of_the_page_has_the_batches_that_its_comment_computes(monkeypatch):
    (script,) = python_blocks("from-trl.md")
    calls: list[dict[str, Any]] = []

    def train(**arguments: Any) -> Any:
        calls.append(arguments)
        return SimpleNamespace(after={"pass@1": 0.0}, weights=None)

    monkeypatch.setattr("lagrpo.train", train)
    exec(compile(script, "from-trl.md", "exec"), {"__name__": "__main__"})
    (call,) = calls
    settings = load_settings(call["settings"])
    comment = re.search(r"# (\d+) per device × (\d+) accumulation steps / (\d+) gen", script)
    assert comment is not None
    per_device, steps, generations = map(int, comment.groups())
    assert settings.rollout.num_generations == generations
    assert settings.schedule.prompts_per_batch == per_device * steps / generations
