"""The settings of a run: frozen, validated, few. The text under each field is its `--help`.

How they are read from a TOML file and the command line is in settings/toml.py; what else is checked before anything
heavy is loaded, in training/checks.py. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class RunSettings(_Settings):
    name: str | None = None
    """Name of the run's directory; by default task, recipe, (v, i) and the time."""
    directory: str = "runs"
    """Where runs are kept."""
    seed: int = 0
    """Every random number is a function of this seed and its own address."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """Live table (a terminal), one line per batch (anything else), or nothing."""
    save_weights: bool = True
    """Write the final policy as a Hugging Face model directory."""
    save_every: int = Field(default=0, ge=0)
    """Also write the policy every so many batches, under its version; 0: only at the end."""
    score_lag: bool = True
    """Where alpha lags, also score the completions that the loss leaves out (groups of equal rewards, dropped ones),
    for lag metrics over all of them: a forward pass of those alone. Off: those metrics are null, unless the
    recipe leaves nothing out. budget and certified need it."""
    score_update: bool = False
    """Score each batch once more after its updates, for the two sides of the bounds on the step (a forward pass)."""
    entropy: bool = False
    """Measure the policy's entropy over the tokens that it learns from, in nats per token (metric `entropy`)."""


class ModelSettings(_Settings):
    path: str = "smollm2"
    """Hub id or directory of a causal language model, or "smollm2", the embedded SmolLM2-135M-Instruct."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the weights that sampler and learner compute with; with bfloat16 the optimizer keeps float32 masters. auto
    takes bfloat16 where the device multiplies it in hardware, else float32, and says why at the start."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads, fixed. By default OMP_NUM_THREADS or the physical cores at hand, at most the CPU quota of the
    container, and fewer while other programs keep cores busy."""
    kernels: Literal["auto", "c", "torch"] = "auto"
    """What computes beside PyTorch. On a CPU lagrpo's C kernels, compiled for the machine at their first use: in
    bfloat16 the whole forward pass of the models they know, which makes sampler and learner agree to the bit. torch:
    PyTorch's operations alone; auto: the kernels where there is a C compiler. On a GPU auto takes flex attention and
    CUDA graphs, torch plain operations."""
    chat_template: str | None = None
    """File with a Jinja chat template, in place of the tokenizer's own."""


class TaskSettings(_Settings):
    name: str = "arithmetic"
    """arithmetic, countdown, gsm8k, math, custom, or package.module:function that returns a Task."""
    data: str | None = None
    """Dataset of gsm8k, math and custom: hub id, directory or file (JSONL, CSV, Parquet); $LAGRPO_DATA otherwise."""
    train_split: str | None = None
    """Split (or file, by its stem) to train on."""
    test_split: str | None = None
    """Split (or file, by its stem) to evaluate on."""
    prompt_column: str | None = None
    """Column with the prompt: a string, or a list of chat messages."""
    answer_column: str | None = None
    """Column that the reward gets as gold; without one it gets the whole row."""
    reward: str | None = None
    """Built-in judge (exact, number, math …) or package.module:function, called as function(text, gold) -> float."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Least and greatest reward: the bounds are in units of this range."""
    system_prompt: str | None = None
    """System message in front of every prompt; "" for none."""
    operations: tuple[Literal["+", "-", "*"], ...] | None = None
    """arithmetic: operations to draw from."""
    digits: int | None = Field(default=None, ge=1, le=4)
    """arithmetic: operands have up to this many digits."""
    words: bool | None = None
    """arithmetic: operands as words."""
    numbers: int | None = Field(default=None, ge=3, le=6)
    """countdown: how many numbers are given."""

    @model_validator(mode="after")
    def _range_is_one(self) -> TaskSettings:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range goes from the least to the greatest reward, not {self.reward_range}")
        return self


class SamplingSettings(_Settings):
    sampler: Literal["local", "vllm"] = "local"
    """Who samples: this process, or vLLM servers (section vllm)."""
    G: int = Field(default=16, ge=1)
    """Completions per prompt: a group."""
    temperature: float = Field(default=1.0, gt=0)
    """tau: divides the logits in sampler and learner alike."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest completion; a longer one is cut."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, chat template included; a longer one is an error."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Completions decoded at a time (at each server)."""
    prefetch: bool = True
    """With v > 1, generate the batches up to the next weight sync together; the records are the same either way.
    Completions under way then keep their memory in this process while the policy learns."""
    parity_check: bool = True
    """After every weight sync, check that sampler and learner compute the same. Off: nobody notices stale weights."""
    dynamic_sampling: int = Field(default=0, ge=0)
    """Times that groups of equal rewards make way for groups of further prompts (DAPO's dynamic sampling)."""


