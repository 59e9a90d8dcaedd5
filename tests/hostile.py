"""What strangers may hand us, drawn by hypothesis: for the tests of test_properties.py and for the fuzzer, fuzz.py.

A target is a strategy of inputs and what is done with one. It either succeeds, with what it checks, or raises one of
its refusals, whose message is one line. Anything else is a failure."""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from rich.console import Console
from tiny import tiny_policy

from lagrpo.backends.layout import PackedLayout
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.errors import SettingsError
from lagrpo.model.model import Packed
from lagrpo.runs import load_evaluations, load_events, load_metrics, load_rollouts
from lagrpo.runs.reading import load_reward_range
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.settings.arguments import parse
from lagrpo.settings.schema import Settings, TaskSettings
from lagrpo.settings.toml import list_settings, load_settings, to_toml, validate
from lagrpo.tasks import Unjudgeable, load_task
from lagrpo.tasks.arithmetic import judge as judge_arithmetic
from lagrpo.tasks.countdown import judge as judge_countdown
from lagrpo.tasks.custom import judge as judge_exact
from lagrpo.tasks.gsm8k import judge as judge_number
from lagrpo.terminal.show import show
from lagrpo.training.checks import check_settings
from lagrpo.training.explain import meaning
from lagrpo.types import Completion, Group, Outcome, Prompt

UNHURRIED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
LINES_OF_SETTINGS = 1000
"""A line for each complaint about settings, and there may be many."""


@dataclass(frozen=True)
class Target:
    """`run(input)` succeeds, or raises one of `refusals` with a message of at most `lines` lines."""

    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], None]
    refusals: tuple[type[Exception], ...]
    lines: int = 1

    def __call__(self, value: Any) -> bool:
        """Whether the input was taken. Raises AssertionError for a refusal that is not one of one line."""
        try:
            self.run(value)
        except self.refusals as error:
            said = str(error).splitlines()
        else:
            return True
        assert 1 <= len(said) <= self.lines, f"{len(said)} lines: {said}"
        return False


TARGETS: dict[str, Target] = {}


def target(inputs: st.SearchStrategy[Any], *refusals: type[Exception], lines: int = 1) -> Callable[[Any], Any]:
    def note(run: Callable[[Any], None]) -> Callable[[Any], None]:
        TARGETS[run.__name__] = Target(inputs, run, refusals, lines)
        return run

    return note


_held = tempfile.TemporaryDirectory(prefix="hostile-")


@functools.cache
def folder(name: str) -> Path:
    """A directory for the files of a target, until this process ends."""
    path = Path(_held.name) / name
    path.mkdir()
    return path


# Inputs

HUGE = "<an integer of 5,000 digits>"
"""Stands for a number that Python neither reads nor writes; other programs do."""
TEXT = st.text(max_size=12) | st.text("0123456789.,-+/*=#:{}\\[]()$% \nabc", max_size=30)
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.integers(-(10**400), 10**400),
    st.sampled_from([2**31, 2**63, 2**64, 10**4000, HUGE]),
    st.floats(),
    TEXT,
)
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
COLUMNS = {
    "question": TEXT,
    "answer": TEXT | st.integers() | st.floats(),
    "prompt": TEXT | st.just([{"role": "user", "content": "2?"}]),
    "prompt_text": TEXT,
    "prompt_token_ids": st.lists(st.integers(-1, 110), max_size=4),
    "completion": TEXT,
    "text": TEXT,
    "token_ids": st.lists(st.integers(-1, 110), max_size=3),
    "logp_alpha": st.lists(st.none() | st.floats(), max_size=3),
    "sampled": st.lists(st.booleans(), max_size=3),
    "reward": st.none() | st.floats(),
    "gold": TEXT,
    "finished": st.booleans(),
    "outcome": st.sampled_from(["scored", "failed", "unscored"]),
    "epoch": st.integers(),
}
SOUND = {"question": "1?", "answer": "2", "prompt": "1?", "completion": "2", "reward": 1.0}


