"""Several evaluations of one run: their names, their draws, their records, and the best policy by
one of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sample_rewards
import talkers
from made_runs import unpack
from rich.console import Console
from running import tiny_settings, without_timings
from scoring import make_group, outcomes
from tiny import TURNS, tiny_policy

from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import SettingsError
from lagrpo.lifecycle.evaluation import EvalSet, Evaluation, Evaluations, build_eval_set
from lagrpo.lifecycle.run import train
from lagrpo.rewards.reasons import past_deadline
from lagrpo.rollout.base import SamplingParams
from lagrpo.runs import load_evaluations, load_events, load_metrics, load_rollouts
from lagrpo.runs.directory import BEST
from lagrpo.runs.evaluation_names import Moment, evaluation_name
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.settings.load import load_settings
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import EvalSetSettings
from lagrpo.startup.build_tasks import set_up_tasks
from lagrpo.tasks import RowTask
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.terminal.show import show
from lagrpo.types import JsonObject
from lagrpo.verify import verify_run
from lagrpo.view.data import collect

SETS: list[JsonObject] = [
    {"name": "own"},
    {
        "name": "vowels",
        "task": {"name": "sample_task:load_vowels"},
        "num_samples": 2,
        "max_completion_length": 9,
    },
    {"name": "rare", "num_samples": 2, "every": 0},
]


def run(model, root, /, **sections: JsonObject):
    base = {"eval": {"every": 1}}
    return train(
        tiny_settings(
            model, root, **{n: base.get(n, {}) | sections.get(n, {}) for n in base | sections}
        )
    )


@pytest.fixture(scope="module")
def sets(model, tmp_path_factory):
    """A run with three sets, one of them evaluated before and after only."""
    return run(
        model, tmp_path_factory.mktemp("sets"), eval={"sets": SETS, "best_metric": "vowels.pass@1"}
    )


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """The same run without sets."""
    return run(model, tmp_path_factory.mktemp("plain"))


def test_each_set_is_evaluated_at_its_own_moments(sets):
    names = [summary["name"] for summary in load_evaluations(sets.run)]
    moments = ("before", "batch-000001", "batch-000002", "after")
    expected_names = [f"{moment}.{name}" for moment in moments for name in ("own", "vowels")]
    assert sorted(names) == sorted([*expected_names, "before.rare", "after.rare"])
    assert set(sets.evaluations) == set(names)
    assert sets.before == sets.evaluations["before.own"]


def test_sets_change_nothing_in_training_and_draw_numbers_of_their_own(sets, plain):
    assert load_rollouts(sets.run) == load_rollouts(plain.run)
    lines = [without_timings(load_metrics(result.run)) for result in (sets, plain)]
    assert [
        {n: v for n, v in line.items() if not n.startswith("eval/")} for line in lines[0]
    ] == lines[1]
    with_sets, alone = (
        load_evaluation_records(r.run, name)
        for r, name in ((sets, "before.own"), (plain, "before"))
    )
    assert [record["prompt_id"] for record in with_sets] == [
        record["prompt_id"] for record in alone
    ]
    assert [record["completions"] for record in with_sets] != [
        record["completions"] for record in alone
    ]


def test_set_has_its_own_task_samples_and_limits(sets):
    records = load_evaluation_records(sets.run, "before.vowels")
    assert [record["prompt"][:4] for record in records] == ["Say "] * 2
    assert [record["samples"] for record in records] == [2, 2]
    assert (
        max(record["mean_length"] for record in records) > 6
    )  # rollout.max_completion_length is 6
    assert sets.evaluations["before.vowels"]["samples"] == 2
    assert sets.evaluations["after.vowels"]["pass@1_change"] is not None


def test_line_of_a_batch_has_the_evaluation_of_the_policy_at_its_start(sets, plain):
    lines = load_metrics(sets.run)
    for line, moment in zip(lines, ("before", "batch-000001", "batch-000002"), strict=True):
        for name in ("own", "vowels"):
            evaluation = sets.evaluations[f"{moment}.{name}"]
            assert line[f"eval/{name}/pass@1"] == evaluation["pass@1"]
            assert line[f"eval/{name}/reward"] == evaluation["reward"]
    rare = [line["eval/rare/pass@1"] for line in lines]
    assert rare == [sets.evaluations["before.rare"]["pass@1"], None, None]
    assert not any(name.startswith("eval/") for name in load_metrics(plain.run)[0])


def test_best_policy_is_kept_with_its_evaluation(sets):
    rates = {name: s["pass@1"] for name, s in sets.evaluations.items() if name.endswith(".vowels")}
    best = json.loads((sets.run / "weights" / "best" / "evaluation.json").read_bytes())
    later = {name: value for name, value in rates.items() if not name.startswith("before")}
    assert best["value"] == max(later.values())
    first = next(name for name, value in later.items() if value == best["value"])
    assert (
        best["step"] == {"batch-000001": 1, "batch-000002": 2, "after": 3}[first.partition(".")[0]]
    )
    assert (sets.run / "weights" / "best" / "model.safetensors").is_file()
    events = [event for event in load_events(sets.run) if event["event"] == "best"]
    assert {name: events[-1][name] for name in best} == best


def test_run_with_sets_replays(sets):
    report = verify_run(sets.run, trust_run_code=True)
    assert report.differences == []
    assert {"evaluation before.own", "evaluation batch-000001.vowels"} <= report.compared.keys()


def test_resumed_run_with_evaluation_sets_equals_an_uninterrupted_run(model, tmp_path, sets):
    """Made with two batches, and then the third."""
    options = {"sets": SETS, "best_metric": "vowels.pass@1"}
    first = run(
        model,
        tmp_path,
        eval=options,
        schedule={"batches": 2},
        run={"name": "x"},
        checkpoint={"save_every": 1},
    )
    resumed_result = train({"schedule.batches": 3}, resume=first.run, trust_run_code=True)
    assert load_rollouts(resumed_result.run) == load_rollouts(sets.run)
    assert resumed_result.evaluations == sets.evaluations
    lines = [without_timings(load_metrics(result.run)) for result in (resumed_result, sets)]
    assert lines[0] == lines[1]
    best = [
        json.loads((r / "weights" / "best" / "evaluation.json").read_bytes())
        for r in (resumed_result.run, sets.run)
    ]
    assert best[0] == best[1]


def test_show_and_view_know_the_sets(sets):
    console = Console(record=True, width=150, file=io.StringIO())
    show(sets.run, console=console)
    assert "evaluation rare: pass@1 " in console.export_text()
    header, _ = unpack(collect([sets.run], 100))
    assert {one["set"] for one in header["runs"][0]["evaluations"]["summaries"]} == {
        "own",
        "vowels",
        "rare",
    }
    assert "eval/own/pass@1" in header["metrics"]["Evaluations"]


def test_set_with_its_own_task_has_its_own_limits_of_time_and_turns():
    """The run's reward may take 5 seconds. The set's reward hangs, and is ended after 0.5."""
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS
    limits = {"reward_timeout": 0.5, "max_turns": 3}
    settings = Settings.model_validate({"eval": {"sets": [{"name": "own", "task": limits}]}})
    rows = {"train": ["?"], "test": ["?"]}
    task = RowTask(
        "odd", rows, lambda row: (row, row), sample_rewards.act, environment=talkers.Counting
    )
    with ExitStack() as undo:
        setups = set_up_tasks(settings, {MAIN_TASK: task, "own": task}, policy, undo)
        episodes = [setups[name].episodes for name in (MAIN_TASK, "own")]
        assert [(e.turns, e.deadline) for e in episodes if e is not None] == [(8, 5.0), (3, 0.5)]
        (group,) = setups["own"].reward_pool.score([make_group("hang")], max_without_reward=1.0)
        assert [outcome.reason for outcome in outcomes(group)] == [past_deadline(0.5)]


# From settings to a set


TRAINING: JsonObject = {
    "rollout": {"temperature": 0.7, "max_completion_length": 6, "stop": ["\n"]},
    "task": {"rewards": [{"reward": "sample_rewards:letters", "range": [-1.0, 3.0]}]},
    "eval": {"num_prompts": 5, "num_samples": 3, "top_p": 0.9, "every": 4},
}


def built_set(sections: JsonObject, **values: object) -> EvalSet:
    """The set "a" with these values in a run with these settings. Its requests are numbers."""
    settings = Settings.model_validate(sections | {"run": {"seed": 11}})
    setup: Any = SimpleNamespace(
        prompts=SimpleNamespace(held_out=range),
        reward_pool=None,
        episodes=None,
        task=SimpleNamespace(reward=sample_rewards.correct),
    )
    set_settings = EvalSetSettings.model_validate({"name": "a"} | values)
    return build_eval_set(settings, setup, set_settings, set_settings.name)


def test_set_without_values_has_those_of_the_run():
    eval_set = built_set(TRAINING)
    params = SamplingParams("evaluate a", tau=0.7, max_tokens=6, top_p=0.9, stop=("\n",))
    assert eval_set.params == params
    assert (len(eval_set.requests), eval_set.samples, eval_set.every) == (5, 3, 4)
    assert (eval_set.seed, eval_set.name, eval_set.reward_range) == (11, "a", (-1.0, 3.0))


def test_temperature_of_evaluations_replaces_the_one_of_training():
    sections = TRAINING | {"eval": {"temperature": 0.5}}
    assert built_set(sections).params.tau == 0.5
    assert built_set(sections, temperature=0.2).params.tau == 0.2


# Each key of a set: a value, and where the set has it.
SET_VALUES: dict[str, tuple[Any, Callable[[EvalSet], object]]] = {
    "name": ("b", lambda eval_set: eval_set.name),
    "task": (
        {"rewards": [{"reward": "sample_rewards:letters", "range": [0.0, 5.0]}]},
        lambda eval_set: eval_set.reward_range,
    ),
    "every": (0, lambda eval_set: eval_set.every),
    "num_prompts": (2, lambda eval_set: len(eval_set.requests)),
    "num_samples": (7, lambda eval_set: eval_set.samples),
    "temperature": (0.2, lambda eval_set: eval_set.params.tau),
    "top_p": (0.4, lambda eval_set: eval_set.params.top_p),
    "max_completion_length": (9, lambda eval_set: eval_set.params.max_tokens),
}


@pytest.mark.parametrize("key", EvalSetSettings.model_fields)
def test_value_of_a_set_replaces_the_one_of_the_run(key):
    value, read = SET_VALUES[key]
    expected = (0.0, 5.0) if key == "task" else value
    assert read(built_set(TRAINING, **{key: value})) == expected


# The best policy


def best_after(model_dir: Path, values: dict[int, float]) -> list[int]:
    """The batches whose policy becomes the best, if pass@1 has these values by batch."""
    metric = "pass@1"
    settings = Settings.model_validate({"eval": {"at_start": False}})
    evaluations = Evaluations(settings, {}, tiny_policy(), Ranks())
    evaluations.best_metric = metric
    run: Any = SimpleNamespace(path=model_dir)
    best = model_dir / "weights" / "best"
    best.mkdir(parents=True, exist_ok=True)
    batches = []
    for batch, value in values.items():
        name = evaluation_name(batch, "", Moment.BETWEEN)
        evaluations.finished[name] = Evaluation({"step": batch, metric: value}, [])
        facts = evaluations.find_best(run, batch, Moment.BETWEEN)
        if facts is not None:
            (best / BEST).write_text(json.dumps(facts), encoding="utf-8")
            batches.append(batch)
    return batches


@pytest.mark.parametrize(
    ("values", "batches"),
    [
        pytest.param([0.5, 0.75, 0.25], [1, 2], id="higher later"),
        pytest.param([0.5, 0.5, 0.5], [1], id="a tie keeps the first"),
        pytest.param([0.25, 0.5, 0.5, 0.75], [1, 2, 4], id="a tie in between"),
    ],
)
def test_policy_becomes_the_best_only_if_it_is_better(tmp_path, values, batches):
    assert best_after(tmp_path, dict(enumerate(values, start=1))) == batches


# Wrong input


def test_sets_that_cannot_be_evaluated_are_rejected(model, tmp_path):
    for evaluation, message in (
        ({"sets": [{"name": "a", "smaples": 3}]}, "unknown setting 'eval.sets.0.smaples'"),
        ({"sets": [{"name": "a"}] * 2}, "two sets have the name 'a'"),
        ({"sets": [{"name": "a/b"}]}, "name = 'a/b'"),
        (
            {"sets": [{"name": "a", "num_samples": 300}]},
            "max_num_seqs = 128 is less than eval.num_samples = 300",
        ),
        ({"sets": [{"name": "a"}], "best_metric": "pass@1"}, "write SET.METRIC"),
        ({"sets": [{"name": "a"}], "best_metric": "a.pass@3"}, "write SET.METRIC of reward"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_settings({"eval": evaluation})
    for task, message in (
        ("countdwn", "eval.sets, 'a': task.name: no task 'countdwn'"),
        ("sample_task:load_untested", "has no test prompts"),
    ):
        with pytest.raises(SettingsError, match=message):
            run(model, tmp_path, eval={"sets": [{"name": "a", "task": {"name": task}}]})
