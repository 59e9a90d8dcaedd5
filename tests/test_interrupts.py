"""Ctrl-C and SIGTERM: raised at once, or at the end of what must be done whole."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from lagrpo.interrupts import Interrupted, divisible, interruptible, whole


def press(signum: int = signal.SIGINT) -> None:
    """The signal arrives here: its handler has run when this returns."""
    signal.raise_signal(signum)


@pytest.fixture(autouse=True)
def handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_raised_and_says_which_it_was(signum):
    with pytest.raises(Interrupted) as stop, interruptible():
        press(signum)
    assert stop.value.signal == signum
    assert isinstance(stop.value, KeyboardInterrupt)


def nested(done: list[str]) -> None:
    with whole():
        with whole():
            press(signal.SIGTERM)
            done.append("inner")
        done.append("outer")
    done.append("never")


def test_within_whole_it_waits_for_the_end_of_the_outermost_block():
    done: list[str] = []
    with pytest.raises(Interrupted) as stop, interruptible():
        nested(done)
    assert done == ["inner", "outer"]
    assert stop.value.signal == signal.SIGTERM


def press_twice_in_whole(error: Exception | None = None) -> None:
    with whole():
        press()
        press(signal.SIGTERM)
        if error:
            raise error


def test_several_signals_within_whole_are_one():
    with interruptible():
        with pytest.raises(Interrupted):
            press_twice_in_whole()
        with whole():
            pass


def test_whole_can_be_entered_again_after_an_interruption():
    with interruptible():
        for _ in range(2):
            with pytest.raises(Interrupted), whole():
                press()
        with pytest.raises(Interrupted):
            press()


def test_an_error_within_whole_leaves_it():
    with interruptible():
        with pytest.raises(ValueError, match="broken"), whole():
            raise ValueError("broken")
        with pytest.raises(Interrupted):
            press()
        with pytest.raises(Interrupted) as stop:
            press_twice_in_whole(ValueError("broken"))
    assert isinstance(stop.value.__context__, ValueError)


def test_interruptible_may_be_nested():
    with interruptible():
        with interruptible():
            pass
        with pytest.raises(Interrupted):
            press()


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            press()
            with pytest.raises(Interrupted):
                press(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_neither_takes_over_signals_nor_holds_them_up():
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with interruptible(), whole():
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=work)
    with interruptible():
        thread.start()
        inside.wait(5)
        with pytest.raises(Interrupted):
            press()
        leave.set()
        thread.join()


def test_a_divisible_block_inside_whole_lets_interruptions_through_at_once():
    done: list[str] = []

    def work() -> None:
        with whole():
            press()
            done.append("whole")
            with divisible():
                done.append("never")

    with pytest.raises(Interrupted), interruptible():
        work()
    assert done == ["whole"]
    with interruptible(), whole():
        with divisible():
            pass
        press()  # held back again
        done.append("whole again")
        with pytest.raises(Interrupted), divisible():
            pass
    assert done == ["whole", "whole again"]


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


@pytest.mark.parametrize("name", ["lagrpo.cli", "lagrpo.settings.schema", "tyro"])
def test_ctrl_c_while_the_command_line_is_loaded_is_one_line(name):
    done = subprocess.run([sys.executable, "-c", PRESSED.format(name=name)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "\nlagrpo: interrupted\n")
