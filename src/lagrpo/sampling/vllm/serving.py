"""`lagrpo serve`: a vLLM server in the foreground, for trainers to attach to; restarted when it dies.

The server is a `StartedServer` (process.py): in an environment of its own, on 127.0.0.1, with an API key, and with a
guard that ends it when we are gone. A trainer that finds it dead waits until it is back and syncs its weights to it
again.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lagrpo.errors import SettingsError, refusing
from lagrpo.interrupts import interruptible
from lagrpo.policy.embedded import check_path, resolve_model
from lagrpo.sampling.vllm.process import Launch, StartedServer, check_python, split_options
from lagrpo.sampling.vllm.server import KEY, Deadlines, SamplerError, UnreachableError
from lagrpo.settings.schema import SamplingSettings, VllmSettings

logger = logging.getLogger("lagrpo")
SAMPLING, VLLM = SamplingSettings(), VllmSettings()
LOOK = 0.2  # seconds between two looks at the server


@dataclass(frozen=True, slots=True)
class Serving:
    """Start a vLLM server on 127.0.0.1 for trainers to attach to, and keep it up until Ctrl-C.

    It prints the URL, the API key ($LAGRPO_VLLM_API_KEY if it is set) and the settings that attach to it.
    What follows -- goes to vLLM as it is: lagrpo serve MODEL -- --data-parallel-size 7"""

    model: str
    """Hub id or directory of a causal language model, or smollm2."""
    port: int = 8000
    """Where it listens."""
    python: str = VLLM.python
    """Python of the environment that has vLLM; `make vllm-env` makes one."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of its weights and arithmetic."""
    max_model_len: int = SAMPLING.max_prompt_tokens + SAMPLING.max_tokens + 1
    """Longest sequence; a run needs sampling.max_prompt_tokens + sampling.max_tokens + 1."""
    max_num_seqs: int = SAMPLING.rows
    """Completions generated at a time."""
    weight_sync: Literal["directory", "nccl", "ipc"] = VLLM.delivery
    """How weights will travel (vllm.delivery of the run)."""
    failures: int = VLLM.failures
    """How often it is restarted when it dies."""
    deadline: float = VLLM.start_deadline
    """Seconds for it to get ready."""
    log: Path | None = None
    """File that gets its output; vllm-PORT.log here by default."""
    options: tuple[str, ...] = ()
    """Further options of `vllm serve`: --options="--tensor-parallel-size 2", or behind --."""

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return (self.log or Path(f"vllm-{self.port}.log")).absolute()

    @property
    def python_path(self) -> str:
        return str(Path(self.python).expanduser().absolute())

    def check(self) -> None:
        """Raises SettingsError for no such Python, model or log directory, a port in use, senseless numbers."""
        self._check_numbers()
        check_port(self.port)
        with refusing("--python"):
            check_python(self.python_path)
        with refusing("model.path"):
            check_path(self.model)
        with refusing("--log"):
            self.log_path.open("ab").close()

    def _check_numbers(self) -> None:
        for name, smallest in {"max_model_len": 2, "max_num_seqs": 1, "failures": 0}.items():
            if (number := getattr(self, name)) < smallest:
                raise SettingsError(f"--{name.replace('_', '-')} is at least {smallest}, not {number}")
        if not self.deadline > 0:
            raise SettingsError(f"--deadline is more than 0 seconds, not {self.deadline:g}")

    def launch(self) -> Launch:
        """How the server is started."""
        return Launch(
            python=self.python_path,
            model=resolve_model(self.model),
            dtype=self.dtype,
            longest=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            wire=self.weight_sync,
            options=split_options(self.options),
        )


def serve(serving: Serving) -> None:
    """Start a server, print how to attach to it, and keep it up until a signal comes.

    Raises:
        SettingsError: options that cannot be used.
        SamplerError: the server did not get ready within `deadline` seconds, or ended more than `failures` times.
        Interrupted: Ctrl-C or SIGTERM; the server has been ended.
    """
    serving.check()
    key = os.environ.get(KEY)
    with interruptible():
        logger.info("starting %s with %s (log: %s) …", serving.model, serving.python_path, serving.log_path)
        server = StartedServer(serving.launch(), Deadlines(start=serving.deadline), serving.log_path, serving.port, key)
        try:
            server.wait(serving.deadline)
            logger.info(describe_attaching(server.url, serving.model, serving.weight_sync, None if key else server.key))
            keep_up(server, serving.failures)
        finally:
            server.close()


def keep_up(server: StartedServer, failures: int) -> None:
    """Restart the server whenever it has ended, `failures` times; only an error or a signal ends this.

    Raises:
        SamplerError: it ended once more.
    """
    spent = 0
    while True:
        while server.running:
            time.sleep(LOOK)
        logger.info("the vLLM server at %s ended.%s", server.url, server.tail())
        spent += 1
        while not bring_back(server, spent, failures):
            spent += 1


def bring_back(server: StartedServer, spent: int, failures: int) -> bool:
    """Whether the server got ready again. Raises SamplerError when this was one failure too many."""
    if spent > failures:
        raise SamplerError(f"{server.url}: that was one failure more than --failures {failures} allows")
    try:
        server.revive()
    except UnreachableError as error:
        logger.info("%s", error)
        return False
    logger.info("%s is up again, with the weights it was started with; trainers sync theirs again", server.url)
    return True


def check_port(port: int) -> None:
    """Raises SettingsError for a port of 127.0.0.1 that cannot be listened on."""
    if not 1 <= port <= 65535:
        raise SettingsError(f"--port is a number from 1 to 65535, not {port}")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closing connections are free
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"is not available ({error.strerror})"
            raise SettingsError(f"--port: {port} on 127.0.0.1 {reason}; name another") from error


def describe_attaching(url: str, model: str, wire: str, key: str | None) -> str:
    """What is printed when the server is up; `key` is None if the user has set it.

    >>> print(describe_attaching("http://127.0.0.1:8000", "smollm2", "directory", None))
    http://127.0.0.1:8000 is up; Ctrl-C ends it. To attach (the API key is in $LAGRPO_VLLM_API_KEY):
    <BLANKLINE>
      lagrpo train … --model smollm2 --sampling.sampler vllm --vllm.urls http://127.0.0.1:8000
    <BLANKLINE>
    """
    whose = "" if key else f" (the API key is in ${KEY})"
    by = "" if wire == "directory" else f" --vllm.delivery {wire}"
    lines = [f"  export {KEY}={key}"] if key else []
    lines += [f"  lagrpo train … --model {shlex.quote(model)} --sampling.sampler vllm --vllm.urls {url}{by}"]
    return "\n".join([f"{url} is up; Ctrl-C ends it. To attach{whose}:", "", *lines, ""])
