"""From settings to the components of Algorithm 1.

The data comes first, then the model: errors that are cheap to find come first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lagrpo.core.objective import Recipe
from lagrpo.core.references import describe_raised
from lagrpo.cpu.library import NoKernels
from lagrpo.data.fingerprint import Digests, check_places, digest_places, digest_visited
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.backend import choose_backend, chosen_kernels, pick_device, pick_dtype
from lagrpo.model.chat import Chat
from lagrpo.model.embedded import is_adapter, resolve_model
from lagrpo.model.files import save_model
from lagrpo.model.loading import (
    check_attention,
    check_context,
    check_files,
    count_not_finite,
    load_config,
    load_policy,
    open_policy,
    quiet,
    raise_if_not_finite,
)
from lagrpo.model.lora import Lora, load_adapter_config
from lagrpo.model.model import Policy, copy_policy, fingerprint
from lagrpo.model.stored import StoredWeights
from lagrpo.rewards import builtin
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import RewardFunction, Rewards, load_function
from lagrpo.rollout.base import Request, RolloutEngine, SamplingParams
from lagrpo.rollout.episodes import MAIN_TASK, Episodes, build_episodes, max_reply_tokens
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.schedule import LoopState, Schedule, SyncDecision
from lagrpo.rollout.sync_check import (
    CHECK_PROMPTS,
    VersionCheck,
    WeightSyncCheck,
    WeightSyncError,
)
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine, build_engine
from lagrpo.rollout.vllm.server import StartedServer, open_servers, wait_until_ready
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import ModelSettings
from lagrpo.tasks import Task, complete_task, drop_overlong, load_task
from lagrpo.tasks.files import Row
from lagrpo.training import fsdp
from lagrpo.training.checks import chat_template, offline_prompts, server_shares_gpu
from lagrpo.training.ranks import FirstRankSampler, Ranks, add_up
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group, JsonView, Prompt

logger = logging.getLogger("lagrpo")
BuiltinEngine = LocalSampler | VllmEngine | FirstRankSampler


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """A task as a run uses it: with its prompts, reward workers and environments."""

    task: Task
    prompts: PromptSource
    reward_pool: RewardPool
    episodes: Episodes | None


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """The components of a run, on this rank."""

    settings: Settings
    tasks: Mapping[str, TaskSetup]
    """by name: the run's task (MAIN_TASK), and tasks of evaluation sets that have another one"""
    own_task: bool  # the caller gave the run's task as an object
    model: str  # the fingerprint of the initial weights
    data: Digests
    """the digests of all rows (`places`) and of the prompts that the run visits (`visited`)"""
    trainer: Trainer  # with the policy, the recipe and the reference
    sampler: RolloutEngine
    evaluator: BuiltinEngine
    share: Callable[[Sequence[Request]], list[Request]]
    """returns the requests that this rank samples and scores"""
    prefetcher: Prefetcher
    offline: OfflineData | None  # completions of files
    schedule: Schedule
    check_weight_sync: WeightSyncCheck | VersionCheck
    ranks: Ranks
    skeleton: Any  # the model of transformers without its numbers, if layers are sharded
    processes: ExitStack  # ends workers, and servers that were started

    @staticmethod
    def build(
        settings: Settings,
        recipe: Recipe,
        task: Task | None = None,
        ranks: Ranks | None = None,
        started: str | None = None,
        recorded: JsonView | None = None,
    ) -> TrainerComponents:
        """Builds the components.

        `task` replaces settings.task. `started`: the time at which the run began, if it resumes;
        chat templates show that date. `recorded`: the digests of the rows that it began with, by
        place. Collective. Raises SettingsError for data or a model that is missing, does not fit,
        or has changed.
        """
        ranks = ranks or Ranks()
        sampling = settings.rollout
        with ExitStack() as undo:
            loaded = load_tasks(settings, task)
            records = read_offline_records(settings, recipe)
            places = digest_places(loaded, records, evaluates=settings.eval.takes_place)
            with as_settings_error():
                check_places(recorded or {}, places)

            policy, servers = load_policy_and_servers(settings, loaded, ranks, started, undo)
            check_same_model(ranks, policy)

            tasks = set_up_tasks(settings, loaded, policy, undo)
            main = tasks[MAIN_TASK]
            check_training_prompts(settings, main, policy, ranks)
            data = {"places": places, "visited": digest_visited(main.prompts.visited)}
            offline = build_offline(settings, recipe, policy, records) if records else None

            skeleton = fsdp.without_values(policy.model.lm) if ranks.mesh is not None else None
            trainer = build_trainer(settings, recipe, policy, ranks)
            if skeleton is not None:
                # The trainer has sharded the policy. Only vLLM samples without whole weights here.
                backend = policy.model.backend
                policy = trainer.policy
                if sampling.engine != "vllm":
                    policy = fsdp.copy_whole(policy, skeleton, backend)
            params = sampling_params(settings, main.episodes)
            sampler = build_sampler(settings, policy, servers, params, ranks)
            share = choose_share(settings, ranks)
            undo.callback(sampler.close)
            evaluator = build_evaluator(settings, policy, sampler, ranks)
            if isinstance(evaluator, fsdp.EvaluationSampler):
                evaluator.source = trainer.policy

            def requests_of_batch(b: int) -> list[Request]:
                return share(main.prompts.batch(b))

            schedule = settings.schedule
            return TrainerComponents(
                settings=settings,
                tasks=tasks,
                own_task=task is not None,
                model=fingerprint(trainer.policy.all_weights),
                data=data,
                trainer=trainer,
                sampler=sampler,
                evaluator=evaluator,
                share=share,
                offline=offline,
                ranks=ranks,
                skeleton=skeleton,
                prefetcher=Prefetcher(sampler, requests_of_batch, sampling.num_generations, params),
                schedule=Schedule(schedule.kind, schedule.v, schedule.sync_at_kl),
                check_weight_sync=build_weight_sync_check(trainer.policy, main.prompts, sampler),
                processes=undo.pop_all(),
            )

    @property
    def main(self) -> TaskSetup:
        """The task that the run trains on; evaluation sets may have others."""
        return self.tasks[MAIN_TASK]

    @property
    def samples_here(self) -> bool:
        """True if this process samples, computing as the trainer does, up to rounding."""
        return isinstance(self.sampler, LocalSampler)

    def free_gpu(self) -> None:
        """Lets the server sleep while the trainer learns, if vllm.sleep says so."""
        if self.settings.vllm.sleep and isinstance(self.sampler, VllmEngine):
            self.sampler.sleep()

    def next_sync(self, state: LoopState, further: int = 0) -> SyncDecision:
        """Returns the decision of the schedule for the batch after `state`.

        The run has `further` batches more than schedule.batches.
        """
        settings = self.settings.schedule
        # With dynamic sampling `every(v)` submits batches one by one.
        prefetch = not self.settings.rollout.dynamic_sampling_rounds
        total = settings.batches + further
        return self.schedule.next(state, total, settings.stage_length, prefetch=prefetch)

    def read_offline(self, b: int) -> Sequence[Group]:
        """Returns the groups of batch b that come from a file, on rank 0."""
        if self.offline is None or not self.ranks.is_first:
            return ()
        return self.offline.batch(b, offline_prompts(self.settings))

    def gather_policy(self) -> Callable[[Path], None]:
        """Returns a function that writes π as it is now into a directory: a model, or its adapter.

        Rank 0 calls it. Collective.
        """
        policy = self.trainer.policy
        skeleton = self.skeleton
        if skeleton is None:
            return policy.save
        whole_weights = self.ranks.gather_whole(policy.weights)

        def save(directory: Path) -> None:
            save_model(skeleton, directory, whole_weights)
            policy.chat.save(directory)

        return save

    def keep_logs(self, run: Path) -> None:
        """Moves the logs of servers that this run started into its directory."""
        engine = self.sampler
        if isinstance(engine, FirstRankSampler):
            if not self.ranks.is_first:
                return
            engine = engine.engine
        if not isinstance(engine, VllmEngine):
            return
        for server in engine.servers:
            if isinstance(server, StartedServer) and server.log.is_file():
                number = 1 + len(list(run.glob("vllm-*.log")))  # a resumed run has older ones
                server.log = server.log.rename(run / f"vllm-{number}.log")

    def close(self) -> None:
        """Ends the workers, and the servers that were started."""
        self.processes.close()


