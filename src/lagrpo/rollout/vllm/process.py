"""A vLLM server that this process starts, watches and ends.

It runs in an environment of its own (`make vllm-env`) and listens on 127.0.0.1, unless `lagrpo serve` was told
otherwise. It always wants an API key: the user's, or one that is made up. A guard stands between it and us: a small
process that ends the server, with everything the server started, as soon as we are gone.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired

from lagrpo.redaction import redact
from lagrpo.rollout.vllm.server import Deadlines, Server, UnreachableError
from lagrpo.threads import drop_own

logger = logging.getLogger("lagrpo")
LOOPBACK = "127.0.0.1"
SHOWN = 30  # lines of a server's log that a failure shows
STOPPING = 20.0  # seconds for a guard to end its server; it needs at most ten
CHECKING = 60.0  # seconds for a Python to say whether it has vLLM
GUARD = """
import ctypes, os, select, signal, subprocess, sys
def end_with_guard():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_guard)
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
code = server.poll()
sys.exit(1 if code is None else code & 255)
"""


PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
"""Linear layers that servers take adapters for, by their names in the models and in vLLM."""
EXTENDED = "lagrpo_extension.Worker"
EXTENSION = Path(__file__).parent / "extension"  # the only directory of ours that vLLM's Python sees


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    python: str  # of the environment that has vLLM
    model: str  # path or id
    dtype: str
    longest: int  # longest sequence, in tokens
    max_num_seqs: int  # most completions at a time
    wire: str = "directory"  # how weights will reach it
    options: tuple[str, ...] = ()  # further options of vLLM
    host: str = LOOPBACK  # address that it listens on
    lora: tuple[int, int] = (0, 0)  # largest rank of adapters, and how many may be in use at a time; 0: none

    def command(self, port: int) -> list[str]:
        """The command line. Log-probs are given at the sampling temperature. The model's own generation settings are
        not used, as they may truncate the distribution.

        On CPUs prompts are kept whole: vLLM 0.32 dies when it computes the prompt of a seeded request in two steps.
        After the first one it resets the generator by its offset, which CPU generators do not have."""
        transfer = [] if self.wire == "directory" else ["--weight-transfer-config", f'{{"backend": "{self.wire}"}}']
        on_cpu = [
            "--enforce-eager",
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            str(max(8192, self.longest)),
        ]
        return [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--dtype", self.dtype),
            *("--host", self.host, "--port", str(port), "--enable-scale-out", "--generation-config", "vllm"),
            *("--logprobs-mode", "processed_logprobs", "--max-model-len", str(self.longest)),
            *("--max-num-seqs", str(self.max_num_seqs), *([] if _has_gpu() else on_cpu)),
            *("--worker-extension-cls", EXTENDED),
            *(*self._adapters(), *transfer, *self.options),
        ]

    def _adapters(self) -> list[str]:
        """The head is left out: vLLM 0.32 dies when it computes log-probs of a prompt with an adapter beside it."""
        rank, count = self.lora
        sizes = ["--max-lora-rank", str(rank), "--max-loras", str(count)]
        return ["--enable-lora", *sizes, "--lora-target-modules", *PROJECTIONS] if rank else []

    def environment(self, key: str) -> dict[str, str]:
        """Environment variables of the server's process.

        The key is here because everybody can read a command line. Development mode is for pausing and loading weights.
        On CPUs, unless our own environment says otherwise: 2 GiB for keys and values, and all cores, as the trainer
        mostly waits while the server generates. How our threads wait is not passed on: the server has another OpenMP.
        """
        own = {"VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if self.wire == "ipc" else {}
        own |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.lora[0] else {}
        ours = ("OMP_NUM_THREADS", "PYTHONPATH")
        inherited = {name: value for name, value in drop_own(os.environ).items() if name not in ours}
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        return {**cpu, **inherited, **own, "PYTHONPATH": str(EXTENSION)}


class StartedServer(Server):
    """A server of our own, whose output goes to the file `log_path`. Port and API key are made up unless given."""

    reloading = "reload_with_head"

    def __init__(
        self, launch: Launch, deadlines: Deadlines, log_path: Path, port: int = 0, key: str | None = None
    ) -> None:
        self.key = key or secrets.token_urlsafe(24)
        self.port = port or find_free_port()
        super().__init__(f"http://{_reachable(launch.host)}:{self.port}", self.key, deadlines)
        self.launch, self.log_path = launch, log_path
        self.guard: Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._start()

    @property
    def running(self) -> bool:
        return self.guard is not None and self.guard.poll() is None

    def _not_ready(self, seconds: float) -> str:
        what = "did not get ready" if self.running else "ended"
        return f"the vLLM server {what} within {seconds:g} s.{self.tail()}"

    def revive(self) -> None:
        """End what is left of the server and restart it. Raises UnreachableError if it does not get ready."""
        logger.info("restarting the vLLM server at %s", self.url)
        self._stop()
        self._wait_until_gone()
        self._start()
        self.wait(self.deadlines.start)

    def close(self) -> None:
        self._closed = True
        self._stop()
        super().close()

    def keep_log(self, path: Path) -> None:
        """Move the log to `path`; the server goes on writing to it."""
        if self.log_path.is_file():
            self.log_path = self.log_path.rename(path)

    def tail(self) -> str:
        """The end of its log, and where the rest is."""
        text = ""
        if self.log_path.is_file():
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - (1 << 16)))
                text = file.read().decode(errors="replace")
        shown = "\n".join(f"  {line[:300]}" for line in redact(text).splitlines()[-SHOWN:])
        return f" The end of its log, {self.log_path}:\n{shown}" if shown else f" Its log is {self.log_path}"

    def _start(self) -> None:
        command = [sys.executable, "-c", GUARD, *self.launch.command(self.port)]
        env = self.launch.environment(self.key)
        with self._lock:
            if self._closed:
                raise UnreachableError(f"{self.url} was closed")
            with self.log_path.open("ab") as out:
                self.guard = Popen(command, stdin=PIPE, stdout=out, stderr=out, env=env, start_new_session=True)

    def _wait_until_gone(self) -> None:
        """Return once nobody listens on the port. A server whose guard was killed ends a moment after it. Raises
        UnreachableError for one that stays: the new server could not take its place."""
        end = time.monotonic() + STOPPING
        while _is_listening(self.port):
            if time.monotonic() > end:
                raise UnreachableError(f"another process listens on port {self.port}, that of {self.url}: end it")
            time.sleep(0.1)

    def _stop(self) -> None:
        """The guard ends the server as soon as its input is closed."""
        with self._lock:
            if (guard := self.guard) is not None and guard.stdin is not None:
                guard.stdin.close()
                try:
                    guard.wait(STOPPING)
                except TimeoutExpired:
                    guard.kill()


def _is_listening(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((LOOPBACK, port)) == 0


def find_free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind((LOOPBACK, 0))
        return sock.getsockname()[1]


def check_python(python: str) -> str:
    """The absolute path of `python`. Raises ValueError unless it is a Python that has vLLM."""
    path = Path(python).expanduser().absolute()
    if not path.is_file():
        raise ValueError(
            f"{python}: no such Python. `make vllm-env` makes an environment with vLLM; name its bin/python"
        )
    if not os.access(path, os.X_OK):
        raise ValueError(f"{python} cannot be executed; name the bin/python of an environment with vLLM")
    script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    elsewhere = path.parent  # a directory `vllm` in our working directory is no package
    try:
        asked = subprocess.run(
            [str(path), "-c", script], capture_output=True, check=False, cwd=elsewhere, timeout=CHECKING
        )
    except TimeoutExpired as error:
        raise ValueError(f"{python} did not say within {CHECKING:g} s whether it has vllm; try it by hand") from error
    if asked.returncode:
        raise ValueError(f"{python} has no vllm: `make vllm-env` makes an environment that has it")
    return str(path)


def check_options(options: Sequence[str], ours: Collection[str]) -> None:
    """Raises ValueError, without a value in it, for an option (word by word) that is one of `ours`,
    also where it is shortened or written with underscores."""
    names = [word.partition("=")[0].replace("_", "-") for word in options if word.startswith("--")]
    if taken := sorted({own for own in ours for name in names if len(name) > 2 and own.startswith(name)}):
        raise ValueError(f"options: {', '.join(map(repr, taken))} is set by lagrpo itself")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(host: str) -> str:
    """The address as part of a URL; that of this machine where the server listens on all of them."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
