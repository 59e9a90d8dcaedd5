"""Adapters beside frozen weights: their gradients, versions of them, what PEFT makes of them, runs that train them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import tiny_settings
from safetensors.torch import load_file, save_file
from test_trainer import assembled, generate_groups, judge_groups, make_trainer
from test_zero1 import five_updates, same
from tiny import computed_by, save_tiny, tiny_model, tiny_policy
from torch import Tensor

from lagrpo import cli, train
from lagrpo.core.recipes import resolve
from lagrpo.errors import SettingsError
from lagrpo.model.adapters import adapted
from lagrpo.model.embedded import ADAPTER_CONFIG as CONFIG
from lagrpo.model.loading import load_policy, merge_adapter
from lagrpo.model.lora import ADAPTER_WEIGHTS as WEIGHTS
from lagrpo.model.lora import Lora, attach_lora, count_parameters, load_adapter_weights
from lagrpo.model.model import Packed, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.training.optimizer_state import MergedState
from lagrpo.verify import verify_run

LORA = Lora(r=4, alpha=8.0, seed=3)
ROW = ((5, 6, 7, 8), [torch.tensor([9, 4, 30]), torch.tensor([11, 12])]), ((20, 21), [torch.tensor([40, 41, 42])])


def adapted_policy(kind: str = "llama", dtype: torch.dtype = torch.bfloat16, lora: Lora = LORA, spread: float = 0.0):
    """A tiny policy with adapters, whose B are random numbers of this spread."""
    policy = tiny_policy(kind, dtype, lora=lora)
    move(policy, spread)
    return policy


@torch.no_grad()
def move(policy: Any, spread: float, seed: int = 1) -> None:
    """Other adapters, as updates make them."""
    numbers = torch.Generator().manual_seed(seed)
    for layer in adapted(policy.model.lm).values():
        layer.lora_B.add_(torch.randn(layer.lora_B.shape, generator=numbers), alpha=spread)


def logp_of(policy: Any) -> Tensor:
    with torch.no_grad():
        return policy.logp(Packed.build(list(ROW)))


@pytest.mark.usefixtures("either_computation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma"])
def test_the_initial_policy_is_the_model_to_the_bit(kind, dtype):
    policy = adapted_policy(kind, dtype)
    before = logp_of(policy)
    assert torch.equal(before, logp_of(tiny_policy(kind, dtype)))
    move(policy, 0.3)
    assert (logp_of(policy) - before).abs().max() > 0.05


def gradients(policy: Any) -> dict[str, Tensor]:
    policy.model.zero_grad()
    policy.logp(Packed.build(list(ROW))).sum().backward()
    return {name: p.grad for name, p in policy.model.lm.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", ("all-linear",)), ("qwen2", ("q_proj", "v_proj", "up_proj")), ("qwen3", ("o_proj",))],
)
def test_the_gradient_of_adapters_is_that_of_plain_autograd(kind, targets):
    """In float32 by the kernels and by autograd through the modules; in bfloat16 near both. Frozen weights get none."""
    lora = Lora(3, 6.0, targets, seed=1)
    by_modules = computed_by(adapted_policy(kind, torch.float32, lora, 0.2), "torch")
    expected = gradients(by_modules)
    assert expected.keys() == {*adapted_policy(kind, torch.float32, lora).weights}
    assert all(name.endswith((".lora_A", ".lora_B")) for name in expected)
    found = gradients(adapted_policy(kind, torch.float32, lora, 0.2))
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=1e-4)
    rounded = gradients(adapted_policy(kind, torch.bfloat16, lora, 0.2))
    both = torch.stack([torch.cat([of[name].float().flatten() for name in expected]) for of in (rounded, expected)])
    assert torch.nn.functional.cosine_similarity(both[0], both[1], dim=0) > 0.99


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("r", [1, 4, 40])
def test_trainer_and_sampler_agree_to_the_bit_with_adapters(r):
    """A decoding step through all layers, the trainer's packed row and the row alone: one sum for each output."""
    policy = adapted_policy("qwen2", lora=Lora(r, 2.0 * r, ("q_proj", "o_proj", "gate_proj", "down_proj")), spread=0.3)
    assert policy.model.exact
    copy = copy_policy(policy)
    items = [(ids, tokens.tolist()) for ids, of in ROW for tokens in of]
    (by_steps,) = LocalSampler(copy, 0, 8, 8).scores(items)
    alone = [policy.logp(Packed.build([(ids, [torch.tensor(tokens)])])).tolist() for ids, tokens in items]
    assert by_steps == alone
    assert logp_of(policy).tolist() == [p for logp in alone for p in logp]


