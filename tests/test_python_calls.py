"""`lagrpo.train(dry_run=True)`, `lagrpo.evaluate` and `lagrpo.compare` in Python."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import datasets
import pytest
from running import tiny_settings
from sample_rewards import correct

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.lifecycle.measure import BatchCost
from lagrpo.runs import RunNotFoundError, load_metrics
from lagrpo.tasks import RowTask, Task
from lagrpo.tasks.splits import find_splits, read_split
from lagrpo.training.step import Phase
from lagrpo.types import JsonObject

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(12)]
LIMITS = {
    "model.dtype": "float32",
    "rollout.max_completion_length": 6,
    "rollout.max_prompt_length": 64,
    "eval.num_samples": 2,
}


def test_dry_run_of_a_named_run_returns_its_directory(model, tmp_path):
    settings = tiny_settings(model, tmp_path, run={"name": "planned"})
    assert lagrpo.train(settings, dry_run=True).run == tmp_path / "planned"


def test_dry_run_prints_what_the_settings_mean_and_writes_nothing(model, tmp_path, capsys):
    settings = tiny_settings(model, tmp_path / "runs", schedule={"batches": 5, "sync_every": 3})
    result = lagrpo.train(settings, dry_run=True)
    assert (result.run, result.batches, result.weights) == (tmp_path / "runs", 0, None)
    assert "staleness at most 2 updates" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_measured_dry_run_prints_seconds_by_phase_and_leaves_no_directory(
    model, tmp_path, monkeypatch, capsys
):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    settings = tiny_settings(model, tmp_path / "runs", schedule={"batches": 5, "sync_every": 3})
    result = lagrpo.train(settings, dry_run="measure")
    lines = capsys.readouterr().out.splitlines()
    table = {words[1]: words[2:] for line in lines if len(words := line.split()) > 2}
    for phase in [*Phase, "1", "4", "10"]:
        assert float(table[phase][0]) >= 0
    assert result.batches == 0
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "tmp").glob("lagrpo-measure-*"))


def test_dry_run_of_another_kind_is_a_type_error(model, tmp_path):
    with pytest.raises(TypeError, match="dry_run"):
        lagrpo.train(tiny_settings(model, tmp_path), dry_run="cost")  # pyright: ignore


@pytest.mark.parametrize(
    ("overlaps", "v", "seconds"),
    [
        pytest.param(False, 1, 17.0, id="before every batch"),
        pytest.param(False, 4, 11.0, id="every 4 batches"),
        # One batch is waited for: 8 + 6 + 3 + 3 x 6.
        pytest.param(True, 4, 35 / 4, id="every 4 batches, engine samples meanwhile"),
    ],
)
def test_seconds_of_a_batch_share_one_weight_sync(overlaps, v, seconds):
    phases = {Phase.SYNC: 8.0, Phase.SAMPLING: 6.0, Phase.LEARNING: 2.0}
    cost = BatchCost(phases, total=17.0, overlaps=overlaps, peak=None)
    assert cost.seconds_at(v) == seconds


def test_dry_run_counts_prompts_also_of_evaluation_sets_with_a_task(model, tmp_path, capsys):
    sums = {"name": "arithmetic", "options": {"operations": ["+"], "digits": 1}}
    settings = tiny_settings(
        model, tmp_path, task=sums, eval={"sets": [{"name": "sums", "task": sums}]}
    )
    lagrpo.train(settings, dry_run=True)
    text = capsys.readouterr().out
    assert "# data        80 training prompts, 20 test prompts\n" in text
    assert "# data        20 test prompts in the evaluation set sums\n" in text


def test_dry_run_of_missing_data_is_a_settings_error(model, tmp_path):
    task = {"name": "custom", "data": "nosuch.jsonl", "rewards": ["exact"]}
    with pytest.raises(SettingsError, match=re.escape("no file or directory 'nosuch.jsonl'")):
        lagrpo.train(tiny_settings(model, tmp_path, task=task), dry_run=True)


def remove_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def remove_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def name_a_missing_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def problem_of(settings: JsonObject, task: Task | None = None, *, dry_run: bool) -> str:
    with pytest.raises(SettingsError) as caught:
        lagrpo.train(settings, task=task, dry_run=dry_run)
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (remove_tokenizer, "tokenizer.json"),
        (remove_weights, "model.safetensors"),
        (cut_weights, "model.safetensors"),
        (name_a_missing_shard, "model-00002-of-00002.safetensors"),
    ],
)
def test_dry_run_of_an_incomplete_model_fails_as_the_run_does(model, tmp_path, damage, file):
    incomplete = tmp_path / "incomplete"
    shutil.copytree(model, incomplete)
    damage(incomplete)
    settings = tiny_settings(incomplete, tmp_path)
    problem = problem_of(settings, dry_run=True)
    assert file in problem
    assert problem_of(settings, dry_run=False) == problem


@pytest.mark.parametrize(
    ("long_prompts", "overlong_prompts"),
    [("train", "error"), ("test", "error"), ("train", "drop"), ("test", "drop")],
)
def test_dry_run_of_prompts_over_the_limit_fails_as_the_run_does(
    model, tmp_path, long_prompts, overlong_prompts
):
    rows = {"train": ["?"] * 4, "test": ["?"] * 2}
    rows[long_prompts] = ["?" * 100] * 2
    task = RowTask("lengths", rows, lambda row: (row, row), correct)
    settings = tiny_settings(model, tmp_path)
    settings["rollout"]["overlong_prompts"] = overlong_prompts
    assert problem_of(settings, task, dry_run=True) == problem_of(settings, task, dry_run=False)


def test_dry_run_without_a_python_for_vllm_fails(model, tmp_path, monkeypatch):
    monkeypatch.setenv("LAGRPO_VLLM_PYTHON", str(tmp_path / "nosuch"))
    settings = tiny_settings(model, tmp_path, rollout={"engine": "vllm"})
    assert "nosuch" in problem_of(settings, dry_run=True)


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("recipe", "did you mean 'loss'?"),
        ("dataset", "did you mean 'data'?"),
        ("learning_rate", "did you mean settings={'optimizer.learning_rate': …}?"),
        ("beta", "0 in TRL"),
        ("num_generations", "not 8"),
        ("reward_funcs", "TRL's reward_funcs is task.rewards"),
        ("xyz", "its arguments are source, task, "),
    ],
)
def test_unknown_argument_is_explained(argument, advice):
    with pytest.raises(SettingsError, match=re.escape(advice)):
        lagrpo.train(**{argument: 1})  # type: ignore[arg-type]


def test_evaluation_is_of_all_rows_or_of_the_test_split(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    every_row = lagrpo.evaluate(model, ROWS, [correct], settings=LIMITS)
    assert every_row.summary["prompts"] == len(every_row.records) == 12
    assert {record["answer"] for record in every_row.records} == {str(n) for n in range(1, 13)}
    low, high = every_row.summary["pass@1_low"], every_row.summary["pass@1_high"]
    assert 0 <= low <= every_row.summary["pass@1"] <= high <= 1
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
    )
    assert lagrpo.evaluate(model, splits, "exact", settings=LIMITS).summary["prompts"] == 3
    assert len(list((tmp_path / "evaluations").iterdir())) == 2


def test_evaluation_is_of_all_rows_of_a_file_of_any_name(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS[:2]), encoding="utf-8"
    )
    evaluation = lagrpo.evaluate(model, "questions.jsonl", "exact", settings=LIMITS)
    assert evaluation.summary["prompts"] == 2


def test_weights_of_a_run_are_evaluated_as_the_run_would(model, tmp_path, monkeypatch):
    """With its task, limits and seed, unless arguments name other data."""
    monkeypatch.chdir(tmp_path)
    result = lagrpo.train(tiny_settings(model, tmp_path / "runs", schedule={"batches": 1}))
    assert result.weights is not None
    assert result.after is not None
    with pytest.raises(SettingsError, match="trust_run_code"):
        lagrpo.evaluate(result.weights)
    same = lagrpo.evaluate(
        result.weights,
        settings={"eval.num_prompts": 2, "eval.num_samples": 3},
        trust_run_code=True,
    )
    assert same.summary["pass@1"] == result.after["pass@1"]
    other = lagrpo.evaluate(result.weights, ROWS, [correct], settings={"eval.num_samples": 2})
    assert {record["answer"] for record in other.records} == {str(n) for n in range(1, 13)}


def test_evaluation_of_a_model_alone_asks_on_what(model):
    with pytest.raises(SettingsError, match="data and rewards"):
        lagrpo.evaluate(model)


def test_splits_may_be_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("a", ROWS[:5]), ("b", ROWS[5:])):
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    splits = find_splits({"train": "a.jsonl", "test": tmp_path / "b.jsonl"}, hub="")
    assert [len(read_split(splits[name], name)) for name in ("train", "test")] == [5, 7]
    with pytest.raises(ValueError, match=r"data\['test'\].*c\.jsonl"):
        find_splits({"train": "a.jsonl", "test": "c.jsonl"}, hub="")


def test_run_may_overfit_its_only_prompt(model, tmp_path):
    result = lagrpo.train(
        model=model,
        data=ROWS[:1],
        rewards=[correct],
        settings=LIMITS
        | {"run.output_dir": str(tmp_path), "schedule.batches": 2, "eval.at_start": False},
    )
    assert result.batches == 2


def test_evaluation_of_the_directory_of_a_run_names_the_model_in_it(tmp_path):
    weights = tmp_path / "run" / "weights" / "final"
    weights.mkdir(parents=True)
    with pytest.raises(SettingsError, match=str(weights)):
        lagrpo.evaluate(tmp_path / "run", ROWS, [correct])


def test_evaluation_of_missing_data_is_a_settings_error(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"nosuch\.jsonl"):
        lagrpo.evaluate(model, "nosuch.jsonl", [correct])


def test_table_of_runs_has_what_differs_and_the_last_results(model, tmp_path):
    results = {}
    for name, batches, rate in (("a", 2, 1e-2), ("b", 3, 1e-3)):
        settings = tiny_settings(
            model,
            tmp_path / "runs",
            run={"name": name},
            schedule={"batches": batches},
            optimizer={"learning_rate": rate},
        )
        results[name] = lagrpo.train(settings)
    table = lagrpo.compare([result.run for result in results.values()], last=2)
    assert table.index.tolist() == ["a", "b"]
    assert table.columns[:2].tolist() == ["schedule.batches", "optimizer.learning_rate"]
    assert table["optimizer.learning_rate"].tolist() == [1e-2, 1e-3]
    assert table["batches"].tolist() == [2, 3]
    for name, result in results.items():
        rewards = [batch["reward"] for batch in load_metrics(result.run)[-2:]]
        assert table.loc[name, "reward"] == pytest.approx(math.fsum(rewards) / 2)
        assert result.after is not None
        for end in ("", "_low", "_high"):
            assert table.loc[name, f"eval/pass@1{end}"] == result.after[f"pass@1{end}"]
    assert lagrpo.compare(str(results["a"].run), last=2)["batches"].tolist() == [2]
    with pytest.raises(RunNotFoundError, match="there is no run at"):
        lagrpo.compare([tmp_path / "nosuch"])
