"""Ctrl-C and SIGTERM: raised at once, or kept until a run looks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from lagrpo.interrupts import EndedAtOnce, Interrupted, deferring, interruptible, raise_if_asked


def press(signum: int = signal.SIGINT) -> None:
    """The signal arrives here: its handler has run when this returns."""
    signal.raise_signal(signum)


@pytest.fixture(autouse=True)
def handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_raises_interrupted_with_its_number(signum):
    with pytest.raises(Interrupted) as stop, interruptible():
        press(signum)
    assert stop.value.signal == signum
    assert isinstance(stop.value, KeyboardInterrupt)


def test_deferred_signal_waits_until_someone_looks():
    done: list[str] = []
    with interruptible(), deferring():
        raise_if_asked()
        press(signal.SIGTERM)
        done.append("update")
        with pytest.raises(Interrupted) as stop:
            raise_if_asked()
    assert done == ["update"]
    assert stop.value.signal == signal.SIGTERM


def test_second_deferred_signal_ends_at_once():
    with interruptible(), deferring():
        press()
        with pytest.raises(EndedAtOnce):
            press(signal.SIGTERM)


def test_signals_are_raised_again_after_deferring():
    with interruptible():
        with deferring():
            press()
        raise_if_asked()
        with pytest.raises(Interrupted):
            press()


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            press()
            with pytest.raises(Interrupted):
                press(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_neither_handle_signals_nor_see_them():
    seen: list[str] = []

    def work() -> None:
        with interruptible(), deferring():
            raise_if_asked()
            seen.append("not asked")

    with interruptible(), deferring():
        press()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(Interrupted):
            raise_if_asked()
    assert seen == ["not asked"]


PRESSED = """
import sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
from lagrpo.__main__ import main
sys.argv = ["lagrpo", "--version"]
main()
"""


@pytest.mark.parametrize("name", ["lagrpo.cli", "tyro"])
def test_ctrl_c_while_the_command_line_is_loaded_is_one_line(name):
    done = subprocess.run([sys.executable, "-c", PRESSED.format(name=name)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "\nlagrpo: interrupted\n")
