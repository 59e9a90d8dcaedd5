"""How workers begin and end, seen from outside: scripts, the interactive prompt, Ctrl-C, a parent that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
TESTS = Path(__file__).parent
JUDGE_ONE = """
import sys
import torch
from lagrpo.types import Completion, Group, Prompt
from lagrpo.verify import Verifier

def group(*texts):
    empty = torch.empty(0)
    return Group(Prompt(0, (), "7"), tuple(Completion(empty, empty, empty, True, text) for text in texts))

def here(text, gold):
    return float("torch" in sys.modules)

def run(judge, *texts, **settings):
    with Verifier(judge, workers=1, **settings) as verifier:
        for judged in verifier.judge([group(*texts)]):
            print("rewards", *(completion.reward for completion in judged.completions), flush=True)
"""


def script(tmp_path: Path, body: str, **environment: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(JUDGE_ONE + textwrap.dedent(body))
    return start([str(path)], **environment)


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_script_without_a_main_guard_is_not_run_again_by_the_workers(tmp_path):
    process = script(tmp_path, "import verify_judges\nprint('script')\nrun(verify_judges.by_name, '7', 'modules')")
    out, err = process.communicate(timeout=60)
    assert (out.split("\n")[:2], err) == (["script", "rewards 1.0 0.0"], "")


def test_a_judge_defined_in_the_script_works_under_a_main_guard(tmp_path):
    out, err = script(tmp_path, "if __name__ == '__main__':\n    run(here, '7')").communicate(timeout=60)
    assert (out, err) == ("rewards 1.0\n", "")


def test_a_judge_whose_script_loads_torch_computes_with_one_thread(tmp_path):
    body = """
    def threads(text, gold):
        return float(torch.get_num_threads())

    if __name__ == "__main__":
        torch.set_num_threads(2)
        run(threads, "7")
    """
    out, err = script(tmp_path, body, OMP_NUM_THREADS="2").communicate(timeout=60)
    assert (out, err) == ("rewards 1.0\n", "")


def test_a_judge_defined_in_a_script_without_a_main_guard_ends_with_the_reason(tmp_path):
    process = script(tmp_path, "run(here, '7')")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "worker processes were started 3 times over without judging anything" in err
    assert "put what it does under  if __name__ == '__main__':" in err


def test_a_judge_typed_at_the_interactive_prompt_is_refused():
    process = start(["-i", "-q"])
    typed = "from lagrpo.verify import Verifier\ndef judge(text, gold):\n    return 1.0\n\nVerifier(judge)\n"
    _, err = process.communicate(typed, timeout=60)
    assert "TypeError: the judge" in err
    assert "typed at the interactive prompt" in err


@needs_proc
def test_ctrl_c_ends_the_parent_alone_and_quietly(tmp_path):
    process = script(
        tmp_path,
        """
        import os, verify_judges
        try:
            run(verify_judges.by_name, "7", "hang", deadline=60.0)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
    )
    wait_for_workers(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


@needs_proc
@pytest.mark.parametrize("text", ["hang", "pid"])
def test_workers_end_with_a_parent_that_is_killed(tmp_path, text):
    """Waiting for work or hanging: the worker notices. (One that hangs in C code ends by its limit of CPU time.)"""
    process = script(tmp_path, f"import verify_judges\nrun(verify_judges.by_name, {text!r}, 'hang', deadline=60.0)")
    workers = wait_for_workers(process)
    time.sleep(0.5)
    process.kill()
    deadline = time.monotonic() + 10
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if alive(worker)]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_the_kernel_ends_a_worker_that_computes_on_after_its_parent_was_killed(tmp_path):
    process = start([
        "-c",
        "import os, pickle, verify_judges\n"
        "from lagrpo.verify import worker\n"
        "os.cpu_count = lambda: 1\n"
        "worker._SPARE_SECONDS = 0\n"
        "worker.start(pickle.dumps(verify_judges.by_name), 1.0, 2**30)\n"
        "worker.give_verdict(pickle.dumps(('spin', '7')))\n",
    ])  # fmt: skip
    process.communicate(timeout=60)
    assert -process.returncode == signal.SIGXCPU


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="looks for shared memory in /dev/shm")
def test_what_a_judge_leaks_is_gone_when_its_worker_ends_and_nobody_complains(tmp_path):
    """One worker is killed by the deadline, the next one ends with the verifier. A script has no say in warnings."""
    mark = f"test{os.getpid()}"
    process = script(
        tmp_path,
        f"""
        import time, verify_judges
        from pathlib import Path

        def left():
            return sorted(path.name for path in Path("/dev/shm").glob("lagrpo-{mark}*"))

        def wait_until_gone(name):
            deadline = time.monotonic() + 20
            while any(name in other for other in left()) and time.monotonic() < deadline:
                time.sleep(0.05)

        here = Group(Prompt(0, (), "{mark}"), group("hang", "7").completions)
        with Verifier(verify_judges.leaking, workers=1, deadline=1.0, max_without_reward=1.0) as verifier:
            (judged,) = verifier.judge([here])
            wait_until_gone("hang")
            print(*(completion.reward for completion in judged.completions), len(left()))
        wait_until_gone("7")
        print(len(left()))
        """,
    )
    out, err = process.communicate(timeout=90)
    assert (out, err) == ("None 1.0 6\n0\n", "")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="looks for shared memory in /dev/shm")
def test_shared_memory_of_the_parent_outlives_the_workers_that_open_it(tmp_path):
    process = script(
        tmp_path,
        """
        from multiprocessing import shared_memory
        import verify_judges

        table = shared_memory.SharedMemory(create=True, size=8)
        table.buf[0] = 5
        here = Group(Prompt(0, (), table.name), group("hang", "7", "7").completions)
        for _ in range(2):
            with Verifier(verify_judges.opening, workers=1, deadline=1.0, max_without_reward=1.0) as verifier:
                (judged,) = verifier.judge([here])
                print(*(completion.reward for completion in judged.completions))
        table.close()
        table.unlink()
        """,
    )
    out, err = process.communicate(timeout=90)
    assert (out, err) == ("None 5.0 5.0\n" * 2, "")


def wait_for_workers(process: subprocess.Popen[str]) -> list[int]:
    """The ids of the processes below `process` that run our worker, once there is one and it has had the time to load
    the judge."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if found := workers_of(process.pid):
            time.sleep(1.0)
            return found
        time.sleep(0.05)
    raise AssertionError(f"no worker after 30 s: {process.poll()}")


def workers_of(parent: int) -> list[int]:
    """The worker processes whose parent this is."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            started = "lagrpo.workers" in (directory / "cmdline").read_text()
            if started and f"PPid:\t{parent}\n" in (directory / "status").read_text():
                found.append(int(directory.name))
    return found


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "State:\tZ" not in status
