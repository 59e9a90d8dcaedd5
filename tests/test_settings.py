"""Settings: their schema, files, the command line, and complaints."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from lagrpo.core.choices import CHOICES, KNOB_NAMES
from lagrpo.core.objective import NUMBERS
from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.settings.command_line import SHORT, CommandParser, read_words
from lagrpo.settings.load import PRESETS, TABLES, list_settings, load_settings, to_toml
from lagrpo.settings.loss import KNOBS, OUTSIDE_RECIPES, LossSettings
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import RewardSettings
from lagrpo.types import JsonObject

KEYS = {name: field for name, field in list_settings().items() if "." in name}


def complain(values: Any, overrides: Any = None) -> str:
    with pytest.raises(SettingsError) as error:
        load_settings(values, overrides)
    return str(error.value)


# The schema


def test_settings_of_the_loss_are_knobs_of_recipes():
    named = set(LossSettings.model_fields) - {"recipe", "overrides", *OUTSIDE_RECIPES}
    knob_names = {*NUMBERS, *CHOICES, *KNOB_NAMES, "epsilon"}
    assert {KNOBS.get(name, name) for name in named} <= knob_names
    assert LossSettings(entropy_coef=0.1, entropy_target=0.5).knobs == {}
    assert LossSettings(epsilon=0.1, overrides={"dual_clip": 3.0}).knobs == {
        "epsilon": 0.1,
        "dual_clip": 3.0,
    }


@pytest.mark.parametrize("name", ["kl_estimator", "reduction", "filters"])
def test_help_of_a_setting_of_the_loss_names_every_choice(name):
    text = LossSettings.model_fields[name].description or ""
    knob: Any = KNOBS.get(name, name)
    choices = [function.__name__ for function in CHOICES[knob]]
    assert [choice for choice in choices if choice not in text and choice != "k1"] == []


def test_single_value_is_accepted_for_a_list():
    settings = load_settings(
        {"run": {"report_to": "wandb"}, "task": {"rewards": "exact", "tools": "calculator"}}
    )
    assert (settings.run.report_to, settings.task.tools) == (("wandb",), ("calculator",))
    assert settings.task.rewards == (RewardSettings(name="exact", reward="exact"),)


def test_directory_of_runs_may_start_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings({"run.output_dir": "~/runs"}).run.output_dir == str(tmp_path / "runs")


def test_rewards_are_names_or_tables_and_their_ranges_add_up():
    rewards = [
        "my.module:score",
        {"name": "short", "reward": "length", "weight": -0.5, "range": [0, 2]},
    ]
    task = load_settings({"task": {"rewards": rewards}}).task
    assert [reward.name for reward in task.rewards] == ["score", "short"]
    assert task.reward_range == (-1.0, 1.0)
    assert load_settings().task.reward_range == (0.0, 1.0)


def test_schedule_follows_from_its_keys():
    kinds = {
        "every": {"sync_every": 3},
        "lagged": {"constant_lag": 2},
        "continuous": {"max_staleness": 5, "num_iterations": 2},
        "budget": {"sync_at_kl": 0.1, "sync_every": 9},
    }
    for kind, values in kinds.items():
        schedule = load_settings({"schedule": values}).schedule
        assert schedule.kind == kind
        assert schedule.continues_completions == (kind == "continuous")
    assert load_settings({"schedule": kinds["continuous"]}).schedule.v == 2
    lengths = [
        load_settings({"schedule": {"batches": 9, **keys}}) for keys in ({}, {"ref_sync_every": 4})
    ]
    assert [loaded.schedule.stage_length for loaded in lengths] == [9, 4]


def test_default_of_a_setting_that_older_runs_have_is_dropped():
    assert load_settings({"vllm": {"on_weight_sync": "finish"}}) == load_settings()


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"schedule": {"constant_lag": 2, "sync_at_kl": 0.1}}, ("constant_lag", "sync_at_kl")),
        ({"schedule": {"max_staleness": 2, "constant_lag": 1}}, ("max_staleness", "constant_lag")),
        ({"schedule": {"max_staleness": 0, "sync_every": 2}}, ("max_staleness", "sync_every = 1")),
        ({"schedule": {"constant_lag": 2, "sync_every": 2}}, ("constant_lag", "sync_every = 1")),
        ({"schedule": {"max_staleness": 2, "sync_at_kl": 0.1}}, ("max_staleness", "sync_at_kl")),
        ({"vllm": {"on_weight_sync": "continue"}}, ("on_weight_sync", "schedule.max_staleness")),
        ({"schedule": {"sync_at_kl": 0.1}}, ("sync_at_kl", "sync_every")),
        ({"schedule": {"reset_optimizer": True}}, ("reset_optimizer", "ref_sync_every")),
        (
            {"rollout": {"engine": "vllm"}, "vllm": {"weight_transfer": "nccl"}},
            ("vllm", "weight_transfer", "gpus"),
        ),
        ({"vllm": {"urls": ["http://a:1"]}}, ("vllm.urls", "rollout.engine")),
        (
            {"rollout": {"num_generations": 129}},
            ("rollout.max_num_seqs", "rollout.num_generations"),
        ),
        (
            {"rollout": {"engine": "vllm", "temperature": 2.5}},
            ("rollout.temperature", "rollout.engine"),
        ),
        (
            {
                "rollout": {"engine": "vllm"},
                "vllm": {"sleep": True},
                "schedule": {"sync_every": 2},
            },
            ("vllm.sleep", "schedule.sync_every"),
        ),
        ({"eval": {"best_metric": "pass@1", "at_start": False}}, ("best_metric", "at_start")),
        ({"offline": {"fraction": 0.5}}, ("offline.fraction", "offline.data")),
        ({"loss": {"entropy_coef": 11, "entropy_target": 0.5}}, ("entropy_coef", "entropy_target")),
        (
            {"loss": {"overrides": {"overlong_buffer": 300}}},
            ("overlong_buffer", "rollout.max_completion_length"),
        ),
    ],
)
def test_contradictory_settings_are_rejected_with_both_keys_in_one_line(values, names):
    text = complain(values)
    assert len(text.splitlines()) == 1
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize(
    "values",
    [
        {"schedule.sync_every": 0},
        {"rollout.temperature": float("inf")},
        {"optimizer.learning_rate": float("nan")},
        {"loss.entropy_coef": -0.01},
        {"loss.entropy_coef": float("nan")},
        {"loss.entropy_target": 0.0},
        {"loss.entropy_target": -0.5},
        {"loss.entropy_target": float("inf")},
        {"loss.entropy_target": True},
        {"task.rewards": [{"name": "a", "reward": "exact", "weight": 0}]},
        {"vllm.urls": "localhost:8000", "rollout.engine": "vllm"},
        {"eval.sets": [{"name": "a"}, {"name": "a"}]},
        {"eval.sets": [{"name": "a"}], "eval.best_metric": "pass@1"},
    ],
)
def test_wrong_values_are_rejected(values):
    complain(values)


def test_secrets_in_arguments_of_a_server_are_not_repeated():
    text = complain({"vllm": {"server_args": ["--api-key=planted"]}, "rollout": {"engine": "vllm"}})
    assert "server_args" in text
    assert "planted" not in text


# Files


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.integers(1, 9),
    st.floats(1e-300, 1e300),
)
def test_settings_written_as_toml_load_unchanged(text, number, rate):
    values = {
        "run.output_dir": text,
        "task.options": {"digits": number},
        "optimizer.learning_rate": rate,
    }
    settings = load_settings(values)
    assert load_settings(tomllib.loads(to_toml(settings))) == settings


def test_overrides_change_a_file(tmp_path):
    (tmp_path / "a.toml").write_text(
        "[schedule]\nsync_every = 3\n[task.options]\ndigits = 2\n", encoding="utf-8"
    )
    settings = load_settings(
        tmp_path / "a.toml", {"schedule.sync_every": "10", "task": {"options": {"numbers": 3}}}
    )
    assert (settings.schedule.sync_every, settings.task.options) == (
        10,
        {"digits": 2, "numbers": 3},
    )


@pytest.mark.parametrize("name", sorted(file.stem for file in PRESETS.glob("*.toml")))
def test_packaged_settings_load_by_their_name(name):
    assert load_settings(name).task.name in ("arithmetic", "gsm8k", "math")


def test_missing_and_broken_files_are_named(tmp_path):
    assert re.search(r"nosuch: no such settings file; packaged ones are .*demo", complain("nosuch"))
    (tmp_path / "a.toml").write_text("[schedule", encoding="utf-8")
    assert "a.toml: not valid TOML" in complain(tmp_path / "a.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    assert "latin.toml: not UTF-8" in complain(tmp_path / "latin.toml")
    (tmp_path / "path.toml").write_text(r'path = "C:\Users\me"', encoding="utf-8")
    assert "in single quotes" in complain(tmp_path / "path.toml")
    assert "cannot be read" in complain(tmp_path)


def test_a_resumed_run_has_its_own_settings(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(load_settings({"run.seed": 5})), encoding="utf-8")
    assert load_settings(None, {"schedule.batches": 7}, str(tmp_path)).run.seed == 5
    for source, resume in (("demo", tmp_path), (None, tmp_path / "nosuch")):
        with pytest.raises(SettingsError, match="--resume"):
            load_settings(source, resume=str(resume))


# Knobs of recipes, by path, in every place where settings are written

NESTED = """
[loss]
recipe = "reinforce"
filters = ["opsm"]

