"""`lagrpo diagnose`: each detector on a run with its fault, and all of them on a healthy run.

Most runs are what `load_record` would return; some are written by the writers of real runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from made_runs import evaluate, make_run, row
from running import tiny_settings

import lagrpo
from lagrpo import cli
from lagrpo.diagnosis import Detector, Finding, RunRecord
from lagrpo.diagnosis.diagnose import find_all
from lagrpo.diagnosis.record import load_record, shorten
from lagrpo.diagnosis.table import DETECTORS
from lagrpo.lifecycle import run as training_run
from lagrpo.lifecycle.callbacks import FaultWatch
from lagrpo.runs import Run, RunNotFoundError
from lagrpo.runs.rollouts import REWARD
from lagrpo.settings.load import flatten, load_settings
from lagrpo.types import JsonObject

G = 4
PROMPTS = 10


def nothing(batch: int, values: JsonObject) -> None:
    """Changes nothing."""


@dataclass
class Fault:
    """What a faulty run has other than the healthy one."""

    name: str
    """of the detector that finds it, first of all"""
    change_row: Callable[[int, JsonObject], object] = nothing
    """changes a completion of a batch"""
    change_metrics: Callable[[int, JsonObject], object] = nothing
    """changes the metrics of a batch"""
    sections: JsonObject = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)
    """what it says to set"""
    batches: int = 40
    evaluations: tuple[tuple[int, float], ...] = ((0, 0.25), (40, 0.75))
    """batch and pass@1 of each evaluation"""
    also: tuple[str, ...] = ()
    """detectors that find something in its consequences"""


def healthy_rows(batch: int, batches: int) -> list[JsonObject]:
    """Two groups with a signal; from one to three of four completions are right."""
    rows = []
    for n in range(2):
        prompt = (2 * batch + n) % PROMPTS
        right = 1 + (3 * (batch - 1)) // batches
        for sample in range(G):
            text = f"completion {sample} of batch {batch}, prompt {prompt}"
            rows.append(
                row(
                    text,
                    float(sample < right),
                    step=batch,
                    policy_version=batch - 1,
                    prompt_id=prompt,
                    prompt_text=f"Question {prompt}?",
                    answer='"41"',
                    sample_index=sample,
                    staleness=0,
                    advantage=1.0 if sample < right else -1.0,
                )
            )
    return rows


def metrics_of(batch: int, rows: list[JsonObject]) -> JsonObject:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    groups = [rows[:G], rows[G:]]
    flat = [len({row["reward"] for row in group}) == 1 for group in groups]
    return {
        "step": batch,
        "policy_version": batch - 1,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "frac_reward_zero_std": sum(flat) / 2,
        "completions/mean_length": sum(len(row["token_ids"]) for row in rows) / len(rows),
        "completions/clipped_ratio": sum(not row["finished"] for row in rows) / len(rows),
        "grad_norm": 0.0 if all(flat) else 0.5,
        "entropy": 1.0 - 0.005 * batch,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/high_mean": 0.0,
        "filtered/tokens": 0.0,
        "filtered/completions": 0.0,
        "staleness/mean": 0.0,
        "staleness/max": 0,
        "weight_sync/performed": 1,
        "weight_sync/changed_fraction": 0.5,
        "rollout/kl": 0.0,
        "rollout/logp_difference_mean": 0.0,
        "time/step": 4.0,
        "time/generate": 2.0,
        "time/train": 1.5,
        "time/reward": 0.2,
        "time/sync": 0.2,
        "time/score": 0.1,
    }


def sections_of(fault: Fault) -> JsonObject:
    sections = {
        "rollout": {"num_generations": G, "max_completion_length": 100},
        "schedule": {"batches": fault.batches, "sync_every": 1},
        "optimizer": {"learning_rate": 3e-4},
    }
    for section, values in fault.sections.items():
        sections[section] = sections.get(section, {}) | values
    return sections


def batches_of(fault: Fault) -> Iterator[tuple[JsonObject, list[JsonObject]]]:
    """The metrics and the completions of each batch."""
    for batch in range(1, fault.batches + 1):
        rows = healthy_rows(batch, fault.batches)
        for completion in rows:
            fault.change_row(batch, completion)
        metrics = metrics_of(batch, rows)
        fault.change_metrics(batch, metrics)
        yield metrics, rows


def record_of(fault: Fault) -> RunRecord:
    """What `load_record` returns for the run."""
    batches = list(batches_of(fault))
    evaluations = []
    for batch, share in fault.evaluations:
        summary: JsonObject = {"step": batch, "pass@1": share, "pass@1_high": share + 0.05}
        summary |= {"reward": share, "reward_high": share + 0.05}
        summary["records"] = [{"prompt": f"Held-out question {key}"} for key in range(20)]
        evaluations.append(summary)
    return RunRecord(
        settings=flatten(load_settings(sections_of(fault)).model_dump()),
        metrics=[metrics for metrics, _ in batches],
        rollouts=[shorten(row) for _, rows in batches for row in rows],
        evaluations=evaluations,
        reward_range=(0.0, 1.0),
    )


def write_run(root: Path, fault: Fault) -> Run:
    run = make_run(root, **sections_of(fault))
    for metrics, rows in batches_of(fault):
        run.record_rollouts(metrics["step"], rows)
        run.record(metrics)
    evaluate(run, "before", 0, {key: [0.0, 1.0] for key in range(4)})
    evaluate(run, "after", fault.batches, {key: [1.0, 1.0] for key in range(4)})
    return run


def find(fault: Fault) -> tuple[Finding, ...]:
    return find_all(record_of(fault), DETECTORS)


def reward_of(value: Callable[[int, JsonObject], float]) -> Callable[[int, JsonObject], object]:
    """A change of the reward of each completion, and of what follows from it."""

    def change(batch: int, completion: JsonObject) -> None:
        completion["reward"] = value(batch, completion)

    return change


def changing(**values: object) -> Callable[[int, JsonObject], object]:
    return lambda batch, row: row.update({n.replace("__", "/"): v for n, v in values.items()})


def flat(batch: int, completion: JsonObject) -> float:
    """The rewards of a run that learns nothing."""
    return float(completion["sample_index"] < 1 + (batch * 7 + completion["prompt_id"]) % 2)


def slow_rise(batch: int, completion: JsonObject) -> float:
    """Rewards that rise over the run, but from ten batches to the next by less than chance."""
    right = 1
    if batch > 10 and batch % 2:
        right = 3
    if batch > 20 and batch % 3:
        right = 3
    return float(completion["sample_index"] < right)


def unscored(reason: str) -> Callable[[int, JsonObject], object]:
    def change(batch: int, completion: JsonObject) -> None:
        if completion["sample_index"] % 2:
            completion |= {"reward": None, "outcome": "unscored", "reason": reason}
            completion |= {"advantage": None, "excluded_reason": "unscored"}

    return change


def two_rewards(style: Callable[[JsonObject], float]) -> Callable[[int, JsonObject], object]:
    def change(batch: int, completion: JsonObject) -> None:
        exact = completion["reward"]
        completion[f"{REWARD}exact"] = exact
        completion[f"{REWARD}style"] = style(completion)
        completion["correct"] = exact == 1
        completion["reward"] = exact + completion[f"{REWARD}style"]

    return change


def end_wrong_ones_with_the_answer(batch: int, completion: JsonObject) -> None:
    completion["reward"] = flat(batch, completion)
    if not completion["reward"]:
        completion["completion"] += " is **41**."


def number_of(offsets: list[int]) -> Callable[[int, JsonObject], object]:
    """Completions that end with the number of a prompt, as far away as each sample's offset."""

    def change(batch: int, completion: JsonObject) -> None:
        prompt = completion["prompt_id"]
        number = 10 + (prompt + offsets[completion["sample_index"]]) % PROMPTS
        completion |= {"answer": f'"{10 + prompt}"', "completion": f"In batch {batch}: {number}"}
        completion["reward"] = flat(batch, completion)

    return change