class VllmSettings(_Settings):
    urls: tuple[str, ...] = ()
    """Servers that run already (http://host:port); their API key is read from $LAGRPO_VLLM_API_KEY. Without any,
    servers are started here."""
    servers: int = Field(default=1, ge=1)
    """How many servers to start."""
    python: str = ".venv-vllm/bin/python"
    """Python of the environment that has vLLM, to start servers with; `make vllm-env` makes one."""
    options: tuple[str, ...] = ()
    """Further options of `vllm serve` for the servers that are started."""
    weight_sync: Literal["directory", "nccl", "ipc"] = "directory"
    """How weights travel: through a directory that both sides see, by NCCL between GPUs, by CUDA IPC on one GPU."""
    directory: str | None = None
    """Where the directory is made; /dev/shm by default. Servers on other hosts need a shared file system."""
    in_flight: Literal["finish", "span", "regenerate"] = "finish"
    """Completions under way at a weight sync (schedule lagged): waited for, continued with the new weights so that they
    span versions, or generated again."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest mean |log-prob of learner - of server|, nats a token at temperature 1; by default that of the dtype."""
    failures: int = Field(default=3, ge=0)
    """How often servers may be brought back before the run gives up."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds for a server to get ready."""
    request_deadline: float = Field(default=600.0, gt=0)
    """Seconds for the completions of one group."""
    sync_deadline: float = Field(default=300.0, gt=0)
    """Seconds for a server to load weights."""
    control_deadline: float = Field(default=30.0, gt=0)
    """Seconds for any other answer."""

    @model_validator(mode="after")
    def _urls_are_urls(self) -> VllmSettings:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"urls: {url!r} is no URL; write http://host:port")
            _ = parts.port  # raises ValueError for a number that is no port
            if parts.path.strip("/") or parts.query:
                raise ValueError(f"urls: {url!r} has a path; write http://host:port alone")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: the same server is there twice")
        if self.urls and self.servers > 1:
            raise ValueError("servers is how many to start, but urls names servers that run already: set one of them")
        return self


class OfflineSettings(_Settings):
    data: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Pre-generated (offline) completions: files (JSONL or Parquet), globs, directories of runs, one or several."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of each batch's prompts that come from it; the others are generated fresh."""

    @field_validator("data", mode="before")
    @classmethod
    def _one_is_a_list(cls, data: Any) -> Any:
        return (data,) if isinstance(data, str) else data


class ScheduleSettings(_Settings):
    kind: Literal["every", "lagged", "budget", "certified"] = "every"
    """every(v): sync weights before batch k when k mod v = 0 (Algorithm 1). lagged(v): alpha is always v batches
    behind. budget(delta, v): sync when the estimated KL(alpha || pi_k) of a completion passes delta, at the latest
    after v batches. certified(v): sync when a batch certifies J(pi_k) > J(alpha), at the latest after v batches."""
    v: int = Field(default=1, ge=0)
    """The sampler gets new weights every v batches (every, at the latest: budget, certified), or lags v batches
    (lagged)."""
    delta: float | None = Field(default=None, ge=0)
    """Nats per completion that budget spends before a weight sync."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Of the lower bound on J(pi_k) - J(alpha) (metric lag_certified); certified shares it over its v batches."""
    i: int = Field(default=1, ge=1)
    """Optimizer updates on each batch."""
    prompts: int = Field(default=8, ge=1)
    """N: prompts per batch."""
    batches: int = Field(default=100, ge=1)
    """M: batches per stage."""
    stages: int = Field(default=1, ge=1)
    """S: at the end of each stage pi_ref <- pi."""
    reset_optimizer: bool = False
    """Start every stage with a fresh optimizer state."""

    @model_validator(mode="after")
    def _v_fits_kind(self) -> ScheduleSettings:
        if self.kind != "lagged" and self.v < 1:
            raise ValueError(
                "v = 0 never syncs weights: use v of at least 1, or kind = 'lagged' with v = 0 for on-policy"
            )
        if (self.kind == "budget") != (self.delta is not None):
            raise ValueError(f"delta is what kind = 'budget' spends: set both or neither (kind = {self.kind!r})")
        return self

    @property
    def watches(self) -> bool:
        """Whether weight syncs depend on what the batches say."""
        return self.kind in ("budget", "certified")

    @property
    def doubt(self) -> float:
        """Chance that the certificate of a batch is wrong. `certified` looks at up to v of them before a weight
        sync."""
        return (1 - self.confidence) / (self.v if self.kind == "certified" else 1)


