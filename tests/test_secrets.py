"""Values behind names that look like tokens are masked in what a run records and prints."""

from __future__ import annotations

import json
import re
import sys
from datetime import date

import pytest
from running import options, tiny_settings
from test_cli import lagrpo

from lagrpo.errors import SettingsError
from lagrpo.logs import redact, redact_values
from lagrpo.settings.load import load_settings
from lagrpo.startup.checks import check_secrets


def test_command_line_of_a_run_is_recorded_without_secrets(model, tmp_path, monkeypatch):
    words = ["--openai-key", "planted", "--hub=https://me:planted@host/?api_key=planted", "--n=3"]
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", *words])
    settings = tiny_settings(model, tmp_path / "runs", run={"name": "run"})
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


@pytest.mark.parametrize(
    "text",
    [
        "--max-tokens 512, --tokenizer-mode auto, sort(key of it), a@b.org",
        "max_tokens=512 stop_token=</s> key_prompts = 3 eos_token_id: 2",
        "the password is secret; enter your password: it must be long",
        "passwords have at least 8 characters: letters, digits",
        "a bearer of bad news; use a Bearer token in the header",
        "Basic arithmetic, basic algebra2, HTTP Basic authentication",
        "authorization: the process of giving rights. The secret = patience",
        "api_key_env = OPENAI_API_KEY, answer_key: A1B2C3D4, author=me, sig=0.05",
        "sk-learn is scikit-learn, hf_hub_download loads a file",
        "no option 'api_key': it takes digits; task.options.api_key: Input should be a number",
        'print("token:", next_token); def f(api_key: str)',
        '{"token": 5, "key": 3, "api_key": null}',
    ],
)
def test_text_without_secrets_stays(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Basic planted",
        "-H 'authorization: token planted'",
        "Bearer planted_1",
        "Basic planTedplanted",
        "x-api-key: planted",
        "{'x-api-key': 'planted'}",
        '{"api_key": "planted"}',
        '"{\\"api_key\\": \\"planted\\"}"',
        'auth: ["me", "planted"]',
        'api_key = "planted"',
        "password: planted123",
        "pwd=planted",
        "clientSecret=planted",
        "PGPASSWORD=planted psql",
        "DefaultEndpointsProtocol=https;AccountKey=planted",
        "Cookie: session=planted; other=planted",
        "https://host/file?sp=r&sig=planted",
        "https://host/?X-Amz-Credential=planted&X-Amz-Signature=planted",
        "postgres://me:planted@host/data",
        "-----BEGIN RSA PRIVATE KEY-----\nplanted\n-----END RSA PRIVATE KEY-----",
        "hf_plantedplantedplanted",
        "sk-plantedplantedplanted",
        "sk-ant-planted-planted-1",
        "ghp_plantedplantedplanted",
        "eyJplanted.eyJplanted.planted",
    ],
)
def test_secret_is_masked_by_its_name_or_its_form(text):
    masked = redact(f"before {text} after")
    assert "planted" not in masked
    assert masked.startswith("before ")
    assert "***" in masked


def test_id_of_an_access_key_is_masked():
    assert redact("AKIAIOSFODNN7EXAMPLE") == "***"


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        pytest.param({"a": {"token": "x"}}, {"a": {"token": "***"}}, id="nested table"),
        pytest.param([{"pwd": "x"}, {"n": 1}], [{"pwd": "***"}, {"n": 1}], id="list of tables"),
        pytest.param({"auth": {"me": ["x"]}}, {"auth": {"me": ["***"]}}, id="below a name"),
        pytest.param({"auth.user": "x"}, {"auth.user": "***"}, id="below a flat name"),
        pytest.param({"password": 1234}, {"password": "***"}, id="number"),
        pytest.param(["--token", "x", "--n", "3"], ["--token", "***", "--n", "3"], id="words"),
        pytest.param([["x-api-key", "x"]], [["x-api-key", "***"]], id="header"),
        pytest.param(
            {"name": "api_key", "value": "x"}, {"name": "api_key", "value": "***"}, id="entry"
        ),
        pytest.param({"j": '[{"secret": "x"}]'}, {"j": '[{"secret": "***"}]'}, id="JSON"),
        pytest.param(
            {"j": json.dumps({"k": json.dumps({"auth": {"me": "x"}})})},
            {"j": json.dumps({"k": json.dumps({"auth": {"me": "***"}})})},
            id="JSON in JSON",
        ),
    ],
)
def test_value_is_masked_at_any_depth(value, masked):
    assert redact_values(value) == masked


def test_value_without_secrets_stays():
    value = {
        "max_tokens": 5,
        "token": 7,
        "tokenizer": "x",
        "key_prompts": "y",
        "stop_token": "</s>",
        "json": '{"b":1,  "a": [2]}',
        "tokens": ["a", "b"],
    }
    assert redact_values(value) == value


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        pytest.param({"task.options": {"api_key": "x"}}, "task.options.api_key", id="option"),
        pytest.param(
            {"task.options": {"a": {"b": {"pwd": "x"}}}}, "task.options.a.b.pwd", id="deep"
        ),
        pytest.param({"task.options": {"a": [{"auth": "x"}]}}, "task.options.a", id="list"),
        pytest.param({"task.options": {"a": '{"token": "x"}'}}, "task.options.a", id="JSON"),
        pytest.param(
            {"task.options": {"a": "Authorization: Basic x"}}, "task.options.a", id="by its form"
        ),
        pytest.param(
            {"task.rewards": [{"name": "r", "reward": "a:b", "options": {"o": {"key": "x"}}}]},
            "'r': options.o.key",
            id="reward",
        ),
        pytest.param(
            {"eval.sets": [{"name": "e", "task": {"name": "a:b", "options": {"token": "x"}}}]},
            "'e': task.options.token",
            id="evaluation set",
        ),
        pytest.param(
            {"model.chat_template_kwargs": {"secret": "x"}}, "kwargs.secret", id="chat template"
        ),
    ],
)
def test_secret_that_would_be_written_to_the_settings_is_rejected(sections, name):
    with pytest.raises(SettingsError, match=re.escape(name)):
        check_secrets(load_settings(sections))


def test_settings_without_secrets_are_accepted():
    options = {"max_tokens": 5, "stop_token": "</s>", "prompt": "say the password", "day": date.max}
    check_secrets(load_settings({"task.options": options}))


def test_text_is_masked_behind_names_of_secrets():
    for text, masked in {
        "--api-key 'two words' --n 3": "--api-key *** --n 3",
        'DB_PASSWORD="two words" make': "DB_PASSWORD=*** make",
        "http://me@host:80/a?access_token=x#top": "http://***@host:80/a?access_token=***#top",
        "a=token=planted --n 3 --token planted": "a=token=*** --n 3 --token ***",
    }.items():
        assert redact(text) == masked
