"""Ctrl-C, SIGTERM and the warnings of schedulers: raised at once, or kept until a run looks."""

from __future__ import annotations

import os
import pty
import signal
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from lagrpo import interrupts
from lagrpo.__main__ import main
from lagrpo.interrupts import EndedAtOnce, Interrupted, deferring, interruptible, raise_if_asked
from lagrpo.lifecycle.start_to_end import Training

SIGNALS = (signal.SIGINT, signal.SIGTERM, *interrupts.WARNINGS)


@pytest.fixture(autouse=True)
def handlers_are_given_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_raises_interrupted_with_its_number(signum):
    with pytest.raises(Interrupted) as stop, interruptible():
        signal.raise_signal(signum)
    assert stop.value.signal == signum


@pytest.mark.parametrize("handler", ["ignored", "the program's own"])
@pytest.mark.parametrize("signum", interrupts.WARNINGS)
def test_warning_that_the_program_handles_does_not_interrupt(handler, signum):
    seen = list[int]()
    own_handler = (
        signal.SIG_IGN if handler == "ignored" else lambda number, frame: seen.append(number)
    )
    before = signal.signal(signum, own_handler)
    try:
        with interruptible():
            signal.raise_signal(signum)
    finally:
        signal.signal(signum, before)
    assert seen == ([] if handler == "ignored" else [signum])


def test_deferred_signal_waits_until_a_run_looks_and_a_second_ctrl_c_ends_at_once(monkeypatch):
    monkeypatch.setattr(interrupts, "REPEATED_WITHIN", -1.0)
    with interruptible():
        with deferring():
            raise_if_asked()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted) as stop:
                raise_if_asked()
            assert stop.value.signal == signal.SIGTERM
            with pytest.raises(EndedAtOnce):
                signal.raise_signal(signal.SIGINT)
        raise_if_asked()
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_signals_that_repeat_a_request_change_nothing(monkeypatch, first, second):
    """Slurm, srun and torchrun together send several within milliseconds."""
    # A busy machine may take longer between two signals.
    monkeypatch.setattr(interrupts, "REPEATED_WITHIN", 60.0)
    with interruptible(), deferring():
        for signum in (first, second, second):
            signal.raise_signal(signum)
        with pytest.raises(Interrupted) as stop:
            raise_if_asked()
        assert stop.value.signal == first


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_only_ctrl_c_asks_again(monkeypatch, second):
    """srun sends SIGTERM again seconds later, when the first node of a job is done."""
    monkeypatch.setattr(interrupts, "REPEATED_WITHIN", -1.0)
    with interruptible(), deferring():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)


class Press:
    """Ctrl-C while a module is looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "lagrpo.settings.command_line":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_command_line_is_loaded_is_one_line(monkeypatch, capsys):
    for name in ("lagrpo.cli", "lagrpo.settings.command_line"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Press(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "\nlagrpo: interrupted\n")


def test_signal_of_a_closed_terminal_lets_the_process_print_on():
    terminal, descriptor = pty.openpty()
    kept = os.dup(1)
    os.dup2(descriptor, 1)
    os.close(terminal)
    try:
        with pytest.raises(OSError, match="Input/output"):
            os.write(1, b"text")
        with pytest.raises(Interrupted), interruptible():
            signal.raise_signal(signal.SIGHUP)
        assert os.write(1, b"text") == 4
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(descriptor)


@pytest.mark.parametrize(
    ("was_asked", "expected"),
    [
        pytest.param(
            True, ["thread", "checkpoint, finish=False", "weights"], id="stopped by a signal"
        ),
        pytest.param(False, ["thread"], id="error of one of two ranks"),
    ],
)
def test_ended_run_waits_for_the_thread_and_saves_its_weights_last(was_asked, expected):
    """Weights are left out if the time is over, and a run resumes without them."""
    written = list[str]()
    run = SimpleNamespace(
        is_started=True,
        store=SimpleNamespace(path="runs/one"),
        recorder=SimpleNamespace(activity="sampling", warn=lambda text, batch: None),
        progress=lambda: "1 of 2 batches finished",
        ranks=SimpleNamespace(size=2),
        loop=SimpleNamespace(batch=1),
        policy=SimpleNamespace(version=1),
        version=1,
        finish_checkpoint=lambda: written.append("thread"),
        write_checkpoint=lambda *, finish: written.append(f"checkpoint, finish={finish}"),
        record_final=None,
        write_weights=lambda record: written.append("weights"),
        resume_command=lambda: "To resume: …",
    )
    Training.rescue(cast(Training, run), Interrupted(signal.SIGTERM), was_asked=was_asked)
    assert written == expected
