"""All settings of a run, and contradictions between settings of different sections.

Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from lagrpo.settings import sections
from lagrpo.settings.loss import LossSettings
from lagrpo.settings.section import Section, Table

EVALUATION_DEFAULTS: Table = {
    "run.output_dir": "evaluations",
    "eval.num_prompts": 0,  # all test prompts
    # Not used: eval.num_samples counts. The default, 16, could exceed max_num_seqs.
    "rollout.num_generations": 1,
}
"""Settings whose defaults are others when a model is evaluated outside of a run."""

MIN_REPLIES = 512
"""Tokens that environments may say in a completion, if max_completion_length is less."""


class Settings(Section):
    """All settings of a training run."""

    run: sections.RunSettings = sections.RunSettings()
    model: sections.ModelSettings = sections.ModelSettings()
    task: sections.TaskSettings = sections.TaskSettings()
    rollout: sections.RolloutSettings = sections.RolloutSettings()
    vllm: sections.VllmSettings = sections.VllmSettings()
    schedule: sections.ScheduleSettings = sections.ScheduleSettings()
    offline: sections.OfflineSettings = sections.OfflineSettings()
    loss: LossSettings = LossSettings()
    optimizer: sections.OptimizerSettings = sections.OptimizerSettings()
    distributed: sections.DistributedSettings = sections.DistributedSettings()
    checkpoint: sections.CheckpointSettings = sections.CheckpointSettings()
    eval: sections.EvalSettings = sections.EvalSettings()

    @model_validator(mode="after")
    def _check_sections(self) -> Settings:
        for problem in find_contradictions(self):
            raise ValueError(problem)
        return self

    @property
    def reply_limit(self) -> int:
        """The most tokens that an environment says in a completion that has one."""
        return max(MIN_REPLIES, self.rollout.max_completion_length)

    @property
    def offline_prompts(self) -> int:
        """Prompts of each batch that come from a file.

        It is the fraction of the batch, rounded, but at least one. With a fraction below 1, at
        least one prompt gets fresh completions, unless the batch has only one prompt.
        """
        if not self.offline.data:
            return 0
        num_prompts = self.schedule.prompts_per_batch
        largest = num_prompts if self.offline.fraction == 1 else num_prompts - 1
        return max(1, min(round(self.offline.fraction * num_prompts), largest))

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence that the policy samples, evaluations included.

        Replies of an environment are not counted.
        """
        max_completion = self.rollout.max_completion_length
        if self.eval.takes_place:
            for evaluation_set in self.eval.sets:
                max_completion = max(max_completion, evaluation_set.max_completion_length or 0)
        return self.rollout.max_prompt_length + max_completion


def find_contradictions(settings: Settings) -> Iterator[str]:
    """Yields each contradiction between settings of different sections, with the advice."""
    rollout = settings.rollout
    vllm = settings.vllm
    offline = settings.offline
    yield from _find_too_many_samples(settings)
    if not rollout.uses_vllm:
        default = sections.VllmSettings()
        for name, value in vllm:
            if value != getattr(default, name):
                yield (
                    f"vllm.{name} is set, but rollout.engine is {rollout.engine!r}: "
                    "set rollout.engine = 'vllm'"
                )
                # One is enough.
                break
    temperatures = {
        "rollout.temperature": rollout.temperature,
        "eval.temperature": settings.eval.temperature,
    }
    for evaluation_set in settings.eval.sets:
        temperatures[f"eval.sets, {evaluation_set.name!r}: temperature"] = (
            evaluation_set.temperature
        )
    for name, temperature in temperatures.items():
        if rollout.uses_vllm and temperature is not None and temperature > 2:
            yield f"{name} = {temperature:g}: rollout.engine = 'vllm' allows at most 2; lower it"
    if settings.model.lora_r and vllm.weight_transfer == "nccl":
        yield (
            "vllm.weight_transfer = 'nccl' cannot send the adapters of model.lora_r: "
            "use 'directory'"
        )
    schedule = settings.schedule
    if vllm.sleep and (schedule.kind != "every" or schedule.v != 1):
        yield (
            "vllm.sleep: the server may only sleep if it samples nothing while the trainer learns: "
            "set schedule.sync_every = 1, without constant_lag, max_staleness and sync_at_kl"
        )
    if offline.fraction < 1 and not offline.data:
        yield (
            f"offline.fraction = {offline.fraction:g}, but offline.data is unset: set offline.data"
        )
    buffer = settings.loss.overrides.get("overlong_buffer", 0)
    if buffer > rollout.max_completion_length:
        yield (
            f"loss.overrides.overlong_buffer = {buffer} is more than "
            f"rollout.max_completion_length = {rollout.max_completion_length}: lower the buffer"
        )


def _find_too_many_samples(settings: Settings) -> Iterator[str]:
    """Yields settings that ask for more completions of a prompt than the engine holds at a time."""
    evaluation = settings.eval
    max_num_seqs = settings.rollout.max_num_seqs
    counts = {"rollout.num_generations": settings.rollout.num_generations}
    if evaluation.takes_place:
        sample_counts = [evaluation_set.num_samples or 0 for evaluation_set in evaluation.sets]
        counts["eval.num_samples"] = max([evaluation.num_samples, *sample_counts])
    for name, count in counts.items():
        if count > max_num_seqs:
            yield (
                f"rollout.max_num_seqs = {max_num_seqs} is less than {name} = {count}: "
                "raise max_num_seqs"
            )