# Data


def load_tasks(settings: Settings, task: Task | None = None) -> dict[str, Task]:
    """Returns the run's task, as MAIN_TASK, and other tasks of evaluation sets, by the set's name.

    A `task` replaces settings.task. Raises SettingsError.
    """
    task_settings = settings.task
    with as_settings_error():
        if task is None:
            main = load_task(task_settings, settings.run.seed)
        else:
            main = complete_task(task, task_settings.tools)
    tasks = {MAIN_TASK: main}
    for eval_set in settings.eval.sets:
        if eval_set.task is not None:
            with as_settings_error(f"eval.sets, {eval_set.name!r}"):
                tasks[eval_set.name] = load_task(eval_set.task, settings.run.seed)
    return tasks


def set_up_tasks(
    settings: Settings, tasks: Mapping[str, Task], policy: Policy, undo: ExitStack
) -> dict[str, TaskSetup]:
    """Returns tasks with their prompts, tokenized once, reward workers and environments.

    `undo` ends the workers and environments. Raises SettingsError.
    """
    setups: dict[str, TaskSetup] = {}
    sampling = settings.rollout
    sampled_prompts = settings.schedule.prompts_per_batch - offline_prompts(settings)
    for name, task in tasks.items():
        episodes = build_episodes(settings, task, policy.chat)
        if episodes is not None:
            undo.enter_context(episodes.pool)
        with as_settings_error("task"):
            fitting_task = drop_overlong(task, sampling, policy.chat)
            prompts = PromptSource(
                fitting_task,
                policy,
                settings.run.seed,
                sampled_prompts,
                sampling.max_prompt_length,
                episodes,
            )
            reward_pool = RewardPool(fitting_task.reward, deadline=settings.task.reward_timeout)
            undo.enter_context(reward_pool)
        setups[name] = TaskSetup(fitting_task, prompts, reward_pool, episodes)
    return setups


