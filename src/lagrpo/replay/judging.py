"""What the task and its tokenizer say: which prompt stands where, what the model read, how a completion ended, what its
text is, and every reward judged again, in training and in evaluations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import comb
from pathlib import Path
from typing import Any

import torch

from lagrpo.replay.episodes import check_episodes, check_turns
from lagrpo.replay.findings import Check, Report, UnreadableError
from lagrpo.replay.formulas import mean_or_none
from lagrpo.replay.source import Row, Source, groups_of
from lagrpo.replay.weights import Weights
from lagrpo.tasks import Task, load_task, order_prompts
from lagrpo.tasks.base import Make
from lagrpo.tasks.environments import load_environment
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import Verifier

EXACT = 1e-12  # relative: means of float64
_BY_MACHINE = ("no verdict within ", "the worker process ")  # how reasons begin that another machine may not give


Tasks = Callable[[int], Task | None]
"""The task of a batch; None where it cannot be had."""


def tasks_of(source: Source, task: Task | None, report: Report) -> Tasks:
    """The task of each batch, with the reason in the report where it cannot be had."""
    if task is not None:
        return lambda batch: task
    loaded: list[tuple[Any, Task | None]] = []
    for era in source.eras:
        if era.settings.task not in [settings for settings, _ in loaded]:
            loaded.append((era.settings.task, load(source, era, report)))
    return lambda batch: next(own for settings, own in loaded if settings == source.at(batch).settings.task)


def load(source: Source, era: Source, report: Report) -> Task | None:
    """The task of an era of a run."""
    why = "the run was given a task of the caller's own: pass it to lagrpo.replay.verify_run"
    if not source.own_task:
        try:
            return load_task(era.settings.task, era.settings.run.seed)
        except (ValueError, TypeError, ImportError, OSError) as error:
            why = f"the task cannot be loaded: {error}"
    of_it = [batch for batch in source.batches if source.at(batch).settings.task == era.settings.task]
    report.skip("prompts and rewards: completions", why, sum(len(source.batches[batch]) for batch in of_it))
    return None


def environment_of(source: Source, task: Task) -> Make | None:
    """What made the environments of a run's completions; None where they had one turn."""
    return load_environment(source.settings.environment, task)


def check_texts(source: Source, weights: Weights, tasks: Tasks, rows: Sequence[Row], report: Report) -> None:
    """Prompts against the task, ends and texts against the tokenizer."""
    try:
        tokenizer, eos_ids = weights.tokenizer()
    except (OSError, ValueError) as error:
        report.skip("prompts, ends and texts: completions", f"no tokenizer: {error}", len(rows))
        return
    if known := [row for row in rows if tasks(row["batch"]) is not None]:
        check_prompts(source, tokenizer, tasks, known, report)
    check_ends(source, tokenizer, eos_ids, rows, report)


def check_prompts(source: Source, tokenizer: Any, tasks: Tasks, rows: Sequence[Row], report: Report) -> None:
    """Which prompts a batch has, a function of the seed and the batch; their gold; their tokens by the template."""
    found = report.check("prompts", note="which, their gold, their tokens")
    order = cache(lambda epoch, size: order_prompts(source.settings.run.seed, epoch, size))
    before: Counter[int] = Counter()  # groups of a batch so far
    for first in (members[0] for members in groups_of(rows) if members[0]["source"] == "sampler"):
        batch, key = first["batch"], first["prompt_key"]
        task = tasks(batch)
        assert task is not None
        size = task.size("train")
        if first["epoch"] >= 0:  # a negative one stands for another prompt, drawn in its place
            epoch, position = divmod((batch - 1) * source.at(batch).fresh + before[batch], size)
            recorded, expected = [first["epoch"], key], [epoch, order(epoch, size)[position]]
            found.equal(first.file, first.place, "epoch and prompt_key", recorded, expected)
        before[batch] += 1
        if not 0 <= key < size:
            found.equal(first.file, first.place, "prompt_key", key, f"one of 0 .. {size - 1}")
            continue
        prompt = task.prompt("train", key)
        gold = json.dumps(prompt.gold, ensure_ascii=False)
        found.equal(first.file, first.place, "gold", first["gold"], gold)
        if environment_of(source.at(batch), task) is not None:
            report.skip("prompts: tokens", "an environment opens the conversation")
            continue
        tokens = templated(tokenizer, prompt)
        found.equal(first.file, first.place, "prompt_token_ids", first["prompt_token_ids"], tokens)


