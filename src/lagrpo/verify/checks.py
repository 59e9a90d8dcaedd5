"""What is checked besides tokens: what the task and the tokenizer say (prompts, texts, rewards, and the evaluations
that follow from rewards), then what rows and lines say about each other (weight syncs, versions, advantages, metrics).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from lagrpo.core import kl
from lagrpo.core.advantages import AdvantageInputs, leave_one_out, one_group, sigma
from lagrpo.core.estimators import pass_at_k
from lagrpo.core.objective import Recipe
from lagrpo.core.ratios import limit
from lagrpo.model.chat import Chat
from lagrpo.model.files import load_tokenizer
from lagrpo.rewards.pool import BY_MACHINE, RewardPool
from lagrpo.rewards.reward import Rewards
from lagrpo.rng import permutation, uniforms
from lagrpo.runs.rollouts import reward_columns
from lagrpo.tasks import StepResult, Task, complete_task, drop_overlong, environment_of, load_task
from lagrpo.types import Completion, Group, Outcome, Prompt, Range
from lagrpo.verify.record import RecordedRun, Row, groups_of, sampled
from lagrpo.verify.tokens import find_path, find_weights

FLOAT64, FLOAT32 = (
    1e-9,
    2.0**-22,
)  # relative rounding of sums of float64 in another order, and of an advantage


def check_rewards(run: RecordedRun, task: Task | None) -> None:
    """Prompts, ends and texts of the rollouts; then the rewards of rollouts and evaluations."""
    run.report.skip(
        "texts and rewards of failed or offline completions", len(run.rows) - len(run.generated)
    )
    check_texts(run, chat := load_chat(run))
    if task is None and run.own_task:
        return run.report.skip(
            "prompts and rewards: the run used a Task object; pass it to lagrpo.verify.verify_run"
        )
    s = run.settings
    own = complete_task(task, s.task.tools) if task is not None else load_task(s.task, s.run.seed)
    if (make := environment_of(own)) is None:
        check_prompts(run, own := drop_overlong(own, s.rollout, chat), chat)
        score_again(run, own, chat, "train", groups_of(run.generated))
    else:
        check_prompts(run, own, None)
        for row in (row for row in run.generated if row["outcome"] == "scored"):
            check_episode(run, make(), own.prompt("train", row["prompt_id"]), row)
    of_sets = {each.name: each.task for each in s.eval.sets}
    for summary in run.evaluations:
        chosen = of_sets.get(summary.get("set", ""))
        of_set = (
            own if chosen is None else drop_overlong(load_task(chosen, s.run.seed), s.rollout, chat)
        )
        if environment_of(of_set) is not None:
            run.report.skip("evaluations with several turns, which are recorded as one text")
        else:
            check_evaluation(run, of_set, chat, (chosen or s.task).reward_range[1], summary)


def load_chat(run: RecordedRun) -> Chat:
    """The tokenizer of the model, with its chat template as of the run's start."""
    from transformers import GenerationConfig

    folder = find_weights(run)[0]
    tokenizer = load_tokenizer(folder)
    if template := run.settings.model.chat_template:
        tokenizer.chat_template = find_path(run, template).read_text(encoding="utf-8")
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    known = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    started, given = (
        datetime.fromisoformat(run.environment["started"]),
        run.settings.model.chat_template_kwargs,
    )
    return Chat(tokenizer, sys.maxsize, frozenset(known), given, started).with_turn_end()


def check_texts(run: RecordedRun, chat: Chat) -> None:
    """A completion of one turn ends at its first end-of-sequence token, or at the limit; texts are tokens decoded."""
    for row in run.generated:
        tokens = row["token_ids"]
        expected: dict[str, Any] = {"completion": chat.decode(tokens)}
        if not row["messages"]:
            end = next(
                (t for t, token in enumerate(tokens, start=1) if token in chat.eos_ids), None
            )
            expected |= {
                "tokens": end or run.settings.rollout.max_completion_length,
                "finished": end is not None,
            }
        run.report.compare("texts", row["where"], expected, row | {"tokens": len(tokens)})


