"""`lagrpo eval`: an evaluation of a model outside of a run."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.distributed.ranks import Ranks, joined
from lagrpo.distributed.torchrun import check_ranks, local_size, world_size
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.lifecycle.evaluation import Evaluation, build_eval_set, evaluate
from lagrpo.logs import print_text, redact_values
from lagrpo.machine import choose_threads, fixed_threads
from lagrpo.model.backend import pick_device
from lagrpo.model.embedded import is_adapter
from lagrpo.runs.directory import check_writable, plain_name
from lagrpo.runs.files import to_json, write_atomically, write_table
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import EvalSetSettings
from lagrpo.startup.build_engines import (
    build_served_engine,
    build_weight_check,
    sampler_of_policy,
    sampling_params,
    start_servers,
    wait_for_shared_gpu,
)
from lagrpo.startup.build_episodes import max_reply_tokens
from lagrpo.startup.build_policy import build_policy, check_same_model, with_start
from lagrpo.startup.build_tasks import load_tasks, set_up_tasks
from lagrpo.startup.checks import check_evaluation, check_server_gpus
from lagrpo.tasks import Task
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.terminal.text import count_of, formatted_interval, unscored_text
from lagrpo.types import JsonObject

logger = logging.getLogger("lagrpo")


def evaluate_model(settings: Settings, task: Task | None = None) -> Evaluation:
    """Evaluates a model on the test prompts of a task, and prints the summary.

    `task` replaces settings.task. Writes the summary and one record per prompt to run.output_dir.
    Under torchrun each rank has its share of the prompts; rank 0 prints and writes. Raises
    SettingsError, and RewardError if too many completions could not be scored.
    """
    check_evaluation(settings, task)
    rollout = settings.rollout
    if rollout.has_own_engine:
        raise SettingsError(
            f"rollout.engine = {rollout.engine!r} samples for training only: evaluate with 'local' "
            "or 'vllm'"
        )
    if rollout.uses_vllm and is_adapter(settings.model.path):
        raise SettingsError(
            "model.path is an adapter: set rollout.engine = 'local', or merge the adapter first"
        )
    device = pick_device().type
    check_ranks(device)
    if world_size() > 1:
        check_server_gpus(settings)
    task = load_tasks(settings, task)[MAIN_TASK]
    with as_settings_error("run"):
        output = _choose_output(settings, task.name)
        check_writable(output)
    with (
        freed_memory_kept(),
        fixed_threads(choose_threads(ranks=local_size())),
        joined(device, shard_layers=False, timeout=settings.distributed.timeout) as ranks,
        ExitStack() as stack,
    ):
        evaluation = _evaluate_as_rank(settings, task, ranks, stack)
    if not ranks.is_first:
        return evaluation
    for text in evaluation.warnings:
        logger.warning("%s", text)
    summary = {
        "model": settings.model.path,
        "task": task.name,
        **evaluation.summary,
        "settings": redact_values(settings.model_dump()),
    }
    write_table(output / "records.parquet", evaluation.records)
    write_atomically(output / "summary.json", to_json(summary) + "\n")
    _print_summary(summary, output)
    return evaluation


def _evaluate_as_rank(settings: Settings, task: Task, ranks: Ranks, stack: ExitStack) -> Evaluation:
    """Builds the model and what samples, and evaluates together with the other ranks. Collective.

    `stack` ends the processes.
    """
    rollout = settings.rollout
    show = _print_progress if ranks.is_first else (lambda _: None)
    reply_tokens = max_reply_tokens(settings, task)
    # Servers take minutes to start: everything that is cheap to check came first.
    servers = start_servers(settings, reply_tokens, stack) if ranks.is_first else []
    ranks.on_rank0(partial(wait_for_shared_gpu, settings, servers))
    show(f"loading {settings.model.path} …")
    longest = settings.max_sequence_length + reply_tokens
    policy = build_policy(settings.model, rollout.temperature, longest)
    policy = with_start(policy, None, ranks)
    check_same_model(ranks, policy)
    setup = set_up_tasks(settings, {MAIN_TASK: task}, policy, stack)[MAIN_TASK]
    if rollout.uses_vllm:
        engine = build_served_engine(settings, policy, servers, sampling_params(settings), ranks)
        stack.callback(engine.close)
        engine.sync_weights(policy.weights, policy.version)
        check_weights = build_weight_check(policy, setup.prompts, engine)
        check_weights(policy)
    else:
        engine = sampler_of_policy(settings, policy)
    this_side = "this process" if ranks.size == 1 else f"{ranks.size} processes"
    sampled_by = ", ".join(map(str, servers)) or this_side
    show(f"computation: {policy.model.computation}; sampling: {sampled_by}")
    eval_set = build_eval_set(settings, setup, EvalSetSettings(name="only"))
    return evaluate(eval_set, engine, ranks)


def _print_progress(text: str) -> None:
    print_text(text, file=sys.stderr, flush=True)


def _choose_output(settings: Settings, task_name: str) -> Path:
    """Returns the directory run.name, by default MODEL-TASK, in run.output_dir.

    It gets a number if the directory has an evaluation.
    """
    path = Path(settings.model.path)
    model = path.name
    if path.parent.name == "weights":
        run_name = path.parent.parent.name
        model = f"{run_name}-{path.name}"
    root = Path(settings.run.output_dir)
    name = settings.run.name or f"{model}-{plain_name(task_name)}"
    output = root / name
    number = 1
    while (output / "summary.json").exists():
        number += 1
        output = root / f"{name}-{number}"
    return output


def _print_summary(summary: JsonObject, output: Path) -> None:
    prompts = count_of(summary["prompts"], "prompt")
    samples = count_of(summary["samples"], "sample")
    print_text(f"{summary['model']} on {summary['task']}: {prompts} x {samples}")
    for name in summary:
        if f"{name}_low" in summary:
            form = ".3f" if name == "reward" else ".1%"
            line = f"  {name:<11} {formatted_interval(summary, name, form)}"
            if name == "pass@1":
                line += f"   {unscored_text(summary)}"
            print_text(line.rstrip())
        elif name.startswith("rewards/"):
            print_text(f"  {name} {summary[name]:.3f}")
    print_text("  intervals: 95 %, for the mean over all prompts of this kind")
    print_text(f"  per-prompt records: {output / 'records.parquet'}")