def templated(tokenizer: Any, prompt: Any) -> list[int]:
    """A prompt as the model reads it: by the chat template, or as plain text where there is none."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in prompt.messages))["input_ids"])
    messages = [dict(message) for message in prompt.messages]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def check_ends(source: Source, tokenizer: Any, eos_ids: set[int], rows: Sequence[Row], report: Report) -> None:
    """A completion ends at its first end-of-sequence token, or at the limit; its text is its tokens decoded."""
    found = report.check("ends and texts")
    own = [row for row in rows if row.generated]
    check_turns(tokenizer, [row for row in own if row["turns"]], found)
    for row in (row for row in own if not row["turns"]):
        tokens, most = row["token_ids"], source.at(row["batch"]).settings.sampling.max_tokens
        end = next((t for t, token in enumerate(tokens, start=1) if token in eos_ids), None)
        found.equal(row.file, row.place, "number of tokens", len(tokens), end or most)
        found.equal(row.file, row.place, "finished", row["finished"], end is not None)
        found.equal(row.file, row.place, "text", row["text"], tokenizer.decode(tokens, skip_special_tokens=True))
    report.skip("ends and texts: completions", "failed, or offline data", len(rows) - len(own))


def check_rewards(source: Source, tasks: Tasks, rows: Sequence[Row], report: Report) -> None:
    """Rewards and reasons of the rollouts, then the evaluations."""
    settings = source.settings.verifier.model_copy(update={"max_without_reward": 1.0}).of_a_batch
    own = [row for row in rows if row.generated]
    report.skip("rewards: completions", "failed, or offline data", len(rows) - len(own))
    found: Check | None = None
    for task in distinct_tasks(source, tasks):
        with Verifier(task.judge, **settings) as judges:
            found = found or report.check("rewards")
            judged = [row for row in own if tasks(row["batch"]) is task and not row["turns"]]
            verdicts = judge_answers(judges, ((row["text"], json.loads(row["gold"])) for row in judged))
            for row, verdict in zip(judged, verdicts, strict=True):
                compare(found, row.file, row.place, Outcome(row["outcome"], row["reward"], row["reason"]), verdict)
            check_evaluations(source, tasks, task, judges, report)
        talked = [row for row in own if tasks(row["batch"]) is task and row["turns"]]
        for era in source.eras if talked else ():
            if (make := environment_of(era, task)) is not None:
                check_episodes(era, make, task, [row for row in talked if source.at(row["batch"]) is era], report)
    if found is not None:
        check_missing_evaluations(source, report)


def distinct_tasks(source: Source, tasks: Tasks) -> list[Task]:
    """The tasks that a run had, each once, in their order."""
    ends = [0, *(resumption.batch + 1 for resumption in source.resumptions)]
    return list({id(task): task for task in map(tasks, ends) if task is not None}.values())


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
    """An outcome and the one that judging again gives. A verdict that did not come in time on either side, or whose
    process ended, decides nothing: that depends on the machine."""
    if recorded.kind == verdict.kind == "scored":
        found.near(file, place, "reward", recorded.reward, verdict.reward, 0.0)
    elif recorded.kind != verdict.kind and any(o.reason.startswith(_BY_MACHINE) for o in (recorded, verdict)):
        found.compared += 1
        found.undecided += 1
    else:
        found.equal(file, place, "outcome", recorded.kind, verdict.kind)


def check_evaluations(source: Source, tasks: Tasks, task: Task, judges: Verifier, report: Report) -> None:
    """The evaluations that were made with this task."""
    for summary in source.evaluations:
        batch = summary.get("batch") or 0
        if tasks(batch) is not task:
            continue
        if environment_of(source.at(batch), task) is not None:
            report.skip("evaluations", "completions had several turns, which are recorded as one text")
        elif asked(source.at(batch)) != asked(source.at(batch + 1)):
            why = "the settings were changed after their batch: they were made before that or after it"
            report.skip("evaluations", why)
        else:
            check_evaluation(source.at(batch), task, judges, summary, report)


def asked(source: Source) -> tuple[Any, ...]:
    """What an evaluation depends on."""
    settings = source.settings
    return settings.evaluation.model_copy(update={"every": 0, "before_and_after": True}), settings.task


def check_missing_evaluations(source: Source, report: Report) -> None:
    """Whether an evaluation is missing. The last batch may have ended before its own."""
    done = max(source.metrics, default=0)
    expected = ["before"] if all(source.at(b).settings.evaluation.before_and_after for b in (0, 1)) else []
    for b in range(1, done):
        every = [source.at(around).settings.evaluation.every for around in (b, b + 1)]
        expected += [f"batch-{b:06d}"] if all(n and b % n == 0 for n in every) else []
    if missing := [name for name in expected if name not in {summary["name"] for summary in source.evaluations}]:
        found = report.check("evaluations that are missing")
        for name in missing:
            found.equal(f"evaluations/{name}.json", "", "the file", "missing", "there")


def check_evaluation(source: Source, task: Task, judges: Verifier, summary: dict[str, Any], report: Report) -> None:
    """The completions of an evaluation judged again, and its means and pass@k from their rewards. The completions are
    recorded as text alone, so their samples are not replayed."""
    name = summary["name"]
    file = f"evaluations/{name}.parquet"
    found = report.check(f"evaluation {name}", note="prompts, rewards judged again, means, pass@k")
    records = read_records(source.path / file)
    check_held_out(source, task, found, file, records)
    records = [record for record in records if 0 <= record["prompt_key"] < task.size("test")]
    golds = [task.prompt("test", record["prompt_key"]).gold for record in records]
    places = [f"row {n} (prompt {record['prompt_key']})" for n, record in enumerate(records)]
    answers = [(n, j, text) for n, record in enumerate(records) for j, text in enumerate(record["completions"])]
    verdicts = judge_answers(judges, ((text, golds[n]) for n, _, text in answers))
    for (n, j, _), verdict in zip(answers, verdicts, strict=True):
        reward = records[n]["rewards"][j]
        recorded = Outcome.unscored("") if reward is None else Outcome.scored(reward)
        compare(found, file, f"{places[n]}, completion {j}", recorded, verdict)
    for place, record in zip(places, records, strict=True):
        check_record(found, file, place, record, source.settings.task.reward_range[1])
    check_summary(source, found, summary, records)
    report.skip("evaluations: samples", "their token ids are not recorded", len(answers))


def check_held_out(source: Source, task: Task, found: Check, file: str, records: Sequence[dict[str, Any]]) -> None:
    """Which prompts were held out, and what they ask."""
    size = task.size("test")
    order = order_prompts(source.settings.run.seed, -1, size)[: source.settings.evaluation.prompts]
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
    right = [reward >= best for reward in rewards]
    found.equal(file, place, "scored", record["scored"], len(rewards))
    found.equal(file, place, "right", record["right"], sum(right))
    check_mean(found, file, place, "reward_mean", record, rewards)
    check_mean(found, file, place, "pass_at_1", record, right)


def check_summary(source: Source, found: Check, summary: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    """After which batch the evaluation was made, and of which version; means over prompts, and
    pass@k = 1 - C(n - c, k) / C(n, k) averaged over the prompts with n >= k."""
    name, done, samples = summary["name"], max(source.metrics, default=0), source.settings.evaluation.samples
    file = f"evaluations/{name}.json"
    last = int(name.removeprefix("batch-")) if name.startswith("batch-") else 0 if name == "before" else done
    without_reward = sum(r["samples"] - r["scored"] for r in records)
    known = {"batch": last, "prompts": len(records), "samples": samples, "without_reward": without_reward}
    if last + 1 in source.metrics:
        known["version"] = source.metrics[last + 1][1]["version"]
    for key, value in known.items():
        found.equal(file, "", key, summary.get(key), value)
    check_mean(found, file, "", "reward_mean", summary, [r["reward_mean"] for r in records if r["scored"]])
    tries = [(r["scored"], r["right"]) for r in records]
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        values = [1 - comb(n - c, k) / comb(n, k) for n, c in tries if n >= k]
        check_mean(found, file, "", f"pass_at_{k}", summary, values)


def check_mean(found: Check, file: str, place: str, name: str, recorded: dict[str, Any], values: list[float]) -> None:
    mean = mean_or_none(values)
    found.near(file, place, name, recorded.get(name), mean, EXACT * (1 + abs(mean or 0.0)))
