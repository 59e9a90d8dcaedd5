"""Nothing waits for ever: every call that can block has a deadline, or stands in BOUNDED with what bounds it.

Calls are found by their names: a library that waits under a name of its own belongs into the sets below. A deadline is
an argument: `timeout=` (not None), or one at the place where the function takes it.
"""

from __future__ import annotations

import ast
import doctest
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http, httpx

from lagrpo import hub, workers
from lagrpo.model import chat

SOURCES = Path(__file__).parent.parent / "src" / "lagrpo"

BARE = {"join", "wait", "get", "result", "exception", "acquire", "recv", "communicate", "accept"}
"""Methods that wait for ever when they are called with nothing. With an argument they are str.join, dict.get and the
like, or have a deadline."""
PLACE = {"wait_for": 1, "put": 2, "as_completed": 1, "create_connection": 1, "urlopen": 2}
"""What takes a deadline by its place, too: how many arguments stand before it."""
NAMED = {"recv_bytes", "recv_into", "recvfrom", "synchronize", "sigwait", "waitpid", "input", "request", "shutdown"}
SUBPROCESS = {"run", "check_output", "check_call", "call"}
COLLECTIVE = {"init_process_group", "barrier", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "init_rank"}
COLLECTIVE |= {"broadcast_object_list", "gather_object", "new_group"}
POOL = {"ThreadPoolExecutor", "ProcessPoolExecutor", "ProcessPool", "Pool"}
HUB = {"cached_file", "from_pretrained", "load_dataset", "hf_hub_download", "snapshot_download"}
ALWAYS = NAMED | COLLECTIVE | POOL | HUB
HTTP = "every action is a call of one server, which has a deadline of Deadlines"
SHORT = "held for a few statements that wait for nothing"
STUCK = "runs in a thread that run_within leaves behind at its deadline"
DONE = "called where the future is done"
CONTEXT = "ContextVar.get waits for nothing"
KEEPER = "Keeper.wait has DEADLINE of training/checkpoint.py inside"
OF_GROUP = "the process group has the timeout distributed.collective"
HUB_ASKED = "hub.limit_waits gives every request a deadline"
BOUNDED = {
    "guard.py:_reap waitpid": "with WNOHANG it never blocks",
    "backends/cpu/build.py:_compile ThreadPoolExecutor": "every task is a compiler with DEADLINE",
    "model/chat.py:_ask recv_bytes": "a reply has begun to come, and `killing` ends the process that sends it",
    "model/replies.py:tokens with _lock": "held while a chat template is rendered, which has DEADLINE",
    "model/rendering.py:serve recv": "an idle worker, for the life of its parent: its end closes the connection",
    "workers.py:die_with_parent join": "a thread of a worker, for the life of its parent",
    "cli.py:train put": "Arguments.put keeps a word",
    "rollout/vllm/adapters.py:forget_before with _lock": SHORT,
    "rollout/vllm/adapters.py:load with _lock": SHORT,
    "rollout/vllm/adapters.py:restore with _lock": SHORT,
    "rollout/vllm/adapters.py:using with _lock": SHORT,
    "rollout/vllm/conversing.py:converse ThreadPoolExecutor": HTTP + "; a reply has verifier.deadline",
    "rollout/vllm/fleet.py:close with changed": SHORT,
    "rollout/vllm/fleet.py:give_up with changed": SHORT,
    "rollout/vllm/fleet.py:mark_down with changed": SHORT,
    "rollout/vllm/fleet.py:recover with changed": SHORT,
    "rollout/vllm/fleet.py:recover with lock": "another thread brings the server back: start_deadline, and HTTP",
    "rollout/vllm/generation.py:_abort with changed": SHORT,
    "rollout/vllm/generation.py:_change with changed": SHORT,
    "rollout/vllm/generation.py:_hand_out with changed": "inside it waits for Fleet.patience",
    "rollout/vllm/generation.py:_take wait_for": "an idle thread of a server, until Fleet.close",
    "rollout/vllm/generation.py:_take with changed": SHORT,
    "rollout/vllm/process.py:_start with _lock": "a guard is started, or ended within STOPPING",
    "rollout/vllm/process.py:_stop with _lock": "a guard is started, or ended within STOPPING",
    "rollout/vllm/sampler.py:read with changed": SHORT,
    "rollout/vllm/sampler.py:scores ThreadPoolExecutor": HTTP,
    "rollout/vllm/weights.py:pack put": "Directories.put writes files",
    "rollout/vllm/wire.py:_join all_reduce": STUCK,
    "rollout/vllm/wire.py:_join init_rank": STUCK,
    "rollout/vllm/wire.py:broadcast broadcast": STUCK,
    "rollout/vllm/wire.py:own_stream synchronize": STUCK,
    "rollout/vllm/wire.py:connect ThreadPoolExecutor": HTTP,
    "rollout/vllm/wire.py:connect result": HTTP,
    "rollout/vllm/wire.py:send ThreadPoolExecutor": HTTP,
    "rollout/vllm/wire.py:send result": HTTP,
    "rollout/vllm/wire.py:gpu synchronize": "work of this process on its own GPU, which waits for nobody else",
    "rollout/vllm/wire.py:run_within result": DONE,
    "settings/arguments.py:parse put": "Arguments.put keeps a word",
    "verify/asking.py:ask_reward ThreadPoolExecutor": "each call has its reward's deadline, and so has the job",
    "verify/pool.py:_is_lost exception": DONE,
    "verify/pool.py:_restart with _lock": "processes are ended within _CLOSING",
    "verify/pool.py:_start ProcessPool": "each call has a deadline, the end of the pool _CLOSING",
    "verify/pool.py:result exception": DONE,
    "verify/pool.py:submit with _lock": "held while a call is queued, or processes are ended within _CLOSING",
    "view/serve.py:read with _lock": "another request reads the runs' files",
    "model/sharded.py:gather all_gather": OF_GROUP,
    "model/layered.py:round all_reduce": OF_GROUP,
    "model/learner.py:_agree all_reduce": OF_GROUP,
    "model/sharded.py:norm_over all_gather": OF_GROUP,
    "model/sharded.py:_reduce_scatter_by_gloo wait": OF_GROUP,
    "model/sharded.py:round all_reduce": OF_GROUP,
    "model/sharded.py:say_largest all_gather": OF_GROUP,
    "model/sharded.py:sum_gradients reduce_scatter": OF_GROUP,
    "ranks/world.py:_announce broadcast_object_list": OF_GROUP,
    "ranks/world.py:_collect gather_object": OF_GROUP,
    "ranks/world.py:_receive broadcast_object_list": OF_GROUP,
    "ranks/world.py:follow gather_object": OF_GROUP,
    "training/shards.py:__init__ ThreadPoolExecutor": "World.await_reports has DEADLINE",
    "training/build.py:without_progress_bars with _QUIET": "another run of this process loads or writes a model",
    "training/checkpoint.py:__init__ ThreadPoolExecutor": "Keeper.wait has a deadline, and close does not wait",
    "training/checkpoint.py:close shutdown": "wait=False",
    "training/checkpoint.py:write wait": KEEPER,
    "training/training.py:finish wait": KEEPER,
    "training/training.py:save_checkpoint wait": KEEPER,
    "training/training.py:write_checkpoint wait": KEEPER,
    "model/adapter_files.py:read_config from_pretrained": "a directory is read",
    "model/configs.py:file_of cached_file": HUB_ASKED,
    "model/configs.py:read_config from_pretrained": HUB_ASKED,
    "model/checkpoint.py:match_weights from_pretrained": HUB_ASKED,
    "model/checkpoint.py:read_tokenizer from_pretrained": HUB_ASKED,
    "model/loading.py:load_model from_pretrained": HUB_ASKED,
    "model/embedded.py:_convert from_pretrained": "the embedded model is a file",
    "model/embedded.py:_tokenizer from_pretrained": "the embedded model is a file",
    "replay/weights.py:_base from_pretrained": HUB_ASKED,
    "replay/weights.py:_load from_pretrained": HUB_ASKED,
    "replay/weights.py:tokenizer from_pretrained": HUB_ASKED,
    "tasks/files.py:load_hub_rows load_dataset": HUB_ASKED,
}
"""What bounds a wait that has no deadline of its own."""