def warn_of_formats(reward: RewardFunction | Rewards, prompt: Prompt, chat: Chat) -> None:
    """Warns of a built-in reward `format` that no completion can get.

    Tokens that end completions are not in their text, and what the chat template begins an answer
    with may not fit.
    """
    for part in Rewards.from_reward(reward).parts:
        function = getattr(part.function, "func", part.function)
        if function is not builtin.format:
            continue
        options = getattr(part.function, "keywords", {})
        name = part.name or "format"
        pattern = options.get("pattern")
        if pattern is None:
            _warn_of_example(part.function, name, options.get("tags"), prompt, chat)
        else:
            _warn_of_pattern(name, pattern, chat)


def _warn_of_pattern(name: str, pattern: str, chat: Chat) -> None:
    """Warns of a pattern with a token that completions never have in their text."""
    plain_pattern = pattern.replace("\\", "")
    for token, token_id in chat.special_tokens.items():
        if token_id in chat.silent_ids and token in plain_pattern:
            logger.warning(
                "the reward %r has %s in its pattern, which is not in the text of completions",
                name,
                token,
            )
            return


def _warn_of_example(
    function: Callable[..., Any], name: str, tags: Any, prompt: Prompt, chat: Chat
) -> None:
    """Warns if an example of the format, read as a completion of the prompt, gets no reward."""
    example = builtin.format_example(tags)
    text = prompt.prefix + chat.as_completion(example.removeprefix(prompt.prefix.strip()))
    if not function(completion=text):
        message = "no completion can get the reward %r: %r would be read as %r"
        logger.warning(message, name, example, text)


def read_offline_records(settings: Settings, recipe: Recipe) -> list[Row]:
    """Returns the rows of the files of completions. Raises SettingsError."""
    with as_settings_error("offline.data"):
        records = read_records(settings.offline.data) if settings.offline.data else []
        has_logp = any(row.get("rollout_logprobs") is not None for row in records)
        check_logp(recipe, known=has_logp or not records)
    return records


