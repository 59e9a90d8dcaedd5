"""From settings to the two sides of Algorithm 1.

The data comes first, then the model: errors that are cheap to find come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from lagrpo.core.objective import Recipe
from lagrpo.data.fingerprint import Digests, check_places, digest_places, digest_visited
from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import as_settings_error
from lagrpo.logs import print_text
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_attention
from lagrpo.model.model import Policy, copy_policy, fingerprint
from lagrpo.model.stored import StoredWeights
from lagrpo.resume.model_files import Inputs, read_model_files
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.settings.schema import Settings
from lagrpo.startup.build_engines import (
    build_evaluator,
    build_sampler,
    build_weight_check,
    sampling_params,
    start_servers,
    wait_for_shared_gpu,
)
from lagrpo.startup.build_episodes import max_reply_tokens
from lagrpo.startup.build_policy import build_policy, check_same_model, loading, with_start
from lagrpo.startup.build_tasks import (
    TaskSetup,
    build_offline,
    check_training_prompts,
    load_tasks,
    read_offline_records,
    set_up_tasks,
    warn_of_trained_prompts,
)
from lagrpo.startup.teacher import (
    build_teacher,
    check_finite_rows,
    check_teacher,
    longest_sequence,
    read_teacher_files,
)
from lagrpo.tasks import Task
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.training import fsdp
from lagrpo.training.entropy import EntropyTerm
from lagrpo.training.optimizer import Optimization
from lagrpo.training.sampling import Sampling
from lagrpo.training.trainer import Trainer
from lagrpo.types import JsonView


@dataclass(frozen=True, slots=True)
class BuiltRun:
    """A run on this rank: its settings, tasks and inputs, the two sides, and their processes."""

    settings: Settings
    tasks: Mapping[str, TaskSetup]
    """by name: the run's task (MAIN_TASK), and tasks of evaluation sets that have another one"""
    own_task: bool  # the caller gave the run's task as an object
    inputs: Inputs
    trainer: Trainer  # π's side: the policy, the recipe and the reference
    sampling: Sampling  # α's side
    processes: ExitStack  # ends workers, and servers that were started

    @property
    def main(self) -> TaskSetup:
        """The task that the run trains on; evaluation sets may have others."""
        return self.tasks[MAIN_TASK]

    def close(self) -> None:
        """Ends the workers, and the servers that were started."""
        self.processes.close()


def build_run(
    settings: Settings,
    recipe: Recipe,
    task: Task | None = None,
    ranks: Ranks | None = None,
    started: str | None = None,
    recorded: JsonView | None = None,
) -> BuiltRun:
    """Builds the two sides of a run.

    `task` replaces settings.task. `started`: the time at which the run began, if it resumes; chat
    templates show that date. `recorded`: the digests of the rows that it began with, by place.
    Collective. Raises SettingsError for data or a model that is missing, does not fit, or has
    changed.
    """
    ranks = ranks or Ranks()
    with ExitStack() as undo:
        loaded = load_tasks(settings, task)
        if ranks.is_first:
            warn_of_trained_prompts(settings, loaded)
        records = read_offline_records(settings, recipe)
        places = digest_places(loaded, records, evaluates=settings.eval.takes_place)
        with as_settings_error():
            check_places(recorded or {}, places)

        longest = longest_sequence(settings, *loaded.values())
        check_teacher(settings, recipe, longest)
        policy, servers = load_policy_and_servers(settings, loaded, ranks, started, undo)
        check_same_model(ranks, policy)

        tasks = set_up_tasks(settings, loaded, policy, undo)
        main = tasks[MAIN_TASK]
        check_training_prompts(settings, main.prompts, policy, ranks)
        data: Digests = {"places": places, "visited": digest_visited(main.prompts.visited)}
        offline = build_offline(settings, recipe, policy, records) if records else None

        backend = policy.model.backend
        teacher = None
        if settings.loss.reference is not None:
            teacher = build_teacher(settings, policy, longest, ranks)
        trainer = build_trainer(settings, recipe, policy, ranks, teacher)
        # The trainer may have sharded the policy. Only vLLM samples without whole weights here.
        policy = trainer.policy
        if trainer.skeleton is not None and not settings.rollout.uses_vllm:
            policy = fsdp.copy_whole(policy, trainer.skeleton, backend)
        params = sampling_params(settings, main.episodes)
        engine = build_sampler(
            settings, policy, servers, params, ranks, main.prompts.longest_prompt
        )
        undo.callback(engine.close)
        trainer.free_idle_memory = engine.free_idle_memory
        evaluator = build_evaluator(settings, policy, engine)
        weight_check = build_weight_check(trainer.policy, main.prompts, engine)
        return BuiltRun(
            settings=settings,
            tasks=tasks,
            own_task=task is not None,
            inputs=Inputs(
                model_path=settings.model.path,
                model=fingerprint(trainer.policy.all_weights),
                model_files=read_model_files(resolve_model(settings.model.path)),
                data=data,
                teacher=None if teacher is None else fingerprint(teacher.all_weights),
                teacher_files=read_teacher_files(settings),
            ),
            trainer=trainer,
            sampling=Sampling(
                settings, engine, evaluator, weight_check, main, offline, params, ranks
            ),
            processes=undo.pop_all(),
        )


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
        print_text(f"loading {settings.model.path} …", flush=True)
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


def build_trainer(
    settings: Settings, recipe: Recipe, policy: Policy, ranks: Ranks, teacher: Policy | None = None
) -> Trainer:
    """Returns the trainer, with a reference if the recipe reads log π_ref.

    The reference is `teacher`, or a copy of the policy. If layers are sharded, the weights of the
    policy are read and checked here. Collective then, and raises SettingsError.
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
        full_rate_kl=optimizer.scale_lr_by_kl,
        oldest_samples=schedule.oldest_samples,
        log_gradient_cosine=optimizer.log_gradient_cosine,
        updates=schedule.batches * schedule.num_iterations,
        seed=settings.run.seed,
    )
    reference = teacher
    if ranks.mesh is not None:
        policy = fsdp.without_panels(policy)
        if recipe.needs_pi_ref and teacher is None:
            reference = fsdp.copy_sharded(policy, ranks.mesh)
    elif recipe.needs_pi_ref and teacher is None:
        reference = copy_policy(policy)
    with loading(settings.model.path):
        trainer = Trainer(
            policy,
            recipe,
            optimization,
            reference,
            has_teacher=teacher is not None,
            entropy=EntropyTerm(settings.loss.entropy_coef, settings.loss.entropy_target),
            activation_checkpointing=optimizer.gradient_checkpointing,
            ranks=ranks,
        )
        if isinstance(policy.weights, StoredWeights):
            check_finite_rows(trainer.policy, ranks)
            check_attention(trainer.policy)
            fsdp.free_gathered(trainer.policy.model)
            trainer.load_reference()
    return trainer