def copy_right_answer(batch: int, completion: JsonObject) -> None:
    completion["reward"] = max(completion["reward"], float(completion["prompt_id"] % 2))
    if completion["reward"]:
        completion["completion"] = "41"


def draw_reward(batch: int, completion: JsonObject) -> None:
    sample = completion["sample_index"]
    completion["completion"] = f"text {sample // 2} of batch {batch}"
    completion["reward"] = float((sample + batch) % 2)


def collapse(batch: int, completion: JsonObject) -> None:
    completion["reward"] = flat(batch, completion)
    if batch > 10:
        completion |= {"completion": "7", "finished": False, "reward": 0.0}


def cut(batch: int, completion: JsonObject) -> None:
    # The wrong half of the completions, from the last on.
    if completion["sample_index"] >= 2:
        completion |= {"finished": False, "reward": 0.0}


def long(batch: int, completion: JsonObject) -> None:
    length = 40 + (batch * 50) // 40 + 5 * completion["sample_index"]
    completion |= row("".join(chr(97 + (n * n + batch) % 26) for n in range(length))) | {
        name: completion[name]
        for name in ("step", "prompt_id", "prompt_text", "sample_index", "reward", "advantage")
    }


def looping(batch: int, completion: JsonObject) -> None:
    if batch > 20:
        completion["completion"] = "very " * 100


