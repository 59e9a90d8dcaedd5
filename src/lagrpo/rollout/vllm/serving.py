"""`lagrpo serve`: a vLLM server in the foreground, for trainers to attach to; restarted when it dies.

A trainer that finds it dead waits until it is back and syncs its weights to it again.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shlex
import socket
import time
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.interrupts import interruptible
from lagrpo.model.embedded import check_path, resolve_model
from lagrpo.rollout.vllm.limits import RANKS, SPANNED, rank_of_server
from lagrpo.rollout.vllm.process import (
    Launch,
    StartedServer,
    check_options,
    check_python,
    is_loopback,
)
from lagrpo.rollout.vllm.server import KEY, Deadlines, SamplerError, UnreachableError
from lagrpo.settings.options import split_options
from lagrpo.settings.serve import ServeSettings

logger = logging.getLogger("lagrpo")
OURS = {"--host", "--port", "--api-key"}  # `lagrpo serve` has options of its own, and the environment for the key
LOOK = 0.2  # seconds between two looks at the server


def serve(settings: ServeSettings) -> None:
    """Start a server, print how to attach to it, and keep it up until a signal comes.

    Raises:
        SettingsError: no such Python, model or log directory, a port in use, senseless numbers, an address that other
            machines can reach without a key of the user's, options that lagrpo sets or that hold a secret.
        SamplerError: the server did not get ready within `deadline` seconds, or ended more than `failures` times.
        Interrupted: Ctrl-C or SIGTERM; the server has been ended.
    """
    log_path = (settings.log or Path(f"vllm-{settings.port}.log")).absolute()
    launch, key = plan_launch(settings, log_path), os.environ.get(KEY)
    with interruptible():
        logger.info("starting %s with %s (log: %s) …", settings.model, launch.python, log_path)
        server = StartedServer(launch, Deadlines(start=settings.deadline), log_path, settings.port, key)
        try:
            server.wait(settings.deadline)
            own = None if key else server.key
            print(describe_attaching(server.url, settings.model, launch.wire, own, settings.lora_rank), flush=True)
            keep_up(server, settings.failures)
        finally:
            server.close()


def keep_up(server: StartedServer, failures: int) -> None:
    """Restart the server whenever it has ended, `failures` times. Raises SamplerError when it has ended once more."""
    up = True
    for spent in itertools.count():
        if up:
            while server.running:
                time.sleep(LOOK)
            logger.info("the vLLM server at %s ended.%s", server.url, server.tail())
        if spent == failures:
            raise SamplerError(f"{server.url}: that was one failure more than --failures {failures} allows")
        try:
            server.revive()
            up = True
            logger.info("%s is up again, with the weights it was started with; trainers sync theirs again", server.url)
        except UnreachableError as error:
            up = False
            logger.info("%s", error)


def plan_launch(settings: ServeSettings, log_path: Path) -> Launch:
    """How the server is started. Raises SettingsError for settings that cannot be used."""
    s = settings
    for name, least in (("max_model_len", 2), ("max_num_seqs", 1), ("failures", 0), ("lora_rank", 0)):
        if (number := getattr(s, name)) < least:
            raise SettingsError(f"--{name.replace('_', '-')} is at least {least}, not {number}")
    if not s.deadline > 0:
        raise SettingsError(f"--deadline is more than 0 seconds, not {s.deadline:g}")
    check_host(s.host)
    check_port(s.port, s.host)
    with refusing():
        check_options(options := split_options(s.options), OURS)
    with refusing("--python"):
        python = check_python(s.python)
    with refusing("model.path"):
        check_path(s.model)
    with refusing("--log"):
        log_path.open("ab").close()
    if s.lora_rank > RANKS[-1]:
        raise SettingsError(f"--lora-rank is at most {RANKS[-1]}, not {s.lora_rank}")
    sizes, lora = (s.max_model_len, s.max_num_seqs), (rank_of_server(s.lora_rank), SPANNED) if s.lora_rank else (0, 0)
    return Launch(python, resolve_model(s.model), s.dtype, *sizes, s.weight_sync, options, s.host, lora)


def check_host(host: str) -> None:
    """Raises SettingsError for an address that other machines can reach, unless the user has set an API key. Says what
    the key does not guard."""
    if is_loopback(host):
        return
    if not os.environ.get(KEY):
        raise SettingsError(
            f"--host: other machines can reach {host}: set {KEY} to an API key of your own, here and for the trainer"
        )
    logger.warning(
        "other machines can reach %s, and vLLM's endpoints that pause the server and load weights ask for no key: keep "
        "it in a network of your own (docs/vllm.md)", host,
    )  # fmt: skip


def check_port(port: int, host: str) -> None:
    """Raises SettingsError for a port of the address that cannot be listened on."""
    if not 1 <= port <= 65535:
        raise SettingsError(f"--port is a number from 1 to 65535, not {port}")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closing connections are free
        try:
            sock.bind((host, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"is not available ({error.strerror})"
            raise SettingsError(f"--port: {port} on {host} {reason}; name another") from error


def describe_attaching(url: str, model: str, wire: str, key: str | None, rank: int = 0) -> str:
    """What is printed when the server is up; `key` is None if the user has set it, `rank` that of adapters.

    >>> print(describe_attaching("http://127.0.0.1:8000", "smollm2", "directory", None, rank=8))
    lagrpo: http://127.0.0.1:8000 is up; Ctrl-C ends it. To attach (the API key is in $LAGRPO_VLLM_API_KEY):
    <BLANKLINE>
      lagrpo train … --model smollm2 --sampling.sampler vllm --vllm.urls http://127.0.0.1:8000 --model.lora.r 8
    <BLANKLINE>
    """
    whose = "" if key else f" (the API key is in ${KEY})"
    by = "" if wire == "directory" else f" --vllm.weight_sync {wire}"
    by += f" --model.lora.r {rank}" if rank else ""
    lines = [f"  export {KEY}={key}"] if key else []
    lines += [f"  lagrpo train … --model {shlex.quote(model)} --sampling.sampler vllm --vllm.urls {url}{by}"]
    return "\n".join([f"lagrpo: {url} is up; Ctrl-C ends it. To attach{whose}:", "", *lines, ""])
