"""What the task and the tokenizer say: prompts, texts, rewards, and the evaluations that follow from rewards."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import torch

from lagrpo.core.estimators import pass_at_k
from lagrpo.model.chat import Chat
from lagrpo.rewards.pool import BY_MACHINE, RewardPool
from lagrpo.rewards.reward import Rewards
from lagrpo.rng import permutation
from lagrpo.runs.rollouts import reward_columns
from lagrpo.tasks import StepResult, Task, complete_task, drop_overlong, environment_of, load_task
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify.record import RecordedRun, Row, groups_of
from lagrpo.verify.rows import mean
from lagrpo.verify.tokens import find_path, find_weights


def check_rewards(run: RecordedRun, task: Task | None) -> None:
    """Prompts, ends and texts of the rollouts; then the rewards of rollouts and evaluations."""
    run.report.skip("texts and rewards of failed or offline completions", len(run.rows) - len(run.generated))
    check_texts(run, chat := load_chat(run))
    if task is None and run.own_task:
        return run.report.skip("prompts and rewards: the run used a Task object; pass it to lagrpo.verify.verify_run")
    s = run.settings
    own = complete_task(task, s.task.tools) if task is not None else load_task(s.task, s.run.seed)
    if (make := environment_of(own)) is None:
        check_prompts(run, own := drop_overlong(own, s.rollout, chat), chat)
        score_again(run, own, "train", groups_of(run.generated))
    else:
        check_prompts(run, own, None)
        for row in (row for row in run.generated if row["outcome"] == "scored"):
            check_episode(run, make(), own.prompt("train", row["prompt_id"]), row)
    of_sets = {each.name: each.task for each in s.eval.sets}
    for summary in run.evaluations:
        chosen = of_sets.get(summary.get("set", ""))
        of_set = own if chosen is None else drop_overlong(load_task(chosen, s.run.seed), s.rollout, chat)
        if environment_of(of_set) is not None:
            run.report.skip("evaluations with several turns, which are recorded as one text")
        else:
            check_evaluation(run, of_set, (chosen or s.task).reward_range[1], summary)


def load_chat(run: RecordedRun) -> Chat:
    """The tokenizer of the model, with its chat template as of the run's start."""
    from transformers import AutoTokenizer, GenerationConfig

    folder = find_weights(run)[0]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if template := run.settings.model.chat_template:
        tokenizer.chat_template = find_path(run, template).read_text("utf-8")
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    known = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    started, given = datetime.fromisoformat(run.environment["started"]), run.settings.model.chat_template_kwargs
    return Chat(tokenizer, sys.maxsize, frozenset(known), given, started).with_turn_end()


def check_texts(run: RecordedRun, chat: Chat) -> None:
    """A completion of one turn ends at its first end-of-sequence token, or at the limit; texts are tokens decoded."""
    for row in run.generated:
        tokens = row["token_ids"]
        expected: dict[str, Any] = {"completion": chat.decode(tokens)}
        if not row["messages"]:
            end = next((t for t, token in enumerate(tokens, start=1) if token in chat.eos_ids), None)
            expected |= {"tokens": end or run.settings.rollout.max_completion_length, "finished": end is not None}
        run.report.compare("texts", row["where"], expected, row | {"tokens": len(tokens)})


def check_prompts(run: RecordedRun, task: Task, chat: Chat | None) -> None:
    """Which prompts a step has, by the seed and the step; their answers; their tokens, by `chat`."""
    before, size, seed = Counter[int](), task.size("train"), run.settings.run.seed
    for members in (members for members in groups_of(run.rows) if members[0]["source"] == "sampler"):
        step, first = members[0]["step"], members[0]
        epoch, place = divmod((step - 1) * run.fresh_prompts + before[step], size)
        before[step] += 1
        prompt = task.prompt("train", first["prompt_id"] % size)
        expected: dict[str, Any] = {"answer": json.dumps(prompt.answer, ensure_ascii=False)}
        if first["epoch"] >= 0:  # a negative one: dynamic sampling generated this prompt instead
            expected |= {"epoch": epoch, "prompt_id": int(permutation(size, seed, "prompt order", epoch)[place])}
        if chat is not None:
            expected["prompt_token_ids"] = list(chat.tokenize(prompt).token_ids)
        for row in members:
            run.report.compare("prompts", row["where"], expected, row)


def check_episode(run: RecordedRun, environment: Any, prompt: Prompt, row: Row) -> None:
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
    run.report.compare("episodes", row["where"], expected, row | {"replies": turns[1::2]})


