"""The model card: what the hub reads of it, and what a run writes."""

from __future__ import annotations

import tomllib

import yaml
from running import tiny_settings

import lagrpo
from lagrpo.runs.card import model_card
from lagrpo.settings.schema import Settings


def card(**sections: dict) -> str:
    settings = Settings.model_validate(sections)
    return model_card(
        "sums",
        settings.model_dump(),
        settings.model_dump(exclude_defaults=True, exclude_none=True),
        {"packages": {"lagrpo": "0.1.0", "torch": "2.13.0"}},
        [],
        version=7,
    )


def header(text: str) -> dict:
    return yaml.safe_load(text.split("---")[1])


def test_header_names_a_base_model_of_the_hub_and_the_library(tmp_path):
    hub_header = header(card(model={"path": "Qwen/Qwen2.5-0.5B-Instruct"}))
    assert hub_header["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert hub_header["library_name"] == "transformers"
    adapters = header(card(model={"path": "smollm2", "lora_r": 4}))
    assert adapters["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert adapters["library_name"] == "peft"
    assert "base_model" not in header(card(model={"path": str(tmp_path)}))


def test_settings_of_the_card_are_those_that_were_changed():
    text = card(schedule={"sync_every": 4}, task={"name": "gsm8k"})
    block = text.split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(block) == {"schedule": {"sync_every": 4}, "task": {"name": "gsm8k"}}


def test_card_has_no_secret():
    options = {"api_key": "planted", "deep": [{"auth": {"user": "planted"}}]}
    data = "https://me:planted@host/rows.jsonl?sig=planted"
    text = card(task={"name": "custom", "data": data, "options": options})
    assert "planted" not in text
    assert "https://***@host/rows.jsonl" in text


def test_finished_run_has_a_card_with_its_results(model, tmp_path):
    result = lagrpo.train(tiny_settings(model, tmp_path / "runs"))
    assert result.weights is not None
    assert result.before is not None
    assert result.after is not None
    rows = (result.weights / "README.md").read_text(encoding="utf-8").splitlines()
    for name, summary in (("before", result.before), ("after", result.after)):
        row = next(row for row in rows if row.startswith(f"| {name} "))
        assert f"{summary['reward']:.3f}" in row
        assert "| 2 × 3 |" in row