class ObjectiveSettings(_Settings):
    recipe: str = "grpo"
    """Row of the table of recipes; the settings below replace pieces of it. `lagrpo recipes` lists them."""
    advantage: str | None = None
    """normalized, normalized_unbiased (TRL's), centered, leave_one_out, red_drop or log_mean_exp."""
    surrogate: str | None = None
    """clipped (around 1), clipped_exact (around pi_k/alpha), clipped_proportional (around it, by a factor), unclipped,
    reinforce (M W A logp), opmd_kimi or opmd_pairwise."""
    ratio: str | None = None
    """Level at which pi/alpha (or pi/pi_k) is taken: token, sequence or length_normalized."""
    denominator: str | None = None
    """The policy under that ratio: alpha, or pi_k, whose log-probs the learner computes."""
    mask: str | None = None
    """M of reinforce, which tokens count: none, one_side, two_side or ring."""
    weight: str | None = None
    """W of reinforce: one, ratio, capped_ratio (CISPO), tapered_ratio (TOPR) or exp_advantage (RED-Weight)."""
    regularizer: str | None = None
    """What reinforce subtracts: none, asymre or opmd."""
    anchor: str | None = None
    """The policy that OPMD stays near: alpha, pi_k or pi_ref."""
    correction: str | None = None
    """For a ratio over pi_k: weigh the surrogate by pi_k/alpha, truncated (TIS) or masked (MIS, IcePop), or none."""
    correction_level: str | None = None
    """Level at which the correction's pi_k/alpha is taken: token, sequence or length_normalized."""
    reduction: str | None = None
    """From tokens to the loss: token_mean, sequence_mean, sequence_sum or constant_length."""
    kl: str | None = None
    """Estimator of KL(pi || pi_ref), where beta > 0: k1, k2, k3, k3_clamped, k3_linear, k3_bias_corrected."""
    kl_importance: bool | None = None
    """Weight the KL estimate by pi/alpha of each token."""
    beta: float | None = Field(default=None, ge=0)
    """Weight of KL(pi || pi_ref); 0 keeps no reference."""
    epsilon_low: float | None = Field(default=None, ge=0)
    """Lower clip range."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper clip range."""
    dual_clip: float | None = Field(default=None, ge=1)
    """Greatest ratio at which a token with A < 0 is pushed down."""
    outer_low: float | None = Field(default=None, ge=0)
    """Outer lower range of the mask ring."""
    outer_high: float | None = Field(default=None, ge=0)
    """Outer upper range of the mask ring."""
    correction_floor: float | None = Field(default=None, ge=0, le=1)
    """Least pi_k/alpha of a correction: truncated raises lower ones to it, masked drops them."""
    correction_cap: float | None = Field(default=None, ge=1)
    """Greatest pi_k/alpha of a correction: truncated lowers higher ones to it, masked drops them."""
    eps_std: float | None = Field(default=None, ge=0)
    """Variance floor under the root of sigma, in the normalized advantage."""
    std_offset: float | None = Field(default=None, ge=0)
    """Added to the deviation in the advantage normalized_unbiased."""
    kl_bound: float | None = Field(default=None, ge=0)
    """Greatest value of k3_clamped, steepest slope of k3_linear."""
    strength: float | None = Field(default=None, ge=0)
    """Of asymre and opmd, and the temperature of log_mean_exp (the papers' tau)."""
    weight_temperature: float | None = Field(default=None, gt=0)
    """Temperature of exp_advantage."""
    overlong_buffer: int | None = Field(default=None, ge=0)
    """Tokens before the limit over which DAPO's penalty for length falls from 0 to -1; 0: no penalty."""
    mask_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the objective (Eq. 8)."""
    masked_count: bool | None = None
    """Count the completions of masked groups in the normalizer."""

    @property
    def overrides(self) -> dict[str, Any]:
        """What replaces pieces of the recipe."""
        return {k: v for k, v in self.model_dump().items() if v is not None and k != "recipe"}


class OptimizerSettings(_Settings):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW: decoupled weight decay, of matrices; norms and biases do not decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, after the warm-up: linear and cosine are at 0 at the last update."""
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises."""
    masters: Literal["dithered", "plain"] = "dithered"
    """Where the float32 masters of bfloat16 weights start: at a draw inside the rounding cell of the weight, so that
    the weights move from the first update on, or plain at the weight, so that they stand still until the sum of their
    steps passes half a spacing (docs/precision.md). The policy starts the same. No effect with float32."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens in a micro-batch; sets the memory, cannot change the gradient."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