def score_again(run: RecordedRun, task: Task, split: Any, groups: Sequence[Sequence[Row]]) -> None:
    """Score completions again, unless a server scored them, which might answer differently."""
    if isinstance(task.reward, Rewards) and not all(
        getattr(each.function, "repeats", True) for each in task.reward.parts
    ):
        return run.report.skip("rewards: a server gave them and may answer differently", sum(map(len, groups)))
    asked, rows, chat = list[Group](), [row for members in groups for row in members], load_chat(run)
    for members in groups:
        tokens = [torch.zeros(sum(row["loss_mask"])) for row in members]
        made = [Completion(t, t, t, row["finished"], row["completion"]) for t, row in zip(tokens, members, strict=True)]
        prompt = task.prompt(split, members[0]["prompt_id"] % task.size(split))
        asked.append(Group(chat.tokenize(prompt), tuple(made)))  # rewards may read how the prompt begins the answer
    with RewardPool(task.reward, deadline=run.settings.task.reward_timeout, max_without_reward=1.0) as pool:
        outcomes = [completion.outcome for group in pool.score(asked) for completion in group.completions]
    for row, outcome in zip(rows, outcomes, strict=True):
        again = outcome or Outcome.failed("")
        by_machine = row["reason"].startswith(BY_MACHINE) or again.reason.startswith(BY_MACHINE)
        if by_machine and (row["reward"] is None) != (again.reward is None):  # a deadline or a crash decided
            run.report.undecided["rewards"] += 1
        else:
            parts = {f"reward_{name}": value for name, value in again.parts.items()}
            run.report.compare("rewards", row["where"], {"reward": again.reward} | parts, row)


def check_evaluation(run: RecordedRun, task: Task, best: float, summary: dict[str, Any]) -> None:
    """An evaluation's prompts, its counts and means, and the rewards, of which `best` is correct."""
    name, records, lines = summary["name"], run.records[summary["name"]], run.metrics
    asked = permutation(task.size("test"), run.settings.run.seed, "prompt order", -1)[: len(records)]
    for n, (record, prompt_id) in enumerate(zip(records, sorted(asked.tolist()), strict=True)):
        check_record(run, task.prompt("test", prompt_id), best, record, f"evaluations/{name}.parquet, row {n}")
    score_again(run, task, "test", [to_rows(record, f"evaluations/{name}.parquet") for record in records])
    samples, moment = max((r["samples"] for r in records), default=0), name.partition(".")[0]
    step: Any = {"before": 0, "after": max(lines, default=0)}.get(moment) if moment[:5] != "batch" else int(moment[6:])
    found: dict[str, Any] = {"step": step, "prompts": len(records), "samples": samples}
    found |= {"policy_version": lines[step + 1][1]["policy_version"]} if step + 1 in lines else {}
    found["unscored"] = sum(r["samples"] - r["scored"] for r in records)
    found["reward"] = mean(r["reward"] for r in records if r["scored"])
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        found[f"pass@{k}"] = mean(pass_at_k(r["scored"], r["correct"], k) for r in records if r["scored"] >= k)
    run.report.compare(f"evaluation {name}", f"evaluations/{name}.json", found, summary, 1e-9)


def check_record(run: RecordedRun, prompt: Prompt, best: float, record: Row, where: str) -> None:
    """A prompt of an evaluation, and its counts and means."""
    rewards, decided = record["rewards"], record.get("is_correct") or [None] * len(record["rewards"])
    known = [(x, x >= best if d is None else d) for x, d in zip(rewards, decided, strict=True) if x is not None]
    expected = {"prompt_id": prompt.key, "answer": str(prompt.answer), "prompt": prompt.messages[-1]["content"]}
    expected |= {"samples": len(rewards), "scored": len(known), "correct": sum(correct for _, correct in known)}
    run.report.compare("evaluations", where, expected | {"reward": mean(x for x, _ in known)}, record, 1e-9)


def to_rows(record: Row, where: str) -> list[Row]:
    """The completions of a prompt of an evaluation as rows."""
    same = {"where": where, "prompt_id": record["prompt_id"], "finished": True, "reason": ""}
    columns = {"completion": record["completions"], "reward": record["rewards"]}
    columns["loss_mask"] = [[True] * t for t in record.get("tokens") or [0] * len(record["rewards"])]
    columns |= {f"reward_{name}": values for name, values in reward_columns(record).items()}
    return [same | dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
