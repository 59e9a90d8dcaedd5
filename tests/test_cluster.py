"""The files of examples/cluster: what can be checked of them without a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lagrpo.cli import read_train_words
from lagrpo.types import JsonObject

CLUSTER = Path(__file__).parent.parent / "examples" / "cluster"
JOB, BATCH = CLUSTER / "lagrpo-job.yaml", CLUSTER / "lagrpo.sbatch"


def pod() -> JsonObject:
    documents: Any = yaml.safe_load_all(JOB.read_text(encoding="utf-8"))
    return list(documents)[1]["spec"]["template"]["spec"]


def slurm_command() -> list[str]:
    """The words of the command with srun in the batch file, with a value for every variable."""
    lines = BATCH.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (command,) = (line for line in lines if line.startswith("srun "))
    command, _, _ = command.partition('"$@"')
    return re.sub(r'"[^"]*\$[^"]*"', "2", command).split()


@pytest.mark.parametrize(
    "command", [pod()["containers"][0]["command"], slurm_command()], ids=["kubernetes", "slurm"]
)
def test_commands_are_words_that_torchrun_and_lagrpo_take(command):
    from torch.distributed.run import get_args_parser

    words = command[command.index("torchrun") + 1 :]
    launched = get_args_parser().parse_args(words)
    assert (launched.module, launched.training_script, launched.nnodes) == (True, "lagrpo", "2")
    arguments, changes = read_train_words(words[words.index("train") + 1 :])
    assert arguments.resume == "auto"
    assert "run.name" in changes
