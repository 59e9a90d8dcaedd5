"""What the task and the tokenizer say: prompts, texts, rewards, and the evaluations that follow from rewards."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import comb
from typing import Any, NamedTuple

import torch

from lagrpo.replay.record import RecordedRun, Report, Row, groups_of, is_generated
from lagrpo.replay.rows import mean
from lagrpo.replay.tokens import Weights
from lagrpo.rewards.pool import BY_MACHINE, RewardPool
from lagrpo.rng import permutation
from lagrpo.runs.rollouts import reward_columns
from lagrpo.tasks import Rewards, Task, load_task
from lagrpo.tasks.base import StepResult, TaskWithEnvironment
from lagrpo.tasks.environments import load_environment
from lagrpo.types import Completion, Group, Outcome, Prompt


class Scored(NamedTuple):
    """A recorded reward, with what is needed to give it again."""

    check: str
    where: str
    prompt: Prompt
    completion: Completion
    recorded: dict[str, Any]


def check_rewards(run: RecordedRun, weights: Weights, rows: Sequence[Row], task: Task | None, report: Report) -> None:
    """Prompts, ends and texts of the rollouts; then the rewards of rollouts and evaluations."""
    own = [row for row in rows if is_generated(row)]
    report.skip("texts and rewards of completions: failed, or offline data", len(rows) - len(own))
    task = task if task is not None else find_task(run, report)
    make = load_environment(run.settings.environment, task) if task is not None else None
    try:
        tokenizer, ends = weights.tokenizer()
        check_texts(run, tokenizer, ends, own, report)
    except (OSError, ValueError) as error:
        tokenizer = None
        report.skip(f"prompts, ends and texts: no tokenizer: {error}", len(rows))
    if task is None:
        return
    check_prompts(run, None if make else tokenizer, task, rows, report)
    asked: dict[int, list[list[Scored]]] = defaultdict(list)  # by the id of the task
    for row in (row for row in own if make is not None and row["outcome"] == "scored"):
        check_episode(run, make, task.prompt("train", row["prompt_key"]), row, report)
    asked[id(task)] = [to_score(task, members) for members in groups_of(own)] if make is None else []
    tasks = {id(task): task}
    for other, groups in check_evaluations(run, task, make is not None, report):
        tasks[id(other)] = other
        asked[id(other)] += groups
    for key, groups in asked.items():
        score_again(run, tasks[key].reward, groups, report)


def find_task(run: RecordedRun, report: Report) -> Task | None:
    """The task of the settings; None, with the reason in the report, if it cannot be had."""
    why = "the run was given a Task: pass it to lagrpo.replay.verify_run"
    try:
        if not run.own_task:
            return load_task(run.settings.task, run.settings.run.seed)
    except (ValueError, TypeError, ImportError, OSError) as error:
        why = f"the task cannot be loaded: {error}"
    report.skip(f"prompts and rewards: {why}")
    return None


def check_texts(run: RecordedRun, tokenizer: Any, ends: set[int], rows: Sequence[Row], report: Report) -> None:
    """A completion of one turn ends at its first end-of-sequence token, or at the limit; texts are tokens decoded."""
    for row in rows:
        tokens = row["token_ids"]
        expected = {"text": tokenizer.decode(tokens, skip_special_tokens=True)}
        if not row["turns"]:
            end = next((t for t, token in enumerate(tokens, start=1) if token in ends), None)
            expected |= {"tokens": end or run.settings.sampling.max_tokens, "finished": end is not None}
        report.compare_all("texts", row["where"], expected, row | {"tokens": len(tokens)})


def check_prompts(run: RecordedRun, tokenizer: Any, task: Task, rows: Sequence[Row], report: Report) -> None:
    """Which prompts a batch has, a function of the seed and the batch; their answers; their tokens by the template."""
    before, size, seed = Counter[int](), task.size("train"), run.settings.run.seed
    for row in (members[0] for members in groups_of(rows) if members[0]["source"] == "sampler"):
        epoch, place = divmod((row["batch"] - 1) * run.fresh_prompts + before[row["batch"]], size)
        before[row["batch"]] += 1
        prompt, expected = task.prompt("train", row["prompt_key"] % size), dict[str, Any]()
        if row["epoch"] >= 0:  # a negative one stands for a prompt that dynamic sampling generated instead
            expected |= {"epoch": epoch, "prompt_key": int(permutation(size, seed, "prompt order", epoch)[place])}
        expected["gold"] = json.dumps(prompt.gold, ensure_ascii=False)
        if tokenizer is not None:
            expected["prompt_token_ids"] = templated(tokenizer, [dict(message) for message in prompt.messages])
        report.compare_all("prompts", row["where"], expected, row)


def templated(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """A prompt as the model reads it: by the chat template, or as plain text if there is none."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def check_episode(run: RecordedRun, make: Any, prompt: Prompt, row: Row, report: Report) -> None:
    """The environment starts again and hears what the policy said: its replies and the reward are as recorded."""
    environment, turns, replies = make(), row["turns"], list[str]()
    key = run.settings.run.seed, "sample", row["batch"], row["epoch"], row["prompt_key"], row["completion"]
    environment.reset(prompt, key)
    said = StepResult()
    for text in turns[::2]:
        said = environment.step(text)
        if said.done:
            break
        replies.append("\n".join(str(message.get("content") or "") for message in said.messages))
    report.compare("episodes", row["where"], "replies", replies[: len(turns) // 2], turns[1::2])
    report.compare("episodes", row["where"], "reward", said.reward, row["reward"])


def to_score(task: Task, members: Sequence[Row]) -> list[Scored]:
    """The rewards of a group of rollouts."""
    prompt = task.prompt("train", members[0]["prompt_key"] % task.size("train"))
    completions = [to_completion(row["text"], sum(row["sampled"]), row["finished"]) for row in members]
    return [Scored("rewards", row["where"], prompt, c, row) for row, c in zip(members, completions, strict=True)]


def to_completion(text: str, tokens: int, finished: bool = True) -> Completion:
    """A completion as rewards see it."""
    none = torch.zeros(tokens)
    return Completion(none, none, none, finished=finished, text=text)


def score_again(run: RecordedRun, reward: Any, groups: Sequence[Sequence[Scored]], report: Report) -> None:
    """Score completions again in worker processes, unless a server scored them, which might answer differently."""
    if isinstance(reward, Rewards) and not all(each.repeats for each in reward.parts):
        return report.skip("rewards: a server gave them, and might give others", sum(map(len, groups)))
    asked = [Group(group[0].prompt, tuple(each.completion for each in group)) for group in groups]
    settings = run.settings.verifier.model_copy(update={"max_without_reward": 1.0})
    if asked:
        with RewardPool(reward, **settings.of_a_batch) as pool:
            outcomes = [completion.outcome for group in pool.score(asked) for completion in group.completions]
        for each, again in zip((each for group in groups for each in group), outcomes, strict=True):
            compare_outcome(each, again or Outcome.failed(""), report)


def compare_outcome(of: Scored, again: Outcome, report: Report) -> None:
    """Compare a recorded reward with another one, unless a deadline or a crash decided one of them."""
    by_machine = any(reason.startswith(BY_MACHINE) for reason in (of.recorded["reason"], again.reason))
    if by_machine and (of.recorded["reward"] is None) != (again.reward is None):
        report.undecided[of.check] += 1
        return
    expected = {"reward": again.reward} | {f"reward_{name}": value for name, value in again.parts.items()}
    report.compare_all(of.check, of.where, expected, of.recorded)


def check_evaluations(
    run: RecordedRun, task: Task, talks: bool, report: Report
) -> Iterator[tuple[Task, list[list[Scored]]]]:
    """Whether evaluations are missing (the last batch may have ended before its own), and each of them; yields what is
    to be scored, with its task."""
    e, there = run.settings.evaluation, {summary["name"] for summary in run.evaluations}
    if any(name.startswith("evaluation.") for name in run.changed):
        return report.skip("evaluations: their settings were changed when the run was resumed")
    for one in e.sets or [None]:
        name, given = (one.name if one else None), {k: v for k, v in dict(one or ()).items() if v is not None}
        every, prompts, samples = (given.get(key, getattr(e, key)) for key in ("every", "prompts", "samples"))
        due = [f"batch-{b:06d}" for b in range(every, max(run.metrics, default=0), every)] if every else []
        for file in (f"{moment}.{name}" if name else moment for moment in ["before"] * e.before_and_after + due):
            report.compare("evaluations", f"evaluations/{file}.json", "the file", True, file in there)
        own = load_task(given["task"], run.settings.run.seed) if "task" in given else task
        if isinstance(own, TaskWithEnvironment) or (talks and own is task):
            report.skip("evaluations: their completions have several turns, recorded as one text")
            continue
        best, groups = given.get("task", run.settings.task).reward_range[1], list[list[Scored]]()
        for summary in (summary for summary in run.evaluations if summary.get("set") == name):
            order = permutation(own.size("test"), run.settings.run.seed, "prompt order", -1).tolist()
            keys = sorted(order[:prompts]), [record["prompt_key"] for record in run.records[summary["name"]]]
            report.compare("evaluations", f"evaluations/{summary['name']}.parquet", "prompt_key", *keys)
            groups += check_records(run, own, summary["name"], best, report)
            expected = expected_summary(run, summary["name"], samples)
            check = f"evaluation {summary['name']}"
            report.compare_all(check, f"evaluations/{summary['name']}.json", expected, summary, 1e-12)
        yield own, groups


def check_records(run: RecordedRun, task: Task, name: str, best: float, report: Report) -> Iterator[list[Scored]]:
    """The prompts of an evaluation, the counts and means of each; yields what is to be scored."""
    check = f"evaluation {name}"
    for n, record in enumerate(run.records[name]):
        prompt = task.prompt("test", record["prompt_key"] % task.size("test"))
        where, rewards = f"evaluations/{name}.parquet, row {n}", record["rewards"]
        decided = record.get("is_right") or [None] * len(rewards)
        known = [(x, x >= best if d is None else d) for x, d in zip(rewards, decided, strict=True) if x is not None]
        right = sum(is_right for _, is_right in known)
        expected = {"prompt": prompt.messages[-1]["content"], "gold": str(prompt.gold), "scored": len(known)}
        expected |= {"right": right, "pass_at_1": right / len(known) if known else None}
        expected |= {"reward_mean": mean([x for x, _ in known])}
        report.compare_all(check, where, expected, record, 1e-12)
        parts = {part: values for part, values in reward_columns(record).items() if isinstance(values, list)}
        tokens, group = record.get("tokens") or [0] * len(rewards), list[Scored]()
        for j, text in enumerate(record["completions"]):
            recorded = {"reward": rewards[j], "reason": ""} | {f"reward_{p}": values[j] for p, values in parts.items()}
            group.append(Scored(check, where, prompt, to_completion(text, tokens[j]), recorded))
        yield group


def expected_summary(run: RecordedRun, name: str, samples: int) -> dict[str, Any]:
    """After which batch an evaluation was made, of which version, and means over prompts, with
    pass@k = 1 - C(n - c, k) / C(n, k) over prompts with n >= k scored completions, c of them right."""
    moment, last, records = name.partition(".")[0], max(run.metrics, default=0), run.records[name]
    batch = int(moment.removeprefix("batch-")) if moment.startswith("batch-") else 0 if moment == "before" else last
    found: dict[str, Any] = {"batch": batch, "prompts": len(records), "samples": samples}
    found |= {"version": run.metrics[batch + 1][1]["version"]} if batch + 1 in run.metrics else {}
    found["without_reward"] = sum(r["samples"] - r["scored"] for r in records)
    found["reward_mean"] = mean([r["reward_mean"] for r in records if r["scored"]])
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        tries = [(r["scored"], r["right"]) for r in records if r["scored"] >= k]
        found[f"pass_at_{k}"] = mean([1 - comb(n - c, k) / comb(n, k) for n, c in tries])
    return found
