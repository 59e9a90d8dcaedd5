"""Settings read and written: one validation whatever the source, and a message that says where and what."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagrpo.errors import SettingsError
from lagrpo.settings.schema import EvalSettings, Settings
from lagrpo.settings.toml import list_settings, load_settings, to_toml, validate

DEFAULTS = Settings()


def complaint(tmp_path, text: str, overrides: dict | None = None) -> str:
    """What is said about a settings file, with the name of the file shortened."""
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        load_settings(path, overrides)
    return str(error.value).replace(str(path), "a.toml")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    st.builds(
        dict,
        run=st.builds(dict, seed=st.integers(-(2**62), 2**62), output_dir=TEXT, save_weights=st.booleans()),
        task=st.builds(
            dict,
            system_prompt=st.none() | TEXT,
            digits=st.none() | st.integers(1, 4),
            operations=st.none() | st.lists(st.sampled_from("+-*"), max_size=3),
        ),
        optimizer=st.builds(dict, learning_rate=st.floats(1e-300, 1e300), warmup_steps=st.integers(0, 10**9)),
    )
)
def test_what_is_written_is_read_back(values):
    settings = Settings.model_validate(values)
    assert load_settings(tomllib.loads(to_toml(settings))) == settings


def test_a_file_and_overrides(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[schedule]\nsync_every = 3\nnum_iterations = 2\n[task]\ndigits = 2\noperations = ["+", "-"]\n')
    settings = load_settings(path, {"schedule": {"sync_every": "10"}, "task": {"digits": None, "operations": ["*"]}})
    assert (settings.schedule.sync_every, settings.schedule.num_iterations) == (10, 2)
    assert (settings.task.digits, settings.task.operations) == (None, ("*",))
    assert load_settings(path).schedule.sync_every == 3
    assert load_settings() == DEFAULTS


def test_an_override_can_mend_what_the_file_contradicts(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[rollout]\nnum_generations = 200\n")
    assert load_settings(path, {"rollout": {"max_num_seqs": "256"}}).rollout.max_num_seqs == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schedul]\nsync_every = 1", "a.toml: unknown setting 'schedul'; did you mean 'schedule'?"),
        (
            "[schedule]\nsync_evry = 1",
            "a.toml: unknown setting 'schedule.sync_evry'; did you mean 'schedule.sync_every'?",
        ),
        (
            "[schedule]\nlearning_rate = 1.0",
            "a.toml: unknown setting 'schedule.learning_rate'; did you mean 'optimizer.learning_rate'?",
        ),
        (
            "[rollout]\ngenerations = 4",
            "a.toml: unknown setting 'rollout.generations'; did you mean 'rollout.num_generations'?",
        ),
        ("[run]\ndir = 4", "a.toml: unknown setting 'run.dir'; did you mean 'run.output_dir'?"),
        (
            "[optimizer]\nadamw = 1.0",
            "a.toml: unknown setting 'optimizer.adamw'; [optimizer] has optimizer.learning_rate, ",
        ),
        (
            "[optimizer]\ntokens = 9",
            "a.toml: unknown setting 'optimizer.tokens'; did you mean 'optimizer.micro_batch_tokens'?",
        ),
        ("[vllm]\ndelivery = 9", "a.toml: unknown setting 'vllm.delivery'; [vllm] has vllm.urls, "),
        ("[nothing]\nlike = 1", "a.toml: unknown setting 'nothing'; there are run, checkpoint, "),
        ("learning_rate = 1.0", "a.toml: unknown setting 'learning_rate'; did you mean 'optimizer.learning_rate'?"),
        (
            "schedule = 3",
            "a.toml: schedule is a section, not a setting: set schedule.kind, schedule.sync_every, schedule.",
        ),
        ('[optimizer]\nlearning_rate = "x"', "a.toml: optimizer.learning_rate = 'x': Input should be a valid number"),
        ("[optimizer]\nlearning_rate = -1.0", "a.toml: optimizer.learning_rate = -1.0: Input should be greater than 0"),
        ("[optimizer]\nlearning_rate = inf", "a.toml: optimizer.learning_rate = inf: Input should be a finite number"),
        ('[model]\ndtype = "bf16"', "a.toml: model.dtype = 'bf16': Input should be 'auto', 'bfloat16' or 'float32'"),
        ('[task]\noperations = ["+", "/"]', "a.toml: task.operations.1 = '/': Input should be '+', '-' or '*'"),
        ("[schedule]\nsync_every = 0", "a.toml: schedule: sync_every = 0 never syncs weights: use at least 1"),
        (
            "[rollout]\nnum_generations = 200",
            "a.toml: rollout.max_num_seqs = 128 is less than rollout.num_generations = 200",
        ),
        ("[schedule", "a.toml: not valid TOML: "),
    ],
)
def test_complaints_about_a_file(tmp_path, text, message):
    assert complaint(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", {"schedule": {"sync_every": "0"}}, "command line: schedule: sync_every = 0 never syncs weights"),
        ("", {"schedule": {"sync_evry": "0"}}, "command line: unknown setting 'schedule.sync_evry'"),
        ("[schedule]\nnum_iterations = 0", {"schedule": {"sync_every": "2"}}, "a.toml: schedule.num_iterations = 0: "),
        (
            "[schedule]\nnum_iterations = 1",
            {"schedule": {"num_iterations": "0"}},
            "command line: schedule.num_iterations = '0': ",
        ),
        ("", {"schedule": {"num_iterations": None}}, "command line: schedule.num_iterations = None: "),
        (
            "[schedule]\nnum_iterations = 1",
            {"schedule": {"sync_every": "0"}},
            "a.toml and command line: schedule: sync_every = 0 never syncs weights",
        ),
    ],
)
def test_complaints_name_whose_fault_it_is(tmp_path, text, overrides, message):
    assert complaint(tmp_path, text, overrides).startswith(message)


def test_every_complaint_has_a_line(tmp_path):
    lines = complaint(
        tmp_path, "[schedule]\nsync_evry = 1\nnum_iterations = 0\n[optimizer]\nlearning_rate = 0.0"
    ).splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == [
        "schedule.num_iterations",
        "unknown",
        "optimizer.learning_rate",
    ]


def test_files_that_are_none(tmp_path):
    with pytest.raises(SettingsError, match=r"nosuch.toml: no such settings file"):
        load_settings(tmp_path / "nosuch.toml")
    with pytest.raises(SettingsError, match=r"cannot be read as a settings file: Is a directory"):
        load_settings(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(SettingsError, match=r"latin.toml: not valid TOML: .*utf-8"):
        load_settings(tmp_path / "latin.toml")


HOSTILE = {
    "UTF-16": ("[run]\nseed = 1".encode("utf-16"), r"a\.toml: not valid TOML: "),
    "NUL": (b"[run]\n\0", r"a\.toml: not valid TOML: "),
    "nested": (b"a = " + b"[" * 10**5, r"a\.toml: not valid TOML: .*nested too deeply"),
    "huge integer": (b"run.seed = 1" + b"0" * 5000, r"a\.toml: not valid TOML: .*digits"),
    "huge integer, hexadecimal": (b"run.seed = 0x" + b"f" * 5000, r"run\.seed: it is an integer of at most 64 bits"),
    "huge integer for a text": (b"run.name = 0x" + b"f" * 5000, r"run\.name = a int too large to show"),
    "key twice": (b"[run]\nseed = 1\nseed = 2", r"a\.toml: not valid TOML: Cannot overwrite a value"),
    "a long text": (b"run.seed = '" + b"x" * 10**6 + b"'", r"run\.seed = 'x+ …: Input should be a valid"),
    "a broken link": (lambda path: path.symlink_to("nowhere"), "no such settings file"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("make", "message"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_settings_file_is_refused_in_one_line(tmp_path, make, message):
    path = tmp_path / "a.toml"
    make(path) if callable(make) else path.write_bytes(make)
    with pytest.raises(SettingsError, match=message) as refused:
        load_settings(path)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600


def test_a_mark_of_byte_order_and_other_line_ends_do_no_harm(tmp_path):
    (tmp_path / "a.toml").write_bytes("\ufeff[run]\r\nseed = 7\r\n".encode())
    assert load_settings(tmp_path / "a.toml").run.seed == 7


def test_the_same_names_and_messages_for_an_evaluation():
    with pytest.raises(SettingsError, match=r"^command line: unknown setting 'sample'; did you mean 'samples'\?"):
        validate(EvalSettings, {}, {"sample": "5"}, "command line")
    assert {"samples", "task.name", "verifier.workers"} <= set(list_settings(EvalSettings))