LOCK = re.compile(r"lock$|mutex|condition|changed$|semaphore|QUIET", re.IGNORECASE)


def waits(source: str, file: str) -> list[str]:
    """The blocking calls of a Python file without a deadline, each as "file:function call"."""
    return sorted(f"{file}:{function} {name}" for function, name in _walk(ast.parse(source), ""))


def _walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call) and (name := _blocking(child)):
            yield inner, name
        if isinstance(child, ast.With):
            yield from (
                (inner, f"with {name}") for item in child.items if LOCK.search(name := _name(item.context_expr))
            )
        yield from _walk(child, inner)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _blocking(call: ast.Call) -> str:
    """The name of a call that may block without a deadline; "" for any other."""
    name, owner = _name(call.func), _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "timeout" in given and not (isinstance(given["timeout"], ast.Constant) and given["timeout"].value is None):
        return ""
    if owner == "subprocess" and name in SUBPROCESS:
        return name
    if name == "wait" and owner in ("", "futures"):  # concurrent.futures.wait(futures, deadline)
        return name if len(call.args) < 2 else ""
    if name in BARE and isinstance(call.func, ast.Attribute):
        return name if _is_none(call.args) and set(given) <= {"timeout", "block", "blocking"} else ""
    if name == "poll" and len(call.args) == 1 and _is_none(call.args):  # without an argument it returns at once
        return name
    if name in PLACE:
        return name if len(call.args) <= PLACE[name] else ""
    return name if name in ALWAYS else ""


def _is_none(arguments: list[ast.expr]) -> bool:
    """Whether nothing is given, or None."""
    return not arguments or (isinstance(arguments[0], ast.Constant) and arguments[0].value is None)


