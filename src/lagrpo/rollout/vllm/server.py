"""vLLM servers: a server that a run starts, servers that it attaches to, and `lagrpo vllm-serve`.

vLLM runs in a separate virtual environment (`make vllm-env`); $LAGRPO_VLLM_PYTHON names its Python.
Started servers listen on 127.0.0.1 and want an API key. A guard, a small process between a run and
its server, ends the server with everything that the server started as soon as the run is gone.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO, Any

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.interrupts import interruptible
from lagrpo.logs import print_text, redact
from lagrpo.machine import VLLM_PYTHON, drop_own, drop_torchrun, visible_gpus
from lagrpo.model.embedded import check_path, resolve_model
from lagrpo.rollout.vllm.client import HOW_TO_START, KEY, SamplerError, VllmClient
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import split_server_args

# Environment variable with the Python that has vLLM.
PYTHON = "LAGRPO_VLLM_PYTHON"
GET_PYTHON = f"`make vllm-env` installs it, or set {PYTHON} to a Python that has it"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Addresses by which a server listens on all interfaces.
ALL_INTERFACES = ("0.0.0.0", "::")
# Of vLLM's options: the share of a GPU's memory that a server takes. Its own default is 0.92.
MEMORY_OPTION = "--gpu-memory-utilization"
# The share on a GPU that also trains. The trainer, which needs 16 bytes per parameter and its
# activations, has the rest.
SHARED_MEMORY = "0.4"
# Lines of a server's log that an error shows, and characters of each.
SHOWN_LINES = 30
SHOWN_CHARACTERS = 300
EXTENSION = "lagrpo_extension.Worker"
MIDDLEWARE = "lagrpo_extension.RequireKey"
# The largest ranks of adapters that vLLM 0.32 can be started with.
LORA_RANKS = (0, 1, 8, 16, 32, 64, 128, 256, 320, 512)
# All layers but the head: with an adapter on the head, vLLM 0.32 crashes when it computes log-probs
# of a prompt.
LORA_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
)
# The program of the guard. Its standard input is a pipe from the run: when the run closes it or is
# gone, the pipe is readable, and the guard ends the server's process group. If the guard itself is
# killed, Linux ends the server (PR_SET_PDEATHSIG), which then ends what it has started.
GUARD = """
import ctypes, os, select, signal, subprocess, sys
def end_with_guard():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
server = subprocess.Popen(
    sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_guard
)
while server.poll() is None and not select.select([0], [], [], 0.2)[0]:
    pass
