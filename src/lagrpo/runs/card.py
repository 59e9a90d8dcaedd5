"""The model card of trained weights: README.md with the base model, the results and the settings.

The Hugging Face hub reads its header.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tomli_w

from lagrpo.logs import redact_values
from lagrpo.types import JsonView

CARD = "README.md"
PACKAGES = ("lagrpo", "torch", "transformers")
"""The packages whose versions the card has."""

EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub id of the embedded model, smollm2."""


def model_card(
    name: str,
    settings: JsonView,
    changed_settings: JsonView,
    environment: JsonView,
    evaluations: Sequence[JsonView],
    version: int,
    notes: Sequence[str] = (),
) -> str:
    """Returns the card of the weights that the run `name` has trained.

    `changed_settings` are the entries of `settings` that are not the defaults. `evaluations` are
    summaries, in their order. `version` is the number of updates. `notes` are more sentences about
    the run. Secrets are redacted.
    """
    settings = redact_values(settings)
    parts = [
        _header(settings),
        f"# {name}",
        " ".join([_description(settings, environment, version), *(f"{note}." for note in notes)]),
    ]
    if evaluations:
        parts.append("## Results\n\n" + _results(evaluations))
    text = tomli_w.dumps(redact_values(changed_settings)).strip()
    parts.append(f"## Settings\n\nThose that are not lagrpo's defaults:\n\n```toml\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _header(settings: JsonView) -> str:
    """Returns the YAML that the hub reads."""
    path = settings["model"]["path"]
    base_model = EMBEDDED if path == "smollm2" else path
    is_adapter = settings["model"]["lora_r"] > 0
    lines = ["---"]
    is_hub_id = base_model.count("/") == 1 and not Path(base_model).expanduser().exists()
    if is_hub_id:
        lines.append(f"base_model: {base_model}")
    lines += [
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags: [lagrpo, grpo, reinforcement-learning]",
        "---",
    ]
    return "\n".join(lines)


def _description(settings: JsonView, environment: JsonView, version: int) -> str:
    """Returns what was trained, on what, and by which versions of the packages."""
    model = settings["model"]
    task = settings["task"]
    schedule = settings["schedule"]
    what = f"LoRA adapters of rank {model['lora_r']} for" if model["lora_r"] else "Weights of"
    data = f", data `{task['data']}`" if task["data"] else ""
    packages = environment.get("packages", {})
    versions = ", ".join(f"{name} {packages[name]}" for name in PACKAGES if packages.get(name))
    return (
        f"{what} `{model['path']}` after {version} updates on the task `{task['name']}`{data}: "
        f"{schedule['prompts_per_batch']} prompts × {settings['rollout']['num_generations']} "
        f"completions a batch, loss `{settings['loss']['recipe']}`, learning rate "
        f"{settings['optimizer']['learning_rate']:g}. Trained with {versions}."
    )


def _results(evaluations: Sequence[JsonView]) -> str:
    """Returns the table of evaluations with their 95 % intervals."""
    lines = [
        "| evaluation | updates | pass@1 | 95 % interval | mean reward | prompts × samples |",
        "|---|---|---|---|---|---|",
    ]
    for summary in evaluations:
        pass_at_1 = interval = reward = "–"
        if "pass@1" in summary:
            pass_at_1 = f"{summary['pass@1']:.1%}"
            interval = f"{summary['pass@1_low']:.1%} to {summary['pass@1_high']:.1%}"
        if "reward" in summary:
            reward = f"{summary['reward']:.3f}"
        lines.append(
            f"| {summary['name']} | {summary['policy_version']} | {pass_at_1} | {interval} | "
            f"{reward} | {summary['prompts']} × {summary['samples']} |"
        )
    return "\n".join(lines)
