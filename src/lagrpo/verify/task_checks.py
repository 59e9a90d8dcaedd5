"""Checks against the task and the tokenizer: prompts, texts, rewards, and evaluations."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import torch

from lagrpo.errors import as_settings_error
from lagrpo.model.chat import Chat
from lagrpo.model.files import load_tokenizer
from lagrpo.model.reference_prompt import ReferencePrompt, find_best, is_text
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reasons import depends_on_machine
from lagrpo.rewards.reward import Rewards
from lagrpo.rng import permutation
from lagrpo.runs.evaluation_names import Moment, batch_of, moment_of
from lagrpo.runs.rollouts import reward_columns
from lagrpo.settings.sections import TaskSettings
from lagrpo.tasks import (
    Environment,
    StepResult,
    Task,
    complete_task,
    drop_overlong,
    environment_of,
    load_task,
)
from lagrpo.tasks.environments import take_step
from lagrpo.types import Completion, Group, JsonObject, Outcome, OutcomeKind, Prompt
from lagrpo.verify.formulas import mean, pass_at_k
from lagrpo.verify.record import RecordedRun, Row, groups_of
from lagrpo.verify.tokens import find_path, find_weights

Split = Literal["train", "test"]
SUM_TOLERANCE = 1e-9
"""Sums of float64 in another order."""


def check_rewards(run: RecordedRun, task: Task | None) -> None:
    """Checks prompts, ends and texts of the rollouts, then the rewards of rollouts and evaluations.

    `task` replaces the task of the settings.
    """
    left_out = len(run.rows) - len(run.generated)
    run.report.skip("texts and rewards of failed or offline completions", left_out)
    chat = load_chat(run)
    check_texts(run, chat)
    if task is None and run.used_task_object:
        advice = "pass it to lagrpo.verify.verify_run"
        run.report.skip(f"prompts and rewards: the run used a Task object; {advice}")
        return
    settings = run.settings
    if task is None:
        with as_settings_error():
            task = load_task(settings.task, settings.run.seed)
    else:
        task = complete_task(task, settings.task.tools)
    make_environment = environment_of(task)
    if make_environment is None:
        task = drop_overlong(task, settings.rollout, chat)
        check_prompts(run, task, chat)
        groups = groups_of(run.generated)
        score_again(run, task, chat, "train", groups, deadline=settings.task.reward_timeout)
    else:
        check_prompts(run, task, None)
        reward_column = _column_of_environment(task)
        groups: list[list[Row]] = []
        for members in groups_of(run.generated):
            prompt = task.prompt("train", members[0]["prompt_id"])
            replayed: list[Row] = []
            for row in members:
                if row["outcome"] == OutcomeKind.SCORED:
                    environment = make_environment()
                    outcome = check_episode(run, environment, prompt, row, reward_column, chat)
                    replayed.append(row | {"episode": outcome})
            # The rewards of an unscored episode are unknown, and others may compare with it.
            if len(replayed) == len(members):
                groups.append(replayed)
            else:
                run.report.skip("rewards of groups with an unscored episode", len(members))
        score_again(run, task, chat, "train", groups, deadline=settings.task.reward_timeout)
    check_evaluations(run, task, chat)


def _column_of_environment(task: Task) -> str:
    """Returns the column of the rollouts with the reward that an environment gives."""
    for reward in Rewards.from_reward(task.reward).parts:
        if reward.is_of_environment and reward.name:
            return f"reward_{reward.name}"
    return "reward"


def load_chat(run: RecordedRun) -> Chat:
    """Loads the model's tokenizer, with its chat template as of the start of the run."""
    from transformers import GenerationConfig

    folder = find_weights(run)[0]
    tokenizer = load_tokenizer(folder)
    template = run.settings.model.chat_template
    if template:
        tokenizer.chat_template = find_path(run, template).read_text(encoding="utf-8")
    generation_config = GenerationConfig.from_pretrained(folder, trust_remote_code=False)
    generation_eos = generation_config.eos_token_id
    if not isinstance(generation_eos, list):
        generation_eos = [generation_eos]
    eos_ids = {tokenizer.eos_token_id, *generation_eos} - {None}
    chat = Chat(
        tokenizer,
        vocabulary=sys.maxsize,
        eos_ids=frozenset(eos_ids),
        template_kwargs=run.settings.model.chat_template_kwargs,
        started=datetime.fromisoformat(run.environment["started"]),
    )
    return chat.with_turn_end()