@pytest.mark.usefixtures("either_computation")
def test_versions_share_all_but_their_adapters():
    policy = adapted_policy(spread=0.1)
    alpha, ref = copy_policy(policy), copy_policy(policy)
    frozen = [p for p in policy.model.lm.parameters() if not p.requires_grad]
    for copy in (alpha, ref):
        own = {p.data_ptr() for p in copy.model.lm.parameters()}
        assert all(p.data_ptr() in own for p in frozen)
        assert not own & {p.data_ptr() for p in policy.model.lm.parameters() if p.requires_grad}
    before = logp_of(policy)
    move(policy, 0.2, seed=2)
    assert torch.equal(logp_of(alpha), before)
    assert not torch.equal(logp_of(policy), before)
    alpha.load(policy.weights, 1)
    assert torch.equal(logp_of(alpha), logp_of(policy))
    assert torch.equal(logp_of(ref), before)
    if policy.model.exact:
        assert policy.model.layers.panels.base is alpha.model.layers.panels.base
        assert policy.model.layers.panels.current().head is ref.model.layers.panels.current().head


@pytest.mark.usefixtures("either_computation")
def test_an_update_moves_the_adapters_and_nothing_else():
    policy = adapted_policy(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in policy.model.lm.named_parameters()}
    recipe = resolve("grpo", {"beta": 0.0})
    own = make_trainer(policy, recipe, lr=1e-2)
    batch = assembled(recipe, judge_groups(generate_groups(policy)))
    for _ in range(2):  # A has no gradient until B has moved
        metrics = own.first_step(own.pack(batch, 4096))[1]
    moved = {name for name, p in policy.model.lm.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {*policy.weights}
    assert metrics["moved"] > 0.5
    assert {name.partition("/")[2] for name in own.state()} == {*policy.weights}


def test_where_adapters_start_depends_on_seed_and_name_alone():
    first, again, other = (adapted_policy(lora=Lora(4, 8.0, seed=seed)) for seed in (3, 3, 4))
    few = adapted_policy(lora=Lora(4, 8.0, ("down_proj",), seed=3))
    for name, tensor in few.weights.items():
        assert torch.equal(tensor, first.weights[name])
    for name, layer in adapted(first.model.lm).items():
        bound = layer.in_features**-0.5
        assert 0.9 * bound < float(layer.lora_A.detach().abs().max()) <= 1.01 * bound
        assert torch.equal(layer.lora_A, adapted(again.model.lm)[name].lora_A)
        assert not torch.equal(layer.lora_A, adapted(other.model.lm)[name].lora_A)
        assert not layer.lora_B.any()
    assert count_parameters(tiny_model(), LORA) == sum(t.numel() for t in first.weights.values())


def test_a_target_that_the_model_lacks_is_named():
    with pytest.raises(
        ValueError, match=r"targets: 'query' is not a linear layer of this model's decoder; it has down_proj"
    ):
        attach_lora(tiny_model(), Lora(4, 8.0, ("q_proj", "query")))


# PEFT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def by_transformers(lm: Any, rows: Any = ROW) -> Tensor:
    """log-probs of completion tokens, one sequence at a time."""
    found = []
    with torch.no_grad():
        for prompt_ids, completions in rows:
            for tokens in completions:
                row = torch.cat([torch.tensor(prompt_ids), tokens])
                logp = lm(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
                found.append(logp[len(prompt_ids) - 1 : -1].gather(1, tokens[:, None]).squeeze(1))
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_peft_computes_what_we_compute_from_a_saved_adapter(model, tmp_path, dtype, targets):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = load_policy(str(model), dtype, lora=Lora(4, 12.0, targets, seed=2))
    initial = logp_of(policy)
    move(policy, 0.3)
    policy.save(tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (4, 12, str(model))
    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype, attn_implementation="eager")
    theirs = by_transformers(PeftModel.from_pretrained(base, str(tmp_path / "adapter"), autocast_adapter_dtype=False))
    ours = logp_of(policy)
    assert (ours - initial).abs().mean() > 0.1
    assert (ours - theirs).abs().mean() < (1e-5 if dtype == torch.float32 else 8 * 2 * 2**-8)  # 8 roundings of 2
    again = load_policy(str(tmp_path / "adapter"), dtype)
    assert torch.equal(logp_of(again), ours)


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|up)_proj"},
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {"target_modules": ["self_attn.o_proj"], "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_adapters_that_peft_made_are_those_that_peft_reads(model, tmp_path, chosen):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32, attn_implementation="eager")
    made = get_peft_model(base, LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", **chosen)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    made.save_pretrained(tmp_path / "adapter")
    policy = load_policy(str(tmp_path / "adapter"), torch.float32)
    assert (logp_of(policy) - by_transformers(made)).abs().mean() < 1e-5
    assert (logp_of(policy) - logp_of(load_policy(str(model), torch.float32))).abs().mean() > 0.01


def test_a_merged_model_computes_the_same_up_to_rounding(model, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    policy = load_policy(str(model), torch.float32, lora=LORA)
    move(policy, 0.3)
    policy.save(tmp_path / "adapter")
    cli.main(["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "whole")])
    assert "the model with the adapter" in capsys.readouterr().out
    whole = AutoModelForCausalLM.from_pretrained(str(tmp_path / "whole"), attn_implementation="eager")
    assert not adapted(whole)
    torch.testing.assert_close(by_transformers(whole), logp_of(policy), rtol=1e-4, atol=1e-4)
    with pytest.raises(SystemExit):
        cli.main(["merge", str(tmp_path / "adapter"), "--out", str(tmp_path / "whole")])
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["merge", str(tmp_path / "whole"), "--out", str(tmp_path / "more")])
    assert "is not an adapter: it has no adapter_config.json" in capsys.readouterr().err


# Runs


def lora_settings(model: Path, root: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    own = {"lora_r": 4, "lora_alpha": 8.0, "dtype": "bfloat16"} | sections.pop("model", {})
    return tiny_settings(model, root, model=own, **sections)


RUN = {"checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 9, "export_every": 1}}


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory, renderer):
    """A run of adapters in two stages with a KL term and a lag, and a checkpoint of each of its six batches."""
    sections = {"schedule": {"stages": 2, "batches": 3, "sync_every": 2}, "loss": {"recipe": "grpo", "beta": 0.1}}
    settings = lora_settings(model, tmp_path_factory.mktemp("whole"), **sections)
    settings["run"] |= {"name": "whole"}
    settings |= RUN
    return train(settings)


@pytest.mark.usefixtures("shared_templates")
def test_what_a_run_leaves_are_adapters(whole, model):
    assert {path.name for path in whole.weights.iterdir()} >= {CONFIG, WEIGHTS, "tokenizer.json"}
    assert not (whole.weights / "model.safetensors").exists()
    metrics = load_metrics(whole.run)
    assert [line["staleness/max"] for line in metrics] == [0, 0, 1, 2, 0, 1]
    kl_ref = [line["kl"] for line in metrics]  # 0 where pi_k is pi_ref: at the start of either stage
    assert [value == 0 for value in kl_ref] == [True, False, False, True, False, False]
    environment = json.loads((whole.run / "environment.json").read_text())
    assert environment["agreement"]["grade"] == "exact"
    size = sum(file.stat().st_size for file in (whole.run / "checkpoints" / "step-000006").iterdir())
    assert size < 20 * sum(t.numel() for t in load_adapter_weights(whole.weights).values()) + 200_000


@pytest.mark.usefixtures("shared_templates")
@pytest.mark.parametrize("batch", [2, 4])
def test_a_resumed_run_is_the_run_that_was_never_stopped(whole, tmp_path, batch):
    run = Path(shutil.copytree(whole.run, tmp_path / "copy"))
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > batch:
            shutil.rmtree(path)
    resumed = train({"run": {"resume": str(run)}})
    assert resumed.weights is not None
    ours, theirs = load_adapter_weights(resumed.weights), load_adapter_weights(whole.weights)
    assert same(ours, theirs)
    for one, other in zip(load_rollouts(run), load_rollouts(whole.run), strict=True):
        assert one == other


@pytest.mark.usefixtures("shared_templates")
def test_a_run_of_adapters_is_replayed(whole):
    report = verify_run(whole.run, 24)
    assert not report.differences


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"lora_alpha": 4.0}}, "set model.lora_r"),
        ({"model": {"lora_r": -1}}, "greater than or equal to 0"),
        (
            {"model": {"lora_r": 4, "lora_target_modules": ["lm_head"]}},
            "^model.lora_r: targets: 'lm_head' is not a linear layer",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(model, tmp_path, sections, said):
    with pytest.raises(SettingsError, match=said):
        train(tiny_settings(model, tmp_path, **sections))


def test_an_adapter_is_no_model_to_begin_with(whole, tmp_path):
    with pytest.raises(SettingsError, match=r"is an adapter, and a run begins with a whole model: lagrpo merge"):
        train(tiny_settings(whole.weights, tmp_path))


@pytest.mark.parametrize(
    ("config", "number", "said"),
    [
        ({}, math.nan, "lora_A has 1 of .* numbers that are not finite in bfloat16"),
        ({"base_model_name_or_path": "/nowhere"}, 0.0, "/nowhere, the model of the adapter .*, cannot be loaded"),
        ({"target_modules": None}, 0.0, "target_modules is None: lagrpo reads plain LoRA alone"),
        ({"init_lora_weights": "pissa"}, 0.0, "init_lora_weights is 'pissa': lagrpo reads plain LoRA alone"),
    ],
)
def test_a_damaged_adapter_is_refused(whole, tmp_path, config, number, said):
    folder = shutil.copytree(whole.weights, tmp_path / "adapter")
    file, weights = folder / CONFIG, load_file(folder / WEIGHTS)
    file.write_text(json.dumps(json.loads(file.read_bytes()) | config))
    next(tensor for name, tensor in weights.items() if "lora_A" in name).view(-1)[0] = number
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match=said):
        merge_adapter(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


# Ranks


@pytest.mark.parametrize("R", [2, 3])
def test_where_the_gradients_are_the_same_bits_so_are_the_updates_of_adapters(ranks, R):
    made = {"dtype": "bfloat16", "max_grad_norm": None, "lora": LORA}
    _, state, weights = five_updates(None, made, True)
    found = ranks.run(five_updates, made, True, size=R)
    assert same(MergedState([rank[1] for rank in found]), state)
    assert all(same(rank[2], weights) for rank in found)
    assert all(name.endswith((".lora_A", ".lora_B")) for name in weights)
