"""Settings that are rejected before a model or data is loaded."""

from __future__ import annotations

import pytest
import torch

from lagrpo.errors import SettingsError
from lagrpo.model import backend
from lagrpo.settings.schema import Settings
from lagrpo.startup.checks import check_settings
from lagrpo.types import JsonObject
from lagrpo.verify.record import _count_fresh_prompts


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """In an empty directory with a model that has only its config, a file, and a run."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "config.toml").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def settings(**sections) -> Settings:
    return Settings.model_validate({"model": {"path": "model"}} | sections)


def test_models_that_may_exist_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "no-such").mkdir()
    (tmp_path / "no-such" / "config.json").write_text("{}", encoding="utf-8")
    for model in ("model", "smollm2", "Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "~/no-such"):
        assert check_settings(settings(model={"path": model})).name == "grpo"


VLLM = {"rollout": {"engine": "vllm"}}


@pytest.mark.parametrize(
    ("ranks", "visible", "vllm", "shared"),
    [
        pytest.param(2, None, {"gpus": [2, 3]}, None, id="others"),
        pytest.param(2, None, {"gpus": [1, 2]}, 1, id="that of the second rank"),
        pytest.param(2, "4,5,6", {"gpus": [5]}, 5, id="ranks see others"),
        pytest.param(2, "4,5,6", {"gpus": [6, 0]}, None, id="visible, but no rank's"),
        pytest.param(1, None, {"gpus": [0]}, 0, id="one process"),
        pytest.param(2, "4,-1,6", {"gpus": [6]}, None, id="hidden behind -1"),
        pytest.param(1, None, {}, None, id="one process, not set"),
        pytest.param(
            2, None, {"server_args": ["--gpu-memory-utilization 0.4"]}, None, id="share, not set"
        ),
        pytest.param(
            1,
            None,
            {"gpus": [0], "server_args": ["--gpu-memory-utilization 0.4"]},
            None,
            id="shared on purpose",
        ),
        pytest.param(
            1,
            None,
            {
                "gpus": [0],
                "server_args": ["--gpu-memory-utilization 0.4"],
                "weight_transfer": "nccl",
            },
            0,
            id="shared, by NCCL",
        ),
    ],
)
def test_gpu_of_a_rank_is_not_the_server_s(monkeypatch, ranks, visible, vllm, shared):
    monkeypatch.setattr(backend, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run_settings = settings(**VLLM, vllm=vllm)
    if shared is None:
        check_settings(run_settings)
    else:
        with pytest.raises(SettingsError, match=f"vllm.gpus: GPU {shared} is one"):
            check_settings(run_settings)


@pytest.mark.parametrize(
    ("ranks", "visible", "vllm", "message"),
    [
        pytest.param(1, "GPU-8f1a", {"gpus": [0]}, "names 'GPU-8f1a'", id="UUID and number"),
        pytest.param(2, "MIG-1,MIG-2", {"gpus": [2]}, "names 'MIG-1'", id="MIG and number"),
        pytest.param(2, None, {}, "set vllm.gpus", id="several ranks, not set"),
    ],
)
def test_server_gpu_that_cannot_be_known_is_rejected(monkeypatch, ranks, visible, vllm, message):
    monkeypatch.setattr(backend, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "0,1,2")
    with pytest.raises(SettingsError, match=message):
        check_settings(settings(**VLLM, vllm=vllm))


WRONG: list[tuple[JsonObject, str]] = [
    ({"model": {"path": "./nosuch"}}, r"model.path: model directory './nosuch' does not exist"),
    ({"model": {"path": "smolm2"}}, "model.path: .* did you mean 'smollm2'"),
    (
        {"model": {"path": "adapter"}},
        "model.path: 'adapter' is not a model directory: it has no config.json",
    ),
    (
        {"model": {"path": "model", "chat_template": "nosuch"}},
        "model.chat_template: nosuch: No such file",
    ),
    ({"run": {"name": "../x"}}, "run: run.name = '../x' is not .*run.output_dir"),
    ({"run": {"name": "taken"}}, "run: runs/taken already exists and is not empty: choose another"),
    ({"run": {"output_dir": "file"}}, "run: cannot write to file"),
    ({"rollout": {"num_generations": 1}}, "rollout.num_generations = 1: .* 2 or more"),
    ({"task": {"name": "gsm"}}, "task.name: no task 'gsm'.* Did you mean 'gsm8k'"),
    (
        {"task": {"options": {"numbers": 4}}},
        "task.options: the task 'arithmetic' has no option 'numbers'",
    ),
    ({"task": {"data": "rows.jsonl"}}, "task.data: the task 'arithmetic' has no option 'data'"),
    ({"task": {"options": {"digits": 7}}}, "task.options.digits = 7"),
    ({"task": {"options": {"operations": ["/"]}}}, r"task.options.operations = \['/'\]"),
    ({"task": {"rewards": ["exakt"]}}, "task.rewards, 'exakt': no built-in reward 'exakt'"),
    ({"offline": {"data": "nosuch.jsonl"}}, "offline.data: nosuch.jsonl is neither a file"),
    ({"loss": {"recipe": "grop"}}, "loss: unknown recipe 'grop'; did you mean 'grpo'"),
    (
        {"loss": {"recipe": "dapo", "kl_estimator": "k3"}},
        "loss.kl_estimator has no effect on recipe.*beta = 0",
    ),
]


def test_settings_that_cannot_be_run_are_rejected_by_name():
    for sections, message in WRONG:
        with pytest.raises(SettingsError, match=f"^{message}"):
            check_settings(settings(**sections))


@pytest.mark.parametrize("recipe", ["opd", "iw_opd"])
def test_groups_of_one_completion_are_accepted_if_the_recipe_reads_no_reward(recipe):
    sections = {"loss": {"recipe": recipe}, "rollout": {"num_generations": 1}}
    assert check_settings(settings(**sections)).name == recipe


def test_groups_of_one_offline_completion_are_rejected(tmp_path):
    file = tmp_path / "completions.jsonl"
    file.write_text("{}", encoding="utf-8")
    sections = {"offline": {"data": str(file)}, "rollout": {"num_generations": 1}}
    with pytest.raises(SettingsError, match=r"rollout\.num_generations = 1"):
        check_settings(settings(**sections))


def test_lora_with_fsdp2_is_rejected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="'fsdp2' trains all weights"):
        check_settings(
            settings(model={"path": "model", "lora_r": 4}, distributed={"strategy": "fsdp2"})
        )


def test_task_object_replaces_the_settings_of_the_task(tmp_path):
    from sample_task import load

    check_settings(settings(task={"name": "gsm"}, run={"output_dir": "new/runs"}), load())
    assert not (tmp_path / "new").exists()


# Losses that cannot act in this run


@pytest.mark.parametrize(
    ("loss", "path"),
    [
        ({"recipe": "grpo_recomputed"}, "surrogate"),
        ({"recipe": "dapo", "overrides": {"denominator": "pi_k"}}, "surrogate"),
        ({"recipe": "dppo_tv", "overrides": {"mask": {"denominator": "pi_k"}}}, "surrogate.mask"),
        ({"recipe": "sapo", "overrides": {"denominator": "pi_k"}}, "surrogate.weight"),
        (
            {"recipe": "opsm", "overrides": {"filters": {"opsm": {"denominator": "pi_k"}}}},
            "filters.opsm",
        ),
        (
            {"recipe": "reinforce", "overrides": {"mask": "own_functions:since_pi_k"}},
            "surrogate.mask",
        ),
    ],
    ids=["row", "clip", "mask", "weight", "filter", "own mask"],
)
def test_bound_over_pi_k_is_rejected_if_each_batch_gets_one_update(loss, path):
    """At the only update on a batch the policy is pi_k, so the bound would never act."""
    with pytest.raises(SettingsError, match=rf"{path} compares .*num_iterations = 1"):
        check_settings(settings(loss=loss))
    check_settings(settings(loss=loss, schedule={"num_iterations": 2}))


@pytest.mark.parametrize("recipe", ["grpo_tis", "grpo_icepop", "decoupled_ppo", "grpo", "geppo"])
def test_loss_over_pi_k_that_corrects_for_alpha_is_accepted_with_one_update(recipe):
    assert check_settings(settings(loss={"recipe": recipe})).name == recipe


@pytest.mark.parametrize("name", ["scale_lr_by_ess", "scale_lr_by_kl"])
def test_offline_completions_without_what_a_loss_needs_are_rejected(tmp_path, name):
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": "a", "completion": "b", "reward": 1}\n', encoding="utf-8"
    )
    offline = {"data": "data.jsonl", "fraction": 1.0}
    with pytest.raises(SettingsError, match=r"'a3po' reads the staleness.*offline\.data"):
        check_settings(settings(loss={"recipe": "a3po"}, offline=offline))
    scaled = {name: 1.0}
    with pytest.raises(SettingsError, match=name):
        check_settings(settings(loss={"recipe": "rloo"}, offline=offline, optimizer=scaled))
    check_settings(settings(loss={"recipe": "seq_tis"}, offline=offline, optimizer=scaled))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"recipe": "own_functions:nosuch"}, "own_functions.py has no 'nosuch'"),
        ({"recipe": "own_functions:fails"}, "own_functions:fails: fails on small random inputs"),
        ({"filters": ["opms"]}, "did you mean 'opsm'"),
        (
            {"recipe": "cispo", "overrides": {"mask": "one_side", "epsilon_high": 3.0}},
            r"surrogate\.mask\.epsilon_high or surrogate\.weight\.epsilon_high",
        ),
        ({"epsilon": 0.1, "overrides": {"epsilon_low": 0.2}}, "the same knob"),
    ],
    ids=["no such function", "fails", "no such filter", "two knobs", "twice"],
)
def test_loss_that_cannot_be_computed_is_rejected_before_a_model_loads(loss, message):
    with pytest.raises(SettingsError, match=f"^loss.*{message}"):
        check_settings(settings(loss=loss))


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ({"recipe": "rloo", "epsilon": 0.1}, "loss.epsilon"),
        ({"recipe": "rloo", "kl_estimator": "k2"}, "loss.kl_estimator"),
        ({"recipe": "rloo", "overrides": {"dual_clip": 2.0}}, "loss.overrides.dual_clip"),
        ({"recipe": "rloo", "overrides": {"mask.epsilon_low": 2.0}}, "loss.overrides.mask"),
    ],
)
def test_setting_without_effect_is_named_as_it_was_given(loss, name):
    with pytest.raises(SettingsError, match=rf"^{name}\S* (has no effect on|is no knob of) recipe"):
        check_settings(settings(loss=loss))


@pytest.mark.parametrize(
    ("fraction", "prompts", "count"),
    [(0.94, 8, 7), (1.0, 8, 8), (0.5, 8, 4), (0.01, 8, 1), (0.5, 1, 1)],
    ids=["one stays fresh", "all", "half", "at least one", "a batch of one"],
)
def test_batch_with_a_fraction_of_offline_prompts_has_offline_and_fresh_prompts(
    fraction, prompts, count
):
    sections = settings(
        offline={"data": "old.jsonl", "fraction": fraction},
        schedule={"prompts_per_batch": prompts},
    )
    assert sections.offline_prompts == count
    assert _count_fresh_prompts(sections) == prompts - count


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        pytest.param("model.safetensors", "weights of a model and an adapter", id="whole weights"),
        pytest.param("pytorch_model.bin", "weights of a model and an adapter", id="pickled"),
        pytest.param("adapter_model.safetensors", "is an adapter", id="adapter with a config"),
    ],
)
def test_adapter_beside_a_config_is_rejected_before_anything_loads(tmp_path, weights, problem):
    (tmp_path / "model" / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model" / weights).write_bytes(b"")
    with pytest.raises(SettingsError, match=problem):
        check_settings(settings())