[loss.overrides.mask]
function = "one_side"
epsilon_high = 0.5

[loss.overrides.weight]
function = "importance"
ratio = "sequence"

[loss.overrides.filters.opsm]
delta = 0.25
"""
PATHS = """
[loss]
recipe = "reinforce"
filters = ["opsm"]
overrides.mask.epsilon_high = 0.5
overrides.surrogate = { mask.function = "one_side", weight.function = "importance" }
overrides.weight.ratio = "sequence"
overrides.delta = 0.25
"""
QUOTED = """
[loss]
recipe = "reinforce"
filters = "opsm"

[loss.overrides]
mask = "one_side"
"surrogate.mask.epsilon_high" = 0.5
weight = "importance"
"weight.ratio" = "sequence"
"opsm.delta" = 0.25
"""
WORDS = (
    "--recipe reinforce --loss.filters opsm --loss.overrides.mask one_side "
    "--loss.overrides.mask.epsilon_high 0.5 --loss.overrides.weight=importance "
    "--loss.overrides.weight.ratio sequence --loss.overrides.opsm.delta .25"
)
FLAT: JsonObject = {
    "loss.recipe": "reinforce",
    "loss.filters": ["opsm"],
    "loss.overrides.mask": "one_side",
    "loss.overrides.mask.epsilon_high": 0.5,
    "loss.overrides.weight": "importance",
    "loss.overrides.weight.ratio": "sequence",
    "loss.overrides.opsm.delta": 0.25,
}
FLAT_WITH_TABLE = {
    "loss.recipe": "reinforce",
    "loss.filters": ["opsm"],
    "loss.overrides": {
        "mask": {"function": "one_side", "epsilon_high": 0.5},
        "weight": "importance",
        "weight.ratio": "sequence",
        "delta": 0.25,
    },
}


def write(directory: Path, text: str) -> Path:
    (directory / "settings.toml").write_text(text, encoding="utf-8")
    return directory / "settings.toml"


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda d: load_settings(write(d, NESTED)), id="TOML tables"),
        pytest.param(lambda d: load_settings(write(d, PATHS)), id="TOML dotted keys"),
        pytest.param(lambda d: load_settings(write(d, QUOTED)), id="TOML quoted paths"),
        pytest.param(lambda d: load_settings(None, parse(WORDS)), id="command line"),
        pytest.param(lambda d: load_settings(FLAT), id="Python names"),
        pytest.param(lambda d: load_settings(None, FLAT), id="Python names over a file"),
        pytest.param(lambda d: load_settings(tomllib.loads(NESTED)), id="Python tables"),
        pytest.param(lambda d: load_settings(FLAT_WITH_TABLE), id="Python name of the table"),
    ],
)
def test_knobs_give_the_same_recipe_however_they_are_written(load, tmp_path):
    settings = load(tmp_path)
    recipe = resolve(settings.loss.recipe, settings.loss.knobs)
    expected = {
        "surrogate.mask": "one_side",
        "surrogate.mask.epsilon_low": 0.2,
        "surrogate.mask.epsilon_high": 0.5,
        "surrogate.mask.ratio": "token",
        "surrogate.weight": "importance",
        "surrogate.weight.ratio": "sequence",
        "filters": ["opsm"],
        "filters.opsm.delta": 0.25,
    }
    assert {path: recipe.settings[path] for path in expected} == expected
    copy = load_settings(write(tmp_path, to_toml(settings)))
    assert copy == settings
    assert resolve(copy.loss.recipe, copy.loss.knobs) == recipe


def test_command_line_changes_a_knob_in_a_table_of_the_file(tmp_path):
    file = write(tmp_path, NESTED)
    words = parse("--loss.overrides.mask.epsilon_high 0.75 --loss.overrides.weight.ratio token")
    settings = load_settings(file, words)
    recipe = resolve(settings.loss.recipe, settings.loss.knobs).settings
    assert (recipe["surrogate.mask"], recipe["surrogate.mask.epsilon_high"]) == ("one_side", 0.75)
    assert recipe["surrogate.weight.ratio"] == "token"


def test_own_functions_are_named_in_settings(tmp_path):
    settings = load_settings(
        {
            "loss.recipe": "reinforce",
            "loss.advantage": "own_functions:above_the_mean",
            "loss.reduction": "own_functions:square_root",
            "loss.filters": ["own_functions:probable", "finished_only"],
            "loss.overrides": {"mask": {"function": "own_functions:narrow", "width": 0.5}},
        }
    )
    recipe = resolve(settings.loss.recipe, settings.loss.knobs)
    assert recipe.settings["filters"] == ["own_functions:probable", "finished_only"]
    assert recipe.settings["surrogate.mask.width"] == 0.5
    copy = load_settings(write(tmp_path, to_toml(settings)))
    assert resolve(copy.loss.recipe, copy.loss.knobs) == recipe


@pytest.mark.parametrize(
    "loss",
    [
        {"beta": 0.1, "overrides": {"beta": 0.2}},
        {"epsilon_high": 0.1, "overrides": {"epsilon_high": 0.2}},
        {"kl_estimator": "k2", "overrides": {"kl": "k3"}},
    ],
    ids=str,
)
def test_knob_given_by_its_setting_and_as_override_is_rejected(loss):
    assert "give one of them" in complain({"loss": loss})


# Complaints


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedul": {"sync_every": 1}}, "unknown setting 'schedul'; did you mean 'schedule'?"),
        ({"schedule": {"sync_evry": 1}}, "did you mean 'schedule.sync_every'?"),
        ({"schedule": {"learning_rate": 1.0}}, "did you mean 'optimizer.learning_rate'?"),
        (
            {"eval": {"sets": [{"name": "a", "smaples": 3}]}},
            "unknown setting 'eval.sets.0.smaples'",
        ),
        ({"schedule": 3}, "schedule = 3: "),
        (
            {"optimizer": {"learning_rate": "x"}},
            "optimizer.learning_rate = 'x': Input should be a valid number",
        ),
        (
            {"model": {"dtype": "bf16"}},
            "model.dtype = 'bf16': Input should be 'auto', 'bfloat16' or 'float32'",
        ),
    ],
)
def test_complaint_names_the_setting_and_the_nearest(values, message):
    assert re.search(message, complain(values))


def test_every_complaint_has_a_line_with_its_source(tmp_path):
    (tmp_path / "a.toml").write_text("[schedule]\nnum_iterations = 0\n", encoding="utf-8")
    lines = complain(tmp_path / "a.toml", {"optimizer.learning_rate": "0"}).splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(tmp_path / "a.toml"), "command line"]


# The command line


def parse(line: str) -> JsonObject:
    """The settings that the words of a line change."""
    parser = CommandParser()
    parser.add_argument("--dry-run", action="store_true")
    return read_words(parser, line.split(), [*Settings.model_fields])[1]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--schedule.sync_every 3", {"schedule.sync_every": 3}),
        ("--schedule.sync-every=3 --dry-run", {"schedule.sync_every": 3}),
        ("--run.seed -1", {"run.seed": -1}),
        ("--task gsm8k --recipe=dapo", {"task.name": "gsm8k", "loss.recipe": "dapo"}),
        ("--run.report_to wandb trackio", {"run.report_to": ("wandb", "trackio")}),
        ("--task.rewards exact my.module:score", {"task.rewards": ("exact", "my.module:score")}),
        ("--eval.at_start false", {"eval.at_start": False}),
        ("--eval.at_start=False", {"eval.at_start": False}),
        ("--task.system_prompt=", {"task.system_prompt": ""}),
        ("--model.chat_template_kwargs.think False", {"model.chat_template_kwargs.think": False}),
        (
            "--task.options.operations + - --task.options.digits 2",
            {"task.options.operations": ["+", "-"], "task.options.digits": 2},
        ),
    ],
)
def test_command_line_words_change_settings(line, values):
    assert set(parse(line)) == set(values)
    assert load_settings({}, parse(line)) == load_settings({}, values)


@pytest.mark.parametrize("value", ["--revision v1.0-beta", "--gpu-memory-utilization 0.3"])
def test_option_for_vllm_behind_a_space_stays_as_it_is(value):
    words = ["--vllm.server_args", value, "--dry_run"]
    parser = CommandParser()
    parser.add_argument("--dry-run", action="store_true")
    arguments, changes = read_words(parser, words, list(Settings.model_fields))
    assert arguments == {"dry_run": True}
    assert changes == {"vllm.server_args": (value,)}


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({"task.name": "custom"}, {}, id="another task"),
        pytest.param(
            {"task.name": "countdown", "task.options.numbers": 3},
            {"numbers": 3},
            id="another task with its options",
        ),
        pytest.param(
            {"task.name": "arithmetic", "task.options.digits": 2},
            {"operations": ["+"], "digits": 2, "split_seed": 0},
            id="the same task",
        ),
        pytest.param(
            {"task.data": "a.jsonl"},
            {"operations": ["+"], "digits": 1, "split_seed": 0},
            id="no task",
        ),
    ],
)
def test_options_of_a_file_are_of_its_task(changes, options):
    assert load_settings("demo", changes).task.options == options
    file = load_settings("demo").model_dump()
    assert load_settings(file, changes).task.options == options


def test_command_line_none_and_defaults_replace_values_of_the_file():
    file = {"schedule.batches": 7, "task.data": "a.jsonl", "loss.filters": ["opsm"]}
    words = "--schedule.batches 100 --task.data None --loss.filters None"
    assert load_settings(file, parse(words)) == Settings()


def test_command_line_none_empties_lists_and_drops_entries_of_tables():
    file = {
        "rollout.stop": ["STOP"],
        "task.tools": ["calculator"],
        "task.options.digits": 2,
        "model.chat_template_kwargs.think": False,
    }
    words = (
        "--rollout.stop None --task.tools None --task.options.digits None "
        "--model.chat_template_kwargs.think=None"
    )
    settings = load_settings(file, parse(words))
    assert settings == Settings()
    assert load_settings(tomllib.loads(to_toml(settings))) == settings


def test_none_of_a_knob_is_none_as_in_toml():
    expected = load_settings({"loss.overrides.correction": "none"})
    settings = load_settings({"loss.overrides.correction": None})
    assert settings == expected
    assert load_settings(tomllib.loads(to_toml(settings))) == expected
    assert load_settings(None, parse("--loss.overrides.correction None")) == expected


@pytest.mark.parametrize(
    "line",
    [
        "--schedule.sync_evry 1",
        "--schedule.batches",
        "--schedule.batches 2.5",
        "--rollout.engine vlm",
        "--vllm.gpus a",
        "word",
        "--dry-run=1",
    ],
)
def test_wrong_command_line_words_are_a_line_that_names_them(line):
    with pytest.raises(SettingsError) as error:
        load_settings({}, parse(line))
    message = str(error.value)
    assert re.split("[ =]", line.removeprefix("--"))[0] in message
    assert len(message.splitlines()) == 1


def test_every_setting_can_be_given_as_its_text():
    words = list[str]()
    settings = Settings()
    for name in KEYS:
        value: Any = settings
        for part in name.split("."):
            value = getattr(value, part)
        if name not in (*TABLES, "eval.sets") and not isinstance(value, BaseModel):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [text])]
    assert load_settings(None, parse(" ".join(words))) == settings
    assert {option.removeprefix("--") for option in SHORT.values()} <= set(KEYS)