class VerifierSettings(_Settings):
    workers: int = Field(default=1, ge=1)
    """Processes that judge completions."""
    deadline: float = Field(default=5.0, gt=0)
    """Seconds for each verdict; after that the completion is unscored and the worker replaced."""
    max_without_reward: float = Field(default=0.5, ge=0, le=1)
    """The run stops when a larger share of a batch is unscored or failed."""


class EvaluationSettings(_Settings):
    before_and_after: bool = True
    """Evaluate on the test split before the first update and after the last."""
    every: int = Field(default=0, ge=0)
    """Also evaluate every so many batches; 0: not."""
    prompts: int = Field(default=64, ge=1)
    """Test prompts (all where there are fewer)."""
    samples: int = Field(default=8, ge=1)
    """Completions per prompt."""
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature of the evaluation; that of training by default."""


class Settings(_Settings):
    """All settings of a training run."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    sampling: SamplingSettings = SamplingSettings()
    vllm: VllmSettings = VllmSettings()
    offline: OfflineSettings = OfflineSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    verifier: VerifierSettings = VerifierSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _sections_fit(self) -> Settings:
        if self.sampling.sampler != "vllm" and self.vllm != VllmSettings():
            raise ValueError("section vllm is set, but sampling.sampler is 'local': set it to 'vllm'")
        if self.sampling.sampler == "vllm" and self.sampling.temperature > 2:
            raise ValueError(f"sampling.temperature = {self.sampling.temperature:g}: vLLM takes at most 2")
        if self.schedule.watches and not self.run.score_lag:
            raise ValueError(
                f"run.score_lag = false leaves out completions that schedule.kind = {self.schedule.kind!r} decides by: "
                "set it to true"
            )
        if self.schedule.kind == "certified" and self.sampling.dynamic_sampling:
            raise ValueError(
                "sampling.dynamic_sampling replaces groups because of their rewards, and what is left certifies "
                "nothing about alpha: set it to 0 with schedule.kind = 'certified'"
            )
        sampling, evaluation, buffer = self.sampling, self.evaluation, self.objective.overlong_buffer or 0
        _fits("sampling.G", sampling.G, "sampling.max_num_seqs", sampling.max_num_seqs)
        if evaluation.before_and_after or evaluation.every:
            _fits("evaluation.samples", evaluation.samples, "sampling.max_num_seqs", sampling.max_num_seqs)
        if buffer > sampling.max_tokens:
            raise ValueError(
                f"objective.overlong_buffer = {buffer} is more than sampling.max_tokens = {sampling.max_tokens}: it "
                "counts tokens before that limit"
            )
        return self


class EvalSettings(_Settings):
    """Settings of an evaluation on its own."""

    task: TaskSettings = TaskSettings()
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
    """Longest prompt."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Completions decoded at a time."""
    seed: int = 0
    """Of every random number."""
    verifier: VerifierSettings = VerifierSettings()
    output: str | None = None
    """Directory for the summary (JSON) and the per-prompt records (Parquet); one that has an evaluation with other
    settings is refused. By default evaluations/MODEL-TASK, with a number behind it where that has one."""

    @model_validator(mode="after")
    def _samples_fit_rows(self) -> EvalSettings:
        _fits("samples", self.samples, "max_num_seqs", self.max_num_seqs)
        return self


def _fits(name: str, completions: int, rows_name: str, rows: int) -> None:
    if completions > rows:
        raise ValueError(
            f"{rows_name} = {rows} is less than {name} = {completions}: the completions of a prompt are decoded "
            f"together; raise {rows_name} or lower {name}"
        )