code = server.poll()
for end in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.killpg(server.pid, end)
        server.wait(5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
# As in a shell, 128 and its number for a signal that ended the server.
if code is not None:
    sys.exit(code if code >= 0 else 128 - code)
"""
logger = logging.getLogger("lagrpo")


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line and environment variables with which a server is started.

    - `python`: the Python that has vLLM
    - `options`: more options of vLLM, behind ours
    - `lora_rank`: the largest rank of adapters; 0 for none
    - `gpus`: the numbers of the GPUs that the server may use; empty for no restriction
    - `sleeps`: True if the server can sleep
    """

    python: str
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    transfer: str = "directory"
    options: tuple[str, ...] = ()
    host: str = LOOPBACK[0]
    lora_rank: int = 0
    gpus: tuple[int, ...] = ()
    sleeps: bool = False

    def command(self, port: int) -> list[str]:
        """Returns the command line."""
        words = [self.python, "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--model", self.model]
        words += ["--dtype", self.dtype]
        words += ["--host", self.host]
        words += ["--port", str(port)]
        words += ["--enable-scale-out"]
        # The model's own generation settings might truncate the distribution.
        words += ["--generation-config", "vllm"]
        # Log-probs at the sampling temperature.
        words += ["--logprobs-mode", "processed_logprobs"]
        words += ["--max-model-len", str(self.max_model_len)]
        words += ["--max-num-seqs", str(self.max_num_seqs)]
        words += ["--worker-extension-cls", EXTENSION]
        # No page in a browser may read an answer, and no request is served without the key.
        words += ["--allowed-origins", "[]"]
        words += ["--middleware", MIDDLEWARE]
        gpus = visible_gpus()
        sees_gpu = has_gpu() if gpus is None else bool(gpus)
        if not self.gpus and not sees_gpu:
            words += ["--enforce-eager"]
            # Prompts are kept whole: on a CPU vLLM 0.32 cannot compute a seeded prompt in two
            # steps.
            words += ["--no-enable-chunked-prefill"]
            words += ["--max-num-batched-tokens", str(max(8192, self.max_model_len))]
        if self.transfer == "nccl":
            words += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        if self.sleeps:
            words += ["--enable-sleep-mode"]
        if self.lora_rank:
            # A rank above the largest one is passed on as it is.
            rank = next((rank for rank in LORA_RANKS if rank >= self.lora_rank), self.lora_rank)
            words += ["--enable-lora"]
            words += ["--max-lora-rank", str(rank)]
            words += ["--max-loras", "4"]
            words += ["--lora-target-modules", *LORA_LAYERS]
        return [*words, *self.options]

    def environment(self, key: str) -> dict[str, str]:
        """Returns the environment variables.

        Every user can read a command line, so the API key is here. A server that a rank starts is
        not a rank itself.
        """
        variables = {
            # On a CPU: GiB for keys and values, and no core is kept free, because the trainer
            # mostly waits while the server samples. The user's own environment may change both.
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        variables |= drop_torchrun(drop_own(os.environ))
        variables.pop("OMP_NUM_THREADS", None)
        variables["VLLM_API_KEY"] = key
        variables["VLLM_SERVER_DEV_MODE"] = "1"
        variables["VLLM_NO_USAGE_STATS"] = "1"
        if self.lora_rank:
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        variables["PYTHONPATH"] = str(Path(__file__).parent / "extension")
        # No file of the current directory shadows a module of Python.
        variables["PYTHONSAFEPATH"] = "1"
        return variables


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """True if this machine has an NVIDIA GPU."""
    # A container may have any of them, not just the first.
    return any(devices.glob("nvidia[0-9]*"))


class StartedServer(VllmClient):
    """A server that this process starts, and ends. Its output goes to the file `log`."""

    reload_method = "reload_with_head"
    can_restart = True

    def __init__(self, launch: Launch, log: Path, **timeouts: float) -> None:
        self.launch = launch
        self.log = log
        self.key = secrets.token_urlsafe(24)
        self.port = _free_port()
        super().__init__(f"http://{LOOPBACK[0]}:{self.port}", self.key, **timeouts)
        self._start()

    def wait_until_ready(self) -> None:
        """Waits until the server answers.

        Raises SamplerError, with the end of the log, if the server ends or is not ready in time.
        """
        end = time.monotonic() + self.load_timeout
        while not self.is_healthy():
            if self.guard.poll() is not None:
                raise self._start_error("ended")
            if time.monotonic() > end:
                raise self._start_error(
                    f"was not ready within {self.load_timeout:g} s (vllm.load_timeout)"
                )
            time.sleep(0.2)

    def _start_error(self, what_happened: str) -> SamplerError:
        log = self.log.read_text(encoding="utf-8", errors="replace")
        lines = redact(log).splitlines()[-SHOWN_LINES:]
        shown = "".join(f"\n  {line[:SHOWN_CHARACTERS]}" for line in lines)
        if "No module named 'vllm'" in shown:
            return SamplerError(f"{self.launch.python} has no vLLM: {GET_PYTHON}")
        return SamplerError(
            f"the vLLM server {what_happened}. The end of its log, {self.log}:{shown}"
        )

    def restart(self) -> None:
        self.close()
        self._start()
        self.wait_until_ready()

    def close(self) -> None:
        _end_guarded(self.guard)

    def _start(self) -> None:
        with self.log.open("ab") as out:
            self.guard = start_guarded(self.launch, self.port, self.key, out)


def start_guarded(
    launch: Launch, port: int, key: str, out: IO[bytes] | None = None
) -> Popen[bytes]:
    """Starts a server that ends with this process, and returns its guard.

    Closing the guard's input ends the server. `out` gets the server's output.
    """
    return Popen(
        [sys.executable, "-P", "-c", GUARD, *launch.command(port)],
        stdin=PIPE,
        stdout=out,
        stderr=out,
        env=launch.environment(key),
        start_new_session=True,
    )


def _end_guarded(guard: Popen[bytes]) -> None:
    """Ends a server: its guard ends it as soon as the guard's input is closed."""
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK[0], 0))
        return probe.getsockname()[1]


def open_servers(
    settings: Settings, replied: int = 0, *, shares_gpu: bool = False
) -> list[VllmClient]:
    """Attaches to the servers that the settings name, or starts one, which is then on its way up.

    Completions have up to `replied` tokens of an environment. `shares_gpu`: a started server has
    a GPU together with the trainer. Raises SettingsError for a server that cannot be used, or
    started.
    """
    longest = longest_served(settings, replied)
    with as_settings_error("vllm", SamplerError):
        if settings.vllm.urls:
            timeouts = _timeouts(settings)
            return [attach_server(url, longest, **timeouts) for url in settings.vllm.urls]
        return [start_server(settings, longest, shares_gpu=shares_gpu)]


def longest_served(settings: Settings, replied: int = 0) -> int:
    """Returns the tokens of the longest sequence that servers take.

    The weight-sync check samples a token after at least one token of a completion.
    """
    longest = settings.max_sequence_length + replied
    return max(longest, settings.rollout.max_prompt_length + 2)


def _timeouts(settings: Settings) -> dict[str, float]:
    return {
        "load_timeout": settings.vllm.load_timeout,
        "generate_timeout": settings.vllm.generate_timeout,
    }


def wait_until_ready(servers: Sequence[VllmClient]) -> None:
    """Waits until the servers that this run starts answer. Raises SettingsError if one does not."""
    with as_settings_error("vllm", SamplerError):
        for server in servers:
            if isinstance(server, StartedServer):
                server.wait_until_ready()