@st.composite
def rows(draw: Any) -> list[dict[str, Any]]:
    """Rows that are mostly as they should be."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        names = draw(st.sets(st.sampled_from(sorted(COLUMNS)), max_size=4))
        given = {name: draw(COLUMNS[name] if draw(st.integers(0, 4)) else VALUE) for name in sorted(names)}
        left_out = draw(st.sets(st.sampled_from(sorted(SOUND)), max_size=1))
        found.append({name: value for name, value in SOUND.items() if name not in left_out} | given)
    return found


def written(value: Any) -> str:
    """JSON of it, with a number in the place of HUGE."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return "1" + "0" * 5000 if value == HUGE else json.dumps(value)


@st.composite
def damaged(draw: Any, sound: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were sound until some were cut, changed, put in or doubled."""
    content = draw(sound)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(0, 8)))
        how = draw(st.integers(0, 3))
        new = (b"", draw(st.binary(max_size=6)), content[at:end] * 3, bytes(b ^ 0x41 for b in content[at:end]))[how]
        content = content[:at] + new + content[end:]
    return content


def as_lines(found: list[dict[str, Any]]) -> bytes:
    return "".join(written(row) + "\n" for row in found).encode()


JSONL = st.one_of(
    rows().map(as_lines),
    damaged(rows().map(as_lines)),
    damaged(rows().map(as_lines).map(lambda content: gzip.compress(content, mtime=0))),
    rows().map(as_lines).flatmap(lambda content: st.sampled_from(["utf-16", "utf-8-sig"]).map(content.decode().encode)),
    st.binary(max_size=60),
)
_CELL = st.text('ab1.,"\n\r \0é', max_size=5)
CSV = damaged(
    st.lists(st.lists(_CELL, min_size=2, max_size=3).map(",".join), max_size=4).map(
        lambda lines: "\n".join(["question,answer", "1?,2", *lines]).encode()
    )
)


@functools.cache
def parquet_file(kind: str) -> bytes:
    """A sound file: of a run's rollouts, or of rows."""
    sink = io.BytesIO()
    if kind == "rows":
        table = pa.Table.from_pylist([SOUND] * 3)
    else:
        completion = Completion(
            torch.tensor([5, 1]), torch.tensor([-0.5, -1.0]), torch.tensor([3, 3]), True, "2", Outcome.scored(1.0)
        )
        group = Group(Prompt(0, ({"role": "user", "content": "1?"},), "2", (7, 8)), (completion,) * 2)
        found = rollout_rows([group], [[{}, {}]], batch=1, stage=1, pi_k_version=3)
        table = pa.Table.from_pylist(list(found), schema=rollout_schema())
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


_SETTINGS = list_settings(Settings)
_NAMES = sorted(_SETTINGS)
_OF_A_KIND: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 200) | st.integers(-(2**63), 2**63 - 1),
    float: st.floats(0, 2) | st.floats(),
    bool: st.booleans(),
    str: TEXT,
}


def fitting(name: str) -> st.SearchStrategy[Any]:
    """Values of the type that a setting has, in its range or not."""
    kinds = [_SETTINGS[name].annotation, *get_args(_SETTINGS[name].annotation)] if name in _SETTINGS else []
    choices = [choice for kind in kinds for choice in get_args(kind) if isinstance(choice, str)]
    choices += [choice for choice in kinds if isinstance(choice, str)]
    if choices:
        return st.sampled_from(choices)
    return next((_OF_A_KIND[kind] for kind in kinds if kind in _OF_A_KIND), VALUE)


NAME = st.sampled_from(_NAMES) | TEXT | st.sampled_from(_NAMES).map(lambda name: name + "s")


@st.composite
def mappings(draw: Any) -> dict[Any, Any]:
    """Settings by section and name, a few of them with a value of any kind."""
    found: dict[Any, Any] = {}
    for _ in range(draw(st.integers(0, 4))):
        section, _, leaf = (name := draw(NAME)).partition(".")
        below = found.setdefault(section, {})
        if leaf and isinstance(below, dict):
            below[leaf] = draw(fitting(name) if draw(st.integers(0, 5)) else VALUE)
        elif draw(st.integers(0, 9)) == 0:
            found[draw(st.integers() | st.none() | TEXT)] = draw(VALUE)
    return found


