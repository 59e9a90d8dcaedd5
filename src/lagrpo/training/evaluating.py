"""`lagrpo eval`: a model on the test prompts of a task, by this process or by vLLM servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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
from lagrpo.rollout.episodes import Episodes
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEvaluator, build_engine
from lagrpo.rollout.vllm.server import open_servers
from lagrpo.runs.directory import plain_name
from lagrpo.runs.files import to_json, write_atomically, write_table
from lagrpo.runs.rollouts import REWARD
from lagrpo.settings.lora import LoraSettings
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.toml import flatten
from lagrpo.tasks import Task, load_task, reward_names
from lagrpo.threads import choose_threads, fixed_threads
from lagrpo.training.build import build_parity_check, build_policy, build_verifier, loading
from lagrpo.training.checks import check_evaluation
from lagrpo.training.environments import Talk, replied
from lagrpo.training.evaluate import Evaluation, Generates, evaluate, few_prompts, interval
from lagrpo.training.exams import PURPOSE
from lagrpo.training.memory import explained


def evaluate_model(settings: EvalSettings) -> Evaluation:
    """Evaluate the model of the settings on the test prompts of their task; print the summary, and write summary and
    per-prompt records to the directory that `place` names.

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded where that can be seen.
        RewardError: too many completions could not be scored.
        NoMemoryError: the memory does not suffice.
    """
    check_evaluation(settings)
    with refusing():
        task = load_task(settings.task, settings.seed)
    output = place(settings, task.name)
    threads = fixed_threads(choose_threads(settings.model.threads))
    with (
        freed_memory_kept(),
        threads,
        explained(lambda: "evaluation", {"evaluation": "lower max_num_seqs or max_tokens"}),
    ):
        evaluation = _evaluated(settings, task)
    of = {"model": settings.model.path, "task": task.name}
    summary = {**of, **evaluation.summary, "settings": settings.model_dump()}
    write_table(output / "records.parquet", evaluation.records)
    write_atomically(output / "summary.json", to_json(summary) + "\n")
    _print(summary, output)
    return evaluation


def _evaluated(settings: EvalSettings, task: Task) -> Evaluation:
    with ExitStack() as parts:
        servers = []
        if settings.sampling.sampler == "vllm":  # starting them takes minutes: what is cheap to refuse comes first
            with loading(settings.model):
                run = as_run(settings)
                check_files(resolve_model(run.model.path))
            servers = [parts.enter_context(closing(server)) for server in open_servers(run)]
        print(f"loading {settings.model.path} …", file=sys.stderr, flush=True)
        longest = settings.max_prompt_tokens + settings.max_tokens + replied(settings, task)
        policy = build_policy(settings.model, settings.temperature, longest)
        episodes, given = None, dict[str, Any]()
        if (talk := Talk.find(settings.environment, task, policy.chat)) is not None:
            if settings.sampling.sampler == "vllm":
                raise SettingsError("sampling.sampler = 'vllm' evaluates completions of one turn: take 'local'")
            episodes = talk.start(settings, policy.chat, parts)
            given = talk.asking(episodes)
        prompts = PromptSource(task, policy, settings.seed, 1, settings.max_prompt_tokens, **given)
        requests = prompts.held_out(settings.prompts or task.size("test"))
        sampler = parts.enter_context(_sampler(settings, policy, prompts, servers, episodes))
        verifier = parts.enter_context(build_verifier(settings, task))
        scale, rewards = settings.task.reward_range, reward_names(task.reward)
        return evaluate(sampler, verifier, requests, settings.samples, settings.seed, scale, rewards)


@contextmanager
def _sampler(
    settings: EvalSettings, policy: Policy, prompts: PromptSource, servers: list[VllmClient], episodes: Episodes | None
) -> Iterator[Generates]:
    """What generates: this process, or the servers, which get the policy's weights and are checked to compute as it
    does."""
    if not servers:
        computed = f"computing with {policy.model.computation}; decoding {policy.model.decoding}"
        print(computed, file=sys.stderr, flush=True)
        local = LocalSampler(policy, settings.seed, settings.max_tokens, settings.max_num_seqs, purpose=PURPOSE)
        local.episodes = episodes
        yield local
        return
    run = as_run(settings)
    with closing(build_engine(run, policy, servers)) as sampler:
        sampler.sync_weights(policy.weights, policy.version)
        found = build_parity_check(run, policy, prompts, sampler)(policy, sampler)
        where = ", ".join(map(str, servers))
        print(f"decoding by vLLM ({where}); it differs from this process by {found['parity_mean']:.2g} nats a token",
              file=sys.stderr, flush=True)  # fmt: skip
        evaluator = VllmEvaluator(sampler)
        evaluator.set_sampling_params(SamplingParams(PURPOSE, settings.temperature, settings.max_tokens))
        yield evaluator


def as_run(settings: EvalSettings) -> Settings:
    """The settings of a run whose servers would be those of the evaluation; of an adapter, of a run that trains such
    ones. Raises ValueError for an adapter that is no plain LoRA."""
    of_sampling = ("temperature", "max_tokens", "max_prompt_tokens", "max_num_seqs")
    limits = {name: getattr(settings, name) for name in of_sampling} | {"sampler": settings.sampling.sampler, "G": 1}
    run = {"seed": settings.seed, "directory": str(Path(settings.output or "evaluations"))}
    evaluation = {"before_and_after": False}
    model = settings.model
    if is_adapter(model.path):
        lora, path = load_adapter_config(Path(model.path))
        own = LoraSettings(r=lora.r, alpha=lora.alpha, targets=lora.targets)
        model = model.model_copy(update={"path": path, "lora": own})
    given = {"run": run, "model": model, "sampling": limits, "vllm": settings.vllm, "evaluation": evaluation}
    return Settings.model_validate(given)


def place(settings: EvalSettings, task: str) -> Path:
    """The directory for an evaluation: settings.output, else evaluations/MODEL-TASK, or that with the first number
    behind it (-2, -3 …) whose directory has no evaluation with other settings. Raises SettingsError where
    settings.output has one, or something else's summary.json."""
    if settings.output:
        with refusing("output"):
            if problem := _occupied(Path(settings.output), settings):
                raise ValueError(f"{problem}: name another directory")
        return Path(settings.output)
    name = f"evaluations/{label(settings.model.path)}-{plain_name(task)}"
    places = (Path(name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(path for path in places if not _occupied(path, settings))


def _occupied(output: Path, settings: EvalSettings) -> str | None:
    """Why an evaluation with these settings must not be written there; None where it may."""
    if output.exists() and not output.is_dir():
        return f"{output} is a file"
    file = output / "summary.json"
    if not file.exists():
        return None
    try:
        earlier = flatten(json.loads(file.read_bytes())["settings"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{file} is not the summary of an evaluation"
    ours = flatten(json.loads(to_json(settings.model_dump())))
    names = [n for n in ours | earlier if ours.get(n) != earlier.get(n) and n != "output"]
    differing = ", ".join(f"{n} = {earlier.get(n)}, not {ours.get(n)}" for n in names[:3])
    return f"{output} holds an evaluation with other settings ({differing})" if names else None


def label(model: str) -> str:
    """A name for a model: its directory's, with the run's where it is a run's.

    >>> label("Qwen/Qwen2.5-0.5B"), label("runs/addition/weights/final")
    ('Qwen2.5-0.5B', 'addition-final')
    """
    path = Path(model)
    return f"{path.parent.parent.name}-{path.name}" if path.parent.name == "weights" else path.name


def _print(summary: dict[str, Any], output: Path) -> None:
    print(f"{summary['model']} on {summary['task']}: {summary['prompts']} prompts x {summary['samples']} samples")
    names = [name for name in summary if f"{name}_low" in summary]
    for name in names if summary.get("reward_mean") != summary.get("pass_at_1") else names[1:]:
        print(f"  {interval(summary, name)}")
    for name, value in summary.items():
        if name.startswith(REWARD) and name.endswith("_mean") and name != "reward_mean":
            print(f"  {name.removeprefix(REWARD).removesuffix('_mean') + ', mean':<11} {value:.3f}")
    if summary["without_reward"]:
        print(f"  {summary['without_reward']} completions could not be scored and are not counted")
    print("  intervals: for the mean over all the prompts that these were drawn from")
    if warning := few_prompts(summary["prompts"]):
        print(f"  {warning}")
    print(f"  per-prompt records: {output / 'records.parquet'}")
