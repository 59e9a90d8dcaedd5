"""Rewards: every completion judged again by the task's judge, in training and in evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from math import comb
from pathlib import Path
from typing import Any

import torch

from lagrpo.replay.findings import Check, Report, UnreadableError
from lagrpo.replay.source import Row, Source
from lagrpo.runs import load_evaluations
from lagrpo.tasks import Task, load_task, order_prompts
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import Verifier

EXACT = 1e-12  # relative: means of float64


def task_of(source: Source, task: Task | None, report: Report) -> Task | None:
    """The task of the run; None, with the reason in the report, where it cannot be had."""
    if task is not None:
        return task
    why = "the run was given a task of the caller's own: pass it to lagrpo.replay.verify_run"
    if not source.own_task:
        try:
            return load_task(source.settings.task, source.settings.run.seed)
        except (ValueError, TypeError, ImportError, OSError) as error:
            why = f"the task cannot be loaded: {error}"
    report.skip("prompts and rewards: completions", why, sum(1 for _ in source.rows))
    return None


def check(source: Source, task: Task | None, rows: Sequence[Row], report: Report) -> None:
    """Rewards and reasons of the rollouts, then the evaluations."""
    if task is None:
        return
    settings = source.settings.verifier
    own = [row for row in rows if row.generated]
    report.skip("rewards: completions", "failed, or offline data", len(rows) - len(own))
    with Verifier(task.judge, workers=settings.workers, deadline=settings.deadline, max_without_reward=1.0) as judges:
        found = report.check("rewards")
        verdicts = judge_answers(judges, ((row["text"], json.loads(row["gold"])) for row in own))
        for row, verdict in zip(own, verdicts, strict=True):
            recorded = Outcome(row["outcome"], row["reward"], row["reason"])
            compare(found, row.file, row.place, recorded, verdict)
        check_evaluations(source, task, judges, report)


def judge_answers(judges: Verifier, answers: Iterable[tuple[str, Any]]) -> Iterator[Outcome]:
    """The outcome of each (text, gold)."""
    none = torch.empty(0)
    groups = (
        Group(Prompt(n, (), gold), (Completion(none, none, none, finished=True, text=text),))
        for n, (text, gold) in enumerate(answers)
    )
    for group in judges.judge(groups):
        outcome = group.completions[0].outcome
        assert outcome is not None
        yield outcome


def compare(found: Check, file: str, place: str, recorded: Outcome, verdict: Outcome) -> None:
    """An outcome and the one that judging again gives. A verdict that did not come in time on either side decides
    nothing: that depends on the machine."""
    if recorded.kind == verdict.kind == "scored":
        found.near(file, place, "reward", recorded.reward, verdict.reward, 0.0)
    elif recorded.kind != verdict.kind and any("no verdict within" in o.reason for o in (recorded, verdict)):
        found.compared += 1
        found.undecided += 1
    else:
        found.equal(file, place, "outcome", recorded.kind, verdict.kind)


def check_evaluations(source: Source, task: Task, judges: Verifier, report: Report) -> None:
    """The completions of each evaluation judged again, and its means and pass@k from their rewards. The completions
    are recorded as text alone, so their samples are not replayed."""
    found_names = []
    for summary in summaries(source):
        name = summary["name"]
        found_names.append(name)
        file = f"evaluations/{name}.parquet"
        found = report.check(f"evaluation {name}", note="prompts, rewards judged again, means, pass@k")
        records = read_records(source.path / file)
        check_prompts(source, task, found, file, records)
        records = [record for record in records if 0 <= record["prompt_key"] < task.size("test")]
        answers = [(n, j, text) for n, record in enumerate(records) for j, text in enumerate(record["completions"])]
        golds = [task.prompt("test", record["prompt_key"]).gold for record in records]
        for (n, j, _), verdict in zip(
            answers, judge_answers(judges, ((t, golds[n]) for n, _, t in answers)), strict=True
        ):
            reward = records[n]["rewards"][j]
            recorded = Outcome.unscored("") if reward is None else Outcome.scored(reward)
            compare(found, file, f"row {n} (prompt {records[n]['prompt_key']}), completion {j}", recorded, verdict)
        for n, record in enumerate(records):
            check_record(found, file, n, record, source.settings.task.reward_range[1])
        check_place(source, found, f"evaluations/{name}.json", summary)
        check_summary(found, f"evaluations/{name}.json", summary, records, source.settings.evaluation.samples)
        report.skip("evaluations: samples", "their token ids are not recorded", len(answers))
    if missing := [name for name in expected_names(source) if name not in found_names]:
        found = report.check("evaluations that are missing")
        for name in missing:
            found.equal(f"evaluations/{name}.json", "", "the file", "missing", "there")


def expected_names(source: Source) -> list[str]:
    """The evaluations that a run with these batches has made. The last batch may have ended before its own."""
    settings, done = source.settings.evaluation, max(source.metrics, default=0)
    before = ["before"] if settings.before_and_after else []
    return before + [f"batch-{b:06d}" for b in range(1, done) if settings.every and b % settings.every == 0]


def check_prompts(source: Source, task: Task, found: Check, file: str, records: Sequence[dict[str, Any]]) -> None:
    """Which prompts were held out, and what they ask."""
    size = task.size("test")
    order = order_prompts(source.settings.run.seed, -1, size)[: source.settings.evaluation.prompts]
    found.equal(file, "", "prompt_key of all rows", [record["prompt_key"] for record in records], sorted(order))
    for n, record in enumerate(records):
        if 0 <= (key := record["prompt_key"]) < size:
            prompt, place = task.prompt("test", key), f"row {n} (prompt {key})"
            found.equal(file, place, "prompt", record["prompt"], prompt.messages[-1]["content"])
            found.equal(file, place, "gold", record["gold"], str(prompt.gold))


def check_place(source: Source, found: Check, file: str, summary: dict[str, Any]) -> None:
    """After which batch the evaluation was made, and of which version."""
    name, done = summary["name"], max(source.metrics, default=0)
    last = int(name.removeprefix("batch-")) if name.startswith("batch-") else 0 if name == "before" else done
    found.equal(file, "", "batch", summary.get("batch"), last)
    if last + 1 in source.metrics:
        found.equal(file, "", "version", summary.get("version"), source.metrics[last + 1][1]["version"])


def summaries(source: Source) -> list[dict[str, Any]]:
    """The summaries of the run's evaluations. Raises UnreadableError for a file that is not JSON."""
    try:
        return load_evaluations(source.path)
    except (ValueError, KeyError) as error:
        raise UnreadableError(f"{source.path / 'evaluations'}: a summary cannot be read: {error}") from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of an evaluation. Raises UnreadableError where the file is missing or not whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UnreadableError(f"{path} is no whole Parquet file: {error}") from error


