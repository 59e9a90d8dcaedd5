"""A vLLM server that this process starts, watches and ends.

It runs in an environment of its own (`make vllm-env`), bound to 127.0.0.1, with a generated API key. Between us and it
stands a guard: a small process that ends the server with everything it started as soon as we are gone, however we go.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lagrpo.sampling.vllm.server import Deadlines, Server, UnreachableError
from lagrpo.threads import waiting

SHOWN = 30  # lines of a server's log that a failure shows
GUARD = """
import os, select, signal, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
while server.poll() is None and not select.select([0], [], [], 0.2)[0]:
    pass
for end in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.killpg(server.pid, end)
    except ProcessLookupError:
        break
    try:
        server.wait(5)
    except subprocess.TimeoutExpired:
        pass
sys.exit(server.wait() & 255)
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started: `python` of the environment that has vllm, the model's path or id, its dtype, the
    longest sequence and the most completions at a time, and further `options` of vllm."""

    python: str
    model: str
    dtype: str
    longest: int
    max_num_seqs: int
    wire: str = "directory"
    options: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        """The command line. Log-probs are those at the sampling temperature; the model's own generation settings, which
        may cut the distribution, are not used."""
        transfer = [] if self.wire == "directory" else ["--weight-transfer-config", f'{{"backend": "{self.wire}"}}']
        here = [] if _has_gpu() else ["--enforce-eager", *self._whole_prompts()]
        return [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--dtype", self.dtype),
            *("--host", "127.0.0.1", "--port", str(port), "--enable-scale-out", "--generation-config", "vllm"),
            *("--logprobs-mode", "processed_logprobs", "--max-model-len", str(self.longest)),
            *("--max-num-seqs", str(self.max_num_seqs), *here, *transfer, *self.options),
        ]

    def _whole_prompts(self) -> list[str]:
        """On CPUs vLLM 0.32 dies when a prompt of a seeded request is computed in two steps: it takes back the draw
        after the first one by the generator's offset, which CPU generators do not have. So prompts stay whole."""
        return ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(8192, self.longest))]

    def environment(self, key: str) -> dict[str, str]:
        """Of the server's process: the key (never on the command line, where everybody can read it), development mode
        for pausing and loading weights, no usage statistics. On CPUs, unless our own environment says otherwise: 2 GiB
        for keys and values, and all cores to compute with, as the trainer mostly waits while the server generates. How
        our threads wait for each other is not passed on: its OpenMP is another one."""
        own = {"VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if self.wire == "ipc" else {}
        ours = ("OMP_NUM_THREADS", "PYTHONPATH")
        inherited = {name: value for name, value in waiting.given(os.environ).items() if name not in ours}
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        return {**cpu, **inherited, **own}


class StartedServer(Server):
    """A server of our own. `log` is the file that gets its output; `say` hears of starts and restarts. Port and API key
    are free to choose; by default they are made up."""

    def __init__(
        self,
        launch: Launch,
        deadlines: Deadlines,
        log: Path,
        say: Callable[[str], None],
        port: int = 0,
        key: str | None = None,
    ) -> None:
        self.key = key or secrets.token_urlsafe(24)
        self.port = port or free_port()
        super().__init__(f"http://127.0.0.1:{self.port}", self.key, deadlines)
        self.launch, self.log, self.say = launch, log, say
        self.guard: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._start()

    @property
    def running(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    def wait(self, seconds: float) -> None:
        """Until the server is healthy. Raises UnreachableError when it is not within that time, or ends."""
        end = time.monotonic() + seconds
        while not self.healthy():
            if not self.running or time.monotonic() > end:
                what = "did not get ready" if self.running else "ended"
                raise UnreachableError(f"the vLLM server {what} within {seconds:g} s.{self.tail()}")
            time.sleep(0.2)

    def revive(self) -> None:
        """End what is left of the server and start it again. Raises UnreachableError when it does not get ready."""
        self.say(f"the vLLM server at {self.url} is started again")
        self._stop()
        self._start()
        self.wait(self.deadlines.start)

    def close(self) -> None:
        """End the server and everything it started."""
        self._closed = True
        self._stop()
        super().close()

    def keep_log(self, path: Path) -> None:
        """Give the log its final name; the server goes on writing to it."""
        if self.log.is_file():
            self.log = self.log.rename(path)

    def tail(self) -> str:
        """The end of its log, and where the rest is."""
        lines = _end_of(self.log).splitlines()
        shown = "\n".join(f"  {line[:300]}" for line in lines[-SHOWN:])
        return f" The end of its log, {self.log}:\n{shown}" if shown else f" Its log is {self.log}"

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise UnreachableError(f"{self.url} was closed")
            command = [sys.executable, "-c", GUARD, *self.launch.command(self.port)]
            with self.log.open("ab") as log:
                environment = self.launch.environment(self.key)
                self.guard = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
                )

    def _stop(self) -> None:
        """The guard ends the server as soon as its input is closed."""
        with self._lock:
            if self.guard is not None and self.guard.stdin is not None:
                self.guard.stdin.close()
                try:
                    self.guard.wait(20)
                except subprocess.TimeoutExpired:
                    self.guard.kill()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _end_of(path: Path, size: int = 1 << 16) -> str:
    """The last `size` bytes of a file as text; nothing of one that is not there."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


def missing(python: str) -> str | None:
    """What is wrong with the Python of the settings; None where it is there and has vllm."""
    path = Path(python).expanduser().absolute()
    if not path.is_file():
        return f"{python}: no such Python. `make vllm-env` makes an environment with vLLM; name its bin/python"
    if not os.access(path, os.X_OK):
        return f"{python} cannot be executed; name the bin/python of an environment with vLLM"
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    elsewhere = path.parent  # a directory `vllm` where we are is no package
    done = subprocess.run([str(path), "-c", probe], capture_output=True, check=False, cwd=elsewhere)
    return f"{python} has no vllm: `make vllm-env` makes an environment that has it" if done.returncode else None


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def expanded(options: Sequence[str]) -> tuple[str, ...]:
    """Options as a shell would split them, whether they came as one string or as several."""
    import shlex

    return tuple(word for option in options for word in shlex.split(option))
