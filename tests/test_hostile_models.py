"""Models of strangers run no code of theirs."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import torch
from tiny import save_tiny

from lagrpo.model.loading import check_files, load_policy

ROOT = Path(__file__).parent.parent
EVIL = "from pathlib import Path\nPath({marker!r}).touch()\nclass Evil: pass\n"
FILES = ("config.json", "tokenizer_config.json", "generation_config.json")
AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")


@pytest.fixture
def model(tmp_path):
    """A sound model whose every file says that code comes with it, which leaves a mark where it is imported."""
    model = save_tiny(tmp_path / "model")
    marker = tmp_path / "it was run"
    for name in ("evil.py", "__init__.py", "modeling_llama.py", "custom_generate.py", "tokenization_evil.py"):
        (model / name).write_text(EVIL.format(marker=str(marker)))
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(EVIL.format(marker=str(marker)))
    for name in FILES:
        content = json.loads((model / name).read_text())
        auto_map = AUTO_MAP | ({"AutoTokenizer": ["evil.Evil", None]} if "tokenizer" in name else {})
        (model / name).write_text(json.dumps(content | {"auto_map": auto_map, "custom_generate": "evil"}))
    return model


def test_code_that_comes_with_a_model_is_not_run(model, tmp_path):
    load_policy(str(model), torch.float32)
    assert not (tmp_path / "it was run").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "evil"}, r"the code that it brings \(auto_map\) is never run"),
        ("tokenizer_config.json", {"tokenizer_class": "Evil"}, "cannot be read: .*contains custom code"),
    ],
)
def test_code_of_an_unknown_class_is_not_run_either(model, tmp_path, file, change, message):

    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | change))
    with pytest.raises(ValueError, match=message):
        check_files(str(model))
    assert not (tmp_path / "it was run").exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path, name):
    model = save_tiny(tmp_path / "model")
    (model / name).unlink()
    os.mkfifo(model / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe or a device"):
        check_files(str(model))


def trusting(source: str) -> list[int]:
    """The lines that may let a model's own code run: trust_remote_code as anything but False, and weights unpickled."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [node.value.lineno] * (not isinstance(node.value, ast.Constant) or node.value.value is not False)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            named = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "trust_remote_code"]
            found += [v.lineno for v in named if not isinstance(v, ast.Constant) or v.value is not False]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("load(trust_remote_code=False)", []),
        ("load(\n  trust_remote_code=True)", [2]),
        ("load(trust_remote_code=setting)", [1]),
        ("options = {'trust_remote_code': 1}", [1]),
        ("import torch\ntorch.load(file)", [2]),
    ],
)
def test_the_search_finds_what_it_should(source, lines):
    assert trusting(source) == lines


def test_no_file_of_the_package_trusts_code_of_models():
    files = sorted((ROOT / "src").rglob("*.py"))
    assert {str(file): lines for file in files if (lines := trusting(file.read_text(encoding="utf-8")))} == {}
    assert any("trust_remote_code" in file.read_text(encoding="utf-8") for file in files)
