"""lagrpo in a notebook: the cells run in a real kernel of Jupyter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from lagrpo.types import JsonObject

SECONDS = 200.0  # for a cell, on a busy machine


class Notebook:
    """A kernel that runs cells. `outputs` are the messages of the last cell."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def run(self, cell: str) -> list[tuple[str, JsonObject]]:
        """Returns what a cell shows: the type and the content of each message."""
        request = self.client.execute(cell)
        outputs: list[tuple[str, JsonObject]] = []
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=SECONDS)
            except Empty:
                pytest.fail(f"the cell did not end within {SECONDS:g} s: {outputs}")
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                return outputs
            outputs.append((message["msg_type"], content))


@pytest.fixture(scope="module")
def notebook(tmp_path_factory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    manager, client = start_new_kernel(cwd=str(folder), startup_timeout=SECONDS)
    yield Notebook(client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def train(model: Path) -> str:
    """A cell that defines rewards and trains for three batches."""
    return f"""
import lagrpo

async def right(completion, answer):
    return float(answer in completion)

result = lagrpo.train(
    model={str(model)!r},
    data=[{{"prompt": f"{{n}} + 1?", "answer": str(n + 1)}} for n in range(20)],
    rewards=[right, lambda completion, answer: 0.5],
    settings={{
        "model.dtype": "float32",
        "rollout.num_generations": 2,
        "rollout.max_completion_length": 4,
        "rollout.max_prompt_length": 64,
        "schedule.batches": 3,
        "schedule.prompts_per_batch": 2,
        "eval.at_start": False,
    }},
)
"""


def test_training_updates_one_table_in_place(notebook, model):
    outputs = notebook.run(train(model))
    errors = [content["evalue"] for kind, content in outputs if kind == "error"]
    assert errors == []
    tables = [
        content["data"]["text/html"]
        for kind, content in outputs
        if kind in ("display_data", "update_display_data") and "<table>" in str(content)
    ]
    table_events = [
        kind for kind, content in outputs if "display_data" in kind and "<b>" in str(content)
    ]
    assert table_events[0] == "display_data"
    assert set(table_events[1:]) == {"update_display_data"}
    display_ids = {
        content["transient"]["display_id"]
        for kind, content in outputs
        if kind == "update_display_data"
    }
    assert len(display_ids) == 1
    assert re.findall(r"<tr><td>(\d)</td>", tables[-1]) == ["1", "2", "3"]
    assert "3 of 3 batches" in tables[-1]


def test_result_is_five_lines(notebook):
    outputs = notebook.run("result")
    (text,) = [content["data"]["text/plain"] for kind, content in outputs if "data" in content]
    assert len(text.splitlines()) == 5


def test_settings_error_is_one_line(notebook):
    outputs = notebook.run("import lagrpo\nlagrpo.train(settings={'optimizer.lr': 1})")
    (error,) = [content for kind, content in outputs if kind == "error"]
    assert len(error["traceback"]) == 1
    assert error["traceback"][0] == f"SettingsError: {error['evalue']}"
    assert "optimizer.learning_rate" in error["evalue"]


RAISING = """
import lagrpo

def wrong(completion, answer):
    return 1 / (len(answer) - 1)

lagrpo.train(
    model={model!r},
    data=[{{"prompt": f"{{n}} + 1?", "answer": "1"}} for n in range(20)],
    rewards=wrong,
    settings={{"model.dtype": "float32", "rollout.num_generations": 2, "eval.at_start": False,
              "rollout.max_prompt_length": 64, "rollout.max_completion_length": 4}},
)
"""


def test_failing_reward_is_shown_with_its_line_and_without_a_traceback(notebook, model):
    outputs = notebook.run(RAISING.format(model=str(model)))
    (error,) = [content for kind, content in outputs if kind == "error"]
    shown = "\n".join(error["traceback"])
    assert shown.startswith("RewardError: ")
    assert "ZeroDivisionError" in shown
    assert "(line 4 of" in shown
    assert "File" not in shown


def test_interrupt_before_the_first_batch_is_one_line(notebook, model):
    cell = "import os, signal\nimport lagrpo.startup.build as build\n"
    cell += "build.load_tasks = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    cell += train(model)
    (error,) = [content for kind, content in notebook.run(cell) if kind == "error"]
    assert error["traceback"] == ["Interrupted: SIGINT"]
