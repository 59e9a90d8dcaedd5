"""The files of examples/cluster: what can be checked of them without a cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lagrpo.errors import SettingsError
from lagrpo.settings.arguments import parse
from lagrpo.settings.schema import Settings
from lagrpo.settings.toml import validate

CLUSTER = Path(__file__).parent.parent / "examples" / "cluster"
JOB, BATCH = CLUSTER / "lagrpo-job.yaml", CLUSTER / "lagrpo.sbatch"


def documents() -> list[dict[str, Any]]:
    found: Any = yaml.safe_load_all(JOB.read_text())
    return list(found)


def pod() -> dict[str, Any]:
    return documents()[1]["spec"]["template"]["spec"]


def test_the_objects_fit_the_schemas_of_kubernetes():
    """Strictly: a field that Kubernetes does not have is an error."""
    version = kubernetes_validate.latest_version()
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)
    wrong = documents()[1]
    wrong["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_the_pods_find_each_other():
    service, job = documents()
    command = pod()["containers"][0]["command"]
    endpoint = next(word for word in command if word.startswith("--rdzv-endpoint="))
    assert endpoint == f"--rdzv-endpoint={job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert pod()["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"--nnodes={job['spec']['completions']}" in command
    assert f"--nproc-per-node={pod()['containers'][0]['resources']['limits']['nvidia.com/gpu']}" in command


def test_the_volumes_that_are_mounted_are_there():
    mounted = {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod()["volumes"]}


def words_of_train(command: list[str]) -> list[str]:
    return command[command.index("train") + 1 :]


def slurm_command() -> list[str]:
    """The words of the last command of the batch file, with a value for every variable."""
    last = BATCH.read_text().replace("\\\n", " ").strip().splitlines()[-1].removesuffix('"$@"')
    return re.sub(r'"[^"]*\$[^"]*"', "2", last).split()


@pytest.mark.parametrize("command", [pod()["containers"][0]["command"], slurm_command()], ids=["kubernetes", "slurm"])
def test_the_commands_are_words_that_torchrun_and_lagrpo_take(command):
    from torch.distributed.run import get_args_parser

    words = command[command.index("torchrun") + 1 :]
    launched = get_args_parser().parse_args(words)
    assert (launched.module, launched.training_script, launched.nnodes) == (True, "lagrpo", "2")
    given = parse(Settings, words_of_train(words))
    assert validate(Settings, {}, given.overrides, "command").run.resume == "auto"
    with pytest.raises(SettingsError):
        validate(Settings, {}, parse(Settings, ["--run.resumed", "auto"]).overrides, "command")


def test_the_batch_file_is_one_that_bash_reads_and_whose_options_slurm_has(tmp_path):
    assert subprocess.run(["bash", "-n", BATCH], capture_output=True, text=True).stderr == ""
    (tmp_path / "wrong").write_text(BATCH.read_text() + "\nif true; then\n")
    assert subprocess.run(["bash", "-n", tmp_path / "wrong"], capture_output=True).returncode != 0
    options = re.findall(r"^#SBATCH --([a-z-]+)", BATCH.read_text(), re.M)
    # of sbatch(1), Slurm 24.11; Slurm itself could not be had
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue", "open-mode"}
    assert set(options) == known | {"output", "signal"}
