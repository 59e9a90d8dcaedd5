"""vLLM servers: the one that a run starts, those that it attaches to, and `lagrpo vllm-serve`.

vLLM has an environment of its own (`make vllm-env`); $LAGRPO_VLLM_PYTHON names its Python. Started servers listen on
127.0.0.1 and want an API key. A guard, a small process between a run and its server, ends the server with everything
that the server started as soon as the run is gone.
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
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NoReturn

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.logs import redact
from lagrpo.machine import drop_own, drop_torchrun
from lagrpo.model.embedded import check_path, resolve_model
from lagrpo.rollout.vllm.client import HOW_TO_START, KEY, SamplerError, VllmClient
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import split_server_args

PYTHON = "LAGRPO_VLLM_PYTHON"  # environment variable with the Python that has vLLM
GET_PYTHON = f"`make vllm-env` installs it, or set {PYTHON} to a Python that has it"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_TIMEOUT = 1200.0  # seconds until a server must be ready
EXTENSION = "lagrpo_extension.Worker"
LORA_RANKS = (0, 1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 can be started with
# All layers but the head: vLLM 0.32 dies when it computes log-probs of a prompt with an adapter on the head.
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
GUARD = """
import os, select, signal, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
while server.poll() is None and not select.select([0], [], [], 0.2)[0]:
    pass
for end in (signal.SIGTERM, signal.SIGKILL):
    try:
        os.killpg(server.pid, end)
        server.wait(5)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
