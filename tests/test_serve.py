"""`lagrpo serve` as a user meets it. Faults are played by a stand-in for the Python that has vLLM: a process that
listens, has children and dies when it is told to. Real servers are in the tests marked vllm (make test-vllm).
"""

from __future__ import annotations

import doctest
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from running import options, tiny_settings
from test_cli import lagrpo
from vllm_servers import DEADLINES, PYTHON, tiny_directory

from lagrpo.rollout.vllm import process
from lagrpo.rollout.vllm import serving as serve
from lagrpo.rollout.vllm.process import find_free_port
from lagrpo.rollout.vllm.server import RefusedError, Server
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.settings import arguments
from lagrpo.settings import options as passed_on

HERE = Path(__file__).parent
STAND_IN = """#!{python}
import http.server, json, os, pathlib, subprocess, sys, threading, time
if sys.argv[1] == "-c":  # "is vllm there?"
    sys.exit(0)
here = pathlib.Path(__file__).parent
with open(here / "starts", "a") as starts:
    print(json.dumps([sys.argv[1:], os.environ["VLLM_API_KEY"]]), file=starts)
number = len((here / "starts").read_text().splitlines())
print(f"start number {{number}}", flush=True)
status, lives = {status}, {lives}
if number > {starts}:
    if not {hangs}:
        sys.exit("RuntimeError: this start fails")
    status, lives = 503, 600
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM has its workers

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *rest):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(lives)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv(serve.KEY, raising=False)


@pytest.fixture
def stand_in(tmp_path) -> Callable[..., Path]:
    """Makes one: it answers /health with `status`, lives so many seconds, and after `starts` starts fails or hangs."""

    def of(status: int = 200, lives: float = 600, starts: int = 100, hangs: bool = False) -> Path:
        path = tmp_path / "python"
        given = {"status": status, "lives": lives, "starts": starts, "hangs": hangs}
        path.write_text(STAND_IN.format(python=sys.executable, **given))
        path.chmod(0o755)
        return path

    return of


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


class Serving:
    """`lagrpo serve WORDS` in a process of its own, its output in a file."""

    def __init__(self, directory: Path, *words: object) -> None:
        self.file = directory / "output"
        command = [sys.executable, "-c", "from lagrpo.cli import main; main()", "serve", *map(str, words)]
        with self.file.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=directory,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # pytest may run in the background
            )
        self.seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.file.read_text()

    def wait_for(self, text: str, seconds: float = 30, count: int = 1) -> None:
        """Until it has printed `text` so many times."""
        self.until(lambda: self.output.count(text) >= count, seconds)

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended: {self.output}"
            assert time.monotonic() < end, f"after {seconds} s: {self.output}"
            time.sleep(0.05)

    def everything(self) -> list[psutil.Process]:
        """The processes below it."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {process.pid: process for process in found}
        return found

    def ended(self, seconds: float = 30) -> int:
        """Its exit code, once it has ended and nothing that was seen below it is left."""
        code = self.process.wait(seconds)
        left = psutil.wait_procs(self.seen.values(), timeout=30)[1]
        assert [process.cmdline() for process in left] == []
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.everything()
            self.process.kill()
            self.ended()


@pytest.fixture
def start(tmp_path, stand_in, model):
    """Starts `lagrpo serve` over a stand-in."""
    begun: list[Serving] = []

    def of(*words: object, **behavior: float) -> Serving:
        given = ("--port", find_free_port(), "--python", stand_in(**behavior), *words)
        begun.append(Serving(tmp_path, model, *given))
        return begun[-1]

    yield of
    for serving in begun:
        serving.close()


def starts(directory: Path) -> list[tuple[list[str], str]]:
    """Command line and API key of each start of the stand-in."""
    return [tuple(json.loads(line)) for line in (directory / "starts").read_text().splitlines()]


def exported(output: str) -> str:
    """The API key that it printed."""
    (line,) = (line for line in output.splitlines() if "export" in line)
    return line.split("=", 1)[1]


# What is refused