def check_texts(run: RecordedRun, chat: Chat) -> None:
    """Checks that texts are the decoded tokens, and where completions of one turn end.

    They end at their first end-of-sequence token, with a stop text, or at the limit of tokens.
    """
    for row in run.generated:
        tokens = row["token_ids"]
        expected: JsonObject = {"completion": chat.decode(tokens)}
        is_one_turn = not row["messages"]
        if is_one_turn:
            rollout = run.settings.rollout
            tokens_until_end = _count_until_end(chat, tokens, rollout.stop)
            limit = rollout.max_completion_length
            expected["tokens"] = limit if tokens_until_end is None else tokens_until_end
            expected["finished"] = tokens_until_end is not None
        run.report.compare("texts", row["where"], expected, {**row, "tokens": len(tokens)})


def _count_until_end(chat: Chat, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    """Counts the tokens up to and including the first that ends a completion; None without one.

    It is an end-of-sequence token, or completes a stop text.
    """
    for count, token in enumerate(tokens, start=1):
        if token in chat.eos_ids:
            return count
        if stop:
            text = chat.decode(tokens[:count])
            if any(stop_text in text for stop_text in stop):
                return count
    return None


def load_reference_prompt(run: RecordedRun) -> ReferencePrompt | None:
    """Loads the template of loss.reference_prompt; None without one."""
    setting = run.settings.loss.reference_prompt
    if setting is None:
        return None
    with as_settings_error("loss.reference_prompt"):
        return ReferencePrompt.read(setting if is_text(setting) else str(find_path(run, setting)))


def check_prompts(run: RecordedRun, task: Task, chat: Chat | None) -> None:
    """Checks the prompts of a step and their answers, by seed and step; with `chat`, the tokens."""
    size = task.size("train")
    seed = run.settings.run.seed
    reference_prompt = load_reference_prompt(run)
    groups_so_far: Counter[int] = Counter()  # by step
    for members in groups_of(run.rows):
        first = members[0]
        if first["source"] != "sampler":
            continue
        step = first["step"]
        position = (step - 1) * run.fresh_prompts + groups_so_far[step]
        groups_so_far[step] += 1
        prompt = task.prompt("train", first["prompt_id"] % size)
        expected: JsonObject = {"answer": json.dumps(prompt.answer, ensure_ascii=False)}
        # In a negative epoch, dynamic sampling has replaced the prompt of this position.
        if first["epoch"] >= 0:
            epoch, index = divmod(position, size)
            order = permutation(size, seed, "prompt order", epoch)
            expected["epoch"] = epoch
            expected["prompt_id"] = int(order[index])
        if chat is not None:
            prompt = chat.tokenize(prompt)
            expected["prompt_token_ids"] = list(prompt.token_ids)
            if reference_prompt is not None:
                seen_ids = _seen_by_reference(run, reference_prompt, chat, prompt, members)
                expected["ref_prompt_token_ids"] = list(seen_ids)
        for row in members:
            run.report.compare("prompts", row["where"], expected, row)


def _seen_by_reference(
    run: RecordedRun,
    reference_prompt: ReferencePrompt,
    chat: Chat,
    prompt: Prompt,
    members: Sequence[Row],
) -> tuple[int, ...]:
    """Returns the tokens that the reference sees of a group's prompt."""
    if not reference_prompt.reads_best:
        return chat.tokenize(reference_prompt.fill(prompt)).token_ids
    rewards = [row["reward"] for row in members]
    texts = [row["completion"] for row in members]
    best = find_best(rewards, texts, run.settings.task.reward_range[0])
    rollout = run.settings.rollout
    limit = rollout.max_prompt_length + rollout.max_completion_length
    return reference_prompt.tokenize_with_best(chat, prompt, best, limit)


def check_episode(
    run: RecordedRun,
    environment: Environment,
    prompt: Prompt,
    row: Row,
    reward_column: str,
    chat: Chat,
) -> Outcome:
    """Checks an environment's replies and its reward, by sending it the policy's turns again.

    `reward_column` is the column of the rollouts with the environment's reward. Returns the outcome
    that the environment gives the episode.
    """
    completion_key = (row["step"], row["epoch"], row["prompt_id"], row["sample_index"])
    messages = environment.reset(prompt, (run.settings.run.seed, "sample", *completion_key))
    first_prefix = chat.find_prefix(messages, chat.decode(row["prompt_token_ids"]))
    prefixes = [first_prefix, *chat.find_later_prefixes(row["token_ids"], row["loss_mask"])]
    policy_turns = row["messages"][::2]
    recorded_replies = row["messages"][1::2]
    replies: list[str] = []
    result = StepResult()
    for text, prefix in zip(policy_turns, prefixes, strict=True):
        result = take_step(environment, text, prefix)
        if result.done:
            break
        contents = [str(message.get("content") or "") for message in result.messages]
        replies.append("\n".join(contents))
    # The run may have reached a limit of tokens or turns before the last reply was appended.
    expected: JsonObject = {"replies": replies[: len(recorded_replies)]}
    outcome = Outcome(OutcomeKind.ANSWERED)
    if not result.is_answer:
        outcome = Outcome.scored(result.reward)
        expected[reward_column] = result.reward
    run.report.compare("episodes", row["where"], expected, {**row, "replies": recorded_replies})
    return outcome


def score_again(
    run: RecordedRun,
    task: Task,
    chat: Chat,
    split: Split,
    groups: Sequence[Sequence[Row]],
    *,
    deadline: float,
) -> None:
    """Scores completions again. Rewards of a server are left out: it may answer differently."""
    rows = [row for members in groups for row in members]
    for reward in Rewards.from_reward(task.reward).parts:
        if not getattr(reward.function, "repeats", True):
            reason = "rewards: a server gave them and may answer differently"
            run.report.skip(reason, len(rows))
            return
    unscored = []
    for members in groups:
        prompt = task.prompt(split, members[0]["prompt_id"] % task.size(split))
        completions = tuple(_to_completion(row, chat) for row in members)
        # Rewards may read how the tokenized prompt begins the answer.
        unscored.append(Group(chat.tokenize(prompt), completions))
    # A recorded run may have many completions without a reward: they must not end the replay.
    with RewardPool(task.reward, deadline=deadline, max_without_reward=1.0) as pool:
        outcomes = [
            completion.outcome or Outcome.failed("")
            for group in pool.score(unscored)
            for completion in group.completions
        ]
    for row, outcome in zip(rows, outcomes, strict=True):
        _compare_outcome(run, row, outcome)


def _to_completion(row: Row, chat: Chat) -> Completion:
    """Returns what a reward may read of a recorded completion: its text, and how long it is."""
    zeros_T = torch.zeros(sum(row["loss_mask"]))
    later_prefixes: list[str] = []
    if row.get("messages"):
        later_prefixes = chat.find_later_prefixes(row["token_ids"], row["loss_mask"])
    return Completion(
        token_ids=zeros_T,
        rollout_logp=zeros_T,
        versions=zeros_T,
        finished=row["finished"],
        text=row["completion"],
        outcome=row.get("episode"),
        turns=tuple(row.get("messages") or ()),
        prefix=later_prefixes[-1] if later_prefixes else None,
    )


def _compare_outcome(run: RecordedRun, row: Row, outcome: Outcome) -> None:
    reasons = (row["reason"], outcome.reason)
    is_by_machine = any(depends_on_machine(reason) for reason in reasons)
    only_one_scored = (row["reward"] is None) != (outcome.reward is None)
    # A deadline or a crash decided in one of the two runs.
    if is_by_machine and only_one_scored:
        run.report.undecided["rewards"] += 1
        return
    expected = {"reward": outcome.reward}
    for name, value in outcome.parts.items():
        expected[f"reward_{name}"] = value
    # Only a task with several rewards records what they decide.
    if "correct" in row:
        expected["correct"] = outcome.correct
    run.report.compare("rewards", row["where"], expected, row)


# Evaluations


def check_evaluations(run: RecordedRun, task: Task, chat: Chat) -> None:
    """Checks all evaluations. `task` is the training task; an evaluation set may have another."""
    settings = run.settings
    task_settings_of_sets = {
        evaluation_set.name: evaluation_set.task for evaluation_set in settings.eval.sets
    }
    for summary in run.evaluations:
        task_settings = task_settings_of_sets.get(summary.get("set", ""))
        if task_settings is None:
            set_task = task
            task_settings = settings.task
        else:
            set_task = load_task(task_settings, settings.run.seed)
            set_task = drop_overlong(set_task, settings.rollout, chat)
        if environment_of(set_task) is not None:
            run.report.skip("evaluations with several turns, which are recorded as one text")
        else:
            check_evaluation(run, set_task, chat, task_settings, summary)


def check_evaluation(
    run: RecordedRun, task: Task, chat: Chat, task_settings: TaskSettings, summary: JsonObject
) -> None:
    """Checks an evaluation's prompts, its rewards, and the summary that follows from them.

    The largest reward of `task_settings` is correct, unless the record says which completions are.
    """
    largest_reward = task_settings.reward_range[1]
    name = summary["name"]
    records = run.records[name]
    file = f"evaluations/{name}.parquet"
    # Epoch -1 orders the test prompts, of which the run took the first.
    order = permutation(task.size("test"), run.settings.run.seed, "prompt order", -1)
    prompt_ids = sorted(order[: len(records)].tolist())
    for number, (record, prompt_id) in enumerate(zip(records, prompt_ids, strict=True)):
        prompt = task.prompt("test", prompt_id)
        check_record(run, prompt, largest_reward, record, f"{file}, row {number}")
    groups = [to_rows(record, file) for record in records]
    score_again(run, task, chat, "test", groups, deadline=task_settings.reward_timeout)
    reason = "completions of evaluations, whether the policy sampled them: tokens are not recorded"
    run.report.skip(reason, sum(len(members) for members in groups))
    expected = _summarize(run, name, records)
    where = f"evaluations/{name}.json"
    run.report.compare(f"evaluation {name}", where, expected, summary, SUM_TOLERANCE)


def _summarize(run: RecordedRun, name: str, records: Sequence[Row]) -> JsonObject:
    """Returns the summary that follows from an evaluation's name and its records."""
    samples = max((record["samples"] for record in records), default=0)
    step = _step_of_evaluation(run, name)
    summary: JsonObject = {"step": step, "prompts": len(records), "samples": samples}
    if step + 1 in run.metrics:
        next_line = run.metrics[step + 1].values
        summary["policy_version"] = next_line["policy_version"]
    summary["unscored"] = sum(record["samples"] - record["scored"] for record in records)
    summary["reward"] = mean(record["reward"] for record in records if record["reward"] is not None)
    powers_of_two = {1 << exponent for exponent in range(samples.bit_length())}
    for k in {samples, *powers_of_two}:
        summary[f"pass@{k}"] = mean(
            pass_at_k(record["scored"], record["correct"], k)
            for record in records
            if record["scored"] >= k
        )
    return summary


def _step_of_evaluation(run: RecordedRun, name: str) -> int:
    """Returns the step after which an evaluation ran.

    `name` is the name of its files. Raises ValueError for another name.
    """
    moment = moment_of(name)
    if moment == Moment.BEFORE:
        return 0
    if moment == Moment.AFTER:
        return max(run.metrics, default=0)
    batch = batch_of(name)
    if batch is None:
        raise ValueError(f"the evaluation {name!r} names no step")
    return batch


def check_record(
    run: RecordedRun, prompt: Prompt, largest_reward: float, record: Row, where: str
) -> None:
    """Checks a prompt of an evaluation, and its counts and mean."""
    rewards = record["rewards"]
    scored_rewards = [reward for reward in rewards if reward is not None]
    if "is_correct" in record:
        # With several rewards, the first decides. If it returned None, the decision is missing.
        decisions = [decision for decision in record["is_correct"] if decision is not None]
    else:
        decisions = [reward >= largest_reward for reward in scored_rewards]
    scored = len(decisions)
    correct = sum(decisions)
    expected = {
        "prompt_id": prompt.key,
        "answer": str(prompt.answer),
        "prompt": prompt.messages[-1]["content"],
        "samples": len(rewards),
        "scored": scored,
        "correct": correct,
        "reward": mean(scored_rewards),
        "pass@1": pass_at_k(scored, correct, 1) if scored else None,
    }
    run.report.compare("evaluations", where, expected, record, SUM_TOLERANCE)


def to_rows(record: Row, where: str) -> list[Row]:
    """Returns the completions of a prompt of an evaluation as rows."""
    token_counts = record.get("tokens") or [0] * len(record["rewards"])
    columns = {
        "completion": record["completions"],
        "reward": record["rewards"],
        "loss_mask": [[True] * tokens for tokens in token_counts],
    }
    for name, values in reward_columns(record).items():
        columns[f"reward_{name}"] = values
    if "is_correct" in record:
        columns["correct"] = record["is_correct"]
    rows = []
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        row |= {"where": where, "prompt_id": record["prompt_id"], "finished": True, "reason": ""}
        rows.append(row)
    return rows
