"""No secret is written or printed: planted in the environment, in URLs, in options and on the command line, then looked
for in every file of a run and in everything it prints."""

from __future__ import annotations

import doctest
import json
import os
import sys
from pathlib import Path

import hostile_judges
import pytest
import torch
from running import options, tiny_settings
from test_cli import lagrpo
from tiny import save_tiny

from lagrpo import redaction
from lagrpo.errors import SettingsError
from lagrpo.redaction import redact, redact_start
from lagrpo.runs import load_rollouts
from lagrpo.settings.options import split_options
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import load_settings
from lagrpo.types import Completion, Group, Prompt
from lagrpo.verify import Verifier

NAMES = ("HF_TOKEN", "LAGRPO_VLLM_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY")
PLANTED = {name: f"planted-{name.lower().replace('_', '-')}" for name in NAMES}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)


def everything(root: Path) -> bytes:
    """Names and contents of all files."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    assert files
    return b"".join(str(path).encode() + path.read_bytes() for path in files)


@pytest.mark.usefixtures("shared_templates")
def test_a_run_leaves_no_secret_in_its_files_and_prints_none(tmp_path, monkeypatch):
    words = ["--openai-key", "planted-word", "--hub=https://me:planted-user@host/?api_key=planted-parameter", "--n=3"]
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", *words])
    own = {"task": {"name": "sample_task:load_talkative"}, "verifier": {"workers": 1, "max_without_reward": 1.0}}
    own["run"] = {"name": "run", "display": "plain"}
    settings = tiny_settings(save_tiny(tmp_path / "model"), tmp_path / "runs", **own)
    code, out, err = lagrpo("train", *options(settings))
    run = tmp_path / "runs" / "run"
    assert code == 0
    reasons = {row["reason"] for row in load_rollouts(run) if row["outcome"] == "unscored"}
    assert reasons == {"the judge raised PermissionError: 401 for https://***@host/?token=***&n=1, key ***"}
    command = json.loads((run / "environment.json").read_text())["command"]
    assert command == "train.py --openai-key *** '--hub=https://***@host/?api_key=***' --n=3"
    texts = str([*load_rollouts(run)])  # the columns of Parquet files are compressed
    assert b"planted" not in everything(run)
    assert "planted" not in texts + out + err


@pytest.mark.usefixtures("shared_templates")
def test_a_run_that_ends_with_what_a_judge_said_prints_none(tmp_path):
    own = {"task": {"name": "sample_task:load_talkative"}, "verifier": {"workers": 1, "max_without_reward": 0.0}}
    code, out, err = lagrpo("train", *options(tiny_settings(save_tiny(tmp_path / "model"), tmp_path / "runs", **own)))
    assert code == 1
    assert "key ***" in err
    assert "planted" not in out + err
    assert b"planted" not in everything(tmp_path / "runs")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--vllm.urls http://me:planted@host:8000", "http://***@host:8000' has a user name or a password"),
        ("--vllm.urls http://host:8000/?token=planted", "'http://host:8000/?token=***' has a path"),
        ("--vllm.options=--api-key=planted", "options: '--api-key' holds a secret"),
        ("--vllm.options=--hf_token=planted", "options: '--hf_token' holds a secret"),
        ("--vllm.gpus http://me:planted@host", "vllm.gpus.0 = 'http://***@host'"),
        ("--task gsm8k --task.data https://me:planted@host/data?token=planted", "'https://***@host/data?token=***'"),
        ("--model https://me:planted@host/model", "'https://***@host/model'"),
        ("--offline.data https://me:planted@host/data.jsonl", "https:/***@host/data.jsonl: no such file"),
        ("--vllm.api_key planted", "unknown setting 'vllm.api_key'"),
    ],
)
def test_settings_that_hold_a_secret_are_refused_without_printing_it(tmp_path, words, message):
    vllm = ["--sampling.sampler", "vllm"] if "vllm" in words else []
    code, out, err = lagrpo("train", *words.split(), *vllm, "--run.directory", tmp_path / "runs")
    assert (code, message in err) == (2, True), err
    assert "planted" not in out + err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_none():
    code, out, err = lagrpo("train", "--task", "gsm8k", "--task.data", "https://me:planted@host/data", "--dry-run")
    assert (code, err) == (0, "")
    assert 'data = "https://***@host/data"' in out


def test_a_program_that_passes_them_gets_the_same_error():
    with pytest.raises(SettingsError) as refused:
        load_settings({"sampling": {"sampler": "vllm"}, "vllm": {"urls": ["http://me:planted@host"]}})
    assert "planted" not in str(refused.value)


def test_options_that_hold_no_secret_pass():
    words = ("--max-num-batched-tokens 8192 --tokenizer-mode auto", "--ssl-keyfile key.pem")
    assert len(split_options(words)) == 6
    assert Settings.model_validate({"sampling": {"sampler": "vllm"}, "vllm": {"options": words}}).vllm.options == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nothing to hide: --max-tokens 512, sort(key of it), a@b.org", None),
        ("Authorization failed for planted-hf-token.", "Authorization failed for ***."),
        ("--api-key 'two words' --n 3", "--api-key *** --n 3"),
        ('DB_PASSWORD="two words" make', "DB_PASSWORD=*** make"),
        ("get http://me@host:80/a?access_token=x#top", "get http://***@host:80/a?access_token=***#top"),
        ("--wandb-api-key=x,y", "--wandb-api-key=***,y"),
    ],
)
def test_what_is_hidden(text, shown):
    assert redact(text) == (text if shown is None else shown)


def test_short_values_of_the_environment_stand_in_any_text():
    assert redact("true is true", os.environ | {"KEY": "true"}) == "true is true"


def test_the_examples():
    assert doctest.testmod(redaction) == doctest.TestResults(failed=0, attempted=3)


LONG = 1_000_000
WORDS = {
    "one name": "key" * (LONG // 3),
    "names of one word": "key-" * (LONG // 4),
    "assignments": "key=" * (LONG // 4),
    "options": "--key " * (LONG // 6),
    "dashes": "-" * LONG,
    "schemes": "x:/" * (LONG // 3),
    "colons": "a:" * (LONG // 2),
    "quotes": "key='" * (LONG // 5),
    "nothing": "a" * LONG,
}


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.timeout(60)  # a hundredth of a second for each; where time grows with the square, hours
def test_a_word_of_any_length_is_searched_in_linear_time(kind):
    text = f"{WORDS[kind]}' done token=planted"
    assert "planted" not in redact(text)


def test_a_value_behind_a_name_that_is_none_is_found():
    assert redact("a=token=planted", {}) == "a=token=***"
    assert redact("n=3&a.b=c=x&my-key=planted", {}) == "n=3&a.b=c=x&my-key=***"
    assert redact("--n 3 --token planted", {}) == "--n 3 --token ***"
    assert redact("token='planted", {}) == "token=***"


def test_the_start_of_a_text_ends_with_no_part_of_a_secret():
    secret = PLANTED["HF_TOKEN"]
    for cut in range(len(secret) + 1):
        assert "plan" not in redact_start(f"{'x' * 600} {secret}", 601 + cut)
        assert "plan" not in redact_start(secret * 200, 100 * len(secret) + cut)
    assert redact_start("x" * 10_000, 4096).startswith("x" * 3000)
    assert redact_start("short", 4096) == "short"


def verdicts(*texts: str) -> list[tuple[float | None, str]]:
    none = torch.empty(0)
    completions = tuple(Completion(none, none, none, True, text) for text in texts)
    with Verifier(hostile_judges.judge, deadline=60.0, workers=1, max_without_reward=1.0) as judges:
        (group,) = judges.judge([Group(Prompt(0, (), "."), completions)])
    return [(c.reward, c.outcome.reason) for c in group.completions if c.outcome is not None]


def test_what_a_judge_returns_has_no_part_of_a_secret():
    found = verdicts(*(f"return-secret {kind}" for kind in ("text", "list", "long", "bytes")), "raise-secrets")
    assert [reward for reward, _ in found] == [None] * 5
    assert "plan" not in str(found)
    assert found[0][1] == "the judge returned '***' (str), not a finite number"


def test_what_a_judge_prints_is_shown_without_secrets(capfd):
    assert verdicts("print-secret")[0][0] == 1.0
    out, err = capfd.readouterr()
    assert "plan" not in out + err
    first, second, long = out.splitlines()
    assert (first, second) == ("it is ***", "***")
    assert long == f"{'x' * 65_531}***{'y' * 70_000}"
    assert err == "http://***@host --api-key ***"