REFUSALS = [
    ("model --python /nosuch", "--python: /nosuch: no such Python. `make vllm-env` makes an environment with vLLM"),
    (f"model --python {sys.executable}", f"--python: {sys.executable} has no vllm: `make vllm-env` makes an envi"),
    ("./nosuch --python python", "model.path: model directory './nosuch' does not exist"),
    (
        "smolm2 --python python",
        "model.path: model 'smolm2' is neither a directory nor an alias; did you mean 'smollm2'",
    ),
    (". --python python", "model.path: '.' is no model directory: it has no config.json"),
    ("model --python python --port 0", "--port is a number from 1 to 65535, not 0"),
    ("model --python python --max-num-seqs 0", "--max-num-seqs is at least 1, not 0"),
    ("model --python python --max-model-len 1", "--max-model-len is at least 2, not 1"),
    ("model --python python --failures -1", "--failures is at least 0, not -1"),
    ("model --python python --deadline 0", "--deadline is more than 0 seconds, not 0"),
    ("model --python python --host 0.0.0.0", "--host: other machines can reach 0.0.0.0: set LAGRPO_VLLM_API_KEY to an"),
    ("model --python python --host ::", "--host: other machines can reach ::: set LAGRPO_VLLM_API_KEY to an API key"),
    ("model --python python -- --host 0.0.0.0", "options: '--host' is set by lagrpo itself"),
    ("model --python python -- --api_key=s3cret", "options: '--api_key' holds a secret, and every user can"),
    ("model --python python -- --api-k s3cret", "options: '--api-key' is set by lagrpo itself"),
    ("model --python python -- --hf-token s3cret", "options: '--hf-token' holds a secret, and every user can"),
    ("model --python python --log nosuch/log", "--log: {cwd}/nosuch/log: No such file or directory"),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS)
def test_wrong_input_is_one_line_and_exit_code_2(stand_in, model, tmp_path, words, message):
    stand_in()
    code, out, err = lagrpo("serve", *([] if "--port" in words else ["--port", find_free_port()]), *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"lagrpo: {message.replace('{cwd}', str(tmp_path))}")
    assert len(err.splitlines()) == 1
    assert "s3cret" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "python"]