def build_offline(
    settings: Settings, recipe: Recipe, policy: Policy, records: Sequence[Row]
) -> OfflineData:
    """Returns the completions of these records.

    Raises SettingsError for completions that model or recipe cannot use.
    """
    sampling = settings.rollout
    with as_settings_error("offline.data"):
        offline = OfflineData(
            records,
            policy,
            sampling.num_generations,
            settings.run.seed,
            system_prompt=settings.task.system_prompt,
            max_prompt_tokens=sampling.max_prompt_length,
            max_completion_tokens=sampling.max_completion_length,
            reads_logp=recipe.needs_rollout_logp,
        )
        check_logp(recipe, known=offline.has_logp)
    return offline


def check_logp(recipe: Recipe, *, known: bool) -> None:
    """Raises ValueError for offline completions without log-probs if the recipe reads log α."""
    if recipe.needs_rollout_logp and not known:
        raise ValueError(
            f"it has no rollout_logprobs, which loss.recipe = {recipe.name!r} needs; "
            "recipes that do not: reinforce, asymre, red_drop, red_weight"
        )


# The model


def build_policy(
    model: ModelSettings, tau: float, longest: int, seed: int = 0, *, is_sharded: bool = False
) -> Policy:
    """Returns the policy at temperature tau, for sequences of `longest` tokens.

    `seed` keys the start of adapters. With `is_sharded` the weights stay in their files until the
    trainer shards the policy, if the files allow it. Raises SettingsError.
    """
    device = pick_device()
    dtype = getattr(torch, pick_dtype(model.dtype, device)[0])
    with as_settings_error("LAGRPO_KERNELS", NoKernels):
        backend = choose_backend(chosen_kernels(), device, dtype)
    template = chat_template(model)
    lora = lora_of(model, seed)
    with loading(model):
        path = resolve_model(model.path)
        base_path = path
        if is_adapter(path):
            base_path = resolve_model(load_adapter_config(Path(path))[1])
        check_context(load_config(base_path), longest)
        if is_sharded:
            policy = open_policy(
                path,
                dtype,
                backend,
                tau,
                chat_template=template,
                template_kwargs=model.chat_template_kwargs,
            )
            if policy is not None:
                return policy
        policy = load_policy(
            path,
            dtype,
            device,
            tau,
            chat_template=template,
            backend=backend,
            lora=lora,
            template_kwargs=model.chat_template_kwargs,
        )
    if is_sharded:
        logger.warning(
            "model.path: every rank has loaded the whole model, because its files have other names "
            "than the model's weights; a copy by save_pretrained of transformers avoids that"
        )
    return policy