"""
logger = logging.getLogger("lagrpo")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    python: str
    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    transfer: str = "directory"
    options: tuple[str, ...] = ()
    host: str = LOOPBACK[0]
    lora_rank: int = 0
    """largest rank of adapters; 0 for none"""
    gpus: tuple[int, ...] = ()

    def command(self, port: int) -> list[str]:
        """Log-probs are those at the sampling temperature. The model's own generation settings might truncate the
        distribution. On CPUs prompts are kept whole: vLLM 0.32 cannot compute a seeded prompt in two steps there."""
        words = [
            *(
                self.python,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                self.model,
                "--dtype",
                self.dtype,
            ),
            *(
                "--host",
                self.host,
                "--port",
                str(port),
                "--enable-scale-out",
                "--generation-config",
                "vllm",
            ),
            *("--logprobs-mode", "processed_logprobs", "--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs), "--worker-extension-cls", EXTENSION),
        ]
        if not (self.gpus or os.environ.get("CUDA_VISIBLE_DEVICES") or has_gpu()):
            words += ["--enforce-eager", "--no-enable-chunked-prefill"]
            words += ["--max-num-batched-tokens", str(max(8192, self.max_model_len))]
        if self.transfer == "nccl":
            words += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        if self.lora_rank:
            rank = next((rank for rank in LORA_RANKS if rank >= self.lora_rank), self.lora_rank)
            words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "4"]
            words += ["--lora-target-modules", *LORA_LAYERS]
        return [*words, *self.options]

    def environment(self, key: str) -> dict[str, str]:
        """Every user can read a command line, so the key is here. On CPUs a server gets 2 GiB for keys and values and
        all cores, unless our own environment says otherwise: the trainer mostly waits while it samples. A server that
        a rank starts is not a rank itself."""
        inherited = {
            name: value
            for name, value in drop_torchrun(drop_own(os.environ)).items()
            if name not in ("OMP_NUM_THREADS", "PYTHONPATH")
        }
        own = {"VLLM_API_KEY": key, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.lora_rank else {}
        own |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}
        own["PYTHONPATH"] = str(Path(__file__).parent / "extension")
        return (
            {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"} | inherited | own
        )


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """True if this machine has an NVIDIA GPU. A container may have any of them, not just the first."""
    return any(devices.glob("nvidia[0-9]*"))


class StartedServer(VllmClient):
    """A server that this process starts, and ends. Its output goes to the file `log`."""

    reload_method = "reload_with_head"

    def __init__(self, launch: Launch, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind((LOOPBACK[0], 0))
            self.port = probe.getsockname()[1]
        self.launch, self.log, self.key = launch, log, secrets.token_urlsafe(24)
        super().__init__(f"http://{LOOPBACK[0]}:{self.port}", self.key)
        self._start()

    def wait_until_ready(self) -> None:
        """Raises SamplerError, with the end of the log, if the server ends or is not ready in time."""
        end = time.monotonic() + START_TIMEOUT
        while not self.is_healthy():
            if self.guard.poll() is not None or time.monotonic() > end:
                what = (
                    "ended"
                    if self.guard.poll() is not None
                    else f"was not ready within {START_TIMEOUT:g} s"
                )
                log = self.log.read_text(encoding="utf-8", errors="replace")
                lines = redact(log).splitlines()[-30:]
                shown = "".join(f"\n  {line[:300]}" for line in lines)
                if "No module named 'vllm'" in shown:
                    raise SamplerError(f"{self.launch.python} has no vLLM: {GET_PYTHON}")
                raise SamplerError(
                    f"the vLLM server {what}. The end of its log, {self.log}:{shown}"
                )
            time.sleep(0.2)

    def restart(self) -> None:
        self.close()
        self._start()
        self.wait_until_ready()

    def close(self) -> None:
        """The guard ends the server as soon as its input is closed."""
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        self.guard.wait(30)

    def _start(self) -> None:
        command = [sys.executable, "-c", GUARD, *self.launch.command(self.port)]
        with self.log.open("ab") as out:
            env = self.launch.environment(self.key)
            self.guard = Popen(
                command, stdin=PIPE, stdout=out, stderr=out, env=env, start_new_session=True
            )


def open_servers(settings: Settings, replied: int = 0) -> list[VllmClient]:
    """The servers that the settings name, or one that is on its way up, for completions with up to `replied` tokens of
    an environment. Raises SettingsError for a server that cannot be used, or started."""
    longest = settings.longest + replied + 1
    with as_settings_error("vllm", SamplerError):
        if settings.vllm.urls:
            return [attach_server(url, settings, longest) for url in settings.vllm.urls]
        return [start_server(settings, longest)]


def attach_server(url: str, settings: Settings, longest: int) -> VllmClient:
    """A server that runs already. Raises SamplerError or ValueError for one that cannot be used."""
    server = VllmClient(url, os.environ.get(KEY))
    try:
        limit = server.call("GET", "/v1/models")["data"][0]["max_model_len"]
    except (TypeError, LookupError) as error:
        raise ValueError(f"{url} is not a vLLM server: {HOW_TO_START}") from error
    if limit < longest:
        what = f"{url} takes sequences of at most {limit} tokens, but the settings allow {longest}"
        raise ValueError(
            f"{what}: lower rollout.max_completion_length, or raise the server's --max-model-len"
        )
    if server.get_config()["parallel_config"].get("worker_extension_cls") == EXTENSION:
        server.reload_method = StartedServer.reload_method
    return server


def start_server(settings: Settings, longest: int) -> StartedServer:
    """A server on its way up."""
    from lagrpo.model.backend import pick_device, pick_dtype

    vllm, folder = settings.vllm, Path(settings.run.output_dir)
    dtype, _ = pick_dtype(settings.model.dtype, pick_device())
    launch = Launch(
        find_python(),
        resolve_model(settings.model.path),
        dtype,
        longest,
        settings.rollout.max_num_seqs,
        vllm.weight_transfer,
        split_server_args(vllm.server_args),
        lora_rank=settings.model.lora_r,
        gpus=vllm.gpus,
    )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f".vllm-{os.getpid()}-{secrets.token_hex(4)}.log"
    logger.info("starting a vLLM server (log: %s)", log)
    return StartedServer(launch, log)


def find_python() -> str:
    """The Python that has vLLM. Raises ValueError if there is none."""
    path = Path(os.environ.get(PYTHON) or ".venv-vllm/bin/python").expanduser().absolute()
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
) -> NoReturn:
    """`lagrpo vllm-serve`: print how a run attaches, then become the server. `sizes` are dtype, max_model_len and
    max_num_seqs of a Launch. Raises SettingsError for no such Python or model, and for an address that other machines
    can reach without a key of the user's."""
    own = os.environ.get(KEY)
    if host not in LOOPBACK and not own:
        raise SettingsError(
            f"--host: other machines can reach {host}: set {KEY} to an API key that you choose"
        )
    with as_settings_error():
        check_path(model)
        options = split_server_args(server_args)
        given: Any = {
            "transfer": weight_transfer,
            "options": options,
            "host": host,
            "lora_rank": lora_r,
        }
        launch = Launch(find_python(), resolve_model(model), **sizes, **given)
    key, address = (
        own or secrets.token_urlsafe(24),
        LOOPBACK[0] if host in ("0.0.0.0", "::") else host,
    )
    words = [
        *("--model", shlex.quote(model)),
        "--rollout.engine vllm",
        f"--vllm.urls http://{address}:{port}",
    ]
    words += ["--vllm.weight_transfer nccl"] if weight_transfer == "nccl" else []
    words += [f"--model.lora_r {lora_r}"] if lora_r else []
    print("Starting a vLLM server; Ctrl-C stops it. To attach a run to it:\n")
    print(
        "" if own else f"  export {KEY}={key}\n",
        f"  lagrpo train … {' '.join(words)}\n",
        sep="",
        flush=True,
    )
    os.execvpe(launch.python, launch.command(port), launch.environment(key))
