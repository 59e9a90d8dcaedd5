"""Values behind names that look like tokens are masked in what a run records and prints."""

from __future__ import annotations

import json
import sys

import pytest
from running import options, tiny_settings
from test_cli import lagrpo
from tiny import save_tiny

from lagrpo.logs import redact


def test_command_line_of_a_run_is_recorded_without_secrets(tmp_path, monkeypatch):
    words = ["--openai-key", "planted", "--hub=https://me:planted@host/?api_key=planted", "--n=3"]
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", *words])
    settings = tiny_settings(save_tiny(tmp_path / "model"), tmp_path / "runs", run={"name": "run"})
    assert lagrpo("train", *options(settings))[0] == 0
    command = json.loads(
        (tmp_path / "runs" / "run" / "environment.json").read_text(encoding="utf-8")
    )["command"]
    assert command == "train.py --openai-key *** '--hub=https://***@host/?api_key=***' --n=3"


@pytest.mark.parametrize(
    "words", ["--vllm.server_args=--api-key=planted", "--model https://me:planted@host/x"]
)
def test_rejected_setting_is_named_without_its_secret(tmp_path, words):
    vllm = ["--rollout.engine", "vllm"] if "vllm" in words else []
    code, out, err = lagrpo("train", *words.split(), *vllm, "--run.output_dir", tmp_path / "runs")
    assert code == 2
    assert "planted" not in out + err


def test_text_is_masked_behind_names_of_secrets():
    text = "--max-tokens 512, --tokenizer-mode auto, sort(key of it), a@b.org"
    assert redact(text) == text
    for text, masked in {
        "--api-key 'two words' --n 3": "--api-key *** --n 3",
        'DB_PASSWORD="two words" make': "DB_PASSWORD=*** make",
        "http://me@host:80/a?access_token=x#top": "http://***@host:80/a?access_token=***#top",
        "a=token=planted --n 3 --token planted": "a=token=*** --n 3 --token ***",
    }.items():
        assert redact(text) == masked
