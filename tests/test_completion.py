"""Shell completion: the script in a real shell, as if a person pressed TAB."""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess

import pytest
from test_cli import lagrpo

from lagrpo import completion
from lagrpo.cli import COMMANDS
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import list_settings


@pytest.fixture(scope="module")
def script():
    code, out, err = lagrpo("completion", "bash")
    assert (code, err) == (0, "")
    return out


def press_tab(script: str, line: str) -> list[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    typed = " ".join(f"'{word}'" for word in words)
    ask = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}\n_lagrpo\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("lagrpo tr", ["train"]),
        ("lagrpo train --sampling.sampler ", ["local", "vllm"]),
        ("lagrpo train --run.trackers t", ["tensorboard", "trackio"]),
        ("lagrpo train --schedule.k", ["--schedule.kind"]),
        ("lagrpo train experiments/", []),
        ("lagrpo demo --optimizer.l", ["--optimizer.lr"]),
        ("lagrpo train --recipe das", []),
        ("lagrpo train --recipe dap", ["dapo"]),
        ("lagrpo eval smollm2 --task cou", ["countdown"]),
        ("lagrpo show runs/a --only ", ["all", "right", "wrong", "unscored"]),
        ("lagrpo verify runs/a --a", ["--all"]),
        ("lagrpo recipes asy", ["asymre"]),
        ("lagrpo serve smollm2 --weight-sync n", ["nccl"]),
        ("lagrpo plan --gpu", ["--gpus", "--gpu"]),
        ("lagrpo completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_what_bash_offers(script, line, offered):
    assert sorted(press_tab(script, line)) == sorted(offered)


def test_every_command_and_setting_is_offered(script):
    assert press_tab(script, "lagrpo ") == list(COMMANDS)
    sections = {*Settings.model_fields, "model.lora"}
    offered = press_tab(script, "lagrpo train --")
    assert {f"--{name}" for name in list_settings(Settings) if name not in sections} <= set(offered)


def test_options_of_functions_are_those_of_their_help(script):
    for command in ("show", "view", "verify", "serve", "recipes", "study", "doctor"):
        known = set(re.findall(r"--[a-z][\w-]*", lagrpo(command, "--help")[1]))
        offered = set(press_tab(script, f"lagrpo {command} --"))
        assert {option for option in offered if not option.startswith("--no-")} <= known, command


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_read_by_them(shell, tmp_path):
    code, out, _ = lagrpo("completion", shell)
    assert code == 0
    assert "--sampling.sampler" in out or "-l sampling.sampler" in out
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here to read it")
    (tmp_path / "script").write_text(out)
    subprocess.run([shell, "-n", str(tmp_path / "script")], timeout=20, check=True)


def test_the_examples():
    assert doctest.testmod(completion).failed == 0
