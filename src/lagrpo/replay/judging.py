"""What the task and its tokenizer say: which prompt stands where, what the model read, how a completion ended, what its
text is, and every reward judged again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from lagrpo.replay import evaluations
from lagrpo.replay.episodes import check_episodes, check_turns, environment_of
from lagrpo.replay.findings import Check, Report
from lagrpo.replay.source import Row, Source, groups_of
from lagrpo.replay.verdicts import ASKED, Judging, Tasks, compare, judging_again, of
from lagrpo.replay.weights import Weights
from lagrpo.runs.rollouts import reward_columns
from lagrpo.tasks import Task, load_task, order_prompts
from lagrpo.tasks.rewards import Answer
from lagrpo.types import Outcome


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
    own = [row for row in rows if row.generated]
    report.skip("rewards: completions", "failed, or offline data", len(rows) - len(own))
    found: Check | None = None
    for task in distinct_tasks(source, tasks):
        found = found or report.check("rewards")
        judged = [row for row in own if tasks(row["batch"]) is task and not row["turns"]]
        with judging_again(source, task.judge) as judges:
            check_rollouts(found, task.judge, judges, judged, report)
            evaluations.check(source, tasks, task, judges, report)
        talked = [row for row in own if tasks(row["batch"]) is task and row["turns"]]
        for era in source.eras if talked else ():
            if (make := environment_of(era, task)) is not None:
                check_episodes(era, make, task, [row for row in talked if source.at(row["batch"]) is era], report)
    if found is not None:
        evaluations.check_missing(source, report)


def check_rollouts(found: Check, judge: Any, judges: Judging, rows: Sequence[Row], report: Report) -> None:
    """The rewards of these rows."""
    groups = list(groups_of(rows))
    answers = ([Answer(r["text"], json.loads(r["gold"]), (), r.length, r["finished"]) for r in g] for g in groups)
    verdicts = judges(answers)
    for row, verdict in zip((row for members in groups for row in members), verdicts, strict=True):
        parts = reward_columns(row.columns)
        recorded = Outcome(row["outcome"], row["reward"], row["reason"], parts, row.columns.get("right"))
        compare(found, row.file, row.place, recorded, verdict, judge)
    report.skip("rewards: values", ASKED, len(rows) * sum(not reward.repeats for reward in of(judge)))


def distinct_tasks(source: Source, tasks: Tasks) -> list[Task]:
    """The tasks that a run had, each once, in their order."""
    ends = [0, *(resumption.batch + 1 for resumption in source.resumptions)]
    return list({id(task): task for task in map(tasks, ends) if task is not None}.values())