def check_record(found: Check, file: str, n: int, record: dict[str, Any], best: float) -> None:
    """The counts and means of one prompt."""
    rewards = [reward for reward in record["rewards"] if reward is not None]
    right = [reward >= best for reward in rewards]
    place = f"row {n} (prompt {record['prompt_key']})"
    found.equal(file, place, "scored", record["scored"], len(rewards))
    found.equal(file, place, "right", record["right"], sum(right))
    check_mean(found, file, place, "reward_mean", record, rewards)
    check_mean(found, file, place, "pass_at_1", record, right)


def check_summary(
    found: Check, file: str, summary: dict[str, Any], records: Sequence[dict[str, Any]], samples: int
) -> None:
    """Means over prompts, and pass@k = 1 - C(n - c, k) / C(n, k) averaged over the prompts with n >= k."""
    without_reward = sum(r["samples"] - r["scored"] for r in records)
    counts = {"prompts": len(records), "samples": samples, "without_reward": without_reward}
    for name, count in counts.items():
        found.equal(file, "", name, summary.get(name), count)
    check_mean(found, file, "", "reward_mean", summary, [r["reward_mean"] for r in records if r["scored"]])
    tries = [(r["scored"], r["right"]) for r in records]
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        values = [1 - comb(n - c, k) / comb(n, k) for n, c in tries if n >= k]
        check_mean(found, file, "", f"pass_at_{k}", summary, values)


def check_mean(
    found: Check, file: str, place: str, name: str, recorded: dict[str, Any], values: Sequence[float]
) -> None:
    """The mean of values, None over nothing."""
    mean = sum(values) / len(values) if values else None
    found.near(file, place, name, recorded.get(name), mean, EXACT * (1 + abs(mean or 0.0)))
