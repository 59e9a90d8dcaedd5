"""What the processes of a run have between them: section distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import model_validator

from lagrpo.settings.section import Section

ABSENT = {
    "tensor": 'strategy = "fsdp2" divides the memory of a model; servers take --tensor-parallel-size of their own',
    "context": "a sequence is computed by one device: optimizer.gradient_checkpointing and fewer tokens save memory",
    "sequence": "a sequence is computed by one device: optimizer.gradient_checkpointing and fewer tokens save memory",
    "expert": "mixtures of experts are not supported",
    "pipeline": 'strategy = "fsdp2" divides the memory of a model',
}
"""Kinds of parallelism that are not there, and what to use."""


class DistributedSettings(Section):
    """Settings of a run that torchrun starts as several processes, the ranks; others do not read them."""

    strategy: Literal["zero1", "fsdp2"] = "zero1"
    """What each rank has only a part of. zero1: float32 masters, moments and what an update needs; every rank has
    all the weights (ZeRO-1). fsdp2: weights and gradients, too; a layer is gathered when it computes (FSDP2, ZeRO-3).
    That is for models that do not fit otherwise: it moves the weights twice for each row of a batch. The ranks of a
    host have a copy between them, if all hosts have as many."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_absent(cls, given: Any) -> Any:
        for name in given if isinstance(given, Mapping) else ():
            for kind, instead in ABSENT.items():
                if str(name).startswith(kind):
                    raise ValueError(f"{name}: there is no {kind} parallelism; {instead}")
        return given
