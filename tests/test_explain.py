"""The meaning of settings in numbers, as a dry run prints it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lagrpo.errors import SettingsError
from lagrpo.model.backend import Backend
from lagrpo.settings.schema import Settings
from lagrpo.startup import explain
from lagrpo.startup.build_tasks import load_tasks
from lagrpo.startup.checks import check_settings
from lagrpo.startup.explain import meaning, print_meaning


def settings_of(path: Path, **sections: Any) -> Settings:
    """Settings with sequences that fit the tiny model."""
    lengths = {"max_prompt_length": 128, "max_completion_length": 256}
    rollout = lengths | sections.pop("rollout", {})
    return Settings.model_validate({"model": {"path": str(path)}, "rollout": rollout} | sections)


def explained(path: Path, **sections: Any) -> str:
    settings = settings_of(path, **sections)
    return "\n".join(meaning(settings, check_settings(settings)))


@pytest.mark.parametrize(
    ("schedule", "explanation"),
    [
        pytest.param(
            {"sync_every": 10},
            "weight sync every 10 batches, first before batch 10; staleness at most 9 updates",
            id="sync every 10 batches",
        ),
        pytest.param(
            {"sync_every": 3, "num_iterations": 2},
            "every 3 batches, first before batch 3; staleness at most 4 updates",
            id="two updates per batch",
        ),
        pytest.param(
            {"sync_every": 10, "batches": 4},
            "staleness at most 3 updates",
            id="run shorter than a sync",
        ),
        pytest.param(
            {"sync_every": 10, "batches": 4, "num_iterations": 2},
            "staleness at most 6 updates: all samples come from the first weights",
            id="no sync within the run",
        ),
        pytest.param(
            {"constant_lag": 4, "batches": 4},
            "staleness at most 3 updates: all samples come from the first weights",
            id="lag longer than the run",
        ),
        pytest.param(
            {"sync_every": 3, "ref_sync_every": 5, "batches": 12},
            "every 3 batches, first before batch 3 of each stage of 5 batches; "
            "staleness at most 4 updates",
            id="stages",
        ),
        pytest.param(
            {"sync_every": 8, "ref_sync_every": 5, "batches": 20},
            "staleness at most 19 updates: all samples come from the first weights, "
            "because a stage has only 5 batches",
            id="stages shorter than a sync",
        ),
        pytest.param(
            {"constant_lag": 30, "ref_sync_every": 5, "batches": 20},
            "staleness at most 19 updates: all samples come from the first weights, "
            "because the run has only 20 batches",
            id="lag longer than a run with stages",
        ),
        pytest.param(
            {"sync_every": 8, "sync_at_kl": 0.5},
            "passes 0.5 nats, at the latest after 8 batches; staleness at most 7 updates",
            id="sync by KL",
        ),
        pytest.param(
            {"max_staleness": 5, "num_iterations": 2},
            "while completions go on; staleness at most 4 updates",
            id="completions go on",
        ),
        pytest.param(
            {"max_staleness": 9, "prompts_per_batch": 8},
            "128 makes room for 1 times a batch: tokens get at most",
            id="rows limit staleness",
        ),
        pytest.param(
            {"batches": 6, "num_iterations": 2},
            "6 batches = 12 updates, 768 samples",
            id="length of the run",
        ),
    ],
)
def test_dry_run_explains_the_schedule_in_batches_and_updates(model, schedule, explanation):
    assert explanation in explained(model, schedule=schedule)


def test_dry_run_counts_the_rows_of_all_servers_that_sample(model):
    urls = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    schedule = {"max_staleness": 9, "prompts_per_batch": 8}
    text = explained(model, schedule=schedule, rollout={"engine": "vllm"}, vllm={"urls": urls})
    assert "128 makes room for 2 times a batch" in text


def test_dry_run_counts_the_prompts_that_come_from_a_file(model, tmp_path):
    file = tmp_path / "old.jsonl"
    file.touch()
    offline = {"data": str(file), "fraction": 0.94}
    schedule = {"prompts_per_batch": 8}
    text = explained(model, offline=offline, schedule=schedule, loss={"recipe": "asymre"})
    assert f"7 prompts of them from {file}" in text


def test_dry_run_of_a_loss_without_a_docstring_shows_its_name_alone(model):
    settings = settings_of(model, loss={"beta": 0.1})
    recipe = replace(check_settings(settings), formula="")
    assert meaning(settings, recipe)[0] == "recipe      grpo with beta = 0.1"


@pytest.mark.parametrize(
    ("fraction", "staleness"),
    [
        (1.0, "before every batch; staleness of the offline samples unknown"),
        (0.5, "staleness at most 0 updates, of the offline samples unknown"),
    ],
    ids=["all", "half"],
)
def test_dry_run_of_offline_data_claims_no_staleness_and_no_count(
    model, tmp_path, fraction, staleness
):
    data = tmp_path / "a.jsonl"
    data.write_text("{}\n", encoding="utf-8")
    text = explained(
        model,
        offline={"data": [str(data)], "fraction": fraction},
        schedule={"batches": 2, "prompts_per_batch": 8},
        rollout={"num_generations": 16},
    )
    assert staleness in text
    assert "8 prompts x at most 16 completions = at most 128 samples" in text
    assert "2 batches = 2 updates, at most 256 samples" in text


def test_dry_run_of_stale_schedule_has_no_note_if_all_samples_are_offline(model, tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text("{}\n", encoding="utf-8")
    schedule = {"sync_every": 100, "num_iterations": 4}
    assert "updates old" in explained(model, schedule=schedule)
    offline = {"data": [str(data)]}
    assert "updates old" not in explained(model, schedule=schedule, offline=offline)


@pytest.mark.parametrize(
    ("packed", "fused"),
    [
        pytest.param(True, False, id="packed weights are whole"),
        pytest.param(False, True, id="kernels compute sharded layers"),
    ],
)
def test_kernels_compute_sharded_layers_unless_they_pack_weights(model, monkeypatch, packed, fused):
    products = "AMX" if packed else None
    backend = Backend(torch.device("cpu"), torch.bfloat16, kernels=True, products=products)
    monkeypatch.setattr(explain, "choose_backend", lambda *_: backend)
    monkeypatch.setattr(explain, "pick_dtype", lambda *_: ("bfloat16", ""))
    settings = settings_of(model, task={"name": "arithmetic"}, distributed={"strategy": "fsdp2"})
    lm = explain.empty_model(settings)
    computation = explain.computation_of(settings, lm, 2, settings.model.dtype)
    assert (computation.packed, computation.fused) == (packed, fused)


def test_dry_run_states_memory_per_rank(model, monkeypatch):
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert "per rank" in explained(model, distributed={"strategy": "fsdp2"})


@pytest.mark.parametrize("rank", ["0", "1"])
def test_dry_run_of_a_run_that_does_not_fit_the_host_prints_all_of_it_and_fails(
    model, monkeypatch, capsys, rank
):
    monkeypatch.setattr(explain, "memory_limit", lambda: 2**20)
    monkeypatch.setattr(explain, "pick_device", lambda: torch.device("cpu"))
    monkeypatch.setenv("RANK", rank)
    settings = settings_of(model, task={"name": "arithmetic"})
    with pytest.raises(SettingsError, match=r"does not fit.*rollout\.max_num_seqs"):
        print_meaning(settings, check_settings(settings), load_tasks(settings))
    lines = capsys.readouterr().out.splitlines()
    shown = ["optimizer.micro_batch_tokens" in row for row in lines if "activations  " in row]
    assert (shown, "[model]" in lines) == (([True], True) if rank == "0" else ([], False))


@pytest.mark.parametrize("name", ["scale_lr_by_kl", "scale_lr_by_ess"])
@pytest.mark.parametrize(
    ("sections", "acts"),
    [
        pytest.param({}, False, id="fresh samples"),
        pytest.param({"schedule": {"num_iterations": 2}}, True, id="two updates per batch"),
        pytest.param({"schedule": {"sync_every": 2}}, True, id="stale samples"),
        pytest.param({"rollout": {"engine": "vllm"}}, True, id="another engine"),
    ],
)
def test_dry_run_says_that_a_rate_follows_the_samples_and_if_it_never_acts(
    model, name, sections, acts
):
    lines = explained(model, optimizer={name: 0.5}, **sections).splitlines()
    assert [name in line for line in lines if line.startswith("rate ")] == [True]
    assert any("will not act" in line for line in lines) is not acts


def test_unsupported_model_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}', encoding="utf-8")
    with pytest.raises(SettingsError, match="models of type 'gemma2' have soft-capping"):
        explained(tmp_path)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"recipe": "seq_tis"}, ["surrogate.weight bounds the ratio of a whole completion"]),
        ({"recipe": "trm"}, ["filters.seq_max_k3 bounds the ratio of a whole completion"]),
        ({"recipe": "m2po"}, ["statistic of the whole step", "second pass"]),
        ({"recipe": "grpo_tis"}, ["only the weight pi_k/alpha does"]),
        ({"recipe": "decoupled_ppo"}, ["only the weight pi_k/alpha does"]),
        ({"recipe": "grpo", "epsilon_high": 0.3}, ["with epsilon_high = 0.3"]),
    ],
    ids=["seq_tis", "trm", "m2po", "grpo_tis", "decoupled_ppo", "override"],
)
def test_dry_run_says_what_a_loss_costs_and_what_of_it_does_not_act(model, loss, words):
    text = explained(model, loss=loss)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("lora_r", "learning_rate", "warns"),
    [(16, 1e-6, True), (16, 1e-5, False), (0, 1e-6, False)],
    ids=["adapters at a small rate", "adapters", "all weights"],
)
def test_dry_run_warns_of_a_learning_rate_too_small_for_adapters(
    model, lora_r, learning_rate, warns
):
    text = explained(
        model,
        optimizer={"learning_rate": learning_rate},
        model={"path": str(model), "lora_r": lora_r},
    )
    assert ("is small for adapters" in text) is warns


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(
    ("warmup", "rate"), [(30, "0.00194"), (6, "0.00857"), (5, None), (0, None)]
)
def test_dry_run_warns_of_a_warm_up_that_the_run_does_not_end(model, schedule, warmup, rate):
    """Six updates: the last one is the first with the full rate after a warm-up of five."""
    optimizer = {"learning_rate": 1e-2, "warmup_steps": warmup, "lr_scheduler_type": schedule}
    text = explained(model, optimizer=optimizer, schedule={"batches": 3, "num_iterations": 2})
    if rate is None:
        assert "warmup_steps" not in text
    else:
        assert f"warmup_steps = {warmup}" in text
        assert f"6 updates: the learning rate reaches {rate}, never 0.01" in text


def test_dry_run_of_a_plain_loss_has_no_note(model):
    assert "note " not in explained(model, loss={"recipe": "grpo"})


def test_dry_run_of_sequences_that_are_too_long_for_the_model_is_rejected(model):
    with pytest.raises(SettingsError, match="longest position of this model is 512"):
        explained(model, rollout={"max_prompt_length": 600})


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", False)])
def test_dry_run_of_several_processes_is_printed_once(model, monkeypatch, capsys, rank, prints):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    settings = settings_of(model)
    print_meaning(settings, check_settings(settings), load_tasks(settings))
    assert bool(capsys.readouterr().out) == prints
