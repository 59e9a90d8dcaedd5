"""The settings of a run: frozen, validated, few. The text under each field is its `--help`.

settings/toml.py reads them from a TOML file and the command line; training/checks.py checks the rest before anything
heavy is loaded. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lagrpo.settings.distributed import DistributedSettings
from lagrpo.settings.environment import EnvironmentSettings
from lagrpo.settings.evaluation import EvaluationSettings
from lagrpo.settings.objective import LossSettings
from lagrpo.settings.rewards import LONGEST_DEADLINE
from lagrpo.settings.section import ONE_OR_MORE, Section
from lagrpo.settings.task import TaskSettings
from lagrpo.settings.vllm import VllmSettings
from lagrpo.tasks import is_multi_turn


class RunSettings(Section):
    name: str | None = None
    """Name of the run's directory; by default task, recipe, (v, i) and the time."""
    output_dir: str = "runs"
    """Directory that holds the runs."""
    seed: int = 0
    """Seed of the run: every random number is a function of it and of the number's own address."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a table; plain: a line per batch; none: nothing. auto: live on a terminal, plain elsewhere."""
    save_weights: bool = True
    """Write the final policy as a Hugging Face model directory."""
    resume: str | None = None
    """Directory of a run to go on with, or auto: the run called run.name where it is there, else a new one."""
    score_lag: bool = True
    """Where alpha lags, also score the completions that the loss leaves out, so that the metrics of the lag cover all
    completions. Without it these metrics are null where the loss leaves any out. The schedule budget needs it."""
    entropy: bool = False
    """Measure the policy's entropy over the tokens that it learns from, in nats per token."""
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...], ONE_OR_MORE] = ()
    """Trackers that get metrics, evaluations and completions, each an extra: pip install 'lagrpo[wandb]'. A tracker
    whose package raises is disabled with a warning (docs/inspect.md)."""
    log_completions: int = Field(default=16, ge=0, le=1024)
    """How many completions of each batch the trackers get; 0: none."""

    @model_validator(mode="after")
    def _check_resume(self) -> RunSettings:
        if self.resume == "auto" and self.name is None:
            raise ValueError('resume = "auto" looks for a run by its name: set run.name')
        if len(set(self.report_to)) < len(self.report_to):
            raise ValueError("report_to: the same one is there twice")
        return self


class CheckpointSettings(Section):
    save_minutes: float = Field(default=10.0, ge=0)
    """Minutes between checkpoints, from which a run that was stopped or killed resumes; 0: none by time."""
    save_every: int = Field(default=0, ge=0)
    """Also write a checkpoint every so many batches; 0: only by time."""
    save_total_limit: int = Field(default=2, ge=0)
    """How many of the last checkpoints stay on disk; 0: one, until the run is finished."""
    export_every: int = Field(default=0, ge=0)
    """Also write the policy every so many batches, under its version; 0: only at the end."""


class ModelSettings(Section):
    path: str = "smollm2"
    """Hub id or directory of a causal language model, or "smollm2", the embedded SmolLM2-135M-Instruct."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """dtype that sampler and trainer compute in; with bfloat16 the optimizer keeps float32 masters. auto: bfloat16
    where the device multiplies it in hardware, else float32."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto: a GPU where there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; default: OMP_NUM_THREADS, else the physical cores within the container's quota."""
    kernels: Literal["auto", "c", "torch"] = "auto"
    """What computes beside PyTorch. c: lagrpo's C kernels (CPU), which make sampler and trainer agree to the bit in
    bfloat16. torch: PyTorch alone. auto: the kernels if there is a C compiler."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the tokenizer's."""
    lora_r: int = Field(default=0, ge=0, le=512)
    """Rank of the adapters (LoRA) that are trained in place of the model's own weights; 0: full training."""
    lora_alpha: float = Field(default=32.0, gt=0, le=1e6)
    """The adapters' product counts lora_alpha / lora_r times."""
    lora_target_modules: tuple[str, ...] = Field(default=("all-linear",), min_length=1)
    """Linear layers that get adapters, by name (q_proj, down_proj …), or all-linear: all in the decoder's layers."""

    @model_validator(mode="after")
    def _check_lora(self) -> ModelSettings:
        changed = {name for name in self.model_fields_set if name.startswith("lora_")}
        if changed and not self.lora_r and any(getattr(self, n) != type(self).model_fields[n].default for n in changed):
            raise ValueError(f"{min(changed)} is set, but lora_r is 0, which is full training: set model.lora_r")
        return self


