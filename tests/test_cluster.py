"""Clusters: `lagrpo check-cluster` on two ranks, and the files of examples/cluster."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from ranks import call_on_ranks
from vllm_servers import FakeServer

from lagrpo.cli import add_vllm_serve_arguments, read_train_words, split_words
from lagrpo.distributed import shared
from lagrpo.lifecycle import check_cluster
from lagrpo.settings.command_line import CommandParser
from lagrpo.settings.load import load_settings
from lagrpo.types import JsonObject

CLUSTER = Path(__file__).parent.parent / "examples" / "cluster"


def documents(name: str) -> list[JsonObject]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text(encoding="utf-8")))


def command_of_pod(name: str) -> list[str]:
    pod: Any = documents(name)[1]["spec"]["template"]["spec"]
    return pod["containers"][0]["command"]


def read_script(name: str) -> str:
    """The text of a batch file, or the commands of a SkyPilot task."""
    if name.endswith(".yaml"):
        return documents(name)[0]["run"]
    return (CLUSTER / name).read_text(encoding="utf-8")


def command_of_script(name: str, word: str) -> list[str]:
    """The words of the command that has a word, with the value 2 for every variable."""
    lines = read_script(name).replace("\\\n", " ").splitlines()
    (command,) = (line for line in lines if f" {word} " in line and not line.startswith("#"))
    command, _, _ = command.partition('"$@"')
    return re.sub(r'"[^"]*\$[^"]*"', "2", command).removesuffix("&").split()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command_of_pod("lagrpo-job.yaml"), id="kubernetes"),
        pytest.param(command_of_script("lagrpo.sbatch", "train"), id="slurm"),
        pytest.param(command_of_script("lagrpo-servers.sbatch", "train"), id="slurm, servers"),
        pytest.param(command_of_script("lagrpo.sky.yaml", "train"), id="skypilot"),
    ],
)
def test_commands_are_words_that_torchrun_and_lagrpo_take(command):
    from torch.distributed.run import get_args_parser

    words = command[command.index("torchrun") + 1 :]
    launched = get_args_parser().parse_args(words)
    assert (launched.module, launched.training_script, launched.nnodes) == (True, "lagrpo", "2")
    arguments, changes = read_train_words(words[words.index("train") + 1 :])
    assert arguments.resume == "auto"
    assert "run.name" in changes
    assert (changes.get("rollout.engine") == "vllm") == ("vllm.urls" in changes)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command_of_pod("lagrpo-servers.yaml"), id="kubernetes"),
        pytest.param(command_of_script("lagrpo-servers.sbatch", "vllm-serve"), id="slurm"),
        pytest.param(command_of_script("lagrpo.sky.yaml", "vllm-serve"), id="skypilot"),
    ],
)
def test_servers_of_a_cluster_are_started_with_words_that_lagrpo_takes(command):
    words, words_of_vllm = split_words(command)
    parser = CommandParser()
    add_vllm_serve_arguments(parser)
    arguments = parser.parse_args(words[words.index("vllm-serve") + 1 :])
    assert arguments.host == "0.0.0.0"
    assert words_of_vllm[1].startswith("--data-parallel-size")


@pytest.mark.parametrize("name", ["lagrpo.sbatch", "lagrpo-servers.sbatch", "lagrpo.sky.yaml"])
def test_scripts_of_a_cluster_are_valid_bash(name):
    subprocess.run(["bash", "-n"], input=read_script(name), encoding="utf-8", check=True)


def test_nodes_of_the_servers_are_a_component_of_their_own():
    options = re.findall(r"(?m)^#SBATCH (.*)$", read_script("lagrpo-servers.sbatch"))
    trainers, servers = options[: options.index("hetjob")], options[options.index("hetjob") + 1 :]
    for component in (trainers, servers):
        names = [option.partition("=")[0] for option in component]
        assert {"--nodes", "--gpus-per-node", "--cpus-per-task"} <= set(names)
        assert len(names) == len(set(names))


def test_service_of_the_servers_selects_their_pods():
    service, servers = documents("lagrpo-servers.yaml")
    assert service["spec"]["selector"] == servers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == servers["spec"]["selector"]["matchLabels"]
    assert service["metadata"]["name"] == servers["spec"]["serviceName"]


# The command


def check_as_rank(directories: list[Path], fault: str) -> tuple[bool, str]:
    """The result of check-cluster and its output, on a rank; rank 1 has a fault."""
    is_faulty = os.environ["RANK"] == "1"
    settings = load_settings({"run.output_dir": str(directories[int(os.environ["RANK"])])})
    with contextlib.ExitStack() as patches, contextlib.redirect_stdout(io.StringIO()) as out:
        patches.enter_context(patch.object(shared, "VISIBLE_WITHIN", 0.0))
        patches.enter_context(patch.dict(check_cluster.MEGABYTES, {"cpu": 1}))
        if is_faulty and fault == "versions":
            patches.enter_context(patch.object(check_cluster, "package_version", lambda _: "9"))
        if is_faulty and fault == "arithmetic":
            randn = check_cluster.torch.randn
            other = lambda *size, **_: randn(*size)  # noqa: E731
            patches.enter_context(patch.object(check_cluster.torch, "randn", other))
        passed = check_cluster.check_cluster(settings)
    return passed, out.getvalue()


@pytest.mark.parametrize("fault", ["none", "directory", "versions", "arithmetic"])
def test_check_of_a_cluster_finds_the_fault_of_a_rank(tmp_path, fault):
    (tmp_path / "other").mkdir()
    second = tmp_path / ("other" if fault == "directory" else "shared")
    results = call_on_ranks(2, check_as_rank, [tmp_path / "shared", second], fault)
    (passed, text), (passed_on_rank1, text_of_rank1) = results
    grades = {name: grade for grade, name, *_ in map(str.split, text.splitlines())}
    checks = ["directory", "exchange", "versions", "arithmetic", "servers"]
    assert grades == {name: "FAILED" if name == fault else "ok" for name in checks}
    assert passed == passed_on_rank1 == (fault == "none")
    assert text_of_rank1 == ""


def test_check_of_one_process_finds_a_directory_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    for directory, passes in ((tmp_path / "runs", True), (tmp_path / "file" / "runs", False)):
        settings = load_settings({"run.output_dir": str(directory)})
        assert check_cluster.check_cluster(settings) == passes
    grades = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "direct" in line]
    assert grades == ["ok", "FAILED"]


@pytest.mark.parametrize(
    ("version", "fits"), [("0.32.0", True), ("0.31.1", False), ("0.320", False)]
)
def test_check_of_a_server_needs_the_version_that_lagrpo_is_written_for(version, fits):
    with FakeServer() as fake:
        fake.answers["/version"] = lambda body: (200, {"version": version})
        if fits:
            assert version in check_cluster.ask_servers((fake.url,))
        else:
            with pytest.raises(ValueError, match=f"has vLLM {version}"):
                check_cluster.ask_servers((fake.url,))
