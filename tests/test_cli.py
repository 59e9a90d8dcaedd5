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

import pytest
from running import leftovers, options, tiny_settings
from tiny import save_tiny

from lagrpo.cli import COMMANDS, main
from lagrpo.objective.recipes import PRESETS
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


def test_signs_that_a_terminal_lacks_are_told_by_their_numbers(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    main(["--help"])
    out.flush()
    assert b"VALUE \\u2026" in out.buffer.getvalue()


# Training


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.usefixtures("shared_templates")
def test_every_preset_runs_three_updates_and_leaves_a_complete_run(model, tmp_path, monkeypatch, recipe):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    monkeypatch.setattr(sys, "argv", ["/somewhere/lagrpo", "train", "--recipe", recipe])
    settings = tiny_settings(model, tmp_path / "runs", schedule={"v": 2}, run={"name": recipe})
    code, out, err = lagrpo("train", *options(settings), "--recipe", recipe)
    assert (code, out, err) == (0, "", "")
    run = tmp_path / "runs" / recipe
    assert load_settings(run / "config.toml") == load_settings(settings, {"objective": {"recipe": recipe}})
    assert json.loads((run / "environment.json").read_text())["command"] == f"lagrpo train --recipe {recipe}"
    metrics = load_metrics(run)
    assert [(m["batch"], m["version"]) for m in metrics] == [(1, 0), (2, 1), (3, 2)]
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert rollout_batches(run) == [1, 2, 3]
    assert len(load_rollouts(run)) == 3 * 2 * 4
    assert [e["name"] for e in load_evaluations(run)] == ["before", "after"]
    final = str(run / "weights" / "final")
    trained = AutoModelForCausalLM.from_pretrained(final)
    initial = AutoModelForCausalLM.from_pretrained(str(model))
    assert any((a != b).any() for a, b in zip(trained.parameters(), initial.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(final).eos_token == "<eos>"
    assert GenerationConfig.from_pretrained(final).eos_token_id == [1, 2]
    assert leftovers(tmp_path) == []


def test_a_settings_file_with_overrides(model, tmp_path):
    (tmp_path / "a.toml").write_text(lagrpo("train", "--model", model, "--dry-run")[1])
    words = options(tiny_settings(model, tmp_path / "runs", run={"name": "one"}))
    assert lagrpo("train", "--schedule.v", 9, "a.toml", *words, "--schedule.batches=1")[0] == 0
    resolved = load_settings(tmp_path / "runs" / "one" / "config.toml")
    assert (resolved.schedule.v, resolved.schedule.batches, resolved.task.name) == (9, 1, "sample_task:load")


def test_what_a_run_shows(model, tmp_path):
    settings = tiny_settings(model, tmp_path / "runs", run={"display": "plain", "name": "one"})
    code, out, err = lagrpo("train", *options(settings))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"loading {model} on cpu …"
    starts = [line.split() for line in lines]
    assert [words[0] for words in starts if words and words[0] in "123"] == ["1", "2", "3"]
    assert out.count("pass@1") == 4  # as evaluated, and in the summary
    assert f"lagrpo show {tmp_path / 'runs' / 'one'}" in out
    code, out, err = lagrpo("show", tmp_path / "runs" / "one", "--count", 3)
    assert (code, err) == (0, "")
    assert "showing 3 of 8" in out


# --dry-run


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_dry_run_prints_a_settings_file_wherever_the_flag_stands(model, tmp_path, place):
    path = tmp_path / "a.toml"
    path.write_text(f'[model]\npath = "{model}"\n[schedule]\nv = 10\ni = 3\nbatches = 30\nstages = 2\n')
    words: list[object] = [path, "--schedule.prompts", 4]
    code, out, err = lagrpo("train", *words[:place], "--dry-run", *words[place:])
    assert (code, err) == (0, "")
    (tmp_path / "resolved.toml").write_text(out)
    assert load_settings(tmp_path / "resolved.toml") == load_settings(path, {"schedule": {"prompts": 4}})
    assert "4 prompts x 16 completions = 64 samples, used for 3 updates (i = 3)" in out
    assert "every(10): new weights every 10 batches, 30 updates per weight sync; largest possible lag 27 updates" in out
    assert "2 stages x 30 batches = 180 updates, 3,840 samples" in out
    assert not (tmp_path / "runs").exists()


# Evaluation


def test_an_evaluation_on_its_own(model, tmp_path):
    import pyarrow.parquet as pq

    words = ["--task", "arithmetic", "--prompts", 5, "--samples", 4, "--max_tokens", 3, "--max-prompt-tokens", 64]
    fixed = ["--model.dtype", "float32", "--model.threads", 1]
    code, out, err = lagrpo("eval", model, *words, *fixed, "--output", "out")
    assert code == 0
    assert err.startswith(f"loading {model} …\ncomputing with ")
    assert err.count("\n") == 2
    assert out.splitlines()[0] == f"{model} on arithmetic: 5 prompts x 4 samples"
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["pass@1", "pass@2", "pass@4"]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["pass_at_1_low"] <= summary["pass_at_1"] <= summary["pass_at_1_high"]
    records = pq.read_table(tmp_path / "out" / "records.parquet").to_pylist()
    assert [len(record["completions"]) for record in records] == [4] * 5
    assert sum(r["right"] for r in records) == pytest.approx(20 * summary["pass_at_1"])


def evaluation(directory: Path) -> dict[str, object]:
    return json.loads((directory / "summary.json").read_text())


def test_an_evaluation_with_other_settings_does_not_take_the_place_of_an_earlier_one(model, tmp_path):
    words = ("eval", model, "--prompts", 3, "--max_tokens", 4, "--max_prompt_tokens", 64, "--model.dtype", "float32")
    for samples in (2, 3, 2):  # the third is the first once more
        assert lagrpo(*words, "--samples", samples)[0] == 0
    folder = tmp_path / "evaluations"
    assert sorted(path.name for path in folder.iterdir()) == ["tiny-arithmetic", "tiny-arithmetic-2"]
    assert [evaluation(path)["samples"] for path in sorted(folder.iterdir())] == [2, 3]


def test_an_evaluation_into_the_directory_of_another_one_is_refused_before_a_model_is_loaded(model, tmp_path):
    words = ("eval", model, "--prompts", 3, "--max_tokens", 4, "--max_prompt_tokens", 64, "--output", "out")
    assert lagrpo(*words, "--samples", 2)[0] == 0
    before = (tmp_path / "out" / "summary.json").read_bytes()
    code, _, err = lagrpo(*words, "--samples", 3)
    assert (code, err) == (
        2,
        "lagrpo: output: out holds an evaluation with other settings (samples = 2, not 3): name another directory\n",
    )
    assert (tmp_path / "out" / "summary.json").read_bytes() == before
    (tmp_path / "out" / "summary.json").write_text("{}")
    code, _, err = lagrpo(*words, "--samples", 3)
    assert (code, err) == (
        2,
        "lagrpo: output: out/summary.json is not the summary of an evaluation: name another directory\n",
    )


def test_an_evaluation_into_a_file_is_refused_before_a_model_is_loaded(model, tmp_path):
    (tmp_path / "out").write_text("mine")
    code, _, err = lagrpo("eval", model, "--max_prompt_tokens", 64, "--output", "out")
    assert (code, err) == (2, "lagrpo: output: out is a file, so nothing can be written to out\n")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_weights_of_a_run_evaluate_to_what_the_run_said(model, tmp_path):
    """The same prompts, draws and numbers: nothing is lost on the way to the disk."""
    settings = tiny_settings(model, tmp_path / "runs", run={"name": "one"}, model={"dtype": "bfloat16"})
    assert lagrpo("train", *options(settings))[0] == 0
    run = tmp_path / "runs" / "one"
    words = {
        "task": "sample_task:load",
        "prompts": 2,
        "samples": 3,
        "seed": 3,
        "max_tokens": 6,
        "max_prompt_tokens": 64,
    }
    given = [word for name, value in words.items() for word in (f"--{name}", value)]
    assert lagrpo("eval", run / "weights" / "final", *given)[0] == 0
    alone = json.loads((tmp_path / "evaluations" / "one-final-spread" / "summary.json").read_text())
    after = load_evaluations(run)[-1]
    assert after["name"] == "after"
    metrics = [name for name in after if name.startswith(("pass_at_", "reward_mean")) and "_change" not in name]
    before = load_evaluations(run)[0]
    assert after["pass_at_1_change"] == pytest.approx(after["pass_at_1"] - before["pass_at_1"])
    assert len(metrics) == 12  # the mean reward, pass@1, 2 and 3, each with its interval
    assert {name: alone[name] for name in metrics} == {name: after[name] for name in metrics}
    assert alone["settings"]["samples"] == 3


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "there is no command 'trian'; did you mean 'train'? (lagrpo --help)"),
        ("eval", "eval needs one model: lagrpo eval MODEL [--task NAME] …"),
        ("eval smollm2 other", "eval needs one model"),
        (
            "eval smollm2 --schedule.v 3",
            "command line: unknown setting 'schedule'; there are sampling, vllm, task, environment, ",
        ),
        ("eval ./nosuch", "model.path: model directory './nosuch' does not exist"),
        ("eval smollm2 --task gsm", "task.name: there is no task 'gsm'"),
        ("eval smollm2 --samples 500", "command line: max_num_seqs = 128 is less than samples = 500"),
        ("show nowhere", "there is no run at nowhere"),
        ("recipes grpoo", "unknown recipe 'grpoo'; the nearest is 'grpo'"),
        ("train nosuch.toml", "nosuch.toml: no such settings file"),
        ("train .", ".: cannot be read as a settings file: Is a directory"),
        ("train a.toml b.toml", "one settings file, not 2: a.toml b.toml"),
        ("train --schedule.v 0", "command line: schedule: v = 0 never syncs weights: use v of at least 1"),
        ("train --optimizer.lr x --dry-run", "command line: optimizer.lr = 'x': Input should be a valid number"),
        ("train --objective.recipe grop", "objective: unknown recipe 'grop'; the nearest is 'grpo'"),
        ("train --model a/b/c", "model.path: there is no directory 'a/b/c'"),
        ("train --model ./nosuch --dry-run", "model.path: model directory './nosuch' does not exist"),
        ("train --run.name a/b", "run: run name 'a/b' is not the name of a directory"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(words, message):
    code, out, err = lagrpo(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"lagrpo: {message}")
    assert "Traceback" not in err
    assert "pydantic" not in err
    assert len(err.splitlines()) == 1


def test_wrong_input_costs_no_loading():
    """In a fresh process, everything that the list above tries: torch is there for the objective alone, transformers
    and the data libraries never."""
    commands = sorted((words for words, _ in _refusals()), key=lambda words: "objective" in words)
    code = f"""
import contextlib, io, sys
from lagrpo.cli import main
heavy = {{"transformers", "datasets", "pyarrow", "matplotlib", "math_verify"}}
for words in {commands!r}:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words.split())
        except SystemExit as end:
            assert end.code == 2, words
    unwanted = heavy if "objective" in words else heavy | {{"torch"}}
    assert not unwanted & set(sys.modules), (words, unwanted & set(sys.modules))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _refusals():
    (mark,) = [m for m in test_wrong_input_is_one_message_and_exit_code_2.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    return mark.args[1]


def test_a_model_that_does_not_load_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    code, out, err = lagrpo("train", "--model", "empty", "--run.display", "none")
    assert (code, out) == (2, "")
    assert err.startswith("lagrpo: model.path = 'empty': no model could be loaded. Looked in empty: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    code, out, err = lagrpo(command, "--help")
    assert (code, err) == (0, "")
    assert f"lagrpo {command}" in out
    assert lagrpo("help", command)[1] == out


@pytest.mark.parametrize(("command", "kind"), [("train", Settings), ("eval", EvalSettings)])
def test_the_help_names_every_setting(command, kind):
    out = lagrpo(command, "--help")[1]
    leaves = [name for name in list_settings(kind) if f"--{name}." not in out]
    assert [name for name in leaves if f"--{name} " not in out and f"[[{name}]]" not in out] == []


def test_the_help_of_all_and_the_version():
    for words in ([], ["help"], ["--help"], ["-h"]):
        assert lagrpo(*words)[1].startswith("The command line: parse, build, call.")
    assert lagrpo("--version")[1].split()[0] == "lagrpo"


def test_recipes():
    listed = lagrpo("recipes")[1]
    assert [name for name in PRESETS if f" {name} " not in listed] == []
    one = lagrpo("recipes", "dapo")[1]
    assert "arXiv 2503.14476" in one
    marked = [line.split()[1:] for line in one.splitlines() if line.strip().startswith("* ") and "objective" in line]
    assert [words for words in marked if words[0].startswith("objective.")] == [
        ["objective.epsilon_high", "0.28", "0.2"],
        ["objective.mask_zero_variance", "true", "false"],
    ]


def test_a_signal_while_the_model_is_loaded(model, tmp_path, monkeypatch):
    """Nothing has been made yet, and nothing is left."""
    monkeypatch.setattr("lagrpo.training.build.load_policy", lambda *rest: signal.raise_signal(signal.SIGTERM))
    code, out, err = lagrpo("train", *options(tiny_settings(model, tmp_path / "runs")))
    assert (code, out, err) == (143, "", "\nlagrpo: interrupted\n")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fails_says_why_without_a_traceback(model, tmp_path):
    settings = tiny_settings(
        model, tmp_path / "runs", run={"name": "one"}, task={"name": "sample_task:load_impossible"}
    )
    code, out, err = lagrpo("train", *options(settings))
    assert (code, out) == (1, "")
    assert err.startswith("lagrpo: 6 of 6 completions have no reward")
    assert "this judge never answers" in err
    until, way_on = err.splitlines()[-2:]
    assert until.startswith(f"The run until then: {tmp_path / 'runs' / 'one'} (0 of 3 batches")
    assert way_on == f"No checkpoint yet; to begin again: lagrpo train --resume {tmp_path / 'runs' / 'one'}"
    assert "Traceback" not in err
    assert leftovers(tmp_path) == []


# Interruptions, in a process of their own


@pytest.fixture
def start(model, tmp_path):
    """Starts `lagrpo train` as a user's terminal would: in a process group of its own."""
    started: list[subprocess.Popen[str]] = []

    def of(**sections) -> subprocess.Popen[str]:
        base = {"run": {"display": "plain", "name": "one"}, "schedule": {"batches": 2000, "prompts": 2}}
        merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
        words = options(tiny_settings(model, tmp_path / "runs", **merged))
        process = subprocess.Popen(
            [sys.executable, "-c", "from lagrpo.cli import main; main()", "train", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE)},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # pytest may run in the background
        )
        started.append(process)
        return process

    yield of
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_for_batch(process: subprocess.Popen[str], batch: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == [str(batch)]:
            return
    raise AssertionError(f"the run ended before batch {batch}: {process.stderr and process.stderr.read()}")


def wait_for_workers_to_end(group: int) -> None:
    """No process of the group is left running, within five seconds."""
    for _ in range(100):
        if not (left := running(group)):
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {left}")


def running(group: int) -> list[str]:
    """The processes of a group, without those that have ended and wait for init to notice."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = stat.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            found += [f"{name}) {state}"] if int(its_group) == group and state != "Z" else []
    return found


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@linux
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_from_outside(start, tmp_path, signum, code):
    process = start()
    wait_for_batch(process, 2)
    assert len(running(process.pid)) >= 2  # the run and its worker
    os.killpg(process.pid, signum)  # as a terminal or a batch system does: to the workers too
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    run = tmp_path / "runs" / "one"
    metrics = load_metrics(run)
    assert f"{signal.Signals(signum).name}: keeping the policy as it is ({len(metrics)} of 2000" in out
    assert rollout_batches(run) == [m["batch"] for m in metrics]
    assert (run / "weights" / "final" / "model.safetensors").is_file()
    assert leftovers(run) == []
    wait_for_workers_to_end(process.pid)


@linux
def test_a_killed_run_leaves_whole_files_and_no_processes(start, tmp_path):
    process = start()
    wait_for_batch(process, 3)
    assert len(running(process.pid)) >= 2
    process.kill()
    process.communicate(timeout=30)
    wait_for_workers_to_end(process.pid)
    run = tmp_path / "runs" / "one"
    batches = [m["batch"] for m in load_metrics(run)]
    assert len(batches) >= 3
    assert set(batches) <= set(rollout_batches(run)) <= {*batches, len(batches) + 1}
    assert len(load_rollouts(run)) == 8 * len(rollout_batches(run))


def test_the_package_can_be_run_as_a_module(model, tmp_path):
    """With workers, whose processes import the main module anew."""
    settings = tiny_settings(model, tmp_path / "runs", run={"name": "as-module"})
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "lagrpo", "train", *options(settings)],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    command = json.loads((tmp_path / "runs" / "as-module" / "environment.json").read_text())["command"]
    assert command.startswith("lagrpo train --run.")
