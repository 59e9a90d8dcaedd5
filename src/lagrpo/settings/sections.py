"""The sections of the settings: frozen and validated. The line under each field is its help.

The section of the loss is in settings/loss.py.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from lagrpo.core.references import is_reference
from lagrpo.errors import suggest
from lagrpo.logs import is_secret, redact_values
from lagrpo.rewards.reward import sum_ranges
from lagrpo.settings.section import Options, Section, Table
from lagrpo.settings.stop_rule import StopRule

Beta = Annotated[float, Field(ge=0, lt=1)]
"""A decay of AdamW."""

ENGINES = ("local", "vllm")
"""The rollout engines of lagrpo."""

REMOVED = {
    "vllm.on_weight_sync": "it no longer exists: set schedule.max_staleness instead of "
    "schedule.constant_lag, and completions go on after weight syncs"
}
"""Settings of older versions, and what replaces them."""

NAME = r"^[A-Za-z][A-Za-z0-9_]{0,39}$"
"""Names of rewards and evaluation sets, which become parts of metrics and files."""


def split_server_args(options: Sequence[str]) -> tuple[str, ...]:
    """Returns options of vLLM as a shell would split them.

    Raises ValueError, without the value, for an option that holds a secret.

    >>> split_server_args(["--seed 3", "--dtype=float16"])
    ('--seed', '3', '--dtype=float16')
    """
    words = tuple(word for option in options for word in shlex.split(option))
    option = ""
    for word in words:
        if word.startswith("--"):
            option = word.partition("=")[0]
        if is_secret(option) or redact_values(word) != word:
            raise ValueError(
                f"server_args: all users of this machine could read the secret in {option!r}: set "
                "an environment variable (HF_TOKEN, LAGRPO_VLLM_API_KEY), which servers inherit"
            )
    return words


class RunSettings(Section):
    """Name, place, seed and trackers of a run."""

    name: str | None = None
    """Name of the run's directory; default: from settings and time"""
    output_dir: str = "runs"
    """Directory that holds the runs"""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seed of every random number"""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers: tensorboard, wandb, trackio"""
    log_completions: int = Field(default=16, ge=0, le=1024)
    """Completions per batch that trackers get"""

    @field_validator("output_dir")
    @classmethod
    def _expand_home(cls, output_dir: str) -> str:
        """Expands ~ once for all readers of the setting, as in the paths of models and data."""
        return os.path.expanduser(output_dir)