class RolloutSettings(Section):
    engine: Literal["local", "vllm"] = "local"
    """What generates: this process, or vLLM servers (section vllm)."""
    num_generations: int = Field(default=16, ge=1)
    """Completions per prompt, the size of a group."""
    temperature: float = Field(default=1.0, gt=0)
    """tau: divides the logits in sampler and trainer alike."""
    max_completion_length: int = Field(default=256, ge=1)
    """Longest completion; a longer one is cut."""
    max_prompt_length: int = Field(default=1024, ge=1)
    """Longest prompt, including the chat template; a longer one is an error."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Most completions decoded at a time (by each server)."""
    prefetch: bool = True
    """With v > 1, generate the batches up to the next weight sync together. The records stay the same; unfinished
    completions keep their memory while the policy learns."""
    parity_check: bool = True
    """After every weight sync, check that sampler and trainer compute the same. Off: stale weights go unnoticed."""
    dynamic_sampling_rounds: int = Field(default=0, ge=0)
    """Rounds in which further prompts replace groups of equal rewards (DAPO's dynamic sampling)."""


class OfflineSettings(Section):
    data: Annotated[tuple[str, ...] | None, ONE_OR_MORE] = Field(default=None, min_length=1)
    """Pre-generated (offline) completions: files (JSONL or Parquet), globs, directories of runs, one or several."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of each batch's prompts that come from the offline data; the others get fresh completions."""


class ScheduleSettings(Section):
    kind: Literal["every", "lagged", "budget"] = "every"
    """When the sampler gets new weights. every: before batch k when k mod v = 0 (Algorithm 1). lagged: alpha is always
    v batches behind. budget: when the estimated KL(alpha || pi_k) of a completion passes delta, and at the
    latest after v batches."""
    sync_every: int = Field(default=1, ge=0)
    """Batches between weight syncs (the most of them for budget), or the lag in batches (lagged)."""
    delta: float | None = Field(default=None, ge=0)
    """Nats per completion that budget spends before a weight sync."""
    num_iterations: int = Field(default=1, ge=1)
    """Optimizer updates on each batch."""
    prompts_per_batch: int = Field(default=8, ge=1)
    """N: prompts per batch."""
    batches: int = Field(default=100, ge=1)
    """M: batches per stage."""
    stages: int = Field(default=1, ge=1)
    """S: at the end of each stage pi_ref <- pi."""
    reset_optimizer: bool = False
    """Start every stage with a fresh optimizer state."""

    @model_validator(mode="after")
    def _check_kind(self) -> ScheduleSettings:
        if self.kind != "lagged" and self.sync_every < 1:
            raise ValueError(
                "sync_every = 0 never syncs weights: use at least 1, or kind = 'lagged' with 0 for on-policy"
            )
        if (self.kind == "budget") != (self.delta is not None):
            raise ValueError(f"delta is what kind = 'budget' spends: set both or neither (kind = {self.kind!r})")
        return self

    @property
    def watches(self) -> bool:
        """Whether the metrics of the batches decide about weight syncs."""
        return self.kind == "budget"


class OptimizerSettings(Section):
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW: decoupled weight decay of matrices; norms and biases do not decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; a larger one is scaled down. 0: no limit."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: linear and cosine reach 0 at the last update."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises."""
    dither_master_weights: bool = True
    """Start the float32 master weights of a bfloat16 model at a random place in each weight's rounding cell, so that
    small updates move the weights at once. Without it a weight stands still until the sum of its steps passes half a
    spacing (docs/precision.md)."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens in a micro-batch: sets the memory, cannot change the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    offload_optimizer: bool = False
    """On a GPU: keep AdamW's moments, 8 bytes for each of the rank's masters, in the host's memory. Each update then
    moves them there and back; its bits are the same. On a CPU they are there anyway."""


class VerifierSettings(Section):
    workers: int = Field(default=1, ge=1)
    """Worker processes for rewards and environments."""
    deadline: float = Field(default=5.0, gt=0, le=LONGEST_DEADLINE)
    """Seconds for each call; then the completion is unscored and the worker replaced."""
    memory: float = Field(default=4.0, ge=0.125)
    """GiB that a worker may take; a call that needs more leaves its completion unscored. On Linux."""
    max_without_reward: float = Field(default=0.5, ge=0, le=1)
    """The run stops when a larger share of a batch is unscored or failed."""

    @property
    def of_a_batch(self) -> dict[str, Any]:
        """What a RewardPool takes."""
        return self.model_dump()


