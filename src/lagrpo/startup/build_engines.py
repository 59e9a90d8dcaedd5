"""From settings to what samples: rollout engines, vLLM servers, and the check of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from lagrpo.core.references import call_users_function
from lagrpo.data.prompts import PromptSource
from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import as_settings_error
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_context, check_files, load_config
from lagrpo.model.model import Policy, copy_policy
from lagrpo.rewards.entries import load_function
from lagrpo.rollout.base import (
    EngineDefaults,
    RolloutEngine,
    SamplingParams,
    WeightCheck,
    WeightSyncError,
)
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.sync_check import CHECK_PROMPTS
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import build_engine
from lagrpo.rollout.vllm.first_rank import FirstRankSampler
from lagrpo.rollout.vllm.server import open_servers, wait_until_ready
from lagrpo.settings.schema import Settings
from lagrpo.startup.build_policy import loading
from lagrpo.startup.checks import server_shares_gpu
from lagrpo.tasks.episodes import Episodes


def start_servers(settings: Settings, reply_tokens: int, undo: ExitStack) -> list[VllmClient]:
    """Returns the vLLM servers of a run while they start; none if this process samples.

    `reply_tokens` is the largest number of tokens that environments reply. `undo` closes the
    servers.
    """
    if not settings.rollout.uses_vllm:
        return []
    with loading(settings.model.path):
        path = resolve_model(settings.model.path)
        check_files(path)
        check_context(load_config(path), settings.max_sequence_length + reply_tokens)
    servers = open_servers(settings, reply_tokens, shares_gpu=server_shares_gpu(settings))
    return [undo.enter_context(closing(server)) for server in servers]


def wait_for_shared_gpu(settings: Settings, servers: Sequence[VllmClient]) -> None:
    """Waits for a server that has a GPU together with the trainer. Call it before a model loads.

    vLLM takes its share of a GPU's memory when it starts, and stops if that much is not free.
    Other servers start while the model loads. Raises SettingsError.
    """
    if server_shares_gpu(settings):
        wait_until_ready(servers)


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
    longest_prompt: int,
) -> RolloutEngine:
    """Returns the engine that samples training batches.

    On-policy the local engine has the policy itself, which computes whatever a copy would. No
    training prompt is longer than `longest_prompt` tokens.
    """
    sampling = settings.rollout
    schedule = settings.schedule
    if sampling.has_own_engine:
        return load_own_engine(settings, policy)
    if sampling.engine == "local":
        max_rows = sampling.max_num_seqs
        if schedule.continues_completions:
            # All completions that may have begun and not been learned from, on this rank.
            prompts = -(-schedule.prompts_per_batch // ranks.size) * (schedule.v + 1)
            max_rows = min(max_rows, prompts * sampling.num_generations)
        # In training mode modules recompute activations, which a recorded step cannot do.
        is_in_training_mode = policy.model.layers is None and policy.model.lm.training
        if not schedule.is_on_policy or is_in_training_mode:
            policy = copy_policy(policy)
        return LocalSampler(
            policy,
            settings.run.seed,
            params.max_tokens,
            max_rows,
            episodes=params.episodes,
            stop=params.stop,
            continues_completions=schedule.continues_completions,
            longest_prompt=longest_prompt,
        )
    return build_served_engine(settings, policy, servers, params, ranks)


def build_served_engine(
    settings: Settings,
    policy: Policy,
    servers: Sequence[VllmClient],
    params: SamplingParams,
    ranks: Ranks,
) -> RolloutEngine:
    """Returns the engine over the vLLM servers of rank 0. Collective."""
    engine = build_engine(settings, policy, servers, params) if ranks.is_first else None
    if engine is None or ranks.size > 1:
        return FirstRankSampler(ranks, engine)
    return engine


def load_own_engine(settings: Settings, policy: Policy) -> RolloutEngine:
    """Returns the engine that the function of rollout.engine makes. Raises SettingsError.

    What it does not say of itself is as in `EngineDefaults`.
    """
    name = settings.rollout.engine
    with as_settings_error("rollout.engine"):
        engine = call_users_function(load_function(name), repr(name), settings, policy)
        missing = [name for name in public_members(RolloutEngine) if not hasattr(engine, name)]
        if missing:
            raise ValueError(
                f"{name!r} returned a {type(engine).__name__} without {', '.join(missing)}; "
                "lagrpo.rollout.base.RolloutEngine says what an engine has"
            )
    for member, default in public_members(EngineDefaults).items():
        if not hasattr(engine, member):
            setattr(engine, member, partial(default, engine) if callable(default) else default)
    return engine


def public_members(protocol: type) -> dict[str, Any]:
    """Returns the members that a Protocol itself defines, by name."""
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


def build_evaluator(settings: Settings, policy: Policy, engine: RolloutEngine) -> RolloutEngine:
    """Returns what samples evaluations: the engine, if it does, else the policy in this process."""
    if engine.evaluates:
        return engine
    return sampler_of_policy(settings, policy)


def sampler_of_policy(settings: Settings, policy: Policy) -> LocalSampler:
    """Returns what samples from the policy itself, in this process, for evaluations."""
    rollout = settings.rollout
    return LocalSampler(
        policy, settings.run.seed, rollout.max_completion_length, rollout.max_num_seqs
    )


def build_weight_check(policy: Policy, source: PromptSource, engine: RolloutEngine) -> WeightCheck:
    """Returns the engine's check after every weight sync.

    Raises SettingsError if the engine computes something else than the trainer.
    """
    with as_settings_error("model.path", WeightSyncError):
        return engine.weight_check(policy, source.check_prompts(CHECK_PROMPTS))
