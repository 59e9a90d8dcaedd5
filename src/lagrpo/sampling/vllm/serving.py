"""`lagrpo serve`: a vLLM server in the foreground, for trainers to attach to; started again when it dies.

The server is a `StartedServer` (sampling/vllm/process.py): in an environment of its own, on 127.0.0.1, with an API key,
and with a guard that ends it when we are gone. A trainer that finds it dead waits until it is back, and syncs its
weights to it anew.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.interrupts import interruptible
from lagrpo.policy.embedded import check_path, resolve_model
from lagrpo.sampling.vllm.process import Launch, StartedServer, expanded, missing
from lagrpo.sampling.vllm.server import KEY, Deadlines, SamplerError, UnreachableError

LOOK = 0.2  # seconds between two looks at the server


def serve(
    model: str,
    *,
    port: int,
    python: str,
    dtype: str,
    longest: int,
    max_num_seqs: int,
    weight_sync: str,
    failures: int,
    deadline: float,
    log: Path | None,
    options: Sequence[str],
) -> None:
    """Start a server of `model`, say how to attach to it, and keep it up until a signal comes.

    Raises:
        SettingsError: no such Python, model or log directory, a port in use, numbers that make no sense.
        SamplerError: the server did not get ready within `deadline` seconds, or ended more than `failures` times.
        Interrupted: Ctrl-C or SIGTERM; the server has been ended.
    """
    check_numbers(longest=longest, max_num_seqs=max_num_seqs, failures=failures, deadline=deadline)
    check_port(port)
    python = str(Path(python).expanduser().absolute())
    with refusing("--python"):
        if problem := missing(python):
            raise ValueError(problem)
    with refusing("model.path"):
        check_path(model)
    log = (log or Path(f"vllm-{port}.log")).absolute()
    with refusing("--log"):
        log.open("ab").close()
    given = os.environ.get(KEY)
    launch = Launch(
        python=python,
        model=resolve_model(model),
        dtype=dtype,
        longest=longest,
        max_num_seqs=max_num_seqs,
        wire=weight_sync,
        options=expanded(options),
    )
    with interruptible():
        say(f"starting {model} with {python} (log: {log}) …")
        server = StartedServer(launch, Deadlines(start=deadline), log, say, port, given)
        try:
            server.wait(deadline)
            print(how_to_attach(server.url, model, weight_sync, None if given else server.key), flush=True)
            keep_up(server, failures)
        finally:
            server.close()


def keep_up(server: StartedServer, failures: int) -> None:
    """Start the server again whenever it has ended, `failures` times; only an error or a signal ends this.

    Raises:
        SamplerError: it ended once more.
    """
    spent = 0
    while True:
        while server.running:
            time.sleep(LOOK)
        say(f"the vLLM server at {server.url} ended.{server.tail()}")
        spent += 1
        while not brought_back(server, spent, failures):
            spent += 1


def brought_back(server: StartedServer, spent: int, failures: int) -> bool:
    """Whether the server got ready again. Raises SamplerError when this was one failure too many."""
    if spent > failures:
        raise SamplerError(f"{server.url}: that was one failure more than --failures {failures} allows")
    try:
        server.revive()
    except UnreachableError as error:
        say(str(error))
        return False
    say(f"{server.url} is up again, with the weights it was started with; trainers sync theirs anew")
    return True


def check_numbers(longest: int, max_num_seqs: int, failures: int, deadline: float) -> None:
    """Raises SettingsError for numbers that make no sense."""
    least = {"--max-model-len": (longest, 2), "--max-num-seqs": (max_num_seqs, 1), "--failures": (failures, 0)}
    for name, (number, smallest) in least.items():
        if number < smallest:
            raise SettingsError(f"{name} is at least {smallest}, not {number}")
    if not deadline > 0:
        raise SettingsError(f"--deadline is more than 0 seconds, not {deadline:g}")


def check_port(port: int) -> None:
    """Raises SettingsError for a port of 127.0.0.1 that cannot be listened on."""
    if not 1 <= port <= 65535:
        raise SettingsError(f"--port is a number from 1 to 65535, not {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closing connections are free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            raise SettingsError(f"--port: {port} on 127.0.0.1 {reason}; name another") from error


def how_to_attach(url: str, model: str, weight_sync: str, key: str | None) -> str:
    """What is printed when the server is up; `key` is None where the user has set it.

    >>> print(how_to_attach("http://127.0.0.1:8000", "smollm2", "directory", None))
    lagrpo: http://127.0.0.1:8000 is up; Ctrl-C ends it. To attach (the API key is that of $LAGRPO_VLLM_API_KEY):
    <BLANKLINE>
      lagrpo train … --model smollm2 --sampling.sampler vllm --vllm.urls http://127.0.0.1:8000
    <BLANKLINE>
    """
    whose = "" if key else f" (the API key is that of ${KEY})"
    wire = "" if weight_sync == "directory" else f" --vllm.weight_sync {weight_sync}"
    lines = [f"  export {KEY}={key}"] if key else []
    lines += [f"  lagrpo train … --model {shlex.quote(model)} --sampling.sampler vllm --vllm.urls {url}{wire}"]
    return "\n".join([f"lagrpo: {url} is up; Ctrl-C ends it. To attach{whose}:", "", *lines, ""])


def say(text: str) -> None:
    print(f"lagrpo: {text}", flush=True)
