"""The settings of `lagrpo plan`: the machines, and every figure of the model that a user may know better."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lagrpo.settings.section import Section


class PlanSettings(Section):
    """Machines, and figures that replace those of the model's tables. Settings of the run are given as for train."""

    gpus: int = Field(default=1, ge=1, le=65_536)
    """GPUs in all, of servers and learners; with --gpu cpu processes that share one machine."""
    gpu: str | None = None
    """Kind of GPU, such as h200, or cpu. By default that of the run --from, a CPU or what --peak … describe."""
    network: str | None = None
    """Network between nodes, of one GPU and one way: 400Gb (bits a second) or 50GB (bytes)."""
    servers: int | None = Field(default=None, ge=0)
    """GPUs that serve; 0: every rank samples its share, then learns. By default the fastest split."""
    from_run: str | None = None
    """--from RUN: take the rates from a finished run's metrics and rollouts; without a settings file, its settings."""
    node: int = Field(default=8, ge=1)
    """GPUs of a node; more than these talk over the network."""
    weight_sync: Literal["directory", "nccl", "ipc"] | None = None
    """How weights reach servers; by default vllm.weight_sync where sampling.sampler is vllm, else nccl (cpu:
    directory)."""
    prompt_tokens: float | None = Field(default=None, gt=0)
    """Mean length of a prompt; by default the run's, else sampling.max_prompt_tokens."""
    tokens: float | None = Field(default=None, gt=0)
    """Mean length of a completion; by default the run's, else sampling.max_tokens."""
    learned_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the completions that the loss reads (masked groups are not); by default the run's, else 1."""
    judging: float | None = Field(default=None, ge=0)
    """Seconds in which one worker judges a completion."""
    peak: float | None = Field(default=None, gt=0)
    """Dense bfloat16 peak of a GPU, TFLOP/s."""
    bandwidth: float | None = Field(default=None, gt=0)
    """Memory bandwidth of a GPU, GB/s."""
    memory: float | None = Field(default=None, gt=0)
    """Memory of a GPU, GB."""
    link: float | None = Field(default=None, gt=0)
    """Bandwidth between the GPUs of a node, of one GPU and one way, GB/s."""
    learning_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the peak that learning reaches (MFU)."""
    decoding_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the peak that the sampler's products reach where they are bound by computing."""
    bandwidth_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the memory bandwidth that decoding and the optimizer reach."""
    network_share: float | None = Field(default=None, gt=0, le=1)
    """Share of link and network that collectives and weight syncs reach."""
    step: float | None = Field(default=None, ge=0)
    """Seconds that a decoding step takes beside reading and multiplying."""
    launch: float | None = Field(default=None, ge=0)
    """Seconds that a micro-batch takes in learning beside its operations."""
    server_speed: float | None = Field(default=None, gt=0)
    """How fast a server generates, as a multiple of the in-process sampler on the same GPU."""
    sync: float | None = Field(default=None, ge=0)
    """Seconds of a weight sync within a rank beside its bytes: the parity check."""
    server_sync: float | None = Field(default=None, ge=0)
    """Seconds of a weight sync to servers beside its bytes: the parity check, pausing, answers."""
    disk: float | None = Field(default=None, gt=0)
    """Bandwidth of the directory that weights travel through, GB/s."""
