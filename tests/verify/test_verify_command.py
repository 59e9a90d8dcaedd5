"""The command `lagrpo verify RUN`, and runs that it cannot read."""

from __future__ import annotations

import shutil

import pytest
from changed_runs import FIRST_STEP, set_cell

from lagrpo.cli import main
from lagrpo.errors import SettingsError
from lagrpo.runs import RunNotFoundError
from lagrpo.verify import verify_run


def test_command_on_an_untouched_run_prints_no_difference(run, capsys):
    main(["verify", str(run), "--rows", "2", "--trust-run-code"])
    assert "\n0 differences." in capsys.readouterr().out


def test_command_on_a_changed_run_prints_the_place_and_exits_with_1(run, capsys):
    set_cell(run, row=6, column="advantage", value=7.0)
    with pytest.raises(SystemExit) as exit_info:
        main(["verify", str(run), "--rows", "2", "--trust-run-code"])
    assert exit_info.value.code == 1
    # The terminal may break a line anywhere between words.
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{FIRST_STEP}, row 6 (prompt " in printed
    assert "1 differences." in printed


def test_broken_line_of_metrics_is_rejected_with_its_number(run):
    metrics = run / "metrics.jsonl"
    metrics.write_text("{" + metrics.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(SettingsError, match="line 1"):
        verify_run(run, trust_run_code=True)


def test_directory_that_is_no_run_is_rejected(tmp_path):
    with pytest.raises(RunNotFoundError):
        verify_run(tmp_path)


def test_run_without_rollouts_is_rejected(run):
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "rollouts")
    with pytest.raises(SettingsError, match="no rollouts"):
        verify_run(run, trust_run_code=True)