_TOML_VALUE = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.booleans().map(lambda value: str(value).lower()),
    TEXT.map(json.dumps),
    st.sampled_from(["1" * 5000, "0x" + "f" * 5000, "[" * 2000, "1979-05-27", "{a = 1}", "[1, 'x']", "'auto'"]),
)
TOML = st.lists(st.tuples(NAME, _TOML_VALUE), max_size=5).map(
    lambda pairs: "\n".join(f"{name} = {value}" for name, value in pairs).encode("utf-8", "replace")
)
WORD = st.one_of(NAME.map("--{}".format), TEXT, st.tuples(NAME, TEXT).map(lambda pair: f"--{pair[0]}={pair[1]}"))


# Targets


def _check_settings(settings: Settings) -> None:
    """They can be written, read again and explained, or are refused before anything is loaded."""
    text = to_toml(settings)
    text.encode()
    path = folder("settings") / "again.toml"
    path.write_text(text, encoding="utf-8", newline="")
    assert load_settings(path) == settings
    meaning(settings, check_settings(settings))


@target(st.one_of(TOML, damaged(TOML), st.binary(max_size=40)), SettingsError, lines=LINES_OF_SETTINGS)
def settings_files(content: bytes) -> None:
    path = folder("settings") / "a.toml"
    path.write_bytes(content)
    _check_settings(load_settings(path))


@target(mappings(), SettingsError, lines=LINES_OF_SETTINGS)
def settings_mappings(values: dict[Any, Any]) -> None:
    _check_settings(load_settings(values))


@target(st.lists(WORD, max_size=6), SettingsError, lines=LINES_OF_SETTINGS)
def command_lines(words: list[str]) -> None:
    given = parse(Settings, words, {"--help", "--dry-run"})
    _check_settings(validate(Settings, {}, given.overrides, "command line"))


def _load(name: str, file: str, content: bytes) -> None:
    """A task that reads the content: every prompt can be asked, and every gold answer recorded."""
    data = folder(name)
    (data / file).write_bytes(content)
    (data / "test.jsonl").write_text(json.dumps(SOUND) + "\n")
    columns = {"prompt_column": "question", "answer_column": "answer", "reward": "exact"} if name != "gsm8k" else {}
    task = load_task(TaskSettings(name=name.partition("-")[0], data=str(data), **columns), 0)
    for index in range(task.size("train")):
        prompt = task.prompt("train", index)
        json.dumps([prompt.gold, prompt.messages], ensure_ascii=False).encode()


@target(JSONL, ValueError, OSError)
def task_gsm8k(content: bytes) -> None:
    _load("gsm8k", "train.jsonl", content)


@target(JSONL, ValueError, OSError)
def task_custom_jsonl(content: bytes) -> None:
    _load("custom", "train.jsonl", content)


@target(CSV, ValueError, OSError)
def task_custom_csv(content: bytes) -> None:
    _load("custom-csv", "train.csv", content)


@target(damaged(st.builds(parquet_file, st.just("rows"))), ValueError, OSError)
def task_custom_parquet(content: bytes) -> None:
    _load("custom-parquet", "train.parquet", content)


@functools.cache
def policy() -> Any:
    return tiny_policy()


@target(JSONL, ValueError, OSError)
def offline_completions(content: bytes) -> None:
    """And what was taken can be recorded by a run."""
    path = folder("offline") / "data.jsonl"
    path.write_bytes(content)
    found = OfflineData(read_records(path), policy(), G=4, seed=0, max_prompt_tokens=64)
    for group in found.batch(1, len(found)):
        judged = [c for c in group.completions if c.outcome is not None]
        new = Group(group.prompt, tuple(judged), source="file")
        listed = list(rollout_rows([new], [[{}] * len(judged)], batch=1, stage=1, pi_k_version=0))
        pa.Table.from_pylist(listed, schema=rollout_schema())