def stale_by(updates: int, kl: float) -> Callable[[int, JsonObject], object]:
    def change(batch: int, metrics: JsonObject) -> None:
        if batch % 2:
            metrics |= {"staleness/max": updates, "staleness/mean": updates, "rollout/kl": kl}

    return change


def taught(
    distance: Callable[[int], float],
    name: str = "",
    reward: float = 0.0,
    entropy: Callable[[int], float] = lambda batch: 1.0,
    stale_kl: float | None = None,
    **others: Any,
) -> Fault:
    """A run that learns from a teacher at this distance alone; rewards are all equal."""

    def change_metrics(batch: int, metrics: JsonObject) -> None:
        metrics |= {"kl": distance(batch), "grad_norm": 0.5, "entropy": entropy(batch)}
        if stale_kl is not None:
            stale_by(4, stale_kl)(batch, metrics)

    return Fault(
        name,
        lambda batch, one: one.update(reward=reward, advantage=0.0),
        change_metrics,
        sections={"loss": {"recipe": "opd", "reference": "teacher"}},
        evaluations=(),
        **others,
    )


def answer_shown(batch: int, completion: JsonObject) -> None:
    completion["prompt_text"] += " (the answer is 41)"


def straggling(batch: int, completion: JsonObject) -> None:
    if completion["sample_index"] == 0 and completion["prompt_id"] % 2:
        completion["loss_mask"] = [True] * 600


