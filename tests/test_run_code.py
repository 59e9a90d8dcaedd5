"""Code that config.toml of a run names: it runs only if the user named it, too, or trusts it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from page_code import current_directory_with

import lagrpo
from lagrpo.cli import main
from lagrpo.errors import SettingsError
from lagrpo.rewards.entries import REWARDS
from lagrpo.settings.load import load_settings
from lagrpo.settings.run_code import find_code
from lagrpo.verify import verify_run

MARK = Path("was_imported")

DANGER = """
from pathlib import Path
Path("was_imported").touch()

def score(completion, answer):
    return 1.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current directory with a module that leaves a mark when it is imported."""
    with current_directory_with({"danger": DANGER}, tmp_path, monkeypatch):
        yield


def write_run(**sections: Any) -> Path:
    """A directory with no more than the settings of a run."""
    run = Path("foreign")
    (run / "weights" / "final").mkdir(parents=True)
    text = tomli_w.dumps({"task": {"rewards": ["danger:score"]}} | sections)
    (run / "config.toml").write_text(text, encoding="utf-8")
    return run


def complain(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The message with which a command rejects wrong input."""
    with pytest.raises(SystemExit) as end:
        main(shlex.split(words))
    assert end.value.code == 2
    return capsys.readouterr().err


COMMANDS = {
    "eval": "eval foreign/weights/final",
    "eval on the same task": "eval foreign/weights/final --task arithmetic",
    "dry run": "train --resume foreign --dry-run",
    "resume": "train --resume foreign",
    "verify": "verify foreign",
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_command_runs_no_code_that_only_the_settings_of_a_run_name(capsys, words):
    write_run()
    message = complain(words, capsys)
    assert len(message.splitlines()) == 1
    for part in ("danger:score", "task.rewards", "foreign/config.toml", "--trust-run-code"):
        assert part in message
    assert not MARK.exists()


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_command_that_trusts_a_run_goes_on_to_its_code(capsys, words):
    """It ends later: the run has neither a model nor batches."""
    write_run(model={"path": "./missing"})
    assert "--trust-run-code" not in complain(f"{words} --trust-run-code", capsys)


@pytest.mark.parametrize("words", [COMMANDS["eval"], COMMANDS["dry run"]], ids=["eval", "dry run"])
def test_function_that_the_command_line_names_needs_no_flag(capsys, words):
    write_run(model={"path": "./missing"})
    assert "--trust-run-code" not in complain(f"{words} --task.rewards danger:score", capsys)


def test_settings_file_that_the_user_names_needs_no_flag(capsys):
    run = write_run(model={"path": "./missing"})
    assert "--trust-run-code" not in complain(f"train {run}/config.toml --dry-run", capsys)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda run: lagrpo.train(resume=run, dry_run=True), id="train"),
        pytest.param(verify_run, id="verify_run"),
    ],
)
def test_call_runs_no_code_that_only_the_settings_of_a_run_name(call):
    run = write_run()
    with pytest.raises(SettingsError, match=r"danger:score.*trust_run_code=True"):
        call(run)
    assert not MARK.exists()


def test_function_passed_in_python_replaces_the_one_of_the_run():
    run = write_run(model={"path": "./missing"})
    with pytest.raises(SettingsError) as rejected:
        lagrpo.train(resume=run, rewards=[lambda completion, answer: 1.0], dry_run=True)
    assert "danger" not in str(rejected.value)


def test_kept_loss_of_a_run_is_not_run_by_verify():
    run = write_run(task={}, loss={"recipe": "own:loss"})
    (run / "loss").mkdir()
    (run / "loss" / "own.py").write_text(DANGER, encoding="utf-8")
    with pytest.raises(SettingsError, match=r"own:loss \(loss\.recipe\)"):
        verify_run(run)
    assert not MARK.exists()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        pytest.param({"task.name": "a:b"}, ("task.name", "a:b"), id="task"),
        pytest.param({"task.name": "gym:a.b:c"}, ("task.name", "gym:a.b:c"), id="environment"),
        pytest.param({"task.tools": ["a:b"]}, ("task.tools", "a:b"), id="tool"),
        pytest.param({"rollout.engine": "a:b"}, ("rollout.engine", "a:b"), id="engine"),
        pytest.param({"loss.recipe": "a:b"}, ("loss.recipe", "a:b"), id="recipe"),
        pytest.param({"loss.filters": ["a:b"]}, ("loss.filters", "a:b"), id="filter"),
        pytest.param(
            {"loss.overrides": {"mask": "a:b"}}, ("loss.overrides.mask", "a:b"), id="mask"
        ),
        pytest.param(
            {"loss.overrides": {"mask": {"function": "a:b", "high": 2}}},
            ("loss.overrides.mask", "a:b"),
            id="mask in a table",
        ),
        pytest.param(
            {"eval.sets": [{"name": "x", "task": {"name": "math", "rewards": ["a:b"]}}]},
            ("eval.sets.task.rewards", "a:b"),
            id="reward of an evaluation set",
        ),
        pytest.param(
            {"rollout.engine": "vllm", "vllm.server_args": ["--middleware=a.b"]},
            ("vllm.server_args", "--middleware=a.b"),
            id="option of vLLM",
        ),
    ],
)
def test_code_is_found_wherever_settings_name_it(settings, code):
    assert list(find_code(load_settings(settings))) == [code]


def test_names_of_lagrpo_are_no_code():
    settings = {
        "task": {
            "name": "gym:game:GuessTheNumber-v0-easy",
            "data": "hub:main",
            "tools": "calculator",
        },
        "loss": {"recipe": "dapo", "advantage": "centered"},
        "eval": {"sets": [{"name": "a", "task": {"name": "math", "rewards": REWARDS["exact"]}}]},
    }
    assert list(find_code(load_settings(settings))) == []