def with_start(policy: Policy, started: str | None, ranks: Ranks) -> Policy:
    """Returns the policy with the time at which the run began, for its chat template.

    The time is `started`, or now, as rank 0 has it. Collective.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    start = datetime.fromisoformat(ranks.on_rank0(lambda: started or now))
    return replace(policy, chat=replace(policy.chat, started=start))


def lora_of(model: ModelSettings, seed: int = 0) -> Lora | None:
    """Returns the adapters that the settings ask for; None for full training."""
    if not model.lora_r:
        return None
    return Lora(model.lora_r, model.lora_alpha, model.lora_target_modules, seed)


@contextmanager
def loading(model: ModelSettings) -> Generator[None]:
    """Turns errors of the body, which reads a model, into a SettingsError.

    transformers prints only errors meanwhile.
    """
    try:
        with quiet():
            yield
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        origin = ""
        if not Path(model.path).expanduser().is_dir():
            origin = " (not a directory here, so from the hub)"
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            f"model.path = {model.path!r}{origin}: the model cannot be loaded: {reason}"
        ) from error


def check_same_model(ranks: Ranks, policy: Policy) -> None:
    """Raises SettingsError if another rank has another model. Collective."""
    weights = policy.all_weights
    if isinstance(weights, StoredWeights):
        digest = weights.digest_first_rows()
    else:
        digest = fingerprint(weights)
    digests = ranks.gather(digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise SettingsError(f"model.path: model weights differ between ranks 0 and {rank}")


def load_policy_and_servers(
    settings: Settings,
    loaded: Mapping[str, Task],
    ranks: Ranks,
    started: str | None,
    undo: ExitStack,
) -> tuple[Policy, list[VllmClient]]:
    """Returns the policy, and the vLLM servers of the run on the first rank. Collective."""
    reply_tokens = max_reply_tokens(settings, *loaded.values())
    if ranks.is_first:
        print(f"loading {settings.model.path} …", flush=True)
    # The servers load the model while this process does.
    servers = start_servers(settings, reply_tokens, undo) if ranks.is_first else []
    ranks.on_rank0(partial(wait_for_shared_gpu, settings, servers))
    policy = build_policy(
        settings.model,
        settings.rollout.temperature,
        settings.max_sequence_length + reply_tokens,
        settings.run.seed,
        is_sharded=ranks.mesh is not None,
    )
    return with_start(policy, started, ranks), servers


def check_training_prompts(
    settings: Settings, main: TaskSetup, policy: Policy, ranks: Ranks
) -> None:
    """Raises SettingsError if a prompt of the run does not fit.

    The first rank warns of a reward `format` that no completion can get.
    """
    with as_settings_error("task"):
        main.prompts.check(settings.schedule.batches)
        if ranks.is_first:
            first_prompt = main.prompts.check_prompts(1)[0].prompt
            warn_of_formats(main.task.reward, first_prompt, policy.chat)


# Rollout engines and the trainer


def start_servers(settings: Settings, reply_tokens: int, undo: ExitStack) -> list[VllmClient]:
    """Returns the vLLM servers of a run while they start; none if this process samples.

    `reply_tokens` is the largest number of tokens that environments reply. `undo` closes the
    servers.
    """
    if settings.rollout.engine != "vllm":
        return []
    with loading(settings.model):
        check_files(resolve_model(settings.model.path))
    servers = open_servers(settings, reply_tokens, shares_gpu=server_shares_gpu(settings))
    return [undo.enter_context(closing(server)) for server in servers]


def wait_for_shared_gpu(settings: Settings, servers: Sequence[VllmClient]) -> None:
    """Waits for a server that has a GPU together with the trainer. Call it before a model loads.

    vLLM takes its share of a GPU's memory when it starts, and stops if that much is not free.
    Other servers start while the model loads. Raises SettingsError.
    """
    if server_shares_gpu(settings):
        wait_until_ready(servers)


def choose_share(settings: Settings, ranks: Ranks) -> Callable[[Sequence[Request]], list[Request]]:
    """Returns the function that picks this rank's requests: with vLLM rank 0 has all of them."""
    if settings.rollout.engine != "vllm":
        return ranks.share

    def share_on_rank0(requests: Sequence[Request]) -> list[Request]:
        return list(requests) if ranks.is_first else []

    return share_on_rank0


def sampling_params(settings: Settings, episodes: Episodes | None = None) -> SamplingParams:
    """Returns what training samples with. `episodes` are of the run's task."""
    rollout = settings.rollout
    return SamplingParams(
        "sample",
        tau=rollout.temperature,
        max_tokens=rollout.max_completion_length,
        episodes=episodes,
        stop=rollout.stop,
    )


def build_sampler(
    settings: Settings,
    policy: Policy,
    servers: list[VllmClient],
    params: SamplingParams,
    ranks: Ranks,
) -> RolloutEngine:
    """Returns the engine that samples training batches."""
    sampling = settings.rollout
    if sampling.has_own_engine:
        return load_own_engine(settings, policy)
    if sampling.engine == "local":
        return LocalSampler(
            copy_policy(policy),
            settings.run.seed,
            params.max_tokens,
            sampling.max_num_seqs,
            episodes=params.episodes,
            stop=params.stop,
        )
    engine = build_engine(settings, policy, servers, params) if ranks.is_first else None
    if engine is None or ranks.size > 1:
        return FirstRankSampler(ranks, engine)
    return engine