def everything() -> list[str]:
    paths = sorted(SOURCES.rglob("*.py"))
    return [wait for path in paths for wait in waits(path.read_text(), path.relative_to(SOURCES).as_posix())]


def test_every_wait_has_a_deadline_or_a_reason():
    unbounded = set(everything())
    assert sorted(unbounded - set(BOUNDED)) == [], "give these a deadline, or say in BOUNDED what bounds them"
    assert sorted(set(BOUNDED) - unbounded) == [], "these entries of BOUNDED stand for nothing any more"


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("thread.join()", "join"),
        ("thread.join(timeout=None)", "join"),
        ("process.wait(None)", "wait"),
        ("jobs.get()", "get"),
        ("jobs.get(block=True)", "get"),
        ("jobs.put(1)", "put"),
        ("future.result()", "result"),
        ("changed.wait_for(ready)", "wait_for"),
        ("lock.acquire()", "acquire"),
        ("connection.recv()", "recv"),
        ("connection.poll(None)", "poll"),
        ("process.communicate()", "communicate"),
        ("subprocess.run(['git'])", "run"),
        ("subprocess.check_output(['git'])", "check_output"),
        ("urllib.request.urlopen(url)", "urlopen"),
        ("pool.request('GET', url)", "request"),
        ("concurrent.futures.wait(jobs)", "wait"),
        ("wait(jobs)", "wait"),
        ("as_completed(jobs)", "as_completed"),
        ("ThreadPoolExecutor(4)", "ThreadPoolExecutor"),
        ("executor.shutdown()", "shutdown"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("dist.barrier()", "barrier"),
        ("thread.join(5)", ""),
        ("', '.join(words)", ""),
        ("process.wait(timeout=seconds)", ""),
        ("table.get(key)", ""),
        ("jobs.get(timeout=1)", ""),
        ("changed.wait_for(ready, 5)", ""),
        ("connection.poll()", ""),
        ("wait(jobs, 5)", ""),
        ("subprocess.run(['git'], timeout=5)", ""),
        ("runner.run()", ""),
    ],
)
def test_a_new_wait_is_found(call, found):
    source = f"class A:\n    def f(self):\n        return [{call}]"
    assert waits(source, "a.py") == ([f"a.py:f {found}"] if found else [])


def test_a_lock_is_found_where_it_is_held():
    source = "def f(self):\n    with self._lock, open(name):\n        with self.fleet.changed:\n            pass"
    assert waits(source, "a.py") == ["a.py:f with _lock", "a.py:f with changed"]


@pytest.fixture(autouse=True)
def own_client():
    yield
    huggingface_hub.set_client_factory(_http.default_client_factory)


def test_the_hub_is_not_waited_for_for_ever(monkeypatch):
    """A server that accepts and never answers; huggingface_hub's own client would wait on."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    huggingface_hub.set_client_factory(lambda: httpx.Client(timeout=None))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub.limit_waits()
        with pytest.raises(httpx.ReadTimeout):
            huggingface_hub.get_session().get(f"http://127.0.0.1:{silent.getsockname()[1]}/api/models")


def test_a_client_with_deadlines_of_its_own_keeps_them():
    huggingface_hub.set_client_factory(lambda: httpx.Client(timeout=3))
    hub.limit_waits()
    assert huggingface_hub.get_session().timeout.read == 3


def test_the_examples():
    assert doctest.testmod(hub).attempted == 1


class Deaf:
    """A connection whose other side has begun to write and went silent; killing it closes it."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def send(self, what: object) -> None: ...

    def poll(self, seconds: float) -> bool:
        return True

    def recv_bytes(self, most: int) -> bytes:
        assert self.gone.wait(20), "it waits on"
        raise EOFError

    def close(self) -> None: ...


def test_a_process_that_stops_in_the_middle_of_a_reply_is_ended(monkeypatch):
    monkeypatch.setattr(chat, "ENDING", 0.05)
    connection, joined = Deaf(), []
    process = SimpleNamespace(kill=connection.gone.set, join=joined.append, exitcode=-9)
    templates = chat.Templates(deadline=0.05)
    templates._process, templates._ready, templates._end = (process, connection), True, lambda: None  # type: ignore
    with pytest.raises(chat.TemplateError, match="ended with exit code -9"):
        templates.render("", {}, [])
    assert joined == [0.05]


def test_a_worker_that_never_reads_what_it_is_to_do_is_ended(monkeypatch):
    """More than a pipe holds, to a process that only sleeps."""
    monkeypatch.setattr(workers, "STARTING", 0.3)
    monkeypatch.setattr(workers.Launch, "_pickle_task", lambda launch, process: memoryview(bytes(1 << 20)))
    monkeypatch.setattr(sys, "executable", shutil.which("sleep"))
    original = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: original([command[0], "60"], **how))
    with pytest.raises(OSError, match=r"ended before it had read .* within|does not read for 0\.3 s"):
        workers.Process(target=print).start()
