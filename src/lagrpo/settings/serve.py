"""The settings of `lagrpo serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from lagrpo.settings.schema import RolloutSettings
from lagrpo.settings.vllm import VllmSettings

SAMPLING, VLLM = RolloutSettings(), VllmSettings()


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Start a vLLM server for runs to attach to.

    It prints the URL, the settings that attach to it, and the API key unless $LAGRPO_VLLM_API_KEY sets it. The words
    after -- go to vLLM unchanged: lagrpo serve MODEL -- --data-parallel-size 7
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Hub id or directory of a causal language model, or smollm2."""
    host: str = "127.0.0.1"
    """Address that it listens on. One that other machines can reach is refused unless $LAGRPO_VLLM_API_KEY is set."""
    port: int = 8000
    """Port that it listens on."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """dtype of its weights and arithmetic."""
    max_model_len: int = SAMPLING.max_prompt_length + SAMPLING.max_completion_length + 1
    """Longest sequence; a run needs rollout.max_prompt_length + rollout.max_completion_length + 1."""
    max_num_seqs: int = SAMPLING.max_num_seqs
    """Most completions decoded at a time."""
    weight_sync: Literal["directory", "nccl"] = VLLM.weight_transfer
    """How weights will travel (vllm.weight_transfer of the run)."""
    lora_rank: int = 0
    """Largest rank of adapters that it takes (model.lora_r of the run); 0: none."""
    options: UseAppendAction[tuple[str, ...]] = ()
    """Further options of `vllm serve`: --options="--tensor-parallel-size 2", or after --. None that hold a secret."""
