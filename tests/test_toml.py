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
        run=st.builds(dict, seed=st.integers(-(2**62), 2**62), directory=TEXT, save_weights=st.booleans()),
        task=st.builds(
            dict,
            system_prompt=st.none() | TEXT,
            digits=st.none() | st.integers(1, 4),
            operations=st.none() | st.lists(st.sampled_from("+-*"), max_size=3),
        ),
        optimizer=st.builds(dict, lr=st.floats(1e-300, 1e300), warmup=st.integers(0, 10**9)),
    )
)
def test_what_is_written_is_read_back(values):
    settings = Settings.model_validate(values)
    assert load_settings(tomllib.loads(to_toml(settings))) == settings


def test_a_file_and_overrides(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[schedule]\nv = 3\ni = 2\n[task]\ndigits = 2\noperations = ["+", "-"]\n')
    settings = load_settings(path, {"schedule": {"v": "10"}, "task": {"digits": None, "operations": ["*"]}})
    assert (settings.schedule.v, settings.schedule.i) == (10, 2)
    assert (settings.task.digits, settings.task.operations) == (None, ("*",))
    assert load_settings(path).schedule.v == 3
    assert load_settings() == DEFAULTS


def test_an_override_can_mend_what_the_file_contradicts(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[sampling]\nG = 200\n")
    assert load_settings(path, {"sampling": {"max_num_seqs": "256"}}).sampling.max_num_seqs == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[schedul]\nv = 1", "a.toml: unknown setting 'schedul'; did you mean 'schedule'?"),
        ("[schedule]\nvv = 1", "a.toml: unknown setting 'schedule.vv'; did you mean 'schedule.v'?"),
        ("[schedule]\nlr = 1.0", "a.toml: unknown setting 'schedule.lr'; did you mean 'optimizer.lr'?"),
        ("[sampling]\ng = 4", "a.toml: unknown setting 'sampling.g'; did you mean 'sampling.G'?"),
        ("[run]\ndir = 4", "a.toml: unknown setting 'run.dir'; did you mean 'run.directory'?"),
        (
            "[optimizer]\nlearning_rate = 1.0",
            "a.toml: unknown setting 'optimizer.learning_rate'; [optimizer] has optimizer.lr, ",
        ),
        (
            "[optimizer]\ntokens = 9",
            "a.toml: unknown setting 'optimizer.tokens'; did you mean 'optimizer.micro_batch_tokens'?",
        ),
        ("[vllm]\ndelivery = 9", "a.toml: unknown setting 'vllm.delivery'; [vllm] has vllm.urls, "),
        ("[nothing]\nlike = 1", "a.toml: unknown setting 'nothing'; there are run, model, "),
        ("lr = 1.0", "a.toml: unknown setting 'lr'; did you mean 'optimizer.lr'?"),
        ("schedule = 3", "a.toml: schedule is a section, not a setting: set schedule.kind, schedule.v, schedule."),
        ('[optimizer]\nlr = "x"', "a.toml: optimizer.lr = 'x': Input should be a valid number"),
        ("[optimizer]\nlr = -1.0", "a.toml: optimizer.lr = -1.0: Input should be greater than 0"),
        ("[optimizer]\nlr = inf", "a.toml: optimizer.lr = inf: Input should be a finite number"),
        ('[model]\ndtype = "bf16"', "a.toml: model.dtype = 'bf16': Input should be 'auto', 'bfloat16' or 'float32'"),
        ('[task]\noperations = ["+", "/"]', "a.toml: task.operations.1 = '/': Input should be '+', '-' or '*'"),
        ("[schedule]\nv = 0", "a.toml: schedule: v = 0 never syncs weights: use v of at least 1"),
        ("[sampling]\nG = 200", "a.toml: sampling.max_num_seqs = 128 is less than sampling.G = 200"),
        ("[schedule", "a.toml: not valid TOML: "),
    ],
)
def test_complaints_about_a_file(tmp_path, text, message):
    assert complaint(tmp_path, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", {"schedule": {"v": "0"}}, "command line: schedule: v = 0 never syncs weights"),
        ("", {"schedule": {"vv": "0"}}, "command line: unknown setting 'schedule.vv'"),
        ("[schedule]\ni = 0", {"schedule": {"v": "2"}}, "a.toml: schedule.i = 0: "),
        ("[schedule]\ni = 1", {"schedule": {"i": "0"}}, "command line: schedule.i = '0': "),
        ("", {"schedule": {"i": None}}, "command line: schedule.i = None: "),
        ("[schedule]\ni = 1", {"schedule": {"v": "0"}}, "a.toml and command line: schedule: v = 0 never syncs weights"),
    ],
)
def test_complaints_name_whose_fault_it_is(tmp_path, text, overrides, message):
    assert complaint(tmp_path, text, overrides).startswith(message)


def test_every_complaint_has_a_line(tmp_path):
    lines = complaint(tmp_path, "[schedule]\nvv = 1\ni = 0\n[optimizer]\nlr = 0.0").splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == ["schedule.i", "unknown", "optimizer.lr"]


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
