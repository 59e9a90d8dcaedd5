"""What the task and the tokenizer say: prompts, texts, rewards, and the evaluations that follow from rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lagrpo.core.estimators import pass_at_k
from lagrpo.rewards.pool import BY_MACHINE, RewardPool
from lagrpo.rng import permutation
from lagrpo.runs.rollouts import reward_columns
from lagrpo.tasks import Rewards, Task, load_task
from lagrpo.tasks.base import StepResult, environment_of
from lagrpo.tasks.environments import load_environment
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify.record import RecordedRun, Report, Row, groups_of, is_generated
from lagrpo.verify.rows import mean
from lagrpo.verify.tokens import Weights

Scored = tuple[str, Prompt, Completion, dict[str, Any]]
"""Where a reward stands, what is needed to give it again, and what was recorded."""


def check_rewards(run: RecordedRun, weights: Weights, rows: Sequence[Row], task: Task | None, report: Report) -> None:
    """Prompts, ends and texts of the rollouts; then the rewards of rollouts and evaluations."""
    own = [row for row in rows if is_generated(row)]
    report.skip("texts and rewards of completions: failed, or offline data", len(rows) - len(own))
    tokenizer, task = check_texts(run, weights, own, report), task or find_task(run, report)
    if task is None:
        return
    make = load_environment(run.settings.environment, task)
    check_prompts(run, None if make else tokenizer, task, rows, report)
    if make is None:
        score_again(run, task.reward, [to_score(task, members) for members in groups_of(own)], report)
    else:
        for row in (row for row in own if row["outcome"] == "scored"):
            check_episode(run, make(), task.prompt("train", row["prompt_id"]), row, report)
    check_evaluations(run, task, make is not None, report)


def find_task(run: RecordedRun, report: Report) -> Task | None:
    """The task of the settings; None, with the reason in the report, if it cannot be loaded."""
    why = "the run was given a Task: pass it to lagrpo.verify.verify_run"
    try:
        if not run.own_task:
            return load_task(run.settings.task, run.settings.run.seed)
    except (ValueError, TypeError, ImportError, OSError) as error:
        why = f"the task cannot be loaded: {error}"
    report.skip(f"prompts and rewards: {why}")
    return None


def check_texts(run: RecordedRun, weights: Weights, rows: Sequence[Row], report: Report) -> Any:
    """A completion of one turn ends at its first end-of-sequence token, or at the limit; texts are tokens decoded.
    Returns the tokenizer; None, with the reason in the report, without one."""
    try:
        tokenizer, ends = weights.load_tokenizer()
    except (OSError, ValueError) as error:
        return report.skip(f"prompts, ends and texts: no tokenizer: {error}", len(rows))
    for row in rows:
        tokens = row["token_ids"]
        expected = {"completion": tokenizer.decode(tokens, skip_special_tokens=True)}
        if not row["messages"]:
            end = next((t for t, token in enumerate(tokens, start=1) if token in ends), None)
            expected |= {"tokens": end or run.settings.rollout.max_completion_length, "finished": end is not None}
        report.compare("texts", row["where"], expected, row | {"tokens": len(tokens)})
    return tokenizer


def check_prompts(run: RecordedRun, tokenizer: Any, task: Task, rows: Sequence[Row], report: Report) -> None:
    """Which prompts a step has, a function of the seed and the step; their answers; their tokens by the template."""
    before, size, seed = Counter[int](), task.size("train"), run.settings.run.seed
    for members in (members for members in groups_of(rows) if members[0]["source"] == "sampler"):
        step, first = members[0]["step"], members[0]
        epoch, place = divmod((step - 1) * run.fresh_prompts + before[step], size)
        before[step] += 1
        prompt = task.prompt("train", first["prompt_id"] % size)
        expected: dict[str, Any] = {"answer": json.dumps(prompt.answer, ensure_ascii=False)}
        if first["epoch"] >= 0:  # a negative one stands for a prompt that dynamic sampling generated instead
            expected |= {"epoch": epoch, "prompt_id": int(permutation(size, seed, "prompt order", epoch)[place])}
        if tokenizer is not None:
            expected["prompt_token_ids"] = templated(tokenizer, [dict(message) for message in prompt.messages])
        for row in members:
            report.compare("prompts", row["where"], expected, row)


def templated(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """A prompt as the model reads it: by the chat template, or as plain text if there is none."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    end = "continue_final_message" if messages[-1]["role"] == "assistant" else "add_generation_prompt"
    return list(tokenizer.apply_chat_template(messages, return_dict=True, **{end: True})["input_ids"])


