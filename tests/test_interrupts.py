"""Ctrl-C and SIGTERM: raised at once, or kept until a run looks."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from lagrpo.__main__ import main
from lagrpo.interrupts import EndedAtOnce, Interrupted, deferring, interruptible, raise_if_asked


@pytest.fixture(autouse=True)
def handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_signal_raises_interrupted_with_its_number():
    for signum in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(Interrupted) as stop, interruptible():
            signal.raise_signal(signum)
        assert stop.value.signal == signum


def test_deferred_signal_waits_until_a_run_looks_and_the_second_one_ends_at_once():
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


class Press:
    """Ctrl-C while a module is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "tyro":
            raise KeyboardInterrupt


def test_ctrl_c_while_the_command_line_is_loaded_is_one_line(monkeypatch, capsys):
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "tyro" or name == "lagrpo.cli"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Press(), *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "\nlagrpo: interrupted\n")
