"""Model directories that are not what they say are rejected in one line before a run is made; sound
ones load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from running import tiny_settings
from safetensors.torch import load_file, save_file
from tiny import save_tiny

from lagrpo.errors import SettingsError
from lagrpo.lifecycle.run import train
from lagrpo.model.embedded import ModelNotFoundError, check_path
from lagrpo.model.layout import Packed
from lagrpo.model.loading import load_policy
from lagrpo.verify.record import RecordedRun
from lagrpo.verify.tokens import load_model as load_plain_model

Damage = Callable[[Path], object]
NORM = "model.norm.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", num_hidden_layers=2)


@pytest.fixture
def model(sound, tmp_path):
    """A model for each test, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def edited(file: str, **changes: Any) -> Damage:
    return lambda model: (model / file).write_text(
        json.dumps(json.loads((model / file).read_text(encoding="utf-8")) | changes),
        encoding="utf-8",
    )


def written(file: str, content: bytes) -> Damage:
    return lambda model: (model / file).write_bytes(content)


def removed(file: str) -> Damage:
    return lambda model: (model / file).unlink()


def split_without_second_part(model: Path) -> None:
    """Weights in two files by an index, of which only the first is there."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file({NORM: weights[NORM]}, model / "model-1.safetensors", {"format": "pt"})
    files = {name: f"model-{1 if name == NORM else 2}.safetensors" for name in weights}
    index = {"metadata": {}, "weight_map": files}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def reweighted(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """model.safetensors after `change` has edited the tensors."""

    def damage(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors", {"format": "pt"})

    return damage


def pickled(model: Path) -> None:
    torch.save({}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


def with_pickled_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}", encoding="utf-8")
    torch.save({}, model / "adapter_model.bin")


EVIL = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")

CASES: list[tuple[str, Damage, str]] = [
    ("config not JSON", written("config.json", b"{"), r"config\.json"),
    ("unknown type", edited("config.json", model_type="evil"), r"config\.json: .*evil"),
    (
        "quantized",
        edited("config.json", quantization_config={"quant_method": "gptq"}),
        r"have quantized weights",
    ),
    ("tokenizer not JSON", written("tokenizer.json", b"{"), r"tokenizer\.json is damaged"),
    ("tokenizer missing", removed("tokenizer.json"), r"has no tokenizer\.json: copy"),
    (
        "generation config not JSON",
        written("generation_config.json", b"{"),
        r"generation_config\.json is damaged",
    ),
    ("weights cut", written("model.safetensors", b"x" * 99), r"model\.safetensors is damaged"),
    (
        "shard missing",
        split_without_second_part,
        r"model-2\.safetensors, which .*index.* is missing",
    ),
    ("Git LFS: weights", written("model.safetensors", POINTER), r"model\.safetensors is a Git LFS"),
    ("Git LFS: tokenizer", written("tokenizer.json", POINTER), r"tokenizer\.json is a Git LFS"),
    ("Git LFS: config", written("config.json", POINTER), r"/config\.json is a Git LFS pointer"),
    ("Git LFS: template", written("chat_template.jinja", POINTER), r"template\.jinja is a Git LFS"),
    (
        "padding",
        edited("config.json", pad_token_id=103),
        r"pad_token_id = 103 .* vocabulary of 103",
    ),
    (
        "missing",
        reweighted(lambda w: w.pop(NORM)),
        r"lack weights of the model: model\.norm\.weight",
    ),
    (
        "renamed",
        reweighted(lambda w: w.update({"model.nrm.weight": w.pop(NORM)})),
        r"lack weights of the model: model\.norm\.weight .* does not have: model\.nrm\.weight",
    ),
    *(
        (f"absurd {name}", edited("config.json", **{name: 10**9}), rf"config\.json: {name} .*large")
        for name in ("num_hidden_layers", "hidden_size", "head_dim", "vocab_size")
    ),
    (
        "unexpected",
        edited("config.json", num_hidden_layers=1),
        r"have weights that the model does not .*layers\.1.*\(9 in all\)",
    ),
    (
        "other shape",
        reweighted(lambda w: w.update({NORM: torch.ones(2)})),
        r"weights have another shape .*norm\.weight \(1 in all\)",
    ),
    ("head differs", edited("config.json", tie_word_embeddings=True), r"different output head"),
    ("NaN", reweighted(lambda w: w[NORM].fill_(float("nan"))), r"model\.norm\.weight .*not finite"),
    ("pickled", pickled, r"pytorch_model\.bin has pickled weights"),
    ("pickled adapter", with_pickled_adapter, "a model and an adapter"),
    ("code of its own", edited("config.json", model_type="evil", auto_map=EVIL), "auto_map"),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_damaged_model_is_rejected_in_one_line_before_the_run_is_made(
    model, tmp_path, damage, message
):
    damage(model)
    with pytest.raises(SettingsError, match=message) as rejected:
        train(tiny_settings(model, tmp_path / "runs"))
    assert len(str(rejected.value).splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_code_of_the_model_is_not_run(model, tmp_path):
    (model / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n", encoding="utf-8"
    )
    for file in ("config.json", "tokenizer_config.json"):
        edited(file, auto_map=EVIL)(model)
    load_policy(str(model), torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(pickled, r"pytorch_model\.bin has pickled weights", id="pickled"),
        pytest.param(
            edited("config.json", model_type="evil", auto_map=EVIL), "auto_map", id="code"
        ),
    ],
)
def test_verify_rejects_a_model_that_would_run_code(model, damage, message):
    damage(model)
    run = cast("RecordedRun", SimpleNamespace(environment={"dtype": "float32"}))
    with pytest.raises(SettingsError, match=message) as rejected:
        load_plain_model(run, str(model))
    assert len(str(rejected.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param({}, r"adapter_model\.bin has pickled weights", id="pickled"),
        pytest.param({"megatron_config": {"a": 1}}, "megatron_config", id="module of PEFT"),
    ],
)
def test_verify_rejects_an_adapter_that_would_run_code(tmp_path, entries, message):
    pytest.importorskip("peft")
    config = {"r": 2, "lora_alpha": 4, "base_model_name_or_path": "x", "target_modules": ["q"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | entries), encoding="utf-8")
    if entries:
        save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    else:
        torch.save({}, tmp_path / "adapter_model.bin")
    run = cast("RecordedRun", SimpleNamespace(environment={"dtype": "float32"}))
    with pytest.raises(SettingsError, match=message):
        load_plain_model(run, str(tmp_path))


def test_variable_that_the_chat_template_does_not_read_is_rejected(sound):
    with pytest.raises(ValueError, match=r"model\.chat_template_kwargs: .* read 'enable_thinkng'"):
        load_policy(str(sound), torch.float32, template_kwargs={"enable_thinkng": False})


@pytest.mark.parametrize("pad", [None, -1, 102], ids=["none", "last, from the end", "last"])
def test_padding_token_of_the_vocabulary_is_accepted(model, pad):
    edited("config.json", pad_token_id=pad)(model)
    assert load_policy(str(model), torch.float32).chat.vocabulary == 103


def test_pointers_in_place_of_files_that_are_not_read_are_accepted(model):
    for file in ("pytorch_model.bin", "tokenizer.model", "README.md"):
        (model / file).write_bytes(POINTER)
    load_policy(str(model), torch.float32)


def test_odd_but_sound_model_loads(model, sound):
    """With a buffer that transformers does not store, and without a generation config."""
    reweighted(
        lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    )(model)
    (model / "generation_config.json").unlink()
    ours, plain = (load_policy(str(path), torch.float32).weights for path in (model, sound))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # They do not pass the layout on.
        ("stablelm", {}),
        ("nemotron", {"num_key_value_heads": 2}),
        # Its layers have heads of several sizes.
        ("gemma4_text", {"head_dim": 16, "vocab_size_per_layer_input": 103}),
        # Its `decoder` is the output head.
        ("modernbert-decoder", {"bos_token_id": 2}),
    ],
)
def test_model_that_cannot_be_called_is_rejected_by_its_type(tmp_path, kind, changes):
    model = save_tiny(tmp_path / "model", kind, **changes)
    with pytest.raises(ValueError, match=rf"models of type '{kind}' ") as rejected:
        load_policy(str(model), torch.float32)
    assert len(str(rejected.value).splitlines()) == 1


DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "starcoder2": {
        "residual_dropout": 0.5,
        "embedding_dropout": 0.5,
        "attention_dropout": 0.5,
        "num_key_value_heads": 2,
    },
    "opt": {"dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
}


@pytest.mark.parametrize("kind", DROPOUT)
def test_loaded_model_has_no_dropout_when_it_trains(kind, tmp_path):
    """Activation checkpointing of transformers needs the training mode."""
    model = save_tiny(tmp_path / "model", kind, **DROPOUT[kind])
    policy = load_policy(str(model), torch.float32)
    packed = Packed.build([([5, 6, 7], [torch.tensor([8, 9, 10])])])
    expected = policy.logp(packed)
    policy.model.lm.train()
    assert torch.equal(policy.logp(packed), expected)


@pytest.mark.parametrize("folder", ["instruct", "models/base"])
def test_root_of_a_clone_with_models_in_folders_names_them(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match=re.escape(str(tmp_path / folder))):
        check_path(str(tmp_path))
