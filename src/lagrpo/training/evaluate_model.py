"""`lagrpo eval`: a model on the test prompts of a task, sampled by this process or by vLLM servers."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

from lagrpo.cpu.memory import freed_memory_kept
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.embedded import is_adapter
from lagrpo.model.lora import load_adapter_config
from lagrpo.model.model import Policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEvaluator, build_engine
from lagrpo.runs.directory import plain_name
from lagrpo.runs.files import to_json, write_atomically, write_table
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.tasks import reward_names
from lagrpo.threads import choose_threads, fixed_threads
from lagrpo.training.build import build_policy, build_weight_sync_check, start_servers
from lagrpo.training.checks import check_evaluation
from lagrpo.training.data import RunData, TaskSetup, load_data
from lagrpo.training.evaluation import EvalSet, Evaluation, eval_params, evaluate, few_prompts, interval
from lagrpo.training.memory import explained


def evaluate_model(settings: EvalSettings) -> Evaluation:
    """Evaluate a model on the test prompts of a task; print the summary, and write it with the per-prompt records to
    `settings.output`, by default to evaluations/MODEL-TASK. Raises SettingsError for settings that cannot be run,
    RewardError if too many completions could not be scored, NoMemoryError."""
    check_evaluation(settings)
    with refusing():
        data = load_data(as_run(settings), None)
    output = _choose_output(settings, data.task.name)
    threads = fixed_threads(choose_threads(settings.model.threads))
    remedies = {"evaluation": "lower max_num_seqs or max_tokens"}
    with freed_memory_kept(), threads, explained(lambda: "evaluation", remedies), ExitStack() as stack:
        evaluation = _evaluate_model(settings, data, stack)
    of = {"model": settings.model.path, "task": data.task.name}
    summary = {**of, **evaluation.summary, "settings": settings.model_dump()}
    write_table(output / "records.parquet", evaluation.records)
    write_atomically(output / "summary.json", to_json(summary) + "\n")
    _print(summary, output)
    return evaluation


def _evaluate_model(settings: EvalSettings, data: RunData, stack: ExitStack) -> Evaluation:
    servers = start_servers(data.settings, data.replied, stack)  # takes minutes: what is cheap to check came first
    print(f"loading {settings.model.path} …", file=sys.stderr, flush=True)
    policy = build_policy(settings.model, settings.temperature, data.longest)
    setup = data.set_up(policy, stack)[0]
    requests = setup.prompts.held_out(settings.prompts or data.task.size("test"))
    evaluator: Any = LocalSampler(policy, settings.seed, settings.max_tokens, settings.max_num_seqs)
    sampled = "here"
    if servers:
        evaluator, sampled = _use_servers(data.settings, policy, setup, servers, stack)
    print(f"computing with {policy.model.computation}; sampled {sampled}", file=sys.stderr, flush=True)
    params = eval_params(setup, settings.temperature, settings.max_tokens)
    scale, rewards = settings.task.reward_range, reward_names(data.task.reward)
    of = EvalSet(requests, setup.reward_pool, params, settings.samples, settings.seed, scale, rewards)
    return evaluate(of, evaluator)


def _use_servers(
    run: Settings, policy: Policy, setup: TaskSetup, servers: list[VllmClient], stack: ExitStack
) -> tuple[VllmEvaluator, str]:
    """Servers with the policy's weights, checked to compute as this process does; and what they are."""
    sampler = stack.enter_context(closing(build_engine(run, policy, servers)))
    sampler.sync_weights(policy.weights, policy.version)
    check = build_weight_sync_check(run, policy, setup.prompts, sampler)
    mean = check(policy, sampler)["logp_difference_mean"] if check is not None else 0.0
    who = ", ".join(map(str, servers))
    return VllmEvaluator(sampler), f"by vLLM ({who}), which differs from this process by {mean:.2g} nats a token"


def as_run(settings: EvalSettings) -> Settings:
    """The settings of a run that samples so; for servers and an adapter, of a run that trains such adapters. Raises
    ValueError for an adapter that is not plain LoRA."""
    rollout = {"engine": settings.rollout.engine, "temperature": settings.temperature, "num_generations": 1}
    rollout |= {"max_completion_length": settings.max_tokens, "max_prompt_length": settings.max_prompt_tokens}
    rollout |= {"max_num_seqs": settings.max_num_seqs}
    model, given = settings.model, {n: getattr(settings, n) for n in ("task", "environment", "vllm", "verifier")}
    if settings.rollout.engine == "vllm" and is_adapter(model.path):
        lora, path = load_adapter_config(Path(model.path))
        own = {"lora_r": lora.r, "lora_alpha": lora.alpha, "lora_target_modules": lora.targets}
        model = model.model_copy(update={"path": path, **own})
    run = {"seed": settings.seed, "output_dir": str(Path(settings.output or "evaluations"))}
    given |= {"run": run, "model": model, "rollout": rollout, "eval": {"at_start": False}}
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
