"""The command line as a user meets it: what it prints, where, and with which exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from running import leftovers, options, tiny_settings
from tiny import save_tiny

from lagrpo.cli import COMMANDS, main
from lagrpo.core.recipes import RECIPES
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.runs.reading import rollout_batches
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.toml import list_settings, load_settings

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def lagrpo(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    return int(str(code or 0)), out.getvalue(), err.getvalue()


def test_sign_that_an_encoding_lacks_is_printed_as_its_number(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["--help"])
    out.flush()
    assert b"VALUE \\u2026" in out.buffer.getvalue()


# Training and evaluation


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("shared_templates")
def test_every_recipe_trains_and_leaves_a_complete_run(model, tmp_path, recipe):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    settings = tiny_settings(model, tmp_path / "runs", schedule={"sync_every": 2}, run={"name": recipe})
    assert lagrpo("train", *options(settings), "--recipe", recipe) == (0, "", "")
    run = tmp_path / "runs" / recipe
    assert load_settings(run / "config.toml") == load_settings(settings, {"loss": {"recipe": recipe}})
    metrics = load_metrics(run)
    assert [(m["step"], m["policy_version"]) for m in metrics] == [(1, 0), (2, 1), (3, 2)]
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert len(load_rollouts(run)) == 3 * 2 * 4
    assert [e["name"] for e in load_evaluations(run)] == ["before", "after"]
    final = str(run / "weights" / "final")
    trained, initial = (AutoModelForCausalLM.from_pretrained(path) for path in (final, str(model)))
    assert any((a != b).any() for a, b in zip(trained.parameters(), initial.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(final).eos_token == "<eos>"
    assert GenerationConfig.from_pretrained(final).eos_token_id == [1, 2]
    assert leftovers(tmp_path) == []


def test_settings_file_with_overrides_and_plain_lines(model, tmp_path):
    (tmp_path / "a.toml").write_text(lagrpo("train", "--model", model, "--dry-run")[1])
    words = options(tiny_settings(model, tmp_path / "runs", run={"name": "one", "display": "plain"}))
    code, out, err = lagrpo("train", "--schedule.sync_every", 9, "a.toml", *words, "--schedule.batches=2")
    assert (code, err) == (0, "")
    run = tmp_path / "runs" / "one"
    resolved = load_settings(run / "config.toml")
    assert (resolved.schedule.sync_every, resolved.schedule.batches, resolved.task.name) == (9, 2, "sample_task:load")
    starts = [line.split()[:1] for line in out.splitlines()]
    assert [words for words in starts if words in (["1"], ["2"], ["3"])] == [["1"], ["2"]]
    assert f"lagrpo show {run}" in out
    assert "showing 3 of 8" in lagrpo("show", run, "--count", 3)[1]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_dry_run_prints_a_settings_file_wherever_the_flag_stands(model, tmp_path, place):
    path = tmp_path / "a.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[schedule]\nsync_every = 10\nnum_iterations = 3\nbatches = 30\nstages = 2\n'
    )
    words: list[object] = [path, "--schedule.prompts_per_batch", 4]
    code, out, err = lagrpo("train", *words[:place], "--dry-run", *words[place:])
    assert (code, err) == (0, "")
    (tmp_path / "resolved.toml").write_text(out)
    assert load_settings(tmp_path / "resolved.toml") == load_settings(path, {"schedule": {"prompts_per_batch": 4}})
    assert "4 prompts x 16 completions = 64 samples, used for 3 updates (i = 3)" in out
    assert not (tmp_path / "runs").exists()


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_evaluation_writes_a_summary_and_records(model, tmp_path):
    import pyarrow.parquet as pq

    words = ["--task", "arithmetic", "--prompts", 5, "--samples", 4, "--max_tokens", 3, "--max-prompt-tokens", 64]
    code, out, err = lagrpo("eval", model, *words, "--model.dtype", "float32", "--output", "out")
    assert code == 0
    assert err.startswith(f"loading {model} …\n")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["pass@1", "pass@2", "pass@4"]
    summary = summary_of(tmp_path / "out")
    assert summary["pass@1_low"] <= summary["pass@1"] <= summary["pass@1_high"]
    records = pq.read_table(tmp_path / "out" / "records.parquet").to_pylist()
    assert sum(r["correct"] for r in records) == pytest.approx(20 * summary["pass@1"])


def test_eval_again_gets_a_new_directory(model, tmp_path):
    words = ("eval", model, "--prompts", 3, "--max_tokens", 4, "--max_prompt_tokens", 64, "--model.dtype", "float32")
    for samples in (2, 3):
        assert lagrpo(*words, "--samples", samples)[0] == 0
    folder = tmp_path / "evaluations"
    assert [summary_of(path)["samples"] for path in sorted(folder.iterdir())] == [2, 3]


@pytest.mark.parametrize("name", ["out", "out/summary.json"])
def test_eval_into_a_file_or_over_an_evaluation_is_rejected(model, tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    code, _, err = lagrpo("eval", model, "--max_prompt_tokens", 64, "--output", "out")
    assert code == 2
    assert "output" in err
    assert file.read_text() == "mine"


def test_weights_of_a_run_evaluate_to_what_the_run_said(model, tmp_path):
    """The same prompts, random numbers and results: nothing is lost on the way to the disk."""
    settings = tiny_settings(model, tmp_path / "runs", run={"name": "one"}, model={"dtype": "bfloat16"})
    assert lagrpo("train", *options(settings))[0] == 0
    run = tmp_path / "runs" / "one"
    fixed = {
        "task": "sample_task:load",
        "prompts": 2,
        "samples": 3,
        "seed": 3,
        "max_tokens": 6,
        "max_prompt_tokens": 64,
    }
    words = [word for name, value in fixed.items() for word in (f"--{name}", value)]
    assert lagrpo("eval", run / "weights" / "final", *words)[0] == 0
    alone = summary_of(tmp_path / "evaluations" / "one-final-spread")
    after = load_evaluations(run)[-1]
    metrics = [name for name in after if name.startswith(("pass@", "reward")) and "_change" not in name]
    assert len(metrics) == 12  # the mean reward, pass@1, 2 and 3, each with its interval
    assert {name: alone[name] for name in metrics} == {name: after[name] for name in metrics}


# Wrong input


WRONG = {
    "trian": "did you mean 'train'?",
    "eval": "eval needs one model",
    "eval smollm2 other": "eval needs one model",
    "eval smollm2 --schedule.sync_every 3": "unknown setting 'schedule'",
    "eval ./nosuch": "model.path",
    "eval smollm2 --task gsm": "task.name",
    "eval smollm2 --samples 500": "max_num_seqs = 128",
    "show nowhere": "there is no run at nowhere",
    "verify nowhere": "there is no run at nowhere",
    "recipes grpoo": "the nearest is 'grpo'",
    "train nosuch.toml": "nosuch.toml: no such settings file",
    "train .": "cannot be read as a settings file",
    "train a.toml b.toml": "one settings file, not 2",
    "train --schedule.sync_every 0": "schedule: sync_every = 0",
    "train --optimizer.learning_rate x --dry-run": "optimizer.learning_rate = 'x'",
    "train --loss.recipe grop": "the nearest is 'grpo'",
    "train --model ./nosuch --dry-run": "model.path",
    "train --run.name a/b": "run name 'a/b'",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(words):
    code, out, err = lagrpo(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("lagrpo: ")
    assert WRONG[words] in err
    assert len(err.splitlines()) == 1


def test_wrong_input_costs_no_loading():
    """In a fresh process; torch is loaded for recipes only."""
    words = [words for words in WRONG if not any(name in words for name in ("--loss", "recipes", "verify"))]
    code = f"""
