"""Model directories that lagrpo writes: what the source has stays, and any version of transformers
reads the same.

The tests marked `older` read them with transformers 4.57.3 in an environment of its own: make
check-older.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from older import read
from running import tiny_settings
from tiny import CHAT, save_tiny, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lagrpo.lifecycle.run import train
from lagrpo.model.chat import Chat
from lagrpo.model.files import find_source, load_tokenizer, save_model, save_tokenizer
from lagrpo.model.layout import Packed
from lagrpo.model.loading import load_policy
from lagrpo.types import JsonObject, Prompt

ROOT = Path(__file__).parent.parent
OLDER = Path(os.environ.get("LAGRPO_OLDER", ROOT / ".venv-older" / "bin" / "python"))
TEXT = "Add 12345 and 67: it is <b>9</b> or 12412."
DIGITS_CONFIG = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}


def save_digits_tokenizer(directory: Path, **config: Any) -> None:
    """Merges of digits that the pre-tokenizer Digits keeps from being used. GPT2Tokenizer rebuilds
    it without."""
    names = ["<pad>", "<eos>", "<think>", "</think>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("12", "3"), ("4", "5")]
    words = [*names, *alphabet, "12", "123", "45"]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    splits: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(DIGITS_CONFIG | config), encoding="utf-8"
    )


def as_transformers_4(directory: Path) -> None:
    """Edit a config that transformers 5 wrote into what version 4 would have written."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.45.0"
    path.write_text(json.dumps(config), encoding="utf-8")


ROPE = {"rope_theta": 1_000_000.0, "rope_type": "default"}
SCALED = {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 4.0}


def source(directory: Path, kind: str = "qwen2", rope: Any = None, version: int = 4) -> Path:
    """A model directory as transformers 4 or 5 writes it, with a rope_theta that is not the
    default."""
    tiny_model(kind, vocab_size=263, rope_parameters=rope or ROPE).save_pretrained(directory)
    if version == 4:
        as_transformers_4(directory)
        save_digits_tokenizer(directory, chat_template=CHAT)
    else:
        tokenizer = tiny_tokenizer()
        tokenizer.save_pretrained(directory)
    return directory


# Tokenizers


def test_tokenizer_has_the_ids_of_its_file(tmp_path):
    from transformers import AutoTokenizer

    save_digits_tokenizer(tmp_path)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "12345 = 12"
    assert len(file.encode(text).ids) == 10
    assert len(AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]) == 6  # rebuilt
    assert load_tokenizer(str(tmp_path))(text)["input_ids"] == file.encode(text).ids


def test_prompt_with_other_ids_than_the_file_gives_is_rejected(tmp_path):
    """Here tokenizer_config.json adds a token that tokenizer.json does not have."""
    word = {"content": "sum", "special": False, "normalized": False}
    added = {"300": word | {"lstrip": False, "rstrip": False, "single_word": False}}
    save_digits_tokenizer(tmp_path, added_tokens_decoder=added, chat_template=CHAT)
    chat = Chat(load_tokenizer(str(tmp_path)), 400, frozenset({1}))
    chat.tokenize(Prompt(0, ({"role": "user", "content": "1 + 2"},), "3"))
    with pytest.raises(ValueError, match=r"tokens, not to the \d+ of tokenizer\.json"):
        chat.tokenize(Prompt(0, ({"role": "user", "content": "the sum"},), "3"))


def test_lengths_in_a_tokenizer_file_do_not_cut_prompts(tmp_path):
    save_digits_tokenizer(tmp_path, chat_template=CHAT)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    file.enable_truncation(8)
    file.enable_padding(length=64)
    file.save(str(tmp_path / "tokenizer.json"))
    chat = Chat(load_tokenizer(str(tmp_path)), 400, frozenset({1}))
    prompt = chat.tokenize(Prompt(0, ({"role": "user", "content": "1" * 30},), "3"))
    assert len(prompt.token_ids) == len("user: " + "1" * 30 + "\nassistant:")


def test_saved_tokenizer_is_the_source_byte_by_byte(tmp_path):
    (tmp_path / "source").mkdir()
    save_digits_tokenizer(tmp_path / "source", chat_template=CHAT)
    (tmp_path / "source" / "special_tokens_map.json").write_text(
        '{"eos_token": "<eos>"}', encoding="utf-8"
    )
    save_tokenizer(load_tokenizer(str(tmp_path / "source")), tmp_path / "saved")
    files = {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "saved").iterdir()} == files


