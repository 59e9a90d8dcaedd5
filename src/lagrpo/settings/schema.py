"""All settings of a run, and what settings of different sections exclude. Loads neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from lagrpo.settings import sections
from lagrpo.tasks import is_multi_turn

MIN_REPLIES = (
    512  # tokens that environments may say in a completion, if max_completion_length is less
)


class Settings(sections.Section):
    """All settings of a training run."""

    run: sections.RunSettings = sections.RunSettings()
    model: sections.ModelSettings = sections.ModelSettings()
    task: sections.TaskSettings = sections.TaskSettings()
    rollout: sections.RolloutSettings = sections.RolloutSettings()
    vllm: sections.VllmSettings = sections.VllmSettings()
    schedule: sections.ScheduleSettings = sections.ScheduleSettings()
    offline: sections.OfflineSettings = sections.OfflineSettings()
    loss: sections.LossSettings = sections.LossSettings()
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
    def replied(self) -> int:
        """The most tokens that tools, or the environment of a built-in task, say in a completion; 0 without."""
        return self.reply_limit if self.task.tools or is_multi_turn(self.task.name) else 0

    @property
    def reply_limit(self) -> int:
        """The most tokens that an environment says in a completion that has one."""
        return max(MIN_REPLIES, self.rollout.max_completion_length)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the policy samples, in training or in an evaluation."""
        sets = self.eval.sets if self.eval.takes_place else ()
        own = self.rollout.max_completion_length
        return self.rollout.max_prompt_length + max(
            [own, *(each.max_completion_length or own for each in sets)]
        )


def find_contradictions(settings: Settings) -> Iterator[str]:
    """What settings of different sections exclude, each with its cure."""
    rollout, evaluation, vllm, offline = (
        settings.rollout,
        settings.eval,
        settings.vllm,
        settings.offline,
    )
    samples = max([evaluation.num_samples, *(each.num_samples or 0 for each in evaluation.sets)])
    counts = {"rollout.num_generations": rollout.num_generations}
    counts |= {"eval.num_samples": samples} if evaluation.takes_place else {}
    for name, count in counts.items():
        if count > rollout.max_num_seqs:
            yield f"rollout.max_num_seqs = {rollout.max_num_seqs} is less than {name} = {count}: raise max_num_seqs"
    if rollout.engine != "vllm" and vllm != (default := sections.VllmSettings()):
        given = next(name for name, value in vllm if value != getattr(default, name))
        yield f"vllm.{given} is set, but rollout.engine is 'local': set rollout.engine = 'vllm'"
    if rollout.engine == "vllm" and rollout.temperature > 2:
        yield f"rollout.temperature = {rollout.temperature:g}: rollout.engine = 'vllm' allows at most 2; lower it"
    if settings.model.lora_r and vllm.weight_transfer == "nccl":
        yield "vllm.weight_transfer = 'nccl' cannot send the adapters of model.lora_r: use 'directory'"
    if offline.fraction < 1 and not offline.data:
        yield f"offline.fraction = {offline.fraction:g}, but offline.data is unset: set offline.data"
    if (
        buffer := settings.loss.overrides.get("overlong_buffer", 0)
    ) > rollout.max_completion_length:
        longest = f"rollout.max_completion_length = {rollout.max_completion_length}"
        yield f"loss.overrides.overlong_buffer = {buffer} is more than {longest}: lower the buffer"