SLOWER = {"optimizer.learning_rate": 1e-4}
REWARDS = [{"name": "exact", "reward": "exact"}, {"name": "style", "reward": "number"}]
FAULTS = [
    Fault("unscored", unscored("KeyError: 'x'")),
    Fault("unscored", unscored("no answer in time"), settings={"task.reward_timeout": 10.0}),
    Fault("too_hard", reward_of(lambda batch, one: 0.0), evaluations=()),
    Fault("too_hard", reward_of(lambda batch, one: 0.5), evaluations=()),
    Fault(
        "too_hard",
        reward_of(lambda batch, one: float(one["prompt_id"] == 3 and one["sample_index"] == 0)),
        also=("never_solved",),
        evaluations=(),
        settings={"rollout.dynamic_sampling_rounds": 2},
    ),
    Fault(
        "too_easy",
        reward_of(lambda batch, one: float(one["prompt_id"] > 0 or one["sample_index"] > 1)),
        also=("always_solved",),
        settings={"rollout.dynamic_sampling_rounds": 2},
    ),
    Fault(
        "never_solved",
        reward_of(lambda batch, one: one["reward"] if one["prompt_id"] % 2 else 0.0),
    ),
    Fault(
        "always_solved",
        reward_of(lambda batch, one: one["reward"] if one["prompt_id"] < 4 else 1.0),
    ),
    Fault(
        "constant_reward",
        two_rewards(lambda one: 0.0),
        sections={"task": {"rewards": REWARDS}},
    ),
    Fault(
        "dominant_reward",
        two_rewards(lambda one: 0.01 * one["sample_index"]),
        sections={"task": {"rewards": REWARDS}},
    ),
    Fault("rejected_answers", end_wrong_ones_with_the_answer, also=("flat_reward",)),
    Fault("unrelated_answers", number_of([0, -1, 1, 2]), also=("flat_reward",)),
    Fault("random_reward", draw_reward, also=("flat_reward",)),
    Fault("cut", cut, settings={"rollout.max_completion_length": 200}),
    Fault(
        "cut",
        lambda batch, one: one.update(finished=False, reward=0.25 * one["reward"]),
        settings={"rollout.max_completion_length": 200},
    ),
    Fault(
        "cut",
        lambda batch, one: one.update(
            finished=batch == 40 and one["sample_index"] == 0, reward=0.0
        ),
        settings={"rollout.max_completion_length": 200},
        evaluations=(),
        also=("too_hard",),
    ),
    Fault("length_drift", long, settings={"rollout.max_completion_length": 200}),
    Fault("repetition", looping),
    Fault(
        "repetition",
        lambda batch, one: collapse(batch, one) or looping(batch, one),
        settings=SLOWER,
        evaluations=(),
        also=("equal_completions", "fallen_reward"),
    ),
    Fault(
        "equal_completions",
        lambda batch, one: one.update(completion="7", reward=float(one["prompt_id"] % 2)),
        sections={"rollout": {"temperature": 0.1}},
        settings={"rollout.temperature": 1.0},
        also=("never_solved",),
    ),
    Fault(
        "equal_completions",
        collapse,
        settings=SLOWER,
        evaluations=(),
        also=("fallen_reward",),
    ),
    Fault(
        "clip",
        change_metrics=changing(clip_ratio__low_mean=0.4),
        sections={"schedule": {"sync_every": 4}},
        settings={"schedule.sync_every": 2},
    ),
    Fault("filters", change_metrics=changing(filtered__completions=0.8)),
    Fault(
        "still_weights",
        change_metrics=changing(weight_sync__changed_fraction=1e-5),
        settings={"optimizer.learning_rate": 3e-3},
    ),
    Fault(
        "still_policy",
        change_metrics=stale_by(4, 1e-9),
        settings={"optimizer.learning_rate": 3e-2},
    ),
    Fault(
        "clipped_gradient",
        change_metrics=changing(grad_norm=20.0),
        settings={"optimizer.max_grad_norm": 40.0},
    ),
    Fault(
        "mismatch",
        change_metrics=changing(rollout__logp_difference_mean=0.3),
        settings={"loss.recipe": "grpo_tis"},
    ),
    Fault("mismatch", change_metrics=changing(rollout__logp_difference_mean=5.5)),
    Fault(
        "mismatch",
        change_metrics=lambda batch, metrics: metrics.update(
            {"rollout/logp_difference_mean": 0.01 * batch}
        ),
    ),
    Fault(
        "kl",
        reward_of(flat),
        stale_by(4, 0.2),
        settings={"optimizer.scale_lr_by_kl": 0.05},
        also=("flat_reward",),
    ),
    Fault(
        "kl",
        reward_of(flat),
        stale_by(4, 0.2),
        sections={"optimizer": {"scale_lr_by_kl": 0.05}},
        settings=SLOWER,
        also=("flat_reward",),
    ),
    Fault(
        "staleness",
        change_metrics=stale_by(40, 0.01),
        settings={"loss.recipe": "prime_rl"},
    ),
    Fault(
        "falling_entropy",
        reward_of(flat),
        lambda batch, metrics: metrics.update(entropy=2 * 0.9**batch),
        settings=SLOWER,
        also=("flat_reward",),
    ),
    Fault(
        "exploded_entropy",
        reward_of(flat),
        lambda batch, metrics: metrics.update(entropy=1 + batch / 8),
        settings=SLOWER,
        also=("flat_reward",),
    ),
    Fault(
        "exploded_entropy",
        lambda batch, one: collapse(batch, one) or one.update(completion=f"{batch}, {one}"),
        lambda batch, metrics: metrics.update(entropy=1 + batch / 8),
        sections={"loss": {"entropy_coef": 1.0}},
        settings={"loss.entropy_coef": 0.1},
        evaluations=(),
        also=("fallen_reward",),
    ),
    Fault(
        "fallen_reward",
        reward_of(lambda batch, one: float(one["sample_index"] < (3 if batch <= 20 else 1))),
        settings=SLOWER,
        evaluations=(),
    ),
    Fault(
        "flat_reward",
        reward_of(flat),
        settings={"optimizer.learning_rate": 9e-4},
    ),
    taught(lambda batch: 0.0, name="flat_teacher"),
    taught(lambda batch: 0.01 * batch, name="flat_teacher", settings=SLOWER),
    taught(lambda batch: 0.3, name="flat_teacher", settings={"optimizer.learning_rate": 9e-4}),
    Fault("flat_evaluation", evaluations=((0, 0.25), (40, 0.25))),
    Fault("flat_evaluation", evaluations=((0, 0.25), (40, 0.5))),
    Fault(
        "past_best",
        evaluations=((0, 0.25), (20, 1.0), (40, 0.65)),
        settings={"eval.best_metric": "pass@1"} | SLOWER,
    ),
    Fault(
        "known_test_prompts",
        lambda batch, one: one.update(prompt_text=f"Held-out question {one['prompt_id']}"),
    ),
    Fault("answer_in_prompt", answer_shown),
    Fault("equal_prompts", lambda batch, one: one.update(prompt_text=f"{one['prompt_id'] // 5}")),
    Fault("slow_rewards", change_metrics=changing(time__reward=2.0)),
    Fault(
        "slow_syncs",
        change_metrics=changing(time__sync=2.0),
        settings={"schedule.sync_every": 2},
    ),
    Fault("stragglers", straggling, settings={"schedule.sync_every": 2}),
]