@pytest.mark.parametrize("template_file", ["tokenizer_config.json", "chat_template.jinja"])
def test_chat_template_of_the_settings_replaces_the_one_of_the_source(tmp_path, template_file):
    (tmp_path / "source").mkdir()
    in_config = template_file == "tokenizer_config.json"
    save_digits_tokenizer(tmp_path / "source", **({"chat_template": CHAT} if in_config else {}))
    if not in_config:
        (tmp_path / "source" / template_file).write_text(CHAT, encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path / "source"))
    assert tokenizer.chat_template == CHAT
    tokenizer.chat_template = "{{ messages[0].content }}"
    save_tokenizer(tokenizer, tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved")).chat_template == "{{ messages[0].content }}"
    assert CHAT not in (tmp_path / "saved" / "tokenizer_config.json").read_text(encoding="utf-8")


# Models


def test_saved_config_is_the_source_with_the_dtype_of_the_weights(tmp_path):
    before = json.loads((source(tmp_path / "source") / "config.json").read_text(encoding="utf-8"))
    policy = load_policy(str(tmp_path / "source"), torch.bfloat16)
    policy.save(tmp_path / "saved")
    after = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert after == before | {"torch_dtype": "bfloat16"}
    assert (before["torch_dtype"], before["rope_theta"]) == ("float32", 1_000_000.0)
    assert "rope_parameters" not in before
    generation = "generation_config.json"
    assert (tmp_path / "saved" / generation).read_text(encoding="utf-8") == (
        tmp_path / "source" / generation
    ).read_text(encoding="utf-8")


def test_saved_generation_config_also_ends_where_completions_end(tmp_path):
    """As for a base model with a chat template: the template ends turns by another token."""
    source_config = source(tmp_path / "source") / "generation_config.json"
    policy = load_policy(str(tmp_path / "source"), torch.float32)
    chat = replace(policy.chat, eos_ids=policy.chat.eos_ids | {7})
    replace(policy, chat=chat).save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text(encoding="utf-8"))
    before = json.loads(source_config.read_text(encoding="utf-8"))
    assert saved == before | {"eos_token_id": sorted(chat.eos_ids)}


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        pytest.param(ROPE, {"rope_theta": 1_000_000.0}, id="default"),
        pytest.param(
            SCALED,
            {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            id="scaled",
        ),
    ],
)
def test_config_of_transformers_5_gets_the_older_names_of_rope(tmp_path, rope, older):
    model = tiny_model("qwen2", rope_parameters=rope)  # made in memory, without a source
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["rope_parameters"] == rope
    assert {name: config[name] for name in older} == older
    load_policy(str(save_tiny(tmp_path, "qwen2", rope_parameters=rope)), torch.float32)


def test_source_that_is_no_directory_has_no_files(tmp_path):
    for name in ("", str(tmp_path / "removed"), "nobody/nothing"):
        assert find_source(name, "config.json") is None


# Read by others

SOURCES = [
    pytest.param({"version": 4}, id="transformers 4"),
    pytest.param({"version": 5}, id="transformers 5"),
    pytest.param({"version": 4, "rope": SCALED, "kind": "llama"}, id="4, scaled"),
    pytest.param({"version": 5, "rope": SCALED, "kind": "llama"}, id="5, scaled"),
    pytest.param({"version": 5, "kind": "mistral"}, id="5, mistral"),
]


def trained(tmp_path: Path, **changes: Any) -> tuple[Path, JsonObject]:
    """The final weights of a run, and what lagrpo computes with them for TEXT."""
    model_directory = source(tmp_path / "source", **changes)
    result = train(tiny_settings(model_directory, tmp_path / "runs", schedule={"batches": 1}))
    assert result.weights is not None
    policy = load_policy(str(result.weights), torch.float32)
    messages = ({"role": "user", "content": TEXT},)
    ids = list(policy.chat.tokenize(Prompt(0, messages, "")).token_ids)
    row = Packed.build([(ids[:1], [torch.tensor(ids[1:])])], policy.device)
    with torch.no_grad():
        return result.weights, {"ids": ids, "logprobs": policy.logp(row).tolist()}


@pytest.mark.parametrize("changes", SOURCES)
def test_transformers_5_computes_what_lagrpo_does_from_final_weights(tmp_path, changes):
    directory, ours = trained(tmp_path, **changes)
    theirs = read(str(directory), TEXT, ours["ids"])
    assert theirs["logprobs"] == pytest.approx(ours["logprobs"], abs=1e-3)


@pytest.mark.older
@pytest.mark.parametrize("changes", SOURCES)
def test_transformers_4_computes_what_lagrpo_does_from_final_weights(tmp_path, changes):
    directory, ours = trained(tmp_path, **changes)
    script = Path(__file__).parent / "older.py"
    command = [str(OLDER), str(script), str(directory), TEXT, json.dumps(ours["ids"])]
    environment = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert theirs["version"].startswith("4.")
    assert (theirs["ids"], theirs["dtype"]) == (ours["ids"], "torch.float32")
    assert theirs["logprobs"] == pytest.approx(ours["logprobs"], abs=1e-3)
