"""`lagrpo eval`: a model on the test prompts of a task, sampled by this process or by vLLM servers."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.embedded import is_adapter, resolve_model
from lagrpo.model.loading import check_files
from lagrpo.model.lora import load_adapter_config
from lagrpo.model.model import Policy
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEvaluator, build_engine
from lagrpo.rollout.vllm.server import open_servers
from lagrpo.runs.directory import plain_name
from lagrpo.runs.files import to_json, write_atomically, write_table
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.tasks import Task, load_task, reward_names
from lagrpo.threads import choose_threads, fixed_threads
from lagrpo.training.build import build_policy, build_reward_pool, build_weight_sync_check, loading
from lagrpo.training.checks import check_evaluation
from lagrpo.training.environments import EnvironmentSetup, replied
from lagrpo.training.evaluation import PURPOSE, Evaluation, evaluate, few_prompts, interval
from lagrpo.training.memory import explained


def evaluate_model(settings: EvalSettings) -> Evaluation:
    """Evaluate a model on the test prompts of a task; print the summary, and write it with the per-prompt records to
    `settings.output`, by default to evaluations/MODEL-TASK. Raises SettingsError for settings that cannot be run,
    RewardError if too many completions could not be scored, NoMemoryError."""
    check_evaluation(settings)
    with refusing():
        task = load_task(settings.task, settings.seed)
    output = _choose_output(settings, task.name)
    threads = fixed_threads(choose_threads(settings.model.threads))
    remedies = {"evaluation": "lower max_num_seqs or max_tokens"}
    with freed_memory_kept(), threads, explained(lambda: "evaluation", remedies), ExitStack() as stack:
        evaluation = _evaluate_model(settings, task, stack)
    of = {"model": settings.model.path, "task": task.name}
    summary = {**of, **evaluation.summary, "settings": settings.model_dump()}
    write_table(output / "records.parquet", evaluation.records)
    write_atomically(output / "summary.json", to_json(summary) + "\n")
    _print(summary, output)
    return evaluation


def _evaluate_model(settings: EvalSettings, task: Task, stack: ExitStack) -> Evaluation:
    servers = None
    if settings.rollout.engine == "vllm":  # starting servers takes minutes: what is cheap to check comes first
        with loading(settings.model):
            run = _as_run(settings)
            check_files(resolve_model(run.model.path))
        servers = [stack.enter_context(closing(server)) for server in open_servers(run)]
    print(f"loading {settings.model.path} …", file=sys.stderr, flush=True)
    longest = settings.max_prompt_tokens + settings.max_tokens + replied(settings, task)
    policy = build_policy(settings.model, settings.temperature, longest)
    episodes, asking = None, dict[str, Any]()
    if (talk := EnvironmentSetup.find(settings.environment, task, policy.chat)) is not None:
        if servers:
            raise SettingsError("rollout.engine = 'vllm' evaluates completions of one turn: take 'local'")
        episodes = talk.start(settings, policy.chat, stack)
        asking = talk.asking(episodes)
    prompts = PromptSource(task, policy, settings.seed, 1, settings.max_prompt_tokens, **asking)
    requests = prompts.held_out(settings.prompts or task.size("test"))
    limits = settings.max_tokens, settings.max_num_seqs
    evaluator: Any = LocalSampler(policy, settings.seed, *limits, purpose=PURPOSE)
    evaluator.episodes, decoding = episodes, policy.model.decoding
    if servers:
        evaluator, decoding = _use_servers(settings, policy, prompts, servers, stack)
    print(f"computing with {policy.model.computation}; decoding {decoding}", file=sys.stderr, flush=True)
    reward_pool = stack.enter_context(build_reward_pool(settings, task))
    scale, rewards = settings.task.reward_range, reward_names(task.reward)
    return evaluate(evaluator, reward_pool, requests, settings.samples, settings.seed, scale, rewards)


def _use_servers(
    settings: EvalSettings, policy: Policy, prompts: PromptSource, servers: list[VllmClient], stack: ExitStack
) -> tuple[VllmEvaluator, str]:
    """Servers with the policy's weights, checked to compute as this process does; and what they are."""
    run = _as_run(settings)
    sampler = stack.enter_context(closing(build_engine(run, policy, servers)))
    sampler.sync_weights(policy.weights, policy.version)
    mean = build_weight_sync_check(run, policy, prompts, sampler)(policy, sampler)["logp_difference_mean"]
    evaluator = VllmEvaluator(sampler)
    evaluator.set_sampling_params(SamplingParams(PURPOSE, settings.temperature, settings.max_tokens))
    who = ", ".join(map(str, servers))
    return evaluator, f"by vLLM ({who}), which differs from this process by {mean:.2g} nats a token"


def _as_run(settings: EvalSettings) -> Settings:
    """The settings of a run whose servers the evaluation uses; for an adapter, a run that trains such adapters. Raises
    ValueError for an adapter that is not plain LoRA."""
    rollout = {"engine": settings.rollout.engine, "temperature": settings.temperature, "num_generations": 1}
    rollout |= {"max_completion_length": settings.max_tokens, "max_prompt_length": settings.max_prompt_tokens}
    rollout |= {"max_num_seqs": settings.max_num_seqs}
    run = {"seed": settings.seed, "output_dir": str(Path(settings.output or "evaluations"))}
    evaluation, model = {"at_start": False}, settings.model
    if is_adapter(model.path):
        lora, path = load_adapter_config(Path(model.path))
        own = {"lora_r": lora.r, "lora_alpha": lora.alpha, "lora_target_modules": lora.targets}
        model = model.model_copy(update={"path": path} | own)
    given = {"run": run, "model": model, "rollout": rollout, "vllm": settings.vllm, "eval": evaluation}
    return Settings.model_validate(given)


def _choose_output(settings: EvalSettings, task: str) -> Path:
    """settings.output, else the first of evaluations/MODEL-TASK, evaluations/MODEL-TASK-2 … without an evaluation.
    Raises SettingsError if settings.output has one."""
    if settings.output is not None:
        output = Path(settings.output)
        if output.is_file() or (output / "summary.json").exists():
            raise SettingsError(f"output = {settings.output!r} exists already: name another directory")
        return output
    path = Path(settings.model.path)
    model = f"{path.parent.parent.name}-{path.name}" if path.parent.name == "weights" else path.name
    name = f"evaluations/{model}-{plain_name(task)}"
    places = (Path(name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(path for path in places if not (path / "summary.json").exists())


def _print(summary: dict[str, Any], output: Path) -> None:
    print(f"{summary['model']} on {summary['task']}: {summary['prompts']} prompts x {summary['samples']} samples")
    names = [name for name in summary if f"{name}_low" in summary]
    for name in names if summary.get("reward") != summary.get("pass@1") else names[1:]:
        print(f"  {interval(summary, name)}")
    for name, value in summary.items():
        if name.startswith("rewards/"):
            print(f"  {name.split('/')[1] + ', mean':<11} {value:.3f}")
    if summary["unscored"]:
        print(f"  {summary['unscored']} completions could not be scored and are not counted")
    print("  intervals: for the mean over all the prompts that these were drawn from")
    if warning := few_prompts(summary["prompts"]):
        print(f"  {warning}")
    print(f"  per-prompt records: {output / 'records.parquet'}")
