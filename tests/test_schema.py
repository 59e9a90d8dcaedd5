"""The settings' classes: in step with what they configure, closed, finite."""

from __future__ import annotations

from dataclasses import fields

import pytest
from pydantic import BaseModel, ValidationError

from lagrpo.core.objective import NUMBERS
from lagrpo.core.recipes import CHOICES, MINIMUM
from lagrpo.settings.objective import KNOBS
from lagrpo.settings.schema import EvalSettings, LossSettings, ModelSettings, Settings, TaskSettings
from lagrpo.tasks import option_takers, task_options


def sections(kind: type[BaseModel]) -> list[type[BaseModel]]:
    found = [field.annotation for field in kind.model_fields.values()]
    return [kind, *(s for s in found if isinstance(s, type) and issubclass(s, BaseModel))]


def test_every_knob_of_a_recipe_is_a_setting():
    named = set(LossSettings.model_fields) - {"recipe", "overrides"}
    assert {KNOBS.get(name, name) for name in named} <= {*NUMBERS, *CHOICES, *MINIMUM}


@pytest.mark.parametrize(("setting", "knob"), [("advantage", "advantage"), ("kl_estimator", "kl")])
def test_help_of_the_loss_names_every_choice(setting, knob):
    description = LossSettings.model_fields[setting].description or ""
    assert [name for name in CHOICES[knob] if name not in description and name != "k1"] == []


def test_what_is_unset_overrides_nothing():
    assert LossSettings().knobs == {}
    changed = LossSettings(recipe="dapo", epsilon=0.1, mask_zero_variance=False, overrides={"dual_clip": 3.0})
    assert changed.knobs == {"epsilon_low": 0.1, "mask_zero_variance": False, "dual_clip": 3.0}


def test_every_option_that_a_task_declares_is_a_setting():
    of_every_task = {"name", "reward", "rewards", "reward_range", "system_prompt"}
    assert {*option_takers()} | of_every_task == set(TaskSettings.model_fields)
    assert {option.name for options in task_options().values() for option in fields(options)} == {*option_takers()}


@pytest.mark.parametrize("option", option_takers())
def test_the_help_of_an_option_names_the_tasks_that_take_it(option):
    description = TaskSettings.model_fields[option].description or ""
    assert description.partition(":")[0].split(", ") == option_takers()[option]


@pytest.mark.parametrize("kind", [*sections(Settings), *sections(EvalSettings)], ids=lambda kind: kind.__name__)
def test_every_setting_has_its_help(kind):
    leaves = {n: f for n, f in kind.model_fields.items() if not isinstance(f.default, BaseModel)}
    assert [name for name, field in leaves.items() if not field.description] == []


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("schedule", {"sync_every": 0}),
        ("schedule", {"kind": "lagged", "sync_every": -1}),
        ("schedule", {"num_iterations": 0}),
        ("rollout", {"temperature": 0.0}),
        ("rollout", {"temperature": float("inf")}),
        ("optimizer", {"learning_rate": float("nan")}),
        ("optimizer", {"beta2": 1.0}),
        ("verifier", {"max_without_reward": 1.1}),
        ("model", {"dtype": "float16"}),
        ("task", {"operations": ("/",)}),
        ("rollout", {"num_generations": 129}),
        ("eval", {"num_samples": 129}),
        ("loss", {"overrides": {"overlong_buffer": 257}}),
        ("run", {"nmae": "x"}),
    ],
)
def test_values_out_of_range_are_refused(section, values):
    with pytest.raises(ValidationError):
        Settings.model_validate({section: values})


def test_what_is_not_used_cannot_contradict():
    """More samples than rows are fine where nothing is evaluated; a schedule with a lag of 0 is on-policy."""
    Settings.model_validate({"eval": {"num_samples": 500, "at_start": False}})
    Settings.model_validate({"schedule": {"kind": "lagged", "sync_every": 0}})
    with pytest.raises(ValidationError, match=r"rollout.max_num_seqs = 128 is less than eval.num_samples = 500"):
        Settings.model_validate({"eval": {"num_samples": 500, "at_start": False, "every": 1}})


def test_settings_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        ModelSettings().path = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "context_parallel", "expert_parallel", "pipeline_stages"])
def test_kinds_of_parallelism_that_are_not_there_are_refused_with_what_to_use(name):
    with pytest.raises(ValidationError, match=f"{name}: there is no {name.partition('_')[0]} parallelism; "):
        Settings.model_validate({"distributed": {name: 2}})
