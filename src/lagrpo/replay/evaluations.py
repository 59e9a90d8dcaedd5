"""Evaluations: their prompts, their rewards judged again, and what follows from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from lagrpo.replay.episodes import environment_of
from lagrpo.replay.findings import Check, Report, UnreadableError
from lagrpo.replay.formulas import mean_or_none
from lagrpo.replay.source import Source
from lagrpo.replay.verdicts import ASKED, Judging, Tasks, compare, judging_again, of
from lagrpo.runs.rollouts import reward_columns
from lagrpo.settings.evaluation import EvaluationSet
from lagrpo.tasks import Task, load_task, order_prompts
from lagrpo.tasks.base import TaskWithEnvironment
from lagrpo.tasks.rewards import Answer
from lagrpo.types import Outcome

EXACT = 1e-12  # relative: means of float64
FREE = ("every", "before_and_after", "sampler", "best", "best_is")
"""Settings of evaluations on which no result depends."""
TURNS = "completions had several turns, which are recorded as one text"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an evaluation asked, and of whom."""

    task: Task
    prompts: int
    samples: int
    best: float
    """the greatest reward"""


def check(source: Source, tasks: Tasks, task: Task, judges: Judging, report: Report) -> None:
    """The evaluations that were made while this was the run's task."""
    for summary in source.evaluations:
        batch = summary.get("batch") or 0
        if tasks(batch) is not task:
            continue
        era = source.at(batch)
        if asked(era) != asked(source.at(batch + 1)):
            why = "the settings were changed after their batch: they were made before that or after it"
            report.skip("evaluations", why)
        else:
            check_one(era, task, judges, summary, report)


def asked(source: Source) -> tuple[Any, ...]:
    """What an evaluation depends on."""
    settings = source.settings
    return settings.evaluation.model_dump(exclude={*FREE}), settings.task


def check_one(source: Source, task: Task, judges: Judging, summary: dict[str, Any], report: Report) -> None:
    """One evaluation, of a set or the only one; a set with a task of its own has judges of its own."""
    e, own = source.settings.evaluation, source.settings.task
    one = next((each for each in e.sets if each.name == summary.get("set")), None)
    if one is None and summary.get("set") is not None:
        return report.skip("evaluations", "their set is not in the settings")
    counts = (one and one.prompts) or e.prompts, (one and one.samples) or e.samples
    if one is None or one.task is None:
        if environment_of(source, task) is not None:
            return report.skip("evaluations", TURNS)
        return check_evaluation(source, Asked(task, *counts, own.reward_range[1]), judges, summary, report)
    try:
        other = load_task(one.task, source.settings.run.seed)
    except (ValueError, TypeError, ImportError, OSError) as error:
        return report.skip("evaluations", f"the task of the set {one.name} cannot be loaded: {error}")
    if isinstance(other, TaskWithEnvironment):
        return report.skip("evaluations", TURNS)
    with judging_again(source, other.judge) as own_judges:
        exam = Asked(other, *counts, one.task.reward_range[1])
        check_evaluation(source, exam, own_judges, summary, report)


def check_missing(source: Source, report: Report) -> None:
    """Whether an evaluation is missing. The last batch may have ended before its own."""
    done, expected = max(source.metrics, default=0), list[str]()
    for b in range(done):
        for one in source.at(b).settings.evaluation.sets or [None]:
            behind = f".{one.name}" if one is not None else ""
            if b == 0:
                around = all(source.at(near).settings.evaluation.before_and_after for near in (0, 1))
                expected += [f"before{behind}"] if around else []
            elif all(n and b % n == 0 for n in (_every(source.at(near), one) for near in (b, b + 1))):
                expected.append(f"batch-{b:06d}{behind}")
    if missing := [name for name in expected if name not in {summary["name"] for summary in source.evaluations}]:
        found = report.check("evaluations that are missing")
        for name in missing:
            found.equal(f"evaluations/{name}.json", "", "the file", "missing", "there")


def _every(source: Source, one: EvaluationSet | None) -> int:
    """Batches between the evaluations of a set; 0 where the run had no such set."""
    e = source.settings.evaluation
    if one is None:
        return e.every
    named = next((each for each in e.sets if each.name == one.name), None)
    return 0 if named is None else e.every if named.every is None else named.every