def attach_server(url: str, longest: int, **timeouts: float) -> VllmClient:
    """Returns a client of a server that runs already, for sequences of `longest` tokens.

    Raises SamplerError or ValueError for a server that cannot be used.
    """
    server = VllmClient(url, os.environ.get(KEY), **timeouts)
    try:
        limit = server.call("GET", "/v1/models")["data"][0]["max_model_len"]
    except (TypeError, LookupError) as error:
        raise ValueError(f"{url} is not a vLLM server: {HOW_TO_START}") from error
    server.check_version()
    if limit < longest:
        raise ValueError(
            f"{url} takes sequences of at most {limit} tokens, but the settings allow {longest}: "
            "lower rollout.max_completion_length, or raise the server's --max-model-len"
        )
    parallel_config = server.get_config()["parallel_config"]
    if parallel_config.get("worker_extension_cls") == EXTENSION:
        server.reload_method = StartedServer.reload_method
    return server


def chosen_share(options: Sequence[str]) -> str | None:
    """Returns the share of a GPU's memory that options of vLLM give a server; None if none does.

    >>> chosen_share(["--seed", "3", "--gpu-memory-utilization", "0.3"])
    '0.3'
    """
    for word, next_word in zip_longest(options, options[1:], fillvalue=""):
        if word.startswith(MEMORY_OPTION):
            return word.partition("=")[2] or next_word
    return None


def start_server(settings: Settings, longest: int, *, shares_gpu: bool = False) -> StartedServer:
    """Starts a server for sequences of `longest` tokens. It is then on its way up.

    On a GPU that it shares with the trainer, it gets a part of the memory unless the user has
    chosen one.
    """
    from lagrpo.model.backend import pick_device, pick_dtype

    dtype, _ = pick_dtype(settings.model.dtype, pick_device())
    options = split_server_args(settings.vllm.server_args)
    if shares_gpu and chosen_share(options) is None:
        options = (MEMORY_OPTION, SHARED_MEMORY, *options)
        logger.info(
            "the vLLM server shares a GPU with the trainer: it takes %s of the memory "
            "(vllm.server_args = ['%s %s'] changes that)",
            SHARED_MEMORY,
            MEMORY_OPTION,
            SHARED_MEMORY,
        )
    launch = Launch(
        python=find_python(),
        model=resolve_model(settings.model.path),
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=settings.rollout.max_num_seqs,
        transfer=settings.vllm.weight_transfer,
        options=options,
        lora_rank=settings.model.lora_r,
        gpus=settings.vllm.gpus,
        sleeps=settings.vllm.sleep,
    )
    directory = Path(settings.run.output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f".vllm-{os.getpid()}-{secrets.token_hex(4)}.log"
    logger.info("starting a vLLM server (log: %s)", log)
    return StartedServer(launch, log, **_timeouts(settings))


def find_python() -> str:
    """Returns the path of the Python that has vLLM. Raises ValueError if there is none."""
    path = Path(os.environ.get(PYTHON) or VLLM_PYTHON).expanduser().absolute()
    if not path.is_file():
        raise ValueError(f"no Python with vLLM at {path}: {GET_PYTHON}")
    if not os.access(path, os.X_OK):
        raise ValueError(f"{path} ({PYTHON}) is not a program: {GET_PYTHON}")
    return str(path)


def serve(
    model: str,
    host: str,
    port: int,
    weight_transfer: str,
    lora_r: int,
    server_args: Sequence[str],
    **sizes: Any,
) -> int:
    """Runs `lagrpo vllm-serve`: prints how a run attaches, then returns the server's exit code.

    `sizes` are dtype, max_model_len and max_num_seqs of a Launch. Raises SettingsError if there is
    no such Python or model, and for an address that other machines can reach if the user has not
    chosen an API key.
    """
    key_of_user = os.environ.get(KEY)
    if host not in LOOPBACK and not key_of_user:
        raise SettingsError(
            f"--host: other machines can reach {host}: set {KEY} to an API key that you choose"
        )
    with as_settings_error():
        check_path(model)
        options = split_server_args(server_args)
        launch = Launch(
            python=find_python(),
            model=resolve_model(model),
            transfer=weight_transfer,
            options=options,
            host=host,
            lora_rank=lora_r,
            **sizes,
        )
    address = LOOPBACK[0] if host in ALL_INTERFACES else host
    words = ["lagrpo train …"]
    words += ["--model", shlex.quote(model)]
    words += ["--rollout.engine vllm"]
    words += [f"--vllm.urls http://{address}:{port}"]
    if weight_transfer == "nccl":
        words += ["--vllm.weight_transfer nccl"]
    if lora_r:
        words += [f"--model.lora_r {lora_r}"]
    print_text("Starting a vLLM server; Ctrl-C stops it. To attach a run to it:\n")
    key = key_of_user
    if not key:
        key = secrets.token_urlsafe(24)
        print_text(f"  export {KEY}={key}")
    print_text(f"  {' '.join(words)}\n", flush=True)
    with interruptible():
        guard = start_guarded(launch, port, key)
        try:
            return guard.wait()
        finally:
            _end_guarded(guard)
