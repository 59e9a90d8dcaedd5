"""The settings of a run: frozen, validated, few. A TOML file gives them, the command line overrides them.

The text under each field is its `--help`. Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class RunSettings(_Settings):
    name: str | None = None
    """Name of the run's directory; by default task, recipe, (v, i) and the time."""
    directory: str = "runs"
    """Where runs are kept."""
    seed: int = 0
    """Every random draw is a function of this seed and its own address."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """Live table (a terminal), one line per batch (anything else), or nothing."""
    save_weights: bool = True
    """Write the final policy as a Hugging Face model directory."""


class ModelSettings(_Settings):
    path: str = "smollm2"
    """Hub id or directory of a causal language model, or "smollm2", the embedded SmolLM2-135M-Instruct."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights that sampler and learner compute with; with bfloat16 the optimiser keeps float32 masters."""
    device: str = "auto"
    """cpu, cuda, cuda:1 …; auto takes a GPU where there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; by default as many as there are physical cores at hand."""
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
    system_prompt: str | None = None
    """System message in front of every prompt; "" for none."""
    operations: tuple[Literal["+", "-", "*"], ...] | None = None
    """arithmetic: operations to draw from."""
    digits: int | None = Field(default=None, ge=1, le=6)
    """arithmetic: operands have up to this many digits."""
    words: bool | None = None
    """arithmetic: operands as words."""
    numbers: int | None = Field(default=None, ge=2, le=6)
    """countdown: how many numbers are given."""


class SamplingSettings(_Settings):
    G: int = Field(default=16, ge=1)
    """Completions per prompt: a group."""
    temperature: float = Field(default=1.0, gt=0)
    """tau: divides the logits in sampler and learner alike."""
    max_tokens: int = Field(default=256, ge=1)
    """Longest completion; a longer one is cut."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt, chat template included; a longer one is an error."""
    rows: int = Field(default=128, ge=1)
    """Completions decoded at a time."""
    ahead: bool = True
    """With v > 1, draw the batches up to the next delivery together; the records are the same either way."""


class ScheduleSettings(_Settings):
    kind: Literal["every", "lagged"] = "every"
    """every(v): deliver before batch k when k mod v = 0 (Algorithm 1). lagged(v): alpha is always v batches behind."""
    v: int = Field(default=1, ge=0)
    """The sampler gets new weights every v batches (every), or lags v batches (lagged)."""
    i: int = Field(default=1, ge=1)
    """Optimiser updates on each batch."""
    prompts: int = Field(default=8, ge=1)
    """N: prompts per batch."""
    batches: int = Field(default=100, ge=1)
    """M: batches per stage."""
    stages: int = Field(default=1, ge=1)
    """S: at the end of each stage pi_ref <- pi."""
    reset_optimizer: bool = False
    """Start every stage with a fresh optimiser state."""

    @model_validator(mode="after")
    def _v_fits_kind(self) -> ScheduleSettings:
        if self.kind == "every" and self.v < 1:
            raise ValueError("v = 0 never delivers: use v of at least 1, or kind = 'lagged' with v = 0 for on-policy")
        return self


class ObjectiveSettings(_Settings):
    recipe: str = "grpo"
    """Row of the table of recipes; the settings below replace pieces of it. `lagrpo recipes` lists them."""
    advantage: str | None = None
    """Advantage function."""
    ratio: str | None = None
    """Level of the ratio pi/alpha: token, sequence, length_normalised."""
    surrogate: str | None = None
    """Surrogate per token."""
    reduction: str | None = None
    """From tokens to the loss."""
    kl: str | None = None
    """Estimator of KL(pi || pi_ref)."""
    kl_importance: bool | None = None
    """Weight the KL estimate by pi/alpha."""
    beta: float | None = Field(default=None, ge=0)
    """Weight of KL(pi || pi_ref); 0 keeps no reference."""
    epsilon_low: float | None = Field(default=None, ge=0)
    """Lower clip range."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper clip range."""
    eps_std: float | None = Field(default=None, ge=0)
    """Variance floor under the root of sigma."""
    mask_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the objective (Eq. 8)."""
    masked_count: bool | None = None
    """Count the completions of masked groups in the normaliser."""

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
    """AdamW: decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, after the warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises."""
    tokens: int = Field(default=4096, ge=1)
    """Tokens in a micro-batch; sets the memory, cannot change the gradient."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


class VerifierSettings(_Settings):
    workers: int = Field(default=1, ge=1)
    """Processes that judge completions."""
    deadline: float = Field(default=5.0, gt=0)
    """Seconds for each verdict; after that the completion is rejected and the worker replaced."""
    max_unscored: float = Field(default=0.5, ge=0, le=1)
    """The run stops when a larger share of a batch is rejected or failed."""


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
    schedule: ScheduleSettings = ScheduleSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    verifier: VerifierSettings = VerifierSettings()
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _group_fits_rows(self) -> Settings:
        if self.sampling.G > self.sampling.rows:
            raise ValueError(
                f"sampling.rows = {self.sampling.rows} is less than sampling.G = {self.sampling.G}: "
                "a group is decoded as a whole; raise rows or lower G"
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
    rows: int = Field(default=128, ge=1)
    """Completions decoded at a time."""
    seed: int = 0
    """Of every random draw."""
    verifier: VerifierSettings = VerifierSettings()
    output: str | None = None
    """Directory for the summary (JSON) and the per-prompt records (Parquet)."""


class SettingsError(ValueError):
    """Settings that cannot be run, with every complaint on a line of its own."""


def load_settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> Settings:
    """Settings from a TOML file or a mapping.

    Raises:
        SettingsError: no such file, not TOML, an unknown name (with the nearest valid one), a value out of its range.
    """
    if isinstance(source, Mapping):
        return _validate(Settings, source, "settings")
    path = Path(source)
    if not path.is_file():
        raise SettingsError(f"{path}: no such settings file")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    return _validate(Settings, values, str(path))


def _validate(model: type[Settings], values: Mapping[str, Any], source: str) -> Settings:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SettingsError(explain(error, source)) from error


def explain(error: ValidationError, source: str) -> str:
    """One line per complaint: where, what, and for an unknown name the nearest valid one."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{source}: unknown setting {where!r}; {_nearest(where)}")
        elif item["type"] == "value_error":
            lines.append(f"{source}: {where + ': ' if where else ''}{item['ctx']['error']}")
        else:
            lines.append(f"{source}: {where} = {item['input']!r}: {item['msg']}")
    return "\n".join(lines)


def _nearest(name: str) -> str:
    names = list(setting_names())
    leaf = name.rsplit(".", 1)[-1]
    elsewhere = [n for n in names if n.endswith("." + leaf)]
    by_leaf = {n.rsplit(".", 1)[-1]: n for n in names}
    close = elsewhere or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    close = close or [by_leaf[m] for m in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.0)]
    return f"did you mean {close[0]!r}?"


def setting_names(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Every section and setting, as section.name."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")


def to_toml(settings: Settings) -> str:
    """The settings as a TOML file that `load_settings` reads back to the same settings; what is unset is left out."""
    lines = []
    for section, values in settings.model_dump().items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import json

        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