def check_episode(run: RecordedRun, environment: Any, prompt: Prompt, row: Row, report: Report) -> None:
    """The environment starts again and hears what the policy said: its replies and the reward are as recorded."""
    key = run.settings.run.seed, "sample", row["step"], row["epoch"], row["prompt_id"], row["sample_index"]
    environment.reset(prompt, key)
    said, replies, turns = StepResult(), list[str](), row["messages"]
    for text in turns[::2]:
        said = environment.step(text)
        if said.done:
            break
        replies.append("\n".join(str(message.get("content") or "") for message in said.messages))
    expected = {"replies": replies[: len(turns) // 2], "reward": said.reward}
    report.compare("episodes", row["where"], expected, row | {"replies": turns[1::2]})


def to_score(task: Task, members: Sequence[Row]) -> list[Scored]:
    """The rewards of a group of rollouts."""
    prompt = task.prompt("train", members[0]["prompt_id"] % task.size("train"))
    made = [to_completion(row["completion"], sum(row["loss_mask"]), row["finished"]) for row in members]
    return [(row["where"], prompt, completion, row) for row, completion in zip(members, made, strict=True)]


def to_completion(text: str, tokens: int, finished: bool = True) -> Completion:
    """A completion as rewards see it."""
    none = torch.zeros(tokens)
    return Completion(none, none, none, finished=finished, text=text)


def score_again(run: RecordedRun, reward: Any, groups: Sequence[Sequence[Scored]], report: Report) -> None:
    """Score completions again in worker processes, unless a server scored them, which might answer differently."""
    if isinstance(reward, Rewards) and not all(each.repeats for each in reward.parts):
        return report.skip("rewards: a server gave them, and might give others", sum(map(len, groups)))
    if not groups:
        return
    asked = [Group(group[0][1], tuple(completion for _, _, completion, _ in group)) for group in groups]
    settings = run.settings.verifier.model_copy(update={"max_without_reward": 1.0})
    with RewardPool(reward, **settings.of_a_batch) as pool:
        outcomes = [completion.outcome for group in pool.score(asked) for completion in group.completions]
    for (where, *_, recorded), again in zip((one for group in groups for one in group), outcomes, strict=True):
        compare_outcome(where, recorded, again or Outcome.failed(""), report)


def compare_outcome(where: str, recorded: dict[str, Any], again: Outcome, report: Report) -> None:
    """Compare a recorded reward with another one, unless a deadline or a crash decided one of them."""
    by_machine = any(reason.startswith(BY_MACHINE) for reason in (recorded["reason"], again.reason))
    if by_machine and (recorded["reward"] is None) != (again.reward is None):
        report.undecided["rewards"] += 1
    else:
        parts = {f"reward_{name}": value for name, value in again.parts.items()}
        report.compare("rewards", where, {"reward": again.reward} | parts, recorded)


def check_evaluations(run: RecordedRun, task: Task, talks: bool, report: Report) -> None:
    """The prompts of each evaluation, their counts and means, the summary, and the rewards."""
    e, of_sets = run.settings.eval, {each.name: each for each in run.settings.eval.sets}
    for summary in run.evaluations:
        each = of_sets.get(summary.get("set") or "")
        chosen = each.task if each is not None and each.task is not None else None
        own = load_task(chosen, run.settings.run.seed) if chosen is not None else task
        if environment_of(own) is not None or (talks and own is task):
            report.skip("evaluations: their completions have several turns, recorded as one text")
            continue
        name, best = summary["name"], (chosen or run.settings.task).reward_range[1]
        prompts, samples = ((each and getattr(each, key)) or getattr(e, key) for key in ("num_prompts", "num_samples"))
        asked = sorted(permutation(own.size("test"), run.settings.run.seed, "prompt order", -1).tolist()[:prompts])
        found = {"prompt_id": [record["prompt_id"] for record in run.records[name]]}
        report.compare("evaluations", f"evaluations/{name}.parquet", {"prompt_id": asked}, found)
        expected = expected_summary(run, name, samples)
        report.compare(f"evaluation {name}", f"evaluations/{name}.json", expected, summary, 1e-9)
        score_again(run, own.reward, list(check_records(run, own, name, best, report)), report)


def check_records(run: RecordedRun, task: Task, name: str, best: float, report: Report) -> Iterator[list[Scored]]:
    """The prompts of an evaluation, the counts and means of each; yields what is to be scored."""
    for n, record in enumerate(run.records[name]):
        prompt = task.prompt("test", record["prompt_id"] % task.size("test"))
        where, rewards = f"evaluations/{name}.parquet, row {n}", record["rewards"]
        decided = record.get("is_correct") or [None] * len(rewards)
        known = [(x, x >= best if d is None else d) for x, d in zip(rewards, decided, strict=True) if x is not None]
        expected = {"prompt": prompt.messages[-1]["content"], "answer": str(prompt.answer), "scored": len(known)}
        expected |= {"correct": sum(correct for _, correct in known), "reward": mean([x for x, _ in known])}
        report.compare(f"evaluation {name}", where, expected, record, 1e-9)
        parts = {part: values for part, values in reward_columns(record).items() if isinstance(values, list)}
        tokens, group = record.get("tokens") or [0] * len(rewards), list[Scored]()
        for j, text in enumerate(record["completions"]):
            recorded = {"reward": rewards[j], "reason": ""} | {f"reward_{p}": values[j] for p, values in parts.items()}
            group.append((where, prompt, to_completion(text, tokens[j]), recorded))
        yield group


def expected_summary(run: RecordedRun, name: str, samples: int) -> dict[str, Any]:
    """After which step an evaluation was made, of which version, and means over prompts."""
    moment, last, records = name.partition(".")[0], max(run.metrics, default=0), run.records[name]
    step = int(moment.removeprefix("batch-")) if moment.startswith("batch-") else 0 if moment == "before" else last
    found: dict[str, Any] = {"step": step, "prompts": len(records), "samples": samples}
    found |= {"policy_version": run.metrics[step + 1][1]["policy_version"]} if step + 1 in run.metrics else {}
    found["unscored"] = sum(r["samples"] - r["scored"] for r in records)
    found["reward"] = mean([r["reward"] for r in records if r["scored"]])
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        found[f"pass@{k}"] = mean([pass_at_k(r["scored"], r["correct"], k) for r in records if r["scored"] >= k])
    return found