import contextlib, io, sys
from lagrpo.cli import main
for words in {words!r}:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words.split())
        except SystemExit as end:
            assert end.code == 2, words
assert not {{"torch", "transformers", "datasets", "pyarrow", "matplotlib", "math_verify"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_model_that_does_not_load_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    code, out, err = lagrpo("train", "--model", "empty", "--run.display", "none")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "model.path = 'empty'" in err


def test_failing_run_says_why_without_a_traceback(model, tmp_path):
    impossible = {"run": {"name": "one"}, "task": {"name": "sample_task:load_impossible"}}
    code, out, err = lagrpo("train", *options(tiny_settings(model, tmp_path / "runs", **impossible)))
    assert (code, out) == (1, "")
    assert err.startswith("lagrpo: 6 of 6 completions have no reward")
    assert "this function never answers" in err
    assert f"lagrpo train --resume {tmp_path / 'runs' / 'one'}" in err
    assert "Traceback" not in err
    assert leftovers(tmp_path) == []


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command):
    code, out, err = lagrpo(command, "--help")
    assert (code, err) == (0, "")
    assert f"lagrpo {command}" in out
    assert lagrpo("help", command)[1] == out


@pytest.mark.parametrize(("command", "kind"), [("train", Settings), ("eval", EvalSettings)])
def test_help_names_every_setting(command, kind):
    out = lagrpo(command, "--help")[1]
    leaves = [name for name in list_settings(kind) if f"--{name}." not in out]
    assert [name for name in leaves if f"--{name} " not in out and f"[[{name}]]" not in out] == []


def test_help_of_all_and_the_version():
    for words in ([], ["help"], ["--help"], ["-h"]):
        assert lagrpo(*words)[1].startswith("The command line: parse, build, call.")
    assert lagrpo("--version")[1].split()[0] == "lagrpo"


def test_recipes_lists_all():
    listed = lagrpo("recipes")[1]
    assert [name for name in RECIPES if f" {name} " not in listed] == []
    one = lagrpo("recipes", "dapo")[1]
    assert "arXiv 2503.14476" in one
    assert "loss.epsilon_high = 0.28" in one
    assert "rho.clamp(1 - epsilon_low, 1 + epsilon_high)" in one


# Interruptions


def test_signal_while_the_model_is_loaded_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr("lagrpo.training.build.load_policy", lambda *rest: signal.raise_signal(signal.SIGTERM))
    code, out, err = lagrpo("train", *options(tiny_settings(model, tmp_path / "runs")))
    assert (code, out, err) == (143, "", "\nlagrpo: interrupted\n")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def start(model, tmp_path):
    """Starts `lagrpo train` as a user's terminal would: as a module, in its own process group."""
    started: list[subprocess.Popen[str]] = []

    def start_run() -> subprocess.Popen[str]:
        own = {"run": {"display": "plain", "name": "one"}, "schedule": {"batches": 2000, "prompts_per_batch": 2}}
        words = [sys.executable, "-m", "lagrpo", "train", *options(tiny_settings(model, tmp_path / "runs", **own))]
        path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
            start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        started.append(process)
        return process

    yield start_run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_batch(process: subprocess.Popen[str], batch: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [str(batch)]:
            return
    raise AssertionError(f"the run ended before batch {batch}: {process.stderr and process.stderr.read()}")


def running(group: int) -> list[str]:
    """The processes of a group, without those that have ended and wait for init to notice."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = stat.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            found += [name] if int(its_group) == group and state != "Z" else []
    return found


def wait_for_end(group: int) -> None:
    """No process of the group is left running, within five seconds."""
    for _ in range(100):
        if not running(group):
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {running(group)}")


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@linux
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_run_after_its_batch(start, tmp_path, signum, code):
    process = start()
    wait_for_batch(process, 2)
    os.killpg(process.pid, signum)  # as a terminal or a batch system does: to the workers, too
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    run = tmp_path / "runs" / "one"
    assert rollout_batches(run) == [m["step"] for m in load_metrics(run)]
    assert (run / "weights" / "final" / "model.safetensors").is_file()
    assert leftovers(run) == []
    wait_for_end(process.pid)


@linux
def test_killed_run_leaves_whole_files_and_no_processes(start, tmp_path):
    process = start()
    wait_for_batch(process, 3)
    process.kill()
    process.communicate(timeout=30)
    wait_for_end(process.pid)
    run = tmp_path / "runs" / "one"
    batches = [m["step"] for m in load_metrics(run)]
    assert set(batches) <= set(rollout_batches(run)) <= {*batches, len(batches) + 1}
    assert len(load_rollouts(run)) == 8 * len(rollout_batches(run))