class Settings(Section):
    """All settings of a training run."""

    run: RunSettings = RunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    rollout: RolloutSettings = RolloutSettings()
    vllm: VllmSettings = VllmSettings()
    distributed: DistributedSettings = DistributedSettings()
    offline: OfflineSettings = OfflineSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    verifier: VerifierSettings = VerifierSettings()
    eval: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _check_sections(self) -> Settings:
        if self.rollout.engine != "vllm" and self.vllm != VllmSettings():
            raise ValueError("section vllm is set, but rollout.engine is 'local': set it to 'vllm'")
        if self.rollout.engine == "vllm" and self.rollout.temperature > 2:
            raise ValueError(f"rollout.temperature = {self.rollout.temperature:g}: vLLM takes at most 2")
        if self.schedule.watches and not self.run.score_lag:
            raise ValueError(
                f"run.score_lag = false leaves out completions that schedule.kind = {self.schedule.kind!r} decides by: "
                "set it to true"
            )
        rollout, evaluation = self.rollout, self.eval
        check_fit("rollout.num_generations", rollout.num_generations, "rollout.max_num_seqs", rollout.max_num_seqs)
        if evaluation.takes_place:
            samples = max(evaluation.values("num_samples"))
            check_fit("eval.num_samples", samples, "rollout.max_num_seqs", rollout.max_num_seqs)
        if (buffer := self.loss.overrides.get("overlong_buffer", 0)) > rollout.max_completion_length:
            raise ValueError(
                f"loss.overrides.overlong_buffer = {buffer} is more than rollout.max_completion_length = "
                f"{rollout.max_completion_length}: it counts tokens before that limit"
            )
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the policy meets, in training or in an evaluation."""
        of_sets = [most or 0 for most in self.eval.values("max_completion_length")] if self.eval.takes_place else []
        return self.rollout.max_prompt_length + max([self.rollout.max_completion_length, *of_sets])

    @property
    def replied(self) -> int:
        """Tokens that an environment says in a completion at the most, where the settings name one."""
        return _replied(self.environment, self.task)


def _replied(environment: EnvironmentSettings, task: Any) -> int:
    own = is_multi_turn(task.name)
    named = own or environment.name is not None or environment.tools
    return environment.max_tokens if named else 0


class EvalSampling(Section):
    engine: Literal["local", "vllm"] = "local"
    """What generates: this process, or vLLM servers (section vllm)."""


class EvalSettings(Section):
    """Settings of an evaluation on its own."""

    rollout: EvalSampling = EvalSampling()
    vllm: VllmSettings = VllmSettings()
    task: TaskSettings = TaskSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    model: ModelSettings = ModelSettings()
    prompts: int | None = Field(default=None, ge=1)
    """Test prompts; all by default."""
    samples: int = Field(default=8, ge=1)
    """Completions per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest completion."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, including the chat template."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Most completions decoded at a time."""
    seed: int = 0
    """Seed of every random number."""
    verifier: VerifierSettings = VerifierSettings()
    output: str | None = None
    """Directory for the summary (JSON) and the per-prompt records (Parquet). It must not hold an evaluation with other
    settings. By default evaluations/MODEL-TASK, with a number behind it where that is taken."""

    @model_validator(mode="after")
    def _check_rows(self) -> EvalSettings:
        check_fit("samples", self.samples, "max_num_seqs", self.max_num_seqs)
        if self.rollout.engine != "vllm" and self.vllm != VllmSettings():
            raise ValueError("section vllm is set, but rollout.engine is 'local': set it to 'vllm'")
        if self.rollout.engine == "vllm" and self.temperature > 2:
            raise ValueError(f"temperature = {self.temperature:g}: vLLM takes at most 2")
        return self

    @property
    def replied(self) -> int:
        """As Settings.replied."""
        return _replied(self.environment, self.task)


def check_fit(name: str, completions: int, rows_name: str, rows: int) -> None:
    if completions > rows:
        raise ValueError(
            f"{rows_name} = {rows} is less than {name} = {completions}: the completions of a prompt are decoded "
            f"together; raise {rows_name} or lower {name}"
        )
