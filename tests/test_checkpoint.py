"""Model directories that are not what they say: refused by file and field, before weights are read or a run is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import tiny_settings
from safetensors.torch import load_file, save_file
from tiny import save_tiny

from lagrpo.cli import main
from lagrpo.errors import SettingsError
from lagrpo.model.loading import check_attention, load_policy
from lagrpo.training.run import train

pytestmark = pytest.mark.usefixtures("shared_templates")

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(sound, tmp_path):
    """A model of its own for each test, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def edited(file: str, **changes: Any) -> Damage:
    """A JSON file with other values; `...` removes a field."""

    def damage(model: Path) -> None:
        path = model / file
        merged = (json.loads(path.read_text()) if path.exists() else {}) | changes
        path.write_text(json.dumps({name: value for name, value in merged.items() if value is not ...}))

    return damage


def config(**changes: Any) -> Damage:
    return edited("config.json", **changes)


def generation(**changes: Any) -> Damage:
    return edited("generation_config.json", **changes)


def written(file: str, content: str | bytes) -> Damage:
    return lambda model: (
        (model / file).write_bytes(content if isinstance(content, bytes) else content.encode()) and None
    )


def reweighted(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """model.safetensors after `change` has had its way with the tensors."""

    def damage(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors", {"format": "pt"})

    return damage


def truncated(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def sharded(model: Path) -> None:
    """The weights in two files with an index."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in weights}
    for shard in set(where.values()):
        save_file({n: w for n, w in weights.items() if where[n] == shard}, model / shard, {"format": "pt"})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def sharded_and(change: Callable[[Path, dict[str, Any]], object]) -> Damage:
    def damage(model: Path) -> None:
        sharded(model)
        path = model / INDEX
        index = json.loads(path.read_text())
        change(model, index)
        path.write_text(json.dumps(index))

    return damage


def pickled(model: Path) -> None:
    """Weights that run code when they are unpickled."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (model / "pwned",)

    import pickle

    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))


INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
SECOND = "model-00002-of-00002.safetensors"
ROPE = {"rope_type": "linear", "rope_theta": 1e4}
CASES: list[tuple[str, Damage, str]] = [
    # config.json: its fields
    ("no JSON", written("config.json", "{"), r"config\.json is not JSON"),
    ("no text", written("config.json", b"\xff\xfe"), r"config\.json is not JSON"),
    ("nested", written("config.json", "[" * 100_000), r"config\.json is not JSON"),
    ("a list", written("config.json", "[]"), r"config\.json is a list, not an object"),
    ("layers -1", config(num_hidden_layers=-1), r"config\.json: num_hidden_layers = -1 is not from 1 to 1000"),
    ("layers 0", config(num_hidden_layers=0), r"config\.json: num_hidden_layers = 0 is not from 1 to"),
    ("layers 1e9", config(num_hidden_layers=10**9), r"config\.json: num_hidden_layers = 1000000000 is not from 1 to"),
    ("layers text", config(num_hidden_layers="2"), r"config\.json: num_hidden_layers = '2' is no whole number"),
    ("layers float", config(num_hidden_layers=2.0), r"config\.json: num_hidden_layers = 2\.0 is no whole number"),
    ("layers bool", config(num_hidden_layers=True), r"config\.json: num_hidden_layers = True is no whole number"),
    ("hidden 0", config(hidden_size=0), r"config\.json: hidden_size = 0 is not from 1 to"),
    ("hidden 64", config(hidden_size=64), r"model\.safetensors: 21 weights .*hidden_size = 64"),
    ("hidden 1e9", config(hidden_size=10**9), r"config\.json: hidden_size = 1000000000 is not from 1 to"),
    ("inner 1e12", config(intermediate_size=10**12), r"config\.json: intermediate_size = 1000000000000 is not from"),
    ("vocabulary", config(vocab_size=999), r"safetensors: 2 weights .*\(vocab_size = 999\): lm_head"),
    ("vocabulary 0", config(vocab_size=0), r"config\.json: vocab_size = 0 is not from 1 to"),
    ("heads 0", config(num_attention_heads=0), r"config\.json: num_attention_heads = 0 is not from 1 to"),
    ("heads 3", config(num_attention_heads=3), r"config\.json: num_attention_heads = 3 .* num_key_value_heads = 2"),
    ("3 of 32", config(num_attention_heads=3, num_key_value_heads=3, head_dim=None), r"hidden size \(32\) .* \(3\)"),
    ("kv heads 3", config(num_key_value_heads=3), r"config\.json: num_attention_heads = 4 .* num_key_value_heads = 3"),
    ("kv heads 0", config(num_key_value_heads=0), r"config\.json: num_key_value_heads = 0 is not from 1 to"),
    ("positions 0", config(max_position_embeddings=0), r"config\.json: max_position_embeddings = 0 is not from 1 to"),
    ("labels", config(num_labels=10**10), r"config\.json: num_labels = 10000000000 is not from 1 to"),
    ("rope", config(rope_parameters={"rope_type": "evil"}), r"config\.json: rope_parameters\.rope_type = 'evil'"),
    ("old rope", config(rope_scaling={"type": "evil"}), r"config\.json: rope_scaling\.type = 'evil'"),
    ("rope list", config(rope_parameters=[1]), r"config\.json: rope_parameters = \[1\] is no object"),
    ("rope factor", config(rope_parameters=ROPE | {"factor": 0}), r"config\.json: rope_parameters\.factor = 0 is not"),
    ("rope text", config(rope_parameters=ROPE | {"factor": "x"}), r"config\.json: rope_parameters\.factor = 'x' is no"),
    ("rope lacks", config(rope_parameters=ROPE), r"config\.json: .*factor"),
    ("theta", config(rope_parameters={"rope_type": "default", "rope_theta": 0}), r"rope_parameters\.rope_theta = 0"),
    ("activation", config(hidden_act="evil"), r"config\.json: hidden_act = 'evil' is not an activation"),
    ("dtype", config(torch_dtype="evil"), r"config\.json: torch_dtype = 'evil' is not"),
    ("new dtype", config(dtype="int8"), r"config\.json: dtype = 'int8' is not"),
    ("eps 0", config(rms_norm_eps=0), r"config\.json: rms_norm_eps = 0 is not above 0 and below 1"),
    ("eps text", config(rms_norm_eps="1e-5"), r"config\.json: rms_norm_eps = '1e-5' is no number"),
    ("eps NaN", config(rms_norm_eps=float("nan")), r"config\.json: rms_norm_eps = nan is not above 0"),
    ("eos text", config(eos_token_id="x"), r"config\.json: eos_token_id = 'x' is no token id"),
    ("eos beyond", config(eos_token_id=103), r"config\.json: eos_token_id = 103 .*vocab_size = 103"),
    ("pad beyond", config(pad_token_id=5000), r"config\.json: pad_token_id = 5000 .*vocab_size = 103"),
    ("no type", config(model_type=...), r"config\.json: model_type"),
    ("unknown type", config(model_type="evil"), r"config\.json: model_type = 'evil'"),
    ("type is a list", config(model_type=["llama"]), r"config\.json: model_type = \['llama'\]"),
    ("own code", config(model_type="evil", auto_map={"AutoConfig": "evil.Evil"}), r"config\.json: .*auto_map"),
    ("an encoder", config(model_type="t5"), r"config\.json: model_type = 't5' is no causal language model"),
    ("own attention", config(model_type="bloom", layer_norm_epsilon=1e-5), r"'bloom' have an attention of their own"),
    ("gptq", config(quantization_config={"quant_method": "gptq"}), r"config\.json: quantization_config .*gptq"),
    ("bitsandbytes", config(quantization_config={"load_in_4bit": True}), r"config\.json: quantization_config"),
    # generation_config.json
    ("generation", written("generation_config.json", "{"), r"generation_config\.json is not JSON"),
    ("generation list", written("generation_config.json", "[1]"), r"generation_config\.json is a list, not an object"),
    ("generation eos", generation(eos_token_id="</s>"), r"generation_config\.json: eos_token_id = '</s>' is no token"),
    ("generation eos list", generation(eos_token_id=[1, "x"]), r"generation_config\.json: eos_token_id = 'x' is no"),
    ("generation eos beyond", generation(eos_token_id=[1, 103]), r"generation_config\.json: eos_token_id = 103 "),
    ("generation eos -1", generation(eos_token_id=-1), r"generation_config\.json: eos_token_id = -1 "),
    ("generation cache", generation(cache_implementation="evil"), r"generation_config\.json: .*cache_implementation"),
    # tokenizer.json, tokenizer_config.json
    ("tokenizer", written("tokenizer.json", "{"), r"tokenizer"),
    ("empty tokenizer", written("tokenizer.json", "{}"), r"tokenizer"),
    ("tokenizer's eos", edited("tokenizer_config.json", eos_token="<new>"), r"tokenizer.*'<new>' has the id 103"),
    ("tokenizer's length", edited("tokenizer_config.json", model_max_length="x"), r"tokenizer.* cannot be read"),
    # the weights
    ("a layer more", config(num_hidden_layers=3), r"safetensors lacks 9 weights .*num_hidden_layers = 3.*layers\.2"),
    ("a layer less", config(num_hidden_layers=1), r"safetensors has 9 weights .*num_hidden_layers = 1.*layers\.1"),
    ("missing", reweighted(lambda w: w.pop(NORM)), r"model\.safetensors lacks 1 weight .*: model\.norm\.weight"),
    ("no head", reweighted(lambda w: w.pop("lm_head.weight")), r"lacks 1 weight .*lm_head\.weight"),
    ("unexpected", reweighted(lambda w: w.update(x=torch.ones(2))), r"model\.safetensors has 1 weight .*: x"),
    ("mis-shaped", reweighted(lambda w: w.update({NORM: torch.ones(2)})), r"model\.norm\.weight is \[2\].*\[32\]"),
    ("a narrower head", config(head_dim=2), r"not of the shape that config\.json says: .*k_proj\.weight is \[64, 32\]"),
    ("not a number", reweighted(lambda w: w[NORM].fill_(float("nan"))), r"model\.norm\.weight .*not finite"),
    ("infinite", reweighted(lambda w: w["lm_head.weight"][0, 0].fill_(float("inf"))), r"lm_head\.weight .*not finite"),
    ("integers", reweighted(lambda w: w.update({NORM: torch.ones(32).int()})), r"model\.norm\.weight .*I32"),
    ("truncated", truncated, r"model\.safetensors: "),
    ("no safetensors", written("model.safetensors", "GIF89a"), r"model\.safetensors: "),
    ("no weights", lambda model: (model / "model.safetensors").unlink(), r"neither model\.safetensors nor "),
    ("pickled", pickled, r"pytorch_model\.bin .*unpickle"),
    ("no index", lambda m: (sharded(m), written(INDEX, "{")(m)), r"index\.json is not JSON"),
    ("no metadata", sharded_and(lambda m, i: i.pop("metadata")), r"index\.json: metadata is no object"),
    ("no map", sharded_and(lambda m, i: i.update(weight_map=[1])), r"index\.json: weight_map"),
    ("map elsewhere", sharded_and(lambda m, i: i["weight_map"].update({NORM: "../x"})), r"weight_map.*\.\./x"),
    ("missing shard", sharded_and(lambda m, i: (m / SECOND).unlink()), rf"index\.json: .*{SECOND}.* is not there"),
    ("shard lacks", sharded_and(lambda m, i: i["weight_map"].update({NORM: SECOND})), rf"{SECOND} lacks {NORM}"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_model_that_is_not_what_it_says_is_refused_in_one_line(model, tmp_path, capfd, damage, message):
    damage(model)
    with pytest.raises(SettingsError, match=message) as refused:
        train(tiny_settings(model, tmp_path / "runs"))
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600
    assert not (tmp_path / "runs").exists()
    assert not (model / "pwned").exists()
    assert capfd.readouterr() == ("", "")


def harmless(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


@pytest.mark.parametrize(
    "change",
    [sharded, reweighted(harmless), config(return_dict=False), config(output_attentions=True), config(pad_token_id=-1),
     config(num_key_value_heads=2, head_dim=32),
     lambda model: (model / "generation_config.json").unlink(), generation(eos_token_id=None)],
    ids=["shards", "inv_freq", "tuples", "attentions", "no pad", "stated", "no generation config", "no eos"],
)  # fmt: skip
def test_what_is_odd_but_sound_loads(model, sound, change):
    change(model)
    ours, plain = (load_policy(str(path), torch.float32).weights for path in (model, sound))
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in ours)


def test_a_gpt2_is_no_stranger(tmp_path):
    """It takes its attention from the registry, and shared-prefix attention reproduces it."""
    save_tiny(tmp_path / "gpt2", "gpt2")
    assert check_attention(load_policy(str(tmp_path / "gpt2"), torch.float32)) < 1e-4


def test_tied_weights_are_not_missing(tmp_path):
    tied = save_tiny(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    load_policy(str(tied), torch.float32)


def test_no_server_is_started_for_a_model_that_is_refused(model, tmp_path, monkeypatch):
    config(num_hidden_layers=3)(model)
    monkeypatch.setattr("lagrpo.training.build.open_servers", lambda *given: pytest.fail("a server was started"))
    with pytest.raises(SettingsError, match="lacks 9 weights"):
        train(tiny_settings(model, tmp_path / "runs", sampling={"sampler": "vllm"}))


def test_a_dry_run_refuses_a_config_that_cannot_be(model, capsys):
    config(num_hidden_layers=10**9)(model)
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--model", str(model), "--dry-run"])
    assert "config.json: num_hidden_layers = 1000000000 is not from 1 to 1000" in capsys.readouterr().err