def test_a_port_in_use_is_refused(stand_in, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = lagrpo("serve", model, "--python", stand_in(), "--port", port)
    assert (code, out, err) == (2, "", f"lagrpo: --port: {port} on 127.0.0.1 is in use; name another\n")


def test_wrong_input_costs_no_loading(stand_in, model):
    stand_in()
    code = f"""
import sys
from lagrpo.cli import main
for words in {[words for words, _ in REFUSALS]!r}:
    try:
        main(["serve", "--port", "{find_free_port()}", *words.split()])
    except SystemExit as end:
        assert end.code == 2, words
assert not {{"torch", "transformers", "pyarrow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


# Starting, and what is printed


def test_what_it_starts_and_says(start, tmp_path):
    words = ("--dtype", "float32", "--max-model-len", 300, "--max-num-seqs", 7, "--weight-sync", "nccl")
    serving = start(*words, "--options=--seed 3", "--", "--hf-overrides", '{"a": 1, "b": 2}')
    serving.wait_for("lagrpo train")
    ((command, key),) = starts(tmp_path)
    url = f"http://127.0.0.1:{command[command.index('--port') + 1]}"
    assert command[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "model")]
    assert command[-4:] == ["--seed", "3", "--hf-overrides", '{"a": 1, "b": 2}']
    for option in (
        *("--dtype float32", "--host 127.0.0.1", "--max-model-len 300", "--max-num-seqs 7"),
        '--weight-transfer-config {"backend": "nccl"}',
    ):
        assert option in " ".join(command)
    lines = serving.output.splitlines()
    log = tmp_path / f"vllm-{url.rpartition(':')[2]}.log"
    assert lines[0] == f"lagrpo: starting {tmp_path / 'model'} with {tmp_path / 'python'} (log: {log}) …"
    assert lines[1] == f"lagrpo: {url} is up; Ctrl-C ends it. To attach:"
    assert lines[4] == (
        f"  lagrpo train … --model {tmp_path / 'model'} --sampling.sampler vllm --vllm.urls {url} --vllm.weight_sync "
        "nccl"
    )
    assert exported(serving.output) == key
    assert len(key) >= 32
    assert key not in " ".join(command)
    assert log.read_text() == "start number 1\n"


def test_a_key_of_the_users_is_used_and_not_printed(start, tmp_path, monkeypatch):
    monkeypatch.setenv(serve.KEY, "a-key-of-our-own")
    serving = start("--log", "elsewhere.log")
    serving.wait_for("lagrpo train")
    assert [key for _, key in starts(tmp_path)] == ["a-key-of-our-own"]
    assert f"To attach (the API key is in ${serve.KEY}):" in serving.output
    assert "a-key-of-our-own" not in serving.output
    assert (tmp_path / "elsewhere.log").read_text() == "start number 1\n"


def test_an_address_that_others_can_reach_takes_a_key_of_the_users_and_a_warning(start, tmp_path, monkeypatch):
    monkeypatch.setenv(serve.KEY, "a-key-of-our-own")
    serving = start("--host", "0.0.0.0")
    serving.wait_for("lagrpo train")
    ((command, key),) = starts(tmp_path)
    assert command[command.index("--host") + 1] == "0.0.0.0"
    assert key == "a-key-of-our-own"
    assert "lagrpo: other machines can reach 0.0.0.0, and vLLM's endpoints that pause" in serving.output
    assert "--vllm.urls http://127.0.0.1:" in serving.output


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("node2", "http://node2:8000")],
)
def test_where_a_started_server_is_asked(host, url, monkeypatch, tmp_path):
    monkeypatch.setattr(process.StartedServer, "_start", lambda server: None)
    launch = process.Launch("python", "model", "float32", 10, 1, host=host)
    assert process.StartedServer(launch, DEADLINES, tmp_path / "log", 8000).url == url


def test_no_other_user_can_read_the_key_of_a_server_that_a_run_starts(tmp_path, monkeypatch):
    """Neither on a command line (of the guard or the server) nor in the log; the environment is the process's own."""
    begun = []
    monkeypatch.setattr(process, "Popen", lambda command, **how: begun.append((command, how["env"])))
    server = process.StartedServer(process.Launch("python", "model", "float32", 10, 1), DEADLINES, tmp_path / "log")
    ((command, environment),) = begun
    assert len(server.key) >= 32
    assert environment["VLLM_API_KEY"] == server.key
    assert server.key not in " ".join(command) + server.tail() + str(server)
    assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("module", [arguments, process, serve, passed_on])
def test_the_examples(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


# Faults


def test_a_server_that_does_not_start_shows_its_log(start):
    serving = start(starts=0)
    assert serving.ended() == 1
    assert "lagrpo: the vLLM server ended within 600 s. The end of its log, " in serving.output
    assert serving.output.endswith("\n  start number 1\n  RuntimeError: this start fails\n")


def test_a_server_that_does_not_get_ready_in_time_is_ended(start):
    serving = start("--deadline", 4, status=503)
    serving.until(lambda: len(serving.everything()) == 3, 20)  # the guard, the server, its worker
    assert serving.ended() == 1
    assert "lagrpo: the vLLM server did not get ready within 4 s. The end of its log, " in serving.output


@pytest.mark.parametrize("failures", [0, 2])
def test_a_server_that_dies_is_started_again_as_often_as_is_allowed(start, tmp_path, failures):
    serving = start("--failures", failures, lives=2)
    assert serving.ended(60) == 1
    keys = [key for _, key in starts(tmp_path)]
    assert len(keys) == failures + 1
    assert len(set(keys)) == 1  # trainers go on with the key they have
    assert serving.output.count("is up again, with the weights it was started with") == failures
    assert serving.output.splitlines()[-1].endswith(f"that was one failure more than --failures {failures} allows")


@pytest.mark.parametrize(("hangs", "told"), [(False, "ended"), (True, "did not get ready")])
def test_a_new_start_that_fails_or_hangs_is_a_failure_too(start, tmp_path, hangs, told):
    serving = start("--failures", 2, "--deadline", 4, lives=2, starts=1, hangs=hangs)
    assert serving.ended(60) == 1
    assert len(starts(tmp_path)) == 3
    assert "is up again" not in serving.output
    assert serving.output.count(f"the vLLM server {told} within 4 s.") == 2
    assert serving.output.splitlines()[-1].endswith("that was one failure more than --failures 2 allows")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_it_with_everything_it_started(start, signum, code):
    serving = start()
    serving.wait_for("lagrpo train")
    assert len(serving.everything()) == 3
    serving.process.send_signal(signum)
    assert serving.ended() == code
    assert serving.output.endswith("" if signum == signal.SIGKILL else "\n\nlagrpo: interrupted\n")


def test_a_signal_while_the_server_is_starting(start):
    serving = start(status=503)
    serving.until(lambda: len(serving.everything()) == 3, 20)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.ended() == 143
    assert "is up" not in serving.output


# Real servers


def real(directory: Path, model: Path, *words: object) -> Serving:
    given = ("--python", PYTHON, "--dtype", "float32", "--max-model-len", 256, "--max-num-seqs", 16)
    return Serving(directory, model, "--port", find_free_port(), *given, "--deadline", DEADLINES.start, *words)


@pytest.mark.vllm
def test_a_run_attaches_as_printed_and_outlives_the_server(tmp_path, monkeypatch):
    """The server is killed in the middle of the run; it comes back without the run's weights, which are synced to it
    again."""
    directory = tiny_directory(tmp_path)
    serving = real(tmp_path, directory)
    try:
        serving.wait_for("lagrpo train", DEADLINES.start)
        serving.everything()
        printed = shlex.split(next(line for line in serving.output.splitlines() if "lagrpo train" in line))[3:]
        url = printed[printed.index("--vllm.urls") + 1]
        with pytest.raises(RefusedError, match="does not accept the API key"):
            Server(url, "another key", DEADLINES).model()
        monkeypatch.setenv(serve.KEY, exported(serving.output))
        monkeypatch.setenv("PYTHONPATH", str(HERE))
        sizes = {"batches": 25, "prompts": 2}
        settings = tiny_settings(
            directory, tmp_path / "runs", run={"name": "one", "save_weights": False}, schedule=sizes
        )
        words = [*options(settings), *printed, "--vllm.directory", str(tmp_path), "--evaluation.before_and_after", "0"]
        command = [sys.executable, "-c", "from lagrpo.cli import main; main()", "train", *words]
        with (tmp_path / "run").open("w") as output:
            run = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path)
        metrics = tmp_path / "runs" / "one" / "metrics.jsonl"
        serving.until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 5, 120)
        guard = psutil.Process(serving.process.pid).children()[0]
        os.kill(guard.children()[0].pid, signal.SIGKILL)
        assert run.wait(DEADLINES.start) == 0, (tmp_path / "run").read_text()
        serving.wait_for("is up again", 1)
        serving.everything()
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 130
    finally:
        serving.close()
    lines, rows = load_metrics(tmp_path / "runs" / "one"), load_rollouts(tmp_path / "runs" / "one")
    assert sum(line["recoveries"] for line in lines) == 1
    assert len(rows) == 25 * 2 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    assert all(set(row["versions"]) == {row["batch"] - 1} for row in rows)


@pytest.mark.vllm
def test_nothing_of_a_real_server_outlives_us_when_we_are_killed(tmp_path):
    """While it loads the model: its worker processes are there."""
    serving = real(tmp_path, tiny_directory(tmp_path))
    try:
        serving.until(lambda: len(serving.everything()) >= 4, DEADLINES.start)  # guard, server, engine, worker
        time.sleep(1)
        serving.everything()
        serving.process.send_signal(signal.SIGKILL)
        assert serving.ended() == -9
    finally:
        serving.close()
