"""Ctrl-C and SIGTERM: raised at once, or kept until a run looks."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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


PRESSED = """
import sys
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "tyro":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Press())
from lagrpo.__main__ import main
sys.argv = ["lagrpo", "--version"]
main()
"""


def test_ctrl_c_while_the_command_line_is_loaded_is_one_line():
    done = subprocess.run([sys.executable, "-c", PRESSED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "\nlagrpo: interrupted\n")