class ModelSettings(Section):
    """The model, its chat template, and LoRA adapters."""

    path: str = "smollm2"
    """Hub id or directory of a causal language model, or smollm2 (embedded)"""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """bfloat16, float32, or auto: bfloat16 if the hardware multiplies in it"""
    chat_template: str | None = None
    """File with a Jinja chat template; default: the tokenizer's"""
    chat_template_kwargs: Options = Field(default={})
    """Variables for the chat template, such as { enable_thinking = false }"""
    lora_r: int = Field(default=0, ge=0, le=512)
    """Rank of LoRA adapters; 0 trains all weights"""
    lora_alpha: float = Field(default=32.0, gt=0, le=1e6)
    """Adapters are scaled by lora_alpha / lora_r"""
    lora_target_modules: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Linear layers with adapters, by name; all-linear: all in the decoder"""

    @model_validator(mode="after")
    def _check_lora(self) -> ModelSettings:
        """Raises ValueError for settings of adapters that would have no effect."""
        for name in ("lora_alpha", "lora_target_modules"):
            if not self.lora_r and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is set, but lora_r is 0, which trains all weights: set model.lora_r"
                )
        return self


class RewardSettings(Section):
    """A reward function: its name in metrics, weight and range."""

    name: str = Field(pattern=NAME)
    """Name in metrics and records: letters, digits and _"""
    reward: str
    """task (the task's own), a built-in one (exact, number, math …) or package.module:function"""
    weight: float = 1.0
    """The reward of a completion is the sum of weight x value; 0 only measures"""
    range: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest value, before weighting"""
    options: Options = Field(default={})
    """Keyword arguments of the reward function"""

    @model_validator(mode="before")
    @classmethod
    def _add_name(cls, entry: object) -> object:
        """Names a reward after its function. A text stands for a table with that function."""
        if isinstance(entry, str):
            entry = {"reward": entry}
        if not isinstance(entry, dict) or "name" in entry:
            return entry
        reward = entry.get("reward")
        # An entry without a name gets one error, about its reward, and not two.
        function_name = reward.rpartition(":")[2] if isinstance(reward, str) else "unnamed"
        return {"name": re.sub(r"\W", "_", function_name), **entry}

    @model_validator(mode="after")
    def _check(self) -> RewardSettings:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range goes from the smallest to the largest value, not {self.range}")
        return self


class TaskSettings(Section):
    """The prompts, and the rewards, tools or environment that judge completions."""

    name: str = "arithmetic"
    """arithmetic, countdown, gsm8k, math, custom …, or package.module:function"""
    data: str | None = None
    """Rows of the task: file, directory or hub id"""
    prompt_column: str | None = None
    """Column with the prompt"""
    answer_column: str | None = None
    """Column with the reference answer"""
    system_prompt: str | None = None
    """System message before every prompt; "" for none; default: the task's own"""
    options: Options = Field(default={})
    """Options of this task, such as { digits = 2 } (docs/data-and-rewards.md)"""
    rewards: tuple[RewardSettings, ...] = ()
    """Rewards: names, or tables (name, reward, weight, range, options); default: the task's own"""
    reward_timeout: float = Field(default=5.0, gt=0, le=1e6)
    """Seconds per call of a reward or environment; then the completion is unscored"""
    reward_workers: int | None = Field(default=None, ge=1)
    """Reward processes per rank; default: a share of one per four cores, at most 8"""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: calculator, or package.module:function"""
    max_turns: int = Field(default=8, ge=1)
    """Most turns per completion, with tools or an environment"""

    @property
    def reward_range(self) -> tuple[float, float]:
        """The smallest and the largest reward: the bounds are in units of this range."""
        if not self.rewards:
            return (0.0, 1.0)
        return sum_ranges([(reward.weight, reward.range) for reward in self.rewards])

    @property
    def task_options(self) -> Table:
        """The task's own options: `options`, and the settings of the data that are set."""
        data_options = {
            "data": self.data,
            "prompt_column": self.prompt_column,
            "answer_column": self.answer_column,
        }
        set_options = {name: value for name, value in data_options.items() if value is not None}
        return set_options | self.options

    @model_validator(mode="after")
    def _check_weights(self) -> TaskSettings:
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise ValueError(
                "rewards: all weights are 0, so every reward would be 0; give one a weight"
            )
        return self


class RolloutSettings(Section):
    """The sampling of completions."""

    engine: str = "local"
    """Rollout engine: local (this process), vllm (servers), or package.module:name"""
    num_generations: int = Field(default=16, ge=1)
    """Completions per prompt (group size G)"""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, in rollouts and training"""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Longest prompt in tokens, chat template included"""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion in tokens; longer ones are cut"""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion or a turn, besides end tokens"""
    max_num_seqs: int = Field(default=128, ge=1)
    """Completions decoded at a time (with vllm: by each server)"""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Prompts beyond max_prompt_length: error (stop) or drop (leave out)"""
    dynamic_sampling_rounds: int = Field(default=0, ge=0)
    """Rounds that replace groups with equal rewards by other prompts (DAPO)"""

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, engine: str) -> str:
        if engine not in ENGINES and not is_reference(engine):
            raise ValueError(
                f"no engine {engine!r}; there are {', '.join(ENGINES)} and "
                f"'package.module:function'.{suggest(engine, ENGINES)}"
            )
        return engine

    @property
    def has_own_engine(self) -> bool:
        """True if a function of the user's makes the engine."""
        return self.engine not in ENGINES

    @property
    def uses_vllm(self) -> bool:
        """True if vLLM servers sample."""
        return self.engine == "vllm"


class VllmSettings(Section):
    """vLLM servers: which ones, and how weights reach them."""

    urls: tuple[str, ...] = ()
    """Running servers (http://host:port); default: the run starts one"""
    gpus: tuple[int, ...] = ()
    """GPUs of the server that the run starts; default: all"""
    server_args: tuple[str, ...] = ()
    """More options of vllm serve for that server"""
    weight_transfer: Literal["directory", "nccl"] = "directory"
    """Transfer of weights to servers: directory (shared files) or nccl"""
    sleep: bool = False
    """Free the server's GPU memory while the trainer learns: one GPU, sync_every = 1"""
    load_timeout: float = Field(default=1200.0, gt=0, le=1e6)
    """Seconds in which a server must start, or load weights"""
    generate_timeout: float = Field(default=3600.0, gt=0, le=1e6)
    """Seconds in which a server must sample a group"""

    @model_validator(mode="before")
    @classmethod
    def _drop_on_weight_sync(cls, values: object) -> object:
        """Drops a setting of older versions, which runs and their checkpoints have by default."""
        if not isinstance(values, Mapping) or "on_weight_sync" not in values:
            return values
        if values["on_weight_sync"] != "finish":
            raise ValueError(f"on_weight_sync: {REMOVED['vllm.on_weight_sync']}")
        return {name: value for name, value in values.items() if name != "on_weight_sync"}

    @model_validator(mode="after")
    def _check(self) -> VllmSettings:
        split_server_args(self.server_args)
        if not all(re.fullmatch(r"https?://[^/@?#\s]+/?", url) for url in self.urls):
            raise ValueError(
                "urls: write http://host:port; the API key goes into $LAGRPO_VLLM_API_KEY"
            )
        if self.urls and self.sleep:
            raise ValueError(
                "sleep is for a server that the run starts; urls names running servers"
            )
        if self.weight_transfer == "nccl" and not self.urls and not self.gpus:
            raise ValueError(
                "weight_transfer = 'nccl' needs a GPU that the trainer does not have: set "
                "vllm.gpus, or use 'directory'"
            )
        if self.urls and (self.gpus or self.server_args):
            raise ValueError(
                "gpus and server_args are for a server that the run starts; urls names running "
                "servers"
            )
        return self


class ScheduleSettings(Section):
    """The number of batches, and when the rollout policy and the KL reference are synced."""

    batches: int = Field(default=100, ge=1)
    """Batches of the run"""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training prompts: sets batches"""
    stop_at: str | None = None
    """End earlier, once a metric has held a value: "reward >= 0.95 for 3" (batches)"""
    prompts_per_batch: int = Field(default=8, ge=1)
    """Prompts per batch (N)"""
    num_iterations: int = Field(default=1, ge=1)
    """Optimizer updates per batch (i in arXiv 2505.22257)"""
    sync_every: int = Field(default=1, ge=1)
    """Batches between weight syncs (v in arXiv 2505.22257)"""
    constant_lag: int | None = Field(default=None, ge=0)
    """Keep the rollout policy exactly this many batches behind"""
    max_staleness: int | None = Field(default=None, ge=0)
    """Sync before every batch while completions go on; tokens are at most this many updates old"""
    sync_at_kl: float | None = Field(default=None, ge=0)
    """Sync when KL(rollout policy, policy) per completion exceeds this (nats), or by sync_every"""
    ref_sync_every: int | None = Field(default=None, ge=1)
    """Batches until the KL reference becomes the policy (a stage); default: never"""
    reset_optimizer: bool = False
    """Reset the optimizer state when the KL reference changes"""

    @model_validator(mode="after")
    def _check(self) -> ScheduleSettings:
        chosen = {
            "max_staleness": self.max_staleness is not None,
            "constant_lag": self.constant_lag is not None,
            "sync_at_kl": self.sync_at_kl is not None,
            "sync_every": self.sync_every != 1,
        }
        names = [name for name, is_set in chosen.items() if is_set]
        # sync_at_kl needs sync_every.
        if len(names) > 1 and names != ["sync_at_kl", "sync_every"]:
            advice = f"unset {names[0]} or {names[1]}"
            if names[1] == "sync_every":
                advice = f"unset {names[0]}, or set sync_every = 1"
            raise ValueError(f"{names[0]} cannot be combined with {names[1]}: {advice}")
        if self.sync_at_kl is not None and self.sync_every == 1:
            raise ValueError(
                "sync_at_kl is set, but sync_every is 1, which syncs before every batch: set "
                "sync_every to the most batches between syncs"
            )
        if self.reset_optimizer and self.ref_sync_every is None:
            raise ValueError(
                "reset_optimizer needs ref_sync_every: set it, or unset reset_optimizer"
            )
        if self.stop_at is not None:
            StopRule.parse(self.stop_at)
        return self

    @property
    def kind(self) -> Literal["every", "lagged", "continuous", "budget"]:
        """The schedule by its name in rollout/schedule.py."""
        if self.max_staleness is not None:
            return "continuous"
        if self.constant_lag is not None:
            return "lagged"
        return "every" if self.sync_at_kl is None else "budget"

    @property
    def runs_ahead(self) -> bool:
        """True if weights are synced before every batch, and v batches are sampled ahead."""
        return self.kind in ("lagged", "continuous")

    @property
    def continues_completions(self) -> bool:
        """True if completions in flight at a weight sync continue with the new weights."""
        return self.kind == "continuous"

    @property
    def v(self) -> int:
        """Batches between weight syncs, or the batches that are sampled ahead."""
        if self.max_staleness is not None:
            return self.max_staleness // self.num_iterations
        return self.sync_every if self.constant_lag is None else self.constant_lag

    @property
    def oldest_samples(self) -> int:
        """The largest staleness that the schedule allows at the first update on a batch."""
        batches = self.v if self.runs_ahead else self.v - 1
        return batches * self.num_iterations

    @property
    def is_on_policy(self) -> bool:
        """True if π samples every batch itself, before the first update on the batch."""
        return self.oldest_samples == 0

    @property
    def stage_length(self) -> int:
        """M: batches per stage."""
        return self.ref_sync_every or self.batches


class OfflineSettings(Section):
    """Completions of files, to learn from."""

    data: tuple[str, ...] = ()
    """Completions to learn from: JSONL or Parquet files, globs, directories of runs"""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each batch's prompts from the offline data"""


class OptimizerSettings(Section):
    """AdamW, and the memory of an update."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW"""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """constant, linear or cosine (0 after the last update), after the warm-up"""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises"""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of AdamW's means of gradients and of their squares"""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, of matrices only"""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Norm to which gradients are clipped; 0: no clipping"""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens per micro-batch, for memory and speed alone; default: 4096, on a GPU 16384"""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third slower"""
    offload_optimizer: bool = False
    """Keep a GPU's optimizer state in host memory"""
    scale_lr_by_ess: float = Field(default=0.0, ge=0, le=1)
    """Lower the learning rate while the effective sample size is below this share (VCPO); 0: off"""
    scale_lr_by_kl: float = Field(default=0.0, ge=0)
    """Lower the learning rate while KL(rollout policy, policy) per token exceeds this; 0: off"""
    log_gradient_cosine: bool = False
    """Log the cosine of consecutive gradients (keeps one more gradient in memory)"""
    dither_master_weights: bool = True
    """Dither fp32 master weights, so that small updates move bf16 weights"""

    def tokens_in_micro_batch(self, *, on_gpu: bool) -> int:
        """Returns the tokens of a micro-batch.

        A GPU needs many: its host takes as long to launch the kernels of a small micro-batch as of
        a large one.
        """
        if self.micro_batch_tokens is not None:
            return self.micro_batch_tokens
        return 16_384 if on_gpu else 4096


class DistributedSettings(Section):
    """Several processes."""

    strategy: Literal["zero1", "fsdp2"] = "zero1"
    """What ranks shard: zero1 (optimizer state) or fsdp2 (weights, too)"""
    timeout: float = Field(default=3600.0, gt=0, le=1e6)
    """Seconds that a rank waits for the others; then the run ends"""


class CheckpointSettings(Section):
    """The times of checkpoints and exported policies."""

    save_minutes: float = Field(default=10.0, ge=0)
    """Minutes between checkpoints; 0: not by time"""
    save_every: int = Field(default=0, ge=0)
    """Batches between checkpoints; 0: not by batches"""
    save_total_limit: int = Field(default=2, ge=0)
    """Checkpoints kept on disk; 0: one, until the run is finished"""
    export_every: int = Field(default=0, ge=0)
    """Batches between saved policies (weights/v000120); 0: only the last"""


class EvalSetSettings(Section):
    """An evaluation set. Values that are unset are the run's."""

    name: str = Field(pattern=NAME)
    """Name in files and metrics: letters, digits and _"""
    task: TaskSettings | None = None
    """Task of this set, as in section task; default: the run's task"""
    every: int | None = Field(default=None, ge=0)
    """Batches between evaluations; default: eval.every"""
    num_prompts: int | None = Field(default=None, ge=1)
    """Test prompts; default: eval.num_prompts"""
    num_samples: int | None = Field(default=None, ge=1)
    """Completions per prompt; default: eval.num_samples"""
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature; default: eval.temperature"""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Share of the probability that is sampled from; default: eval.top_p"""
    max_completion_length: int | None = Field(default=None, ge=1)
    """Longest completion in tokens; default: rollout.max_completion_length"""


class EvalSettings(Section):
    """The times and sizes of evaluations."""

    at_start: bool = True
    """Evaluate before the first and after the last update"""
    every: int = Field(default=0, ge=0)
    """Batches between evaluations during training; 0: none"""
    num_prompts: int = Field(default=64, ge=0)
    """Most test prompts; 0: all"""
    num_samples: int = Field(default=8, ge=1)
    """Completions per test prompt"""
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature; default: rollout.temperature"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most probable tokens with this share of the probability"""
    best_metric: str | None = None
    """Keep the best policy by this result, such as pass@1 or SET.pass@1"""
    sets: tuple[EvalSetSettings, ...] = ()
    """Evaluation sets, each a table [[eval.sets]] in a file (docs/evaluation.md)"""

    @model_validator(mode="after")
    def _check_sets(self) -> EvalSettings:
        names = [evaluation_set.name for evaluation_set in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sets: two sets have the name {name!r}")
        if self.best_metric is not None:
            self._check_best(self.best_metric)
        return self

    def _check_best(self, best: str) -> None:
        """Raises ValueError for a best_metric that the run does not compute."""
        set_name, _, metric = best.rpartition(".")
        sets_by_name = {evaluation_set.name: evaluation_set for evaluation_set in self.sets}
        chosen_set = sets_by_name.get(set_name)
        num_samples = self.num_samples
        every = self.every
        if chosen_set is not None:
            num_samples = chosen_set.num_samples or num_samples
            every = chosen_set.every if chosen_set.every is not None else every

        # pass@k for k = 1, 2, 4, …, and for all samples.
        powers_of_two = [1 << exponent for exponent in range(num_samples.bit_length())]
        metrics = ["reward"]
        metrics += [f"pass@{k}" for k in sorted({num_samples, *powers_of_two})]
        is_known_metric = metric in metrics or re.fullmatch(r"rewards/\w+/mean", metric)
        needs_set = bool(set_name or self.sets)
        if not is_known_metric or needs_set != (chosen_set is not None):
            form = "SET.METRIC" if self.sets else "METRIC"
            raise ValueError(f"best_metric = {best!r}: write {form} of {', '.join(metrics)}")
        if not self.at_start and not every:
            raise ValueError(
                f"best_metric = {best!r}, but the run never evaluates: set every, or "
                "at_start = true"
            )

    @property
    def takes_place(self) -> bool:
        """True if anything is ever evaluated."""
        sets_have_times = any(evaluation_set.every for evaluation_set in self.sets)
        return self.at_start or bool(self.every or sets_have_times)
