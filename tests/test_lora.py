"""Adapters beside frozen weights: their gradients, versions of them, what PEFT makes of them, runs
that train them."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_updates import five_updates, same
from running import tiny_settings
from safetensors.torch import load_file, save_file
from test_trainer import assembled, generate_groups, judge_groups, make_trainer
from tiny import CHAT, TURNS, computed_by, save_tiny, tiny_model, tiny_policy
from torch import Tensor

from lagrpo import train
from lagrpo.core.recipes import resolve
from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import SettingsError
from lagrpo.model.embedded import ADAPTER_CONFIG as CONFIG
from lagrpo.model.layout import Packed
from lagrpo.model.loading import load_policy
from lagrpo.model.lora import ADAPTER_WEIGHTS as WEIGHTS
from lagrpo.model.lora import (
    Lora,
    adapted,
    count_parameters,
    load_adapter_weights,
    save_adapter,
)
from lagrpo.model.model import Policy, copy_policy
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.files import MODE
from lagrpo.settings.load import load_settings
from lagrpo.startup.build import load_policy_and_servers
from lagrpo.training.master_weights import MergedState
from lagrpo.verify import verify_run

LORA = Lora(r=4, alpha=8.0, seed=3)
ROW = (
    ((5, 6, 7, 8), [torch.tensor([9, 4, 30]), torch.tensor([11, 12])]),
    ((20, 21), [torch.tensor([40, 41, 42])]),
)


def adapted_policy(
    kind: str = "llama", dtype: torch.dtype = torch.bfloat16, lora: Lora = LORA, spread: float = 0.0
):
    """A tiny policy with adapters, whose B are random numbers of this spread."""
    policy = tiny_policy(kind, dtype, lora=lora)
    move(policy, spread)
    return policy


@torch.no_grad()
def move(policy: Policy, spread: float, seed: int = 1) -> None:
    """Other adapters, as updates make them."""
    numbers = torch.Generator().manual_seed(seed)
    for layer in adapted(policy.model.lm).values():
        step = torch.randn(layer.lora_B.shape, generator=numbers)
        layer.lora_B.add_(step.to(layer.lora_B.device), alpha=spread)


@torch.no_grad()
def logp_of(policy: Policy) -> Tensor:
    return policy.logp(Packed.build(list(ROW)))


@pytest.mark.usefixtures("either_computation")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2", torch.bfloat16), ("gemma3_text", torch.float32)]
)
def test_initial_policy_with_adapters_equals_the_model_bit_for_bit(kind, dtype):
    policy = adapted_policy(kind, dtype)
    before = logp_of(policy)
    assert torch.equal(before, logp_of(tiny_policy(kind, dtype)))
    move(policy, 0.3)
    assert (logp_of(policy) - before).abs().max() > 0.05


def gradients(policy: Policy) -> dict[str, Tensor]:
    policy.logp(Packed.build(list(ROW))).sum().backward()
    return {name: p.grad for name, p in policy.model.lm.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("kind", "targets"), [("llama", ("all-linear",)), ("qwen2", ("q_proj", "v_proj", "up_proj"))]
)
def test_gradient_of_adapters_is_that_of_plain_autograd(kind, targets):
    """In float32 by the kernels and by autograd through the modules; in bfloat16 near both. Frozen
    weights get none."""
    lora = Lora(3, 6.0, targets, seed=1)
    expected = gradients(computed_by(adapted_policy(kind, torch.float32, lora, 0.2), "torch"))
    assert expected.keys() == {*adapted_policy(kind, torch.float32, lora).weights}
    by_kernels = gradients(adapted_policy(kind, torch.float32, lora, 0.2))
    assert by_kernels.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(by_kernels[name], grad, rtol=1e-3, atol=1e-4)
    rounded = gradients(adapted_policy(kind, torch.bfloat16, lora, 0.2))
    both = torch.stack(
        [
            torch.cat([gradients_by_name[name].float().flatten() for name in expected])
            for gradients_by_name in (rounded, expected)
        ]
    )
    assert torch.nn.functional.cosine_similarity(both[0], both[1], dim=0) > 0.99


@pytest.mark.usefixtures("either_computation")
def test_versions_share_all_but_their_adapters():
    policy = adapted_policy(spread=0.1)
    alpha, ref = copy_policy(policy), copy_policy(policy)
    frozen = [p for p in policy.model.lm.parameters() if not p.requires_grad]
    for copy in (alpha, ref):
        addresses = {p.data_ptr() for p in copy.model.lm.parameters()}
        assert all(p.data_ptr() in addresses for p in frozen)
        assert not addresses & {
            p.data_ptr() for p in policy.model.lm.parameters() if p.requires_grad
        }
    before = logp_of(policy)
    move(policy, 0.2, seed=2)
    assert torch.equal(logp_of(alpha), before)
    assert not torch.equal(logp_of(policy), before)
    alpha.load(policy.weights, 1)
    assert torch.equal(logp_of(alpha), logp_of(policy))
    assert torch.equal(logp_of(ref), before)


@pytest.mark.usefixtures("either_computation")
def test_update_moves_the_adapters_and_nothing_else():
    policy = adapted_policy(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in policy.model.lm.named_parameters()}
    recipe = resolve("grpo", {"beta": 0.0})
    trainer = make_trainer(policy, recipe, lr=1e-2)
    batch = assembled(recipe, judge_groups(generate_groups(policy)))
    for _ in range(2):  # A has no gradient until B has moved
        trainer.step(trainer.pack(batch, 4096))
    moved = {
        name for name, p in policy.model.lm.named_parameters() if not torch.equal(p, before[name])
    }
    assert moved == {*policy.weights}
    assert {name.partition("/")[2] for name in trainer.state()} == {*policy.weights}


def test_saved_adapters_load_with_the_chat_template_of_their_training(tmp_path):
    model = save_tiny(tmp_path / "model")
    trained = load_policy(str(model), torch.float32, lora=LORA, chat_template=TURNS)
    trained.save(tmp_path / "adapter")
    loaded = load_policy(str(tmp_path / "adapter"), torch.float32)
    assert loaded.chat.tokenizer.chat_template == TURNS


def test_adapters_without_a_tokenizer_load_with_the_tokenizer_of_the_model(tmp_path):
    model = save_tiny(tmp_path / "model")
    trained = load_policy(str(model), torch.float32, lora=LORA)
    save_adapter(trained.model.lm, trained.weights, tmp_path / "adapter")
    loaded = load_policy(str(tmp_path / "adapter"), torch.float32)
    assert loaded.chat.tokenizer.chat_template == CHAT


def test_start_of_adapters_depends_on_seed_and_name_alone():
    first, other = (adapted_policy(lora=Lora(4, 8.0, seed=seed)) for seed in (3, 4))
    few = adapted_policy(lora=Lora(4, 8.0, ("down_proj",), seed=3))
    assert all(torch.equal(tensor, first.weights[name]) for name, tensor in few.weights.items())
    for name, layer in adapted(first.model.lm).items():
        bound = layer.in_features**-0.5
        assert 0.9 * bound < float(layer.lora_A.detach().abs().max()) <= 1.01 * bound
        assert not torch.equal(layer.lora_A, adapted(other.model.lm)[name].lora_A)
        assert not layer.lora_B.any()
    assert count_parameters(tiny_model(), LORA) == sum(t.numel() for t in first.weights.values())


# PEFT


@torch.no_grad()
def by_transformers(lm: Any) -> Tensor:
    """log-probs of completion tokens, one sequence at a time."""
    logp_of_completions = []
    for prompt_ids, completions in ROW:
        for tokens in completions:
            row = torch.cat([torch.tensor(prompt_ids), tokens])
            logp = lm(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
            logp_of_completions.append(
                logp[len(prompt_ids) - 1 : -1].gather(1, tokens[:, None]).squeeze(1)
            )
    return torch.cat(logp_of_completions)


def plain_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, attn_implementation="eager")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_computes_what_we_compute_from_a_saved_adapter(model, tmp_path, dtype):
    """And from the whole model that PEFT merges."""
    from peft import PeftModel

    policy = load_policy(
        str(model), dtype, lora=Lora(4, 12.0, ("q_proj", "v_proj", "up_proj"), seed=2)
    )
    initial = logp_of(policy)
    move(policy, 0.3)
    policy.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        12,
        str(model),
    )
    ours = logp_of(policy)
    assert (ours - initial).abs().mean() > 0.1
    assert torch.equal(logp_of(load_policy(str(tmp_path / "adapter"), dtype)), ours)
    theirs: Any = PeftModel.from_pretrained(
        plain_model(model, dtype), str(tmp_path / "adapter"), autocast_adapter_dtype=False
    )
    tolerance = 1e-5 if dtype == torch.float32 else 8 * 2 * 2**-8  # 8 roundings of 2
    assert (ours - by_transformers(theirs)).abs().mean() < tolerance
    if dtype == torch.float32:
        assert (ours - by_transformers(theirs.merge_and_unload())).abs().mean() < tolerance


@pytest.mark.parametrize(
    "peft_options",
    [
        {"target_modules": r".*\.(q|up)_proj"},
        {"target_modules": ["self_attn.o_proj"], "layers_to_transform": [1]},
    ],
    ids=str,
)
def test_adapters_that_peft_made_are_those_that_peft_reads(tmp_path, peft_options):
    from peft import LoraConfig, get_peft_model

    model = save_tiny(tmp_path / "model", num_hidden_layers=2)
    peft_model = get_peft_model(
        plain_model(model), LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **peft_options)
    ).eval()
    with torch.no_grad():
        for name, weight in peft_model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    peft_model.save_pretrained(str(tmp_path / "adapter"))
    policy = load_policy(str(tmp_path / "adapter"), torch.float32)
    assert (logp_of(policy) - by_transformers(peft_model)).abs().mean() < 1e-5
    assert (logp_of(policy) - logp_of(load_policy(str(model), torch.float32))).abs().mean() > 0.01


# Runs


@pytest.fixture(scope="module")
def finished_run(model, tmp_path_factory):
    """A run of adapters in two stages with a KL term and a lag, and a checkpoint of each of its six
    batches."""
    settings = tiny_settings(
        model,
        tmp_path_factory.mktemp("whole"),
        model={"lora_r": 4, "lora_alpha": 8.0, "dtype": "bfloat16"},
        schedule={"batches": 6, "sync_every": 2, "ref_sync_every": 3},
        loss={"recipe": "grpo", "beta": 0.1},
        run={"name": "whole"},
        checkpoint={"save_every": 1, "save_minutes": 0, "save_total_limit": 9},
    )
    return train(settings)


def test_run_leaves_adapters_and_is_replayed(finished_run):
    assert {path.name for path in finished_run.weights.iterdir()} >= {
        CONFIG,
        WEIGHTS,
        "tokenizer.json",
    }
    assert not (finished_run.weights / "model.safetensors").exists()
    files = [path for path in finished_run.run.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {
        MODE
    }  # safetensors alone would make 0600
    metrics = load_metrics(finished_run.run)
    assert [line["staleness/max"] for line in metrics] == [0, 0, 1, 2, 0, 1]
    kl_ref = [
        line["kl"] for line in metrics
    ]  # 0 where pi_k is pi_ref: at the start of either stage
    assert [value == 0 for value in kl_ref] == [True, False, False, True, False, False]
    environment = json.loads((finished_run.run / "environment.json").read_text(encoding="utf-8"))
    assert environment["agreement"]["grade"] == "exact"
    size = sum(
        file.stat().st_size for file in (finished_run.run / "checkpoints" / "step-000006").iterdir()
    )
    assert (
        size
        < 20 * sum(t.numel() for t in load_adapter_weights(finished_run.weights).values()) + 200_000
    )
    assert not verify_run(finished_run.run, 24, trust_run_code=True).differences


def test_resumed_run_equals_an_uninterrupted_run(finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run.run, tmp_path / "copy"))
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 4:
            shutil.rmtree(path)
    resumed = train(resume=run, trust_run_code=True)
    assert resumed.weights is not None
    assert same(load_adapter_weights(resumed.weights), load_adapter_weights(finished_run.weights))
    assert load_rollouts(run) == load_rollouts(finished_run.run)


def test_target_that_is_not_in_the_decoder_is_rejected(model, tmp_path):
    with pytest.raises(
        SettingsError, match=r"^model.lora_r: targets: .* no linear layer 'lm_head'"
    ):
        train(
            tiny_settings(model, tmp_path, model={"lora_r": 4, "lora_target_modules": ["lm_head"]})
        )


def test_training_from_an_adapter_directory_is_rejected(finished_run, tmp_path):
    with pytest.raises(SettingsError, match="is an adapter"):
        train(tiny_settings(finished_run.weights, tmp_path))


def test_damaged_adapter_is_rejected(finished_run, tmp_path):
    for n, (config, number, problem) in enumerate(
        [
            ({}, math.nan, "1 of .* numbers in .*lora_A are not finite in bfloat16"),
            (
                {"base_model_name_or_path": "/nowhere"},
                0.0,
                "the model of the adapter .* cannot be loaded.*'/nowhere'",
            ),
            ({"target_modules": None}, 0.0, "target_modules is None, but lagrpo reads plain LoRA"),
            (
                {"init_lora_weights": "pissa"},
                0.0,
                "init_lora_weights is 'pissa', but lagrpo reads plain LoRA",
            ),
        ]
    ):
        folder = shutil.copytree(finished_run.weights, tmp_path / str(n))
        file, weights = folder / CONFIG, load_file(folder / WEIGHTS)
        file.write_text(json.dumps(json.loads(file.read_bytes()) | config), encoding="utf-8")
        next(tensor for name, tensor in weights.items() if "lora_A" in name).view(-1)[0] = number
        save_file(weights, folder / WEIGHTS)
        with pytest.raises(ValueError, match=problem):
            load_policy(str(folder), torch.bfloat16)


def test_updates_on_three_ranks_are_the_same_bits_as_on_one(ranks):
    options = {"dtype": "bfloat16", "max_grad_norm": None, "lora": LORA}
    alone = five_updates(None, options, True)
    results = ranks.run(five_updates, options, True, size=3)
    assert same(MergedState([rank.state for rank in results]), alone.state)
    assert all(same(rank.weights, alone.weights) for rank in results)


def test_seed_of_the_run_decides_where_adapters_start(model, tmp_path):
    starts = []
    for seed in (1, 1, 2):
        sections = tiny_settings(model, tmp_path, model={"lora_r": 2}, run={"seed": seed})
        with ExitStack() as undo:
            settings = load_settings(sections)
            policy, _ = load_policy_and_servers(settings, {}, Ranks(), None, undo)
        starts.append(torch.cat([weight.flatten() for weight in policy.weights.values()]))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