@target(damaged(st.builds(parquet_file, st.sampled_from(["rows", "rollouts"]))), ValueError, OSError)
def offline_parquet(content: bytes) -> None:
    path = folder("offline") / "data.parquet"
    path.write_bytes(content)
    read_records(path)


_LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 6), max_size=4)), max_size=4)


@target(_LENGTHS, ValueError)
def packing(lengths: list[tuple[int, list[int]]]) -> None:
    """Every token of a packed row stands where its sequence has it, and the row before a token predicts it."""
    sound = all(prompt >= 1 and all(count >= 1 for count in counts) for prompt, counts in lengths)
    ids = iter(range(10**6))
    groups = [([next(ids) for _ in range(p)], [torch.tensor([next(ids) for _ in range(c)]).long() for c in counts])
              for p, counts in lengths]  # fmt: skip
    if not sound or not groups:
        PackedLayout.build(lengths)
        assert sound, "a sequence without tokens was packed"
        return
    packed = Packed.build(groups)
    layout, row = packed.layout, packed.input_ids.tolist()
    whole = [(prompt, c.tolist()) for prompt, completions in groups for c in completions]
    assert packed.token_ids.tolist() == [token for _, completion in whole for token in completion]
    places = {token: at for prompt, c in whole for at, token in enumerate([*prompt, *c])}
    places |= {token: at for prompt, _ in groups for at, token in enumerate(prompt)}
    assert layout.position_ids.tolist() == [places[token] for token in row]
    before = [([prompt[-1], *completion])[at] for prompt, completion in whole for at in range(len(completion))]
    assert [row[at] for at in layout.logit_rows.tolist()] == before
    assert [row[at] for at in layout.last_prompt_rows.tolist()] == [prompt[-1] for prompt, _ in groups]
    assert layout.rows == len(row)
    assert layout.longest == max(p + max(counts, default=0) for p, counts in lengths)


_GOLD = TEXT | st.integers(-(10**400), 10**400) | st.floats() | VALUE


@target(st.tuples(st.text(max_size=60) | TEXT, _GOLD), Unjudgeable, lines=100)
def judges(answer: tuple[str, Any]) -> None:
    """Without `math`, whose answers may take for ever: the verifier keeps its deadline."""
    for judge in (judge_number, judge_exact, judge_arithmetic, judge_countdown):
        try:
            reward = judge(*answer)
        except (Unjudgeable, ValueError, TypeError, KeyError):  # what a judge raises counts as no verdict
            continue
        assert isinstance(reward, float)
        assert math.isfinite(reward)


@st.composite
def runs(draw: Any) -> dict[str, bytes]:
    """The files of a run, up to two of which are not as they should be."""
    found = {
        "config.toml": b"[task]\nreward_range = [0.0, 1.0]\n",
        "metrics.jsonl": b'{"batch": 1, "reward_mean": 0.5}\n',
        "events.jsonl": b'{"event": "sync", "batch": 1}\n',
        "evaluations/before.json": b'{"name": "before", "batch": 0}',
        "rollouts/step-000001.parquet": parquet_file("rollouts"),
    }
    for name in draw(st.sets(st.sampled_from(sorted(found)), max_size=2)):
        other = {".toml": TOML, ".parquet": st.builds(parquet_file, st.just("rows"))}.get(Path(name).suffix, JSONL)
        found[name] = draw(st.one_of(damaged(st.just(found[name])), other))
    return found


@target(runs(), ValueError, OSError, lines=LINES_OF_SETTINGS)
def run_files(files: dict[str, bytes]) -> None:
    """Everything that reads a run: each is refused or not on its own."""
    run = folder("run")
    shutil.rmtree(run)
    for name, content in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)
    first: Exception | None = None
    readers = (load_metrics, load_events, load_evaluations, load_reward_range, load_rollouts, _shown)
    for reader in readers:
        try:
            reader(run)
        except (ValueError, OSError) as error:
            first = first or error
    if first is not None:
        raise first


def _shown(run: Path) -> None:
    show(run, console=Console(file=io.StringIO()))