def check_prompts(run: RecordedRun, task: Task, chat: Chat | None) -> None:
    """Which prompts a step has, by the seed and the step; their answers; their tokens, by `chat`."""
    before, size, seed = Counter[int](), task.size("train"), run.settings.run.seed
    for members in (
        members for members in groups_of(run.rows) if members[0]["source"] == "sampler"
    ):
        step, first = members[0]["step"], members[0]
        epoch, place = divmod((step - 1) * run.fresh_prompts + before[step], size)
        before[step] += 1
        prompt = task.prompt("train", first["prompt_id"] % size)
        expected: dict[str, Any] = {"answer": json.dumps(prompt.answer, ensure_ascii=False)}
        if first["epoch"] >= 0:  # a negative one: dynamic sampling generated this prompt instead
            expected |= {
                "epoch": epoch,
                "prompt_id": int(permutation(size, seed, "prompt order", epoch)[place]),
            }
        if chat is not None:
            expected["prompt_token_ids"] = list(chat.tokenize(prompt).token_ids)
        for row in members:
            run.report.compare("prompts", row["where"], expected, row)


def check_episode(run: RecordedRun, environment: Any, prompt: Prompt, row: Row) -> None:
    """The environment starts again and hears what the policy said: its replies and the reward are as recorded."""
    key = (
        run.settings.run.seed,
        "sample",
        row["step"],
        row["epoch"],
        row["prompt_id"],
        row["sample_index"],
    )
    environment.reset(prompt, key)
    said, replies, turns = StepResult(), list[str](), row["messages"]
    for text in turns[::2]:
        said = environment.step(text)
        if said.done:
            break
        replies.append("\n".join(str(message.get("content") or "") for message in said.messages))
    expected = {"replies": replies[: len(turns) // 2], "reward": said.reward}
    run.report.compare("episodes", row["where"], expected, row | {"replies": turns[1::2]})


def score_again(
    run: RecordedRun, task: Task, chat: Chat, split: Any, groups: Sequence[Sequence[Row]]
) -> None:
    """Score completions again, unless a server scored them, which might answer differently."""
    if not all(
        getattr(each.function, "repeats", True) for each in Rewards.from_reward(task.reward).parts
    ):
        return run.report.skip(
            "rewards: a server gave them and may answer differently", sum(map(len, groups))
        )
    asked, rows = list[Group](), [row for members in groups for row in members]
    for members in groups:
        tokens = [torch.zeros(sum(row["loss_mask"])) for row in members]
        made = [
            Completion(t, t, t, row["finished"], row["completion"])
            for t, row in zip(tokens, members, strict=True)
        ]
        prompt = task.prompt(split, members[0]["prompt_id"] % task.size(split))
        asked.append(
            Group(chat.tokenize(prompt), tuple(made))
        )  # rewards may read how the prompt begins the answer
    with RewardPool(
        task.reward, deadline=run.settings.task.reward_timeout, max_without_reward=1.0
    ) as pool:
        outcomes = [
            completion.outcome for group in pool.score(asked) for completion in group.completions
        ]
    for row, outcome in zip(rows, outcomes, strict=True):
        again = outcome or Outcome.failed("")
        by_machine = row["reason"].startswith(BY_MACHINE) or again.reason.startswith(BY_MACHINE)
        if by_machine and (row["reward"] is None) != (
            again.reward is None
        ):  # a deadline or a crash decided
            run.report.undecided["rewards"] += 1
        else:
            parts = {f"reward_{name}": value for name, value in again.parts.items()}
            run.report.compare("rewards", row["where"], {"reward": again.reward} | parts, row)


def check_evaluation(
    run: RecordedRun, task: Task, chat: Chat, best: float, summary: dict[str, Any]
) -> None:
    """An evaluation's prompts, its counts and means, and the rewards, of which `best` is correct."""
    name, records, lines = summary["name"], run.records[summary["name"]], run.metrics
    asked = permutation(task.size("test"), run.settings.run.seed, "prompt order", -1)[
        : len(records)
    ]
    for n, (record, prompt_id) in enumerate(zip(records, sorted(asked.tolist()), strict=True)):
        check_record(
            run,
            task.prompt("test", prompt_id),
            best,
            record,
            f"evaluations/{name}.parquet, row {n}",
        )
    score_again(
        run,
        task,
        chat,
        "test",
        [to_rows(record, f"evaluations/{name}.parquet") for record in records],
    )
    samples, moment = max((r["samples"] for r in records), default=0), name.partition(".")[0]
    step: Any = (
        {"before": 0, "after": max(lines, default=0)}.get(moment)
        if moment[:5] != "batch"
        else int(moment[6:])
    )
    found: dict[str, Any] = {"step": step, "prompts": len(records), "samples": samples}
    found |= {"policy_version": lines[step + 1][1]["policy_version"]} if step + 1 in lines else {}
    found["unscored"] = sum(r["samples"] - r["scored"] for r in records)
    found["reward"] = mean(r["reward"] for r in records if r["scored"])
    for k in {samples, *(1 << n for n in range(samples.bit_length()))}:
        found[f"pass@{k}"] = mean(
            pass_at_k(r["scored"], r["correct"], k) for r in records if r["scored"] >= k
        )
    run.report.compare(f"evaluation {name}", f"evaluations/{name}.json", found, summary, 1e-9)


def check_record(run: RecordedRun, prompt: Prompt, best: float, record: Row, where: str) -> None:
    """A prompt of an evaluation, and its counts and means."""
    rewards, decided = (
        record["rewards"],
        record.get("is_correct") or [None] * len(record["rewards"]),
    )
    known = [
        (x, x >= best if d is None else d)
        for x, d in zip(rewards, decided, strict=True)
        if x is not None
    ]
    expected = {
        "prompt_id": prompt.key,
        "answer": str(prompt.answer),
        "prompt": prompt.messages[-1]["content"],
    }
    expected |= {
        "samples": len(rewards),
        "scored": len(known),
        "correct": sum(correct for _, correct in known),
    }
    run.report.compare(
        "evaluations", where, expected | {"reward": mean(x for x, _ in known)}, record, 1e-9
    )


def to_rows(record: Row, where: str) -> list[Row]:
    """The completions of a prompt of an evaluation as rows."""
    same = {"where": where, "prompt_id": record["prompt_id"], "finished": True, "reason": ""}
    columns = {"completion": record["completions"], "reward": record["rewards"]}
    columns["loss_mask"] = [
        [True] * t for t in record.get("tokens") or [0] * len(record["rewards"])
    ]
    columns |= {f"reward_{name}": values for name, values in reward_columns(record).items()}
    return [
        same | dict(zip(columns, values, strict=True))
        for values in zip(*columns.values(), strict=True)
    ]


# Rows and lines


def check_rows(run: RecordedRun) -> None:
    """Whether every step has its groups, with their completions."""
    s, what, report = run.settings, "groups, and generated ones", run.report
    for step in range(1, max([*run.metrics, *run.steps]) + 1):
        groups = groups_of(run.steps.get(step, []))
        fresh = [members for members in groups if members[0]["source"] == "sampler"]
        found = {what: (len(groups), len(fresh)) if step in run.steps else "no file"}
        expected = {what: (s.schedule.prompts_per_batch, run.fresh_prompts)}
        report.compare("rows", f"rollouts/step-{step:06d}.parquet", expected, found)
        for members in fresh:
            found = {
                "step": members[0]["step"],
                "completions": [row["sample_index"] for row in members],
            }
            expected = {"step": step, "completions": list(range(s.rollout.num_generations))}
            report.compare("rows", members[0]["where"], expected, found)


def check_syncs(run: RecordedRun) -> None:
    """Whether weights were synced when the schedule says so: in every line, and the event with its version."""
    events = {event["step"]: event for event in run.events if event["event"] == "weight_sync"}
    generated, kl, s = (
        0,
        0.0,
        run.settings.schedule,
    )  # batches since the last sync, and the KL that the last measured
    for step, (number, line) in sorted(run.metrics.items()):
        reason = (
            "schedule" if s.kind == "lagged" or ((step - 1) % s.stage_length + 1) % s.v == 0 else ""
        )
        if s.kind == "budget":
            reason = "budget" if kl > (s.sync_at_kl or 0.0) else "cap" if generated >= s.v else ""
        reason, event = "start" if step == 1 else reason, events.get(step, {})
        performed = {"weight_sync/performed": int(bool(reason))}
        run.report.compare("weight syncs", f"metrics.jsonl, line {number}", performed, line)
        expected = {"weight_sync": (reason, line["policy_version"] if reason else None)}
        found = {"weight_sync": (event.get("reason", ""), event.get("policy_version"))}
        run.report.compare("weight syncs", f"events.jsonl, step {step}", expected, found)
        generated, kl = 1 if reason else generated + 1, 0.0 if reason else kl
        kl = line["rollout/seq_kl"] if line.get("rollout/seq_kl") is not None else kl


def check_versions(run: RecordedRun) -> None:
    """Tokens have the version that the schedule announced, and π_k the version of the step's metrics. A completion
    that vLLM finished after a weight sync may have tokens of later versions, too. If a finished run was resumed for
    more batches, none of them was sampled before."""
    s, synced = (
        run.settings,
        [step for step, (_, line) in run.metrics.items() if line["weight_sync/performed"]],
    )
    resumed = [event for event in run.events if event["event"] == "resumed"]
    spanning = s.vllm.on_weight_sync == "continue" and s.rollout.engine == "vllm"
    for row in (row for row in run.rows if row["step"] in run.metrics):
        step, versions = row["step"], sampled(row, "policy_versions")
        known = bool(versions) and min(versions) >= 0
        expected = {"policy_version": run.metrics[step][1]["policy_version"]}
        expected["staleness"] = row["policy_version"] - min(versions) if known else None
        run.report.compare("versions", row["where"], expected, row)
        sync = max([b for b in synced if b <= step], default=0)
        is_behind = (
            s.schedule.kind == "lagged" and row["epoch"] >= 0
        )  # dynamic sampling adds groups of the last sync
        if is_behind:
            sync = max(
                1,
                step - s.schedule.v,
                *(e["step"] + 1 for e in resumed if e["step"] + e["ahead"] < step),
            )
        if known and row["source"] == "sampler" and sync in run.metrics:
            alpha = run.metrics[sync][1]["policy_version"]
            other = next((v for v in versions if v < alpha or (v > alpha and not spanning)), alpha)
            run.report.compare(
                "versions", row["where"], {"policy_versions": alpha}, {"policy_versions": other}
            )


def check_groups(run: RecordedRun) -> None:
    """Compare which completions the objective leaves out, the standard deviation of each group and the advantages, in
    float64."""
    if run.recipe is None:
        run.report.skip("advantages: the loss was given in Python, and no module has it")
        return
    for rows in run.steps.values():
        groups = groups_of(rows)
        for members in groups:
            _check_left_out(run, run.recipe, members)
        _check_advantages(run, run.recipe, groups)


def _check_left_out(run: RecordedRun, recipe: Recipe, members: Sequence[Row]) -> None:
    """Compare the reasons why completions of a group are not in the objective."""
    rewards = {row["reward"] for row in members if row["outcome"] == "scored"}
    is_masked = len(rewards) == 1 and recipe.mask_zero_variance
    for row in members:
        reason = row["outcome"]
        if reason == "scored":
            reason = "zero_variance" if is_masked else ""
        run.report.compare("advantages", row["where"], {"excluded_reason": reason}, row)


def _check_advantages(run: RecordedRun, recipe: Recipe, groups: Sequence[Sequence[Row]]) -> None:
    """Compare the deviations and advantages of the scored completions of a batch."""
    rows: list[Row] = []
    group_C: list[int] = []
    uniforms_of_groups = []
    for g, members in enumerate(groups):
        scored = [row for row in members if row["outcome"] == "scored"]
        rows += scored
        group_C += [g] * len(scored)
        key = (run.settings.run.seed, "advantage", *members[0]["group"])
        uniforms_of_groups.append(torch.from_numpy(uniforms(len(scored), *key)))
    if not rows:
        return
    x = AdvantageInputs(
        rewards=torch.tensor([row["reward"] for row in rows], dtype=torch.float64),
        group=torch.tensor(group_C),
        lengths=torch.tensor([sum(row["loss_mask"]) for row in rows]),
        uniform=torch.cat(uniforms_of_groups),
    )
    longest = run.settings.rollout.max_completion_length
    advantages = recipe.advantages(x, longest).tolist()
    deviations = sigma(x.rewards, x.group, recipe.eps_std).tolist()
    largest_reward = float(x.rewards.abs().max())
    for row, advantage, deviation in zip(rows, advantages, deviations, strict=True):
        near = FLOAT64 * (1 + deviation)
        run.report.compare("advantages", row["where"], {"group_std": deviation}, row, near)
        near = FLOAT32 * (1 + abs(advantage) + largest_reward)
        run.report.compare("advantages", row["where"], {"advantage": advantage}, row, near)


def check_metrics(run: RecordedRun) -> None:
    """A line for every step, in order, with the keys of the first, and the metrics that follow from its rows. The last
    batch on disk may have no line yet."""
    check, report = "metrics.jsonl", run.report
    for number, line in enumerate(run.lines, start=1):
        expected, found = (number, list(run.lines[0])), (line["step"], list(line))
        report.compare(
            check, f"{check}, line {number}", {"step and keys": expected}, {"step and keys": found}
        )
    for step in sorted(run.steps.keys() - run.metrics.keys())[:-1]:
        report.compare(check, check, {f"the line of step {step}": "there"}, {})
    for step, (number, line) in sorted(run.metrics.items()):
        found = step_metrics(run, step, run.steps[step]) if run.steps.get(step) else {}
        for name, value in found.items():
            near = FLOAT64 * (1 + abs(value or 0))
            if name.startswith("rollout/") and value is not None:  # sums in float32
                near = 1e-6 + 1e-4 * abs(value - (name == "rollout/ratio_mean"))
            report.compare(
                check, f"{check}, line {number} (step {step})", {name: value}, line, near
            )


def mean(values: Iterable[float]) -> float | None:
    """The mean; None of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else None


def step_metrics(run: RecordedRun, step: int, rows: Sequence[Row]) -> dict[str, Any]:
    """The metrics of a step that follow from its rows; docs/metrics.md defines each."""
    tokens, outcomes = sum(sum(row["loss_mask"]) for row in rows), [row["outcome"] for row in rows]
    groups = groups_of(row for row in rows if row["outcome"] == "scored")
    rewards = [row["reward"] for members in groups for row in members]
    stale = [
        row["policy_version"] - v for row in rows for v in sampled(row, "policy_versions") if v >= 0
    ]
    found = {
        "num_tokens": tokens,
        "reward": mean(rewards),
        "reward_std": torch.tensor(rewards, dtype=torch.float64).std(correction=0).item()
        if rewards
        else None,
        "frac_reward_zero_std": mean(
            len({row["reward"] for row in members}) == 1 for members in groups
        ),
        "completions/mean_length": tokens / len(rows),
        "completions/clipped_ratio": mean(not row["finished"] for row in rows),
        "completions/unscored": outcomes.count("unscored"),
        "completions/failed": outcomes.count("failed"),
        "num_turns/mean": mean(len(row["messages"][::2]) or 1 for row in rows),
        "staleness/mean": mean(stale),
        "staleness/max": max(stale, default=None),
        **token_metrics(rows),
        **sequence_metrics(groups, run.settings.task.reward_range),
    }
    for name in reward_columns(rows[0]):
        found[f"rewards/{name}/mean"] = mean(
            x for row in rows if (x := row[f"reward_{name}"]) is not None
        )
    for name in (one.name for one in run.settings.eval.sets):
        made = [
            e for e in run.evaluations if e.get("set") == name and (e.get("step") or 0) == step - 1
        ]
        found |= {
            f"eval/{name}/{m}": made[0].get(m) if made else None for m in ("pass@1", "reward")
        }
    return found


def log_ratios(rows: Iterable[Row]) -> list[Tensor]:
    """log π_k - log α of the sampled tokens of each row, in float64; nothing if one of them is unknown."""
    found = []
    for row in rows:
        if row["old_logprobs"] is None or None in sampled(row, "rollout_logprobs"):
            return []
        k, alpha = (
            torch.tensor(sampled(row, f"{of}_logprobs"), dtype=torch.float32)
            for of in ("old", "rollout")
        )
        found.append((k - alpha).double())  # rounded as in the run
    return found


def token_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """π_k against α over the tokens of the objective; nothing if some of them lack a log-prob."""
    if not (known := log_ratios(row for row in rows if not row["excluded_reason"])):
        return {}
    d, bounded = torch.cat(known), limit(torch.cat(known))
    ratio = bounded.exp()
    found = {
        "kl": kl.sampled_kl(bounded),
        "ratio_mean": ratio.mean(),
        "ess": kl.ess(ratio) / len(d),
    }
    found |= {"logp_difference_mean": d.abs().mean(), "logp_difference_max": d.abs().max()}
    return {f"rollout/{name}": value.item() for name, value in found.items()}


def sequence_metrics(
    groups: Iterable[Sequence[Row]], reward_range: Range
) -> dict[str, float | None]:
    """π_k against α for whole completions with known log α; nothing if one of them lacks log π_k. The improvement is
    the mean of (rho - 1) (r - mean of the others), r in units of the range of rewards."""
    groups, (low, high) = list(groups), reward_range
    rows = [
        row for members in groups for row in members if None not in sampled(row, "rollout_logprobs")
    ]
    if not (ratios := log_ratios(rows)):
        return {}
    d, gains = torch.stack([x.sum() for x in ratios]), list[float]()
    for members in (members for members in groups if len(members) > 1):
        if own := log_ratios(members):
            r = torch.tensor(
                [(row["reward"] - low) / (high - low) for row in members], dtype=torch.float64
            )
            gains.append(
                (torch.stack([x.sum() for x in own]).expm1() * leave_one_out(one_group(r)))
                .mean()
                .item()
            )
    ess, gain = kl.ess((d - d.max()).exp()).item(), mean(gains)
    usable = (
        ess >= 25
        and all(low <= row["reward"] <= high for row in rows)
        and gain is not None
        and abs(gain) <= 1
    )
    return {
        "improvement": gain if usable else None,
        "rollout/seq_kl": sum((x.expm1() - x).sum().item() for x in ratios) / len(ratios),
        "rollout/seq_tv": kl.sampled_tv(d, kl.prefers_bounded(d)).item(),
        "rollout/seq_ess": ess,
    }
