"""What a reward function does to its process costs one completion at most, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hostile_judges
import pytest
import torch

from lagrpo import guard
from lagrpo.types import Completion, Group, Prompt
from lagrpo.verify import Verifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is promised on Linux alone")
EMPTY = torch.empty(0)
TESTS = Path(__file__).parent
SETTINGS = {"workers": 1, "memory": 0.25, "file_size": 0.004, "max_without_reward": 1.0}
ENDED = "the worker process was ended by SIGKILL while it judged"
TOO_MUCH = "the worker process took more than 0.25 GiB of memory while it judged"
SPOILED = "the judge closed files of its process, lowered its limits or removed its directory"


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(hostile_judges.judge, deadline=60.0, **SETTINGS) as shared:
        yield shared


def judge(verifier: Verifier, place: Path, *texts: str) -> list[tuple[float | None, str]]:
    completions = tuple(Completion(EMPTY, EMPTY, EMPTY, True, text) for text in texts)
    (judged,) = verifier.judge([Group(Prompt(0, (), str(place)), completions)])
    return [(c.reward, c.outcome.reason) for c in judged.completions if c.outcome is not None]


def left_behind(place: Path) -> list[int]:
    """The processes that a judge started and that still run, after 5 seconds at most."""
    started = [int(path.name) for path in place.iterdir() if path.name.isdecimal()]
    deadline = time.monotonic() + 5
    while (left := [process for process in started if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def runs(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


CASES = {
    "signal SIGKILL": ENDED,
    "killpg": ENDED,
    "close 0 1000": SPOILED,
    "close 1 2": SPOILED,
    "file 8": "the judge raised OSError: [Errno 27] File too large",
    "fill 1000": TOO_MUCH,
    "fill-slowly": TOO_MUCH,
    "fill-shared": TOO_MUCH,
    "fill-below": TOO_MUCH,
    "mute": "the judge raised hostile_judges.Mute: <exception str() failed>",
    "mute-unjudgeable": "the judge raised RuntimeError",
    "fork exit": "the worker process ended itself with exit code 1 while it judged",
    "daemon exit": "the worker process ended itself with exit code 1 while it judged",
    "program exit": "the worker process ended itself with exit code 1 while it judged",
}
HANGING = ("signal SIGSTOP", "deaf", "slow", "fork hang", "daemon hang", "program hang")


def test_it_costs_that_completion_alone_and_leaves_nothing_behind(verifier, tmp_path):
    """The wrong and the right answer between are judged by the same processes."""
    outcomes = judge(verifier, tmp_path, *(text for case in CASES for text in (case, "7", "8")))
    assert outcomes[1::3] == [(1.0, "")] * len(CASES)
    assert outcomes[2::3] == [(0.0, "")] * len(CASES)
    assert dict(zip(CASES, outcomes[::3], strict=True)) == {case: (None, reason) for case, reason in CASES.items()}
    assert not left_behind(tmp_path)


def test_the_deadline_ends_what_nothing_else_does(tmp_path):
    with Verifier(hostile_judges.judge, deadline=1.0, **SETTINGS | {"workers": 3}) as hasty:
        outcomes = judge(hasty, tmp_path, "7", *HANGING, "7", "8")
        assert not left_behind(tmp_path)
    late = (None, "no verdict within 1 s")
    assert outcomes == [(1.0, ""), *[late] * len(HANGING), (1.0, ""), (0.0, "")]


def test_fifty_gigabytes_are_refused_or_end_the_worker(verifier, tmp_path):
    (before, (reward, reason), after) = judge(verifier, tmp_path, "7", f"fill {50 << 10}", "7")
    assert (before, reward, after) == ((1.0, ""), None, (1.0, ""))
    assert reason in (TOO_MUCH, "the judge raised MemoryError")


def test_what_a_judge_starts_ends_with_its_worker(tmp_path):
    texts = ("7", "fork", "daemon", "program", "return-twice", "threads", "8", "7")
    with Verifier(hostile_judges.judge, deadline=60.0, **SETTINGS) as verifier:
        assert judge(verifier, tmp_path, *texts) == [(1.0, "")] * 6 + [(0.0, ""), (1.0, "")]
    assert not left_behind(tmp_path)


def test_the_next_completion_finds_the_process_as_it_was(verifier, tmp_path):
    assert judge(verifier, tmp_path, "look", "change", "look") == [(1.0, "")] * 3


def test_limits_that_cannot_be_raised_again_cost_the_completion(verifier, tmp_path):
    """Only a process with CAP_SYS_RESOURCE can raise them again."""
    before, lowered, after = judge(verifier, tmp_path, "7", "lower", "look")
    assert (before, after) == ((1.0, ""), (1.0, ""))
    assert lowered in ((None, SPOILED), (1.0, ""))


def test_memory_that_processes_share_counts_once():
    held, spare = b"x" * 2**27, 2**26
    alone = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert not guard._take_more([os.getpid(), child], alone + spare)
        assert guard._take_more([os.getpid(), child], len(held))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


SCRIPT = """
import sys, numpy, hostile_judges
from lagrpo.types import Completion, Group, Prompt
from lagrpo.verify import Verifier
place, workers, deadline, *texts = sys.argv[1:]
none = numpy.empty(0)
group = Group(Prompt(0, (), place), tuple(Completion(none, none, none, True, text) for text in texts))
limits = {"workers": int(workers), "deadline": float(deadline), "max_without_reward": 1.0}
with Verifier(hostile_judges.judge, **limits) as verifier:
    (judged,) = verifier.judge([group])
print([completion.reward for completion in judged.completions])
"""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_nothing_outlives_a_program_that_is_killed(tmp_path):
    program = start(str(tmp_path), "3", "60", "daemon hang", "program spin", "fork deaf")
    hostile_judges.wait_for_ids(tmp_path, 3)
    below = guard._below(program.pid)
    program.kill()
    program.communicate(timeout=10)
    for process in below:
        (tmp_path / str(process)).touch()
    assert len(below) >= 9  # of each worker: the guard, itself, and what it started
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    ("judge", "deadline", "rewards", "told"),
    [("flood 30", "60", b"[1.0, 1.0, 1.0]", {1}), ("flood", "2", b"[1.0, None, 1.0]", {0, 1})],
)
def test_of_a_flood_only_the_beginning_gets_through(tmp_path, judge, deadline, rewards, told):
    """An endless one is ended at the deadline, when a slow machine may not have forwarded the beginning yet."""
    out, err = start(str(tmp_path), "1", deadline, "7", judge, "7").communicate(timeout=60)
    assert out.endswith(rewards + b"\n")
    for printed in (out, err):
        assert printed.startswith(b"flood ")
        assert len(re.findall(rb"the rest of what this worker process prints is left out\n", printed)) in told
        assert len(printed) <= guard.LONGEST_OUTPUT + 200
