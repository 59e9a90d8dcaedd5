"""Several rewards of one completion: their sum, who asks them, and what a run records of each."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
import sample_rewards
import torch
from made_runs import make_run
from rich.console import Console
from running import tiny_settings, without_timings
from tiny import save_tiny

from lagrpo.errors import SettingsError
from lagrpo.replay import verify_run
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.settings.toml import load_settings
from lagrpo.tasks import load_task
from lagrpo.tasks.arithmetic import judge
from lagrpo.tasks.rewards import Answer, Reward, Rewards
from lagrpo.tasks.shaped import Format, Length
from lagrpo.terminal.show import show
from lagrpo.training.checks import check_settings
from lagrpo.training.run import train
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import Verifier
from lagrpo.view.data import collect
from lagrpo.view.payload import unpack

# What they compute


@pytest.mark.parametrize(
    ("shape", "tokens", "value"),
    [
        *(("linear", 4, 1.0), ("linear", 7, 0.75), ("linear", 16, 0.0), ("linear", 99, 0.0)),
        *(("cosine", 0, 1.0), ("cosine", 8, 0.75), ("cosine", 10, 0.5), ("cosine", 16, 0.0)),
    ],
)
def test_length_falls_from_the_target_to_the_limit(shape, tokens, value):
    """cos(pi/3) = 1/2: a third of the way from 4 to 16 the cosine is at (1 + 1/2) / 2."""
    assert Length(limit=16, target=4, shape=shape)(Answer("", None, tokens=tokens)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>so</think><answer>4</answer>", 1.0),
        (" <think>a < b\n</think>\n\n<answer> 4 </answer>\n", 1.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<think>so</think> it is <answer>4</answer>", 0.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("<think>so</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>so</think><answer>4", 0.0),
        ("4", 0.0),
    ],
)
def test_format_wants_every_tag_once_and_in_order(text, value):
    assert Format()(text, None) == value


def test_format_by_a_pattern_is_about_the_whole_text():
    found = [Format(pattern=r"\d+.*!")(text, None) for text in ("12 a\nb!", "x12!", "12!?")]
    assert found == [1.0, 0.0, 0.0]


def rewards(*given: tuple[str, Any, dict[str, Any]]) -> Rewards:
    return Rewards(tuple(Reward(name, function, **further) for name, function, further in given))


def test_the_weighted_sum_and_what_is_right():
    """1 * 1 + .5 * .2 - .25 * 2 = .6, in a range from 0 + 0 - .25 * 4 to 1 + .5 - 0."""
    both = rewards(
        ("a", judge, {}), ("b", judge, {"weight": 0.5}), ("c", judge, {"weight": -0.25, "range": (0.0, 4.0)})
    )
    found = both.combine([Outcome.scored(1.0), Outcome.scored(0.2), Outcome.scored(2.0)])
    assert (found.kind, found.parts, found.right) == ("scored", {"a": 1.0, "b": 0.2, "c": 2.0}, True)
    assert found.reward == pytest.approx(0.6)
    assert both.range == (-1.0, 1.5)
    assert both.combine([Outcome.scored(0.9), Outcome.scored(1.0), Outcome.scored(4.0)]).right is False
    deciding = rewards(("a", judge, {}), ("b", judge, {"decides": True}), ("c", judge, {"decides": True}))
    values = [(0.0, 1.0, 1.0), (1.0, 1.0, 0.5)]
    assert [deciding.combine([Outcome.scored(v) for v in each]).right for each in values] == [True, False]


def test_one_reward_that_cannot_score_leaves_the_completion_unscored():
    both = rewards(("a", judge, {}), ("b", judge, {}))
    found = both.combine([Outcome.scored(1.0), Outcome.unscored("no verdict within 5 s")])
    assert found == Outcome("unscored", None, "no verdict within 5 s (reward 'b')", {"a": 1.0, "b": None})
    endless = rewards(("a", judge, {"weight": 1e308}), ("b", judge, {"weight": 1e308}))
    for values in ((9.0, 9.0), (1.0, 1.0), (9.0, -9.0)):  # infinite, beyond the largest number, and neither
        assert endless.combine([Outcome.scored(value) for value in values]).kind == "unscored"


# Who asks them


def group(*texts: str, gold: Any = "7") -> Group:
    none = torch.zeros(0)
    return Group(Prompt(0, (), gold), tuple(Completion(none, none, none, finished=True, text=text) for text in texts))


def judged(several: Rewards, *texts: str, **options: Any) -> list[Outcome]:
    with Verifier(several, workers=1, max_without_reward=1.0, **options) as verifier:
        (found,) = verifier.judge([group(*texts)])
    return [c.outcome for c in found.completions if c.outcome is not None]


def test_every_way_to_call_a_reward_gives_each_completion_its_own():
    several = rewards(
        ("right", judge, {}),
        ("letters", sample_rewards.letters, {"weight": 2.0}),
        ("rank", sample_rewards.ranked, {"takes": "batch"}),
        ("together", sample_rewards.awaited_together, {"takes": "batch"}),
        ("length", Length(limit=4), {"takes": "answer"}),
    )
    found = judged(several, "7", "seven", "77")
    assert [o.parts for o in found] == [
        {"right": 1.0, "letters": 0.0, "rank": 0.0, "together": 1.0, "length": 1.0},
        {"right": 0.0, "letters": 0.625, "rank": pytest.approx(2 / 3), "together": 0.0, "length": 1.0},
        {"right": 0.0, "letters": 0.0, "rank": pytest.approx(1 / 3), "together": 0.0, "length": 1.0},
    ]
    assert [o.reward for o in found] == pytest.approx([3.0, 1.25 + 2 / 3 + 1, 1 / 3 + 1])
    assert [o.right for o in found] == [True, False, False]


def test_coroutines_wait_side_by_side_and_each_within_its_deadline():
    """Twelve of half a second each take half a second, in one process; the one of an hour does not hold them up."""
    several = rewards(("waits", sample_rewards.awaited, {"deadline": 1.5}))
    started = time.monotonic()
    found = judged(several, *["5"] * 12, "36000", "fail", deadline=30.0)
    assert time.monotonic() - started < 8  # with the start of the worker
    assert [o.reward for o in found] == [1.0] * 12 + [None] * 2
    reasons = [o.reason for o in found[12:]]
    refused = "the judge raised ConnectionError: refused (reward 'waits')"
    assert reasons == ["no verdict within 1.5 s (reward 'waits')", refused]


def test_a_reward_that_kills_its_worker_costs_that_completion_and_no_other_reward():
    several = rewards(("fragile", sample_rewards.fragile, {}), ("letters", sample_rewards.letters, {}))
    found = judged(several, "die", "raise", "fine")
    assert [(o.kind, o.parts) for o in found] == [
        ("unscored", {"fragile": None, "letters": 0.375}),
        ("unscored", {"fragile": None, "letters": 0.625}),
        ("scored", {"fragile": 0.5, "letters": 0.5}),
    ]
    assert found[0].reason.startswith("the worker process ended itself with exit code 3")
    assert found[1].reason == "the judge raised ValueError: no (reward 'fragile')"


def test_a_batch_reward_that_returns_too_few_values_scores_none():
    (first, second) = judged(rewards(("few", sample_rewards.one_short, {"takes": "batch"})), "a", "b")
    assert first.reason == second.reason == "the judge returned 1 values for 2 completions (reward 'few')"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (sample_rewards.keyed, "the judge returned a dict, not a list of numbers (reward 'x')"),
        (sample_rewards.awaited_for_an_hour, "no verdict within 0.5 s (reward 'x')"),
    ],
)
def test_what_is_no_list_or_comes_too_late_scores_none(function, reason):
    found = judged(rewards(("x", function, {"takes": "batch", "deadline": 0.5})), "a", "b")
    assert [o.reason for o in found] == [reason] * 2


def test_a_reason_can_be_written_to_any_file():
    (found,) = judged(rewards(("x", sample_rewards.unprintable, {})), "a")
    assert found.reason.encode().startswith(b"the judge raised ValueError: half a pair: \\ud800")


def test_a_completion_that_failed_is_no_part_of_its_group():
    given = group("a", "bb", "ccc")
    failed = given.completions[1]
    object.__setattr__(failed, "outcome", Outcome.failed("the server died"))
    with Verifier(rewards(("rank", sample_rewards.ranked, {"takes": "batch"})), workers=1) as verifier:
        (found,) = verifier.judge([given])
    assert [c.reward for c in found.completions] == [0.0, None, 0.5]


# The settings


def two(**second: Any) -> dict[str, Any]:
    return {"name": "arithmetic", "rewards": [{"name": "right", "reward": "task"}, {"name": "b", **second}]}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (two(reward="lenght"), "no built-in reward 'lenght'.*Did you mean 'length'"),
        (two(reward="length", options={"limt": 8}), r"options.limt: the reward 'length' takes limit.*'limit'"),
        (two(reward="length", options={}), "options.limit: Field required"),
        (two(reward="length", options={"limit": 4, "target": 4}), "0 <= target < limit is needed"),
        (two(reward="length", wieght=2), "unknown setting 'task.rewards.1.wieght'; did you mean 'weight'"),
        (two(reward="format", options={"pattern": "("}), "no regular expression"),
        (two(reward="format", options={"pattern": "x", "tags": ["a"]}), "two ways to say the format"),
        (two(reward="format", options={"tags": ["a", "a"]}), "each has a name of its own"),
        (two(reward="exact", options={"x": 1}), "the reward 'exact' takes no options"),
        (two(reward="x:y", options={"api_key": "sk-1"}), "options.api_key would be on the disk"),
        (two(reward="exact", deadline=1e300), "less than or equal to 1000000"),
        (two(reward="exact", batch=True), "batch is about functions of your own"),
        (two(reward="exact", range=[1, 0]), "range goes from the least"),
        (two(reward="task") | {"reward": "exact"}, "task.reward and task.rewards are both set"),
        (two(reward="exact") | {"name": "custom"}, "'custom' has no judge of its own"),
        ({"rewards": [{"name": "a b", "reward": "task"}]}, "a name has letters, digits and _"),
        ({"rewards": [{"name": "mean", "reward": "task"}]}, "reward_mean is the mean of the weighted sum"),
        (two(reward="exact", weight=1e200, range=[0, 1e200]), "reward_range.* finite"),
        ({"rewards": [{"name": "a", "reward": "task", "weight": 0}]}, "all weights are 0"),
        ({"rewards": [{"name": "a", "reward": "task"}] * 2}, "the name 'a' is there twice"),
        ({"reward": "length"}, "'length' can be an entry of task.rewards"),
    ],
)
def test_entries_that_cannot_be_are_refused(task, message):
    with pytest.raises(SettingsError, match=message):
        check_settings(load_settings({"task": task}))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"reward": "sample_rewards:scaled"},
            r"sample_rewards:scaled\(text, gold\): missing a required argument: 'by'",
        ),
        ({"reward": "sample_rewards:letters", "options": {"by": 2}}, r"letters\(text, gold, by=…\): got an unexpected"),
        ({"reward": "sample_rewards:leters"}, "has no attribute 'leters'.*Did you mean 'letters'"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_with_the_call(entry, message):
    settings = load_settings({"task": {"rewards": [{"name": "a", **entry}]}})
    with pytest.raises(ValueError, match=message):
        load_task(settings.task, 0)


def test_options_go_to_the_function_and_the_range_is_the_sum_of_the_ranges():
    entry = {"name": "a", "reward": "sample_rewards:scaled", "weight": -2.0, "range": [0, 3], "options": {"by": 0.5}}
    settings = load_settings({"task": {"rewards": [entry, {"name": "b", "reward": "task"}]}})
    several = load_task(settings.task, 0).judge
    assert isinstance(several, Rewards)
    assert several.of[0].function("four", None) == 2.0
    assert settings.task.reward_range == several.range == (-6.0, 1.0)
    assert load_settings({"task": {"rewards": [entry], "reward_range": [-9, 9]}}).task.reward_range == (-9.0, 9.0)


# What a run records


ENTRIES: list[dict[str, Any]] = [
    {"name": "letters", "reward": "task", "range": [0, 0.5]},
    {"name": "rank", "reward": "sample_rewards:ranked", "batch": True, "weight": 0.5},
    {"name": "short", "reward": "length", "weight": 0.25, "options": {"limit": 7}},
    {"name": "sometimes", "reward": "sample_task:sometimes", "weight": 0},
]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """Settings of a run with several rewards, and the run."""
    root = tmp_path_factory.mktemp("several")
    settings = tiny_settings(
        save_tiny(root / "model"),
        root,
        task={"name": "sample_task:load_letters", "rewards": ENTRIES},
        schedule={"batches": 2},
        verifier={"workers": 2, "max_without_reward": 1.0},
    )
    return settings, train(settings)


def test_each_reward_is_in_the_rollouts_and_the_metrics(several):
    _, result = several
    rows, (line, _) = load_rollouts(result.run), load_metrics(result.run)
    for row in rows:
        parts = [row[f"reward_{entry['name']}"] for entry in ENTRIES]
        assert parts[2] == pytest.approx(1 - len(row["token_ids"]) / 7)
        if parts[3] is None:
            assert (row["outcome"], row["reward"], row["right"]) == ("unscored", None, None)
            assert row["reason"] == "the judge raised RuntimeError: not today (reward 'sometimes')"
        else:
            assert row["reward"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.25 * parts[2])
            assert row["right"] is (parts[0] >= 0.5)
    first = [row for row in rows if row["batch"] == 1]
    letters = [row["reward_letters"] for row in first]
    assert line["reward_letters_mean"] == pytest.approx(sum(letters) / 8)
    assert line["reward_sometimes_unscored"] == line["unscored"] == sum(r["outcome"] == "unscored" for r in first) > 0
    assert line["reward_letters_unscored"] == 0


def test_evaluations_have_each_reward_too(several):
    _, result = several
    assert result.before is not None
    records = load_evaluation_records(result.run, "before")
    means = [[value for value in record["reward_short"] if value is not None] for record in records]
    assert result.before["reward_short_mean"] == pytest.approx(sum(sum(m) / len(m) for m in means) / len(means))
    assert [len(record["is_right"]) for record in records] == [3, 3]


def test_a_run_with_several_rewards_replays(several):
    report = verify_run(several[1].run, None)
    assert report.differences == []
    assert {"rewards", "metrics.jsonl", "evaluation before", "evaluation after"} <= report.compared.keys()


def test_show_and_view_have_each_reward(several):
    _, result = several
    console = Console(record=True, width=200, file=io.StringIO())
    show(result.run, console=console)
    assert "(letters 0" in (shown := console.export_text())
    assert ", rank 0" in shown
    header, arrays = unpack(collect([result.run], 100))
    rollouts = header["runs"][0]["rollouts"]
    assert rollouts["rewards"] == [entry["name"] for entry in ENTRIES]
    recorded = [row["reward_short"] for row in load_rollouts(result.run)]
    assert arrays[rollouts["columns"]["reward_short"]].tolist() == pytest.approx(recorded)
    assert "reward_short_mean" in header["metrics"]["Rewards"]


@pytest.mark.usefixtures("shared_templates")
def test_one_entry_of_weight_one_trains_as_a_single_reward(several, tmp_path):
    """The same weights after the same batches, whichever way the reward is given; and a single one has no columns of
    its own."""
    settings, _ = several
    own = {"evaluation": {"before_and_after": False}, "verifier": {"workers": 1}}
    made = {}
    for name, task in {
        "single": {"name": "sample_task:load_letters"},
        "listed": {"name": "sample_task:load_letters", "rewards": [{"name": "only", "reward": "task"}]},
    }.items():
        run = {"directory": str(tmp_path), "name": name}
        made[name] = train(tiny_settings(settings["model"]["path"], tmp_path, run=run, task=task, **own))
    single, listed = (load_rollouts(result.run) for result in made.values())
    assert [{n: v for n, v in row.items() if n not in ("reward_only", "right")} for row in listed] == single
    lines = [without_timings(load_metrics(result.run)) for result in made.values()]
    of_rewards = [name for name in lines[1][0] if name not in lines[0][0]]
    assert of_rewards == ["reward_only_mean", "reward_only_std", "reward_only_unscored"]
    assert [{n: v for n, v in line.items() if n not in of_rewards} for line in lines[1]] == lines[0]


def test_a_run_of_files_without_the_columns_is_read_as_before(tmp_path):
    """What earlier runs left has no column of a reward."""
    from made_runs import fill

    run = fill(make_run(tmp_path))
    header, _ = unpack(collect([run.path], 100))
    assert header["runs"][0]["rollouts"]["rewards"] == []
    assert [e["name"] for e in load_evaluations(run)] == ["before", "after"]