def check_evaluation(source: Source, exam: Asked, judges: Judging, summary: dict[str, Any], report: Report) -> None:
    """The completions of an evaluation judged again, and its means and pass@k from their rewards. The completions are
    recorded as text alone, so their samples are not replayed."""
    name, task = summary["name"], exam.task
    file = f"evaluations/{name}.parquet"
    found = report.check(f"evaluation {name}", note="prompts, rewards judged again, means, pass@k")
    records = read_records(source.path / file)
    check_held_out(source, exam, found, file, records)
    records = [record for record in records if 0 <= record["prompt_key"] < task.size("test")]
    golds = [task.prompt("test", record["prompt_key"]).gold for record in records]
    places = [f"row {n} (prompt {record['prompt_key']})" for n, record in enumerate(records)]
    answers = [answers_of(record, gold) for record, gold in zip(records, golds, strict=True)]
    verdicts = judges(answers)
    for place, record in zip(places, records, strict=True):
        for j in range(len(record["completions"])):
            compare(found, file, f"{place}, completion {j}", recorded_outcome(record, j), next(verdicts), task.judge)
        check_record(found, file, place, record, exam.best)
    check_summary(source, exam, found, summary, records)
    completions = sum(map(len, answers))
    report.skip("rewards: values", ASKED, completions * sum(not reward.repeats for reward in of(task.judge)))
    report.skip("evaluations: samples", "their token ids are not recorded", completions)


def answers_of(record: dict[str, Any], gold: Any) -> list[Answer]:
    """The completions of a prompt."""
    tokens = record.get("tokens") or [0] * len(record["completions"])
    return [Answer(text, gold, (), length) for text, length in zip(record["completions"], tokens, strict=True)]


def recorded_outcome(record: dict[str, Any], j: int) -> Outcome:
    """What is recorded of completion j of a prompt."""
    parts = {name: values[j] for name, values in reward_columns(record).items() if isinstance(values, list)}
    reward, right = record["rewards"][j], record.get("is_right", [None] * (j + 1))[j]
    return Outcome("unscored" if reward is None else "scored", reward, "", parts, right)


def check_held_out(source: Source, exam: Asked, found: Check, file: str, records: Sequence[dict[str, Any]]) -> None:
    """Which prompts were held out, and what they ask."""
    task = exam.task
    size = task.size("test")
    order = order_prompts(source.settings.run.seed, -1, size)[: exam.prompts]
    found.equal(file, "", "prompt_key of all rows", [record["prompt_key"] for record in records], sorted(order))
    for n, record in enumerate(records):
        if 0 <= (key := record["prompt_key"]) < size:
            prompt, place = task.prompt("test", key), f"row {n} (prompt {key})"
            found.equal(file, place, "prompt", record["prompt"], prompt.messages[-1]["content"])
            found.equal(file, place, "gold", record["gold"], str(prompt.gold))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of an evaluation. Raises UnreadableError where the file is missing or not whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UnreadableError(f"{path} is no whole Parquet file: {error}") from error


def check_record(found: Check, file: str, place: str, record: dict[str, Any], best: float) -> None:
    """The counts and means of one prompt."""
    rewards = [reward for reward in record["rewards"] if reward is not None]
    decided = record.get("is_right") or [None] * len(record["rewards"])
    right = [
        reward >= best if called is None else called
        for reward, called in zip(record["rewards"], decided, strict=True)
        if reward is not None
    ]
    found.equal(file, place, "scored", record["scored"], len(rewards))
    found.equal(file, place, "right", record["right"], sum(right))
    check_mean(found, file, place, "reward_mean", record, rewards)
    check_mean(found, file, place, "pass_at_1", record, right)


def check_summary(
    source: Source, exam: Asked, found: Check, summary: dict[str, Any], records: Sequence[dict[str, Any]]
) -> None:
    """After which batch the evaluation was made, and of which version; means over prompts, and
    pass@k = 1 - C(n - c, k) / C(n, k) averaged over the prompts with n >= k."""
    name, done, samples = summary["name"], max(source.metrics, default=0), exam.samples
    file = f"evaluations/{name}.json"
    moment = name.partition(".")[0]
    last = int(moment.removeprefix("batch-")) if moment.startswith("batch-") else 0 if moment == "before" else done
    without_reward = sum(r["samples"] - r["scored"] for r in records)
    known = {"batch": last, "prompts": len(records), "samples": samples, "without_reward": without_reward}
    if last + 1 in source.metrics:
        known["version"] = source.metrics[last + 1][1]["version"]
    for key, value in known.items():
        found.equal(file, "", key, summary.get(key), value)
    check_mean(found, file, "", "reward_mean", summary, [r["reward_mean"] for r in records if r["scored"]])
    for reward in of(exam.task.judge):
        values = [[value for value in r[f"reward_{reward.name}"] if value is not None] for r in records]
        means = [sum(each) / len(each) for each in values if each]
        check_mean(found, file, "", f"reward_{reward.name}_mean", summary, means)
    tries = [(r["scored"], r["right"]) for r in records]
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        values = [1 - comb(n - c, k) / comb(n, k) for n, c in tries if n >= k]
        check_mean(found, file, "", f"pass_at_{k}", summary, values)


def check_mean(found: Check, file: str, place: str, name: str, recorded: dict[str, Any], values: list[float]) -> None:
    mean = mean_or_none(values)
    found.near(file, place, name, recorded.get(name), mean, EXACT * (1 + abs(mean or 0.0)))