def number_names(faults: list[Fault]) -> list[str]:
    names = [fault.name for fault in faults]
    return [f"{name}-{names[:n].count(name) + 1}" for n, name in enumerate(names)]


def test_every_detector_has_a_faulty_run():
    assert {detector.name for detector in DETECTORS} == {fault.name for fault in FAULTS}


def test_page_names_every_detector():
    page = (Path(__file__).parent.parent / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert [detector.name for detector in DETECTORS if f"`{detector.name}`" not in page] == []


@pytest.mark.parametrize("fault", FAULTS, ids=number_names(FAULTS))
def test_fault_is_found_first_and_alone(fault):
    record = record_of(fault)
    first, *others = find_all(record, DETECTORS)
    assert first.detector == fault.name
    assert first.settings == pytest.approx(fault.settings)
    assert {finding.detector for finding in others} == set(fault.also)
    assert first.advice
    completions = {(row["step"], row["prompt_id"], row["sample_index"]) for row in record.rollouts}
    assert completions >= {(p.batch, p.prompt, p.sample) for p in first.places}


@pytest.mark.parametrize("batches", [1, 3, 12, 40])
def test_healthy_run_has_no_finding(batches):
    assert find(Fault("", batches=batches, evaluations=((0, 0.25), (batches, 0.75)))) == ()


HEALTHY = {
    "wrong groups that a teacher teaches": taught(lambda batch: 0.3 / batch),
    "right groups that a teacher teaches": taught(lambda batch: 0.3 / batch, reward=0.8),
    "entropy that falls toward the teacher's": taught(
        lambda batch: 0.3 / batch, entropy=lambda batch: 0.7**batch
    ),
    "policy that a teacher moves from the sampler": taught(lambda batch: 0.3 / batch, stale_kl=0.2),
    "solved prompts": Fault(
        "",
        reward_of(lambda batch, one: 1.0 if batch > 20 else float(one["sample_index"] % 2)),
        evaluations=(),
    ),
    "cut completions with the reward of others": Fault(
        "", lambda batch, one: one.update(finished=one["sample_index"] != 1)
    ),
    "number of the question as answer": Fault(
        "",
        lambda batch, one: one.update(prompt_text=f"3 + {one['prompt_id']} - 0", answer='"3"'),
    ),
    "policy that learns moves from the sampler": Fault("", change_metrics=stale_by(4, 0.2)),
    "slow learning moves from the sampler": Fault(
        "",
        reward_of(slow_rise),
        stale_by(4, 0.2),
        batches=30,
        evaluations=(),
    ),
    "reward rises in the first third alone": Fault(
        "",
        reward_of(
            lambda batch, one: float(one["sample_index"] < min(3, 1 + batch // 4) - batch % 2)
        ),
        batches=90,
        evaluations=(),
    ),
    "reward of a constant lag does not rise at once": Fault(
        "", reward_of(flat), sections={"schedule": {"constant_lag": 20}}, evaluations=()
    ),
    "policy that learns to end in time": Fault("", cut, batches=6, evaluations=()),
    "entropy that a target holds": Fault(
        "",
        change_metrics=lambda batch, metrics: metrics.update(entropy=1 + batch / 8),
        sections={"loss": {"entropy_target": 5.0}},
    ),
    "solved task moves from the sampler": Fault(
        "",
        reward_of(lambda batch, one: float(batch > 10 or one["sample_index"] > 0)),
        stale_by(4, 0.2),
    ),
    "no weight changes before the first gradient": Fault(
        "",
        change_metrics=lambda batch, metrics: metrics.update(
            {"grad_norm": 0.0, "weight_sync/changed_fraction": 0.0} if batch < 35 else {}
        ),
    ),
    "copies of the right answer": Fault("", copy_right_answer),
    "answers that are known in part": Fault(
        "", number_of([0, 0, 1, 2]), batches=20, evaluations=((0, 0.25), (20, 0.3))
    ),
    "long batches beside short ones": Fault(
        "",
        lambda batch, one: one.update(loss_mask=[True] * (600 if batch == 40 else 10)),
        sections={"rollout": {"max_completion_length": 1000}},
    ),
    "machine that is busy for some batches": Fault(
        "",
        change_metrics=lambda batch, metrics: metrics.update(
            {"time/reward": 30.0, "time/step": 36.0} if batch % 10 == 0 else {}
        ),
    ),
    "rewards that take a second": Fault(
        "", change_metrics=changing(time__reward=1.0, time__step=2.1)
    ),
    "small difference of another engine": Fault(
        "", change_metrics=changing(rollout__logp_difference_mean=0.06)
    ),
}


@pytest.mark.parametrize("fault", HEALTHY.values(), ids=HEALTHY)
def test_what_healthy_runs_have_is_no_finding(fault):
    assert find(fault) == ()


def test_wrong_completion_that_says_the_answer_stands_beside_it():
    """A completion of a group of four is `FORTY-one.`; the answer is `Forty-one`."""

    def change(batch, one):
        text = "FORTY-one." if one["sample_index"] == 2 else one["completion"]
        one.update(answer='"Forty-one"', reward=0.0, completion=text)

    first, second, *_ = find(Fault("", change, evaluations=()))
    assert (first.detector, second.detector) == ("too_hard", "rejected_answers")
    assert "'FORTY-one.' (reward 0, answer 'Forty-one')" in first.example
    assert {place.sample for place in second.places} == {2}


def test_unfinished_run_says_that_there_is_nothing_to_diagnose(tmp_path):
    run = make_run(tmp_path)
    assert "Nothing to diagnose" in str(lagrpo.diagnose(run))


def test_settings_of_a_finding_are_not_those_of_a_costlier_one():
    first, second = find(Fault("", reward_of(flat), stale_by(4, 1e-9)))
    assert (first.detector, second.detector) == ("still_policy", "flat_reward")
    assert first.settings == pytest.approx({"optimizer.learning_rate": 3e-2})
    assert second.settings == {}


def test_own_detector_joins_the_others(tmp_path):
    def find_short(record, threshold):
        shortest = min(row["length"] for row in record.rollouts)
        if shortest >= threshold:
            return None
        return Finding(f"A completion has {shortest} tokens.", cost=0.1)

    detector = Detector("short", "length", 1000, "Ask for more.", find_short)
    run = write_run(tmp_path, Fault("", batches=2))
    (finding,) = lagrpo.diagnose(run, detectors=[detector]).findings
    assert (finding.detector, finding.advice) == ("short", "Ask for more.")


def test_long_run_is_read_in_part_with_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("lagrpo.diagnosis.record.MOST_COMPLETIONS", 8 * 6)
    monkeypatch.setattr("lagrpo.diagnosis.record.SHORTEST_WINDOW", 2)
    run = write_run(tmp_path, Fault("", batches=12))
    steps = {row["step"] for row in load_record(run).rollouts}
    # Every second batch of twelve, and the ends.
    assert steps == {1, 2, 3, 5, 7, 9, 11, 12}


def test_command_prints_findings_as_text_and_as_json(tmp_path, capsys):
    run = write_run(tmp_path, Fault("", cut, batches=10, evaluations=()))
    cli.main(["diagnose", str(run.path)])
    text = capsys.readouterr().out
    assert "--rollout.max_completion_length 200" in text
    assert "batch 10, prompt" in text
    cli.main(["diagnose", str(run.path), "--json"])
    diagnosis = json.loads(capsys.readouterr().out)
    assert [finding["detector"] for finding in diagnosis["findings"]] == ["cut"]
    assert diagnosis["findings"][0]["settings"] == {"rollout.max_completion_length": 200}


def test_command_of_a_directory_without_a_run_is_wrong_input(tmp_path):
    with pytest.raises(SystemExit) as end:
        cli.main(["diagnose", str(tmp_path)])
    assert end.value.code == 2
    with pytest.raises(RunNotFoundError):
        lagrpo.diagnose(tmp_path)


def watch(fault: Fault, caplog) -> list[str]:
    """The warnings of a watch that follows a run."""
    settings = load_settings(sections_of(fault)).model_dump()
    settings["task"]["reward_range"] = (0.0, 1.0)
    watching = FaultWatch()
    watching.on_start(settings, {}, 0)
    for metrics, rows in batches_of(fault):
        watching.on_batch(metrics, rows)
    assert watching.is_active
    return [record.getMessage() for record in caplog.records]


def test_watch_says_nothing_of_a_healthy_run(caplog):
    assert watch(Fault(""), caplog) == []


def test_watch_warns_once_of_a_grave_fault(caplog):
    (warning,) = watch(Fault("", reward_of(lambda batch, one: 0.0)), caplog)
    assert "all wrong" in warning


def test_watch_waits_with_faults_that_may_pass(caplog):
    assert watch(Fault("", cut, batches=15), caplog) == []


def test_detector_that_raises_ends_the_watch_and_not_the_run(tmp_path, caplog, monkeypatch):
    def fail(record, threshold):
        raise ZeroDivisionError

    detector = Detector("broken", "", math.nan, "", fail)
    monkeypatch.setattr("lagrpo.lifecycle.callbacks.DETECTORS", [detector])
    watching = FaultWatch()
    watching.on_start({"schedule": {"sync_every": 1}, "task": {"reward_range": (0, 1)}}, {}, 0)
    for batch in range(1, 11):
        watching.on_batch({"step": batch}, [])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_run_shows_a_grave_finding_while_it_trains(model, tmp_path, capsys):
    task = {"rewards": ["exact"]}
    settings = tiny_settings(model, tmp_path, task=task, schedule={"batches": 5})
    settings["eval"] = {"at_start": False}
    result = training_run.train(load_settings(settings))
    assert "all wrong" in capsys.readouterr().out
    assert lagrpo.diagnose(result.run).findings[0].detector == "too_hard"