def load_own_engine(settings: Settings, policy: Policy) -> RolloutEngine:
    """Returns the engine that the function of rollout.engine makes. Raises SettingsError."""
    name = settings.rollout.engine
    with as_settings_error("rollout.engine"):
        make_engine = load_function(name)
        try:
            engine = make_engine(settings, policy)
        except (ValueError, ImportError):  # their messages are for the user
            raise
        except Exception as error:
            raise ValueError(f"{name!r} raised {describe_raised(error)}") from error
        members = [name for name in vars(RolloutEngine) if not name.startswith("_")]
        missing = [name for name in members if not hasattr(engine, name)]
        if missing:
            raise ValueError(
                f"{name!r} returned a {type(engine).__name__} without {', '.join(missing)}; "
                "lagrpo.rollout.base.RolloutEngine says what an engine has"
            )
    return engine


def build_evaluator(
    settings: Settings, policy: Policy, sampler: RolloutEngine, ranks: Ranks
) -> BuiltinEngine:
    """Returns what samples evaluations: the policy itself in this process, or the servers.

    If layers are sharded, `policy` is a whole copy, which loads the trainer's weights each time.
    """
    if isinstance(sampler, VllmEngine | FirstRankSampler):
        return sampler
    seed = settings.run.seed
    max_tokens = settings.rollout.max_completion_length
    max_num_seqs = settings.rollout.max_num_seqs
    if ranks.mesh is not None:
        return fsdp.EvaluationSampler(policy, seed, max_tokens, max_num_seqs)
    return LocalSampler(policy, seed, max_tokens, max_num_seqs)


def build_trainer(settings: Settings, recipe: Recipe, policy: Policy, ranks: Ranks) -> Trainer:
    """Returns the trainer, with a reference if the recipe has a KL term.

    If layers are sharded, it reads the weights of the policy, and checks them. Collective then, and
    raises SettingsError.
    """
    optimizer = settings.optimizer
    schedule = settings.schedule
    optimization = Optimization(
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm or None,
        schedule=optimizer.lr_scheduler_type,
        warmup=optimizer.warmup_steps,
        masters="dithered" if optimizer.dither_master_weights else "plain",
        offload_moments=optimizer.offload_optimizer,
        full_rate_ess=optimizer.scale_lr_by_ess,
        log_gradient_cosine=optimizer.log_gradient_cosine,
        updates=schedule.batches * schedule.num_iterations,
        seed=settings.run.seed,
    )
    reference = None
    if ranks.mesh is not None:
        policy = fsdp.with_modules(policy)
        if recipe.needs_pi_ref:
            reference = fsdp.copy_sharded(policy, ranks.mesh)
    elif recipe.needs_pi_ref:
        reference = copy_policy(policy)
    with loading(settings.model):
        trainer = Trainer(
            policy,
            recipe,
            optimization,
            reference,
            activation_checkpointing=optimizer.gradient_checkpointing,
            ranks=ranks,
        )
        if isinstance(policy.weights, StoredWeights):
            check_finite_rows(trainer)
            check_attention(trainer.policy)
            fsdp.free_gathered(trainer.policy.model)
            trainer.load_reference()
    return trainer


def check_finite_rows(trainer: Trainer) -> None:
    """Raises ValueError for a weight with values that are not finite, if layers are sharded.

    Each rank looks at its own rows, in float32: a master is finite if its weight is. Collective.
    """
    counts: dict[str, float] = {}
    for span, master in zip(trainer.masters.spans, trainer.masters.parameters, strict=True):
        counts[span.name] = count_not_finite(master)
    shapes = trainer.policy.weights.shapes()
    for name, count in add_up(trainer.ranks.gather(counts)).items():
        raise_if_not_finite(name, int(count), shapes[name].numel(), trainer.policy.dtype)


def build_weight_sync_check(
    policy: Policy, source: PromptSource, sampler: RolloutEngine
) -> WeightSyncCheck | VersionCheck:
    """Returns the check after every weight sync.

    Raises SettingsError if the in-process sampler computes something else than the trainer.
    """
    prompts = source.check_prompts(CHECK_PROMPTS)
    if isinstance(sampler, FirstRankSampler):
        return WeightSyncCheck(prompts, sampler.dtype)
    if isinstance(sampler, VllmEngine):
        return WeightSyncCheck(prompts, sampler.weights.dtype)
    if not isinstance(sampler, LocalSampler):
        return VersionCheck()
    check = WeightSyncCheck(prompts, policy.dtype)
    with as_settings_error("model.path", WeightSyncError):
        check.start(policy, sampler)
    return check
