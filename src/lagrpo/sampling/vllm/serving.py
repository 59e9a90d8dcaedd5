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
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.interrupts import interruptible
from lagrpo.policy.embedded import check_path, resolve_model
from lagrpo.sampling.vllm.process import Launch, StartedServer, check_python, split_options
from lagrpo.sampling.vllm.server import KEY, Deadlines, SamplerError, UnreachableError
from lagrpo.settings.serve import ServeSettings

logger = logging.getLogger("lagrpo")
LOOK = 0.2  # seconds between two looks at the server


def serve(settings: ServeSettings) -> None:
    """Start a server, print how to attach to it, and keep it up until a signal comes.

    Raises:
        SettingsError: no such Python, model or log directory, a port in use, senseless numbers.
        SamplerError: the server did not get ready within `deadline` seconds, or ended more than `failures` times.
        Interrupted: Ctrl-C or SIGTERM; the server has been ended.
    """
    log_path = (settings.log or Path(f"vllm-{settings.port}.log")).absolute()
    check(settings, log_path)
    launch, key = plan_launch(settings), os.environ.get(KEY)
    with interruptible():
        logger.info("starting %s with %s (log: %s) …", settings.model, launch.python, log_path)
        server = StartedServer(launch, Deadlines(start=settings.deadline), log_path, settings.port, key)
        try:
            server.wait(settings.deadline)
            print(describe_attaching(server.url, settings.model, launch.wire, None if key else server.key), flush=True)
            keep_up(server, settings.failures)
        finally:
            server.close()


def plan_launch(settings: ServeSettings) -> Launch:
    """How the server is started."""
    return Launch(
        python=str(Path(settings.python).expanduser().absolute()),
        model=resolve_model(settings.model),
        dtype=settings.dtype,
        longest=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        wire=settings.weight_sync,
        options=split_options(settings.options),
    )


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


def check(settings: ServeSettings, log_path: Path) -> None:
    """Raises SettingsError for settings that cannot be used."""
    s = settings
    least = {
        "--max-model-len": (s.max_model_len, 2),
        "--max-num-seqs": (s.max_num_seqs, 1),
        "--failures": (s.failures, 0),
    }
    for name, (number, smallest) in least.items():
        if number < smallest:
            raise SettingsError(f"{name} is at least {smallest}, not {number}")
    if not s.deadline > 0:
        raise SettingsError(f"--deadline is more than 0 seconds, not {s.deadline:g}")
    check_port(s.port)
    with refusing("--python"):
        check_python(s.python)
    with refusing("model.path"):
        check_path(s.model)
    with refusing("--log"):
        log_path.open("ab").close()


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
    lagrpo: http://127.0.0.1:8000 is up; Ctrl-C ends it. To attach (the API key is in $LAGRPO_VLLM_API_KEY):
    <BLANKLINE>
      lagrpo train … --model smollm2 --sampling.sampler vllm --vllm.urls http://127.0.0.1:8000
    <BLANKLINE>
    """
    whose = "" if key else f" (the API key is in ${KEY})"
    by = "" if wire == "directory" else f" --vllm.weight_sync {wire}"
    lines = [f"  export {KEY}={key}"] if key else []
    lines += [f"  lagrpo train … --model {shlex.quote(model)} --sampling.sampler vllm --vllm.urls {url}{by}"]
    return "\n".join([f"lagrpo: {url} is up; Ctrl-C ends it. To attach{whose}:", "", *lines, ""])
