"""Changes since a run started: changed data stops a resume, changed code is named, the rest is
restored."""

from __future__ import annotations

import importlib
import json
import linecache
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from chaos import merged
from running import tiny_settings
from sample_rewards import correct
from test_resume import contents
from tiny import TURNS, save_tiny

import lagrpo
from lagrpo.core.inputs import LossInputs
from lagrpo.data.fingerprint import (
    check_places,
    check_visited,
    digest_places,
    digest_rows,
    digest_visited,
    value_text,
)
from lagrpo.errors import SettingsError
from lagrpo.resume.model_files import check_model_files, read_model_files
from lagrpo.runs import load_events
from lagrpo.runs.environment import read_environment, write_environment
from lagrpo.startup.arguments import is_loadable
from lagrpo.tasks import RowTask
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.types import JsonObject

CODE = '''
from lagrpo.tasks import RowTask, StepResult


def share(text):
    return len(set(text)) / 8


def score(completion, answer):
    return share(completion)


def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word


class Game:
    first = "go"

    def reset(self, prompt, key):
        return [{"role": "user", "content": self.first}]

    def step(self, text):
        return StepResult(reward=len(text) % 5 / 5, done=True)


def own_loss(x):
    return x.advantage * (x.logp - x.rollout_logp).exp()


def load_game(settings, seed):
    rows = {split: [f"{n}?" for n in range(4)] for split in ("train", "test")}
    return RowTask("game", rows, lambda row: (row, row), score, environment=Game)
'''
ROWS = [{"question": f"{n}+1?", "answer": str(n + 1), "level": n % 3} for n in range(20)]
SMALL: dict[str, JsonObject] = {
    "run": {"name": "run"},
    "checkpoint": {"save_every": 1, "save_minutes": 0},
    "schedule": {"batches": 1},
    "rollout": {"max_prompt_length": 600},
    "eval": {"at_start": False},
}
LONGER = {"schedule.batches": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for long sequences, because environments may say much."""
    return save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[..., None]:
    """Writes the files of a user: code, rows, a chat template. What was imported is forgotten, as
    by a new process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(
        code: str = CODE,
        rows: Sequence[Any] = ROWS,
        template: str = TURNS,
        module: str = "user_code",
    ) -> None:
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
        (tmp_path / "rows.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8"
        )
        (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()
        linecache.clearcache()

    return write


@pytest.fixture
def start(model, tmp_path, write):
    """Makes a run of one batch from the user's files."""

    def start(task: JsonObject | None = None, **sections: Any) -> Path:
        write()
        rows = {
            "name": "custom",
            "data": str(tmp_path / "rows.jsonl"),
            "rewards": ["user_code:score"],
        }
        own_task = task is not None and "name" in task
        base_sections = {
            "model": {"chat_template": str(tmp_path / "chat.jinja")},
            "task": task if own_task else rows | (task or {}),
        }
        return lagrpo.train(
            merged(tiny_settings(model, tmp_path), SMALL, base_sections, sections)
        ).run

    return start


def resumed_code(run: Path) -> list[str]:
    """The changed code that the last resume recorded."""
    return [event for event in load_events(run) if event["event"] == "resumed"][-1]["code"]


# Data


def with_answer(n: int, answer: str) -> list[JsonObject]:
    return [row | {"answer": answer} if k == n else row for k, row in enumerate(ROWS)]


CHANGED_ROWS: dict[str, tuple[list[JsonObject], str]] = {
    "one answer": (with_answer(11, "99"), "train split has other values of answer"),
    "a test answer": (with_answer(1, "99"), "test split has other values of answer"),
    "a prompt": ([{**ROWS[0], "question": "0+1"}, *ROWS[1:]], "other values of question"),
    "another column": ([{**ROWS[0], "level": 9}, *ROWS[1:]], "other values of level"),
    "a new column": ([{**row, "id": 1} for row in ROWS], "other values of id"),
    "a row more": ([*ROWS, ROWS[0]], "train split has 19 rows, not 18"),
    "the order": (ROWS[::-1], "other values of answer, level, question"),
}


def places(rows: list[JsonObject]) -> JsonObject:
    """The digests of a task with two test rows."""
    splits = {"train": rows[2:], "test": rows[:2]}
    return digest_places({MAIN_TASK: RowTask("rows", splits, lambda row: ("", ""), len)})


def test_a_set_has_the_same_text_in_every_process():
    """Python orders the texts of a set differently in each process."""
    assert value_text({"answers": {"yes", "ja", "oui"}}) == value_text(
        {"answers": {"oui", "yes", "ja"}}
    )
    assert value_text({"b", "a"}) == value_text(['"a"', '"b"'])


@pytest.mark.parametrize(("rows", "change"), CHANGED_ROWS.values(), ids=CHANGED_ROWS)
def test_changed_rows_are_named(rows, change):
    check_places(places(ROWS), places(ROWS))
    with pytest.raises(ValueError, match=change):
        check_places(places(ROWS), places(rows))


def test_rows_of_evaluation_sets_are_named():
    before = RowTask("set", {"train": ROWS, "test": ROWS}, lambda row: ("", ""), len)
    now = RowTask("set", {"train": ROWS[1:], "test": with_answer(3, "99")}, before.ask, len)
    with pytest.raises(ValueError, match="evaluation set hard"):
        check_places(digest_places({"hard": before}), digest_places({"hard": now}))


def test_test_split_does_not_count_without_evaluations():
    task = {MAIN_TASK: RowTask("rows", {"train": ROWS, "test": ROWS}, lambda row: ("", ""), len)}
    assert [*digest_places(task, evaluates=False)] == ["train split"]
    assert [*digest_places(task)] == ["train split", "test split"]
    check_places(digest_places(task), digest_places(task, evaluates=False))


@pytest.mark.parametrize(
    "rows",
    [
        [dict(reversed(row.items())) for row in ROWS],
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list([*ROWS, *ROWS]).select(range(20)),
    ],
    ids=["other order of keys", "dataset", "part of a dataset"],
)
def test_same_rows_have_the_same_digests(rows):
    assert digest_rows(rows) == digest_rows(ROWS)


def test_visited_prompts_are_compared_as_far_as_the_run_went():
    visited = [{"tokens": "1", "answers": "1"}, {"tokens": "2", "answers": "2"}]
    check_visited(digest_visited(visited[:1]), visited)
    with pytest.raises(ValueError, match=r"other answers .*\(reward a changed, too\)"):
        check_visited(
            digest_visited(visited), [{"tokens": "1", "answers": "3"}, visited[1]], ["reward a"]
        )


def test_objects_in_rows_have_no_address_in_their_digest():
    assert digest_rows([object()]) == digest_rows([object()])


def edit_json(file: str, **entries: Any) -> Callable[[Path], object]:
    """Changes entries of a JSON file of a model."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / file).read_bytes()) | entries
        (folder / file).write_text(json.dumps(content), encoding="utf-8")

    return edit


def swap_tokens(folder: Path) -> None:
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content), encoding="utf-8")


def remove_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()


ROPE = {"rope_theta": 500.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        pytest.param(
            edit_json("generation_config.json", eos_token_id=[1, 20]),
            r"generation_config.json: eos_token_id was \[1, 2\], now \[1, 20\]",
            id="end tokens",
        ),
        pytest.param(
            edit_json("generation_config.json", eos_token_id=[*range(99)]),
            "generation_config.json: eos_token_id",
            id="many end tokens",
        ),
        pytest.param(remove_generation_config, "eos_token_id was .*, now missing", id="no ends"),
        pytest.param(
            edit_json("config.json", rms_norm_eps=0.5),
            "config.json: rms_norm_eps was 1e-06, now 0.5",
            id="epsilon",
        ),
        pytest.param(
            edit_json("config.json", rope_parameters=ROPE),
            "config.json: rope_parameters was",
            id="rope",
        ),
        pytest.param(
            edit_json("config.json", rope_theta=500.0),
            "config.json: rope_theta was missing, now 500.0",
            id="rope by its older name",
        ),
        pytest.param(
            edit_json("config.json", hidden_act="relu"),
            'config.json: hidden_act was "silu", now "relu"',
            id="activation",
        ),
        pytest.param(
            edit_json("tokenizer_config.json", eos_token="<stop>"),
            "tokenizer_config.json: eos_token",
            id="end token of the tokenizer",
        ),
        pytest.param(swap_tokens, "tokenizer.json: model was digest", id="vocabulary"),
    ],
)
def test_changed_file_of_the_model_is_named_with_its_key(model, tmp_path, edit, change):
    folder = shutil.copytree(model, tmp_path / "model")
    before = read_model_files(str(folder))
    edit(folder)
    with pytest.raises(ValueError, match=change):
        check_model_files(before, read_model_files(str(folder)))


def rewrite(folder: Path) -> None:
    """Writes all JSON files again, with keys in another order and other white space."""
    for file in folder.glob("*.json"):
        content = json.loads(file.read_bytes())
        text = json.dumps(dict(reversed(content.items())), indent=7)
        file.write_text(text, encoding="utf-8")


def rename_dtype(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_bytes())
    content["torch_dtype"] = content.pop("dtype")
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(rewrite, id="order and white space"),
        pytest.param(rename_dtype, id="older name of dtype"),
        pytest.param(edit_json("config.json", transformers_version="6.0"), id="version"),
        pytest.param(edit_json("config.json", _name_or_path="elsewhere"), id="path"),
        pytest.param(edit_json("config.json", hidden_size=32.0), id="form of a number"),
        pytest.param(edit_json("config.json", use_cache=False), id="cache"),
    ],
)
def test_file_of_the_model_that_says_the_same_may_change(model, tmp_path, edit):
    folder = shutil.copytree(model, tmp_path / "model")
    # A checkpoint has them as JSON.
    before = json.loads(json.dumps(read_model_files(str(folder))))
    edit(folder)
    check_model_files(before, read_model_files(str(folder)))


def test_resume_stops_for_a_changed_answer_and_leaves_the_run_as_it_is(start, write, capsys):
    run = start()
    before = contents(run)
    write(rows=with_answer(11, "99"))
    capsys.readouterr()
    with pytest.raises(SettingsError, match="other values of answer"):
        lagrpo.train(settings=LONGER, resume=run, trust_run_code=True)
    assert contents(run) == before
    assert "loading" not in capsys.readouterr().out, "it stops before the model is loaded"
    write(rows=[dict(reversed(row.items())) for row in ROWS])
    assert lagrpo.train(settings=LONGER, resume=run, trust_run_code=True).batches == 2


def test_changed_offline_completion_stops_a_resume(start, write, tmp_path):
    rows = [
        {"prompt": f"{n}?", "completion": str(m), "reward": m} for n in range(3) for m in range(4)
    ]
    file = tmp_path / "offline.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run = start(offline={"data": str(file)}, loss={"recipe": "asymre"})
    rows[7]["reward"] = 9
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with pytest.raises(SettingsError, match="offline data"):
        lagrpo.train(settings=LONGER, resume=run, trust_run_code=True)


# Code


GAME = {"name": "user_code:load_game"}
TOOLS = {"tools": ["user_code:lookup"]}
OWN_LOSS = {"recipe": "user_code:own_loss"}
FILE = "user_code.py"
BUILTIN_REWARD = {"rewards": ["exact"]}
CHANGED_CODE: dict[str, tuple[JsonObject, tuple[str, str]]] = {
    "a reward": ({}, ("return share(", "return 1 - share(")),
    "a task": ({"task": GAME}, ('RowTask("game"', 'RowTask("a game"')),
    "a tool": ({"task": TOOLS | BUILTIN_REWARD}, ("return word", "return word * 2")),
    "a loss": ({"task": BUILTIN_REWARD, "loss": OWN_LOSS}, ("x.advantage *", "2 * x.advantage *")),
}


@pytest.mark.parametrize(("sections", "edit"), CHANGED_CODE.values(), ids=CHANGED_CODE)
def test_changed_file_is_named_and_the_run_goes_on(start, write, capsys, sections, edit):
    run = start(**sections)
    assert set(read_environment(run)["sources"]) >= {FILE, "chat template"}
    write(CODE.replace(*edit))
    assert lagrpo.train(settings=LONGER, resume=run, trust_run_code=True).batches == 2
    assert f"changed since the run started: {FILE};" in capsys.readouterr().out
    assert resumed_code(run) == [FILE]
    assert any(FILE in event["text"] for event in load_events(run) if event["event"] == "warning")


@pytest.mark.parametrize(
    ("task", "change", "name"),
    [
        ({}, {"template": TURNS.replace("assistant", "Assistant")}, "chat template"),
        (GAME, {"code": CODE.replace('"go"', '"run"')}, FILE),
        (TOOLS, {"code": CODE.replace("Look a word up", "Find a word")}, FILE),
    ],
    ids=["template", "opening of an environment", "docstring of a tool"],
)
def test_code_that_changes_the_prompts_stops_a_resume(start, write, task, change, name):
    run = start(task=task)
    write(**change)
    with pytest.raises(SettingsError, match=rf"other tokens .*\({name} changed"):
        lagrpo.train(settings=LONGER, resume=run, trust_run_code=True)


def test_template_that_renders_the_same_is_named(start, write):
    run = start()
    write(template="{# a comment #}" + TURNS)
    lagrpo.train(settings=LONGER, resume=run, trust_run_code=True)
    assert resumed_code(run) == ["chat template"]


def test_run_with_digests_of_functions_resumes_and_says_that_code_is_not_compared(
    start, write, capsys
):
    """As older versions recorded them."""
    run = start()
    environment = read_environment(run)
    template = environment["sources"]["chat template"]
    environment["sources"] = {"reward score": "0123456789abcdef", "chat template": template}
    write_environment(run, environment)
    write(CODE + "# changed")
    lagrpo.train(settings=LONGER, resume=run, trust_run_code=True)
    out = capsys.readouterr().out
    assert "changed since" not in out
    assert "not noticed" in out
    assert resumed_code(run) == []


def test_file_of_a_reward_may_get_another_name_but_not_another_text(start, write):
    run = start()
    write(CODE.replace("/ 8", "/ 9"), module="moved")
    changed = {"task.rewards": ["moved:score"], **LONGER}
    with pytest.raises(SettingsError, match=r"task\.rewards = .*moved:score"):
        lagrpo.train(settings=changed, resume=run, trust_run_code=True)
    write(module="moved")
    assert lagrpo.train(settings=changed, resume=run, trust_run_code=True).batches == 2
    assert resumed_code(run) == []


def test_renamed_reward_is_rejected(start, write):
    run = start()
    write(CODE.replace("def score", "def points"))
    with pytest.raises(SettingsError, match=r"task\.rewards = .*points"):
        lagrpo.train(
            settings={"task.rewards": ["user_code:points"], **LONGER},
            resume=run,
            trust_run_code=True,
        )


# What a resumed run shows, and how it is resumed


def test_last_table_of_a_resumed_run_has_the_evaluation_before(start, capsys):
    run = start(eval={"at_start": True})
    capsys.readouterr()
    lagrpo.train(resume=run, trust_run_code=True)
    output = capsys.readouterr().out
    assert all(text in output for text in ("pass@1 before", "pass@1 after", "paired by prompt"))
    assert "reward curve" in output


class Stop(lagrpo.Callback):
    """Ends a run after its first batch."""

    def on_batch(self, metrics, rollouts) -> None:
        raise RuntimeError("stop")


def closure(weight: float) -> Callable[..., float]:
    def weighted(completion: str, answer: str) -> float:
        return weight * len(completion)

    return weighted


def scaled_loss(scale: float) -> Callable[..., Any]:
    def scaled(x: LossInputs) -> Any:
        return scale * x.advantage * x.logp

    return scaled


FROM_PYTHON: dict[str, tuple[JsonObject, str]] = {
    "memory and closure": ({"data": ROWS, "rewards": [closure(0.5)]}, "data=…, rewards=…"),
    "memory": ({"data": ROWS, "rewards": ["exact"]}, "data=…"),
    "lambda": ({"data": "FILE", "rewards": [lambda completion, answer: 1.0]}, "rewards=…"),
    "loss": ({"data": "FILE", "rewards": ["exact"], "loss": scaled_loss(0.5)}, "loss=…"),
    "task": (
        {"task": RowTask("own", {"train": "abc", "test": "d"}, lambda row: (row, row), correct)},
        "task=…",
    ),
}


@pytest.mark.parametrize(("train_arguments", "call"), FROM_PYTHON.values(), ids=FROM_PYTHON)
def test_run_from_python_says_how_to_resume_it(model, tmp_path, write, train_arguments, call):
    write()
    if train_arguments.get("data") == "FILE":
        train_arguments = train_arguments | {"data": tmp_path / "rows.jsonl"}
    settings = merged(tiny_settings(model, tmp_path), SMALL, {"schedule": {"batches": 2}})
    settings.pop("task")
    with pytest.raises(RuntimeError, match="stop") as error:
        lagrpo.train(settings, **train_arguments, callbacks=[Stop()])
    run = tmp_path / "run"
    assert f"lagrpo.train(resume={str(run)!r}, {call}, callbacks=…)" in error.value.__notes__[-1]
    with pytest.raises(SettingsError) as refused:
        lagrpo.train(resume=run, trust_run_code=True)
    assert f"lagrpo.train(resume={str(run)!r}, {call})" in str(refused.value)
    assert lagrpo.train(resume=run, trust_run_code=True, **train_arguments).batches == 2


def test_functions_of_a_script_and_of_its_directory_are_not_loadable(monkeypatch, tmp_path):
    assert not is_loadable(closure(1.0), "test_changes:closure")
    assert not is_loadable(partial(correct), "sample_rewards:correct")
    (tmp_path / "beside.py").write_text(
        "def score(completion, answer): return 1.0\n", encoding="utf-8"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    from beside import score  # pyright: ignore[reportMissingImports]

    assert not is_loadable(score, "beside:score"), (
        "the directory of the script is first in sys.path"
    )
    monkeypatch.chdir(tmp_path)
    assert is_loadable(score, "beside:score")
    monkeypatch.delitem(sys.modules, "beside")


# Completions without a reward


def test_completions_without_a_reward_are_counted_with_their_reason(model, tmp_path, capsys):
    task = {
        "name": "custom",
        "data": str(tmp_path / "rows.jsonl"),
        "rewards": ["sample_task:sometimes"],
    }
    (tmp_path / "rows.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8"
    )
    result = lagrpo.train(
        tiny_settings(model, tmp_path, task=task, eval={"num_prompts": 2, "num_samples": 4})
    )
    output = capsys.readouterr().out
    events = [event for event in load_events(result.run) if event["event"] == "unscored"]
    batches = [event for event in events if "evaluation" not in event]
    lines = lagrpo.runs.load_metrics(result.run)
    assert [e["count"] for e in batches] == [
        n for line in lines if (n := line["completions/unscored"])
    ]
    assert batches[0]["completions"] == 8
    assert "RuntimeError: not today" in batches[0]["reason"]
    assert output.count("completions are unscored") == 1
    for moment, summary in result.evaluations.items():
        count = summary["unscored"]
        assert count > 0, "the seed makes some of each evaluation unscored"
        assert f"{count} of 8 not scored" in output
        assert [e["count"] for e in events if e.get("evaluation") == moment] == [count]
        records = lagrpo.runs.reading.load_evaluation_records(result.run, moment)
        reasons = [reason for record in records for reason in record["reasons"] if reason]
        assert (len(reasons), reasons[0]) == (count, summary["unscored_reason"])
