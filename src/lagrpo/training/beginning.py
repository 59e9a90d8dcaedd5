"""What a run records when it begins: its directory, its settings, and where it runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lagrpo.model.backend import pick_dtype
from lagrpo.runs import Run, RunExistsError, collect_environment
from lagrpo.runs.directory import locked
from lagrpo.settings.schema import RunSettings
from lagrpo.settings.toml import to_toml
from lagrpo.training.build import TrainerComponents

READ_OF_TASK = {"reward_range": "", "system_prompt": " (of questions in offline.data)"}
"""What is read of settings.task if the task is the caller's object, and for what."""


def describe_environment(parts: TrainerComponents, identity: str | None = None) -> dict[str, Any]:
    """What environment.json says: the run's identity (a new one by default), versions, machine, and what computes."""
    policy, dtype = parts.trainer.policy, parts.settings.model.dtype
    own = {"id": secrets.token_hex(8) if identity is None else identity}
    environment = own | collect_environment(str(policy.device))
    environment["ranks"] = parts.ranks.size
    if (mesh := parts.ranks.mesh) is not None:
        environment["sharded"] = f"layers, each over {mesh.size(mesh.ndim - 1)} ranks"
    environment["computation"] = policy.model.computation
    environment["decoding"] = parts.sampled.model.decoding if parts.sampled else "by vLLM"
    environment["dtype"], environment["dtype_reason"] = pick_dtype(dtype, policy.device)
    environment["agreement"] = asdict(parts.agreement) if parts.agreement else None
    environment["offline"] = str(parts.offline) if parts.offline is not None else None
    return environment


def write_config(parts: TrainerComponents) -> str:
    """config.toml: the settings, and what they do not say if the task is the caller's object."""
    kind = type(parts.task)
    read = f"of [task] only {' and '.join(name + what for name, what in READ_OF_TASK.items())} were read"
    own = f"# The task was the caller's own object, a {kind.__module__}.{kind.__qualname__}; {read}.\n"
    of_run = parts.settings.run.model_copy(update={"resume": None})  # given anew each time
    return (own if parts.own_task else "") + to_toml(parts.settings.model_copy(update={"run": of_run}))


def create_run(run: RunSettings, settings: Mapping[str, Any], config: str, environment: Mapping[str, Any]) -> Run:
    """The directory of a new run. Raises RunLockedError if another process has begun one of this name meanwhile."""
    try:
        return Run.create(Path(run.output_dir), run.name, settings, config, environment)
    except RunExistsError:
        with locked(Path(run.output_dir) / str(run.name)):
            raise
